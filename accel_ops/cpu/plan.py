"""The pieces of one join: parts of large arrays, and small arrays put together.

How a join is cut follows from shapes, strides and dtypes alone. Only how many threads it is worth depends on the
budget.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from accel_ops import budget
from accel_ops.cpu import copying, pool
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.cpu.memory import is_plain

__all__ = ["SMALL_ARRAY_BYTES", "Plan"]

Array = np.ndarray[Any, Any]

# NumPy copies arrays below this while it holds the GIL most of the time: many of them make one piece.
SMALL_ARRAY_BYTES = 16 << 10
# Work that pays for one more thread: about as long as waking it takes (13 to 85 us).
_GRAIN_BYTES = 1 << 20
# Outputs from here on are stored past the caches. With all data in a third-level cache of 32 MiB this gains from
# 24 MB on; with data that is not in it, earlier.
_STREAMED_BYTES = 24 << 20


class Plan:
    """The pieces of one join, in the order of the output."""

    def __init__(self, out: Array, axis: int | None, min_chunk_bytes: int) -> None:
        self._out, self._axis, self._min_chunk_bytes = out, axis, min_chunk_bytes
        self._stream = out.nbytes >= _STREAMED_BYTES
        self._is_shared = is_plain(out.dtype)  # objects are copied by one thread, which holds the GIL
        self._stop = 0  # where the arrays so far end, along the axis
        # Where consecutive elements along the axis lie one after the other, so that an array may be one run.
        self._is_flat = out.flags.c_contiguous and (axis is None or math.prod(out.shape[:axis]) == 1)
        self._collected: list[Array] = []  # arrays of one kind that will make one piece
        self._collected_bytes = 0
        self._kind: object = None  # of those arrays
        self._pieces: list[Callable[[], object]] = []
        self._tasks: list[int] = []
        self._shared_bytes = 0  # of pieces that gain from more than one thread

    def add(self, array: Array) -> None:
        """Let an array follow those that have been added."""
        kind = self._kind_of(array)
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._stop += self._length(array)
        if kind is None:
            dst = self._part(self._length(array))
            self.add_pieces(dst.reshape(array.shape) if self._axis is None else dst, array)
            return
        self._collected.append(array)
        self._collected_bytes += array.nbytes
        if self._collected_bytes >= copying.PIECE_BYTES:
            self._close()

    def add_pieces(self, dst: Array, src: Array) -> None:
        """Cut an array into pieces for a part of the output that is given."""
        pieces = copying.pieces(dst, src, stream=self._stream)
        self._begin_tasks([piece.n_bytes for piece in pieces])
        self._pieces += [piece.run for piece in pieces]
        if self._is_shared:
            self._shared_bytes += dst.nbytes

    def run(self, max_workers: int | None, call: pool.Call | None) -> None:
        """Run all pieces on as many threads as they are worth."""
        self._close()
        threads = budget.get_num_threads()
        if max_workers is not None:
            threads = min(threads, max_workers)
        pieces = self._pieces
        pool.run(
            lambda index: pieces[index](),
            len(pieces),
            workers=min(threads, max(1, self._shared_bytes // _GRAIN_BYTES)),
            budget=threads,
            tasks=self._tasks,
            call=call,
        )

    def _kind_of(self, array: Array) -> object:
        """Return what an array is collected with: tiny ones, runs, ones of its own layout; None for none."""
        if array.nbytes < SMALL_ARRAY_BYTES:
            return _TINY
        if array.nbytes > copying.PIECE_BYTES or array.dtype != self._out.dtype or not self._is_shared:
            return None
        if self._is_flat and array.flags.c_contiguous:
            return _RUN
        return None if self._axis is None else (array.shape, array.strides)

    def _close(self) -> None:
        """Make one piece of what has been collected."""
        arrays, self._collected, self._collected_bytes = self._collected, [], 0
        if not arrays:
            return
        dst = self._part(sum(self._length(array) for array in arrays))
        if self._kind is _TINY:
            piece = functools.partial(_join_tiny, arrays, self._axis, dst)
        elif self._kind is _RUN:
            piece = functools.partial(copying.copy_runs, dst.reshape(-1), arrays, stream=self._stream)
        else:
            length = self._length(arrays[0])
            places = [_part_of(dst, self._axis, k * length, length) for k in range(len(arrays))]
            piece = functools.partial(copying.copy_alike, places, arrays, stream=self._stream)
        if self._kind is not _TINY:
            self._shared_bytes += dst.nbytes
        self._tasks.append(len(self._pieces))
        self._pieces.append(piece)

    def _begin_tasks(self, sizes: list[int]) -> None:
        """Put consecutive pieces of one array together, so that no task is smaller than the least chunk."""
        least = self._min_chunk_bytes
        first = len(self._pieces)
        task_bytes, rest = 0, sum(sizes)
        for index, size in enumerate(sizes, start=first):
            if index == first or (task_bytes >= least and rest >= least):
                self._tasks.append(index)
                task_bytes = 0
            task_bytes += size
            rest -= size

    def _length(self, array: Array) -> int:
        return array.size if self._axis is None else array.shape[self._axis]

    def _part(self, length: int) -> Array:
        """Return the last ``length`` of what has been planned of the output."""
        return _part_of(self._out, self._axis, self._stop - length, length)


# Kinds of arrays that are collected; an array that is neither is collected with those of its shape and strides.
_TINY, _RUN = "tiny", "run"


def _part_of(array: Array, axis: int | None, start: int, length: int) -> Array:
    part: Array = array[(*(slice(None),) * (axis or 0), slice(start, start + length))]
    return part


def _join_tiny(arrays: list[Array], axis: int | None, dst: Array) -> None:
    join_tiny = functools.partial(np.concatenate, arrays, axis, out=dst, casting="unsafe")
    if all(array.dtype == dst.dtype for array in arrays):
        join_tiny()
    else:
        call_in_default_environment(join_tiny)
