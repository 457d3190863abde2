"""A batch that its producers fill in page-locked memory: each part travels when all of its slots are filled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_ops.cpu.memory import address
from accel_ops.gpu.driver import Driver

__all__ = ["Filling"]

Array = np.ndarray[Any, Any]

_PART_BYTES = 1 << 20  # 40 us of a link of 25 GB/s: some five times what asking for a copy costs


class _Part:
    """Neighbouring slots that travel together."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start  # in bytes of the batch
        self.unfilled: dict[int, None] = {}
        self.unsent = [None]  # who takes it out sends the part


class Filling:
    """The way of one batch to the device. `filled` may be called from any thread, and for a slot more than once.

    Parameters
    ----------
    driver, copying
        The device, and the stream in which its copies are made.
    array, slots
        The batch in page-locked memory, and the parts of it that are filled one by one.
    """

    def __init__(self, driver: Driver, copying: int, array: Array, slots: Sequence[Array]) -> None:
        self._process = 0  # until there is an output
        self._driver, self._copying, self._array = driver, copying, array
        caller = driver.current_stream()
        self._result = driver.empty(array.shape, array.dtype, caller)
        self._target = driver.address(self._result)
        driver.wait(copying, driver.record(caller))  # what used the output's memory before has ended
        self._caller, self._process = caller, os.getpid()
        self._parts: dict[int, _Part] = {}
        part = _Part(0)
        for index, slot in enumerate(slots):
            if slot.size == 0:
                continue
            part.unfilled[index] = None
            part.stop += slot.nbytes
            self._parts[index] = part
            if slot.flags.c_contiguous and len(slots) > 1 and part.stop - part.start >= _PART_BYTES:
                part = _Part(part.stop)

    def filled(self, index: int) -> None:
        """Note that a slot has been written, and send its part if it was the last one there."""
        part = self._parts.get(index)
        if part is None:
            return
        part.unfilled.pop(index, None)
        if part.unfilled:
            return
        try:
            part.unsent.pop()
        except IndexError:  # another thread does it
            return
        n_bytes = part.stop - part.start
        self._driver.copy_to_device(
            self._target + part.start, address(self._array) + part.start, n_bytes, self._copying
        )

    def result(self) -> Any:
        """Return the batch on the device, ready for what the caller's current stream is given next."""
        self._let_wait(self._driver.current_stream())
        return self._result

    def __del__(self) -> None:
        # The output may be freed now, in the order of the stream it was taken for, in which copies are to be before.
        if self._process == os.getpid():
            self._let_wait(self._caller)

    def _let_wait(self, stream: int) -> None:
        self._driver.wait(stream, self._driver.record(self._copying))
