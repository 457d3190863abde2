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

__all__ = ["Plan"]

Array = np.ndarray[Any, Any]

# NumPy copies arrays below this while it holds the GIL most of the time: many of them make one piece.
_SMALL_ARRAY_BYTES = 16 << 10
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
        self._stop = 0  # where the arrays so far end, along the axis
        # Where consecutive elements along the axis lie one after the other, so that an array may be one run.
        self._is_flat = out.flags.c_contiguous and (axis is None or math.prod(out.shape[:axis]) == 1)
        self._group: list[Array] = []  # small arrays that will make one piece
        self._runs: list[Array] = []  # contiguous arrays of no more than a piece that will make one
        self._collected_bytes = 0  # in either of them
        self._pieces: list[Callable[[], object]] = []
        self._tasks: list[int] = []
        self._shared_bytes = 0  # of pieces that gain from more than one thread

    def add(self, array: Array) -> None:
        """Let an array follow those that have been added."""
        length = array.size if self._axis is None else array.shape[self._axis]
        if array.nbytes < _SMALL_ARRAY_BYTES:
            self._close_runs()
            self._collect(self._group, array, length)
        elif self._is_run(array):
            self._close_group()
            self._collect(self._runs, array, length)
        else:
            self._close()
            self._stop += length
            dst = self._part(length)
            self.add_pieces(dst.reshape(array.shape) if self._axis is None else dst, array)

    def add_pieces(self, dst: Array, src: Array) -> None:
        """Cut an array into pieces for a part of the output that is given."""
        pieces = copying.pieces(dst, src, stream=self._stream)
        self._begin_tasks([piece.n_bytes for piece in pieces])
        self._pieces += [piece.run for piece in pieces]
        self._shared_bytes += dst.nbytes

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

    def _is_run(self, array: Array) -> bool:
        return (
            self._is_flat
            and array.nbytes <= copying.PIECE_BYTES
            and array.flags.c_contiguous
            and array.dtype == self._out.dtype
        )

    def _collect(self, arrays: list[Array], array: Array, length: int) -> None:
        arrays.append(array)
        self._stop += length
        self._collected_bytes += array.nbytes
        if self._collected_bytes >= copying.PIECE_BYTES:
            self._close()

    def _close(self) -> None:
        self._close_group()
        self._close_runs()

    def _close_group(self) -> None:
        if self._group:
            group, self._group, self._collected_bytes = self._group, [], 0
            length = sum(array.size if self._axis is None else array.shape[self._axis] for array in group)
            self._tasks.append(len(self._pieces))
            self._pieces.append(functools.partial(_join_group, group, self._axis, self._part(length)))

    def _close_runs(self) -> None:
        if self._runs:
            runs, self._runs, self._collected_bytes = self._runs, [], 0
            size = sum(array.nbytes for array in runs)
            stop = self._stop * (self._out.size // self._out.shape[self._axis or 0])
            dst = self._out.reshape(-1)[stop - size // self._out.itemsize : stop]
            self._tasks.append(len(self._pieces))
            self._pieces.append(functools.partial(copying.copy_runs, dst, runs, stream=self._stream))
            self._shared_bytes += size

    def _part(self, length: int) -> Array:
        """Return the last ``length`` of what has been planned of the output."""
        before = (slice(None),) * (self._axis or 0)
        part: Array = self._out[(*before, slice(self._stop - length, self._stop))]
        return part


def _join_group(group: list[Array], axis: int | None, dst: Array) -> None:
    join_group = functools.partial(np.concatenate, group, axis, out=dst, casting="unsafe")
    call_in_default_environment(join_group)
