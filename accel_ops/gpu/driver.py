"""The seam between staging and CUDA: what is asked of a device, and who may ask.

`CupyDriver` answers for real. Tests put an adversary in its place, which does every copy at the last moment allowed.
Streams and addresses are integers, as CUDA's own interfaces exchange them; a stream of 0 is CUDA's default one.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from accel_ops.errors import ForkedDeviceError

__all__ = ["Driver", "driver_for", "opened"]


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
        """Give page-locked memory back. Waits for what the device still does with it."""

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

    def synchronize(self, event: Any) -> None:
        """Wait until an event has happened."""


# The drivers that were opened in this process, by the index of their device ...
_drivers: dict[int, Driver] = {}
# ... and the indices of those that an ancestor had opened when it forked.
_inherited: set[int] = set()


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
        used = ", ".join(f"cuda:{each}" for each in sorted(_inherited))
        msg = (
            f"a process forked by one that used CUDA cannot use it, and its parent used {used} before; start processes "
            f"with multiprocessing's 'spawn' or 'forkserver', or use the device in the parent only after it has forked"
        )
        raise ForkedDeviceError(msg)
    from accel_ops.gpu.cupy_driver import CupyDriver

    return _drivers.setdefault(index, CupyDriver(index))  # of two that are opened at once the first is kept


def opened() -> list[Driver]:
    """Return the drivers of the devices that this process has used."""
    return list(_drivers.values())


def _forget_drivers() -> None:
    """In a forked child: what was inherited is not touched any more, nor freed."""
    _inherited.update(_drivers)
    _drivers.clear()


os.register_at_fork(after_in_child=_forget_drivers)
