"""Page-locked host memory, recycled: a device copies from it without the CPU, and long after the copy was asked for.

A block is written again only when the device has done with it. Nobody tells us which copies read an array that has
died: those of our own stream, and whatever the caller has given to CUDA's default stream and to those that it orders.
So when a block comes back, an event is recorded in both, and the block is idle when they have happened. Freeing a block
waits for them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from accel_ops.cpu.blocks import BlockCache
from accel_ops.cpu.memory import is_plain, kept_bytes
from accel_ops.errors import UnsupportedDTypeError
from accel_ops.gpu.driver import Driver

__all__ = ["DEFAULT_STREAM", "PinnedMemory"]

DEFAULT_STREAM = 0


class PinnedMemory:
    """The page-locked memory of one device in one process."""

    def __init__(self, driver: Driver, copying_stream: int) -> None:
        self._cache = BlockCache(functools.partial(_Block, driver, (DEFAULT_STREAM, copying_stream)), kept_bytes)
        self.info, self.trim = self._cache.info, self._cache.trim

    def empty(self, shape: Iterable[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised C-ordered array, aligned to a page.

        Raises
        ------
        UnsupportedDTypeError
            Its elements refer to Python objects, which no device can read.
        """
        shape = tuple(shape)
        if not is_plain(dtype):
            msg = f"page-locked memory holds plain elements, got {dtype}, whose elements refer to others; convert it"
            raise UnsupportedDTypeError(msg)
        n_bytes = dtype.itemsize
        for length in shape:
            n_bytes *= length
        if n_bytes > np.iinfo(np.intp).max:
            msg = f"an array must have fewer than 2**63 bytes, got shape {shape} of {dtype}; join fewer arrays"
            raise ValueError(msg)
        memory = np.asarray(self._cache.lease(max(1, n_bytes)))[:n_bytes]
        return memory.view(dtype).reshape(shape)


class _Block:
    """Page-locked memory of one size class, freed with the last reference to it."""

    __slots__ = ("_driver", "_events", "_process", "_streams", "address", "freed", "size")

    def __init__(self, driver: Driver, streams: tuple[int, ...], size: int) -> None:
        self._process = 0  # until there is something to free
        self._driver, self._streams, self.size = driver, streams, size
        self._events: list[Any] | None = None  # while something on the host refers to the memory
        self.freed = 0
        self.address = driver.allocate_pinned(size)
        self._process = os.getpid()

    def retire(self) -> None:
        """Note that nothing on the host refers to the memory any more."""
        self._events = [self._driver.record(stream) for stream in self._streams]

    def is_idle(self) -> bool:
        """Return whether the device has done with it."""
        self._events = [event for event in self._events or () if not self._driver.has_happened(event)]
        return not self._events

    def lend(self) -> None:
        """Note that something on the host refers to the memory again."""
        self._events = None

    def __del__(self) -> None:
        if self._process != os.getpid():  # a forked child must not touch CUDA
            return
        if self._events is None:
            self.retire()
        for event in self._events or ():
            self._driver.synchronize(event)
        self._driver.free_pinned(self.address)
