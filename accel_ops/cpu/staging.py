"""Fill one output from many arrays: small ones on the calling thread, large ones by a plan of pieces."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.cpu.memory import is_plain
from accel_ops.cpu.plan import Plan

__all__ = ["SMALL_BYTES", "SMALL_CHANGED_BYTES", "fill", "join"]

Array = np.ndarray[Any, Any]

# Below this much output NumPy alone is as fast on data in the cache as two threads that must be woken first.
SMALL_BYTES = 8 << 20
# The same where the layout or the dtype changes on the way, at which NumPy is several times slower.
SMALL_CHANGED_BYTES = 1 << 20


def join(
    arrays: Sequence[Array],
    axis: int | None,
    out: Array,
    *,
    casting: Any,
    min_chunk_bytes: int = 0,
    max_workers: int | None = None,
    call: pool.Call | None = None,
) -> None:
    """Write the arrays, joined along an axis, into ``out``, which overlaps none of them. See `concatenate`."""
    if _is_small(out, arrays):
        on_caller = functools.partial(np.concatenate, arrays, axis, out=out, casting=casting)
        pool.run(lambda _piece: call_in_default_environment(on_caller), 1, workers=1, call=call)
        return
    plan = Plan(out, axis, min_chunk_bytes)
    for array in arrays:
        plan.add(array)
    plan.run(max_workers, call)


def fill(dst: Array, src: Array) -> None:
    """Write one array into another of the same shape. That the cast is allowed has been checked."""
    if _is_small(dst, [src]):
        call_in_default_environment(functools.partial(np.copyto, dst, src, casting="unsafe"))
        return
    plan = Plan(dst, None, 0)
    plan.add_pieces(dst, src)
    plan.run(None, None)


def _is_small(out: Array, arrays: Sequence[Array]) -> bool:
    """Return whether NumPy alone shall do it: it is little, or its elements are more than their bytes."""
    if out.nbytes < SMALL_CHANGED_BYTES:
        return True
    if not (is_plain(out.dtype) and all(is_plain(array.dtype) for array in arrays)):
        return True
    return out.nbytes < SMALL_BYTES and all(array.flags.c_contiguous and array.dtype == out.dtype for array in arrays)
