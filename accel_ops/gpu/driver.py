"""The seam between staging and CUDA: what is asked of a device, and who may ask.

`CupyDriver` answers for real. Tests put an adversary in its place, which does every copy at the last moment allowed.
Streams and addresses are integers, as CUDA's own interfaces exchange them; a stream of 0 is CUDA's default one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from accel_ops.errors import BackendUnavailableError, ForkedDeviceError

__all__ = ["DEFAULT_STREAM", "Driver", "driver_for", "first_call", "forked_error", "is_forked", "keep", "opened"]

DEFAULT_STREAM = 0  # CUDA's own, which is ordered with all streams that were not made to be independent of it


class Driver(Protocol):
    """One device of this process. Its methods may be called from any thread, with any device current."""

    def allocate_pinned(self, n_bytes: int) -> int:
        """Return the address of page-locked host memory.

        Raises
        ------
        MemoryError
            There is not enough.
        """

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back, with which the device has done."""

    def is_pinned(self, address: int) -> bool:
        """Return whether an address of the host is page-locked, whoever allocated it."""

    def new_stream(self) -> int:
        """Return a new stream that orders nothing but its own work, kept until the process ends."""

    def current_stream(self) -> int:
        """Return the stream in which the calling thread's work on the device is done."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        """Return an uninitialised array in the device's memory, for use in a stream."""

    def address(self, array: Any) -> int:
        """Return where an array lies in the device's memory."""

    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """Copy from page-locked memory when the stream has come so far, and return at once."""

    def record(self, stream: int) -> Any:
        """Return an event that happens when the stream has done what it has been given until now."""

    def has_happened(self, event: Any) -> bool:
        """Return whether an event has happened."""

    def wait(self, stream: int, event: Any) -> None:
        """Let a stream do nothing further until an event has happened, and return at once."""


# The drivers that were opened in this process, by the index of their device; and the devices for which CUDA was called.
_drivers: dict[int, Driver] = {}
_used: set[int] = set()
# In a forked child: the devices that an ancestor had used, and what belongs to them. It is kept, because CuPy's objects
# call CUDA when they die.
_inherited: set[int] = set()
_kept: list[object] = []


def driver_for(index: int) -> Driver:
    """Return the driver of a device, whose first use makes the first CUDA calls of this process.

    Raises
    ------
    ForkedDeviceError
        An ancestor of this process used CUDA before it forked.
    BackendUnavailableError
        There is no such device, or no CuPy.
    """
    found = _drivers.get(index)
    if found is not None:
        return found
    if _inherited:
        raise forked_error()
    from accel_ops.gpu.cupy_driver import CupyDriver

    return _drivers.setdefault(index, CupyDriver(index))  # of two that are opened at once the first is kept


def opened() -> list[Driver]:
    """Return the drivers of the devices that this process has used."""
    return list(_drivers.values())


@contextlib.contextmanager
def first_call(index: int) -> Iterator[None]:
    """Note that CUDA is called for a device from now on, unless what is done here finds that there is none."""
    is_new = index not in _used
    _used.add(index)
    try:
        yield
    except BackendUnavailableError:
        if is_new:
            _used.discard(index)
        raise


def forked_error() -> ForkedDeviceError:
    """Return the error of a device call in a forked child."""
    used = ", ".join(f"cuda:{each}" for each in sorted(_inherited)) or "CUDA"
    return ForkedDeviceError(
        f"a process that was forked by one that used CUDA cannot use it, and {used} had been used here before; start "
        f"processes with multiprocessing's 'spawn' or 'forkserver', or use the device only after forking"
    )


def is_forked() -> bool:
    """Return whether this process was forked after accel_ops had been imported."""
    return _process != os.getpid()


def keep(value: object) -> None:
    """In a forked child: keep something of a device alive for ever."""
    _kept.append(value)


_process = os.getpid()


def _in_child() -> None:
    _inherited.update(_used, _drivers)
    keep(dict(_drivers))
    _drivers.clear()
    _used.clear()


os.register_at_fork(after_in_child=_in_child)
