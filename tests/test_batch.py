"""batch: one array, a writable view of it for each input, and whether each has been filled."""

import copy
import pickle
import threading

import numpy as np
import pytest
from arrays import (
    BYTE_DTYPES,
    DTYPES,
    assert_same_bits,
    budgets,
    filled,
    frozen,
    joins,
    laid_out,
    layouts,
    on_every_engine,
    running,
    seeds,
    shapes,
)
from hypothesis import assume, given
from hypothesis import strategies as st

import accel_ops as ops


@on_every_engine
@given(join=joins(DTYPES), budget=budgets)
def test_a_filled_batch_is_the_join_of_its_values(engine, join, budget):
    """Any dtype, axis and layout: what was assigned slot by slot is what concatenate gives."""
    arrays, axis = join
    assume(axis is not None)
    dtype = arrays[0].dtype
    with running(engine, budget), ops.batch([array.shape for array in arrays], dtype, axis) as batch:
        for index, array in enumerate(arrays):
            batch[index] = array
    expected = np.concatenate(arrays, axis, out=np.zeros(batch.array.shape, dtype))
    assert_same_bits(batch.array, expected)


@given(data=st.data())
def test_slots_are_parts_of_the_whole(data):
    """Slots lie in the array one after the other along the axis, and cover it without overlap."""
    first = list(data.draw(shapes()))
    axis = data.draw(st.integers(-len(first), len(first) - 1))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    slot_shapes = []
    for length in lengths:
        first[axis] = length
        slot_shapes.append(tuple(first))
    batch = ops.batch(slot_shapes, np.int32, axis)
    assert [slot.shape for slot in batch.slots] == slot_shapes
    assert len(batch) == len(batch.slots) == len(lengths)
    assert batch.array.flags.c_contiguous
    assert all(slot.flags.writeable for slot in batch.slots)
    for index, slot in enumerate(batch.slots):
        slot[...] = index
    expected = [np.full(shape, index, np.int32) for index, shape in enumerate(slot_shapes)]
    assert_same_bits(batch.array, np.concatenate(expected, axis).copy(order="C"))


@on_every_engine
@given(shape=shapes(), dtype=st.sampled_from(BYTE_DTYPES), layout=layouts, seed=seeds, budget=budgets)
def test_bytes_of_other_slots_are_untouched(engine, shape, dtype, layout, seed, budget):
    """Assigning to a slot writes there and nowhere else."""
    batch = ops.batch([shape] * 3, dtype, -1)
    for slot in batch.slots:
        slot[...] = np.zeros((), dtype)
    value = frozen(laid_out(filled(shape, dtype, seed), layout))
    with running(engine, budget):
        batch[1] = value
    assert_same_bits(np.array(batch.slots[1]), np.concatenate([value], out=np.zeros(shape, dtype)))
    for other in (0, 2):
        assert_same_bits(np.array(batch.slots[other]), np.zeros(shape, dtype))


@pytest.mark.parametrize(("n_bytes", "alignment"), [(4096, 64), (70_001, 64), (1 << 20, 4096), (5 << 20, 4096)])
def test_the_whole_is_aligned(n_bytes, alignment):
    """To 64 bytes from 4 KiB upward, to a page from 1 MiB."""
    kept = [ops.batch([(n_bytes - 3,), (3,)], np.uint8) for _ in range(4)]
    assert [batch.array.ctypes.data % alignment for batch in kept] == [0] * 4


def test_a_batch_keeps_objects():
    """Object slots start empty and hold references like any array."""
    batch = ops.batch([(2,), (1,)], object)
    assert batch.array.tolist() == [None] * 3
    marker = object()
    batch.slots[1][0] = marker
    assert batch.array[2] is marker


@pytest.mark.parametrize(
    "given_shapes",
    [[(2,), (3,)], iter([[2], [3]]), ([np.int64(2)], np.array([3])), np.array([[2], [3]])],
    ids=str,
)
def test_shapes_may_be_anything_that_names_lengths(given_shapes):
    """Tuples, lists or arrays of integers, in any iterable."""
    assert [slot.shape for slot in ops.batch(given_shapes, "f4").slots] == [(2,), (3,)]


# --- filling


def test_a_batch_left_unfilled_is_an_error():
    """The message has how many of how many slots, which, and what to do."""
    with (
        pytest.raises(
            ops.UnfilledSlotError, match=r"2 of 3 are not: 0, 2; assign batch\[i\] = x, or call batch.filled"
        ),
        ops.batch([(2,), (2,), (2,)], "f4") as batch,
    ):
        batch[1] = np.zeros(2, "f4")
    assert issubclass(ops.UnfilledSlotError, RuntimeError)


def test_many_unfilled_slots_are_not_all_listed():
    """The message stays short."""
    with (
        pytest.raises(ops.UnfilledSlotError, match=r"400 of 400 are not: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.; assign"),
        ops.batch([(1,)] * 400, "f4"),
    ):
        pass


