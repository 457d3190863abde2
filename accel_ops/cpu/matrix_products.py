"""Products of matrices: parts of the output, runs of terms where it is small, and many small ones in a call."""

import functools
import math
import threading
from typing import Any

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu.emit import CACHE_LINE_BYTES
from accel_ops.cpu.jit import kernel
from accel_ops.cpu.memory import address
from accel_ops.cpu.product_pieces import (
    ADD,
    GRAIN,
    MANY,
    PANEL_COLUMNS,
    STEP_WORK,
    STORE,
    Array,
    Piece,
    Product,
    add_blocks,
    addresses,
    cut,
    run,
)
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["SMALL_WORK", "call_multiply", "multiply_parts", "multiply_small", "multiply_split", "parts", "scratch"]

# A part of the output: so large that packing its columns costs little beside it. It is halved while there are fewer
# than MANY of more than _SHARED_WORK multiplications. Two parts cost a single thread nothing, from n = 200 on; more do.
_ROWS, _COLUMNS = 1024, PANEL_COLUMNS
_LEAST_ROWS, _LEAST_COLUMNS, _ROW_MULTIPLE = 128, 192, 8
_SHARED_WORK, _TWO_PARTS_WORK = 1 << 26, 1 << 23
# Matrices of a stack are multiplied one after the other in one call if one product is no larger.
SMALL_WORK = 1 << 18
_BATCH_WORK = 1 << 24
_BATCH_ITEMS = 1 << 15  # whose addresses are written down
# A right operand of this size is read where it lies, in the caches, and not packed; so is one for a few rows.
_DIRECT_BYTES, _DIRECT_ROWS = 64 << 10, 16
_LONG_TERMS = 16 * PRODUCT_BLOCK  # so many can be cut into runs of blocks
_KEPT_BYTES = 4 << 20  # of block results that wait to be added
_PANEL_BYTES = PRODUCT_BLOCK * (PANEL_COLUMNS + 16) * 16 + CACHE_LINE_BYTES  # the last vector may be partial

_memory = threading.local()


def multiply_parts(product: Product) -> None:
    """Multiply one pair of matrices."""
    m, n, k = product.sizes
    if m * n * k <= SMALL_WORK:
        call_multiply(*product, STORE)
        return
    pieces = parts(product)
    is_long = k >= _LONG_TERMS and 4 * m * n * product.c.itemsize <= _KEPT_BYTES
    if len(pieces) < MANY and is_long and m * n * k >= 2 * _SHARED_WORK:
        multiply_split(product)
    else:
        run(pieces, m * n * k)


