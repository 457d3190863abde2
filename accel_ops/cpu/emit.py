"""Words for writing LLVM IR: loops, loads and stores at addresses, shuffles."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["fence", "for_range", "gather", "integer", "load", "memcpy", "minimum", "splat", "store", "vector_type"]

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


def fence(builder: Any) -> None:
    """Order streaming stores before what follows, such as the flag that says a piece is done."""
    builder.fence("seq_cst")
