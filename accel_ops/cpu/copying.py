"""One array into a part of another: cut into pieces, and a kernel chosen for each.

A piece covers about two mebibytes of the output. How an array is cut follows from shapes, strides and dtypes
alone; what a kernel cannot do is left to NumPy, which does it slower and with the same result.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_ops.cpu import cast_kernels, copy_kernels
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.cpu.memory import address, is_plain

__all__ = ["PIECE_BYTES", "Piece", "copy_alike", "copy_runs", "pieces"]

Array = np.ndarray[Any, Any]


class Piece(NamedTuple):
    """One call that copies a part of the output."""

    run: Callable[[], object]
    n_bytes: int  # of the input


# About 0.1 ms of copying: some 30 times what it costs to take a piece, and short enough to share 8 MiB evenly.
PIECE_BYTES = 2 << 20
_RUN_BYTES = 2 << 10  # a transposed input is read in runs of at least this, which the prefetcher needs
_KERNEL_BLOCK_BYTES = 16 << 10  # a kernel call on less than this costs more than NumPy's loop does

_scratch = threading.local()


def pieces(dst: Array, src: Array, *, stream: bool) -> list[Piece]:
    """Cut ``dst[...] = src`` (equal shapes, no overlap) into calls that may run in any order and at once.

    ``stream`` says that the whole output is larger than the caches.
    """
    dst, src = _in_order(dst, src)
    if dst.dtype != src.dtype or not is_plain(dst.dtype):
        return [Piece(functools.partial(_cast, d, s, stream=stream), s.nbytes) for d, s in _blocks(dst, src)]
    if dst.flags.c_contiguous and src.flags.c_contiguous:
        kernel = copy_kernels.rows(stream=stream)
        if kernel is not None:
            return _contiguous_pieces(kernel, dst, src)
    return [Piece(functools.partial(_copy, d, s, stream=stream), s.nbytes) for d, s in _blocks(dst, src)]


def copy_alike(dst: Sequence[Array], src: Sequence[Array], *, stream: bool) -> None:
    """Copy several arrays of one dtype, shape and layout, each to its place: one look at the layout serves all."""
    layout = _layout(*_in_order(dst[0], src[0]), stream=stream)
    for to, start in zip(dst, src, strict=True):
        if layout is None:
            np.copyto(to, start, casting="no")
        else:
            layout.copy(address(to), address(start))


def _in_order(dst: Array, src: Array) -> tuple[Array, Array]:
    """Return both with their axes in the order of the output's memory."""
    order = sorted(range(dst.ndim), key=lambda axis: -abs(dst.strides[axis]))
    return dst.transpose(order), src.transpose(order)


def _contiguous_pieces(kernel: Callable[..., object], dst: Array, src: Array) -> list[Piece]:
    to, start, size = address(dst), address(src), dst.nbytes
    pieces = []
    for offset in range(0, size, PIECE_BYTES):
        n_bytes = min(PIECE_BYTES, size - offset)
        pieces.append(Piece(functools.partial(kernel, to + offset, start + offset, 1, n_bytes, 0, 0), n_bytes))
    return pieces


def copy_runs(dst: Array, arrays: Sequence[Array], *, stream: bool) -> None:
    """Copy contiguous arrays one after the other into a flat one, in one call without the GIL."""
    kernel = copy_kernels.segments(stream=stream)
    if kernel is None:
        np.concatenate(arrays, axis=None, out=dst)
        return
    sizes = [array.nbytes for array in arrays]
    table = np.empty((3, len(arrays)), np.int64)
    table[0] = list(itertools.accumulate(sizes[:-1], initial=address(dst)))
    table[1] = [address(array) for array in arrays]
    table[2] = sizes
    kernel(*(address(row) for row in table), len(arrays))


