"""Each kernel against NumPy on its own: odd sizes, alignments and strides, and guard bytes around the output."""

import ml_dtypes
import numpy as np
import pytest
from arrays import assert_same_bits, filled
from hypothesis import given
from hypothesis import strategies as st

from accel_ops.cpu import cast_kernels, copy_kernels

GUARD = 0xA5
GUARD_BYTES = 192
ITEM_BYTES = sorted(copy_kernels.TRANSPOSED_ITEM_BYTES)
streams = st.booleans()
offsets = st.integers(0, 70)


class Guarded:
    """Bytes for an output that begin ``offset`` after a cache line, with guards before and after them."""

    def __init__(self, n_bytes, offset=0):
        self._memory = np.full(n_bytes + 2 * GUARD_BYTES + offset + 64, GUARD, np.uint8)
        self._start = GUARD_BYTES + offset + -(self._memory.ctypes.data + GUARD_BYTES) % 64
        self.bytes = self._memory[self._start : self._start + n_bytes]
        self.address = self.bytes.ctypes.data

    def assert_intact(self):
        assert (self._memory[: self._start] == GUARD).all(), "bytes before the output were written"
        assert (self._memory[self._start + len(self.bytes) :] == GUARD).all(), "bytes after the output were written"


def random_bytes(n, seed=0):
    return np.frombuffer(bytearray(np.random.default_rng(seed).bytes(n)), np.uint8)


def placed(x, offset):
    """A copy of an array whose first byte lies ``offset`` after a cache line."""
    guarded = Guarded(x.nbytes, offset)
    guarded.bytes[...] = np.frombuffer(x.tobytes(), np.uint8)
    return guarded


def test_the_guards_notice_a_byte_too_many():
    """What the other tests rely on."""
    guarded = Guarded(10, 3)
    guarded.assert_intact()
    outside = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 12).from_address(guarded.address - 1))
    outside[11] = 0
    with pytest.raises(AssertionError, match="after"):
        guarded.assert_intact()
    outside[0] = 0
    with pytest.raises(AssertionError, match="before"):
        guarded.assert_intact()


# --- rows and segments


@given(
    n_rows=st.integers(0, 5),
    row_bytes=st.integers(0, 700),
    gaps=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    backwards=st.tuples(st.booleans(), st.booleans()),
    offsets=st.tuples(offsets, offsets),
    stream=streams,
)
def test_rows_are_copied(n_rows, row_bytes, gaps, backwards, offsets, stream):
    """Rows of any length, at any address, with any strides, negative ones too; what is between them stays."""
    dst_stride, src_stride = row_bytes + gaps[0], row_bytes + gaps[1]
    src = placed(random_bytes(max(1, n_rows * src_stride)), offsets[1])
    out = Guarded(max(1, n_rows * dst_stride), offsets[0])
    expected = out.bytes.copy()
    to, start, signs = out.address, src.address, [1, 1]
    for row in range(n_rows):
        to_row, from_row = (n_rows - 1 - row if b else row for b in backwards)
        source = src.bytes[from_row * src_stride : from_row * src_stride + row_bytes]
        expected[to_row * dst_stride : to_row * dst_stride + row_bytes] = source
    if n_rows:
        to += backwards[0] * (n_rows - 1) * dst_stride
        start += backwards[1] * (n_rows - 1) * src_stride
        signs = [-1 if b else 1 for b in backwards]
    copy_kernels.rows(stream=stream)(to, start, n_rows, row_bytes, signs[0] * dst_stride, signs[1] * src_stride)
    assert_same_bits(out.bytes, expected)
    out.assert_intact()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 255, 256, 257, 319, 320, 511, 512, 1024, 4096, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 32, 63])
def test_one_row_of_any_length_is_copied(n, offset, stream):
    """At and around the lengths where the loops change."""
    src, out = placed(random_bytes(max(n, 1)), 5), Guarded(max(n, 1), offset)
    copy_kernels.rows(stream=stream)(out.address, src.address, 1, n, 0, 0)
    assert_same_bits(out.bytes[:n], src.bytes[:n])
    assert (out.bytes[n:] == GUARD).all()
    out.assert_intact()


def test_one_source_row_fills_many():
    """A stride of 0 reads the same row again."""
    src, out = placed(random_bytes(300), 0), Guarded(5 * 300, 7)
    copy_kernels.rows(stream=True)(out.address, src.address, 5, 300, 300, 0)
    assert_same_bits(out.bytes.reshape(5, 300), np.tile(src.bytes, (5, 1)))
    out.assert_intact()


