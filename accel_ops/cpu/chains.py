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

from accel_ops.cpu.elements import Element, chain_blocks, chain_groups, chain_lanes, element_of
from accel_ops.cpu.emit import (
    CACHE_LINE_BYTES,
    broadcast,
    for_range,
    integer,
    load,
    minimum,
    opaque,
    prefetch,
    variable,
)
from accel_ops.cpu.outputs import Outputs
from accel_ops.cpu.packing import Lanes
from accel_ops.cpu.product_pieces import ADD
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


# Multiply up to `chain_lanes` rows term by term with as many others, into the contiguous outputs at ``c``. The
# addresses of the rows are in tables at ``a`` and ``b``; or so many rows of the matrix at ``a`` are multiplied with the
# vector at ``b``, or `rows_of_chains`, and then up to `blocks_of_chains` blocks of terms; or ``a`` and ``b`` are two
# vectors, the rows being their consecutive blocks.
multiply_rows = _define("rows")
multiply_matrix = _define("matrix")
multiply_blocks = _define("blocks")


def _chains_function(module: Any, element: Element, operands: str) -> Any:
    name = f"accel_ops_chains_{element.arithmetic}{8 * element.part_bytes}x{element.parts}_{operands}"
    if name in module.globals:
        return module.globals[name]
    function = internal_function(module, name, len(_ARGUMENTS))
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    n_chains, n_terms = function.args[:2]
    if operands == "matrix":
        n_groups = chain_groups(element)
        is_whole = builder.icmp_signed("==", n_chains, integer(n_groups * chain_lanes(element)))
        with builder.if_then(is_whole):
            if (n_blocks := chain_blocks(element)) > 1:
                with builder.if_then(builder.icmp_signed(">", n_terms, integer(PRODUCT_BLOCK))):
                    _Chains(builder, function, element, operands, n_groups, n_blocks).write()
                    builder.ret_void()
            _Chains(builder, function, element, operands, n_groups).write()
            builder.ret_void()
    with builder.if_then(builder.icmp_signed("==", n_chains, integer(chain_lanes(element)))):
        _Chains(builder, function, element, operands).write()
        builder.ret_void()
    _Chains(builder, function, element, operands, partial=n_chains).write()
    builder.ret_void()
    return function


