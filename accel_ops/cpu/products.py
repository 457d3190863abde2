"""Products of stacks of matrices: cut into pieces by their shapes, and a kernel chosen for each.

The arguments have been checked: one dtype, shapes that fit, an output that overlaps nothing. Pieces are parts of the
output, or runs of blocks of terms where the output is small; each block's result is then kept and added in order.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_ops import budget
from accel_ops.cpu import pool
from accel_ops.cpu.copying import address
from accel_ops.cpu.emit import CACHE_LINE_BYTES
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.cpu.jit import kernel
from accel_ops.cpu.memory import empty
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["empty", "matmul"]

Array = np.ndarray[Any, Any]

# Multiplications that pay for one more thread. `python -m benchmarks.grain` measures it: a worker is woken in 20 to
# 80 us, in which a core multiplies 2**19 to 2**21 pairs of float64.
_GRAIN = 1 << 20
# The same where each operand is used once, and memory decides.
_GRAIN_BYTES = 2 << 20
# A piece: so much work that packing its columns costs little beside it, and little enough that an interrupt waits
# for 5 ms at the most. It is halved while there are fewer than _MANY of more than _SHARED_WORK.
_ROWS, _COLUMNS = 2048, 528
_LEAST_ROWS, _LEAST_COLUMNS, _ROW_MULTIPLE = 128, 192, 8
_MANY, _SHARED_WORK = 4, 1 << 26
_STEP_WORK = 1 << 27
# Items of a stack are multiplied one after the other in one call if one is no larger.
_SMALL_WORK = 1 << 18
_BATCH_WORK = 1 << 24
_BATCH_ITEMS = 1 << 15  # whose addresses are written down
# A right operand of this size is read where it lies, in the caches, and not packed.
_DIRECT_BYTES, _DIRECT_ROWS = 256 << 10, 16
_RUN_COLUMNS = 4 << 10  # of a row of the matrix, read at once where a vector is multiplied with it
_RUN_BYTES = 1 << 20  # of the rows of a matrix that is multiplied with a vector
_KEPT_BYTES = 4 << 20  # of block results that wait to be added
_FEW_CHAINS = 64
_HALF_ELEMENTS = 1 << 20  # of each operand that are converted to float32 at once
_STORE, _ADD = 0, 1  # see cpu/outputs.py, which only kernels import

_scratch = threading.local()
_uncancelled = pool.Call()  # what pieces are given that run on the calling thread alone


class _Product(NamedTuple):
    """One stack of products, c = a b, whose rows of c are contiguous."""

    a: Array
    b: Array
    c: Array
    zero: Any  # of the dtype in which is multiplied

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.c.shape[-2], self.c.shape[-1], self.a.shape[-1]

    def part(self, index: tuple[Any, ...], rows: slice, columns: slice) -> "_Product":
        return _Product(
            self.a[(*index, rows, slice(None))],
            self.b[(*index, slice(None), columns)],
            self.c[(*index, rows, columns)],
            self.zero,
        )

    def kernel(self, name: str) -> Callable[..., None]:
        return functools.partial(kernel("product_kernels", name, self.zero.dtype), self.zero)


def matmul(a: Array, b: Array, out: Array) -> None:
    """Multiply stacks of matrices of one shape of stack. See `accel_ops.matmul`."""
    m, n, k = out.shape[-2], out.shape[-1], a.shape[-1]
    if out.size == 0:
        return
    if k == 0:
        out[...] = 0
        return
    size = out.itemsize
    is_turned = (n == 1 and m > 1) or (n > 1 and out.strides[-1] != size and (m == 1 or out.strides[-2] == size))
    if is_turned:  # the product of the transposes; each output has the same terms, whose order within a pair is free
        a, b, out = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2)
    dtype = _multiplied_dtype(out.dtype)
    if dtype != out.dtype:
        _multiply_halves(a, b, out, dtype)
        return
    rows_are_contiguous = out.strides[-1] == size or out.shape[-1] == 1
    c = out if rows_are_contiguous else empty(out.shape, out.dtype)
    _multiply(_Product(a, b, c, dtype.type(0)))
    if c is not out:
        out[...] = c


@functools.cache
def _multiplied_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which is multiplied: that of a kernel. Signed and unsigned integers wrap alike."""
    if (dtype.kind == "f" and dtype.itemsize == 2) or dtype.name == "bfloat16":
        return np.dtype(np.float32)
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "i" else dtype


