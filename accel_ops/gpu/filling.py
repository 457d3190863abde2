"""A batch that its producers fill in page-locked memory: each part travels when all of its slots are filled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_ops.cpu.memory import address
from accel_ops.gpu.driver import Driver, forked_error

__all__ = ["Filling"]

Array = np.ndarray[Any, Any]

# Neighbouring slots travel together up to this. Not measured: it shall be long beside asking for a copy.
_PART_BYTES = 1 << 20


class _Part:
    """Neighbouring slots that travel together."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start  # in bytes of the batch
        self.unfilled: dict[int, None] = {}
        self.unsent: list[None] = [None]  # who takes it out sends the part


class Filling:
    """The way of one batch to the device. `filled` may be called from any thread, and for a slot more than once.

    Parameters
    ----------
    driver, copying
        The device, and the stream in which its copies are made.
    array, slots
        The batch in page-locked memory, and the parts of it that are filled one by one.

    Attributes
    ----------
    result
        The batch on the device, for use in the stream that was the caller's current one here, in which every copy that
        has been asked for comes first.
    """

    def __init__(self, driver: Driver, copying: int, array: Array, slots: Sequence[Array]) -> None:
        self._driver, self._copying, self._array = driver, copying, array
        self._process = os.getpid()
        self._caller = driver.current_stream()
        self.result = driver.empty(array.shape, array.dtype, self._caller)
        self._target = driver.address(self.result)
        driver.wait(copying, driver.record(self._caller))  # what used the output's memory before has ended
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
        if self._process != os.getpid():
            raise forked_error()
        part.unfilled.pop(index, None)
        if part.unfilled:
            return
        try:
            part.unsent.pop()
        except IndexError:  # it has been sent, or another thread does it
            return
        try:
            self._send(part)
        except BaseException:  # an interrupt too: it is to be sent when a slot of it is filled again
            part.unsent.append(None)
            raise

    def _send(self, part: _Part) -> None:
        source = address(self._array) + part.start
        try:
            try:
                self._driver.copy_to_device(self._target + part.start, source, part.stop - part.start, self._copying)
            finally:
                self._driver.wait(self._caller, self._driver.record(self._copying))
        finally:  # again, which is harmless: an interrupt may have fallen into the first
            self._driver.wait(self._caller, self._driver.record(self._copying))
