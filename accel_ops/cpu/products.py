"""Products of stacks of matrices: which way a product is computed. The bits are the same on each.

The arguments have been checked: one dtype, shapes that fit, an output that overlaps nothing.
"""

import functools
import math
from typing import Any

import numpy as np

from accel_ops.cpu.half_products import multiply_halves
from accel_ops.cpu.matrix_products import SMALL_WORK, multiply_parts, multiply_small, parts
from accel_ops.cpu.memory import empty
from accel_ops.cpu.product_pieces import Array, Product, run
from accel_ops.cpu.vector_products import multiply_row, multiply_vectors, row_pieces

__all__ = ["empty", "matmul"]


def matmul(a: Array, b: Array, out: Array) -> None:
    """Multiply stacks of matrices of one shape of stack. See `accel_ops.matmul`."""
    if out.size == 0:
        return
    if a.shape[-1] == 0:
        out[...] = 0
        return
    if _is_easier_transposed(out):  # of each output the same terms, in each of which the factors may change places
        a, b, out = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2)
    has_rows = out.strides[-1] == out.itemsize or out.shape[-1] == 1
    c = out if has_rows else empty(out.shape, out.dtype)
    dtype = _multiplied_dtype(out.dtype)
    product = Product(a, b, c, dtype.type(0))
    if dtype.itemsize != out.itemsize:
        multiply_halves(product, _multiply)
    else:
        _multiply(product)
    if c is not out:
        out[...] = c


def _is_easier_transposed(out: Array) -> bool:
    """Return whether the transpose of an output has contiguous rows where the output has not, or is a single row."""
    m, n = out.shape[-2:]
    size: int = out.itemsize
    return bool(m > 1 if n == 1 else out.strides[-1] != size and (m == 1 or out.strides[-2] == size))


@functools.cache
def _multiplied_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which is multiplied: that of a kernel. Signed and unsigned integers wrap alike."""
    if dtype == np.float16 or dtype.name == "bfloat16":
        return np.dtype(np.float32)
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind in "iu" else dtype


def _multiply(product: Product) -> None:
    m, n, k = product.sizes
    stack = product.c.shape[:-2]
    n_items = math.prod(stack)
    if m == n == 1:
        multiply_vectors(product)
    elif m * n * k <= SMALL_WORK and n_items > 1:
        multiply_small(product)
    elif n_items == 1:
        (multiply_row if m == 1 else multiply_parts)(product.item((0,) * len(stack)) if stack else product)
    else:
        cut = row_pieces if m == 1 else parts
        run([piece for index in np.ndindex(stack) for piece in cut(product.item(index))], n_items * m * n * k)