def _multiply(product: _Product) -> None:
    m, n, k = product.sizes
    stack = product.c.shape[:-2]
    n_items = math.prod(stack)
    if m == n == 1:
        _multiply_vectors(product)
    elif m * n * k <= _SMALL_WORK and not (m == n_items == 1):
        _multiply_small(product)
    elif n_items == 1:
        index = (0,) * len(stack)
        _multiply_item(_Product(product.a[index], product.b[index], product.c[index], product.zero))
    else:
        _run_all(
            [piece for index in np.ndindex(stack) for piece in _item_pieces(product.part(index, _ALL, _ALL))],
            n_items * m * n * k,
        )


_ALL = slice(None)


def _multiply_item(product: _Product) -> None:
    """Multiply one large pair."""
    m, n, k = product.sizes
    if m == 1:
        if n < _FEW_CHAINS and k >= _FEW_CHAINS * PRODUCT_BLOCK:
            _multiply_split(product)
            return
        pieces = _vector_pieces(product)
        _run_all(pieces, k * n * product.b.itemsize * _GRAIN // _GRAIN_BYTES)
        return
    pieces = _item_pieces(product)
    is_long = k >= 16 * PRODUCT_BLOCK and m * n * product.c.itemsize * 4 <= _KEPT_BYTES
    if len(pieces) < 4 and is_long and m * n * k >= 2 * _SHARED_WORK:
        _multiply_split(product)
    else:
        _run_all(pieces, m * n * k)


def _run_all(pieces: Sequence[Callable[[pool.Call], None]], work: int) -> None:
    """Run pieces on as many threads as their work, in multiplications, is worth."""
    threads = budget.get_num_threads() if work >= 2 * _GRAIN and len(pieces) > 1 else 1
    if threads == 1:
        for piece in pieces:
            piece(_uncancelled)
        return
    workers = min(threads, work // _GRAIN)
    call = pool.Call()
    pool.run(lambda index: pieces[index](call), len(pieces), workers=workers, budget=threads, call=call)


# One pair of matrices


def _item_pieces(product: _Product) -> list[Callable[[pool.Call], None]]:
    """Cut the output of one pair into parts."""
    m, n, k = product.sizes
    if m == 1:
        return _vector_pieces(product)
    cost = 4 if product.zero.dtype.kind == "c" else 1
    n_rows, n_columns = -(-m // _ROWS), -(-n // _COLUMNS)
    while n_rows * n_columns < _MANY and cost * m * n * k > n_rows * n_columns * _SHARED_WORK:
        # Columns first: rows of the left operand are read where they lie, but each part packs its columns anew.
        if n // n_columns >= _LEAST_COLUMNS:
            n_columns *= 2
        elif m // n_rows >= _LEAST_ROWS:
            n_rows *= 2
        else:
            break
    return [
        functools.partial(_multiply_part, product.part((), rows, columns))
        for rows in _cut(m, n_rows, _ROW_MULTIPLE)
        for columns in _cut(n, n_columns, _lanes(product.zero.dtype))
    ]


def _lanes(dtype: np.dtype[Any]) -> int:
    """Return the lanes of the widest vectors."""
    part_bytes: int = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return min(64 // part_bytes, 16)


def _cut(length: int, n_parts: int, multiple: int) -> list[slice]:
    """Cut a length into parts of nearly as many multiples each."""
    n_multiples = -(-length // multiple)
    n_parts = max(1, n_parts)
    edges = sorted({n_multiples * part // n_parts * multiple for part in range(n_parts)} | {length})
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def _multiply_part(product: _Product, call: pool.Call) -> None:
    """Multiply one piece, in steps after each of which an interrupt takes effect."""
    m, n, k = product.sizes
    step = max(1, _STEP_WORK // (m * n * PRODUCT_BLOCK)) * PRODUCT_BLOCK
    start = _STORE
    for term in range(0, k, step):
        if call.cancelled:
            return
        _call_multiply(product.a[:, term : term + step], product.b[term : term + step], product.c, product.zero, start)
        start = _ADD


def _call_multiply(a: Array, b: Array, c: Array, zero: Any, start: int, block_bytes: int = 0) -> None:
    multiply = kernel("product_kernels", "multiply", zero.dtype)
    tables = (np.array([address(x)]) for x in (a, b, c))
    m, k = a.shape
    n = b.shape[1]
    multiply(
        zero,
        *tables,
        m,
        n,
        k,
        *a.strides,
        *b.strides,
        c.strides[0],
        block_bytes,
        start,
        _packs(m, b),
        _scratch_address(),
    )


def _packs(m: int, b: Array) -> bool:
    """Return whether the right operand is packed: it must lie in rows to be read where it is, and near."""
    adjacent = b.strides[-1] == b.itemsize or b.shape[-1] == 1
    is_direct = adjacent and b.dtype.kind != "c" and b.strides[-2] != 0
    return not (is_direct and (m <= _DIRECT_ROWS or b.shape[-1] * b.shape[-2] * b.itemsize <= _DIRECT_BYTES))


def _scratch_address() -> int:
    """Return memory for one panel, the calling thread's own, kept for its next piece."""
    if not hasattr(_scratch, "panel"):
        _scratch.panel = np.empty(_PANEL_BYTES, np.uint8)
    return -(-address(_scratch.panel) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


_PANEL_BYTES = PRODUCT_BLOCK * (_COLUMNS + 16) * 16 + CACHE_LINE_BYTES
_MOST_CHAINS = 64


# One matrix and a vector


def _vector_pieces(product: _Product) -> list[Callable[[pool.Call], None]]:
    """Cut the product of a row and a matrix by the matrix's columns."""
    _, n, k = product.sizes
    b = product.b
    is_read_by_rows = b.strides[1] == b.itemsize and b.dtype.kind != "c" and b.strides[0] != 0
    if is_read_by_rows:
        step = _RUN_COLUMNS
        run = _multiply_by_rows
    else:
        step = max(_MOST_CHAINS, _RUN_BYTES // (k * b.itemsize) // _MOST_CHAINS * _MOST_CHAINS)
        run = _multiply_by_columns
    return [functools.partial(run, product.part((), _ALL, slice(start, start + step))) for start in range(0, n, step)]


def _multiply_by_rows(product: _Product, call: pool.Call) -> None:
    a, b, c, _ = product
    step = max(1, _STEP_WORK // (8 * b.shape[1] * PRODUCT_BLOCK)) * PRODUCT_BLOCK
    multiply = product.kernel("multiply_vector")
    start = _STORE
    for term in range(0, b.shape[0], step):
        if call.cancelled:
            return
        x, rows = a[:, term : term + step], b[term : term + step]
        multiply(
            address(x), x.strides[1], address(rows), rows.strides[0], *rows.shape, address(c), start, _scratch_address()
        )
        start = _ADD


def _multiply_by_columns(product: _Product, call: pool.Call) -> None:
    a, b, c, _ = product
    multiply = product.kernel("multiply_rows_by_vector")
    step = max(1, _STEP_WORK // (8 * b.shape[1] * PRODUCT_BLOCK)) * PRODUCT_BLOCK
    start = _STORE
    for term in range(0, b.shape[0], step):
        if call.cancelled:
            return
        x, rows = a[:, term : term + step], b[term : term + step].T
        multiply(address(rows), *rows.strides, address(x), x.strides[1], *rows.shape, address(c), start)
        start = _ADD


# Small outputs of many terms


def _multiply_split(product: _Product) -> None:
    """Multiply runs of blocks side by side, keep each block's result, and add them in order."""
    a, b, c, zero = product
    m, n, k = product.sizes
    block_bytes = m * n * c.itemsize
    total = np.empty((m, n), c.dtype)
    wave = max(2, _KEPT_BYTES // block_bytes) * PRODUCT_BLOCK
    for begin in range(0, k, wave):
        terms = slice(begin, min(begin + wave, k))
        n_blocks = -(-(terms.stop - begin) // PRODUCT_BLOCK)
        kept = np.empty((n_blocks, m, n), c.dtype)
        run = max(1, min(-(-n_blocks // _MANY), _STEP_WORK // (m * n * PRODUCT_BLOCK)))

        def multiply_run(
            index: int, _call: pool.Call, *, begin: int = begin, kept: Array = kept, run: int = run
        ) -> None:
            first = index * run
            part = slice(begin + first * PRODUCT_BLOCK, min(begin + (first + run) * PRODUCT_BLOCK, k))
            _call_multiply(a[:, part], b[part], kept[first], zero, _STORE, block_bytes)

        runs = [functools.partial(multiply_run, index) for index in range(-(-n_blocks // run))]
        _run_all(runs, m * n * (terms.stop - begin))
        _add_blocks(product, kept, total, is_first=begin == 0)
    c[...] = total


def _add_blocks(product: _Product, kept: Array, total: Array, *, is_first: bool) -> None:
    """Add the results of blocks to the total, in order; parts of the output side by side."""
    add = product.kernel("add_blocks")
    flat, sums = kept.reshape(len(kept), -1), total.reshape(-1)
    step = max(1024, -(-sums.size // _MANY))
    start = _STORE if is_first else _ADD

    def add_part(begin: int, _call: pool.Call) -> None:
        n = min(step, sums.size - begin)
        add(address(flat[:, begin:]), len(flat), flat.strides[0], address(sums[begin:]), n, start)

    _run_all(
        [functools.partial(add_part, begin) for begin in range(0, sums.size, step)],
        kept.nbytes * _GRAIN // (4 * _GRAIN_BYTES),
    )


# Many small pairs


def _multiply_small(product: _Product) -> None:
    """Multiply a stack of small matrices, many in one call."""
    a, b, c, zero = product
    m, n, k = product.sizes
    n_items = math.prod(c.shape[:-2])
    multiply = kernel("product_kernels", "multiply", zero.dtype)
    sizes = (m, n, k, *a.strides[-2:], *b.strides[-2:], c.strides[-2], 0, _STORE, _packs(m, b))
    for first in range(0, n_items, _BATCH_ITEMS):
        tables = [_addresses(x, slice(first, first + _BATCH_ITEMS)) for x in (a, b, c)]
        work = len(tables[0]) * m * n * k
        parts = _cut(len(tables[0]), max(min(_MANY, work // _GRAIN), work // _BATCH_WORK), 1)

        def multiply_some(part: slice, _call: pool.Call, *, tables: list[Array] = tables) -> None:
            multiply(zero, *(table[part] for table in tables), *sizes, _scratch_address())

        _run_all([functools.partial(multiply_some, part) for part in parts], work)


def _addresses(array: Array, items: slice) -> Array:
    """Return where the matrices of a stack begin, some of them, in C order."""
    stack, strides = array.shape[:-2], array.strides[:-2]
    n_items = math.prod(stack)
    if n_items == 1:
        return np.array([address(array)])
    numbers = np.arange(n_items)[items]
    table = np.full(len(numbers), address(array))
    for length, stride in zip(reversed(stack[1:]), reversed(strides[1:]), strict=True):
        numbers, position = np.divmod(numbers, length)
        table += position * stride
    table += numbers * strides[0]
    return table


def _multiply_vectors(product: _Product) -> None:
    """Multiply pairs of vectors: one long pair, or many, as many lanes as there are side by side."""
    a, b, c, _ = product
    k = a.shape[-1]
    n_items = math.prod(c.shape[:-2])
    if n_items == 1 and k > PRODUCT_BLOCK:
        _multiply_long_vectors(product, a.reshape(-1), b.reshape(-1))
        return
    n_blocks = -(-k // PRODUCT_BLOCK)
    results = c if c.flags.c_contiguous else np.empty(c.shape, c.dtype)
    totals = results.reshape(1, -1)
    multiply = product.kernel("multiply_pairs")
    many = max(64, _BATCH_ITEMS // n_blocks)
    for first in range(0, n_items, many):
        tables = [_addresses(x, slice(first, first + many)) for x in (a, b)]
        total = totals[:, first : first + many]
        kept = total if n_blocks == 1 else np.empty((n_blocks, total.size), c.dtype)
        step = max(64, _BATCH_WORK // (8 * k))

        def multiply_some(
            begin: int, _call: pool.Call, *, tables: list[Array] = tables, kept: Array = kept, step: int = step
        ) -> None:
            for block in range(n_blocks):
                term = block * PRODUCT_BLOCK
                strides = (a.strides[-1], b.strides[-2])
                parts = [t[begin : begin + step] + term * stride for t, stride in zip(tables, strides, strict=True)]
                multiply(*parts, *strides, min(PRODUCT_BLOCK, k - term), address(kept[block, begin:]))

        begins = range(0, total.size, step)
        _run_all([functools.partial(multiply_some, begin) for begin in begins], total.size * k * 4)
        if n_blocks > 1:
            _add_blocks(product, kept, total, is_first=True)
    if results is not c:
        c[...] = results


def _multiply_long_vectors(product: _Product, a: Array, b: Array) -> None:
    """Multiply one pair of vectors of several blocks of terms."""
    n_blocks = -(-a.size // PRODUCT_BLOCK)
    whole = a.size // PRODUCT_BLOCK
    kept = np.empty((n_blocks, 1), product.c.dtype)
    total = np.empty((1, 1), product.c.dtype)
    is_contiguous = a.strides[0] == b.strides[0] == a.itemsize
    multiply_vectors, multiply_pairs = product.kernel("multiply_vectors"), product.kernel("multiply_pairs")
    step = _RUN_BYTES // (2 * PRODUCT_BLOCK * a.itemsize)

    def multiply_rows(begin: int, stop: int, k: int) -> None:
        starts = np.arange(begin, stop) * PRODUCT_BLOCK
        tables = (address(x) + starts * x.strides[0] for x in (a, b))
        multiply_pairs(*tables, a.strides[0], b.strides[0], k, address(kept[begin:]))

    def multiply_run(begin: int, _call: pool.Call) -> None:
        stop = min(begin + step, whole)
        if is_contiguous:
            at = begin * PRODUCT_BLOCK
            multiply_vectors(address(a[at:]), address(b[at:]), stop - begin, address(kept[begin:]))
        else:
            multiply_rows(begin, stop, PRODUCT_BLOCK)

    runs = [functools.partial(multiply_run, begin) for begin in range(0, whole, step)]
    _run_all(runs, 2 * a.nbytes * _GRAIN // _GRAIN_BYTES)
    if whole < n_blocks:
        multiply_rows(whole, n_blocks, a.size - whole * PRODUCT_BLOCK)
    _add_blocks(product, kept, total, is_first=True)
    product.c[...] = total[0, 0]


# float16 and bfloat16, which are multiplied in float32


def _multiply_halves(a: Array, b: Array, out: Array, dtype: np.dtype[Any]) -> None:
    """Multiply in float32 and round once at the end; only parts of the operands are converted at a time."""
    zero = dtype.type(0)
    m, n, k = out.shape[-2], out.shape[-1], a.shape[-1]
    if m * n * k <= _SMALL_WORK:
        _multiply_small_halves(a, b, out, dtype)
        return
    for index in np.ndindex(out.shape[:-2]):
        halves = _Product(a[index], b[index], out[index], zero)
        pieces = [
            functools.partial(_multiply_half_part, halves.part((), rows, columns))
            for rows in _cut(m, -(-m // 256), 8)
            for columns in _cut(n, -(-n // 264), 8)
        ]
        _run_all(pieces, m * n * k)


def _multiply_small_halves(a: Array, b: Array, out: Array, dtype: np.dtype[Any]) -> None:
    """Multiply a stack of small matrices, a part of the stack at a time."""
    elements = max(x.shape[-1] * x.shape[-2] for x in (a, b, out))
    stack = out.shape[:-2]
    per_entry = elements * math.prod(stack[1:])
    if stack and per_entry > _HALF_ELEMENTS:
        for index in range(stack[0]):
            _multiply_small_halves(a[index], b[index], out[index], dtype)
        return
    step = max(1, _HALF_ELEMENTS // per_entry)
    for first in range(0, stack[0] if stack else 1, step):
        part = (slice(first, first + step),) if stack else ()
        total = np.empty(out[part].shape, dtype)
        _multiply(_Product(a[part].astype(dtype), b[part].astype(dtype), total, dtype.type(0)))
        _round_into(out[part], total)


def _multiply_half_part(product: _Product, call: pool.Call) -> None:
    a, b, c, zero = product
    total = np.empty(c.shape, zero.dtype)
    start = _STORE
    step = 4 * PRODUCT_BLOCK
    for term in range(0, a.shape[1], step):
        if call.cancelled:
            return
        left, right = (
            a[:, term : term + step].astype(zero.dtype, order="C"),
            b[term : term + step].astype(zero.dtype, order="C"),
        )
        _call_multiply(left, right, total, zero, start)
        start = _ADD
    _round_into(c, total)


def _round_into(out: Array, values: Array) -> None:
    with np.errstate(all="ignore"):
        call_in_default_environment(functools.partial(np.copyto, out, values, casting="unsafe"))
