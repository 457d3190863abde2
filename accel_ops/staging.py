"""Join host arrays into one batch: `concatenate` and `stack`."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from accel_ops import dispatch
from accel_ops.cpu import memory, pool
from accel_ops.cpu import staging as cpu
from accel_ops.errors import DTypeMismatchError, ShapeMismatchError, UnsupportedArrayError

__all__ = ["concatenate", "stack"]

Array = np.ndarray[Any, Any]

_LARGEST_CHUNK_MEBIBYTES = 1 << 40  # larger than any array: each one is a single piece


def concatenate(
    arrays: Iterable[ArrayLike],
    axis: SupportsIndex | None = 0,
    *,
    out: Array | None = None,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
    accelerator: object = None,
    min_chunk_size_mb: float | None = None,
) -> Array:
    """Join arrays along an axis that they have, as `numpy.concatenate` does, at the speed of memory.

    Parameters
    ----------
    arrays : iterable of array_like
        Arrays of equal shapes but for the axis, and of one dtype unless ``dtype`` says what to cast to. dtypes
        that differ only in byte order, string length or datetime unit are joined as NumPy does. Any iterable.
    axis : int or None, default 0
        The axis to join along; None joins the flattened arrays.
    out : ndarray, optional
        Where the result goes: any layout, right shape, a dtype that the inputs may be cast to. It may overlap
        the inputs; the result is as if they had been copied first.
    dtype : dtype_like, optional
        What to cast to on the way. Not together with ``out``.
    casting : {"same_kind", "no", "equiv", "safe", "unsafe"}, default "same_kind"
        Which casts are allowed.
    accelerator : None or "cpu" or device, default None
        Whose pinned memory the result shall lie in; None and "cpu" mean plain host memory.
    min_chunk_size_mb : float, optional
        No single array is cut into pieces smaller than this, in MiB; whole arrays are spread over the threads
        regardless. None leaves the size to the library.

    Returns
    -------
    ndarray
        A new C-ordered array (aligned to 64 bytes from 4 KiB upward, to a page from 1 MiB), or ``out``. The
        memory of large results is recycled once nothing refers to it any more.

    Raises
    ------
    DTypeMismatchError
        The dtypes differ and no ``dtype`` was given. It is a TypeError and a ValueError.
    ShapeMismatchError
        The shapes do not fit together, or ``out`` does not fit them. It is a ValueError.
    UnsupportedArrayError
        An input (or ``out``) is a masked array or another subclass with an ``__array_function__`` of its own,
        which a join would strip of what it carries. It is a TypeError.
    numpy.exceptions.AxisError
        The axis is out of range.
    BackendUnavailableError
        The accelerator is not there. It is a RuntimeError.
    TypeError
        A cast that ``casting`` does not allow, or an argument of the wrong kind.
    ValueError
        No arrays, 0-d arrays, or a result that cannot be addressed.
    MemoryError
        The operating system refused the memory.

    See Also
    --------
    stack : Join along a new axis.
    batch : Let the producers write into the result, which saves the copy.

    Notes
    -----
    *Determinism:* copies are exact; casts round to nearest whatever the calling thread's floating-point mode.

    *Threads:* work is cut over the bytes of the output, so one large array is shared as well as many; small
    calls stay on the calling thread.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.concatenate([np.zeros((1, 3)), np.ones((2, 3))]).shape
    (3, 3)
    """
    dispatch.require_host(accelerator)
    if dtype is None and casting == "same_kind" and min_chunk_size_mb is None and isinstance(arrays, (list, tuple)):
        result = _join_small_alike(arrays, axis, out)
        if result is not None:
            return result
    return join(
        arrays,
        axis,
        out=out,
        dtype=dtype,
        casting=casting,
        min_chunk_size_mb=min_chunk_size_mb,
        name="concatenate",
    )


def stack(
    arrays: Iterable[ArrayLike],
    axis: SupportsIndex = 0,
    *,
    out: Array | None = None,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
    accelerator: object = None,
    min_chunk_size_mb: float | None = None,
) -> Array:
    """Join arrays of one shape along a new axis, as `numpy.stack` does, at the speed of memory.

    Parameters
    ----------
    arrays : iterable of array_like
        Arrays of one shape; for the rest see `concatenate`.
    axis : int, default 0
        Where the new axis goes in the result, which has one more dimension.
    out, dtype, casting, accelerator, min_chunk_size_mb
        See `concatenate`.

    Returns
    -------
    ndarray
        A new C-ordered array, or ``out``. Views such as ``image.transpose(2, 0, 1)`` are copied once, straight
        into their place.

    Raises
    ------
    ShapeMismatchError
        The shapes differ. It is a ValueError.
    DTypeMismatchError, UnsupportedArrayError, BackendUnavailableError, TypeError, ValueError, MemoryError
        As `concatenate` does.

    Notes
    -----
    *Determinism:* and *Threads:* as for `concatenate`.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> images = [np.zeros((4, 5, 3), np.uint8) for _ in range(2)]
    >>> ops.stack([image.transpose(2, 0, 1) for image in images]).shape
    (2, 3, 4, 5)
    """
    dispatch.require_host(accelerator)
    inputs = [as_array(array, "stack") for array in as_iterable(arrays, "stack")]
    if not inputs:
        msg = "stack needs at least one array, got none; pass a non-empty iterable of arrays"
        raise ValueError(msg)
    for index, array in enumerate(inputs):
        if array.shape != inputs[0].shape:
            msg = (
                f"all arrays to stack must have the same shape, got {inputs[0].shape} for array 0 and {array.shape} "
                f"for array {index}; pad or crop them first, or use concatenate"
            )
            raise ShapeMismatchError(msg)
    position = normalize_axis(axis, inputs[0].ndim + 1, "stack")
    place = (slice(None),) * position + (np.newaxis,)
    return join(
        [array[place] for array in inputs],
        position,
        out=out,
        dtype=dtype,
        casting=casting,
        min_chunk_size_mb=min_chunk_size_mb,
        name="stack",
    )


def join(
    arrays: Iterable[ArrayLike],
    axis: SupportsIndex | None,
    *,
    out: Array | None,
    dtype: DTypeLike | None,
    casting: Any,
    min_chunk_size_mb: float | None,
    name: str,
    max_workers: int | None = None,
    call: pool.Call | None = None,
) -> Array:
    """Validate, allocate and delegate; what `concatenate`, `stack` and `ParallelArrayOps` share."""
    min_chunk_bytes = chunk_bytes(min_chunk_size_mb)
    inputs = [as_array(array, name) for array in as_iterable(arrays, name)]
    if not inputs:
        msg = f"{name} needs at least one array, got none; pass a non-empty iterable of arrays"
        raise ValueError(msg)
    if out is not None:
        if dtype is not None:
            msg = f"{name} takes `out` or `dtype`, not both, got dtype={dtype!r}; the dtype of `out` decides"
            raise TypeError(msg)
        if not isinstance(out, np.ndarray):
            msg = f"`out` must be an ndarray, got {type(out).__name__}; allocate one of the result's shape and dtype"
            raise TypeError(msg)
        as_array(out, name)
    position = None if axis is None else normalize_axis(axis, inputs[0].ndim, name)
    shape = _joined_shape(inputs, position, name)
    check_casting(casting)
    result_dtype = _joined_dtype(inputs, dtype, casting, name)
    if out is not None:
        result_dtype = out.dtype
    check_casts(inputs, result_dtype, casting)

    if out is None:
        result = memory.empty(shape, result_dtype)
    else:
        _check_out(out, shape, name)
        overlaps = may_overlap(out, inputs)
        result = memory.empty(shape, result_dtype) if overlaps else out.view(np.ndarray)
    cpu.join(
        [array.view(np.ndarray) for array in inputs],
        position,
        result,
        casting=casting,
        min_chunk_bytes=min_chunk_bytes,
        max_workers=max_workers,
        call=call,
    )
    if out is None:
        return _as_subclass(result, inputs)
    if overlaps:
        cpu.fill(out.view(np.ndarray), result)
    return out


def _join_small_alike(arrays: Sequence[Any], axis: SupportsIndex | None, out: Array | None) -> Array | None:
    """Join small arrays of one shape and dtype with the least work, or return None for `join` to take over.

    NumPy's own checks are enough here: it refuses arrays that do not fill the output to the last element, and
    under casting="no" those of another dtype.
    """
    if not arrays or type(axis) is not int or set(map(type, arrays)) != {np.ndarray}:
        return None
    first = arrays[0]
    n_arrays = len(arrays)
    n_bytes = first.nbytes
    if n_bytes >= cpu.SMALL_ARRAY_BYTES and n_bytes * n_arrays >= cpu.SMALL_BYTES:
        return None
    try:
        if out is None:
            shape = list(first.shape)
            shape[axis] *= n_arrays
            out = memory.empty(shape, _canonical(first.dtype))
        elif type(out) is not np.ndarray or out.nbytes >= cpu.SMALL_BYTES or may_overlap(out, arrays):
            return None
        return np.concatenate(arrays, axis, out=out, casting="no")
    except (TypeError, ValueError, IndexError):
        return None


def may_overlap(out: Array, arrays: Sequence[Array]) -> bool:
    """Return whether the output may share memory with an input; True may be wrong, False is not."""
    owner = out
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.flags.owndata or memory.is_leased(owner):
        # Two arrays that own their memory share it only if they are one. This takes a tenth of NumPy's time.
        arrays = [array for array in arrays if array is owner or not array.flags.owndata]
    return any(np.may_share_memory(out, array) for array in arrays)


def normalize_axis(axis: SupportsIndex, ndim: int, name: str) -> int:
    """Return the axis counted from 0, or raise what NumPy raises."""
    if ndim == 0:
        msg = f"arrays to {name} must have at least one dimension, got a 0-d array; use stack for scalars"
        raise ValueError(msg)
    allowed = f"`axis` must be an integer in [{-ndim}, {ndim - 1}] for {name} of {ndim}-d arrays"
    # NumPy's stack takes True for 1, its concatenate does not.
    if not hasattr(axis, "__index__") or (isinstance(axis, (bool, np.bool)) and name != "stack"):
        msg = f"{allowed}, got {axis!r}; pass one of those"
        raise TypeError(msg)
    number = operator.index(axis)
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


def as_iterable(arrays: Iterable[ArrayLike], name: str) -> Iterable[ArrayLike]:
    """Return the argument if it can be iterated over."""
    try:
        return iter(arrays)
    except TypeError as exc:
        msg = f"{name} takes an iterable of arrays, got {arrays!r}; put a single array into a list ({exc})"
        raise TypeError(msg) from None


def as_array(value: Any, name: str) -> Array:
    """Return an ndarray, or a subclass that loses nothing in a join."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    else:
        array = np.asanyarray(value)
    kind = type(array)
    if kind.__array_function__ is not np.ndarray.__array_function__ or isinstance(array, np.ma.MaskedArray):
        msg = (
            f"{name} takes plain arrays, got {kind.__module__}.{kind.__qualname__}, whose mask, unit or the like would "
            f"be lost; pass numpy.asarray(array) to join the bare values, or use the function that its library has"
        )
        raise UnsupportedArrayError(msg)
    return array


