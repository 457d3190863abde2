"""The copy kernels: contiguous rows, tiles transposed in registers, interleaved channels.

They move bytes and never look at values, so an element is an integer of 8 to 128 bits. Each is a serial loop
over one piece of the output; the pool runs many pieces at once. Where the output is larger than the caches,
rows are stored past them (``stream``): a plain store first reads the line that it is about to overwrite, a third
of all traffic. All strides are in bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

from accel_ops.cpu.emit import (
    CACHE_LINE_BYTES,
    fence,
    for_range,
    gather,
    integer,
    load,
    memcpy,
    minimum,
    store,
    transposed,
    vector_type,
)
from accel_ops.cpu.native import Kernel, compile_kernel, kept

__all__ = [
    "MAX_CHANNELS",
    "SCRATCH_BYTES",
    "TRANSPOSED_ITEM_BYTES",
    "deinterleave",
    "has_whole_lines",
    "interleave",
    "rows",
    "segments",
    "transpose",
]

_PANEL_RUN_BYTES = 2 << 10  # how much of a row of the input is read at once: enough for the prefetcher
_GROUP_LINES = 8  # of each row of a panel: this much stays in a second-level cache until it is stored
_STREAMED_ROW_BYTES = 4 * CACHE_LINE_BYTES  # a shorter row may lie in partial lines for the most part
_SIDES = {1: 32, 2: 32, 4: 16, 8: 8, 16: 4}  # of a tile, by bytes per item: a tile fits the vector registers
TRANSPOSED_ITEM_BYTES = frozenset(_SIDES)
SCRATCH_BYTES = _PANEL_RUN_BYTES // 2 * (_GROUP_LINES + 1) * CACHE_LINE_BYTES  # for items of 2 bytes, the most
MAX_CHANNELS = 4


@kept
def rows(*, stream: bool) -> Kernel | None:
    """Return ``copy(dst, src, n_rows, row_bytes, dst_stride, src_stride)``."""

    def build(builder: Any) -> None:
        copy_row = _define_copy_row(builder.module, stream=stream)
        dst, src, n_rows, row_bytes, dst_stride, src_stride = builder.function.args
        with for_range(builder, n_rows) as row:
            dst_row = builder.add(dst, builder.mul(row, dst_stride))
            src_row = builder.add(src, builder.mul(row, src_stride))
            builder.call(copy_row, [dst_row, src_row, row_bytes])
        _return(builder)

    return compile_kernel(f"copy_rows_{stream:d}", 6, build)


@kept
def segments(*, stream: bool) -> Kernel | None:
    """Return ``copy(dst, src, size, n)``: n separate runs of bytes, described by three arrays of int64."""

    def build(builder: Any) -> None:
        from llvmlite import ir

        copy_row = _define_copy_row(builder.module, stream=stream)
        *tables, n = builder.function.args
        with for_range(builder, n) as index:
            offset = builder.mul(index, integer(8))
            run = [load(builder, builder.add(table, offset), ir.IntType(64)) for table in tables]
            builder.call(copy_row, run)
        _return(builder)

    return compile_kernel(f"copy_segments_{stream:d}", 4, build)


def _define_copy_row(module: Any, *, stream: bool) -> Any:
    """Add ``copy_row(dst, src, n_bytes)`` to a module: memcpy, or whole lines by streaming stores."""
    from llvmlite import ir

    function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
    function = ir.Function(module, function_type, f"{module.name}_row")
    dst, src, size = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    if stream:
        with builder.if_then(builder.icmp_signed(">=", size, integer(_STREAMED_ROW_BYTES))):
            head = builder.and_(builder.neg(dst), integer(CACHE_LINE_BYTES - 1))
            memcpy(builder, dst, src, head)
            whole = builder.add(head, builder.and_(builder.sub(size, head), integer(-CACHE_LINE_BYTES)))
            unrolled = builder.add(head, builder.and_(builder.sub(size, head), integer(-4 * CACHE_LINE_BYTES)))
            for n_lines, start, stop in ((4, head, unrolled), (1, unrolled, whole)):
                with for_range(builder, stop, n_lines * CACHE_LINE_BYTES, start=start) as offset:
                    _stream_lines(builder, builder.add(dst, offset), builder.add(src, offset), n_lines)
            memcpy(builder, builder.add(dst, whole), builder.add(src, whole), builder.sub(size, whole))
            builder.ret_void()
    memcpy(builder, dst, src, size)
    builder.ret_void()
    return function


def _stream_lines(builder: Any, dst: Any, src: Any, n_lines: int) -> None:
    from llvmlite import ir

    line = vector_type(ir.IntType(8), CACHE_LINE_BYTES)
    offsets = [integer(k * CACHE_LINE_BYTES) for k in range(n_lines)]
    loaded = [load(builder, builder.add(src, offset), line) for offset in offsets]
    for offset, value in zip(offsets, loaded, strict=True):
        store(builder, value, builder.add(dst, offset), stream=True)


def has_whole_lines(item_bytes: int, alignment: int) -> bool:
    """Return whether each row of a tile is a whole line of an output whose rows have this alignment."""
    return _SIDES[item_bytes] * item_bytes == CACHE_LINE_BYTES and alignment % CACHE_LINE_BYTES == 0


@kept
def transpose(item_bytes: int, *, stream: bool, aligned: bool = False) -> Kernel | None:
    """Return ``copy(dst, src, n_rows, n_columns, dst_stride, src_stride, scratch)``: dst[i, j] = src[j, i].

    A row of dst and a row of src are contiguous. Within a panel of rows, a column of tiles is read before the
    next one, so that each row of src is read in long runs. When streaming, a group of such columns is collected
    in SCRATCH_BYTES at ``scratch``, and from there each row is stored in whole lines, wherever in a line it begins.
    ``aligned`` says that `has_whole_lines`: they are stored past the caches at once.
    """
    side = _SIDES[item_bytes]
    collects = stream and not aligned and side * item_bytes == CACHE_LINE_BYTES
    panel_rows = _PANEL_RUN_BYTES // item_bytes

    def build(builder: Any) -> None:
        from llvmlite import ir

        item = ir.IntType(8 * item_bytes)
        vector = vector_type(item, side)
        dst, src, n_rows, n_columns, dst_stride, src_stride, scratch = builder.function.args
        loop = functools.partial(for_range, builder)

        def dst_at(row: Any, column: Any) -> Any:
            return _at(builder, dst, row, dst_stride, column, item_bytes)

        def src_at(row: Any, column: Any) -> Any:
            return _at(builder, src, column, src_stride, row, item_bytes)

        def copy_items(row_start: Any, row_stop: Any, column_start: Any, column_stop: Any) -> None:
            with loop(row_stop, start=row_start) as row, loop(column_stop, start=column_start) as column:
                store(builder, load(builder, src_at(row, column), item), dst_at(row, column))

        def copy_tiles(rows_range: tuple[Any, Any], columns_range: tuple[Any, Any], target: Any) -> None:
            (row_start, row_stop), (column_start, column_stop) = rows_range, columns_range
            with loop(column_stop, side, start=column_start) as column, loop(row_stop, side, start=row_start) as row:
                columns = [builder.add(column, integer(k)) for k in range(side)]
                tile = transposed(builder, [load(builder, src_at(row, each), vector) for each in columns])
                for k, line in enumerate(tile):
                    store(builder, line, target(builder.add(row, integer(k)), column), stream=stream and aligned)

        whole_rows = builder.and_(n_rows, integer(-side))
        whole_columns = builder.and_(n_columns, integer(-side))
        group = _LineGroup(builder, scratch, whole_columns, item_bytes, dst_at) if collects else None
        with loop(whole_rows, panel_rows) as panel:
            panel_stop = minimum(builder, builder.add(panel, integer(panel_rows)), whole_rows)
            if group is None:
                copy_tiles((panel, panel_stop), (integer(0), whole_columns), dst_at)
            else:
                with loop(whole_columns, _GROUP_LINES * side) as start:
                    stop = minimum(builder, builder.add(start, integer(_GROUP_LINES * side)), whole_columns)
                    copy_tiles((panel, panel_stop), (start, stop), group.place(panel, start))
                    with loop(panel_stop, start=panel) as row:
                        group.flush(panel, row, start, stop)
            copy_items(panel, panel_stop, whole_columns, n_columns)
        copy_items(whole_rows, n_rows, integer(0), n_columns)
        _return(builder)

    return compile_kernel(f"transpose_{item_bytes}_{stream:d}_{aligned:d}", 7, build)


class _LineGroup:
    """A few lines of each row of a panel, collected in the cache, and before them the line that came last.

    Rows may begin anywhere in a line: a line of the output is covered by two that are neighbours here. The ends
    of a row, where the output's line belongs to another row too, are stored plainly.
    """

    def __init__(self, builder: Any, scratch: Any, n_columns: Any, item_bytes: int, dst_at: Callable[..., Any]) -> None:
        from llvmlite import ir

        self._builder, self._scratch, self._n_columns = builder, scratch, n_columns
        self._item_bytes, self._dst_at = item_bytes, dst_at
        self._line = vector_type(ir.IntType(8), CACHE_LINE_BYTES)

    def place(self, panel: Any, start: Any) -> Callable[[Any, Any], Any]:
        """Return where items of the group that begins at a column go until they are flushed."""
        builder = self._builder

        def at(row: Any, column: Any) -> Any:
            offset = builder.mul(builder.sub(column, start), integer(self._item_bytes))
            return builder.add(self._row(builder.sub(row, panel)), builder.add(offset, integer(CACHE_LINE_BYTES)))

        return at

    def flush(self, panel: Any, row: Any, start: Any, stop: Any) -> None:
        """Store what a row has collected, each line once: a second store to a line on its way would wait for it."""
        builder = self._builder
        line_bytes = integer(CACHE_LINE_BYTES)
        lines = self._row(builder.sub(row, panel))
        collected = builder.add(lines, line_bytes)
        address = self._dst_at(row, start)
        offset = builder.and_(address, integer(CACHE_LINE_BYTES - 1))
        size = builder.mul(builder.sub(stop, start), integer(self._item_bytes))
        begins_inside = builder.icmp_signed("!=", offset, integer(0))
        has_head = builder.and_(begins_inside, builder.icmp_signed("==", start, integer(0)))
        with builder.if_then(has_head):
            memcpy(builder, address, collected, builder.sub(line_bytes, offset))
        first = builder.select(has_head, line_bytes, integer(0))
        with for_range(builder, size, CACHE_LINE_BYTES, start=first) as done:
            covering = builder.add(builder.sub(collected, offset), done)
            self._copy_line(covering, builder.add(builder.sub(address, offset), done), stream=True)
        has_tail = builder.and_(begins_inside, builder.icmp_signed("==", stop, self._n_columns))
        with builder.if_then(has_tail):
            end = builder.sub(size, offset)
            memcpy(builder, builder.add(address, end), builder.add(collected, end), offset)
        self._copy_line(builder.add(lines, size), lines)

    def _row(self, row: Any) -> Any:
        return self._builder.add(self._scratch, self._builder.mul(row, integer((_GROUP_LINES + 1) * CACHE_LINE_BYTES)))

    def _copy_line(self, start: Any, to: Any, *, stream: bool = False) -> None:
        store(self._builder, load(self._builder, start, self._line), to, stream=stream)


@kept
def deinterleave(item_bytes: int, channels: int) -> Kernel | None:
    """Return ``copy(dst, src, n, dst_stride)``: dst[c, j] = src[j, c] for few channels c, src contiguous."""

    def copy_vectors(builder: Any, planes: list[Any], packed: list[Any], kind: Any) -> None:
        loaded = [load(builder, address, kind) for address in packed]
        for channel, address in enumerate(planes):
            positions = [lane * channels + channel for lane in range(kind.count)]
            store(builder, gather(builder, loaded, [divmod(p, kind.count) for p in positions]), address)

    def copy_item(builder: Any, plane: Any, packed: Any, item: Any) -> None:
        store(builder, load(builder, packed, item), plane)

    return _channel_kernel("deinterleave", item_bytes, channels, copy_vectors, copy_item, planes_first=True)


@kept
def interleave(item_bytes: int, channels: int) -> Kernel | None:
    """Return ``copy(dst, src, n, src_stride)``: dst[j, c] = src[c, j] for few channels c, dst contiguous."""

    def copy_vectors(builder: Any, planes: list[Any], packed: list[Any], kind: Any) -> None:
        loaded = [load(builder, address, kind) for address in planes]
        for k, address in enumerate(packed):
            positions = [divmod(k * kind.count + lane, channels) for lane in range(kind.count)]
            lanes = [(channel, position) for position, channel in positions]
            store(builder, gather(builder, loaded, lanes), address)

    def copy_item(builder: Any, plane: Any, packed: Any, item: Any) -> None:
        store(builder, load(builder, plane, item), packed)

    return _channel_kernel("interleave", item_bytes, channels, copy_vectors, copy_item, planes_first=False)


def _channel_kernel(
    name: str,
    item_bytes: int,
    channels: int,
    copy_vectors: Callable[[Any, list[Any], list[Any], Any], None],
    copy_item: Callable[[Any, Any, Any, Any], None],
    *,
    planes_first: bool,
) -> Kernel | None:
    """Compile the loop that (de)interleave share: planes on one side, packed items on the other."""
    n_lanes = CACHE_LINE_BYTES // item_bytes

    def build(builder: Any) -> None:
        from llvmlite import ir

        item = ir.IntType(8 * item_bytes)
        dst, src, n, plane_stride = builder.function.args
        planes, packed = (dst, src) if planes_first else (src, dst)

        def plane_at(channel: int, position: Any) -> Any:
            return _at(builder, planes, integer(channel), plane_stride, position, item_bytes)

        def packed_at(position: Any, k: int, width: int) -> Any:
            start = builder.mul(position, integer(channels * item_bytes))
            return builder.add(packed, builder.add(start, integer(k * width)))

        whole = builder.and_(n, integer(-n_lanes))
        with for_range(builder, whole, n_lanes) as position:
            plane_addresses = [plane_at(channel, position) for channel in range(channels)]
            packed_addresses = [packed_at(position, k, CACHE_LINE_BYTES) for k in range(channels)]
            copy_vectors(builder, plane_addresses, packed_addresses, vector_type(item, n_lanes))
        with for_range(builder, n, start=whole) as position:
            for channel in range(channels):
                copy_item(builder, plane_at(channel, position), packed_at(position, channel, item_bytes), item)
        _return(builder)

    return compile_kernel(f"{name}_{item_bytes}_{channels}", 4, build)


def _at(builder: Any, base: Any, row: Any, stride: Any, column: Any, item_bytes: int) -> Any:
    return builder.add(base, builder.add(builder.mul(row, stride), builder.mul(column, integer(item_bytes))))


def _return(builder: Any) -> None:
    fence(builder)
    builder.ret(integer(0))
