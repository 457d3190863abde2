"""Words for writing LLVM IR: loops, loads and stores at addresses, shuffles."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "broadcast",
    "concatenated",
    "fence",
    "for_range",
    "fused_multiply_add",
    "gather",
    "integer",
    "load",
    "load_masked",
    "memcpy",
    "minimum",
    "opaque",
    "prefetch",
    "splat",
    "store",
    "store_masked",
    "transposed",
    "variable",
    "vector_type",
]

CACHE_LINE_BYTES = 64


def integer(value: int, bits: int = 64) -> Any:
    """Return an integer constant."""
    from llvmlite import ir

    return ir.Constant(ir.IntType(bits), value)


def vector_type(item: Any, n: int) -> Any:
    """Return the type of a vector of n items."""
    from llvmlite import ir

    return ir.VectorType(item, n)


def splat(value: Any, n: int) -> Any:
    """Return a vector of n times the same constant."""
    from llvmlite import ir

    return ir.Constant(ir.VectorType(value.type, n), [value] * n)


@contextmanager
def for_range(builder: Any, stop: Any, step: int = 1, start: Any = None) -> Iterator[Any]:
    """Write ``for index in range(start, stop, step)``; the body of the ``with`` block is the loop's body."""
    start = integer(0) if start is None else start
    before = builder.block
    head = builder.append_basic_block("loop")
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(start.type)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
    builder.position_at_end(body)
    yield index
    index.add_incoming(builder.add(index, integer(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def variable(builder: Any, initial: Any) -> Any:
    """Return memory for a value that changes, which LLVM keeps in a register: it lies in the function's frame."""
    with builder.goto_entry_block():
        place = builder.alloca(initial.type)
    builder.store(initial, place)
    return place


def opaque(builder: Any, value: Any) -> Any:
    """Return a 64-bit integer of which LLVM knows nothing: it would derive each address from the one before."""
    from llvmlite import ir

    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], side_effect=False)


def minimum(builder: Any, first: Any, second: Any) -> Any:
    """Return the smaller of two signed integers."""
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load a value of a type from an address of any alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any, *, stream: bool = False) -> None:
    """Store a value at an address of any alignment; ``stream`` stores a whole, aligned line past the caches."""
    pointer = builder.inttoptr(address, value.type.as_pointer())
    instruction = builder.store(value, pointer, align=CACHE_LINE_BYTES if stream else 1)
    if stream:
        instruction.set_metadata("nontemporal", builder.module.add_metadata([integer(1, 32)]))


def memcpy(builder: Any, dst: Any, src: Any, size: Any) -> None:
    """Copy bytes between addresses."""
    from llvmlite import ir

    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, ir.IntType(64)])
    arguments = [builder.inttoptr(dst, pointer), builder.inttoptr(src, pointer), size, integer(0, 1)]
    builder.call(function, arguments)


def gather(builder: Any, vectors: Sequence[Any], lanes: Sequence[tuple[int, int]]) -> Any:
    """Return a vector whose lane i is lane ``lanes[i][1]`` of ``vectors[lanes[i][0]]``."""
    from llvmlite import ir

    n = len(lanes)
    used = sorted({vector for vector, _ in lanes})
    result = vectors[used[0]]
    chosen = [lane if vector == used[0] else 0 for vector, lane in lanes]
    for position, vector in enumerate(used[1:] or [used[0]]):
        if len(used) > 1:
            keep = chosen if position == 0 else list(range(n))
            chosen = [n + lane if source == vector else keep[i] for i, (source, lane) in enumerate(lanes)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), n), [integer(lane, 32) for lane in chosen])
        result = builder.shuffle_vector(result, vectors[vector], mask)
    return result


def transposed(builder: Any, tile: list[Any]) -> list[Any]:
    """Transpose square blocks side by side: log2(side) rounds, each of which interleaves row i with row i + side/2.

    A vector of several times as many lanes as there are vectors is so many blocks.
    """
    side = len(tile)
    half = side // 2
    blocks = range(0, tile[0].type.count, side)
    for _ in range(side.bit_length() - 1):
        tile = [
            gather(
                builder,
                [tile[k], tile[k + half]],
                [(lane % 2, block + start + lane // 2) for block in blocks for lane in range(side)],
            )
            for k in range(half)
            for start in (0, half)
        ]
    return tile


def concatenated(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return one vector of the lanes of several, in order; their number is a power of two."""
    from llvmlite import ir

    while len(vectors) > 1:
        n = 2 * vectors[0].type.count
        mask = ir.Constant(vector_type(ir.IntType(32), n), [integer(lane, 32) for lane in range(n)])
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(first, second, mask) for first, second in pairs]
    return vectors[0]


def broadcast(builder: Any, value: Any, n: int) -> Any:
    """Return a vector of n times a value that is known at run time only."""
    from llvmlite import ir

    undefined = ir.Constant(vector_type(value.type, n), ir.Undefined)
    first = builder.insert_element(undefined, value, integer(0, 32))
    return builder.shuffle_vector(first, undefined, splat(integer(0, 32), n))


def load_masked(builder: Any, address: Any, kind: Any, mask: Any) -> Any:
    """Load the lanes of a vector that a mask names, the others being zero; nothing else is read."""
    from llvmlite import ir

    pointer = builder.inttoptr(address, kind.as_pointer())
    zero = ir.Constant(kind, [0] * kind.count)
    arguments = [pointer, integer(1, 32), mask, zero]
    function_type = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(_intrinsic(builder, f"llvm.masked.load.{_suffix(kind)}.p0", function_type), arguments)


def store_masked(builder: Any, value: Any, address: Any, mask: Any) -> None:
    """Store the lanes of a vector that a mask names; nothing else is written."""
    from llvmlite import ir

    pointer = builder.inttoptr(address, value.type.as_pointer())
    arguments = [value, pointer, integer(1, 32), mask]
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(_intrinsic(builder, f"llvm.masked.store.{_suffix(value.type)}.p0", function_type), arguments)


def fused_multiply_add(builder: Any, first: Any, second: Any, third: Any) -> Any:
    """Return first * second + third, rounded once. On vectors or scalars."""
    from llvmlite import ir

    kind = third.type
    function = _intrinsic(builder, f"llvm.fma.{_suffix(kind)}", ir.FunctionType(kind, [kind] * 3))
    return builder.call(function, [first, second, third])


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line of an address, which need not be mapped."""
    from llvmlite import ir

    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    arguments = [pointer, integer(0, 32), integer(2, 32), integer(1, 32)]  # to read, into the second-level cache, data
    function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(_intrinsic(builder, "llvm.prefetch.p0", function_type), arguments)


def _intrinsic(builder: Any, name: str, function_type: Any) -> Any:
    """Return an LLVM intrinsic, declared once in the module."""
    from llvmlite import ir

    declared = builder.module.globals.get(name)
    return ir.Function(builder.module, function_type, name) if declared is None else declared


def _suffix(kind: Any) -> str:
    """Return what LLVM calls a type in the names of intrinsics."""
    from llvmlite import ir

    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {ir.FloatType(): "f32", ir.DoubleType(): "f64"}.get(kind) or f"i{kind.width}"


def fence(builder: Any) -> None:
    """Order streaming stores before what follows, such as the flag that says a piece is done."""
    builder.fence("seq_cst")