def parts(product: Product) -> list[Piece]:
    """Cut the output of one pair into parts."""
    m, n, k = product.sizes
    cost = _cost(product.zero.dtype)
    n_rows, n_columns = -(-m * cost // (2 * _ROWS)) if cost > 1 else -(-m // _ROWS), -(-n // _COLUMNS)
    work = cost * m * n * k
    wanted = max(min(MANY, work // _SHARED_WORK), 2 if work >= _TWO_PARTS_WORK else 1)
    while n_rows * n_columns < wanted:
        # Columns first: rows of the left operand are read where they lie, but each part packs its columns anew.
        if n // n_columns >= _LEAST_COLUMNS:
            n_columns *= 2
        elif m // n_rows >= _LEAST_ROWS:
            n_rows *= 2
        else:
            break
    return [
        functools.partial(_multiply_part, product.part(rows, columns))
        for rows in cut(m, n_rows, _ROW_MULTIPLE)
        for columns in cut(n, n_columns, _widest_lanes(product.zero.dtype))
    ]


def _cost(dtype: np.dtype[Any]) -> int:
    """Return the multiplications of real numbers in one of a dtype."""
    return 4 if dtype.kind == "c" else 1


def _widest_lanes(dtype: np.dtype[Any]) -> int:
    """Return the lanes of the widest vectors there are."""
    part_bytes: int = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return min(64 // part_bytes, 16)


def _multiply_part(product: Product, call: pool.Call) -> None:
    """Multiply one part, in steps after each of which an interrupt takes effect."""
    a, b, c, zero = product
    m, n, k = product.sizes
    step = max(1, STEP_WORK // (_cost(zero.dtype) * m * n * PRODUCT_BLOCK)) * PRODUCT_BLOCK
    for term in range(0, k, step):
        if call.cancelled:
            return
        call_multiply(a[:, term : term + step], b[term : term + step], c, zero, STORE if term == 0 else ADD)


def call_multiply(a: Array, b: Array, c: Array, zero: Any, start: int, block_bytes: int = 0) -> None:
    """Multiply on the calling thread; with ``block_bytes`` each block's result goes to a place of its own."""
    multiply = kernel("product_kernels", "multiply", zero.dtype)
    places = np.array((address(a), address(b), address(c)))
    sizes = (*c.shape, a.shape[1], *a.strides, *b.strides, c.strides[0])
    multiply(zero, places, *sizes, block_bytes, start, _is_packed(a.shape[0], b), scratch())


def _is_packed(m: int, b: Array) -> bool:
    """Return whether the right operand is packed for m rows: where it is, it can be read if its rows are contiguous."""
    has_rows = (b.strides[-1] == b.itemsize or b.shape[-1] == 1) and b.strides[-2] != 0
    is_near = m <= _DIRECT_ROWS or b.shape[-1] * b.shape[-2] * b.itemsize <= _DIRECT_BYTES
    return not (has_rows and is_near) or b.dtype.kind == "c"


def scratch() -> int:
    """Return the address of memory for one panel, the calling thread's own, kept for its next piece."""
    try:
        start, _ = _memory.panel
    except AttributeError:
        memory = np.empty(_PANEL_BYTES, np.uint8)
        start = -(-address(memory) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        _memory.panel = (start, memory)  # in one step: a handler may come in between and do the same
    return int(start)


def multiply_split(product: Product) -> None:
    """Multiply runs of blocks of terms side by side, keep each block's result, and add them in order."""
    a, b, c, zero = product
    m, n, k = product.sizes
    block_bytes = m * n * c.itemsize
    total = np.empty((m, n), c.dtype)
    wave = max(2, _KEPT_BYTES // block_bytes) * PRODUCT_BLOCK
    for begin in range(0, k, wave):
        stop = min(begin + wave, k)
        n_blocks = -(-(stop - begin) // PRODUCT_BLOCK)
        # What has been added so far comes first. It is read, and not added to: a forked child may do a piece again.
        kept = np.empty((1 + n_blocks, m, n), c.dtype)
        if begin:
            kept[0] = total
        longest = max(1, STEP_WORK // (m * n * PRODUCT_BLOCK))

        def multiply_run(blocks: slice, _call: pool.Call, *, begin: int = begin, kept: Array = kept) -> None:
            terms = slice(begin + blocks.start * PRODUCT_BLOCK, min(begin + blocks.stop * PRODUCT_BLOCK, k))
            call_multiply(a[:, terms], b[terms], kept[1 + blocks.start], zero, STORE, block_bytes)

        runs = cut(n_blocks, max(2 * MANY, -(-n_blocks // longest)), 1)
        run([functools.partial(multiply_run, blocks) for blocks in runs], m * n * (stop - begin))
        add_blocks(product, kept if begin else kept[1:], total)
    c[...] = total


def multiply_small(product: Product) -> None:
    """Multiply a stack of small matrices, many in one call."""
    a, b, c, zero = product
    m, n, k = product.sizes
    n_items = math.prod(c.shape[:-2])
    multiply = kernel("product_kernels", "multiply", zero.dtype)
    sizes = (m, n, k, *a.strides[-2:], *b.strides[-2:], c.strides[-2], 0, STORE, _is_packed(m, b))
    for first in range(0, n_items, _BATCH_ITEMS):
        places = np.stack([addresses(operand, slice(first, first + _BATCH_ITEMS)) for operand in (a, b, c)], axis=1)
        work = len(places) * m * n * k

        def multiply_some(items: slice, _call: pool.Call, *, places: Array = places) -> None:
            multiply(zero, places[items].reshape(-1), *sizes, scratch())

        some = cut(len(places), max(min(MANY, work // GRAIN), work // _BATCH_WORK), 1)
        run([functools.partial(multiply_some, items) for items in some], work)