def _blocks(dst: Array, src: Array) -> Iterator[tuple[Array, Array]]:
    """Cut both arrays alike into blocks of about PIECE_BYTES of the output.

    Axes along which neither array is contiguous are cut first. Of the two that remain where the input is
    transposed, both keep a length that makes a run of _RUN_BYTES.
    """
    if dst.nbytes <= PIECE_BYTES:
        yield dst, src
        return
    item_bytes = src.itemsize
    inner = {dst.ndim - 1} | {axis for axis in range(src.ndim) if src.strides[axis] == item_bytes}
    shortest = max(1, _RUN_BYTES // item_bytes) if len(inner) > 1 else 1
    order = [(axis, 1) for axis in range(dst.ndim) if axis not in inner]
    order += [(axis, shortest) for axis in sorted(inner)]
    yield from _cut(dst, src, order)


def _cut(dst: Array, src: Array, order: Sequence[tuple[int, int]]) -> Iterator[tuple[Array, Array]]:
    if dst.nbytes <= PIECE_BYTES or not order:
        yield dst, src
        return
    (axis, shortest), *others = order
    length = dst.shape[axis]
    step = max(shortest, PIECE_BYTES * length // dst.nbytes)
    step -= step % shortest  # so that blocks begin where lines of the output do
    for start in range(0, length, step):
        part = (slice(None),) * axis + (slice(start, start + step),)
        yield from _cut(dst[part], src[part], others)


def _copy(dst: Array, src: Array, *, stream: bool) -> None:
    """Copy a block between arrays of one dtype, by a kernel where there is one for its layout."""
    layout = _layout(dst, src, stream=stream, alignment=address(dst))
    if layout is None:
        np.copyto(dst, src, casting="no")
    else:
        layout.copy(address(dst), address(src))


class _Layout(NamedTuple):
    """How a kernel copies a block: what it is told besides the addresses, and where its calls begin."""

    kernel: Callable[..., object]
    sizes: tuple[int, ...]
    offsets: list[tuple[int, int]]

    def copy(self, to: int, start: int) -> None:
        for to_offset, offset in self.offsets:
            self.kernel(to + to_offset, start + offset, *self.sizes)


def _layout(dst: Array, src: Array, *, stream: bool, alignment: int = 1) -> _Layout | None:
    """Return how a kernel copies between arrays of these shapes and strides, or None where NumPy has to.

    Every address that the output begins at is a multiple of ``alignment``.
    """
    item_bytes = dst.itemsize
    shape, dst_strides, src_strides = _merged(dst, src)
    if not shape or dst_strides[-1] != item_bytes:
        return None
    last = len(shape) - 1
    if src_strides[last] == item_bytes:
        inner = [last - 1, last] if last else [last]
        n_rows, dst_stride, src_stride = (
            (shape[last - 1], dst_strides[last - 1], src_strides[last - 1]) if last else (1, 0, 0)
        )
        kernel: Any = copy_kernels.rows(stream=stream)
        sizes: tuple[int, ...] = (n_rows, shape[last] * item_bytes, dst_stride, src_stride)
    elif item_bytes in src_strides and item_bytes in copy_kernels.TRANSPOSED_ITEM_BYTES:
        other = src_strides.index(item_bytes)
        inner = [other, last]
        sizes = (shape[other], shape[last], dst_strides[other], src_strides[last])
        aligned = copy_kernels.has_whole_lines(item_bytes, math.gcd(alignment, *dst_strides[:-1]))
        kernel, sizes = _transposing_kernel(item_bytes, sizes, stream=stream, aligned=stream and aligned)
    else:
        return None
    outer = [axis for axis in range(len(shape)) if axis not in inner]
    block_bytes = item_bytes * math.prod(shape[axis] for axis in inner)
    if kernel is None or (outer and block_bytes < _KERNEL_BLOCK_BYTES):
        return None
    offsets = [(0, 0)]
    for axis in outer:
        steps = [(k * dst_strides[axis], k * src_strides[axis]) for k in range(shape[axis])]
        offsets = [(to + a, start + b) for to, start in offsets for a, b in steps]
    return _Layout(kernel, sizes, offsets)


def _transposing_kernel(
    item_bytes: int, sizes: tuple[int, int, int, int], *, stream: bool, aligned: bool
) -> tuple[Any, tuple[int, ...]]:
    """Choose between whole tiles and few interleaved channels; return the kernel and its last arguments."""
    n_rows, n_columns, dst_stride, src_stride = sizes
    if 1 < n_rows <= copy_kernels.MAX_CHANNELS and src_stride == n_rows * item_bytes:
        return copy_kernels.deinterleave(item_bytes, n_rows), (n_columns, dst_stride)
    if 1 < n_columns <= copy_kernels.MAX_CHANNELS and dst_stride == n_columns * item_bytes:
        return copy_kernels.interleave(item_bytes, n_columns), (n_rows, src_stride)
    return copy_kernels.transpose(item_bytes, stream=stream, aligned=aligned), (*sizes, _scratch_address())


def _scratch_address() -> int:
    """Return memory for the calling thread alone, kept for its next piece."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = np.empty(copy_kernels.SCRATCH_BYTES, np.uint8)
    return address(_scratch.buffer)


def _merged(dst: Array, src: Array) -> tuple[list[int], list[int], list[int]]:
    """Return shape and strides without axes of length 1 and with neighbours joined where both arrays allow."""
    shape: list[int] = []
    dst_strides: list[int] = []
    src_strides: list[int] = []
    for length, to, start in zip(dst.shape, dst.strides, src.strides, strict=True):
        if length == 1:
            continue
        if shape and dst_strides[-1] == to * length and src_strides[-1] == start * length:
            shape[-1] *= length
            dst_strides[-1], src_strides[-1] = to, start
        else:
            shape.append(length)
            dst_strides.append(to)
            src_strides.append(start)
    return shape, dst_strides, src_strides


def _cast(dst: Array, src: Array, *, stream: bool) -> None:
    """Convert a block to another dtype. That the cast is allowed has been checked."""
    if dst.dtype == src.dtype:
        np.copyto(dst, src)  # of objects
    else:
        call_in_default_environment(functools.partial(_convert, dst, src, stream=stream))


def _convert(dst: Array, src: Array, *, stream: bool) -> None:
    stream = stream and address(dst) % dst.itemsize == 0
    kernel = cast_kernels.cast_kernel(src.dtype, dst.dtype, stream=stream)
    if kernel is None or not dst.flags.c_contiguous:
        np.copyto(dst, src, casting="unsafe")
        return
    if not src.flags.c_contiguous:
        packed = np.empty(src.shape, src.dtype)
        _copy(packed, src, stream=False)
        src = packed
    flags = kernel(address(dst), address(src), dst.size)
    # NumPy itself reports what a kernel has seen, so that it follows the caller's errstate.
    if flags & cast_kernels.OVERFLOW:
        np.array(np.finfo(src.dtype).max).astype(dst.dtype)
    if flags & cast_kernels.UNDERFLOW:
        np.array(np.finfo(src.dtype).tiny).astype(dst.dtype)
    if flags & cast_kernels.INVALID:
        np.array(0x7F800001, np.uint32).view(src.dtype).astype(dst.dtype)  # a signalling NaN
