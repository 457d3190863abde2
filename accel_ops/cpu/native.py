"""Machine code at first use: kernels written as LLVM IR and compiled with llvmlite alone.

Copies need instructions that neither NumPy nor Numba reaches: stores that bypass the cache, shuffles that
transpose a tile in registers. Importing llvmlite takes about 50 ms once and compiling a kernel 10 to 100 ms,
against 0.2 s for importing Numba, and nothing has to be kept on disk. The compiled functions are called through
ctypes, which releases the GIL.

Compilation runs on a thread that no signal reaches, because an exception in the middle of llvmlite would leave its
lock taken. Nobody else waits for it: while a thread compiles (this one too, if a signal handler came in between),
when the interpreter is ending, and where address space is short, there is no kernel, and NumPy does the work.
"""

import ctypes
import functools
import importlib
import itertools
import mmap
import sys
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, ParamSpec, TypeVar

from accel_ops.cpu import pool

__all__ = [
    "SLOW_IMPORTS",
    "Claim",
    "Kernel",
    "compile_kernel",
    "has_address_space",
    "import_apart",
    "is_being_imported",
    "is_importing_here",
    "kept",
    "require",
    "run_apart_until_done",
    "the_compiler",
]

# LLVM ends the process when the operating system refuses it memory, so that much is asked for, and given back,
# before it is used: twice what importing llvmlite and compiling all kernels was seen to map.
_RESERVE_BYTES = 512 << 20

# Others' modules during whose import a process does not fork: the compilers, and CuPy.
SLOW_IMPORTS = ("llvmlite", "llvmlite.binding", "numba", "cupy")

_POLL_S = 0.001
_PATIENCE_S = 10.0  # how long a call waits for a kernel before it goes on without one
_ATTEMPT_S = 60.0  # after which another attempt at what must be done begins: a fork may have lost the first
_LOCK_PATIENCE_S = 0.1  # and for llvmlite to become free

Kernel = Callable[..., int]
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

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
        return self._holder.setdefault("holder", (pool.acting_thread(), attempt))[1] is attempt

    def drop(self, attempt: object) -> None:
        """Give the right back if this attempt has it."""
        if self._holder.get("holder", (0, None))[1] is attempt:
            del self._holder["holder"]

    def take_unless_held_here(self, attempt: object) -> bool:
        """Take the right if it is free; return whether no other thread has it now."""
        return self.take(attempt) or self._holder.get("holder", (0, None))[0] == pool.acting_thread()

    def held_for(self, work: Callable[[], _Result]) -> _Result:
        """Do some work when no other thread has the right, and let none take it meanwhile."""
        attempt = object()
        try:
            while not self.take_unless_held_here(attempt):
                time.sleep(_POLL_S)
            return work()
        finally:
            self.drop(attempt)


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
    if sys.is_finalizing() or is_being_imported() or not has_address_space():
        return None
    attempt = object()
    try:
        if not the_compiler.take(attempt):
            return None
        address = pool.run_apart(functools.partial(_compile, name, n_arguments, build), _PATIENCE_S)
    finally:
        # After an interrupt the thread may still be at it, in a lock of llvmlite's that keeps others out.
        the_compiler.drop(attempt)
    if address is None:
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n_arguments)(address)


def _compile(name: str, n_arguments: int, build: Callable[[Any], None]) -> int | None:
    """Return the address of the compiled function."""
    try:
        import llvmlite.binding as llvm
        from llvmlite import ir
    except (ImportError, OSError, MemoryError):  # memory was refused after all: somebody else has taken it
        return None
    lock = llvm.ffi.lib._lock._lock
    if not lock.acquire(timeout=_LOCK_PATIENCE_S):  # its holder may be who waits for us
        return None
    try:
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
        return int(engine.get_function_address(name))
    finally:
        lock.release()


def import_apart(name: str) -> ModuleType:
    """Import a module on a thread that no signal reaches, and not while the process forks."""
    return the_compiler.held_for(lambda: run_apart_until_done(lambda: importlib.import_module(name)))


def run_apart_until_done(function: Callable[[], _Result]) -> _Result:
    """Run a function on a thread that no signal reaches; again if it is lost, with that thread, by a fork.

    Raises
    ------
    RuntimeError
        This thread is in the middle of an import that the function waits for: a signal handler or a finaliser has
        come in between.
    """
    if is_importing_here():
        msg = (
            "what is imported or compiled at its first use cannot be used by a signal handler or a finaliser in the "
            "middle of an import of it or of its compiler; use it once beforehand"
        )
        raise RuntimeError(msg)
    if _is_compiling_here():
        return function()
    result = None
    while result is None:
        result = pool.run_apart(function, _ATTEMPT_S)
    return result


def is_being_imported() -> bool:
    """Return whether a thread is in the middle of a slow import, or of one of this package."""
    names = [*SLOW_IMPORTS, *(name for name in tuple(sys.modules) if name.startswith("accel_ops."))]
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in names)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def is_importing_here() -> bool:
    """Return whether this thread is in the middle of such an import."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        is_ours = frame.f_code.co_name == "<module>" and package in (*SLOW_IMPORTS, "accel_ops")
        if is_ours and getattr(frame.f_globals.get("__spec__"), "_initializing", False):
            return True
        frame = frame.f_back
    return False


def _is_compiling_here() -> bool:
    """Return whether this thread is in the middle of a compilation of Numba's, whose lock it can take again."""
    numba_compiler = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(getattr(numba_compiler, "global_compiler_lock", None), "_lock", None)
    return lock is not None and bool(lock._is_owned())


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


def has_address_space() -> bool:
    """Return whether LLVM would get the memory that it may want."""
    try:
        mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
