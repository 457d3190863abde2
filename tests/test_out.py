"""out=: any layout, over its own inputs, honoured or refused."""

import math

import numpy as np
import pytest
from arrays import (
    BYTE_DTYPES,
    WRITABLE_LAYOUTS,
    assert_same_bits,
    budgets,
    filled,
    frozen,
    joins,
    laid_out,
    on_every_engine,
    running,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops.cpu import pool

# NumPy writes the padding of records or not as it likes.
_NAMED = [
    dtype
    for dtype in BYTE_DTYPES
    if dtype.names is None or dtype.itemsize == sum(dtype[n].itemsize for n in dtype.names)
]


@on_every_engine
@given(join=joins(), layout=st.sampled_from(WRITABLE_LAYOUTS), budget=budgets)
def test_out_of_any_layout_is_filled_and_returned(engine, join, layout, budget):
    """What is returned is out itself, with NumPy's values and nothing around them touched."""
    arrays, axis = join
    expected = np.concatenate(arrays, axis)
    start = np.zeros(expected.shape, arrays[0].dtype)
    out = laid_out(start, layout)
    with running(engine, budget):
        assert ops.concatenate(arrays, axis, out=out) is out
    assert_same_bits(out, np.concatenate(arrays, axis, out=np.zeros_like(start)))


@on_every_engine
@given(data=st.data(), budget=budgets)
def test_out_of_another_dtype_is_cast_to(engine, data, budget):
    """The dtype of out decides, under the rule of casting=."""
    arrays, axis = data.draw(joins([np.dtype(code) for code in ("f4", "f8", "i2")]))
    dtype = data.draw(st.sampled_from(["f2", ">f4", "f8", "i4", "F", "bfloat16"]))
    shape = np.concatenate(arrays, axis).shape
    expected, out = (
        np.zeros(shape, dtype),
        laid_out(np.zeros(shape, dtype), data.draw(st.sampled_from(WRITABLE_LAYOUTS))),
    )
    # Numbers that every dtype holds: what a cast makes of the others is the matter of test_casting.
    values = [(np.arange(array.size).reshape(array.shape) % 100).astype(array.dtype) for array in arrays]
    try:
        np.concatenate(values, axis, out=expected)
    except TypeError:
        with running(engine, budget), pytest.raises(TypeError, match="cannot cast from"):
            ops.concatenate(values, axis, out=out)
        return
    with running(engine, budget):
        ops.concatenate(values, axis, out=out)
    assert_same_bits(out, expected)


@st.composite
def overlaps(draw):
    """A seed, a dtype and slices: of one buffer, for out and for the inputs that it may overlap."""
    n_buffer = draw(st.integers(2, 90))

    def part(length):
        step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
        longest = (length - 1) * abs(step) + 1
        if longest > n_buffer:
            step, longest = 1, length
        first = draw(st.integers(0, n_buffer - longest))
        positions = range(first, first + longest, abs(step))
        return positions if step > 0 else positions[::-1]

    lengths = draw(st.lists(st.integers(1, max(1, n_buffer // 2)), min_size=1, max_size=4))
    while sum(lengths) > n_buffer:
        lengths.pop()
    lengths = lengths or [1]
    return n_buffer, part(sum(lengths)), [part(length) for length in lengths]


def _part(buffer, positions):
    start, stop, step = positions.start, positions.stop, positions.step
    return buffer[start : stop if stop >= 0 else None : step]


@on_every_engine
@given(
    overlap=overlaps(),
    dtype=st.sampled_from([np.dtype(c) for c in ("i1", "f4", ">i4", "D", "S3", "O")]),
    seed=seeds,
    budget=budgets,
)
def test_out_over_its_inputs_gets_what_copies_would_give(engine, overlap, dtype, seed, budget):
    """The result is as if the inputs had been copied first, and nothing else in the buffer changes."""
    n_buffer, out_positions, input_positions = overlap
    buffer = filled((n_buffer,), dtype, seed)
    expected = buffer.copy()
    _part(expected, out_positions)[...] = np.concatenate([_part(buffer, each).copy() for each in input_positions])
    inputs = [frozen(_part(buffer, each)) for each in input_positions]
    with running(engine, budget):
        ops.concatenate(inputs, out=_part(buffer, out_positions))
    assert_same_bits(buffer, expected)


@pytest.mark.parametrize("n", [8, 1200, 600_000, 3_000_000])
@pytest.mark.parametrize("sixteenths", [1, 6, 8, 15])
def test_a_buffer_can_be_rotated_in_place(n, sixteenths):
    """Where NumPy gives garbage: the second part before the first, into the memory of both."""
    buffer = np.arange(n, dtype=np.float64)
    cut = max(1, n * sixteenths // 16)
    expected = np.r_[buffer[cut:], buffer[:cut]]
    assert ops.concatenate([buffer[cut:], buffer[:cut]], out=buffer) is buffer
    assert_same_bits(buffer, expected)


@pytest.mark.parametrize("shape", [(6, 6), (40, 40), (1100, 1100)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@on_every_engine
def test_a_matrix_can_be_transposed_in_place(engine, shape, axis):
    """Overlap of views with other strides is overlap all the same."""
    x = np.arange(shape[0] * shape[1], dtype=np.float64).reshape(shape)
    half = shape[0] // 2
    parts = [x.T[:half], x.T[half:]] if axis == 0 else [x.T[:, :half], x.T[:, half:]]
    expected = x.T.copy()
    with running(engine):
        ops.concatenate(parts, axis, out=x)
    assert_same_bits(x, expected)


@on_every_engine
def test_out_can_overlap_inputs_of_another_dtype(engine):
    """A cast into the memory that it reads from is right."""
    memory = np.zeros(4000, np.uint8)
    source = memory.view(np.float32)
    source[...] = np.arange(1000)
    out = memory[1000:3000].view(np.float16)
    with running(engine):
        ops.concatenate([source], out=out)
    assert out.tolist() == np.arange(1000, dtype=np.float16).tolist()


@on_every_engine
def test_stack_can_overlap_its_inputs(engine):
    """The same holds for stack."""
    x = np.arange(800.0).reshape(20, 40)
    expected = np.stack([x[1].copy(), x[0].copy()])
    with running(engine):
        ops.stack([x[1], x[0]], out=x[:2])
    assert_same_bits(x[:2], expected)


@pytest.mark.parametrize("kind", [np.matrix, np.recarray])
def test_out_may_be_a_subclass(kind):
    """It is returned as it is."""
    dtype = np.dtype([("a", "i4")]) if kind is np.recarray else np.dtype("f8")
    x = filled((2, 3), dtype)
    out = np.zeros((4, 3), dtype).view(kind)
    assert ops.concatenate([x, x], out=out) is out
    assert_same_bits(np.asarray(out).view(dtype), np.concatenate([x, x]))


def test_out_may_be_a_memmap(tmp_path):
    """Files are written in place."""
    out = np.memmap(tmp_path / "out", np.float64, "w+", shape=(6, 3))
    assert ops.concatenate([np.ones((2, 3)), np.zeros((4, 3))], out=out) is out
    out.flush()
    assert np.fromfile(tmp_path / "out").tolist() == [1.0] * 6 + [0.0] * 12


def test_a_masked_out_is_refused():
    """Its mask would say nothing about what was written."""
    with pytest.raises(ops.UnsupportedArrayError, match=r"plain arrays, got numpy\.ma\.MaskedArray"):
        ops.concatenate([np.ones(2)], out=np.ma.zeros(2))


@pytest.mark.parametrize("out", [[0] * 4, (np.zeros(4),), 5, "out"], ids=repr)
def test_out_is_an_array(out):
    """What is none is a TypeError that names its kind."""
    with pytest.raises(TypeError, match=rf"`out` must be an ndarray, got {type(out).__name__}; allocate"):
        ops.concatenate([np.ones(2)] * 2, out=out)


@pytest.mark.parametrize("shape", [(5,), (3,), (1, 4), (4, 1), (), (0,)], ids=str)
def test_out_has_the_shape_of_the_result(shape):
    """Nothing is broadcast, cut or reshaped; the message has both shapes."""
    with pytest.raises(ops.ShapeMismatchError, match=r"must have the shape of the result, \(4,\), got .*; allocate"):
        ops.concatenate([np.ones(2)] * 2, out=np.zeros(shape))


def test_a_flat_result_needs_a_flat_out():
    """axis=None gives one dimension, whatever the inputs have."""
    with pytest.raises(ValueError, match=r"shape of the result, \(8,\)"):
        ops.concatenate([np.ones((2, 2))] * 2, axis=None, out=np.zeros((4, 2)))


@on_every_engine
def test_a_read_only_out_is_refused(engine):
    """It is a ValueError, and keeps its values."""
    out = frozen(np.zeros(4))
    with running(engine), pytest.raises(ValueError, match=r"`out` must be writable .* read-only array; pass a copy"):
        ops.concatenate([np.ones(2)] * 2, out=out)
    assert out.tolist() == [0] * 4


def test_out_and_dtype_exclude_each_other():
    """out has a dtype already."""
    with pytest.raises(TypeError, match="takes `out` or `dtype`, not both, got dtype=<class 'float'>"):
        ops.concatenate([np.ones(2)] * 2, out=np.zeros(4), dtype=float)


def test_out_needs_an_allowed_cast():
    """same_kind unless casting= says otherwise, and out is untouched by the refusal."""
    out = np.full(4, 7)
    with pytest.raises(TypeError, match="cannot cast from float64 to int64 under casting='same_kind'"):
        ops.concatenate([np.ones(2)] * 2, out=out)
    assert out.tolist() == [7] * 4
    assert ops.concatenate([np.ones(2)] * 2, out=out, casting="unsafe").tolist() == [1] * 4


def test_out_does_not_excuse_different_dtypes():
    """Inputs of two dtypes are refused with out= too."""
    with pytest.raises(ops.DTypeMismatchError, match="must have one dtype"):
        ops.concatenate([np.ones(2), np.ones(2, "f4")], out=np.zeros(4))


@pytest.mark.parametrize("n", [3, 3_000_000])
def test_an_error_leaves_out_untouched(n):
    """Everything is checked before the first byte is written."""
    out = np.zeros((2, n))
    with pytest.raises(ops.ShapeMismatchError):
        ops.concatenate([np.ones((1, n)), np.ones((1, n + 1))], out=out)
    assert not out.any()


@pytest.mark.parametrize("layout", ["F", "every second row", "reversed"])
def test_large_outs_of_any_layout_are_right_as_shipped(layout):
    """Tens of megabytes into memory of the caller's shape."""
    arrays = [filled((1001, 1503), np.dtype("f8"), k) for k in range(2)]
    out = {
        "F": np.zeros((2002, 1503), order="F"),
        "every second row": np.zeros((4004, 1503))[::2],
        "reversed": np.zeros((2002, 1503))[::-1, ::-1],
    }[layout]
    with ops.threads(3):
        ops.concatenate(arrays, out=out)
    assert_same_bits(out, np.concatenate(arrays))


@on_every_engine
@given(join=joins(_NAMED), budget=budgets)
def test_bytes_around_out_are_untouched(engine, join, budget):
    """Guards before, after and between the rows of out keep their values."""
    arrays, axis = join
    expected = np.concatenate(arrays, axis)
    dtype = arrays[0].dtype
    whole = np.frombuffer(bytearray(b"\xa5" * dtype.itemsize * (int(np.prod([n + 2 for n in expected.shape])))), dtype)
    whole = whole.reshape([n + 2 for n in expected.shape])
    inside = (slice(1, -1),) * expected.ndim
    with running(engine, budget):
        ops.concatenate(arrays, axis, out=whole[inside])
    is_guard = np.ones(whole.shape, bool)
    is_guard[inside] = False
    assert set(whole[is_guard].tobytes()) <= {0xA5}
    assert_same_bits(whole[inside], np.concatenate(arrays, axis, out=np.zeros(expected.shape, dtype)))


@pytest.mark.parametrize("shape", [(3, 40), (3000, 3000)], ids=str)
@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (8, 8)], ids=str)
def test_an_out_that_overlaps_itself_is_written_in_numpys_order(shape, strides):
    """Which of the values meant for one place stays does not follow the threads."""
    array = np.arange(math.prod(shape), dtype="u1").reshape(shape)
    wide = [length * stride for length, stride in zip(shape, strides, strict=True)]
    ours, numpys = np.zeros(sum(wide) + 1, "u1"), np.zeros(sum(wide) + 1, "u1")
    with ops.threads(3):
        ops.concatenate([array], out=np.lib.stride_tricks.as_strided(ours, shape, strides))
    np.concatenate([array], out=np.lib.stride_tricks.as_strided(numpys, shape, strides))
    assert np.array_equal(ours, numpys)


def test_a_large_out_is_shared_by_threads_though_the_first_array_is_small(monkeypatch):
    """The decision looks at the output and not at the first array."""
    workers, run = [], pool.run

    def recording(*args, **options):
        workers.append(options["workers"])
        run(*args, **options)

    monkeypatch.setattr(pool, "run", recording)
    arrays = [np.ones(1000), np.ones(3_000_000), np.ones(3_000_000)]
    with ops.threads(2):
        ops.concatenate(arrays, out=np.empty(6_001_000))
    assert workers == [2]
