"""The floating-point mode inside a kernel: set on entry and put back before Python runs again."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel_ops.cpu.emit import integer, variable

__all__ = ["enter_default_mode", "restore_mode"]

_X86_DEFAULT = 0x1F80  # MXCSR: round to nearest, subnormals kept, all exceptions masked


@intrinsic
def enter_default_mode(_context: Any) -> Any:
    """Round to nearest and keep subnormals; return the mode before."""

    def write(_target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if _is_x86(builder):
            word = variable(builder, integer(0, 32))
            _call(builder, "llvm.x86.sse.stmxcsr", word)
            before = builder.zext(builder.load(word), ir.IntType(64))
            builder.store(integer(_X86_DEFAULT, 32), word)
            _call(builder, "llvm.x86.sse.ldmxcsr", word)
            return before
        if _is_arm(builder):
            function_type = ir.FunctionType(ir.IntType(64), [])
            before = builder.asm(function_type, "mrs $0, fpcr", "=r", [], side_effect=True)
            _set_arm_mode(builder, integer(0))
            return before
        return integer(0)

    return types.int64(), write


@intrinsic
def restore_mode(_context: Any, mode: Any) -> Any:
    """Put back what `enter_default_mode` returned."""

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if _is_x86(builder):
            word = variable(builder, builder.trunc(arguments[0], ir.IntType(32)))
            _call(builder, "llvm.x86.sse.ldmxcsr", word)
        elif _is_arm(builder):
            _set_arm_mode(builder, arguments[0])

    return types.void(mode), write


def _is_x86(builder: Any) -> bool:
    return str(builder.module.triple).startswith(("x86_64", "i686"))


def _is_arm(builder: Any) -> bool:
    return str(builder.module.triple).startswith(("aarch64", "arm64"))


def _call(builder: Any, name: str, word: Any) -> None:
    pointer = builder.bitcast(word, ir.IntType(8).as_pointer())
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [pointer.type]), name)
    builder.call(declared, [pointer])


def _set_arm_mode(builder: Any, mode: Any) -> None:
    function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.asm(function_type, "msr fpcr, $0", "r", [mode], side_effect=True)
