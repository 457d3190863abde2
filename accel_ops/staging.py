"""Join host arrays into one batch: `concatenate` and `stack`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from accel_ops import dispatch
from accel_ops.arguments import (
    are_plain,
    as_array,
    as_iterable,
    as_subclass,
    canonical_dtype,
    check_casting,
    check_casts,
    check_out,
    chunk_bytes,
    joined_dtype,
    joined_shape,
    may_overlap,
    may_overlap_itself,
    normalize_axis,
)
from accel_ops.cpu import pool
from accel_ops.cpu.plan import SMALL_ARRAY_BYTES
from accel_ops.dispatch import Array
from accel_ops.errors import ShapeMismatchError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

__all__ = ["concatenate", "stack"]

# Arrays below this are joined fastest by NumPy alone, however many they are: it holds the GIL while it copies one.
_TINY_BYTES = SMALL_ARRAY_BYTES
# What NumPy joins in a few milliseconds, during which an interrupt waits.
_AT_ONCE_BYTES = 16 << 20


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
    backend = dispatch.backend_for(accelerator)
    if dtype is None and casting == "same_kind" and min_chunk_size_mb is None and isinstance(arrays, (list, tuple)):
        result = _join_small(backend, arrays, axis, out)
        if result is not None:
            return result
    return join(
        backend,
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
    backend = dispatch.backend_for(accelerator)
    if dtype is None and casting == "same_kind" and min_chunk_size_mb is None and isinstance(arrays, (list, tuple)):
        result = _stack_small(backend, arrays, axis, out)
        if result is not None:
            return result
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
        backend,
        [array[place] for array in inputs],
        position,
        out=out,
        dtype=dtype,
        casting=casting,
        min_chunk_size_mb=min_chunk_size_mb,
        name="stack",
    )


def join(
    backend: dispatch.Backend,
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
    shape = joined_shape([array.shape for array in inputs], position, name)
    check_casting(casting)
    result_dtype = joined_dtype(inputs, dtype, casting, name)
    if out is not None:
        result_dtype = out.dtype
    check_casts(inputs, result_dtype, casting)

    overlaps = overlaps_itself = False
    if out is not None:
        check_out(out, shape, name)
        overlaps_itself = not out.flags.c_contiguous and may_overlap_itself(out)
        overlaps = overlaps_itself or may_overlap(out, inputs)
    result = backend.empty(shape, result_dtype) if out is None or overlaps else out.view(np.ndarray)
    backend.join(
        [array.view(np.ndarray) for array in inputs],
        position,
        result,
        casting=casting,
        min_chunk_bytes=min_chunk_bytes,
        max_workers=max_workers,
        call=call,
    )
    if out is None:
        return as_subclass(result, inputs)
    if overlaps_itself:
        np.copyto(out, result)  # in one order, by one thread: which value stays is NumPy's choice
    elif overlaps:
        backend.fill(out.view(np.ndarray), result, max_workers=max_workers)
    return out


def _join_small(
    backend: dispatch.Backend, arrays: Sequence[Any], axis: SupportsIndex | None, out: Array | None
) -> Array | None:
    """Join small arrays of one dtype with the least work, or return None for `join` to take over.

    NumPy's own checks are enough here: it refuses arrays that do not fill the output to the last element, and
    under casting="no" those of another dtype.
    """
    if not arrays or type(axis) is not int or (out is not None and type(out) is not np.ndarray):
        return None
    if not are_plain(arrays, apart_from=out):
        return None
    first = arrays[0]
    n_arrays = len(arrays)
    try:
        shape = list(first.shape)
        length = shape[axis]
        if out is not None:
            shape[axis] = out.shape[axis]
        elif arrays[-1].shape == first.shape:
            shape[axis] = length * n_arrays  # a guess, which NumPy refuses where it is wrong
        else:
            shape[axis] = sum([array.shape[axis] for array in arrays])
        n_bytes = math.prod(shape) * first.itemsize
        is_tiny = first.nbytes < _TINY_BYTES and shape[axis] == length * n_arrays
        if not is_tiny and not backend.is_small(n_bytes, changes=not first.flags.c_contiguous):
            return None
        result = backend.empty(shape, canonical_dtype(first.dtype)) if out is None else out
        if n_bytes <= _AT_ONCE_BYTES:
            return np.concatenate(arrays, axis, out=result, casting="no")
        # In several steps, between which an interrupt takes effect.
        step = max(1, _AT_ONCE_BYTES // first.nbytes)
        before = (slice(None),) * (axis % first.ndim)
        for start in range(0, n_arrays, step):
            part = result[(*before, slice(start * length, (start + step) * length))]
            np.concatenate(arrays[start : start + step], axis, out=part, casting="no")
    except (TypeError, ValueError, IndexError):
        return None
    return result


def _stack_small(
    backend: dispatch.Backend, arrays: Sequence[Any], axis: SupportsIndex, out: Array | None
) -> Array | None:
    """As `_join_small`, of arrays that get a new axis."""
    if not arrays or type(axis) is not int or type(arrays[0]) is not np.ndarray:
        return None
    n_axes = arrays[0].ndim + 1
    if not -n_axes <= axis < n_axes or set(map(type, arrays)) != {np.ndarray}:
        return None
    place = (slice(None),) * (axis % n_axes) + (np.newaxis,)
    try:
        views = [array[place] for array in arrays]
    except IndexError:  # of fewer axes than the first
        return None
    return _join_small(backend, views, axis, out)
