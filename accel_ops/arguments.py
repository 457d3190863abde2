"""What the arguments of a join must be: arrays, axis, dtype, casts, ``out=`` and the least chunk.

Each check states the rule, the value received and the cure, and raises the error that NumPy raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from accel_ops.cpu import memory
from accel_ops.dispatch import Array
from accel_ops.errors import DTypeMismatchError, ShapeMismatchError, UnsupportedArrayError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = [
    "are_plain",
    "as_array",
    "as_iterable",
    "as_shape",
    "as_subclass",
    "canonical_dtype",
    "check_casting",
    "check_casts",
    "check_out",
    "chunk_bytes",
    "joined_dtype",
    "joined_shape",
    "may_overlap",
    "may_overlap_itself",
    "normalize_axis",
    "plain_dtype",
]

_T = TypeVar("_T")
_NUMPYS = np.ndarray.__array_function__
_LARGEST_CHUNK_MEBIBYTES = 1 << 40  # larger than any array: each one is a single piece


def are_plain(arrays: Iterable[Any], *, apart_from: Array | None = None) -> bool:
    """Return whether all are ndarrays, none of a subclass or one that may overlap the given one.

    A thousand arrays of 4 KiB are joined in 250 us. The loops here take 15 and 30 of them, a generator twice as many.
    """
    ndarray = np.ndarray
    if apart_from is None:
        for array in arrays:  # noqa: SIM110 - any() takes twice as long
            if type(array) is not ndarray:
                return False
        return True
    owner = _sole_owner(apart_from)
    for array in arrays:
        if type(array) is not ndarray:
            return False
        if (owner is None or array.base is not None or array is owner) and np.may_share_memory(array, apart_from):
            return False
    return True


def may_overlap(out: Array, arrays: Iterable[Array]) -> bool:
    """Return whether the output may share memory with an input; True may be wrong, False is not."""
    owner = _sole_owner(out)
    # To ask for the base takes a tenth of the time that NumPy's answer takes.
    return any(
        (owner is None or array.base is not None or array is owner) and np.may_share_memory(out, array)
        for array in arrays
    )


def _sole_owner(array: Array) -> Array | None:
    """Return the array that owns the memory of one, with which only views of it share it; None if there is none."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.flags.owndata or memory.is_leased(array) else None


