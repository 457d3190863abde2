"""How each library does a row. One function per library; its name is imported inside.

A library returns its calls by mode: ``fresh`` makes a new result every time, ``out=`` writes to one that
is reused. What a caller would prepare once (torch's and Arrow's views of the inputs) is prepared outside
the clock, in the library's favour. Every library's ``out=`` is NumPy's memory with its pages touched, so
that all write to the same kind of pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from .cases import Row

__all__ = ["CONTESTANTS", "LIBRARIES", "Call", "Library", "as_bytes", "same_bytes"]

# MAX's own default: the number of its threads does not follow the number of CPUs.
MAX_WORKERS = 24
# Bytes compared at a time, so that checking 400 MB does not need another 400 MB.
COMPARED_BYTES = 1 << 24


@dataclass(frozen=True)
class Call:
    """What is timed, and how to see its result as a NumPy array."""

    run: Callable[[], Any]
    view: Callable[[Any], np.ndarray] = np.asarray


Calls = dict[str, Call]


@dataclass(frozen=True)
class Library:
    """A peer, the modes it has, and how it does a row; ``start`` returns how many threads it uses."""

    package: str
    modes: tuple[str, ...]
    calls: Callable[[Row, list[np.ndarray]], Calls]
    start: Callable[[int], int]
    forget: Callable[[], None] = lambda: None

    def facts(self, n_threads: int) -> dict[str, Any]:
        threads = self.start(n_threads)
        # The module's own word first: accel_ops may run from a checkout that was never installed.
        installed = getattr(import_module(self.package), "__version__", None) or version(self.package)
        return {"version": installed, "threads": threads}


def reused_result(row: Row, arrays: list[np.ndarray]) -> np.ndarray:
    """An output whose pages have been touched, with nothing that could pass for the answer in it."""
    out = row.empty_result(arrays)
    out.view(np.uint8).fill(0xA5)
    return out


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def same_bytes(result: np.ndarray, expected: np.ndarray) -> bool:
    """Whether a result is the answer, bit for bit and in C order (read here as flat bytes)."""
    if not result.flags.c_contiguous or result.nbytes != expected.nbytes:
        return False
    left, right = as_bytes(result), as_bytes(expected)
    pieces = range(0, left.size, COMPARED_BYTES)
    return all(np.array_equal(left[at : at + COMPARED_BYTES], right[at : at + COMPARED_BYTES]) for at in pieces)


def start_serial(_n_threads: int) -> int:
    return 1


def numpy_calls(row: Row, arrays: list[np.ndarray]) -> Calls:
    join = np.stack if row.stacked else np.concatenate
    out = reused_result(row, arrays)
    if row.reordered:

        def fresh() -> np.ndarray:
            return join(arrays, axis=row.axis, out=row.empty_result(arrays))

    elif row.dtype is not None:
        dtype = row.result_dtype(arrays)

        def fresh() -> np.ndarray:
            return join(arrays, axis=row.axis, dtype=dtype)

    else:

        def fresh() -> np.ndarray:
            return join(arrays, axis=row.axis)

    return {"fresh": Call(fresh), "out=": Call(lambda: join(arrays, axis=row.axis, out=out))}


def accel_ops_start(_n_threads: int) -> int:
    import accel_ops as ops

    return ops.get_num_threads()


def accel_ops_forget() -> None:
    import accel_ops as ops

    ops.release_host_memory()


def accel_ops_calls(row: Row, arrays: list[np.ndarray]) -> Calls:
    import accel_ops as ops

    join = ops.stack if row.stacked else ops.concatenate
    out = reused_result(row, arrays)
    calls = {"out=": Call(lambda: join(arrays, axis=row.axis, out=out))}
    if row.dtype is None:
        calls["fresh"] = Call(lambda: join(arrays, axis=row.axis))
    else:
        dtype = row.result_dtype(arrays)
        calls["fresh"] = Call(lambda: join(arrays, axis=row.axis, dtype=dtype))
    return calls


def torch_start(n_threads: int) -> int:
    import torch

    torch.set_num_threads(n_threads)
    return torch.get_num_threads()


def torch_calls(row: Row, arrays: list[np.ndarray]) -> Calls:
    import torch

    join = torch.stack if row.stacked else torch.cat
    tensors = [torch.from_numpy(array) for array in arrays]
    out_array = reused_result(row, arrays)
    if row.dtype == "bfloat16":  # from_numpy knows no bfloat16: hand the bits over as integers
        out = torch.from_numpy(out_array.view(np.uint16)).view(torch.bfloat16)
    else:
        out = torch.from_numpy(out_array)
    if row.dtype is None:

        def fresh() -> Any:
            return join(tensors, dim=row.axis)

    else:  # only out= can cast on the way

        def fresh() -> Any:
            return join(tensors, dim=row.axis, out=torch.empty(out.shape, dtype=out.dtype))

    def view(tensor: Any) -> np.ndarray:
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    return {"fresh": Call(fresh, view), "out=": Call(lambda: join(tensors, dim=row.axis, out=out), view)}


def max_start(_n_threads: int) -> int:
    from max.nn.parallel.numpy_parallel_ops import ParallelArrayOps  # noqa: F401 - is it installed?

    return MAX_WORKERS


def max_calls(row: Row, arrays: list[np.ndarray]) -> Calls:
    from max.nn.parallel.numpy_parallel_ops import ParallelArrayOps

    if not row.max_can:
        return {}
    parallel = ParallelArrayOps(max_workers=MAX_WORKERS)
    inputs = [np.expand_dims(array, row.axis) for array in arrays] if row.stacked else arrays
    return {"fresh": Call(lambda: parallel.concatenate(inputs, axis=row.axis), lambda buffer: buffer.to_numpy())}


def arrow_start(_n_threads: int) -> int:
    import pyarrow  # noqa: F401 - is it installed?

    return 1


def arrow_calls(row: Row, arrays: list[np.ndarray]) -> Calls:
    import pyarrow

    if not row.arrow_can:
        return {}
    kind = pyarrow.from_numpy_dtype(arrays[0].dtype)
    columns = [pyarrow.Array.from_buffers(kind, x.size, [None, pyarrow.py_buffer(x)]) for x in arrays]
    return {
        "fresh": Call(
            lambda: pyarrow.concat_arrays(columns),
            lambda joined: np.frombuffer(joined.buffers()[1], np.uint8)[: joined.nbytes],
        )
    }


LIBRARIES = {
    "NumPy": Library("numpy", ("fresh", "out="), numpy_calls, start_serial),
    "accel_ops": Library("accel_ops", ("fresh", "out="), accel_ops_calls, accel_ops_start, accel_ops_forget),
    "torch.cat": Library("torch", ("fresh", "out="), torch_calls, torch_start),
    "MAX": Library("max", ("fresh",), max_calls, max_start),
    "Arrow": Library("pyarrow", ("fresh",), arrow_calls, arrow_start),
}
CONTESTANTS = [(name, mode) for name, library in LIBRARIES.items() for mode in library.modes]