@given(
    sizes=st.lists(st.integers(0, 900), max_size=6),
    gaps=st.lists(st.integers(0, 70), min_size=6, max_size=6),
    stream=streams,
)
def test_segments_are_copied(sizes, gaps, stream):
    """Runs of any size, each from an address of its own to one of its own."""
    sources = [
        placed(random_bytes(max(size, 1), k), gap) for k, (size, gap) in enumerate(zip(sizes, gaps, strict=False))
    ]
    out = Guarded(max(1, sum(sizes) + sum(gaps)), gaps[0])
    expected = out.bytes.copy()
    table, position = np.zeros((3, max(1, len(sizes))), np.int64), 0
    for k, (size, gap) in enumerate(zip(sizes, gaps, strict=False)):
        table[:, k] = out.address + position, sources[k].address, size
        expected[position : position + size] = sources[k].bytes[:size]
        position += size + gap
    copy_kernels.segments(stream=stream)(*(row.ctypes.data for row in table), len(sizes))
    assert_same_bits(out.bytes, expected)
    out.assert_intact()


@pytest.mark.parametrize("stream", [False, True])
def test_tens_of_megabytes_are_copied_in_one_row(stream):
    """Offsets beyond 32 bits of lines, in one call."""
    src, out = random_bytes(24_000_001), Guarded(24_000_001, 9)
    copy_kernels.rows(stream=stream)(out.address, src.ctypes.data, 1, src.nbytes, 0, 0)
    assert_same_bits(out.bytes, src)
    out.assert_intact()


# --- transposition

SIDES = [0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 65]


