"""Products of float16 and bfloat16: multiplied in float32, rounded once; only parts are converted at a time."""

import functools
import math
from collections.abc import Callable

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.cpu.matrix_products import SMALL_WORK, call_multiply
from accel_ops.cpu.product_pieces import ADD, STORE, Array, Product, cut, run
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["multiply_halves"]

_ELEMENTS = 1 << 20  # of each operand of a stack that are converted to float32 at once
# A part of a large output, and the terms that are converted at once: 3 MB of float32.
_ROWS, _COLUMNS, _TERMS = 256, 264, 4 * PRODUCT_BLOCK


def multiply_halves(product: Product, multiply: Callable[[Product], None]) -> None:
    """Multiply a stack; ``multiply`` does it for float32."""
    m, n, k = product.sizes
    if m * n * k <= SMALL_WORK:
        _multiply_stack(product, multiply)
        return
    items = [product.item(index) for index in np.ndindex(product.c.shape[:-2])]
    parts = [(rows, columns) for rows in cut(m, -(-m // _ROWS), 8) for columns in cut(n, -(-n // _COLUMNS), 8)]
    pieces = [functools.partial(_multiply_part, item.part(*part)) for item in items for part in parts]
    run(pieces, len(items) * m * n * k)


def _multiply_stack(product: Product, multiply: Callable[[Product], None]) -> None:
    """Multiply small matrices, a part of the stack at a time."""
    a, b, c, zero = product
    stack = c.shape[:-2]
    largest = max(x.shape[-1] * x.shape[-2] for x in (a, b, c))
    per_entry = largest * math.prod(stack[1:])
    if stack and per_entry > _ELEMENTS:
        for index in range(stack[0]):
            _multiply_stack(product.item((index,)), multiply)
        return
    step = max(1, _ELEMENTS // per_entry)
    for first in range(0, stack[0] if stack else 1, step):
        part = (slice(first, first + step),) if stack else ()
        total = np.empty(c[part].shape, zero.dtype)
        multiply(Product(a[part].astype(zero.dtype), b[part].astype(zero.dtype), total, zero))
        _round_into(c[part], total)


def _multiply_part(product: Product, call: pool.Call) -> None:
    """Multiply one part of a large output."""
    a, b, c, zero = product
    total = np.empty(c.shape, zero.dtype)
    for term in range(0, len(b), _TERMS):
        if call.cancelled:
            return
        terms = slice(term, term + _TERMS)
        left, right = (x.astype(zero.dtype, order="C") for x in (a[:, terms], b[terms]))
        call_multiply(left, right, total, zero, STORE if term == 0 else ADD)
    _round_into(c, total)


def _round_into(out: Array, values: Array) -> None:
    with np.errstate(all="ignore"):  # products report no floating-point errors
        call_in_default_environment(functools.partial(np.copyto, out, values, casting="unsafe"))