class _Chains:
    """Writes the loop over the terms: for groups of chains and one or two blocks, or for chains that fill no group."""

    def __init__(
        self,
        builder: Any,
        function: Any,
        element: Element,
        operands: str,
        n_groups: int = 1,
        n_blocks: int = 1,
        partial: Any = None,
    ) -> None:
        self.builder, self.element, self.operands, self.partial = builder, element, operands, partial
        self.lanes = chain_lanes(element)
        self.given = dict(zip(_ARGUMENTS, function.args, strict=True))
        self.pairs = [(0, 0), (1, 1), (0, 1), (1, 0)] if element.parts == 2 else [(0, 0)]
        self.groups = [
            (group, block, [variable(builder, element.zeros(self.lanes)) for _ in self.pairs])
            for block in range(n_blocks)
            for group in range(n_groups)
        ]
        self.n_terms = integer(PRODUCT_BLOCK) if n_blocks > 1 else self.given["n_terms"]

    def write(self) -> None:
        builder, given, element = self.builder, self.given, self.element
        begin = variable(builder, integer(0))
        self._add_whole_lines(begin)
        with for_range(builder, self.n_terms, start=builder.load(begin)) as term:
            for group, block, totals in self.groups:
                place = builder.add(term, integer(block * PRODUCT_BLOCK))
                a = self._lanes_of("a", group).at(builder.mul(place, given["a_term"]))
                self._add(a, self._right_at(group, builder.mul(place, given["b_term"])), totals)
        for group, block, totals in self.groups:
            outputs = Outputs(builder, element, self.lanes, 1, self.partial)
            place = builder.add(given["c"], integer(group * self.lanes * element.n_bytes))
            start = given["start"] if block == 0 else integer(ADD)
            outputs.finish([place], [builder.load(total) for total in totals], start)

    def _add(self, a: list[Any], b: list[Any], totals: list[Any]) -> None:
        """Add one term of every lane of a group."""
        builder, element = self.builder, self.element
        for (i, j), total in zip(self.pairs, totals, strict=True):
            left = element.as_left(builder, a[i])
            builder.store(element.multiply_add(builder, left, b[j], builder.load(total)), total)

    def _right_at(self, group: int, offset: Any) -> list[Any]:
        """Return the parts of the right operand's numbers, ``offset`` bytes further on."""
        if self.operands == "matrix":
            return self._number_at(self.builder.add(self.given["b"], offset))
        return self._lanes_of("b", group).at(offset)

    def _add_whole_lines(self, begin: Any) -> None:
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
            whole = builder.and_(self.n_terms, integer(-line_terms))
            if self.operands == "matrix":
                self._add_lines_of_matrix(whole, line_terms)
            else:
                self._add_lines_of_rows(whole, line_terms)
            builder.store(whole, begin)

    def _add_lines_of_matrix(self, whole: Any, line_terms: int) -> None:
        """Add whole lines of all rows. An address is kept for every fourth row: for each there are no registers."""
        builder, given, size = self.builder, self.given, self.element.n_bytes
        n = 1 if self.partial is not None else min(4, self.lanes)
        places = [place for group, block, _ in self.groups if block == 0 for place in self._places(group)]
        starts = [builder.add(given["a"], builder.mul(place, given["a_row"])) for place in places[::n]]
        pointers = [variable(builder, opaque(builder, start)) for start in starts]
        steps = [opaque(builder, builder.mul(integer(k), given["a_row"])) for k in range(1, n)]
        x = variable(builder, given["b"])
        x_block = opaque(builder, builder.mul(integer(PRODUCT_BLOCK), given["b_term"]))
        with for_range(builder, whole, line_terms):
            current = [builder.load(pointer) for pointer in pointers]
            rows = [row for pointer in current for row in (pointer, *(builder.add(pointer, step) for step in steps))]
            number = builder.load(x)
            first = 0
            while first < line_terms:
                for group, block, totals in self.groups:
                    lanes = Lanes(builder, self.element, rows[group * self.lanes : (group + 1) * self.lanes])
                    place = number if block == 0 else builder.add(number, x_block)
                    for a in lanes.block_at(integer((first + block * PRODUCT_BLOCK) * size)):
                        self._add(a, self._number_at(place), totals)
                        place = builder.add(place, given["b_term"])
                    if block == 0:
                        after = place
                number = after
                first += lanes.block_terms
            for pointer, value in zip(pointers, current, strict=True):
                builder.store(builder.add(value, integer(line_terms * size)), pointer)
            builder.store(number, x)

    def _add_lines_of_rows(self, whole: Any, line_terms: int) -> None:
        """Add whole lines of pairs of rows."""
        builder, size = self.builder, integer(self.element.n_bytes)
        left, right = self._lanes_of("a", 0), self._lanes_of("b", 0)
        ((_, _, totals),) = self.groups
        with for_range(builder, whole, line_terms) as term:
            if self.operands == "blocks":
                self._prefetch(builder.mul(term, size))
            for first in range(0, line_terms, left.block_terms):
                offset = builder.mul(builder.add(term, integer(first)), size)
                for a, b in zip(left.block_at(offset), right.block_at(offset), strict=True):
                    self._add(a, b, totals)

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

    def _places(self, group: int) -> list[Any]:
        """Return the number of each lane's chain; lanes beyond the last chain repeat it, and are not stored."""
        places = [integer(group * self.lanes + lane) for lane in range(self.lanes)]
        if self.partial is not None:
            last = self.builder.sub(self.partial, integer(1))
            places = [minimum(self.builder, place, last) for place in places]
        return places

    def _lanes_of(self, name: str, group: int) -> Lanes:
        """Return where the row of each chain begins."""
        builder, start = self.builder, self.given[name]
        places = self._places(group)
        if self.operands == "rows":
            entries = [builder.add(start, builder.mul(place, integer(8))) for place in places]
            return Lanes(builder, self.element, [load(builder, entry, ir.IntType(64)) for entry in entries])
        spacing = integer(PRODUCT_BLOCK * self.element.n_bytes)
        if self.operands == "matrix":
            spacing = self.given["a_row"]
        return Lanes(builder, self.element, [builder.add(start, builder.mul(place, spacing)) for place in places])
