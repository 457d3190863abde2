"""What no thread may be in the middle of when the process forks.

A child has only the thread that forked. A lock that another thread held is held there for ever, and so is a
module that it was importing. So before a fork the forking thread waits until nobody compiles and nobody imports
a compiler, and keeps it so until the fork is done. Everything else is built so that nothing is ever held: the
pool starts afresh in the child, the memory cache consists of atomic steps.
"""

import contextlib
import importlib
import os
import sys
import threading
from typing import Any

from accel_ops.cpu.native import the_compiler

__all__: list[str] = []

_COMPILERS = ("llvmlite", "llvmlite.binding", "numba")

# What the forks that are under way in a thread hold. A signal handler may fork in the middle of a fork.
_forks = threading.local()


def _foreign_locks() -> list[contextlib.AbstractContextManager[object]]:
    """Return the locks around compilation in Numba and llvmlite, in the order in which a thread takes them.

    They are internals, looked up where they are loaded, whoever loaded them. A test notices if they go.
    """
    locks: list[Any] = []
    numba_compiler = sys.modules.get("numba.core.compiler_lock")
    if numba_compiler is not None and hasattr(numba_compiler, "global_compiler_lock"):
        locks.append(numba_compiler.global_compiler_lock)
    llvmlite_library = sys.modules.get("llvmlite.binding.ffi")
    if llvmlite_library is not None and hasattr(llvmlite_library, "lib"):
        locks.append(llvmlite_library.lib._lock)
    return locks


def _finish_imports() -> None:
    """Wait for another thread that is importing a compiler: importing a module waits for its import."""
    for name in _COMPILERS:
        module = sys.modules.get(name)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _before() -> None:
    held = contextlib.ExitStack()
    if not hasattr(_forks, "stacks"):
        _forks.stacks = []
    _forks.stacks.append(held)
    attempt = object()
    held.callback(the_compiler.drop, attempt)
    the_compiler.wait(attempt)
    _finish_imports()
    for lock in _foreign_locks():
        held.enter_context(lock)


def _after() -> None:
    _forks.stacks.pop().close()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
