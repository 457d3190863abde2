"""The rows: each piece of work that is measured, declared once.

Sizes in names are decimal: 1 KB is 10**3 bytes, 1 MB is 10**6 bytes, and GB/s counts 10**9 bytes of
*output* per second. Inputs are float32 unless the name says otherwise, seeded by their position, and
every page of them is written before anything is timed.

What each library does with a row follows from three of its fields, so that all do the same work:

=============  ============================================================================
plain join     every library; Arrow where the inputs are contiguous along axis 0
``dtype``      the inputs are cast on the way; MAX and Arrow cannot
``reordered``  the inputs' layout differs from the C-order batch that a loader needs. NumPy's own
               fresh result would keep the inputs' layout, so its baseline writes to a fresh C-order
               array; Arrow cannot
``stacked``    the inputs get a new first axis (MAX joins views that already have it)
=============  ============================================================================
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FAMILIES", "STAGING", "Row"]

# Columns of the ordinary 2-d inputs: one row of float32 is 4 KB.
COLUMNS = 1000
# Random numbers drawn per array; larger arrays repeat them. A prime, so that no two rows look alike.
DRAWN = 65_537


@dataclass(frozen=True)
class Row:
    """One piece of work, and how much faster than NumPy it is meant to be."""

    name: str
    make: Callable[[], list[np.ndarray]]
    axis: int = 0
    stacked: bool = False
    reordered: bool = False
    dtype: str | None = None
    # Goals, as ratios: NumPy's fresh time over ours, NumPy's out= time over our out=.
    fresh_goal: float | None = None
    out_goal: float | None = None
    # Goal in microseconds for either, where a ratio to a sub-microsecond call would say nothing.
    microseconds_goal: float | None = None

    @property
    def max_can(self) -> bool:
        return self.dtype is None

    @property
    def arrow_can(self) -> bool:
        return self.axis == 0 and self.dtype is None and not (self.reordered or self.stacked)

    def result_dtype(self, arrays: Sequence[np.ndarray]) -> np.dtype:
        if self.dtype == "bfloat16":
            import ml_dtypes  # an optional package, needed by one row only

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype) if self.dtype else arrays[0].dtype

    def empty_result(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Fresh memory in C order of the result's shape and dtype."""
        shape = list(arrays[0].shape)
        if self.stacked:
            shape.insert(self.axis, len(arrays))
        else:
            shape[self.axis] = sum(array.shape[self.axis] for array in arrays)
        return np.empty(shape, self.result_dtype(arrays))

    def expected(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """NumPy's answer, in C order."""
        join = np.stack if self.stacked else np.concatenate
        return join(arrays, axis=self.axis, out=self.empty_result(arrays))


def random_array(shape: tuple[int, ...], dtype: npt.DTypeLike, seed: int) -> np.ndarray:
    """A C-order array whose every page has been written."""
    dtype = np.dtype(dtype)
    array = np.empty(shape, dtype)
    flat = array.reshape(-1)
    generator = np.random.default_rng(seed)
    n_drawn = min(DRAWN, flat.size)
    if dtype.kind == "u":
        drawn = generator.integers(0, np.iinfo(dtype).max, n_drawn, dtype, endpoint=True)
    else:
        drawn = generator.standard_normal(n_drawn).astype(dtype)
    for start in range(0, flat.size, n_drawn):
        piece = flat[start : start + n_drawn]
        piece[:] = drawn[: piece.size]
    return array


def rows_of(*n_rows: int, dtype: str = "float32", columns: int = COLUMNS) -> Callable[[], list[np.ndarray]]:
    """Make one array of ``columns`` columns for each number of rows."""
    return lambda: [random_array((n, columns), dtype, seed) for seed, n in enumerate(n_rows)]


def fortran_rows_of(*n_rows: int, dtype: str) -> Callable[[], list[np.ndarray]]:
    """Make the same in Fortran order."""
    return lambda: [random_array((COLUMNS, n), dtype, seed).T for seed, n in enumerate(n_rows)]


def images(n_images: int) -> list[np.ndarray]:
    """Channel-first views of decoded (512, 512, 3) images."""
    return [random_array((512, 512, 3), "uint8", seed).transpose(2, 0, 1) for seed in range(n_images)]


STAGING = (
    Row("20x20MB", rows_of(*[5000] * 20), fresh_goal=2.0, out_goal=1.7),
    Row("2x200MB", rows_of(50_000, 50_000), fresh_goal=2.0, out_goal=1.7),
    Row("1x400MB", rows_of(100_000), fresh_goal=2.0, out_goal=1.7),
    Row("1x400MB+12x4KB", rows_of(100_000, *[1] * 12), fresh_goal=2.0, out_goal=1.7),
    Row("20x2MB", rows_of(*[500] * 20), fresh_goal=1.6, out_goal=1.3),
    Row("4x12MB-uint16", rows_of(*[6000] * 4, dtype="uint16"), fresh_goal=1.6, out_goal=1.3),
    Row("64x1MB", rows_of(*[250] * 64), fresh_goal=1.6, out_goal=1.3),
    Row("2x16B", rows_of(1, 1, columns=4), microseconds_goal=5.0),
    Row("1000x4KB", rows_of(*[1] * 1000), fresh_goal=1 / 1.2, out_goal=1 / 1.2),
    Row("64x64KB", rows_of(*[16] * 64), fresh_goal=1 / 1.2, out_goal=1 / 1.2),
    Row("fortran-float32", fortran_rows_of(*[5000] * 20, dtype="float32"), reordered=True, fresh_goal=2.5),
    Row("fortran-float64", fortran_rows_of(*[2500] * 20, dtype="float64"), reordered=True, fresh_goal=2.5),
    Row("images-hwc-chw", lambda: images(64), stacked=True, reordered=True, fresh_goal=3.0),
    Row("axis1-64-columns", rows_of(*[39_062] * 20, columns=64), axis=1, fresh_goal=2.5),
    Row("float64-float32", rows_of(*[2500] * 20, dtype="float64"), dtype="float32", fresh_goal=1.5),
    Row("float32-float16", rows_of(*[6500] * 4), dtype="float16", fresh_goal=8.0),
    Row("float32-bfloat16", rows_of(*[6500] * 4), dtype="bfloat16", fresh_goal=3.0),
)

# A later family of operations adds its rows here, and `--only` finds them.
FAMILIES: dict[str, tuple[Row, ...]] = {"staging": STAGING}
