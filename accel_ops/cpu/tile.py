"""The inner tile of every product: a block of outputs in registers, to which terms are added in the one order.

Each output is its own chain ``p = fma(a[k], b[k], p)`` for ascending k, whatever the tile: lanes and rows are
different outputs. A complex product has four chains. The tile reads the left operand where it lies, at any stride,
because a number that is to be multiplied with a whole vector costs the same wherever it comes from.
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from accel_ops.cpu.elements import Element, TileShape, element_of, tile_shape
from accel_ops.cpu.emit import broadcast, for_range, integer, load, load_masked, prefetch, vector_type
from accel_ops.cpu.outputs import RESUME, Outputs

__all__ = ["internal_function", "long_row_columns", "multiply_long_row", "multiply_tile"]

_LONG_ROW_VECTORS = 8  # independent chains, as many as the multiply-add units of a core need

_ARGUMENTS = ("n_terms", "a", "a_row", "a_term", "b", "b_term", "c", "c_row", "columns", "start")


@intrinsic
def multiply_tile(
    _context: Any,
    zero: Any,
    rows: Any,
    n_terms: Any,
    a: Any,
    a_row: Any,
    a_term: Any,
    b: Any,
    b_term: Any,
    c: Any,
    c_row: Any,
    columns: Any,
    start: Any,
) -> Any:
    """Multiply ``rows`` (one of the tile's row counts) of a with up to a tile's ``columns`` of b into c.

    Addresses and strides are in bytes. A row of b is contiguous; that of a complex b is whole vectors of real parts
    and then as many of imaginary parts. A row of c is contiguous.
    """
    numbers = (rows, n_terms, a, a_row, a_term, b, b_term, c, c_row, columns, start)
    element = element_of(zero)
    shape = tile_shape(element)

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, n_rows, *rest = arguments
        n_columns = rest[_ARGUMENTS.index("columns")]
        n_vectors = builder.sdiv(builder.add(n_columns, integer(shape.lanes - 1)), integer(shape.lanes))
        is_whole = builder.and_(
            builder.icmp_signed("==", builder.mul(n_vectors, integer(shape.lanes)), n_columns),
            builder.icmp_signed("==", n_rows, integer(shape.rows)),
        )
        number = builder.add(builder.select(is_whole, integer(0), builder.mul(n_rows, integer(8))), n_vectors)
        after = builder.append_basic_block("after")
        impossible = builder.append_basic_block("impossible")
        choice = builder.switch(number, impossible)
        variants = {}
        for width in range(1, shape.vectors + 1):
            variants[width] = _tile_function(builder.module, element, shape, shape.rows, width, masked=False)
            for height in shape.row_counts:
                masked = _tile_function(builder.module, element, shape, height, width, masked=True)
                variants[height * 8 + width] = masked
        for value, function in variants.items():
            block = builder.append_basic_block("variant")
            choice.add_case(integer(value), block)
            builder.position_at_end(block)
            builder.call(function, rest)
            builder.branch(after)
        builder.position_at_end(impossible)
        builder.unreachable()
        builder.position_at_end(after)

    return types.void(zero, *numbers), write


@intrinsic
def multiply_long_row(
    _context: Any,
    zero: Any,
    n_terms: Any,
    a: Any,
    a_term: Any,
    b: Any,
    b_term: Any,
    c: Any,
    columns: Any,
    start: Any,
) -> Any:
    """Multiply a row with ``columns`` of b, a multiple of `long_row_columns`, into the row c. Not for complex."""
    numbers = (n_terms, a, a_term, b, b_term, c, columns, start)
    element = element_of(zero)
    shape = tile_shape(element)
    step_bytes = _LONG_ROW_VECTORS * shape.lanes * element.n_bytes

    def write(_target: Any, builder: Any, _signature: Any, arguments: Any) -> None:
        _, n_terms, a, a_term, b, b_term, c, columns, start = arguments
        function = _tile_function(builder.module, element, shape, 1, _LONG_ROW_VECTORS, masked=False)
        with for_range(builder, builder.mul(columns, integer(element.n_bytes)), step_bytes) as at:
            places = (builder.add(b, at), b_term, builder.add(c, at))
            builder.call(function, [n_terms, a, integer(0), a_term, *places, integer(0), integer(0), start])

    return types.void(zero, *numbers), write


@intrinsic
def long_row_columns(_context: Any, zero: Any) -> Any:
    """Return how many columns of a long row are multiplied at once."""
    columns = _LONG_ROW_VECTORS * tile_shape(element_of(zero)).lanes
    return types.int64(zero), lambda _target, _builder, _signature, _arguments: integer(columns)


def internal_function(module: Any, name: str, n_arguments: int) -> Any:
    """Add a function of 64-bit integers to a module, for its own use."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * n_arguments), name)
    function.linkage = "internal"
    # LLVM avoids its widest vectors on some CPUs, where other code would become slower. llvmlite checks the names of
    # the attributes that it knows; these it passes on.
    set.add(function.attributes, '"min-legal-vector-width"="512"')
    set.add(function.attributes, '"prefer-vector-width"="512"')
    return function


def _tile_function(module: Any, element: Element, shape: TileShape, rows: int, vectors: int, *, masked: bool) -> Any:
    """Return the function of one variant; its last vector is a partial one where it is masked."""
    name = f"accel_ops_tile_{element.arithmetic}{8 * element.part_bytes}x{element.parts}_{rows}_{vectors}_{masked:d}"
    if name in module.globals:
        return module.globals[name]
    function = internal_function(module, name, len(_ARGUMENTS))
    _Tile(function, element, shape, rows, vectors, masked=masked).write()
    return function


class _Tile:
    """Writes one variant of the tile."""

    def __init__(
        self, function: Any, element: Element, shape: TileShape, rows: int, vectors: int, *, masked: bool
    ) -> None:
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.element, self.shape, self.lanes, self.rows, self.vectors = element, shape, shape.lanes, rows, vectors
        self.kind = vector_type(element.scalar, shape.lanes)
        self.given = dict(zip(_ARGUMENTS, function.args, strict=True))
        self.masked = masked
        self.resumes = element.parts == 1 and (masked or rows == 1)  # whole tiles never need to
        self.chains = 4 if element.parts == 2 else 1  # of each output
        columns = self.given["columns"] if masked else None
        self.outputs = Outputs(self.builder, element, shape.lanes, vectors, columns)

    def write(self) -> None:
        builder, given = self.builder, self.given
        loop, done = builder.append_basic_block("terms"), builder.append_basic_block("done")
        c_rows = [builder.add(given["c"], builder.mul(given["c_row"], integer(row))) for row in range(self.rows)]
        if not self.masked and self.rows * self.vectors == self.shape.rows * self.shape.vectors:
            self._prefetch(c_rows)
        a_rows = [builder.mul(given["a_row"], integer(row)) for row in range(self.rows)]
        begin = self._begin(c_rows)
        before = builder.block
        builder.cbranch(builder.icmp_signed(">", given["n_terms"], integer(0)), loop, done)

        builder.position_at_end(loop)
        left = self._phi(given["n_terms"], before)
        a, b = self._phi(given["a"], before), self._phi(given["b"], before)
        totals = [self._phi(value, before) for value in begin]
        results = self._add_terms([builder.add(a, row) for row in a_rows], b, totals)
        for phi, value in [
            (left, builder.sub(left, integer(1))),
            (a, builder.add(a, given["a_term"])),
            (b, builder.add(b, given["b_term"])),
            *zip(totals, results, strict=True),
        ]:
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed(">", left, integer(1)), loop, done)
        last = builder.block

        builder.position_at_end(done)
        ended = []
        for start, result in zip(begin, results, strict=True):
            phi = self._phi(start, before)
            phi.add_incoming(result, last)
            ended.append(phi)
        self.outputs.finish(c_rows, ended, given["start"])
        builder.ret_void()

    def _phi(self, value: Any, block: Any) -> Any:
        phi = self.builder.phi(value.type)
        phi.add_incoming(value, block)
        return phi

    def _prefetch(self, c_rows: list[Any]) -> None:
        """Fetch the outputs while the terms are added: 2 to 4% of the whole product where they are not in a cache."""
        n_lines = -(-self.vectors * self.lanes * self.element.n_bytes // 64)
        for row, line in itertools.product(c_rows, range(n_lines)):
            prefetch(self.builder, self.builder.add(row, integer(64 * line)))

    def _begin(self, c_rows: list[Any]) -> list[Any]:
        """Return what the chains begin with."""
        zeros = [self.element.zeros(self.lanes)] * (self.rows * self.vectors * self.chains)
        if not self.resumes:
            return zeros
        builder = self.builder
        before = builder.block
        with builder.if_then(builder.icmp_signed("==", self.given["start"], integer(RESUME))):
            stored = [self.outputs.load(row, vector)[0] for row in c_rows for vector in range(self.vectors)]
            resumed = builder.block
        begin = []
        for zero, value in zip(zeros, stored, strict=True):
            phi = self._phi(zero, before)
            phi.add_incoming(value, resumed)
            begin.append(phi)
        return begin

    def _add_terms(self, a_rows: list[Any], b: Any, totals: list[Any]) -> list[Any]:
        """Add the term of one k to every chain."""
        builder, element = self.builder, self.element
        vector_bytes = self.lanes * element.part_bytes
        rights = [
            [
                self._load_b(builder.add(b, integer(offset)), v)
                for offset in (v * vector_bytes, (self.vectors + v) * vector_bytes)[: element.parts]
            ]
            for v in range(self.vectors)
        ]
        results = []
        position = iter(totals)
        for row in a_rows:
            left = self._load_a(row)
            for right in rights:
                # Of complex numbers: real times real, imaginary times imaginary, real times imaginary and the reverse.
                pairs = [(0, 0), (1, 1), (0, 1), (1, 0)][: self.chains]
                results += [element.multiply_add(builder, left[i], right[j], next(position)) for i, j in pairs]
        return results

    def _load_a(self, address: Any) -> list[Any]:
        """Return the parts of one number of the left operand, each in all lanes."""
        builder, element = self.builder, self.element
        places = [builder.add(address, integer(part * element.part_bytes)) for part in range(element.parts)]
        numbers = [element.as_left(builder, load(builder, place, element.scalar)) for place in places]
        return [broadcast(builder, number, self.lanes) for number in numbers]

    def _load_b(self, address: Any, vector: int) -> Any:
        if self.masked and self.element.parts == 1 and vector == self.vectors - 1:
            n = self.builder.sub(self.given["columns"], integer(vector * self.lanes))
            return load_masked(self.builder, address, self.kind, self.outputs.mask(n))
        return load(self.builder, address, self.kind)
