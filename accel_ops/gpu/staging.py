"""Host arrays onto a device: joined chunk by chunk into page-locked memory, each travelling while the next is filled.

    workers fill chunk 2        ──►  page-locked ring  ──►  copying stream: chunk 1
                                                             │  ordered by events
    caller's stream: earlier work ──► the output is free ──► copies ──► later work sees the batch

A chunk of the ring is filled again only after the event of its copy. The host waits for nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_ops.cpu import staging as cpu
from accel_ops.gpu.driver import Driver, driver_for
from accel_ops.gpu.filling import Filling
from accel_ops.gpu.memory import PinnedMemory

__all__ = ["CHUNK_BYTES", "N_CHUNKS", "DeviceStaging", "Part", "cut", "staging_for"]

Array = np.ndarray[Any, Any]

CHUNK_BYTES = 16 << 20  # what all threads fill together: twice what is worth waking them for
N_CHUNKS = 3  # one that is filled, one that travels, and one that has just arrived


class Part(NamedTuple):
    """A contiguous part of a batch, and what is joined to make it."""

    arrays: Sequence[Array]
    axis: int
    shape: tuple[int, ...]


def cut(arrays: Sequence[Array], axis: int, shape: tuple[int, ...], n_bytes: int, item_bytes: int) -> Iterator[Part]:
    """Cut the join of arrays along an axis into parts of at most ``n_bytes``, in the order in which they lie.

    An element is never cut. Empty arrays may be among the arrays, and no part is empty.
    """
    size = math.prod(shape) * item_bytes
    if size == 0:
        return
    if size <= n_bytes or not shape:
        yield Part(arrays, axis, shape)
        return
    row_shape = shape[1:]
    row_bytes = math.prod(row_shape) * item_bytes
    n_rows = max(1, n_bytes // row_bytes)
    if axis > 0:
        for start in range(0, shape[0], n_rows):
            rows = slice(start, min(start + n_rows, shape[0]))
            some = [array[rows] for array in arrays]
            if row_bytes <= n_bytes:
                yield Part(some, axis, (rows.stop - rows.start, *row_shape))
            else:
                yield from cut([array[0] for array in some], axis - 1, row_shape, n_bytes, item_bytes)
        return
    waiting: list[Array] = []  # neighbours that go together
    n_waiting = 0
    for array in arrays:
        start = 0
        while start < len(array):
            stop = min(len(array), start + n_rows - n_waiting)
            waiting.append(array[start:stop])
            n_waiting += stop - start
            start = stop
            if n_waiting == n_rows:
                yield from _rows(waiting, n_waiting, row_shape, n_bytes, item_bytes)
                waiting, n_waiting = [], 0
    if waiting:
        yield from _rows(waiting, n_waiting, row_shape, n_bytes, item_bytes)


def _rows(arrays: list[Array], n: int, row_shape: tuple[int, ...], n_bytes: int, item_bytes: int) -> Iterator[Part]:
    """Give rows as one part, or cut the single row that is too large for one."""
    if math.prod(row_shape) * item_bytes <= n_bytes:
        yield Part(arrays, 0, (n, *row_shape))
    else:
        yield from cut([arrays[0][0]], 0, row_shape, n_bytes, item_bytes)


class DeviceStaging:
    """Joins of host arrays for one device: into page-locked memory, or onward into its own."""

    fill = staticmethod(cpu.fill)
    is_small = staticmethod(cpu.is_small)
    join = staticmethod(cpu.join)

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._copying = driver.new_stream()
        self.pinned = PinnedMemory(driver, self._copying)
        self.empty = self.pinned.empty

    def stage(
        self,
        arrays: Sequence[Array],
        axis: int | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: int | None = None,
        *,
        casting: Any,
        n_chunks: int = N_CHUNKS,
    ) -> Any:
        """Return an array on the device that holds the arrays, joined along an axis, for use in the caller's stream."""
        driver, copying = self.driver, self._copying
        caller = driver.current_stream() if stream is None else stream
        result = driver.empty(shape, dtype, caller)
        if axis is None:
            arrays, axis = [array.reshape(-1) for array in arrays], 0
        chunk_bytes = max(dtype.itemsize, min(CHUNK_BYTES, math.prod(shape) * dtype.itemsize))
        chunks: list[Array] = []
        events: list[Any] = []
        target = driver.address(result)
        driver.wait(copying, driver.record(caller))  # what used the output's memory before has ended
        try:
            try:
                for index, part in enumerate(cut(arrays, axis, shape, chunk_bytes, dtype.itemsize)):
                    place = index % n_chunks
                    if place == len(chunks):
                        chunks.append(self.empty((chunk_bytes,), np.dtype(np.uint8)))
                    else:
                        driver.synchronize(events[place])
                    n_bytes = math.prod(part.shape) * dtype.itemsize
                    chunk = chunks[place][:n_bytes]
                    cpu.join(part.arrays, part.axis, chunk.view(dtype).reshape(part.shape), casting=casting)
                    driver.copy_to_device(target, chunk.ctypes.data, n_bytes, copying)
                    events[place : place + 1] = [driver.record(copying)]
                    target += n_bytes
            finally:
                self._let_wait(caller)
        finally:
            self._let_wait(caller)  # again, which is harmless: an interrupt may have fallen into the first
        return result

    def filling(self, array: Array, slots: Sequence[Array]) -> Filling:
        """Return the way to the device of a batch in page-locked memory that is filled slot by slot."""
        return Filling(self.driver, self._copying, array, slots)

    def _let_wait(self, stream: int) -> None:
        """Let a stream go on only after the copies: even where they were cut short, for the output is freed in it."""
        self.driver.wait(stream, self.driver.record(self._copying))


# Of each device that this process has used.
_stagings: dict[int, DeviceStaging] = {}


def staging_for(index: int) -> DeviceStaging:
    """Return the staging of a device, whose first use makes the first CUDA calls of this process.

    Raises
    ------
    ForkedDeviceError, BackendUnavailableError
        As `driver_for` does.
    """
    driver = driver_for(index)
    found = _stagings.get(index)
    return _stagings.setdefault(index, DeviceStaging(driver)) if found is None else found


os.register_at_fork(after_in_child=_stagings.clear)