def _joined_shape(arrays: Sequence[Array], axis: int | None, name: str) -> tuple[int, ...]:
    if axis is None:
        return (sum(array.size for array in arrays),)
    first = arrays[0].shape
    before, after = first[:axis], first[axis + 1 :]
    length = 0
    for index, array in enumerate(arrays):
        shape = array.shape
        if len(shape) != len(first) or shape[:axis] != before or shape[axis + 1 :] != after:
            msg = (
                f"arrays to {name} must have equal shapes but for axis {axis}, got {first} for array 0 and {shape} "
                f"for array {index}; reshape or pad them first"
            )
            raise ShapeMismatchError(msg)
        length += shape[axis]
    return (*before, length, *after)


def _joined_dtype(arrays: Sequence[Array], dtype: DTypeLike | None, casting: Any, name: str) -> np.dtype[Any]:
    first = arrays[0].dtype
    if dtype is not None:
        return _requested_dtype(arrays, dtype, casting, name)
    if all(array.dtype is first for array in arrays):
        return _canonical(first)
    for index, array in enumerate(arrays):
        if not _joinable(first, array.dtype):
            msg = (
                f"arrays to {name} must have one dtype, got {first} for array 0 and {array.dtype} for array {index}; "
                f"say what to cast to with dtype=, or convert the array where it is made"
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


def _canonical(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that NumPy gives a result: native byte order, records without padding."""
    return dtype if dtype.isnative and dtype.names is None else np.result_type(dtype)


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
        msg = f"`casting` must be one of 'no', 'equiv', 'safe', 'same_kind' or 'unsafe', got {casting!r}"
        raise (ValueError if isinstance(casting, str) else TypeError)(msg)


def check_casts(arrays: Sequence[Array], dtype: np.dtype[Any], casting: Any) -> None:
    """Check that all arrays may be cast to a dtype."""
    for source in {array.dtype for array in arrays}:
        if source != dtype and not np.can_cast(source, dtype, casting):
            msg = (
                f"cannot cast from {source} to {dtype} under casting={casting!r}; "
                f"allow it with another casting=, or choose another dtype"
            )
            raise TypeError(msg)


def _check_out(out: Array, shape: tuple[int, ...], name: str) -> None:
    if out.shape != shape:
        msg = f"`out` must have the shape of the result, {shape}, got {out.shape}; allocate it with that shape"
        raise ShapeMismatchError(msg)
    if not out.flags.writeable:
        msg = f"`out` must be writable for {name}, got a read-only array; pass a copy or set its writeable flag"
        raise ValueError(msg)


def _as_subclass(result: Array, arrays: Sequence[Array]) -> Array:
    """Return the result as the subclass of highest priority among the inputs, as NumPy does for numpy.matrix."""
    chosen, priority = np.ndarray, 0.0
    for array in arrays:
        if type(array) is not np.ndarray and array.__array_priority__ > priority:
            chosen, priority = type(array), array.__array_priority__
    return result if chosen is np.ndarray else result.view(chosen)
