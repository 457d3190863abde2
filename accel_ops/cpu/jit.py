"""Numba kernels at first use: compiled once for each dtype, kept on disk, and safe beside forks and signals.

A kernel's first parameter is a zero of the dtype, parameters whose names end in ``table`` are arrays of int64, and
all others are integers. Importing Numba, compiling and loading run on a thread that no signal reaches, because an
exception in the middle would leave locks taken; the right to compile, which a fork waits for, is held meanwhile.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from accel_ops.cpu.native import has_address_space, run_apart_until_done, the_compiler

__all__ = ["Kernel", "compiled", "kernel"]

Kernel = Callable[..., None]

_kernels: dict[tuple[str, str, np.dtype[Any]], Kernel] = {}


def kernel(module: str, name: str, dtype: np.dtype[Any]) -> Kernel:
    """Return a kernel of a module of this package for a dtype.

    Raises
    ------
    MemoryError
        There is too little address space to compile or to load it.
    """
    key = (module, name, dtype)
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = _load(*key)
    return found


def _load(module: str, name: str, dtype: np.dtype[Any]) -> Kernel:
    if not has_address_space():
        msg = f"compiling a kernel for {dtype} needs 512 MiB of address space, which was refused; raise the limit"
        raise MemoryError(msg)
    return the_compiler.held_for(lambda: run_apart_until_done(lambda: _compile(module, name, dtype)))


def _compile(module: str, name: str, dtype: np.dtype[Any]) -> Kernel:
    """Return the function that Numba made of a kernel, from the cache on disk where there is one."""
    import pickle

    import numba

    typeof: Any = numba.typeof
    dispatcher: Any = getattr(importlib.import_module(f"accel_ops.cpu.{module}"), name)
    number = typeof(dtype.type(0))
    integers = numba.types.Array(numba.types.int64, 1, "C")
    parameters = dispatcher.py_func.__code__.co_varnames[1 : dispatcher.py_func.__code__.co_argcount]
    signature = (number, *(integers if p.endswith("table") else numba.types.int64 for p in parameters))
    try:
        function: Kernel = dispatcher.compile(signature)
    except (OSError, EOFError, pickle.UnpicklingError):  # the cache cannot be written, or cannot be read
        if signature in dispatcher.overloads:
            function = dispatcher.overloads[signature].entry_point
        else:
            function = numba.njit(nogil=True)(dispatcher.py_func).compile(signature)
    return function


def compiled(function: Callable[..., Any]) -> Any:
    """Decorate a kernel: to be compiled by Numba, without the GIL, and kept on disk where that can be done."""
    import numba

    # Numba's cache looks at the kernel's own file, and would give back a kernel that was made of an older tile. It
    # goes by this name too.
    function.__qualname__ = f"{function.__qualname__}_{_digest_of_sources()}"
    dispatcher = numba.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # no folder that can be written: it is compiled in each process
        dispatcher.enable_caching()
    return dispatcher


@functools.cache
def _digest_of_sources() -> str:
    """Return a digest of all that kernels may be made of."""
    import hashlib
    from pathlib import Path

    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in (package / "orders.py", *sorted((package / "cpu").glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
