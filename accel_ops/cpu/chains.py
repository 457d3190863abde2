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
from accel_ops.cpu.tile import prefer_whole_vectors
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["chain_lanes", "multiply_blocks", "multiply_chains", "multiply_chains_by_vector"]

_ARGUMENTS = ("n_chains", "n_terms", "a", "a_term", "b", "b_term", "c", "start")
_BLOCKS_AHEAD = 2  # times the lanes; from there on it gains nothing


def _define(operands: str) -> Any:
    """Return the intrinsic for operands that are "rows" anywhere, rows and one "vector", or "blocks"."""

    @intrinsic
    def multiply(
        _context: Any,
        zero: Any,
        n_chains: Any,
        n_terms: Any,
        a: Any,
        a_term: Any,
        b: Any,
        b_term: Any,
        c: Any,
        start: Any,
    ) -> Any:
        element = element_of(zero)

        def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> None:
            builder.call(_chains_function(builder.module, element, operands), arguments[1:])

        return types.void(zero, n_chains, n_terms, a, a_term, b, b_term, c, start), write

    return multiply


# Multiply up to `chain_lanes` rows term by term with as many others, into the contiguous outputs at ``c``. The
# addresses of the rows are in tables at ``a`` and ``b``; or all rows of ``a`` are multiplied with the vector at
# ``b``; or ``a`` and ``b`` are two vectors, the rows being their consecutive blocks.
multiply_chains = _define("rows")
multiply_chains_by_vector = _define("vector")
multiply_blocks = _define("blocks")


@intrinsic
def chain_lanes(_context: Any, zero: Any) -> Any:
    """Return how many chains are multiplied side by side."""
    lanes = _lanes_for(element_of(zero))
    return types.int64(zero), lambda _target, _builder, _signature, _arguments: integer(lanes)


def _lanes_for(element: Element) -> int:
    return tile_shape(element).lanes


def _chains_function(module: Any, element: Element, operands: str) -> Any:
    name = f"accel_ops_chains_{element.arithmetic}{8 * element.part_bytes}x{element.parts}_{operands}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(_ARGUMENTS)), name)
    function.linkage = "internal"
    prefer_whole_vectors(function)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    whole = builder.icmp_signed("==", function.args[0], integer(_lanes_for(element)))
    with builder.if_else(whole) as (all_lanes, some):
        with all_lanes:
            _Chains(builder, function, element, operands, partial=False).write()
        with some:
            _Chains(builder, function, element, operands, partial=True).write()
    builder.ret_void()
    return function


class _Chains:
    """Writes the loop over the terms; ``partial`` says that there are fewer chains than lanes."""

    def __init__(self, builder: Any, function: Any, element: Element, operands: str, *, partial: bool) -> None:
        self.builder, self.element, self.operands, self.partial = builder, element, operands, partial
        self.lanes = _lanes_for(element)
        self.given = dict(zip(_ARGUMENTS, function.args, strict=True))

    def write(self) -> None:
        builder, given, element = self.builder, self.given, self.element
        left = self._lanes_of(given["a"])
        right = None if self.operands == "vector" else self._lanes_of(given["b"])
        pairs = [(0, 0), (1, 1), (0, 1), (1, 0)] if element.parts == 2 else [(0, 0)]
        totals = [variable(builder, element.zeros(self.lanes)) for _ in pairs]
        begin = variable(builder, integer(0))
        if element.parts == 1:
            self._add_whole_lines(left, right, totals[0], begin)
        with for_range(builder, given["n_terms"], start=builder.load(begin)) as term:
            a = left.at(builder.mul(term, given["a_term"]))
            b_offset = builder.mul(term, given["b_term"])
            b = self._vector_at(b_offset) if right is None else right.at(b_offset)
            for (i, j), total in zip(pairs, totals, strict=True):
                self._add(a[i], b[j], total)
        outputs = Outputs(builder, element, self.lanes, 1, given["n_chains"] if self.partial else None)
        outputs.finish([given["c"]], [builder.load(total) for total in totals], given["start"])

    def _add(self, a: Any, b: Any, total: Any) -> None:
        builder = self.builder
        builder.store(self.element.multiply_add(builder, a, b, builder.load(total)), total)

    def _add_whole_lines(self, left: Lanes, right: Lanes | None, total: Any, begin: Any) -> None:
        """Add the terms that fill cache lines, where terms are neighbours.

        Line by line, because rows that lie a power of two apart drive each other's lines out of the cache.
        """
        builder, given = self.builder, self.given
        size = integer(self.element.n_bytes)
        line_terms = max(left.block_terms, CACHE_LINE_BYTES // self.element.n_bytes)
        contiguous = builder.icmp_signed("==", given["a_term"], size)
        if right is not None:
            contiguous = builder.and_(contiguous, builder.icmp_signed("==", given["b_term"], size))
        with builder.if_then(contiguous):
            whole = builder.and_(given["n_terms"], integer(-line_terms))
            with for_range(builder, whole, line_terms) as term:
                if self.operands == "blocks":
                    self._prefetch(builder.mul(term, size))
                for first in range(0, line_terms, left.block_terms):
                    self._add_square(builder.add(term, integer(first)), left, right, total)
            builder.store(whole, begin)

    def _add_square(self, term: Any, left: Lanes, right: Lanes | None, total: Any) -> None:
        """Add as many terms of every lane as are transposed together."""
        builder = self.builder
        offset = builder.mul(term, integer(self.element.n_bytes))
        b_square = None if right is None else right.block_at(offset)
        for k, a in enumerate(left.block_at(offset)):
            at = builder.mul(builder.add(term, integer(k)), self.given["b_term"])
            self._add(a, self._vector_at(at)[0] if b_square is None else b_square[k], total)

    def _prefetch(self, offset: Any) -> None:
        """Fetch blocks to come, in their order: one is too short for the prefetcher of the CPU to find its way.

        ``offset`` is how far each lane has come in its block.
        """
        builder = self.builder
        n_bytes = self.lanes * PRODUCT_BLOCK * self.element.n_bytes
        at = builder.add(builder.mul(offset, integer(self.lanes)), integer(_BLOCKS_AHEAD * n_bytes))
        for start, line in itertools.product((self.given["a"], self.given["b"]), range(self.lanes)):
            prefetch(builder, builder.add(start, builder.add(at, integer(line * CACHE_LINE_BYTES))))

    def _vector_at(self, offset: Any) -> list[Any]:
        """Return the parts of one number of the vector, each in all lanes."""
        builder, element = self.builder, self.element
        at = builder.add(self.given["b"], offset)
        places = [builder.add(at, integer(part * element.part_bytes)) for part in range(element.parts)]
        return [broadcast(builder, load(builder, place, element.scalar), self.lanes) for place in places]

    def _lanes_of(self, start: Any) -> Lanes:
        """Return where each lane's row begins; lanes beyond the last chain repeat it, and are not stored."""
        builder = self.builder
        places = [integer(lane) for lane in range(self.lanes)]
        if self.partial:
            last = builder.sub(self.given["n_chains"], integer(1))
            places = [minimum(builder, place, last) for place in places]
        if self.operands == "blocks":
            spacing = integer(PRODUCT_BLOCK * self.element.n_bytes)
            return Lanes(builder, self.element, [builder.add(start, builder.mul(place, spacing)) for place in places])
        entries = [builder.add(start, builder.mul(place, integer(8))) for place in places]
        return Lanes(builder, self.element, [load(builder, entry, ir.IntType(64)) for entry in entries])
