"""What no thread may be in the middle of when the process forks.

A child has only the thread that forked. A lock that another thread held is held there for ever, and so is a
module that it was importing. So before a fork the forking thread waits until nobody compiles and nobody imports
a compiler, and keeps it so until the fork is done. Everything else is built so that nothing is ever held: the
pool starts afresh in the child, the memory cache consists of atomic steps.
"""

import contextlib
import logging  # noqa: F401 - its hook before a fork takes a lock that a compiling thread may need: see below
import os
import sys
import threading
import time
from typing import Any

from accel_ops.cpu.native import the_compiler

__all__: list[str] = []

_COMPILERS = ("llvmlite", "llvmlite.binding", "numba")

# A fork is not held up for longer, whatever the other thread is waiting for.
_DEADLINE_S = 60.0
_POLL_S = 0.001

# What the forks that are under way in a thread hold. A signal handler may fork in the middle of a fork.
_forks = threading.local()


def _foreign_locks() -> list[Any]:
    """Return the locks around compilation in Numba and llvmlite, in the order in which a thread takes them.

    They are internals, looked up where they are loaded, whoever loaded them. A test notices if they go.
    """
    locks: list[Any] = []
    numba_compiler = sys.modules.get("numba.core.compiler_lock")
    if numba_compiler is not None and hasattr(numba_compiler, "global_compiler_lock"):
        locks.append(numba_compiler.global_compiler_lock._lock)
    llvmlite_library = sys.modules.get("llvmlite.binding.ffi")
    if llvmlite_library is not None and hasattr(llvmlite_library, "lib"):
        locks.append(llvmlite_library.lib._lock._lock)
    return locks


def _is_importing_elsewhere() -> bool:
    """Return whether another thread is in the middle of importing a compiler."""
    modules = (sys.modules.get(name) for name in _COMPILERS)
    specs = (getattr(module, "__spec__", None) for module in modules)
    return any(getattr(spec, "_initializing", False) for spec in specs) and not _is_importing_here()


def _is_importing_here() -> bool:
    """Return whether this fork comes from within such an import, by a signal handler say."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").partition(".")[0] in _COMPILERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Fork:
    """What one fork holds: the right to compile and the locks around compilation elsewhere."""

    def __init__(self) -> None:
        self._locks: list[Any] = []

    def prepare(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not the_compiler.take_unless_held_here(self) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        while _is_importing_elsewhere() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for lock in _foreign_locks():
            self._locks.append(lock)  # first, so that an interrupt cannot leave it taken and forgotten
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        while self._locks:
            with contextlib.suppress(RuntimeError):  # the deadline passed before it could be taken
                self._locks.pop().release()
        the_compiler.drop(self)


def _before() -> None:
    fork = _Fork()
    if not hasattr(_forks, "under_way"):
        _forks.under_way = []
    _forks.under_way.append(fork)
    fork.prepare()


def _after() -> None:
    _forks.under_way.pop().finish()


# Hooks before a fork run in the reverse order of their registration. logging, imported above, has registered its
# own already, so that ours waits before that one takes its lock.
os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
