"""Arrays of every kind for property tests, the engine on small data, and comparison to the last bit."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops import staging as public
from accel_ops.cpu import copying, plan, staging

settings.register_profile(
    "arrays",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("arrays")

# What starts the threads and picks the kernels, so small that a few hundred bytes exercise all of it.
_ENGINES: dict[str, dict[str, int]] = {
    "as shipped": {},
    "tiny pieces": {
        "SMALL_BYTES": 1,
        "SMALL_CHANGED_BYTES": 1,
        "SMALL_ARRAY_BYTES": 1,
        "_TINY_BYTES": 1,
        "_GRAIN_BYTES": 1,
        "_STREAMED_BYTES": 1 << 62,
        "PIECE_BYTES": 64,
        "_RUN_BYTES": 16,
        "_KERNEL_BLOCK_BYTES": 1,
    },
    "tiny pieces streamed": {
        "SMALL_BYTES": 1,
        "SMALL_CHANGED_BYTES": 1,
        "SMALL_ARRAY_BYTES": 40,
        "_TINY_BYTES": 40,
        "_GRAIN_BYTES": 1,
        "_STREAMED_BYTES": 1,
        "PIECE_BYTES": 900,
        "_RUN_BYTES": 48,
        "_KERNEL_BLOCK_BYTES": 64,
    },
}
BUDGETS = (1, 2, 3, 8)
on_every_engine = pytest.mark.parametrize("engine", list(_ENGINES))


@contextlib.contextmanager
def running(engine: str, budget: int = 2) -> Iterator[None]:
    """Run calls on an engine of that name under a thread budget."""
    with pytest.MonkeyPatch.context() as patch, ops.threads(budget):
        for name, value in _ENGINES[engine].items():
            module = next(each for each in (staging, plan, copying, public) if hasattr(each, name))
            patch.setattr(module, name, value)
        yield


# --- dtypes


def _record(**fields: Any) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


PLAIN_DTYPES = [
    np.dtype(code)
    for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D", "G")
]
TIME_DTYPES = [np.dtype(code) for code in ("M8[Y]", "M8[D]", "M8[25s]", "M8[ns]", "M8", "m8[h]", "m8[us]", "m8")]
TEXT_DTYPES = [np.dtype(code) for code in ("S1", "S7", "S16", "U1", "U3", "V1", "V5", "V16")]
SWAPPED_DTYPES = [
    np.dtype(code).newbyteorder() for code in ("i2", "u4", "i8", "f2", "f4", "f8", "F", "D", "M8[s]", "U3")
]
ML_DTYPES = [
    np.dtype(kind)
    for kind in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    )
]
SWAPPED_DTYPES.append(np.dtype(ml_dtypes.bfloat16).newbyteorder())
RECORD_DTYPES = [
    _record(a="i1", b="f8", c="S3"),
    _record(a=np.dtype("bfloat16"), b="M8[D]"),
    np.dtype([("a", "i1"), ("b", "i4"), ("c", "u2")], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["i1", "i4"], "offsets": [1, 8], "itemsize": 16}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i1"], "offsets": [4, 0], "itemsize": 8}),
    _record(a=_record(x="u2", y=_record(z="U2")), b="?"),
    np.dtype([("a", "f4", (2, 3)), ("b", "i1", 2)]),
    _record(a=">i4", b="<f8", c=">U2"),
    np.dtype([("a", ">f4", (2,)), ("b", "i1")]),
]
OWNING_DTYPES = [
    np.dtype(object),
    _record(a="i4", b=object),
    np.dtypes.StringDType(),
    np.dtypes.StringDType(na_object=None),
]
BYTE_DTYPES = PLAIN_DTYPES + TIME_DTYPES + TEXT_DTYPES + SWAPPED_DTYPES + ML_DTYPES + RECORD_DTYPES
DTYPES = BYTE_DTYPES + OWNING_DTYPES

# dtypes that differ in no more than byte order, string length or datetime unit
FAMILIES = [
    [np.dtype(code) for code in codes]
    for codes in (
        ("S1", "S5", "S9"),
        ("<U2", ">U7", "U3"),
        ("<i4", ">i4"),
        (">f8", "<f8"),
        ("<D", ">D"),
        ("M8[D]", "M8[h]", ">M8[s]"),
        ("m8[h]", "m8[m]", "m8[ms]"),
    )
]
FAMILIES += [
    [_record(a="S2", b=">i4"), _record(a="S5", b="<i4")],
    [_record(a="i1", b="i4"), np.dtype([("a", "i1"), ("b", "i4")], align=True)],
]

# --- values

_LONG_DOUBLES = (np.longdouble, np.clongdouble)


class Token:
    """An object of which it is known how many there are."""

    live = 0

    def __init__(self) -> None:
        Token.live += 1

    def __del__(self) -> None:
        Token.live -= 1


def filled(shape: Sequence[int], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Return a new C-ordered array of any bits that make values of the dtype, NaN and NaT among them."""
    rng = np.random.default_rng([seed, *shape])
    n = math.prod(shape)
    if dtype.names is not None:
        result = np.zeros(shape, dtype)
        for position, name in enumerate(dtype.names):
            field = result[name]
            field[...] = filled(field.shape, field.dtype, seed + position)
        return result
    if dtype.kind == "O":
        result = np.empty(n, object)
        for index in range(n):
            result[index] = Token()
        return result.reshape(shape)
    if dtype.kind == "T":
        result = np.array([chr(97 + k % 26) * (k % 23) for k in rng.integers(0, 999, n)], dtype)
        if hasattr(dtype, "na_object") and n:
            result[0] = dtype.na_object
        return result.reshape(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(dtype).reshape(shape)
    if dtype.kind == "U":
        letters = rng.integers(32, 0x3000, n * dtype.itemsize // 4).astype("<u4")
        return letters.view(f"<U{dtype.itemsize // 4}").astype(dtype).reshape(shape)
    if dtype.type in _LONG_DOUBLES:
        real, imaginary = rng.standard_normal((2, n)).astype("g")
        return (real + 1j * imaginary if dtype.kind == "c" else real).reshape(shape)
    if dtype.kind in "mM":
        counts = rng.integers(-(10**5), 10**5, n)
        counts[rng.random(n) < 0.2] = np.iinfo(np.int64).min  # NaT
        return counts.view(dtype.newbyteorder("=")).astype(dtype).reshape(shape)
    return np.frombuffer(bytearray(rng.bytes(n * dtype.itemsize)), dtype).reshape(shape)


# --- layouts


def _sliced(x: np.ndarray) -> np.ndarray:
    whole = np.zeros([2 * length + 1 for length in x.shape], x.dtype)
    part = whole[(*(slice(1, None, 2) for _ in x.shape), ...)]
    part[...] = x
    return part


def _reversed(x: np.ndarray) -> np.ndarray:
    backwards = (slice(None, None, -1),) * x.ndim + (...,)
    return x[backwards].copy()[backwards]


def _half_reversed(x: np.ndarray) -> np.ndarray:
    backwards = (slice(None, None, -1),) * (x.ndim // 2) + (...,)
    return x[backwards].copy()[backwards]


def _broadcast(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[:1], x.shape) if x.ndim and x.size else x


def _column_broadcast(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x[..., :1], x.shape) if x.ndim and x.size else x


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(0, -1).copy().swapaxes(0, -1) if x.ndim else x


def _channels_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.moveaxis(x, 0, -1).copy(), -1, 0) if x.ndim else x


def _padded_rows(x: np.ndarray) -> np.ndarray:
    whole = np.zeros((*x.shape[:-1], x.shape[-1] + 3) if x.ndim else (), x.dtype)
    part = whole[..., : x.shape[-1]] if x.ndim else whole
    part[...] = x
    return part


def _unaligned(x: np.ndarray) -> np.ndarray:
    if x.dtype.hasobject or not x.nbytes:
        return x
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    part = memory.view(x.dtype).reshape(x.shape)
    part[...] = x
    return part


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda x: x,
    "F": lambda x: np.array(x, order="F"),
    "sliced": _sliced,
    "reversed": _reversed,
    "half reversed": _half_reversed,
    "broadcast": _broadcast,
    "column broadcast": _column_broadcast,
    "transposed": _transposed,
    "channels last": _channels_last,
    "padded rows": _padded_rows,
    "unaligned": _unaligned,
}
WRITABLE_LAYOUTS = [name for name in LAYOUTS if "broadcast" not in name]


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """Return the values of an array (broadcast: some of them) in a memory layout."""
    result = LAYOUTS[layout](x)
    assert result.shape == x.shape
    return result


def frozen(x: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written to."""
    view = x.view()
    view.flags.writeable = False
    return view


# --- strategies

budgets = st.sampled_from(BUDGETS)
layouts = st.sampled_from(list(LAYOUTS))
seeds = st.integers(0, 1 << 20)
_lengths = st.integers(0, 6) | st.sampled_from([7, 17, 33, 65])


@st.composite
def shapes(draw: Any, min_dims: int = 1, max_dims: int = 4) -> tuple[int, ...]:
    """Shapes of up to some thousand items, zero sizes among them."""
    shape: list[int] = []
    for _ in range(draw(st.integers(min_dims, max_dims))):
        shape.append(draw(_lengths) if math.prod(shape) < 40 else draw(st.integers(0, 2)))
    return tuple(draw(st.permutations(shape)))


@st.composite
def joins(
    draw: Any, dtypes: Sequence[np.dtype[Any]] = DTYPES, *, mixed: bool = False
) -> tuple[list[np.ndarray], int | None]:
    """Read-only arrays that fit together, and the axis to join them along.

    Args:
        draw: supplied by hypothesis.
        dtypes: one of them is taken, or one for each array.
        mixed: whether each array has a dtype of its own.
    """
    first = draw(shapes())
    axis = draw(st.none() | st.integers(-len(first), len(first) - 1))
    n_arrays = draw(st.integers(1, 5))
    alike = draw(st.booleans())
    dtype = draw(st.sampled_from(dtypes))
    arrays = []
    for _ in range(n_arrays):
        shape = list(first)
        if axis is None and not alike:
            shape = list(draw(shapes(min_dims=0)))
        elif axis is not None and not alike:
            shape[axis] = draw(st.integers(0, 9))
        values = filled(shape, draw(st.sampled_from(dtypes)) if mixed else dtype, draw(seeds))
        arrays.append(frozen(laid_out(values, draw(layouts))))
    return arrays, axis


# --- comparison


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Fail unless two arrays have one class, shape and dtype, and the same bytes in each item.

    Objects are the same where they are identical; the padding of records does not count.
    """
    assert type(actual) is type(expected), f"{type(actual)} is not {type(expected)}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype!r}, not {expected.dtype!r}"
    assert actual.dtype.byteorder == expected.dtype.byteorder
    _assert_same_items(np.asarray(actual), np.asarray(expected))


def _assert_same_items(actual: np.ndarray, expected: np.ndarray) -> None:
    dtype = actual.dtype
    if dtype.names is not None:
        for name in dtype.names:
            _assert_same_items(actual[name], expected[name])
    elif dtype.kind == "O":
        pairs = zip(actual.ravel().tolist(), expected.ravel().tolist(), strict=True)
        assert all(one is other for one, other in pairs), "other objects"
    elif dtype.kind == "T":
        assert actual.tolist() == expected.tolist()
    elif dtype.itemsize:
        different = (_item_bytes(actual) != _item_bytes(expected)).any(axis=-1)
        first = next(iter(np.argwhere(different)), None)
        assert first is None, (
            f"{different.sum()} of {actual.size} items differ, the first at {first}: "
            f"{actual[tuple(first)]!r}, not {expected[tuple(first)]!r}"
        )


def _item_bytes(x: np.ndarray) -> np.ndarray:
    plain = np.array(x, order="C", copy=True, subok=False)
    item = np.frombuffer(plain.tobytes(), np.uint8).reshape(*x.shape, x.dtype.itemsize)
    if x.dtype.type in _LONG_DOUBLES and np.finfo(np.longdouble).nmant == 63:  # 10 of 16 bytes are the number
        numbers = x.dtype.itemsize // np.dtype("g").itemsize
        item = item.reshape(*x.shape, numbers, -1)[..., :10].reshape(*x.shape, 10 * numbers) if x.size else item
    return item


def assert_same_values(actual: np.ndarray, expected: np.ndarray) -> None:
    """Fail unless two arrays are the same to the bit, but for sign and payload of NaN, which casts may choose."""
    assert_same_bits(_with_one_nan(actual), _with_one_nan(expected))


def _with_one_nan(x: np.ndarray) -> np.ndarray:
    if x.dtype.names is not None or x.dtype.kind in "OTSUmM":
        return x
    with np.errstate(invalid="ignore"), contextlib.suppress(TypeError):
        is_nan = x != x
        if is_nan.any():
            x = x.copy()
            x[is_nan] = np.nan
    return x


def outcome(function: Callable[[], Any]) -> tuple[Any, type[BaseException] | None, set[tuple[type, str]]]:
    """Return what a call returned, the class of what it raised, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result: Any = None
        error: type[BaseException] | None = None
        try:
            result = function()
        except Exception as exc:  # noqa: BLE001 - the class is what is compared
            error = type(exc)
    return result, error, {(each.category, str(each.message)) for each in given}


def assert_same_outcome(ours: Callable[[], Any], numpys: Callable[[], Any]) -> None:
    """Fail unless a call does what another one does: result and warnings, or class of the error (or a finer one)."""
    expected, wanted_error, wanted_warnings = outcome(numpys)
    actual, error, given = outcome(ours)
    if wanted_error is None or error is None:
        assert error is wanted_error, f"{error} was raised, not {wanted_error}"
        assert_same_values(actual, expected)
        assert given == wanted_warnings, f"{given} were given, not {wanted_warnings}"
    else:
        assert issubclass(error, wanted_error), f"{error} was raised, not {wanted_error}"