def may_overlap_itself(out: Array) -> bool:
    """Return whether two elements of an array may lie at one place, as `as_strided` can make them."""
    reach = out.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(out.strides, out.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach = stride * length
    return False


def normalize_axis(axis: SupportsIndex, ndim: int, name: str) -> int:
    """Return the axis counted from 0, or raise what NumPy raises."""
    if ndim == 0:
        msg = f"inputs of {name} must have at least one dimension, got a 0-d one; give it a length, or use stack"
        raise ValueError(msg)
    allowed = f"`axis` must be an integer in [{-ndim}, {ndim - 1}] for {name} of {ndim}-d arrays"
    # NumPy's stack takes True for 1, its concatenate does not.
    try:
        number = None if isinstance(axis, (bool, np.bool)) and name != "stack" else operator.index(axis)
    except TypeError:
        number = None
    if number is None:
        msg = f"{allowed}, got {axis!r}; pass one of those, and arrays together in one list"
        raise TypeError(msg)
    if not -ndim <= number < ndim:
        raise np.exceptions.AxisError(number, ndim, f"{allowed}, got {number}; pass one of those")
    return number % ndim


def chunk_bytes(min_chunk_size_mb: float | None) -> int:
    """Return the smallest piece of an array in bytes, 0 for no bound."""
    if min_chunk_size_mb is None:
        return 0
    if isinstance(min_chunk_size_mb, (bool, np.bool)) or not isinstance(
        min_chunk_size_mb, (int, float, np.integer, np.floating)
    ):
        msg = f"`min_chunk_size_mb` must be a number of MiB or None, got {min_chunk_size_mb!r}; pass 0 for no bound"
        raise TypeError(msg)
    if not min_chunk_size_mb >= 0:
        msg = f"`min_chunk_size_mb` must be 0 or more, got {min_chunk_size_mb!r}; pass 0 for no bound"
        raise ValueError(msg)
    if min_chunk_size_mb >= _LARGEST_CHUNK_MEBIBYTES:
        return _LARGEST_CHUNK_MEBIBYTES << 20
    return math.ceil(float(min_chunk_size_mb) * (1 << 20))


def as_iterable(arrays: Iterable[_T], name: str) -> Iterable[_T]:
    """Return the argument if it can be iterated over."""
    try:
        return iter(arrays)
    except TypeError as exc:
        msg = f"{name} takes an iterable of arrays, got {arrays!r}; pass a list of arrays ({exc})"
        raise TypeError(msg) from None


def as_shape(shape: Iterable[SupportsIndex], what: str, cure: str) -> tuple[int, ...]:
    """Return a shape of integers of 0 or more."""
    try:
        lengths = tuple(operator.index(length) for length in shape)
    except TypeError as exc:
        msg = f"{what} must be a tuple of integers, got {shape!r}; pass {cure}"
        raise TypeError(msg) from exc
    if any(length < 0 for length in lengths):
        msg = f"a shape must have lengths of 0 or more, got {lengths}; pass the shape of the input"
        raise ValueError(msg)
    return lengths


def as_array(value: Any, name: str) -> Array:
    """Return an ndarray, or a subclass that loses nothing in a join."""
    if type(value) is np.ndarray:
        return value
    kind = type(value)
    if getattr(kind, "__array_function__", _NUMPYS) is not _NUMPYS:
        array = value  # NumPy would let it decide; here it would lose what it carries
    elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return _from_dlpack(value, name)
    else:
        array = np.asanyarray(value)
        kind = type(array)
    if getattr(kind, "__array_function__", None) is not _NUMPYS or isinstance(array, np.ma.MaskedArray):
        msg = (
            f"{name} takes plain arrays, got {kind.__module__}.{kind.__qualname__}, whose mask, unit or the like would "
            f"be lost; pass numpy.asarray(array) for the bare values, or use the function that its library has"
        )
        raise UnsupportedArrayError(msg)
    result: Array = array
    return result


def _from_dlpack(value: Any, name: str) -> Array:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError) as exc:
        msg = f"{name} takes arrays in host memory, got {type(value).__qualname__}; copy it to the host first ({exc})"
        raise UnsupportedArrayError(msg) from exc


def joined_shape(shapes: Sequence[tuple[int, ...]], axis: int | None, name: str) -> tuple[int, ...]:
    """Return the shape of what arrays of these shapes make together."""
    if axis is None:
        return (sum(math.prod(shape) for shape in shapes),)
    first = shapes[0]
    before, after = first[:axis], first[axis + 1 :]
    length = 0
    for index, shape in enumerate(shapes):
        if len(shape) != len(first) or shape[:axis] != before or shape[axis + 1 :] != after:
            msg = (
                f"shapes for {name} must be equal but for axis {axis}, got {first} for input 0 and {shape} for "
                f"input {index}; reshape, pad or crop them first, or make one batch for each kind of shape"
            )
            raise ShapeMismatchError(msg)
        length += shape[axis]
    return (*before, length, *after)


def joined_dtype(arrays: Sequence[Array], dtype: DTypeLike | None, casting: Any, name: str) -> np.dtype[Any]:
    """Return the dtype of a new result: what ``dtype`` says, or what the inputs have in common."""
    first = arrays[0].dtype
    if dtype is not None:
        return _requested_dtype(arrays, dtype, casting, name)
    if all(array.dtype is first for array in arrays):
        return canonical_dtype(first)
    for index, array in enumerate(arrays):
        if not _joinable(first, array.dtype):
            msg = (
                f"arrays to {name} must have one dtype, got {first} for array 0 and {array.dtype} for array {index}; "
                f"say what to cast to with dtype= (instead of out=), or convert the array where it is made"
            )
            raise DTypeMismatchError(msg)
    try:
        return np.result_type(*{array.dtype for array in arrays})
    except TypeError as exc:
        msg = f"arrays to {name} must have dtypes that NumPy can promote; say what to cast to with dtype= ({exc})"
        raise DTypeMismatchError(msg) from exc


