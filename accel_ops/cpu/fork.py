"""What no thread may be in the middle of when the process forks.

A child has only the thread that forked. A lock that another thread held is held there for ever, and so is a
module that it was importing. So before a fork the forking thread waits until nobody compiles and nobody imports
a compiler or what is imported here at first use, and keeps it so until the fork is done. Everything else is built
so that nothing is ever held: the pool starts afresh in the child, the memory cache consists of atomic steps.
"""

import contextlib
import logging  # noqa: F401 - its hook before a fork takes a lock that a compiling thread may need: see below
import os
import sys
import threading
import time
from typing import Any

from accel_ops.cpu.native import is_being_imported, is_importing_here, the_compiler

__all__: list[str] = []

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


class _Fork:
    """What one fork holds: the right to compile, and the locks around compilation elsewhere."""

    def __init__(self) -> None:
        self.is_prepared = False
        self._locks: list[Any] = []

    def prepare(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not the_compiler.take_unless_held_here(self) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        while is_being_imported() and not is_importing_here() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for lock in _foreign_locks():
            self._locks.append(lock)  # first, so that an interrupt cannot leave it taken and forgotten
            lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self.is_prepared = True

    def finish(self) -> None:
        while self._locks:
            with contextlib.suppress(RuntimeError):  # the deadline passed before it could be taken
                self._locks[-1].release()
            self._locks.pop()
        the_compiler.drop(self)
        self.is_prepared = False  # last: after an interrupt the next hook finishes it again


def _before() -> None:
    if not hasattr(_forks, "under_way"):
        _forks.under_way = []
    if _forks.under_way and _forks.under_way[-1].is_prepared:
        return
    fork = _Fork()
    try:
        _forks.under_way.append(fork)
        fork.prepare()
    except BaseException:  # an interrupt, which the interpreter drops: the next hook begins again
        fork.finish()
        _forks.under_way.remove(fork)
        raise


def _after() -> None:
    # One that is not prepared is being prepared further up: a handler has forked in the middle of that.
    under_way = getattr(_forks, "under_way", [])
    while under_way and under_way[-1].is_prepared:
        under_way[-1].finish()
        under_way.pop()


# Hooks before a fork run in the reverse order of their registration. logging, imported above, has registered its
# own already, so that ours waits before that one takes its lock.
#
# A signal that came during the fork is handled as soon as Python code runs, which is a hook, and the interpreter
# drops what a hook raises. So each is registered several times, and does nothing when it has been done already.
for _ in range(3):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