def test_another_exception_is_not_hidden():
    """What went wrong inside the block is what leaves it."""

    def read_image():
        msg = "broken image"
        raise OSError(msg)

    with pytest.raises(OSError, match="broken image"), ops.batch([(2,)], "f4") as batch:
        batch[0] = read_image()


def test_a_slot_written_in_place_is_declared_filled():
    """filled(i) counts as an assignment, twice as well as once."""
    with ops.batch([(2,), (2,)], "f4") as batch:
        batch.slots[0][...] = 1
        batch.filled(0)
        batch.filled(0)
        batch[-1] = np.zeros(2, "f4")
    assert batch.array.tolist() == [1, 1, 0, 0]


def test_a_failed_assignment_does_not_count():
    """A value that was refused leaves the slot unfilled."""
    batch = ops.batch([(2,)], "f4")
    with pytest.raises(ops.ShapeMismatchError):
        batch[0] = np.zeros(3, "f4")
    with pytest.raises(ops.UnfilledSlotError, match="1 of 1"), batch:
        pass


def test_an_empty_slot_needs_no_filling():
    """A slot without elements has nothing that could be forgotten."""
    with ops.batch([(2,), (0,)], "f4") as batch:
        batch[0] = np.zeros(2, "f4")
    assert batch.slots[1].shape == (0,)


@pytest.mark.parametrize("shapes", [(2, 3), [2], [(2.0,)], ["ab"], [None], [np.ones((2, 3))]])
def test_a_shape_is_a_tuple_of_integers(shapes):
    """A single shape, or an array instead of its shape, is not taken for something else."""
    with pytest.raises(TypeError, match=r"each shape of a batch must be a tuple of integers, got [\s\S]*; pass a list"):
        ops.batch(shapes, "f4")


