"""Packing: a few columns of the right operand, brought together in the order of their use.

The tile reads a row of the right operand as whole vectors. Where they do not lie so, or lie far apart, 256 terms of
a panel are copied to memory of the worker's own first; an operand is never copied whole.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel_ops.cpu.elements import Element, element_of, tile_shape
from accel_ops.cpu.emit import (
    concatenated,
    for_range,
    gather,
    integer,
    load,
    minimum,
    prefetch,
    store,
    transposed,
    variable,
    vector_type,
)
from accel_ops.cpu.tile import internal_function

__all__ = ["Lanes", "pack_columns"]

_PREFETCHED_TERMS = 16
_BLOCK_BYTES = 16

_ARGUMENTS = ("b", "b_term", "b_column", "n_terms", "columns", "target")


@intrinsic
def pack_columns(
    _context: Any, zero: Any, b: Any, b_term: Any, b_column: Any, n_terms: Any, columns: Any, target: Any
) -> Any:
    """Write up to a tile's ``columns`` of b to ``target``, term by term, in whole vectors.

    Lanes beyond the last column hold anything. Complex elements are split into real and imaginary vectors.
    """
    numbers = (b, b_term, b_column, n_terms, columns, target)
    element = element_of(zero)

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function = _pack_function(builder.module, element, tile_shape(element).lanes)
        builder.call(function, arguments[1:])

    return types.void(zero, *numbers), write


def _pack_function(module: Any, element: Element, lanes: int) -> Any:
    name = f"accel_ops_pack_{element.arithmetic}{8 * element.part_bytes}x{element.parts}"
    if name in module.globals:
        return module.globals[name]
    function = internal_function(module, name, len(_ARGUMENTS))
    _Pack(function, element, lanes).write()
    return function


class Lanes:
    """Where the elements of one vector lie: each lane at an address of its own."""

    def __init__(self, builder: Any, element: Element, addresses: list[Any]) -> None:
        self._builder, self._element, self._addresses = builder, element, addresses

    def at(self, offset: Any) -> list[Any]:
        """Return the vectors, one for each part of an element, ``offset`` bytes further on in every lane."""
        builder, element = self._builder, self._element
        vectors = []
        for part in range(element.parts):
            vector = ir.Constant(vector_type(element.scalar, len(self._addresses)), ir.Undefined)
            for lane, address in enumerate(self._addresses):
                place = builder.add(address, builder.add(offset, integer(part * element.part_bytes)))
                vector = builder.insert_element(vector, load(builder, place, element.scalar), integer(lane, 32))
            vectors.append(vector)
        return vectors

    @property
    def block_parts(self) -> int:
        """How many parts of terms are read at once from each lane, 16 bytes: what all shuffles can move cheaply."""
        return min(_BLOCK_BYTES // self._element.part_bytes, len(self._addresses))

    @property
    def block_terms(self) -> int:
        """How many terms these are."""
        return self.block_parts // self._element.parts

    def block_at(self, offset: Any) -> list[list[Any]]:
        """Return the vectors of ``block_terms`` consecutive terms, one for each part. For contiguous terms."""
        builder, n = self._builder, self.block_parts
        kind = vector_type(self._element.scalar, n)
        pieces = [load(builder, builder.add(address, offset), kind) for address in self._addresses]
        vectors = transposed(builder, [concatenated(builder, pieces[k::n]) for k in range(n)])
        parts = self._element.parts
        return [vectors[first : first + parts] for first in range(0, n, parts)]


class _Pack:
    """Writes the packing function of an element."""

    def __init__(self, function: Any, element: Element, lanes: int) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.element, self.lanes = element, lanes
        self.kind = vector_type(element.scalar, lanes)
        self.vector_bytes = lanes * element.part_bytes
        self.given = dict(zip(_ARGUMENTS, function.args, strict=True))

    def write(self) -> None:
        builder, given, element = self.builder, self.given, self.element
        n_vectors = builder.sdiv(builder.add(given["columns"], integer(self.lanes - 1)), integer(self.lanes))
        self.term_bytes = builder.mul(n_vectors, integer(self.vector_bytes * element.parts))
        self.part_bytes = builder.mul(n_vectors, integer(self.vector_bytes))
        adjacent = builder.icmp_signed("==", given["b_column"], integer(element.n_bytes))
        n_whole = builder.select(adjacent, builder.sdiv(given["columns"], integer(self.lanes)), integer(0))
        with for_range(builder, given["n_terms"]) as term, for_range(builder, n_whole) as vector:
            self._copy_vector(term, vector)
        with for_range(builder, n_vectors, start=n_whole) as vector:
            first = builder.mul(vector, integer(self.lanes))
            source = builder.add(given["b"], builder.mul(first, given["b_column"]))
            target = builder.add(given["target"], builder.mul(vector, integer(self.vector_bytes)))
            self._gather_columns(source, builder.sub(given["columns"], first), target)
        builder.ret_void()

    def _copy_vector(self, term: Any, vector: Any) -> None:
        """Copy one term of one vector of columns that are neighbours."""
        builder, given, parts = self.builder, self.given, self.element.parts
        offset = builder.mul(vector, integer(self.vector_bytes * parts))
        at = builder.add(builder.add(given["b"], builder.mul(term, given["b_term"])), offset)
        prefetch(builder, builder.add(at, builder.mul(given["b_term"], integer(_PREFETCHED_TERMS))))
        vectors = [load(builder, builder.add(at, integer(k * self.vector_bytes)), self.kind) for k in range(parts)]
        if parts == 2:
            lanes = range(self.lanes)
            vectors = [
                gather(builder, vectors, [divmod(2 * lane + part, self.lanes) for lane in lanes]) for part in range(2)
            ]
        target = builder.add(given["target"], builder.mul(vector, integer(self.vector_bytes)))
        self._store_term(term, vectors, target)

    def _gather_columns(self, source: Any, left: Any, target: Any) -> None:
        """Copy one vector of columns that lie anywhere."""
        builder, given = self.builder, self.given
        last = builder.sub(left, integer(1))
        places = [minimum(builder, integer(lane), last) for lane in range(self.lanes)]
        lanes = Lanes(
            builder, self.element, [builder.add(source, builder.mul(place, given["b_column"])) for place in places]
        )
        begin = variable(builder, integer(0))
        contiguous = builder.icmp_signed("==", given["b_term"], integer(self.element.n_bytes))
        with builder.if_then(contiguous):
            whole = builder.and_(given["n_terms"], integer(-lanes.block_terms))
            with for_range(builder, whole, lanes.block_terms) as term:
                for k, vectors in enumerate(lanes.block_at(builder.mul(term, integer(self.element.n_bytes)))):
                    self._store_term(builder.add(term, integer(k)), vectors, target)
            builder.store(whole, begin)
        with for_range(builder, given["n_terms"], start=builder.load(begin)) as term:
            self._store_term(term, lanes.at(builder.mul(term, given["b_term"])), target)

    def _store_term(self, term: Any, vectors: list[Any], target: Any) -> None:
        """Store one term of one vector of columns: real and imaginary parts lie apart."""
        builder = self.builder
        at = builder.add(target, builder.mul(term, self.term_bytes))
        for part, vector in enumerate(vectors):
            store(builder, vector, builder.add(at, builder.mul(integer(part), self.part_bytes)))
