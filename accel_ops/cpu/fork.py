"""What no thread may be in the middle of when the process forks.

A child has only the thread that forked. A lock that another thread held is held there for ever, so the locks
around compilation are taken before a fork and released on both sides. Everything else is built so that it
needs no lock: the pool starts afresh in the child, the memory cache consists of atomic steps.
"""

import contextlib
import os
import sys
import threading
from typing import Any

from accel_ops.cpu.native import COMPILE_LOCK

__all__: list[str] = []

# What each thread that is forking holds. Forks may overlap, so this belongs to the thread.
_held = threading.local()


def _compile_locks() -> list[contextlib.AbstractContextManager[object]]:
    """Return the locks around compilation, in the order in which a compiling thread takes them.

    The second and third are internals of Numba and llvmlite, looked up where they are loaded, whoever loaded
    them. A test notices if they go.
    """
    locks: list[Any] = [COMPILE_LOCK]
    numba_compiler = sys.modules.get("numba.core.compiler_lock")
    if numba_compiler is not None and hasattr(numba_compiler, "global_compiler_lock"):
        locks.append(numba_compiler.global_compiler_lock)
    llvmlite_library = sys.modules.get("llvmlite.binding.ffi")
    if llvmlite_library is not None and hasattr(llvmlite_library, "lib"):
        locks.append(llvmlite_library.lib._lock)
    return locks


def _take_locks() -> None:
    _held.locks = contextlib.ExitStack()
    for lock in _compile_locks():
        _held.locks.enter_context(lock)


def _release_locks() -> None:
    _held.locks.close()


os.register_at_fork(before=_take_locks, after_in_parent=_release_locks, after_in_child=_release_locks)