def plain_dtype(dtype: DTypeLike, name: str) -> np.dtype[Any]:
    """Return the dtype of an element; one that is itself an array would add axes to the result."""
    wanted = np.dtype(dtype)
    if wanted.subdtype is not None:
        msg = f"`dtype` must not be a subarray for {name}, got {wanted}; give the items' dtype and a larger shape"
        raise TypeError(msg)
    return wanted


def _requested_dtype(arrays: Sequence[Array], dtype: DTypeLike, casting: Any, name: str) -> np.dtype[Any]:
    wanted = plain_dtype(dtype, name)
    is_open = wanted.itemsize == 0 or (wanted.kind in "mM" and np.datetime_data(wanted)[0] == "generic")
    if not is_open:
        return wanted
    # A string without a length, a date without a unit: NumPy completes it from the inputs' dtypes, and from
    # their elements where those are objects.
    samples = [array if array.dtype.hasobject else np.empty(0, array.dtype) for array in arrays]
    return np.concatenate(samples, axis=None, dtype=wanted, casting=casting).dtype


def canonical_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that NumPy gives a result: native byte order, records without padding."""
    is_canonical = dtype.isnative and dtype.names is None and dtype.metadata is None
    return dtype if is_canonical else np.result_type(dtype)


def _joinable(first: np.dtype[Any], second: np.dtype[Any]) -> bool:
    """Return whether two dtypes differ in no more than byte order, string length or datetime unit."""
    if first == second:
        return True
    if first.names is not None and second.names is not None:
        return first.names == second.names and all(_joinable(first[field], second[field]) for field in first.names)
    if first.subdtype is not None and second.subdtype is not None:
        return first.shape == second.shape and _joinable(first.base, second.base)
    if first.kind != second.kind:
        return False
    return first.kind in "SUMm" or _native(first) == _native(second)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def check_casting(casting: Any) -> None:
    """Check that a rule for casts is one of NumPy's."""
    if casting not in ("no", "equiv", "safe", "same_kind", "unsafe"):
        msg = f"`casting` must be one of 'no', 'equiv', 'safe', 'same_kind' or 'unsafe', got {casting!r}; pass one"
        raise (ValueError if isinstance(casting, str) else TypeError)(msg)


def check_casts(arrays: Sequence[Array], dtype: np.dtype[Any], casting: Any) -> None:
    """Check that all arrays may be cast to a dtype."""
    for source in {array.dtype for array in arrays}:
        if source != dtype and not np.can_cast(source, dtype, casting):
            msg = (
                f"cannot cast from {source} to {dtype} under casting={casting!r}; "
                f"convert the array where it is made, or allow it with another casting= where there is one"
            )
            raise TypeError(msg)


def check_out(out: Array, shape: tuple[int, ...], name: str) -> None:
    """Check that the result fits into an output that may be written."""
    if out.shape != shape:
        msg = f"`out` must have the shape of the result, {shape}, got {out.shape}; allocate it with that shape"
        raise ShapeMismatchError(msg)
    if not out.flags.writeable:
        msg = f"`out` must be writable for {name}, got a read-only array; pass a copy or set its writeable flag"
        raise ValueError(msg)


def as_subclass(result: Array, arrays: Sequence[Array]) -> Array:
    """Return the result as the subclass of highest priority among the inputs, as NumPy does for numpy.matrix."""
    chosen, priority = np.ndarray, 0.0
    for array in arrays:
        if type(array) is not np.ndarray and array.__array_priority__ > priority:
            chosen, priority = type(array), array.__array_priority__
    return result if chosen is np.ndarray else result.view(chosen)
