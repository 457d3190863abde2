"""stack against NumPy's: any dtype, layout and axis, on the engine and below its threshold."""

import numpy as np
import pytest
from arrays import (
    BYTE_DTYPES,
    DTYPES,
    assert_same_bits,
    budgets,
    filled,
    frozen,
    laid_out,
    layouts,
    on_every_engine,
    running,
    seeds,
    shapes,
)
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops


@st.composite
def stacks(draw, dtypes=DTYPES):
    """Read-only arrays of one shape and dtype, and an axis of the result."""
    shape, dtype = draw(shapes(min_dims=0, max_dims=3)), draw(st.sampled_from(dtypes))
    arrays = [
        frozen(laid_out(filled(shape, dtype, draw(seeds)), draw(layouts))) for _ in range(draw(st.integers(1, 5)))
    ]
    return arrays, draw(st.integers(-len(shape) - 1, len(shape)))


@on_every_engine
@given(stacking=stacks(), budget=budgets)
def test_any_arrays_are_stacked_as_numpy_does(engine, stacking, budget):
    """Values, dtype and shape are NumPy's, for every dtype, axis and layout, 0-d arrays too."""
    arrays, axis = stacking
    expected = np.stack(arrays, axis)
    with running(engine, budget):
        assert_same_bits(ops.stack(arrays, axis), expected)


@on_every_engine
@given(stacking=stacks(BYTE_DTYPES), budget=budgets)
def test_a_result_is_a_writable_c_ordered_copy(engine, stacking, budget):
    """The result is C-contiguous and writable and owns its memory alone, for one array too."""
    arrays, axis = stacking
    with running(engine, budget):
        result = ops.stack(arrays, axis)
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert not any(np.may_share_memory(result, array) for array in arrays)


@pytest.mark.parametrize("code", ["u1", "u2", "f4", "f8", "D"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (1, 0, 2), (2, 1, 0)])
def test_images_are_turned_on_the_way(code, channels, order):
    """Views of images with any number of channels are copied straight into their places."""
    images = [filled((37, 71, channels), np.dtype(code), k).transpose(order) for k in range(3)]
    for engine in ("tiny pieces", "tiny pieces streamed"):
        with running(engine, 3):
            assert_same_bits(ops.stack(images), np.stack(images).copy(order="C"))


@pytest.mark.parametrize("to", ["HWC to CHW", "CHW to HWC"])
@pytest.mark.parametrize("axis", [0, -1])
def test_large_images_are_right_as_shipped(to, axis):
    """Tens of megabytes of images, in either direction."""
    first_last = to == "HWC to CHW"
    images = [
        filled((480, 641, 3), np.dtype("u1"), k).transpose(2, 0, 1)
        if first_last
        else filled((3, 480, 641), np.dtype("u1"), k).transpose(1, 2, 0)
        for k in range(12)
    ]
    assert_same_bits(ops.stack(images, axis), np.stack(images, axis).copy(order="C"))


