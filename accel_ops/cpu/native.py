"""Machine code at first use: kernels written as LLVM IR and compiled with llvmlite alone.

Copies need instructions that neither NumPy nor Numba reaches: stores that bypass the cache, shuffles that
transpose a tile in registers. Importing llvmlite takes about 50 ms once and compiling a kernel 10 to 100 ms,
against 0.2 s for importing Numba, and nothing has to be kept on disk. The compiled functions are called through
ctypes, which releases the GIL.

Nobody waits for a kernel. While another thread compiles (or this one does, and a signal handler came in
between), when the interpreter is ending, and where address space is short, there is none, and the caller lets
NumPy do the work.
"""

import ctypes
import functools
import itertools
import mmap
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec

__all__ = ["Claim", "Kernel", "compile_kernel", "kept", "require", "the_compiler"]

# LLVM ends the process when the operating system refuses it memory, so that much is asked for, and given back,
# before it is used: twice what importing llvmlite and compiling all kernels was seen to map.
_RESERVE_BYTES = 512 << 20

Kernel = Callable[..., int]
_Parameters = ParamSpec("_Parameters")

_serial = itertools.count()


class Claim:
    """The right to compile, which one attempt at a time may hold.

    It is a lock that no interrupt can leave locked: whoever takes it names itself beforehand, so that giving it
    back does not depend on how far the taking came.
    """

    def __init__(self) -> None:
        self._holder: dict[str, tuple[int, object]] = {}

    def take(self, attempt: object) -> bool:
        """Take the right if it is free; return whether this attempt has it."""
        return self._holder.setdefault("holder", (threading.get_ident(), attempt))[1] is attempt

    def drop(self, attempt: object) -> None:
        """Give the right back if this attempt has it."""
        if self._holder.get("holder", (0, None))[1] is attempt:
            del self._holder["holder"]

    def take_unless_held_here(self, attempt: object) -> bool:
        """Take the right if it is free; return whether no other thread has it now."""
        return self.take(attempt) or self._holder.get("holder", (0, None))[0] == threading.get_ident()


the_compiler = Claim()


class UnsupportedKernelError(Exception):
    """The CPU has no instructions for a kernel, now or later."""


def kept(make: Callable[_Parameters, Kernel | None]) -> Callable[_Parameters, Kernel | None]:
    """Decorate a function that makes a kernel: one that there is is kept, one that there will never be too."""
    kernels: dict[tuple[object, ...], Kernel | None] = {}

    @functools.wraps(make)
    def find(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Kernel | None:
        key = (*args, *kwargs.values())
        if key in kernels:
            return kernels[key]
        try:
            kernel = make(*args, **kwargs)
        except UnsupportedKernelError:
            kernels[key] = None
            return None
        if kernel is not None:
            kernels[key] = kernel
        return kernel

    find.cache_clear = kernels.clear  # type: ignore[attr-defined]  # as functools.cache has it
    return find


def compile_kernel(name: str, n_arguments: int, build: Callable[[Any], None]) -> Kernel | None:
    """Compile one function of 64-bit integers (addresses, sizes, strides) and return it, if that can be done now.

    ``build(builder)`` writes the body of ``int64 name(int64, ...)`` and returns what it returns. The callable
    that is returned trusts its arguments.
    """
    if sys.is_finalizing() or not _has_address_space():
        return None
    attempt = object()
    try:
        if not the_compiler.take(attempt):
            return None
        import llvmlite.binding as llvm
        from llvmlite import ir

        name = f"{name}_{next(_serial)}"  # a kernel may be compiled again after an interrupt
        int64 = ir.IntType(64)
        module = ir.Module(name)
        module.triple = llvm.get_process_triple()
        function = ir.Function(module, ir.FunctionType(int64, [int64] * n_arguments), name)
        build(ir.IRBuilder(function.append_basic_block("entry")))
        compiled = llvm.parse_assembly(str(module))
        compiled.verify()
        engine = _engine()
        engine.add_module(compiled)
        engine.finalize_object()
        address = engine.get_function_address(name)
    except (ImportError, OSError, MemoryError):  # refused after all, by somebody else who took it meanwhile
        return None
    finally:
        the_compiler.drop(attempt)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n_arguments)(address)


def require(feature: str) -> None:
    """Raise UnsupportedKernelError unless this machine's CPU has a feature, by LLVM's name. For use in a build."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get(feature, False):
        raise UnsupportedKernelError(feature)


@functools.cache
def _engine() -> Any:
    """Return the execution engine that owns all compiled code."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, jit=True
    )
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _has_address_space() -> bool:
    """Return whether LLVM would get the memory that it may want."""
    try:
        mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