@pytest.mark.parametrize("copy", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_batch_cannot_be_copied(copy):
    """A copy, in this process or another, would fill another array."""
    with pytest.raises(TypeError, match=r"cannot be copied .*, got <Batch of 1 slots, 1 unfilled: shape \(2,\)"):
        copy(ops.batch([(2,)], "f4"))


def test_a_batch_is_not_taken_for_an_array():
    """NumPy would make an array of one object of it."""
    with pytest.raises(TypeError, match=r"not an array, got <Batch .*; pass batch.array"):
        np.asarray(ops.batch([(2,)], "f4"))


def test_a_batch_is_usable_without_a_block():
    """The context manager checks, and is needed for nothing else."""
    batch = ops.batch([(1,), (1,)], "i4")
    batch[0], batch[1] = [5], [6]
    assert batch.array.tolist() == [5, 6]


@pytest.mark.parametrize("shape", [(3,), (1, 2), (), (1,), (2, 1)], ids=str)
def test_a_value_has_exactly_the_shape_of_its_slot(shape):
    """Nothing is broadcast: scalars and axes of length 1 least of all; the message has both shapes."""
    batch = ops.batch([(2,), (4,)], "f4")
    with pytest.raises(
        ops.ShapeMismatchError, match=r"slot 0 has shape \(2,\) and takes a value of exactly .*, got .*; reshape"
    ):
        batch[0] = np.zeros(shape, "f4")


@pytest.mark.parametrize("index", [2, -3, 10**30])
def test_there_are_no_other_slots(index):
    """An index out of range is an IndexError that says which there are."""
    batch = ops.batch([(1,), (1,)], "f4")
    with pytest.raises(IndexError, match=r"the batch has slots 0 to 1, got .*; pass one of them"):
        batch[index] = np.zeros(1, "f4")
    with pytest.raises(IndexError, match="the batch has slots 0 to 1"):
        batch.filled(index)


@pytest.mark.parametrize("index", ["0", 1.0, None, slice(0, 1)], ids=repr)
def test_a_slot_is_named_by_an_integer(index):
    """Slices and texts are a TypeError."""
    batch = ops.batch([(1,), (1,)], "f4")
    with pytest.raises(TypeError):
        batch[index] = np.zeros(1, "f4")
    with pytest.raises(TypeError):
        batch.filled(index)


@pytest.mark.parametrize("index", [np.int64(1), True, np.uint8(1)])
def test_a_slot_may_be_named_by_any_integer_object(index):
    """NumPy's integers count."""
    batch = ops.batch([(1,), (1,)], "f4")
    batch[index] = [7]
    assert batch.array[1] == 7


@on_every_engine
def test_values_are_cast_as_assignment_does_under_same_kind(engine):
    """float64 becomes float32, rounded; what is not of the same kind is refused."""
    x = np.random.default_rng(1).standard_normal((30, 40))
    with running(engine, 3), ops.batch([(30, 40)] * 2, "f4") as batch:
        batch[0] = x
        batch[1] = x.tolist()
    assert_same_bits(batch.array, np.concatenate([x, x], dtype="f4"))
    with pytest.raises(TypeError, match="cannot cast from float64 to int32 under casting='same_kind'"):
        ops.batch([(30, 40)], "i4")[0] = x


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    with pytest.raises(ops.UnsupportedArrayError, match=r"a batch takes plain arrays, got numpy\.ma\.MaskedArray"):
        ops.batch([(2,)], "f8")[0] = np.ma.zeros(2)


@on_every_engine
def test_a_slot_can_be_assigned_from_the_batch(engine):
    """A value that overlaps the slot is read before it is written over."""
    batch = ops.batch([(900,), (900,)], "i4")
    batch.array[...] = np.arange(1800)
    with running(engine, 2):
        batch[1] = batch.array[450:1350]
        batch[0] = batch.slots[0][::-1]
    assert batch.array.tolist() == [*range(899, -1, -1), *range(450, 1350)]


def test_many_threads_fill_one_batch():
    """Producers in eight threads write, assign and declare; each slot is counted once."""
    n = 400
    with ops.batch([(50, 7)] * n, np.float64) as batch:
        barrier = threading.Barrier(8)

        def produce(first):
            barrier.wait()
            for index in range(first, n, 8):
                if index % 2:
                    batch[index] = np.full((50, 7), index)
                else:
                    batch.slots[index][...] = index
                    batch.filled(index)

        producers = [threading.Thread(target=produce, args=(first,)) for first in range(8)]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join()
    assert_same_bits(batch.array, np.repeat(np.arange(float(n)), 50)[:, None].repeat(7, axis=1))


@pytest.mark.parametrize("axis", [0, 1])
def test_large_values_are_copied_into_large_slots(axis):
    """Tens of megabytes, in rows and across them."""
    values = [filled((1501, 1003), np.dtype("f8"), k) for k in range(2)]
    with ops.threads(3), ops.batch([value.shape for value in values], "f8", axis) as batch:
        batch[0] = values[0]
        batch[1] = np.asfortranarray(values[1])
    assert_same_bits(batch.array, np.concatenate(values, axis))


def test_the_array_outlives_the_batch():
    """Slots and the whole are arrays like any other."""
    batch = ops.batch([(3000, 100)], "f8")
    batch[0] = np.ones((3000, 100))
    array = batch.array
    del batch
    assert array.sum() == 300_000


# --- errors of batch


@pytest.mark.parametrize("given_shapes", [[(2, 3), (2, 4)], [(2, 3), (2,)], [(2,), (2, 1)]], ids=str)
def test_shapes_that_do_not_fit_are_refused(given_shapes):
    """The message has the axis, both shapes and what to do."""
    with pytest.raises(
        ops.ShapeMismatchError, match=r"equal but for axis 0, got .* for input 0 and .* for input 1; reshape"
    ):
        ops.batch(given_shapes, "f4")


def test_no_shapes_are_refused():
    """A batch of nothing has no shape."""
    with pytest.raises(ValueError, match="needs at least one shape, got none; pass a non-empty"):
        ops.batch([], "f4")


def test_a_scalar_shape_is_refused():
    """0-d inputs have no axis to follow one another along."""
    with pytest.raises(ValueError, match="at least one dimension"):
        ops.batch([(), ()], "f4")


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (-5,)], ids=str)
def test_a_negative_length_is_refused(shape):
    """The message shows the shape."""
    with pytest.raises(ValueError, match=r"lengths of 0 or more, got \(.*-\d.*\); pass the shape"):
        ops.batch([shape], "f4")


@pytest.mark.parametrize("shape", [1.5, (2.0,), "ab", None, (None,)], ids=repr)
def test_a_length_is_an_integer(shape):
    """What is none is a TypeError."""
    with pytest.raises(TypeError):
        ops.batch([shape], "f4")


@pytest.mark.parametrize("axis", [1, -2, 2**40])
def test_an_axis_out_of_range_is_an_axis_error(axis):
    """As for concatenate."""
    with pytest.raises(np.exceptions.AxisError, match=r"must be an integer in \[-1, 0\]"):
        ops.batch([(2,), (3,)], "f4", axis)


@pytest.mark.parametrize("dtype", ["no dtype", ("f4", (2,))], ids=repr)
def test_a_dtype_is_one_of_array_elements(dtype):
    """A name of nothing is NumPy's TypeError, and so is a subarray, which would add axes to the whole."""
    with pytest.raises(TypeError, match=r"dtype|data type"):
        ops.batch([(2,), (3,)], dtype)


def test_an_accelerator_that_is_not_there_is_an_error():
    """A named device is never replaced in silence."""
    with pytest.raises(ops.BackendUnavailableError, match="pass accelerator=None"):
        ops.batch([(2,)], "f4", accelerator="cuda:0")
