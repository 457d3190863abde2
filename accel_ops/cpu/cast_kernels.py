"""Casts of contiguous float32 to the 16-bit formats, which NumPy converts one element at a time.

Both round to nearest, ties to even. float16 follows the CPU's own conversion, so the kernel exists only where
there is one; the caller takes NumPy's otherwise, which gives the same values.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from accel_ops.cpu.emit import CACHE_LINE_BYTES, fence, for_range, integer, load, splat, store, vector_type
from accel_ops.cpu.native import Kernel, compile_kernel, kept, require

__all__ = ["INVALID", "OVERFLOW", "UNDERFLOW", "cast_kernel"]

# What a kernel returns, or-ed: the conditions of which NumPy's errstate speaks.
OVERFLOW, UNDERFLOW, INVALID = 1, 2, 4
_LANES = CACHE_LINE_BYTES // 2  # a whole cache line of results


def cast_kernel(src: np.dtype[Any], dst: np.dtype[Any], *, stream: bool) -> Kernel | None:
    """Return ``cast(dst, src, n)`` for contiguous items, or None where NumPy's own cast is to be used.

    ``stream`` stores whole lines past the caches; it needs an aligned dst.
    """
    if src != np.float32 or not (src.isnative and dst.isnative):
        return None
    if dst == np.float16:
        return _float32_to_float16(stream=stream)
    return _float32_to_bfloat16(stream=stream) if dst.name == "bfloat16" else None


@kept
def _float32_to_float16(*, stream: bool) -> Kernel | None:
    largest = 0x477FF000  # bits of 65520.0, the least magnitude that rounds to infinity
    infinity = 0x7F800000
    smallest_normal = 0x38800000  # bits of 2**-14

    def convert(builder: Any, values: Any, flags: Any) -> Any:
        from llvmlite import ir

        if platform.machine() not in ("aarch64", "arm64"):
            require("f16c")
        n = values.type.count
        halves = builder.fptrunc(values, vector_type(ir.HalfType(), n))
        bits = builder.bitcast(values, vector_type(ir.IntType(32), n))
        magnitude = builder.and_(bits, splat(integer(0x7FFFFFFF, 32), n))
        at_least_largest = builder.icmp_unsigned(">=", magnitude, splat(integer(largest, 32), n))
        finite = builder.icmp_unsigned("<", magnitude, splat(integer(infinity, 32), n))
        small = builder.icmp_unsigned("<", magnitude, splat(integer(smallest_normal, 32), n))
        inexact = builder.fcmp_unordered("!=", builder.fpext(halves, values.type), values)
        _raise_flag(builder, flags, builder.and_(at_least_largest, finite), OVERFLOW)
        _raise_flag(builder, flags, builder.and_(small, inexact), UNDERFLOW)
        return halves

    return _elementwise_kernel(f"float32_to_float16_{stream:d}", convert, stream=stream)


@kept
def _float32_to_bfloat16(*, stream: bool) -> Kernel | None:
    # On the bits: a bfloat16 is the upper half of a float32, and the instruction that some CPUs have for it
    # flushes subnormals. ml_dtypes reports no overflow, so neither does this; it does report signalling NaN.
    def convert(builder: Any, values: Any, flags: Any) -> Any:
        from llvmlite import ir

        n = values.type.count

        def constant(value: int) -> Any:
            return splat(integer(value, 32), n)

        bits = builder.bitcast(values, vector_type(ir.IntType(32), n))
        upper = builder.lshr(bits, constant(16))
        half_up = builder.add(builder.and_(upper, constant(1)), constant(0x7FFF))  # ties to even
        rounded = builder.lshr(builder.add(bits, half_up), constant(16))
        quiet_nan = builder.or_(upper, constant(0x40))
        is_nan = builder.fcmp_unordered("uno", values, values)
        is_quiet = builder.icmp_unsigned("!=", builder.and_(bits, constant(0x400000)), constant(0))
        _raise_flag(builder, flags, builder.and_(is_nan, builder.not_(is_quiet)), INVALID)
        result = builder.select(is_nan, quiet_nan, rounded)
        return builder.trunc(result, vector_type(ir.IntType(16), n))

    return _elementwise_kernel(f"float32_to_bfloat16_{stream:d}", convert, stream=stream)


def _raise_flag(builder: Any, flags: Any, condition: Any, flag: int) -> None:
    from llvmlite import ir

    mask = builder.bitcast(condition, ir.IntType(condition.type.count))
    is_raised = builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))
    bit = builder.select(is_raised, integer(flag), integer(0))
    builder.store(builder.or_(builder.load(flags), bit), flags)


def _elementwise_kernel(name: str, convert: Callable[[Any, Any, Any], Any], *, stream: bool) -> Kernel | None:
    """Compile the loop over a float32 array that writes what ``convert`` makes of each vector."""

    def build(builder: Any) -> None:
        from llvmlite import ir

        dst, src, n = builder.function.args
        flags = builder.alloca(ir.IntType(64))
        builder.store(integer(0), flags)

        def convert_at(index: Any, lanes: int) -> None:
            address = builder.add(src, builder.mul(index, integer(4)))
            result = convert(builder, load(builder, address, vector_type(ir.FloatType(), lanes)), flags)
            target = builder.add(dst, builder.mul(index, integer(2)))
            store(builder, result, target, stream=stream and lanes == _LANES)

        head = integer(0)
        if stream:
            to_line = builder.lshr(builder.and_(builder.neg(dst), integer(CACHE_LINE_BYTES - 1)), integer(1))
            head = builder.select(builder.icmp_signed("<", to_line, n), to_line, n)
        whole = builder.add(head, builder.and_(builder.sub(n, head), integer(-_LANES)))
        with for_range(builder, head) as index:
            convert_at(index, 1)
        with for_range(builder, whole, _LANES, start=head) as index:
            convert_at(index, _LANES)
        with for_range(builder, n, start=whole) as index:
            convert_at(index, 1)
        fence(builder)
        builder.ret(builder.load(flags))

    return compile_kernel(name, 3, build)
