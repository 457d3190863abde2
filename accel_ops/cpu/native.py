"""Machine code at first use: kernels written as LLVM IR and compiled with llvmlite alone.

Copies need instructions that neither NumPy nor Numba reaches: stores that bypass the cache, shuffles that
transpose a tile in registers. Importing llvmlite takes about 50 ms once and compiling a kernel 10 to 50 ms,
against 0.2 s for importing Numba, and nothing has to be kept on disk. The compiled functions are called through
ctypes, which releases the GIL.
"""

import ctypes
import functools
import itertools
import mmap
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["COMPILE_LOCK", "Kernel", "compile_kernel", "host_has"]

# Held while a kernel is compiled, and across a fork (cpu/fork.py), so that no child inherits half of one.
COMPILE_LOCK = threading.RLock()

# LLVM ends the process when the operating system refuses it memory, so that much is asked for, and given back,
# before it is used.
_RESERVE_BYTES = 256 << 20

Kernel = Callable[..., int]

_serial = itertools.count()


def compile_kernel(name: str, n_arguments: int, build: Callable[[Any], None]) -> Kernel:
    """Compile one function of 64-bit integers (addresses, sizes, strides) and return it.

    ``build(builder)`` writes the body of ``int64 name(int64, ...)`` and returns what it returns. The callable
    that is returned trusts its arguments.
    """
    with COMPILE_LOCK:  # around the imports too: a child could wait for ever for one that was half done
        import llvmlite.binding as llvm
        from llvmlite import ir

        _check_address_space()
        name = f"{name}_{next(_serial)}"  # two threads may compile the same kernel, one after the other
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
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n_arguments)(address)


def host_has(feature: str) -> bool:
    """Return whether this machine's CPU has a feature, by LLVM's name for it."""
    with COMPILE_LOCK:
        import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get(feature, False))


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


def _check_address_space() -> None:
    """Raise MemoryError where LLVM might be refused memory."""
    try:
        mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as exc:
        msg = (
            f"compiling a copy kernel needs {_RESERVE_BYTES >> 20} MiB of free address space, and the operating "
            f"system refused it; raise the limit (ulimit -v) or make one such call before it is set"
        )
        raise MemoryError(msg) from exc
