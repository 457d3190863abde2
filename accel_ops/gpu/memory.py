"""Page-locked host memory, recycled: a device copies from it without the CPU, and long after the copy was asked for.

A block is written again, or freed, only when the device has done with it. When nothing on the host refers to a block
any more, an event is recorded in each stream that may read it; the block is idle when these have happened. Nothing
waits for that: while a block is busy another one is taken.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from accel_ops.cpu import memory
from accel_ops.cpu.blocks import BlockCache
from accel_ops.errors import UnsupportedDTypeError
from accel_ops.gpu.driver import Driver

__all__ = ["PinnedMemory"]


class PinnedMemory:
    """Page-locked memory that is read by the work of some streams of one device, in one process.

    Parameters
    ----------
    driver
        The device.
    streams
        Those whose work may read the memory when nothing on the host refers to it any more.
    """

    def __init__(self, driver: Driver, streams: Sequence[int]) -> None:
        self._driver, self._streams = driver, streams
        self._allocations: dict[int, _Allocation] = {}  # by their ids, as long as there is memory to free
        # Of blocks that are given up. Appending is all that happens when one dies: see cpu/blocks.py.
        self._given_up: collections.deque[weakref.ref[_Block]] = collections.deque()
        self._cache = BlockCache(self._allocate, memory.kept_bytes)
        memory.add_cache(self._cache)

    def empty(self, shape: Iterable[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised C-ordered array, aligned to a page.

        Raises
        ------
        UnsupportedDTypeError
            Its elements refer to Python objects, which no device can read.
        """
        shape = tuple(shape)
        if not memory.is_plain(dtype):
            msg = f"page-locked memory holds plain elements, got {dtype}, whose elements refer to others; convert it"
            raise UnsupportedDTypeError(msg)
        n_bytes = dtype.itemsize
        for length in shape:
            n_bytes *= length
        if n_bytes > np.iinfo(np.intp).max:
            msg = f"an array must have fewer than 2**63 bytes, got shape {shape} of {dtype}; join fewer arrays"
            raise ValueError(msg)
        self._free()
        lease = np.asarray(self._cache.lease(max(1, n_bytes)))
        return np.ndarray(shape, dtype, buffer=lease)

    def _allocate(self, size: int) -> _Block:
        block = _Block(self._driver, self._streams, size)
        allocation = _Allocation(block, self._given_up.append)
        allocation.block_address, allocation.events = block.address, block.events
        self._allocations[id(allocation)] = allocation
        return block

    def _free(self) -> None:
        """Free the memory of blocks that were given up, as far as the device has done with it."""
        for reference in tuple(self._given_up):
            allocation = self._allocations.get(id(reference))
            if allocation is None:  # another thread has freed it
                continue
            if not allocation.events:  # it was given up with its lease
                allocation.events += [self._driver.record(stream) for stream in self._streams]
            if all(self._driver.has_happened(event) for event in tuple(allocation.events)):
                if self._allocations.pop(id(reference), None) is not None:
                    self._driver.free_pinned(allocation.block_address)
                with contextlib.suppress(ValueError):  # another thread took it out
                    self._given_up.remove(reference)


class _Block:
    """Page-locked memory of one size class."""

    __slots__ = ("__weakref__", "_driver", "_streams", "address", "events", "freed", "size")

    def __init__(self, driver: Driver, streams: Sequence[int], size: int) -> None:
        self._driver, self._streams, self.size = driver, streams, size
        self.events: list[Any] = []  # after which the device has done with it; none while it is lent
        self.freed = 0
        self.address = driver.allocate_pinned(size)

    def lend(self) -> None:
        """Note that something on the host refers to the memory again."""
        self.events.clear()

    def retire(self) -> None:
        """Note that nothing on the host refers to the memory any more."""
        self.events += [self._driver.record(stream) for stream in self._streams]

    def is_idle(self) -> bool:
        """Return whether the device has done with it."""
        return all(self._driver.has_happened(event) for event in self.events)


class _Allocation(weakref.ref[_Block]):
    """Tells that a block has been given up, and what there is to free then."""

    __slots__ = ("block_address", "events")

    block_address: int
    events: list[Any]
