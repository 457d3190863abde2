"""A batch that its producers fill in place, which saves the copy that a join is."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np

from accel_ops import dispatch
from accel_ops.arguments import (
    as_array,
    as_iterable,
    as_shape,
    canonical_dtype,
    check_casts,
    joined_shape,
    normalize_axis,
    plain_dtype,
)
from accel_ops.devices import device_index
from accel_ops.dispatch import Array
from accel_ops.errors import ShapeMismatchError, UnfilledSlotError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

    from accel_ops.gpu.filling import Filling

__all__ = ["Batch", "batch"]


class Batch:
    """One output array and a writable view of it for each input. Made by `batch`; it stays in its process.

    Attributes
    ----------
    array : ndarray
        The whole, C-ordered and uninitialised: what nobody writes holds whatever lay there before.
    slots : tuple of ndarray
        The part of ``array`` that belongs to each input, in order. After writing into one, call `filled`.
    staged : ndarray or cupy.ndarray
        The whole where ``accelerator=`` says, when each slot has been filled: ``array``, or on the device, for use in
        the stream that was current when the batch was made.
    """

    def __init__(
        self, backend: dispatch.Backend, array: Array, slots: Sequence[Array], filling: Filling | None = None
    ) -> None:
        self._backend, self._filling = backend, filling
        self.array = array
        self.slots = tuple(slots)
        # Those with elements. Single operations on a dict are atomic.
        self._unfilled = dict.fromkeys(index for index, slot in enumerate(self.slots) if slot.size)

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        unfilled = len(self._unfilled)
        return f"<Batch of {len(self)} slots, {unfilled} unfilled: shape {self.array.shape}, dtype {self.array.dtype}>"

    def __array__(self, dtype: object = None, copy: object = None) -> Array:
        msg = f"a batch is not an array, got {self!r} where one is needed; pass batch.array"
        raise TypeError(msg)

    def __reduce__(self) -> str:
        msg = (
            f"a batch cannot be copied or sent to another process, which would fill another array, got {self!r}; "
            f"fill it by threads, or send back the values and assign them here"
        )
        raise TypeError(msg)

    def __setitem__(self, index: SupportsIndex, value: ArrayLike) -> None:
        """Write a value of exactly the slot's shape into a slot and mark it as filled. Safe from many threads.

        Raises
        ------
        IndexError
            There is no such slot.
        ShapeMismatchError
            The shape is not the slot's: nothing is broadcast.
        TypeError
            The value's dtype cannot be cast under casting="same_kind".
        """
        position = self._position(index)
        slot, source = self.slots[position], as_array(value, "a batch")
        if source.shape != slot.shape:
            msg = (
                f"slot {position} has shape {slot.shape} and takes a value of exactly that shape, got {source.shape}; "
                f"reshape, crop or pad the value, or write into batch.slots[{position}] yourself"
            )
            raise ShapeMismatchError(msg)
        check_casts([source], slot.dtype, "same_kind")
        source = source.view(np.ndarray)
        self._backend.fill(slot, source.copy() if np.may_share_memory(slot, source) else source)
        self.filled(position)

    def filled(self, index: SupportsIndex) -> None:
        """Say that a slot has been written, for the last time: on its way to a device it is read from now on."""
        position = self._position(index)
        if self._filling is not None:
            self._filling.filled(position)
        self._unfilled.pop(position, None)

    @property
    def staged(self) -> Any:
        """The whole where ``accelerator=`` says."""
        self._check_filled()
        return self.array if self._filling is None else self._filling.result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Check that each slot has been filled, unless an exception is on its way already."""
        if kind is None:
            self._check_filled()

    def _check_filled(self) -> None:
        missing = sorted(self._unfilled)
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            msg = (
                f"each slot must be filled before the batch is left, but {len(missing)} of {len(self)} are not: "
                f"{shown}; assign batch[i] = x, or call batch.filled(i) after writing into batch.slots[i] "
                f"(if a producer failed, its exception says why)"
            )
            raise UnfilledSlotError(msg)

    def _position(self, index: SupportsIndex) -> int:
        try:
            return range(len(self.slots))[operator.index(index)]
        except IndexError:
            msg = f"the batch has slots 0 to {len(self) - 1}, got {index!r}; pass one of them"
            raise IndexError(msg) from None


def batch(
    shapes: Iterable[Iterable[SupportsIndex]],
    dtype: DTypeLike,
    axis: SupportsIndex = 0,
    accelerator: object = None,
) -> Batch:
    """Allocate one array for inputs of known shapes, and give each its part to write into.

    Parameters
    ----------
    shapes : iterable of shapes
        One tuple per input, equal but for the axis.
    dtype : dtype_like
        The dtype of the whole.
    axis : int, default 0
        The axis along which the inputs follow one another.
    accelerator : None or "cpu" or device, default None
        Whose pinned memory the whole shall lie in, and where its parts are sent as soon as their slots are filled; None
        and "cpu" mean plain host memory.

    Returns
    -------
    Batch
        A context manager. ``b.slots[i]`` is the writable view of input i and ``b.array`` the whole;
        ``b[i] = x`` checks the shape, copies and marks the slot as filled; after writing into ``b.slots[i]``
        call ``b.filled(i)``. Leaving the block with a slot unfilled raises UnfilledSlotError. ``b.staged`` is the
        whole on the device.

    Raises
    ------
    ShapeMismatchError
        The shapes do not fit together. It is a ValueError.
    TypeError
        A shape is not a tuple of integers, or the dtype is itself an array.
    UnfilledSlotError
        On leaving the block. It is a RuntimeError.
    numpy.exceptions.AxisError
        The axis is out of range.
    BackendUnavailableError
        The accelerator is not there. It is a RuntimeError.
    ValueError
        No shapes, a 0-d or a negative one.

    Notes
    -----
    *Determinism:* the memory is uninitialised. Write all of a slot, padding too: large arrays are recycled, so the
    rest may hold values of an earlier batch.

    *Threads:* slots do not overlap, so producers in many threads may fill one batch. Other processes cannot.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> with ops.batch([(2, 3), (1, 3)], np.float32) as b:
    ...     b[0] = np.zeros((2, 3), np.float32)
    ...     b.slots[1][...] = 7
    ...     b.filled(1)
    >>> b.array.shape
    (3, 3)
    """
    device = device_index(accelerator)
    backend = dispatch.backend_for(accelerator)
    sizes = [
        as_shape(shape, "each shape of a batch", "a list of shapes such as x.shape")
        for shape in as_iterable(shapes, "batch")
    ]
    if not sizes:
        msg = "a batch needs at least one shape, got none; pass a non-empty iterable of shapes"
        raise ValueError(msg)
    position = normalize_axis(axis, len(sizes[0]), "batch")
    wanted = plain_dtype(dtype, "batch")
    if device is not None:
        wanted = canonical_dtype(wanted)  # devices know no other byte order
    whole = backend.empty(joined_shape(sizes, position, "batch"), wanted)
    slots, start = [], 0
    for shape in sizes:
        stop = start + shape[position]
        slots.append(whole[(*(slice(None),) * position, slice(start, stop))])
        start = stop
    filling = None if device is None else dispatch.device_staging(device).filling(whole, slots)
    return Batch(backend, whole, slots, filling)
