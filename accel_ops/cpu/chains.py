"""Chains side by side: each lane adds the terms of its own pair of rows, wherever these begin.

This is how a product is vectorised whose every output has operands of its own, or shares a vector with the others.
The lanes are different outputs, or different blocks of one output. Where the terms of a row are neighbours, a whole
line of each row is read at once and transposed in registers.
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel_ops.cpu.elements import Element, element_of, tile_shape
from accel_ops.cpu.emit import CACHE_LINE_BYTES, broadcast, for_range, integer, load, minimum, prefetch, variable
from accel_ops.cpu.outputs import Outputs
from accel_ops.cpu.packing import Lanes
from accel_ops.cpu.tile import internal_function
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["multiply_blocks", "multiply_matrix", "multiply_rows"]

_ARGUMENTS = ("n_chains", "n_terms", "a", "a_row", "a_term", "b", "b_term", "c", "start")
_BLOCKS_AHEAD = 2  # times the lanes; from there on it gains nothing


def _define(operands: str) -> Any:
    """Return the intrinsic for operands that are "rows" anywhere, a "matrix" and a vector, or "blocks"."""

    @intrinsic
    def multiply(
        _context: Any,
        zero: Any,
        n_chains: Any,
        n_terms: Any,
        a: Any,
        a_row: Any,
        a_term: Any,
        b: Any,
        b_term: Any,
        c: Any,
        start: Any,
    ) -> Any:
        element = element_of(zero)

        def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> None:
            builder.call(_chains_function(builder.module, element, operands), arguments[1:])

        return types.void(zero, n_chains, n_terms, a, a_row, a_term, b, b_term, c, start), write

    return multiply


# Multiply up to `tile_lanes` rows term by term with as many others, into the contiguous outputs at ``c``. The
# addresses of the rows are in tables at ``a`` and ``b``; or so many rows of the matrix at ``a`` are multiplied with
# the vector at ``b``; or ``a`` and ``b`` are two vectors, the rows being their consecutive blocks.
multiply_rows = _define("rows")
multiply_matrix = _define("matrix")
multiply_blocks = _define("blocks")


def _chains_function(module: Any, element: Element, operands: str) -> Any:
    name = f"accel_ops_chains_{element.arithmetic}{8 * element.part_bytes}x{element.parts}_{operands}"
    if name in module.globals:
        return module.globals[name]
    function = internal_function(module, name, len(_ARGUMENTS))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    lanes = tile_shape(element).lanes
    with builder.if_then(builder.icmp_signed("==", function.args[0], integer(lanes))):
        _Chains(builder, function, element, operands, partial=False).write()
        builder.ret_void()
    _Chains(builder, function, element, operands, partial=True).write()
    builder.ret_void()
    return function


class _Chains:
    """Writes the loop over the terms; ``partial`` says that there are fewer chains than lanes."""

    def __init__(self, builder: Any, function: Any, element: Element, operands: str, *, partial: bool) -> None:
        self.builder, self.element, self.operands, self.partial = builder, element, operands, partial
        self.lanes = tile_shape(element).lanes
        self.given = dict(zip(_ARGUMENTS, function.args, strict=True))
        self.pairs = [(0, 0), (1, 1), (0, 1), (1, 0)] if element.parts == 2 else [(0, 0)]

    def write(self) -> None:
        builder, given, element = self.builder, self.given, self.element
        totals = [variable(builder, element.zeros(self.lanes)) for _ in self.pairs]
        begin = variable(builder, integer(0))
        if element.parts == 1:
            self._add_whole_lines(totals[0], begin)
        left = self._lanes_of("a")
        right = None if self.operands == "matrix" else self._lanes_of("b")
        with for_range(builder, given["n_terms"], start=builder.load(begin)) as term:
            a_offset, b_offset = builder.mul(term, given["a_term"]), builder.mul(term, given["b_term"])
            b = self._number_at(builder.add(given["b"], b_offset)) if right is None else right.at(b_offset)
            a = left.at(a_offset)
            for (i, j), total in zip(self.pairs, totals, strict=True):
                self._add(a[i], b[j], total)
        columns = given["n_chains"] if self.partial else None
        outputs = Outputs(builder, element, self.lanes, 1, columns)
        outputs.finish([given["c"]], [builder.load(total) for total in totals], given["start"])

    def _add(self, a: Any, b: Any, total: Any) -> None:
        builder, element = self.builder, self.element
        builder.store(element.multiply_add(builder, element.as_left(builder, a), b, builder.load(total)), total)

    def _add_whole_lines(self, total: Any, begin: Any) -> None:
        """Add the terms that fill cache lines, where terms are neighbours.

        Line by line, because rows that lie a power of two apart drive each other's lines out of the cache.
        """
        builder, given = self.builder, self.given
        size = integer(self.element.n_bytes)
        line_terms = CACHE_LINE_BYTES // self.element.n_bytes
        contiguous = builder.icmp_signed("==", given["a_term"], size)
        if self.operands != "matrix":
            contiguous = builder.and_(contiguous, builder.icmp_signed("==", given["b_term"], size))
        with builder.if_then(contiguous):
            whole = builder.and_(given["n_terms"], integer(-line_terms))
            if self.operands == "matrix":
                self._add_lines_of_matrix(total, whole, line_terms)
            else:
                self._add_lines_of_rows(total, whole, line_terms)
            builder.store(whole, begin)

    def _add_lines_of_matrix(self, total: Any, whole: Any, line_terms: int) -> None:
        """Add whole lines of all rows. An address is kept for every fourth row: for each there are no registers."""
        builder, given, size = self.builder, self.given, self.element.n_bytes
        n = min(4, self.lanes)
        starts = [builder.add(given["a"], builder.mul(place, given["a_row"])) for place in self._places()]
        if self.partial:
            pointers = [variable(builder, start) for start in starts]
        else:
            pointers = [variable(builder, start) for start in starts[::n]]
        x = variable(builder, given["b"])
        steps = [builder.mul(integer(k), given["a_row"]) for k in range(n)]
        with for_range(builder, whole, line_terms):
            current = [builder.load(pointer) for pointer in pointers]
            rows = current if self.partial else [builder.add(pointer, step) for pointer in current for step in steps]
            at = builder.load(x)
            lanes = Lanes(builder, self.element, rows)
            place = at
            for first in range(0, line_terms, lanes.block_terms):
                for a in lanes.block_at(integer(first * size)):
                    self._add(a, self._number_at(place)[0], total)
                    place = builder.add(place, given["b_term"])
            for pointer, value in zip(pointers, current, strict=True):
                builder.store(builder.add(value, integer(line_terms * size)), pointer)
            builder.store(builder.add(at, builder.mul(integer(line_terms), given["b_term"])), x)

    def _add_lines_of_rows(self, total: Any, whole: Any, line_terms: int) -> None:
        """Add whole lines of pairs of rows."""
        builder, size = self.builder, integer(self.element.n_bytes)
        left, right = self._lanes_of("a"), self._lanes_of("b")
        with for_range(builder, whole, line_terms) as term:
            if self.operands == "blocks":
                self._prefetch(builder.mul(term, size))
            for first in range(0, line_terms, left.block_terms):
                offset = builder.mul(builder.add(term, integer(first)), size)
                for a, b in zip(left.block_at(offset), right.block_at(offset), strict=True):
                    self._add(a, b, total)

    def _prefetch(self, offset: Any) -> None:
        """Fetch blocks to come, in their order: one is too short for the prefetcher of the CPU to find its way.

        ``offset`` is how far each lane has come in its block.
        """
        builder = self.builder
        n_bytes = self.lanes * PRODUCT_BLOCK * self.element.n_bytes
        at = builder.add(builder.mul(offset, integer(self.lanes)), integer(_BLOCKS_AHEAD * n_bytes))
        for start, line in itertools.product((self.given["a"], self.given["b"]), range(self.lanes)):
            prefetch(builder, builder.add(start, builder.add(at, integer(line * CACHE_LINE_BYTES))))

    def _number_at(self, address: Any) -> list[Any]:
        """Return the parts of one number of the vector, each in all lanes."""
        builder, element = self.builder, self.element
        places = [builder.add(address, integer(part * element.part_bytes)) for part in range(element.parts)]
        return [broadcast(builder, load(builder, place, element.scalar), self.lanes) for place in places]

    def _places(self) -> list[Any]:
        """Return the number of each lane's chain; lanes beyond the last chain repeat it, and are not stored."""
        places = [integer(lane) for lane in range(self.lanes)]
        if self.partial:
            last = self.builder.sub(self.given["n_chains"], integer(1))
            places = [minimum(self.builder, place, last) for place in places]
        return places

    def _lanes_of(self, name: str) -> Lanes:
        """Return where the row of each chain begins."""
        builder, start = self.builder, self.given[name]
        places = self._places()
        if self.operands == "rows":
            entries = [builder.add(start, builder.mul(place, integer(8))) for place in places]
            return Lanes(builder, self.element, [load(builder, entry, ir.IntType(64)) for entry in entries])
        spacing = integer(PRODUCT_BLOCK * self.element.n_bytes)
        if self.operands == "matrix":
            spacing = self.given["a_row"]
        return Lanes(builder, self.element, [builder.add(start, builder.mul(place, spacing)) for place in places])
