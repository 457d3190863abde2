"""Products of a matrix and a vector, and of pairs of vectors: each operand is read once, at the speed of memory."""

import functools
import math

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu.matrix_products import SMALL_WORK, multiply_split, scratch
from accel_ops.cpu.memory import address
from accel_ops.cpu.product_pieces import (
    ADD,
    STEP_WORK,
    STORE,
    UNCANCELLED,
    Array,
    Piece,
    Product,
    add_blocks,
    addresses,
    run,
    work_of_bytes,
)
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["multiply_row", "multiply_vectors", "row_pieces"]

_RUN_COLUMNS = 4 << 10  # of a row of the matrix, read at once: long enough for the prefetcher of the CPU
_RUN_BYTES = 1 << 20  # of the rows of a matrix, or of two vectors
_CHAIN_MULTIPLE = 64  # chains that are multiplied side by side, on any CPU
_COST = 8  # in multiplications of matrices, of one that reads its operands from memory
_LONG_TERMS = 1 << 16  # pairs of so many are worth sharing one by one
_PAIR_WORK = 1 << 21
_PAIRS = 1 << 15  # whose addresses are written down


def multiply_row(product: Product) -> None:
    """Multiply one row with one matrix."""
    _, n, k = product.sizes
    if n < _CHAIN_MULTIPLE <= k // PRODUCT_BLOCK:
        multiply_split(product)
    elif n * k <= SMALL_WORK:
        (_multiply_rows if _has_rows(product.b) else _multiply_columns)(product, UNCANCELLED)
    else:
        run(row_pieces(product), work_of_bytes(k * n * product.b.itemsize))


def row_pieces(product: Product) -> list[Piece]:
    """Cut the product of a row and a matrix by the matrix's columns."""
    _, n, k = product.sizes
    b = product.b
    if _has_rows(b):
        step, multiply = _RUN_COLUMNS, _multiply_rows
    else:
        step = max(1, _RUN_BYTES // (k * b.itemsize * _CHAIN_MULTIPLE)) * _CHAIN_MULTIPLE
        multiply = _multiply_columns
    starts = range(0, n, step)
    return [functools.partial(multiply, product.part(slice(None), slice(s, s + step))) for s in starts]


def _has_rows(b: Array) -> bool:
    """Return whether a matrix is best read row by row."""
    return b.strides[1] == b.itemsize and b.strides[0] != 0 and b.dtype.kind != "c"


def _multiply_rows(product: Product, call: pool.Call) -> None:
    """Multiply with a matrix whose rows are contiguous."""
    multiply = product.kernel("multiply_vector")
    for x, rows, start in _steps(product):
        if call.cancelled:
            return
        result = address(product.c)
        multiply(address(x), x.strides[1], address(rows), rows.strides[0], *rows.shape, result, start, scratch())


def _multiply_columns(product: Product, call: pool.Call) -> None:
    """Multiply with a matrix of any layout: best with one whose columns are contiguous."""
    multiply = product.kernel("multiply_rows_by_vector")
    for x, rows, start in _steps(product):
        if call.cancelled:
            return
        result = address(product.c)
        multiply(address(rows), *rows.strides[::-1], address(x), x.strides[1], *rows.shape[::-1], result, start)


def _steps(product: Product) -> list[tuple[Array, Array, int]]:
    """Cut the terms into steps, after each of which an interrupt takes effect."""
    a, b, c, _ = product
    step = max(1, STEP_WORK // (_COST * c.size * PRODUCT_BLOCK)) * PRODUCT_BLOCK
    if step >= len(b):
        return [(a, b, STORE)]
    starts = range(0, len(b), step)
    return [(a[:, s : s + step], b[s : s + step], STORE if s == 0 else ADD) for s in starts]


def multiply_vectors(product: Product) -> None:
    """Multiply pairs of vectors: one long pair, or many, as many side by side as there are lanes."""
    a, b, c, _ = product
    k = a.shape[-1]
    n_items = math.prod(c.shape[:-2])
    if k >= _LONG_TERMS or (n_items == 1 and k > PRODUCT_BLOCK):
        for index in np.ndindex(c.shape[:-2]):
            _multiply_long_vectors(product.item(index), a[index].reshape(-1), b[index].reshape(-1))
        return
    n_blocks = -(-k // PRODUCT_BLOCK)
    results = c if c.flags.c_contiguous else np.empty(c.shape, c.dtype)
    totals = results.reshape(1, -1)
    strides = (a.strides[-1], b.strides[-2])
    multiply = product.kernel("multiply_pairs")
    if n_items == 1:
        multiply(np.array((address(a),)), np.array((address(b),)), *strides, k, address(c))
        return
    step = max(_CHAIN_MULTIPLE, _PAIR_WORK // k)
    many = max(_CHAIN_MULTIPLE, _PAIRS // n_blocks)
    for first in range(0, n_items, many):
        tables = [addresses(operand, slice(first, first + many)) for operand in (a, b)]
        total = totals[:, first : first + many]
        kept = total if n_blocks == 1 else np.empty((n_blocks, total.size), c.dtype)

        def multiply_some(begin: int, call: pool.Call, *, tables: list[Array] = tables, kept: Array = kept) -> None:
            for block in range(n_blocks):
                if call.cancelled:
                    return
                term = block * PRODUCT_BLOCK
                rows = [t[begin : begin + step] + term * stride for t, stride in zip(tables, strides, strict=True)]
                multiply(*rows, *strides, min(PRODUCT_BLOCK, k - term), address(kept[block, begin:]))

        begins = range(0, total.size, step)
        run([functools.partial(multiply_some, begin) for begin in begins], total.size * k * _COST // 2)
        if n_blocks > 1:
            add_blocks(product, kept, total)
    if results is not c:
        c[...] = results


def _multiply_long_vectors(product: Product, a: Array, b: Array) -> None:
    """Multiply one pair of vectors of several blocks of terms."""
    n_whole, rest = divmod(a.size, PRODUCT_BLOCK)
    kept = np.empty((n_whole + (rest > 0), 1), product.c.dtype)
    total = np.empty((1, 1), product.c.dtype)
    is_contiguous = a.strides[0] == b.strides[0] == a.itemsize
    multiply_blocks, multiply_pairs = product.kernel("multiply_vectors"), product.kernel("multiply_pairs")
    step = _RUN_BYTES // (2 * PRODUCT_BLOCK * a.itemsize)

    def multiply_rows(begin: int, stop: int, n_terms: int) -> None:
        starts = np.arange(begin, stop) * PRODUCT_BLOCK
        tables = (address(x) + starts * x.strides[0] for x in (a, b))
        multiply_pairs(*tables, a.strides[0], b.strides[0], n_terms, address(kept[begin:]))

    def multiply_run(begin: int, _call: pool.Call) -> None:
        stop = min(begin + step, n_whole)
        if is_contiguous:
            at = begin * PRODUCT_BLOCK
            multiply_blocks(address(a[at:]), address(b[at:]), stop - begin, address(kept[begin:]))
        else:
            multiply_rows(begin, stop, PRODUCT_BLOCK)

    run([functools.partial(multiply_run, begin) for begin in range(0, n_whole, step)], work_of_bytes(2 * a.nbytes))
    if rest:
        multiply_rows(n_whole, n_whole + 1, rest)
    add_blocks(product, kept, total)
    product.c[...] = total[0, 0]