def check_transpose(item_bytes, n_rows, n_columns, gaps=(0, 0), offsets=(0, 0), backwards=(False, False), *, stream):
    dst_stride, src_stride = (n_columns + gaps[0]) * item_bytes, (n_rows + gaps[1]) * item_bytes
    src = placed(random_bytes(max(1, n_columns * src_stride)), offsets[1])
    out = Guarded(max(1, n_rows * dst_stride), offsets[0])
    expected = out.bytes.copy()
    source = src.bytes[: n_columns * src_stride].reshape(n_columns, n_rows + gaps[1], item_bytes)[:, :n_rows]
    source = source[::-1] if backwards[1] else source
    place = expected[: n_rows * dst_stride].reshape(n_rows, n_columns + gaps[0], item_bytes)[:, :n_columns]
    place = place[::-1] if backwards[0] else place
    place[...] = source.transpose(1, 0, 2)
    to = out.address + backwards[0] * (n_rows - 1) * dst_stride
    start = src.address + backwards[1] * (n_columns - 1) * src_stride
    strides = [-stride if b else stride for stride, b in zip((dst_stride, src_stride), backwards, strict=True)]
    scratch = np.empty(copy_kernels.SCRATCH_BYTES, np.uint8)
    copy_kernels.transpose(item_bytes, stream=stream)(to, start, n_rows, n_columns, *strides, scratch.ctypes.data)
    assert_same_bits(out.bytes, expected)
    out.assert_intact()


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("n_rows", SIDES)
@pytest.mark.parametrize("stream", [False, True])
def test_tiles_and_what_remains_are_transposed(item_bytes, n_rows, stream):
    """Numbers of rows and columns at and around the side of a tile."""
    for n_columns in SIDES:
        check_transpose(item_bytes, n_rows, n_columns, stream=stream)


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more_rows", [-1, 0, 1, 40])
@pytest.mark.parametrize("more_columns", [-1, 0, 1, 40])
def test_panels_and_groups_of_lines_are_transposed(item_bytes, stream, more_rows, more_columns):
    """Numbers of rows and columns at and around those that the kernel takes at once, wherever rows begin."""
    n_rows, n_columns = 2048 // item_bytes + more_rows, 512 // item_bytes + more_columns
    for gap, offset in ((0, 0), (5, 0), (0, 1), (64 // item_bytes - n_columns % (64 // item_bytes), 24)):
        check_transpose(item_bytes, n_rows, n_columns, (gap, 0), (offset, 3), stream=stream)


@given(
    item_bytes=st.sampled_from(ITEM_BYTES),
    sides=st.tuples(st.integers(1, 70), st.integers(1, 70) | st.integers(100, 300)),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    offsets=st.tuples(offsets, offsets),
    backwards=st.tuples(st.booleans(), st.booleans()),
    stream=streams,
)
def test_any_strides_are_transposed(item_bytes, sides, gaps, offsets, backwards, stream):
    """Rows with gaps between them, backwards, at addresses that no item is aligned to."""
    check_transpose(item_bytes, *sides, gaps, offsets, backwards, stream=stream)


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("stream", [False, True])
def test_tens_of_megabytes_are_transposed(item_bytes, stream):
    """Large and not divisible by anything."""
    n_rows = 3001
    check_transpose(item_bytes, n_rows, 16_000_000 // n_rows // item_bytes, (3, 5), (1, 2), stream=stream)


# --- channels


def check_channels(kernel_name, item_bytes, channels, n, gap=0, offsets=(0, 0), *, backwards=False):
    plane_stride = (n + gap) * item_bytes
    shape, stored = (channels, n, item_bytes), (channels, n + gap, item_bytes)
    items = random_bytes(channels * n * item_bytes)
    if kernel_name == "deinterleave":
        packed = placed(items, offsets[1])
        out = Guarded(max(1, channels * plane_stride), offsets[0])
        expected = out.bytes.copy()
        planes = expected[: channels * plane_stride].reshape(stored)[:, :n]
        planes = planes[::-1] if backwards else planes
        planes[...] = items.reshape(n, channels, item_bytes).transpose(1, 0, 2)
        to, start = out.address + backwards * (channels - 1) * plane_stride, packed.address
    else:
        whole = random_bytes(max(1, channels * plane_stride), 1)
        planes = whole[: channels * plane_stride].reshape(stored)[:, :n]
        planes = planes[::-1] if backwards else planes
        planes[...] = items.reshape(shape)
        source = placed(whole, offsets[1])
        out = Guarded(max(1, items.nbytes), offsets[0])
        expected = out.bytes.copy()
        expected[: items.nbytes] = items.reshape(shape).transpose(1, 0, 2).ravel()
        to, start = out.address, source.address + backwards * (channels - 1) * plane_stride
    kernel = getattr(copy_kernels, kernel_name)(item_bytes, channels)
    kernel(to, start, n, -plane_stride if backwards else plane_stride)
    assert_same_bits(out.bytes, expected)
    out.assert_intact()


CHANNELS = range(2, copy_kernels.MAX_CHANNELS + 1)


@pytest.mark.parametrize("kernel", ["interleave", "deinterleave"])
@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_channels_of_any_length_are_sorted(kernel, item_bytes, channels):
    """Lengths at and around a whole cache line of each plane, none at all included."""
    for n in (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 130, 200):
        check_channels(kernel, item_bytes, channels, n)


@given(
    kernel=st.sampled_from(["interleave", "deinterleave"]),
    item_bytes=st.sampled_from(ITEM_BYTES),
    channels=st.sampled_from(CHANNELS),
    n=st.integers(0, 200),
    gap=st.integers(0, 9),
    offsets=st.tuples(offsets, offsets),
    backwards=st.booleans(),
)
def test_channels_of_any_stride_are_sorted(kernel, item_bytes, channels, n, gap, offsets, backwards):
    """Planes with gaps between them, backwards, at any address."""
    check_channels(kernel, item_bytes, channels, n, gap, offsets, backwards=backwards)


@pytest.mark.parametrize("kernel", ["interleave", "deinterleave"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_tens_of_megabytes_of_channels_are_sorted(kernel, channels):
    """One large image in one call."""
    check_channels(kernel, 2, channels, 5_000_003, 7, (2, 6))


# --- casts

F4, F2, BF16 = np.dtype("f4"), np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)


def has_kernel(to):
    return cast_kernels.cast_kernel(F4, to, stream=False) is not None


def check_cast(x, to, offset=0, *, stream=False):
    kernel = cast_kernels.cast_kernel(F4, to, stream=stream)
    if kernel is None:  # NumPy does it then
        assert to == F2
        return 0
    src, out = placed(x, 1), Guarded(max(1, 2 * len(x)), offset)
    flags = kernel(out.address, src.address, len(x))
    out.assert_intact()
    with np.errstate(all="ignore"):
        expected, actual = x.astype(to), out.bytes[: 2 * len(x)].view(to)
    is_nan = np.isnan(expected.astype(F4))
    assert np.isnan(actual[is_nan].astype(F4)).all()
    assert_same_bits(actual[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16))
    return flags


@pytest.mark.parametrize("to", [F2, BF16], ids=str)
@pytest.mark.parametrize("stream", [False, True])
@given(n=st.integers(0, 200), offset=st.integers(0, 35), seed=st.integers(0, 1000))
def test_any_bits_are_cast(to, stream, n, offset, seed):
    """Any float32 at all, in any number, at any address that suits an item."""
    check_cast(filled((n,), F4, seed), to, 2 * offset, stream=stream)


@pytest.mark.parametrize("to", [F2, BF16], ids=str)
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
def test_every_upper_half_of_a_float_is_cast(to, low):
    """All 65,536 signs, exponents and upper fractions, with lower halves on, under and over the ties."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | low
    check_cast(bits.view(F4), to)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (1.0, 0),
        (0.0, 0),
        (65504.0, 0),
        (65519.996, 0),
        (65520.0, cast_kernels.OVERFLOW),
        (-65520.0, cast_kernels.OVERFLOW),
        (3e38, cast_kernels.OVERFLOW),
        (np.inf, 0),
        (np.nan, 0),
        (2.0**-14, 0),
        (2.0**-24, 0),
        (2.0**-24 * 1.5, cast_kernels.UNDERFLOW),
        (2.0**-26, cast_kernels.UNDERFLOW),
        (1e-40, cast_kernels.UNDERFLOW),
    ],
)
@pytest.mark.parametrize("n", [1, 31, 32, 100])
@pytest.mark.parametrize("last", [False, True])
def test_a_cast_to_float16_tells_what_it_saw(value, flags, n, last):
    """One value among exact ones, in the vectors and in what remains."""
    x = np.ones(n, F4)
    x[-1 if last else 0] = value
    seen = check_cast(x, F2)
    assert seen == (flags if has_kernel(F2) else 0)


def test_a_cast_to_bfloat16_reports_nothing():
    """ml_dtypes reports no overflow either."""
    assert check_cast(np.array([3.4e38, 1e-45, np.inf, np.nan] * 20, F4), BF16) == 0


@pytest.mark.parametrize("to", [F2, BF16], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_tens_of_megabytes_are_cast(to, stream):
    """A large array in one call."""
    check_cast(filled((6_000_011,), F4, 5), to, 6, stream=stream)


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("f8", "f2"),
        (">f4", "f2"),
        ("f4", ">f2"),
        ("f4", "f4"),
        ("f4", "i2"),
        ("f2", "f4"),
        ("f8", "bfloat16"),
        ("u4", "f2"),
    ],
)
def test_other_casts_have_no_kernel(source, to):
    """They are NumPy's."""
    assert cast_kernels.cast_kernel(np.dtype(source), np.dtype(to), stream=False) is None


def test_swapped_bfloat16_has_no_kernel():
    """A name says nothing about byte order."""
    assert cast_kernels.cast_kernel(F4, BF16.newbyteorder(), stream=False) is None


@pytest.mark.parametrize("item_bytes", [2, 4, 8, 16])
@pytest.mark.parametrize("rows", [1, 33, 700])
def test_whole_lines_are_stored_at_once(item_bytes, rows):
    """Where rows are whole lines of the output, tiles go past the caches without a detour, and nothing else changes."""
    side = 64 // item_bytes
    assert copy_kernels.has_whole_lines(item_bytes, 64)
    assert not copy_kernels.has_whole_lines(item_bytes, 32)
    columns = 5 * side
    source = np.arange(columns * rows * item_bytes, dtype=np.uint8).reshape(columns, rows, item_bytes)
    memory = np.full(rows * 6 * 64 + 64, 170, np.uint8)
    start = -memory.ctypes.data % 64
    kernel = copy_kernels.transpose(item_bytes, stream=True, aligned=True)
    address = memory.ctypes.data + start
    kernel(address, source.ctypes.data, rows, columns - 3, 6 * 64, rows * item_bytes, 0)
    lines = memory[start : start + rows * 384].reshape(rows, 384)
    written = (columns - 3) * item_bytes
    assert lines[:, :written].tobytes() == source[: columns - 3].transpose(1, 0, 2).tobytes()
    assert (lines[:, written:] == 170).all()
    assert (memory[:start] == 170).all()
