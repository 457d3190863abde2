"""Host arrays onto a device: joined chunk by chunk into page-locked memory, each travelling while the next is filled.

    workers fill chunk 2        ──►  page-locked ring  ──►  copying stream: chunk 1
                                                             │  ordered by events
    caller's stream: earlier work ──► the output is free ──► copies ──► later work sees the batch

A chunk of the ring is filled again only after the event of its copy, which the host waits for; it waits for nothing
else. Copies come after what the caller's stream was given before: the output's memory may still be in use there.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_ops.cpu import staging as cpu
from accel_ops.cpu.floating_point import call_reporting_errors
from accel_ops.cpu.memory import address
from accel_ops.gpu.driver import DEFAULT_STREAM, Driver, driver_for, keep
from accel_ops.gpu.filling import Filling
from accel_ops.gpu.memory import PinnedMemory

__all__ = ["CHUNK_BYTES", "N_CHUNKS", "DeviceStaging", "Part", "cut", "staging_for"]

Array = np.ndarray[Any, Any]

# None of these has been measured on a device.
CHUNK_BYTES = 16 << 20  # what all threads fill together: twice what is worth waking them for
N_CHUNKS = 3  # one that is filled, one that travels, and one that has just arrived
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


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
        self.empty = PinnedMemory(driver, (DEFAULT_STREAM, self._copying)).empty
        self._ring_of = PinnedMemory(driver, (self._copying,)).empty

    def stage(
        self,
        arrays: Sequence[Array],
        axis: int | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: int | None = None,
        *,
        casting: Any,
    ) -> Any:
        """Return an array on the device that holds the arrays, joined along an axis, for use in the caller's stream.

        What casts find is reported once for all parts, as `cpu.staging.join` does it.
        """
        result: list[Any] = []
        send = functools.partial(self._send, arrays, axis, shape, dtype, stream, casting, result)
        casts = any(array.dtype != dtype for array in arrays)
        call_reporting_errors(send) if casts else send()
        return result[0]

    def _send(
        self,
        arrays: Sequence[Array],
        axis: int | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stream: int | None,
        casting: Any,
        results: list[Any],
    ) -> None:
        driver, copying = self.driver, self._copying
        caller = driver.current_stream() if stream is None else stream
        result = driver.empty(shape, dtype, caller)
        if axis is None:
            arrays, axis = [array.reshape(-1) for array in arrays], 0
        n_bytes = math.prod(shape) * dtype.itemsize
        chunk_bytes = max(dtype.itemsize, min(CHUNK_BYTES, n_bytes))
        ring = self._ring_of((min(N_CHUNKS, -(-n_bytes // chunk_bytes)), chunk_bytes), np.dtype(np.uint8))
        events: list[Any] = []
        target = driver.address(result)
        driver.wait(copying, driver.record(caller))  # what used the output's memory before has ended
        try:
            try:
                for index, part in enumerate(cut(arrays, axis, shape, chunk_bytes, dtype.itemsize)):
                    place = index % len(ring)
                    if index >= len(ring):
                        self._wait_on_host(events[place])
                    chunk = np.ndarray(part.shape, dtype, buffer=ring[place])
                    cpu.join(part.arrays, part.axis, chunk, casting=casting, reports_errors=False)
                    driver.copy_to_device(target, address(chunk), chunk.nbytes, copying)
                    events[place : place + 1] = [driver.record(copying)]
                    target += chunk.nbytes
            finally:
                self._let_wait(caller)
        finally:
            self._let_wait(caller)  # again, which is harmless: an interrupt may have fallen into the first
        results.append(result)

    def filling(self, array: Array, slots: Sequence[Array]) -> Filling:
        """Return the way to the device of a batch in page-locked memory that is filled slot by slot."""
        return Filling(self.driver, self._copying, array, slots)

    def _wait_on_host(self, event: Any) -> None:
        """Wait until an event has happened; an interrupt ends the waiting."""
        pause_s = _SHORTEST_PAUSE_S
        while not self.driver.has_happened(event):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

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


def _in_child() -> None:
    keep(dict(_stagings))
    _stagings.clear()


os.register_at_fork(after_in_child=_in_child)
