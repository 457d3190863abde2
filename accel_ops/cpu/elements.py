"""What kernels know about the elements they compute with, and the vectors and tiles that suit this CPU.

Numba gives a kernel the type of its first argument, a number of the dtype; everything else follows from it and
from the features of the CPU that Numba compiles for. Neither decides a bit: vectors run over outputs or over whole
blocks of terms, never inside a chain.
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from accel_ops.cpu.emit import fused_multiply_add, integer, splat
from accel_ops.cpu.product_pieces import PANEL_COLUMNS
from accel_ops.orders import PRODUCT_BLOCK

__all__ = [
    "Element",
    "TileShape",
    "blocks_of_chains",
    "chain_blocks",
    "chain_groups",
    "chain_lanes",
    "element_of",
    "item_bytes",
    "lanes_of_chains",
    "panel_columns",
    "row_step",
    "rows_of_chains",
    "tile_columns",
    "tile_lanes",
    "tile_shape",
]

_MOST_LANES = 16
# Rows of a matrix that are read at once, or as many as there are lanes: 16 that lie a power of two apart would share
# 8 ways of the first-level cache.
_ROWS_OF_CHAINS = 8


class Element(NamedTuple):
    """How one element is made up and multiplied."""

    scalar: Any  # the LLVM type of its parts
    part_bytes: int
    parts: int  # 2 for complex
    arithmetic: str  # "float", "integer" or "boolean"

    @property
    def n_bytes(self) -> int:
        """The bytes of an element."""
        return self.part_bytes * self.parts

    def multiply_add(self, builder: Any, first: Any, second: Any, total: Any) -> Any:
        """Return first * second + total of vectors: rounded once, or wrapping, or of truth values."""
        if self.arithmetic == "float":
            return fused_multiply_add(builder, first, second, total)
        if self.arithmetic == "boolean":
            return builder.or_(builder.and_(first, second), total)
        return builder.add(builder.mul(first, second), total)

    def as_left(self, builder: Any, value: Any) -> Any:
        """Return a left operand as it is multiplied: a truth value, any byte but 0, selects all bits of the right."""
        if self.arithmetic != "boolean":
            return value
        return builder.sext(builder.icmp_unsigned("!=", value, value.type(None)), value.type)

    def as_result(self, builder: Any, total: Any) -> Any:
        """Return a total as it is stored: 0 or 1 for a truth value."""
        if self.arithmetic != "boolean":
            return total
        return builder.zext(builder.icmp_unsigned("!=", total, total.type(None)), total.type)

    def add(self, builder: Any, first: Any, second: Any) -> Any:
        """Return first + second of vectors."""
        if self.arithmetic == "float":
            return builder.fadd(first, second)
        return builder.or_(first, second) if self.arithmetic == "boolean" else builder.add(first, second)

    def zeros(self, n: int) -> Any:
        """Return a vector of n zeros, +0.0 for floats."""
        return splat(ir.Constant(self.scalar, 0), n)


class TileShape(NamedTuple):
    """A tile of outputs that stays in registers while its terms are added."""

    rows: int
    vectors: int  # of each row
    lanes: int  # of each vector

    @property
    def columns(self) -> int:
        """The columns of a whole tile."""
        return self.vectors * self.lanes

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The heights of the tiles there are, for the last rows of an operand too."""
        return tuple(sorted({self.rows, *(height for height in (1, 2, 4) if height < self.rows)}, reverse=True))


def chain_lanes(element: Element) -> int:
    """Return how many chains stand in one vector where each has operands of its own.

    Their terms have to be brought together from as many rows, and 32 bytes of them cost less than half of 64.
    """
    return min(tile_shape(element).lanes, 32 // element.part_bytes)


def chain_groups(element: Element) -> int:
    """Return how many such vectors take the rows of a matrix that are read at once."""
    return max(1, _ROWS_OF_CHAINS // chain_lanes(element))


def chain_blocks(element: Element) -> int:
    """Return how many blocks of terms are added side by side: a chain waits 4 cycles for its last term.

    Two blocks of elements of 16 bytes lie 4 KiB apart, where their lines drive each other out of the cache.
    """
    return 2 if PRODUCT_BLOCK * element.n_bytes < 4096 else 1


def element_of(number: Any) -> Element:
    """Return what a Numba type of a number stands for."""
    if isinstance(number, types.Complex):
        return element_of(number.underlying_float)._replace(parts=2)
    if isinstance(number, types.Float):
        return Element(ir.FloatType() if number.bitwidth == 32 else ir.DoubleType(), number.bitwidth // 8, 1, "float")
    if isinstance(number, types.Boolean):
        return Element(ir.IntType(8), 1, 1, "boolean")
    return Element(ir.IntType(number.bitwidth), number.bitwidth // 8, 1, "integer")


def tile_shape(element: Element) -> TileShape:
    """Return the tile that fills the vector registers of the CPU that Numba compiles for.

    With 32 registers there are 24 chains, of which the two multiply-add units of a core need 8 to 10 under way,
    3 vectors of the right operand and one of the left. With 16 registers there are 12, and 2 vectors of the right
    operand: 256 terms of them take half of the first-level cache, where 3 would drive the left operand out.
    """
    vector_bytes, registers = _vector_registers()
    lanes = min(vector_bytes // element.part_bytes, _MOST_LANES)
    if element.parts == 2:
        return TileShape(3, 2 if registers >= 32 else 1, lanes)
    return TileShape(8, 3, lanes) if registers >= 32 else TileShape(6, 2, lanes)


@functools.cache
def _vector_registers() -> tuple[int, int]:
    """Return the bytes of a vector register and how many there are."""
    triple, _, features = (str(part) for part in cpu_target.target_context.codegen().magic_tuple())
    available = features.split(",")
    if triple.startswith(("aarch64", "arm64")):
        return 16, 32
    if all(f"+avx512{extension}" in available for extension in ("f", "vl", "bw", "dq")):
        return 64, 32
    return (32, 16) if "+avx2" in available else (16, 16)


def _constant(compute: Any) -> Any:
    """Return an intrinsic that gives a kernel a number that follows from its element."""

    @intrinsic
    def constant(_context: Any, zero: Any) -> Any:
        value = compute(element_of(zero))
        return types.int64(zero), lambda _target, _builder, _signature, _arguments: integer(value)

    return constant


item_bytes = _constant(lambda element: element.n_bytes)
tile_columns = _constant(lambda element: tile_shape(element).columns)
tile_lanes = _constant(lambda element: tile_shape(element).lanes)
lanes_of_chains = _constant(chain_lanes)
blocks_of_chains = _constant(chain_blocks)
rows_of_chains = _constant(lambda element: chain_groups(element) * chain_lanes(element))
panel_columns = _constant(lambda element: _panel_columns(tile_shape(element).columns))


def _panel_columns(tile: int) -> int:
    """Return how many columns of the right operand are packed at once: whole tiles, about as large as the L2 cache."""
    # Measured on a CPU with AVX-512 and 1 MB of it, and on one with AVX2 and 512 KB: both are slower with the other's.
    _, registers = _vector_registers()
    most = PANEL_COLUMNS if registers >= 32 else PANEL_COLUMNS // 2
    return max(1, most // tile) * tile


@intrinsic
def row_step(_context: Any, zero: Any, n_rows: Any) -> Any:
    """Return the height of the highest tile that n_rows rows fill."""

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        step = integer(1)
        for rows in sorted(tile_shape(element_of(zero)).row_counts):
            step = builder.select(builder.icmp_signed(">=", arguments[1], integer(rows)), integer(rows), step)
        return step

    return types.int64(zero, n_rows), write