@pytest.mark.parametrize(("n_bytes", "alignment"), [(4096, 64), (70_000, 64), (1 << 20, 4096), (5 << 20, 4096)])
def test_results_are_aligned(n_bytes, alignment):
    """To 64 bytes from 4 KiB upward, to a page from 1 MiB."""
    results = [ops.stack([np.zeros(n_bytes // 2, np.uint8)] * 2) for _ in range(4)]
    assert [result.ctypes.data % alignment for result in results] == [0] * 4


@pytest.mark.parametrize("form", [iter, lambda arrays: (array for array in arrays), np.asarray, tuple])
def test_any_iterable_is_accepted(form):
    """Arrays may come from a generator, or be the rows of a larger array."""
    arrays = [np.arange(6).reshape(2, 3) + k for k in range(4)]
    assert_same_bits(ops.stack(form(arrays), 1), np.stack(arrays, 1))


def test_scalars_are_stacked():
    """Python's and NumPy's scalars become a 1-d array."""
    assert_same_bits(ops.stack([1.5, np.float64(2)]), np.stack([1.5, np.float64(2)]))


def test_nested_lists_are_stacked():
    """Sequences are made arrays of first."""
    lists = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert_same_bits(ops.stack(lists, -1), np.stack(lists, -1))


@pytest.mark.parametrize("casting", ["same_kind", "unsafe", "safe"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "bfloat16", "i4", "f8", "S4"])
@on_every_engine
def test_a_dtype_is_cast_to(engine, dtype, casting):
    """dtype= and casting= are those of NumPy's stack."""
    arrays = [np.arange(12, dtype="f4").reshape(3, 4), np.ones((3, 4), "f8")]
    try:
        expected = np.stack(arrays, 1, dtype=dtype, casting=casting)
    except TypeError:
        with pytest.raises(TypeError, match=rf"cannot cast from float\d\d to .* under casting='{casting}'; convert"):
            ops.stack(arrays, 1, dtype=dtype, casting=casting)
        return
    with running(engine):
        assert_same_bits(ops.stack(arrays, 1, dtype=dtype, casting=casting), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("order", ["C", "F"])
@on_every_engine
def test_out_is_filled_and_returned(engine, axis, order):
    """out= of either order gets the result and is what is returned."""
    arrays = [filled((34, 5), np.dtype("f4"), k) for k in range(3)]
    expected = np.stack(arrays, axis)
    out = np.empty(expected.shape, "f4", order)
    with running(engine):
        assert ops.stack(arrays, axis, out=out) is out
    assert_same_bits(out, expected)


def test_different_dtypes_need_a_dtype():
    """No accidental promotion, here as in concatenate."""
    with pytest.raises(ops.DTypeMismatchError, match=r"arrays to stack must have one dtype, got float64 .* dtype="):
        ops.stack([np.zeros(2), np.zeros(2, "f4")])


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    with pytest.raises(ops.UnsupportedArrayError, match=r"stack takes plain arrays, got numpy\.ma\.MaskedArray"):
        ops.stack([np.ma.array([1.0])])


@pytest.mark.parametrize("shapes", [[(2, 3), (2, 1)], [(2,), (1,)], [(2,), (2, 1)], [(), (1,)], [(0,), (1,)]], ids=str)
def test_shapes_must_be_equal(shapes):
    """Nothing is broadcast; the message has both shapes and what to do."""
    with pytest.raises(
        ops.ShapeMismatchError, match=r"must have the same shape, got .* for array 0 and .* for array 1; pad"
    ):
        ops.stack([np.ones(shape) for shape in shapes])


def test_no_arrays_are_refused():
    """There is no shape for a result of nothing."""
    with pytest.raises(ValueError, match="stack needs at least one array, got none; pass"):
        ops.stack([])


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 3), ((2, 3), -4), ((), 1), ((), -2), ((2,), 2**40)], ids=str)
def test_an_axis_out_of_range_is_an_axis_error(shape, axis):
    """The range is that of the result, which has one dimension more."""
    n = len(shape) + 1
    with pytest.raises(np.exceptions.AxisError, match=rf"in \[-{n}, {n - 1}\] for stack of {n}-d arrays, got {axis}"):
        ops.stack([np.ones(shape)] * 2, axis)


@pytest.mark.parametrize("axis", [1.0, "0", [0]])
def test_an_axis_is_an_integer(axis):
    """What is none is a TypeError that shows it."""
    with pytest.raises(TypeError, match=r"`axis` must be an integer.*, got"):
        ops.stack([np.ones(2)], axis)


def test_no_axis_is_not_offered():
    """None is a TypeError, as for NumPy, and the message does not call it allowed."""
    with pytest.raises(TypeError, match=r"`axis` must be an integer in .*, got None"):
        ops.stack([np.ones(2)], None)


def test_rows_that_are_matrices_are_stacked_to_a_matrix():
    """np.matrix keeps its two dimensions, where NumPy's own stack of them can write beyond its memory."""
    rows = [filled((1, 3), np.dtype("i4"), k).view(np.matrix) for k in range(2)]
    assert_same_bits(ops.stack(rows), np.concatenate(rows))


def test_a_chunk_size_is_taken():
    """min_chunk_size_mb= changes nothing but how the work is cut."""
    arrays = [filled((1001, 999), np.dtype("f8"), k) for k in range(2)]
    assert_same_bits(ops.stack(arrays, 1, min_chunk_size_mb=3), np.stack(arrays, 1))


def test_an_accelerator_that_is_not_there_is_an_error():
    """A named device is never replaced in silence."""
    with pytest.raises(ops.BackendUnavailableError, match="pass accelerator=None"):
        ops.stack([np.ones(2)], accelerator="cuda:0")
