"""The outputs of a tile: vectors of results that are stored, or added to what is there."""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel_ops.cpu.elements import Element, element_of, tile_shape
from accel_ops.cpu.emit import (
    broadcast,
    for_range,
    gather,
    integer,
    load,
    load_masked,
    store,
    store_masked,
    vector_type,
)
from accel_ops.cpu.product_pieces import ADD, STORE

__all__ = ["RESUME", "Outputs", "add_row"]

# What becomes of a block's result is told by STORE (it is the first), ADD (to what came before) or this: the block goes
# on where a stored part of its chain ended, which is exact. Not for complex elements.
RESUME = 2


@intrinsic
def add_row(_context: Any, zero: Any, source: Any, target: Any, n: Any, start: Any) -> Any:
    """Add n contiguous elements to those at ``target``, or store them there if ``start`` is STORE."""
    element = element_of(zero)
    lanes = tile_shape(element).lanes

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> None:
        _, source, target, n, start = arguments
        n_parts = builder.mul(n, integer(element.parts))
        whole = builder.and_(n_parts, integer(-lanes))
        for begin, stop, width in ((integer(0), whole, lanes), (whole, n_parts, 1)):
            with for_range(builder, stop, width, start=begin) as index:
                offset = builder.mul(index, integer(element.part_bytes))
                kind = vector_type(element.scalar, width)
                value = load(builder, builder.add(source, offset), kind)
                place = builder.add(target, offset)
                is_first = builder.icmp_signed("==", start, integer(STORE))
                with builder.if_else(is_first) as (then, otherwise):
                    with then:
                        store(builder, value, place)
                    with otherwise:
                        store(builder, element.add(builder, load(builder, place, kind), value), place)

    return types.void(zero, source, target, n, start), write


class Outputs:
    """Rows of contiguous outputs, in vectors; only ``columns`` of them are touched where that is not None."""

    def __init__(self, builder: Any, element: Element, lanes: int, vectors: int, columns: Any) -> None:
        self._builder, self._element, self._lanes, self._vectors = builder, element, lanes, vectors
        self._columns = columns
        self._kind = vector_type(element.scalar, lanes)

    def finish(self, rows: list[Any], chains: list[Any], start: Any) -> None:
        """Store the results of all chains, row by row and vector by vector, or add them if ``start`` is ADD."""
        builder = self._builder
        per_output = len(chains) // (len(rows) * self._vectors)
        outputs = [
            (row, vector, self._joined(chains[index * per_output : (index + 1) * per_output]))
            for index, (row, vector) in enumerate(itertools.product(rows, range(self._vectors)))
        ]
        with builder.if_else(builder.icmp_signed("==", start, integer(ADD))) as (added, stored):
            with added:
                for row, vector, values in outputs:
                    pairs = zip(self.load(row, vector), values, strict=True)
                    self._store(row, vector, [self._element.add(builder, old, new) for old, new in pairs])
            with stored:
                for row, vector, values in outputs:
                    self._store(row, vector, values)

    def load(self, row: Any, vector: int) -> list[Any]:
        """Return one vector of outputs as it lies in memory, where complex ones take two."""
        places = self._places(row, vector)
        return [
            load(self._builder, address, self._kind)
            if mask is None
            else load_masked(self._builder, address, self._kind, mask)
            for address, mask in places
        ]

    def mask(self, n: Any) -> Any:
        """Return which lanes are below n."""
        builder, lanes = self._builder, self._lanes
        numbers = ir.Constant(vector_type(ir.IntType(32), lanes), [integer(lane, 32) for lane in range(lanes)])
        return builder.icmp_signed("<", numbers, broadcast(builder, builder.trunc(n, ir.IntType(32)), lanes))

    def _joined(self, chains: list[Any]) -> list[Any]:
        """Return the results of one vector of outputs as they lie in memory."""
        if len(chains) == 1:
            return [self._element.as_result(self._builder, chains[0])]
        builder, n = self._builder, self._lanes
        real = builder.fsub(chains[0], chains[1])
        imaginary = builder.fadd(chains[2], chains[3])
        lanes = [(part, lane) for lane in range(n) for part in range(2)]
        return [gather(builder, [real, imaginary], lanes[:n]), gather(builder, [real, imaginary], lanes[n:])]

    def _store(self, row: Any, vector: int, values: list[Any]) -> None:
        for (address, mask), value in zip(self._places(row, vector), values, strict=True):
            if mask is None:
                store(self._builder, value, address)
            else:
                store_masked(self._builder, value, address, mask)

    def _places(self, row: Any, vector: int) -> list[tuple[Any, Any]]:
        """Return address and mask of each vector that makes up one vector of outputs; no mask for a whole one."""
        builder, parts = self._builder, self._element.parts
        places = []
        for position in range(vector * parts, (vector + 1) * parts):
            mask = None
            if self._columns is not None and vector == self._vectors - 1:
                n_parts = builder.mul(self._columns, integer(parts))
                mask = self.mask(builder.sub(n_parts, integer(position * self._lanes)))
            offset = position * self._lanes * self._element.part_bytes
            places.append((builder.add(row, integer(offset)), mask))
        return places
