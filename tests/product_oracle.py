"""What the bits of a product must be: the order of the terms followed literally, one scalar operation after another.

Nothing here comes from the package. The terms are cut into blocks of 256. In a block ``p = +0.0``, then
``p = fma(a[k], b[k], p)`` for ascending k; a complex block has four such chains and is (rr - ii, ri + ir). The results
of blocks are added in ascending order, starting with the first. float16 and bfloat16 are multiplied in float32 and
rounded once. LLVM may neither contract nor reorder any of it, because nothing says that it may (no fastmath).
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["fused_multiply_add", "oracle_matmul"]


@intrinsic
def _fma(_context: Any, first: Any, second: Any, third: Any) -> Any:
    """Return first * second + third of scalars of one type, rounded once."""
    if not (first == second == third and first in (types.float32, types.float64)):
        return None

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, arguments)

    return first(first, second, third), write


@numba.njit
def fused_multiply_add(first, second, third):
    """Return first * second + third of two float64 or float32 scalars, rounded once: what every chain is made of."""
    return _fma(first, second, third)


@numba.njit
def _real(a, b, out):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = out[i, j]  # zero, of the element's type
            for first in range(0, a.shape[1], 256):
                p = out[i, j]
                for k in range(first, min(first + 256, a.shape[1])):
                    p = _fma(a[i, k], b[k, j], p)
                total = p if first == 0 else total + p
            out[i, j] = total


@numba.njit
def _complex(ar, ai, br, bi, real, imag):
    for i in range(real.shape[0]):
        for j in range(real.shape[1]):
            total_real, total_imag = real[i, j], imag[i, j]  # zeros
            for first in range(0, ar.shape[1], 256):
                rr = ii = ri = ir_ = real[i, j]
                for k in range(first, min(first + 256, ar.shape[1])):
                    rr = _fma(ar[i, k], br[k, j], rr)
                    ii = _fma(ai[i, k], bi[k, j], ii)
                    ri = _fma(ar[i, k], bi[k, j], ri)
                    ir_ = _fma(ai[i, k], br[k, j], ir_)
                block_real, block_imag = rr - ii, ri + ir_
                if first == 0:
                    total_real, total_imag = block_real, block_imag
                else:
                    total_real, total_imag = total_real + block_real, total_imag + block_imag
            real[i, j], imag[i, j] = total_real, total_imag


def oracle_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the product of (M, K) and (K, N), of one dtype: float16, bfloat16, float32, float64 or complex."""
    assert a.ndim == b.ndim == 2, (a.shape, b.shape)
    assert a.shape[1] == b.shape[0], (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    shape = a.shape[0], b.shape[1]
    if a.dtype.kind == "c":
        part = np.dtype(f"f{a.dtype.itemsize // 2}")
        parts = [np.array(x, part, order="C") for x in (a.real, a.imag, b.real, b.imag)]
        real, imag = np.zeros(shape, part), np.zeros(shape, part)
        _complex(*parts, real, imag)
        product = np.empty(shape, a.dtype)
        product.real, product.imag = real, imag
        return product
    # Every float16 and every bfloat16 is a float32, so that only the last conversion rounds.
    wide = a.dtype if a.dtype.itemsize > 2 else np.dtype(np.float32)
    assert wide in (np.float32, np.float64), wide
    result = np.zeros(shape, wide)
    _real(np.array(a, wide, order="C"), np.array(b, wide, order="C"), result)
    with np.errstate(all="ignore"):
        return result.astype(a.dtype)
