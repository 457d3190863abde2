"""Host arrays onto a device: `stage` and `prefetch`, and the page-locked memory that copies start from."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from accel_ops import dispatch
from accel_ops.arguments import (
    as_array,
    as_iterable,
    as_shape,
    canonical_dtype,
    check_casting,
    check_casts,
    joined_dtype,
    joined_shape,
    normalize_axis,
    plain_dtype,
)
from accel_ops.cpu.memory import is_plain
from accel_ops.cpu.staging import discard_imaginary_parts
from accel_ops.devices import device_index
from accel_ops.dispatch import Array
from accel_ops.errors import UnsupportedDTypeError
from accel_ops.staging import concatenate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

__all__ = ["empty_pinned", "is_pinned", "prefetch", "stage"]


def stage(
    arrays: Iterable[ArrayLike],
    axis: SupportsIndex | None = 0,
    *,
    accelerator: object,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
    stream: object = None,
) -> Any:
    """Join host arrays straight into a device's memory: each part travels while the next is being joined.

    Parameters
    ----------
    arrays : iterable of array_like
        As for `concatenate`. They may be changed as soon as the call returns.
    axis : int or None, default 0
        The axis to join along; None joins the flattened arrays.
    accelerator : None or "cpu" or device
        Where the batch goes. None and "cpu" leave it on the host, so that a loader is the same code on both.
    dtype : dtype_like, optional
        What to cast to on the way, on the host.
    casting : {"same_kind", "no", "equiv", "safe", "unsafe"}, default "same_kind"
        Which casts are allowed.
    stream : object with ``__cuda_stream__`` or int, optional
        The stream in which the batch will be used; by default CuPy's current one.

    Returns
    -------
    cupy.ndarray or ndarray
        A C-ordered batch. On a device it is ready for what the stream does from now on; the host has not waited for it.

    Raises
    ------
    DTypeMismatchError, ShapeMismatchError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `concatenate` does.
    UnsupportedDTypeError
        The elements refer to Python objects. It is a TypeError.
    BackendUnavailableError, ForkedDeviceError
        The device is not there, or not for this process. Both are RuntimeErrors.

    See Also
    --------
    concatenate : Join into page-locked memory, and leave the copy to somebody else.
    prefetch : Copy batches that are there already, some of them ahead.

    Notes
    -----
    *Determinism:* copies are exact, casts round to nearest.

    *Threads:* parts of 16 MiB are joined by the pool, three of them in page-locked memory at a time. Copies run in a
    stream of the library's own, after what the caller's stream has been given before and before what it is given next.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> batch = ops.stage([np.zeros((1, 3)), np.ones((2, 3))], accelerator=ops.default_accelerator())
    >>> batch.shape
    (3, 3)
    """
    index, number = device_index(accelerator), _stream_number(stream)
    if index is None:
        return concatenate(arrays, axis, dtype=dtype, casting=casting)
    device = dispatch.device_staging(index)
    inputs = [as_array(array, "stage").view(np.ndarray) for array in as_iterable(arrays, "stage")]
    if not inputs:
        msg = "stage needs at least one array, got none; pass a non-empty iterable of arrays"
        raise ValueError(msg)
    position = None if axis is None else normalize_axis(axis, inputs[0].ndim, "stage")
    shape = joined_shape([array.shape for array in inputs], position, "stage")
    check_casting(casting)
    wanted = canonical_dtype(joined_dtype(inputs, dtype, casting, "stage"))  # devices know no other byte order
    check_casts(inputs, wanted, casting)
    if not is_plain(wanted):
        msg = f"stage takes elements that are nothing but bytes, got {wanted}; convert the arrays first"
        raise UnsupportedDTypeError(msg)
    inputs = list(discard_imaginary_parts(inputs, wanted))
    return device.stage(inputs, position, shape, wanted, number, casting=casting)


def prefetch(batches: Iterable[Any], *, accelerator: object, depth: int = 2) -> Iterator[Any]:
    """Give the batches of a loader on a device, with the next ones on their way already.

    Parameters
    ----------
    batches : iterable
        Host arrays, or tuples, lists and dicts of them, nested in any way; what is no array is handed on as it is.
    accelerator : None or "cpu" or device
        Where they go. None and "cpu" give them as they are.
    depth : int, default 2
        How many batches have been sent when one is asked for, that one included.

    Yields
    ------
    The same, with arrays on the device, ready for the stream that is current when they are sent.

    Raises
    ------
    ValueError
        ``depth`` is not a positive integer.
    Exception
        What ``batches`` raises, after the batches before it; and what `stage` raises.

    Notes
    -----
    *Determinism:* copies are exact. *Threads:* as for `stage`; the iterable is advanced on the caller's thread.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> loader = ({"x": np.full((2, 3), k), "name": str(k)} for k in range(3))
    >>> [batch["name"] for batch in ops.prefetch(loader, accelerator=None)]
    ['0', '1', '2']
    """
    if isinstance(depth, (bool, np.bool)) or not isinstance(depth, (int, np.integer)) or depth < 1:
        msg = f"`depth` must be a positive integer, got {depth!r}; 2 is the default"
        raise ValueError(msg)
    index = device_index(accelerator)
    if index is not None:
        dispatch.device_staging(index)
    return _prefetched(iter(as_iterable(batches, "prefetch")), index, int(depth))


def _prefetched(batches: Iterator[Any], index: int | None, depth: int) -> Iterator[Any]:
    sent: collections.deque[Any] = collections.deque()
    failure: Exception | None = None
    while True:
        while failure is None and len(sent) < depth:
            try:
                sent.append(_sent(next(batches), index))
            except Exception as exc:  # noqa: BLE001 - raised when the batches before it have been given
                failure = exc
        if not sent:
            if failure is not None and not isinstance(failure, StopIteration):
                raise failure
            return
        yield sent.popleft()


def _sent(batch: Any, index: int | None) -> Any:
    """Send all arrays of a batch."""
    if index is None:
        return batch
    if isinstance(batch, np.ndarray):
        return stage([batch], accelerator=index) if batch.ndim else stage([batch[None]], accelerator=index).reshape(())
    if isinstance(batch, dict):
        sent = copy.copy(batch)  # of its own class
        sent.update({key: _sent(value, index) for key, value in batch.items()})
        return sent
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_sent(value, index) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_sent(value, index) for value in batch)
    return batch


def empty_pinned(
    shape: SupportsIndex | Iterable[SupportsIndex], dtype: DTypeLike = float, *, accelerator: object
) -> Array:
    """Return an uninitialised array in page-locked memory, from which a device copies at full speed.

    Parameters
    ----------
    shape : int or tuple of int
        The shape.
    dtype : dtype_like, default float
        Of elements that are nothing but their bytes.
    accelerator : None or "cpu" or device
        The device that will copy it. None and "cpu" give plain host memory.

    Returns
    -------
    ndarray
        C-ordered. Its memory is recycled when nothing refers to it any more and the device has done with it.

    Raises
    ------
    UnsupportedDTypeError
        The elements refer to Python objects. It is a TypeError.
    BackendUnavailableError, ForkedDeviceError
        The device is not there, or not for this process. Both are RuntimeErrors.
    MemoryError
        There is not enough.

    Notes
    -----
    *Threads:* may be called from any thread.

    Examples
    --------
    >>> import accel_ops as ops
    >>> ops.empty_pinned((2, 3), accelerator=ops.default_accelerator()).shape
    (2, 3)
    """
    given = shape if isinstance(shape, Iterable) else (shape,)
    lengths = as_shape(given, "`shape` of empty_pinned", "one such as x.shape")
    backend = dispatch.backend_for(accelerator)
    wanted = canonical_dtype(plain_dtype(dtype, "empty_pinned"))
    if not is_plain(wanted):
        msg = f"page-locked memory holds plain elements, got {wanted}, whose elements refer to others; convert it"
        raise UnsupportedDTypeError(msg)
    return backend.empty(lengths, wanted)


def is_pinned(array: Array) -> bool:
    """Return whether an array of the host lies in page-locked memory, whoever allocated it.

    Parameters
    ----------
    array : ndarray
        Any array of the host.

    Returns
    -------
    bool
        False too in a process that has used no device yet: no CUDA call is made then.

    Notes
    -----
    *Threads:* may be called from any thread.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.is_pinned(np.zeros(3))
    False
    """
    return dispatch.is_pinned(as_array(array, "is_pinned"))


def _stream_number(stream: object) -> int | None:
    """Return CUDA's number for a stream."""
    if stream is None:
        return None
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return int(stream)
    if not hasattr(stream, "__cuda_stream__"):
        msg = (
            f"`stream` must have __cuda_stream__ or be CUDA's number for one, got {stream!r}; pass None for the current"
        )
        raise TypeError(msg)
    version, number = stream.__cuda_stream__()
    if version != 0:
        msg = f"`stream` must speak version 0 of CUDA's stream protocol, got {version}; pass the stream's number"
        raise TypeError(msg)
    return int(number)
