"""Fill one output from many arrays: small ones on the calling thread, large ones by a plan of pieces."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu.floating_point import call_in_default_environment, call_reporting_errors
from accel_ops.cpu.memory import empty
from accel_ops.cpu.plan import Plan
from accel_ops.errors import warn

__all__ = ["SMALL_BYTES", "SMALL_CHANGED_BYTES", "empty", "fill", "is_small", "join"]

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
    reports_errors: bool = True,
) -> None:
    """Write the arrays, joined along an axis, into ``out``, which overlaps none of them. See `concatenate`.

    A part of a larger join leaves it to that to report what casts have found.
    """
    casts = not all(array.dtype == out.dtype for array in arrays)
    if casts:
        arrays = discard_imaginary_parts(arrays, out.dtype)
    if is_small(out.nbytes, changes=casts or not all(array.flags.c_contiguous for array in arrays)):
        on_caller = functools.partial(np.concatenate, arrays, axis, out=out, casting=casting)
        piece = functools.partial(call_in_default_environment, on_caller) if casts else on_caller
        run = functools.partial(pool.run, lambda _index: piece(), 1, workers=1, call=call)
    else:
        plan = Plan(out, axis, min_chunk_bytes)
        for array in arrays:
            plan.add(array)
        run = functools.partial(plan.run, max_workers, call)
    call_reporting_errors(run) if casts and reports_errors else run()


def fill(dst: Array, src: Array, *, max_workers: int | None = None) -> None:
    """Write one array into another of the same shape. That the cast is allowed has been checked."""
    (src,) = discard_imaginary_parts([src], dst.dtype)
    plan = Plan(dst, None, 0)
    plan.add_pieces(dst, src)
    run = functools.partial(plan.run, max_workers, None)
    call_reporting_errors(run) if dst.dtype != src.dtype else run()


def is_small(n_bytes: int, *, changes: bool) -> bool:
    """Return whether NumPy alone, on the calling thread, joins so much soonest."""
    return n_bytes < (SMALL_CHANGED_BYTES if changes else SMALL_BYTES)


def discard_imaginary_parts(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Sequence[Array]:
    """Return the real parts of arrays whose imaginary parts a cast would discard, and warn of it as NumPy does.

    It is done beforehand, so that the warning is given once, by the caller's thread and at the caller's line.
    """
    if dtype.kind not in "iuf" or not any(array.dtype.kind == "c" for array in arrays):
        return arrays
    warn("Casting complex values to real discards the imaginary part", np.exceptions.ComplexWarning)
    return [array.real if array.dtype.kind == "c" else array for array in arrays]
