"""What all kinds of products share: the operands, how they are cut, and how pieces are run.

How work is cut follows from shapes alone. Only how many threads it is worth depends on the budget.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_ops import budget
from accel_ops.cpu import pool
from accel_ops.cpu.jit import kernel
from accel_ops.cpu.memory import address

__all__ = [
    "ADD",
    "GRAIN",
    "MANY",
    "PANEL_COLUMNS",
    "STEP_WORK",
    "STORE",
    "UNCANCELLED",
    "Piece",
    "Product",
    "add_blocks",
    "addresses",
    "cut",
    "run",
    "work_of_bytes",
]

Array = np.ndarray[Any, Any]
Piece = Callable[[pool.Call], None]

# Multiplications that pay for one more thread, and the bytes where each operand is used once and memory decides.
# `python -m benchmarks.grain` measures them: a worker is woken in 40 to 250 us, in which a core multiplies 2**20 to
# 2**23 pairs of float64 or reads 1 to 5 MB.
GRAIN = 1 << 22
GRAIN_BYTES = 2 << 20
# Multiplications after which a kernel returns to the interpreter: 5 ms at 2 * 29e9 in a second, so that an interrupt
# waits for 10 ms at the most, which the largest part with one block of terms takes.
STEP_WORK = 1 << 27
PANEL_COLUMNS = 528  # of the right operand that are packed at once: with 256 terms of float64 1 MB
MANY = 4  # pieces, at least, of what is worth sharing
STORE, ADD = 0, 1  # what becomes of a block's result: see cpu/outputs.py, which only kernels import

UNCANCELLED = pool.Call()  # what pieces are given that run on the calling thread alone


class Product(NamedTuple):
    """One product c = a b of matrices, or of stacks of them; the rows of c are contiguous."""

    a: Array
    b: Array
    c: Array
    zero: Any  # of the dtype in which is multiplied

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The rows and columns of c, and the number of terms."""
        return self.c.shape[-2], self.c.shape[-1], self.a.shape[-1]

    def item(self, index: tuple[int, ...]) -> "Product":
        """Return one product of a stack."""
        return Product(self.a[index], self.b[index], self.c[index], self.zero)

    def part(self, rows: slice, columns: slice) -> "Product":
        """Return the product that makes a part of c. For single matrices."""
        return Product(self.a[rows], self.b[:, columns], self.c[rows, columns], self.zero)

    def kernel(self, name: str) -> Callable[..., None]:
        """Return a kernel for the dtype, without its first argument."""
        return functools.partial(kernel("product_kernels", name, self.zero.dtype), self.zero)


def run(pieces: Sequence[Piece], work: int) -> None:
    """Run pieces on as many threads as their work, in multiplications, is worth."""
    threads = budget.get_num_threads() if work >= 2 * GRAIN and len(pieces) > 1 else 1
    if threads == 1:
        for piece in pieces:
            piece(UNCANCELLED)
        return
    call = pool.Call()
    pool.run(
        lambda index: pieces[index](call), len(pieces), workers=min(threads, work // GRAIN), budget=threads, call=call
    )


def work_of_bytes(n_bytes: int) -> int:
    """Return the multiplications that take as long as reading so many bytes."""
    return n_bytes * GRAIN // GRAIN_BYTES


def cut(length: int, n_parts: int, multiple: int) -> list[slice]:
    """Cut a length into parts of nearly as many multiples each."""
    n_multiples = -(-length // multiple)
    n_parts = max(1, n_parts)
    edges = sorted({n_multiples * part // n_parts * multiple for part in range(n_parts)} | {length})
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def addresses(array: Array, items: slice) -> Array:
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


def add_blocks(product: Product, kept: Array, total: Array) -> None:
    """Add the results of blocks, the first axis of ``kept``, in order into the total; parts of it side by side."""
    add = product.kernel("add_blocks")
    flat, sums = kept.reshape(len(kept), -1), total.reshape(-1)

    def add_part(part: slice, _call: pool.Call) -> None:
        blocks = flat[:, part]
        add(address(blocks), len(blocks), blocks.strides[0], address(sums[part]), blocks.shape[1])

    parts = cut(sums.size, MANY, 1024)
    run([functools.partial(add_part, part) for part in parts], work_of_bytes(kept.nbytes) // 4)
