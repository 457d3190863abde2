"""concatenate against NumPy's: any dtype, axis, layout and iterable, on the engine and below its threshold."""

import gc
import mmap
import os
import random
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from arrays import (
    BUDGETS,
    BYTE_DTYPES,
    DTYPES,
    FAMILIES,
    OWNING_DTYPES,
    Token,
    assert_same_bits,
    assert_same_outcome,
    budgets,
    filled,
    frozen,
    joins,
    on_every_engine,
    running,
)
from child_processes import run_child
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops.cpu import copying, pool

MIB = 1 << 20


# --- the same as NumPy


@on_every_engine
@given(join=joins(), budget=budgets)
def test_any_arrays_are_joined_as_numpy_does(engine, join, budget):
    """Values, dtype and shape are NumPy's, for every dtype, axis and layout."""
    arrays, axis = join
    expected = np.concatenate(arrays, axis)
    with running(engine, budget):
        assert_same_bits(ops.concatenate(arrays, axis), expected)


@on_every_engine
@given(join=joins(BYTE_DTYPES), budget=budgets)
def test_a_result_is_a_writable_c_ordered_copy(engine, join, budget):
    """The result is C-contiguous, aligned and writable, owns its memory alone, and the inputs keep theirs."""
    arrays, axis = join
    before = [array.copy() for array in arrays]
    with running(engine, budget):
        result = ops.concatenate(arrays, axis)
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert result.flags.aligned
    assert not any(np.may_share_memory(result, array) for array in arrays)
    result[...] = np.zeros((), result.dtype)
    for array, copy in zip(arrays, before, strict=True):
        assert_same_bits(array, copy)


@on_every_engine
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@given(data=st.data())
def test_lengths_units_and_byte_orders_are_joined_as_numpy_does(engine, family, data):
    """dtypes that differ in string length, datetime unit or byte order alone need no dtype=."""
    arrays, axis = data.draw(joins(family, mixed=True))
    expected = np.concatenate(arrays, axis)
    with running(engine, data.draw(budgets)):
        assert_same_bits(ops.concatenate(arrays, axis), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_dtype_survives_the_engine(dtype, budget):
    """No dtype is left to the luck of a random draw."""
    x = filled((5, 34, 3), dtype, 1)
    arrays = [frozen(x), frozen(x.transpose(0, 2, 1).copy().transpose(0, 2, 1)), frozen(x[:, ::-1])]
    with running("tiny pieces", budget):
        assert_same_bits(ops.concatenate(arrays, 1), np.concatenate(arrays, 1))


def test_tiny_pieces_do_run_the_engine(monkeypatch):
    """What the property tests call an engine cuts a small array into many pieces."""
    counts = []
    run = pool.run
    monkeypatch.setattr(pool, "run", lambda function, n, **kwargs: counts.append(n) or run(function, n, **kwargs))
    with running("tiny pieces", 3):
        ops.concatenate([np.ones((40, 40)), np.ones((40, 40)).T])
    assert counts[0] > 40


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(1_000_003,), (7,), (524_287,)], 0),
        ([(7, 100_003), (7, 1)], 1),
        ([(100_003, 7), (1, 7), (3, 7)], 0),
        ([(3, 5, 70_001), (3, 2, 70_001)], 1),
        ([(2, 400_009), (1, 400_009)], 0),
        ([(13, 17, 3001)] * 3, 2),
        ([(1, 1_500_001)] * 2, 0),
        ([(1_500_001, 1)] * 2, 1),
        ([(1_500_001, 3)] * 2, None),
    ],
)
@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_lengths_that_do_not_divide_evenly_lose_nothing(shapes, axis, dtype):
    """Prime sizes, axes shorter than the budget and cuts off the joined axis are right at 1 to 16 threads."""
    rng = np.random.default_rng(11)
    arrays = [rng.integers(-100, 100, shape).astype(dtype) for shape in shapes]
    expected = np.concatenate(arrays, axis)
    for budget in (1, 2, 3, 7, 16):
        with ops.threads(budget):
            assert_same_bits(ops.concatenate(arrays, axis), expected)


# Tens of megabytes: each kernel on the sizes that it is for.
LARGE = {
    "rows streamed": lambda: ([filled((6_000_001,), np.dtype("f4"), k) for k in range(2)], 0),
    "runs": lambda: ([filled((250_001 + k,), np.dtype("u2"), k) for k in range(40)], 0),
    "segments unaligned": lambda: ([filled((30_001 + k,), np.dtype("u1"), k) for k in range(400)], 0),
    "rows strided": lambda: ([filled((20_001, 401), np.dtype("u2"), k)[::-1, 1:400] for k in range(2)], 1),
    "transpose 1": lambda: ([filled((2503, 4001), np.dtype("u1"), k).T for k in range(2)], 0),
    "transpose 2": lambda: ([filled((2503, 2001), np.dtype("u2"), k).T for k in range(2)], 0),
    "transpose 4": lambda: ([filled((1503, 2001), np.dtype("f4"), k).T for k in range(2)], 1),
    "transpose 8": lambda: ([filled((1203, 1001), np.dtype("f8"), k).T for k in range(2)], 0),
    "transpose 16": lambda: ([filled((703, 1001), np.dtype("D"), k).T for k in range(2)], 0),
    "channels first": lambda: ([filled((701, 501, 3), np.dtype("u1"), k).transpose(2, 0, 1) for k in range(9)], 1),
    "channels last": lambda: ([filled((4, 701, 501), np.dtype("f4"), k).transpose(1, 2, 0) for k in range(2)], 0),
    "no kernel": lambda: ([filled((701, 1001), np.dtype("V5"), k).T for k in range(3)], 0),
    "one large among small": lambda: ([filled((n,), np.dtype("i8"), n) for n in (3, 500, 3_000_017, 9, 4096)], 0),
}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("budget", [1, 3])
def test_large_arrays_are_right_as_shipped(case, budget):
    """Tens of megabytes in each layout for which there is a kernel."""
    arrays, axis = LARGE[case]()
    with ops.threads(budget):
        assert_same_bits(ops.concatenate(arrays, axis), np.concatenate(arrays, axis))


# --- the five differences


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("f8", "f4"),
        ("i1", "u1"),
        ("i8", "f8"),
        ("i4", "i8"),
        ("?", "u1"),
        ("S3", "U3"),
        ("M8[s]", "m8[s]"),
        ("M8[s]", "i8"),
        ("V3", "V5"),
        ("bfloat16", "f4"),
        ("bfloat16", "V2"),
        ("O", "f8"),
        ([("a", "i8"), ("b", "f8")], [("b", "f8"), ("a", "i8")]),
        ([("a", "i8")], [("a", "i4")]),
        ([("a", "f4", (2,))], [("a", "f4", (3,))]),
    ],
)
def test_different_dtypes_need_a_dtype(first, second):
    """1: a join that would promote is an error, which names both dtypes and the cure."""
    arrays = [np.zeros(2, np.dtype(first)), np.zeros(2, np.dtype(second))]
    with pytest.raises(
        ops.DTypeMismatchError, match=r"must have one dtype, got .* for array 0 and .* for array 1.*dtype="
    ):
        ops.concatenate(arrays)


def test_the_dtype_of_an_empty_array_counts():
    """1: an array without elements is not left out of the comparison."""
    empty, values = np.array([], np.float64), np.array([4, 7], np.int16)
    for arrays in ([empty, values], [values, empty], [values, empty, values]):
        with pytest.raises(ops.DTypeMismatchError, match="must have one dtype"):
            ops.concatenate(arrays)
    assert ops.concatenate([empty, values], dtype=np.float64).dtype == np.float64
    assert ops.concatenate([empty, empty]).dtype == np.float64


def test_different_dtypes_are_caught_as_either_builtin():
    """1: the error is a TypeError, as NumPy's for dtypes that cannot be promoted, and a ValueError."""
    assert issubclass(ops.DTypeMismatchError, TypeError)
    assert issubclass(ops.DTypeMismatchError, ValueError)


def test_string_dtypes_with_other_missing_values_differ():
    """1: variable-length strings with and without a missing value are two dtypes, and the message says so."""
    arrays = [np.array(["a"], np.dtypes.StringDType()), np.array(["b"], np.dtypes.StringDType(na_object=None))]
    with pytest.raises(ops.DTypeMismatchError, match="must have one dtype"):
        ops.concatenate(arrays)


@pytest.mark.parametrize("n_bytes", [4096, 4097, 5000, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 5, 9 * MIB])
@pytest.mark.parametrize("form", [list, iter])
def test_results_are_aligned(n_bytes, form):
    """2: to 64 bytes from 4 KiB upward, to a page from 1 MiB."""
    alignment = mmap.PAGESIZE if n_bytes >= MIB else 64
    kept = [ops.concatenate(form([np.zeros(n_bytes - 7, np.uint8), np.zeros(7, np.uint8)])) for _ in range(5)]
    assert [x.ctypes.data % alignment for x in kept] == [0] * 5


@pytest.mark.parametrize("layout", ["F", "transposed"])
def test_results_are_c_ordered_where_numpys_are_not(layout):
    """2: NumPy keeps the order of F-ordered inputs; this does not."""
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4)) if layout == "F" else np.arange(12.0).reshape(4, 3).T
    assert not np.concatenate([x, x]).flags.c_contiguous
    assert ops.concatenate([x, x]).flags.c_contiguous


class Carrier(np.ndarray):
    """A subclass that means something of its own by a join."""

    def __array_function__(self, function, types, args, kwargs):
        return NotImplemented


class Label(np.ndarray):
    """A subclass that adds a method and nothing that a join could lose."""


class FavouredLabel(np.ndarray):
    """A subclass of whose class results are to be."""

    __array_priority__ = 7.0


class ReturnsMasked:
    def __array__(self, dtype=None, copy=None):
        return np.ma.array([1.0, 2.0], mask=[True, False])


@pytest.mark.parametrize(
    "carrier",
    [
        np.ma.array([1.0, 2.0], mask=[True, False]),
        np.zeros(2).view(Carrier),
    ],
    ids=lambda carrier: type(carrier).__name__,
)
@pytest.mark.parametrize("position", [0, 1])
def test_what_a_join_would_drop_is_refused(carrier, position):
    """3: masked arrays and subclasses with an __array_function__ are a TypeError that names the class and the cure."""
    arrays = [np.zeros(2)]
    arrays.insert(position, carrier)
    with pytest.raises(
        ops.UnsupportedArrayError, match=rf"plain arrays, got .*{type(carrier).__name__}.*numpy.asarray"
    ):
        ops.concatenate(arrays)
    assert issubclass(ops.UnsupportedArrayError, TypeError)


def test_a_mask_behind_an_array_method_is_refused():
    """3: an object whose __array__ returns a masked array loses no mask in silence."""
    with pytest.raises(ops.UnsupportedArrayError, match="plain arrays"):
        ops.concatenate([ReturnsMasked(), ReturnsMasked()])


def test_memmaps_are_joined(tmp_path):
    """3: a memmap is nothing but memory."""
    memmap = np.memmap(tmp_path / "values", np.int32, "w+", shape=(3, 4))
    memmap[...] = np.arange(12).reshape(3, 4)
    assert_same_bits(ops.concatenate([memmap, memmap], 1), np.concatenate([memmap, memmap], 1))


def test_large_results_reuse_memory():
    """4: the next result of the size has the memory of one that died."""
    arrays = [np.zeros(3 * MIB, np.uint8)] * 2
    first = ops.concatenate(arrays)
    address = first.ctypes.data
    del first
    assert ops.concatenate(arrays).ctypes.data == address


@pytest.mark.parametrize(
    "iterable",
    [
        iter,
        tuple,
        lambda arrays: (array for array in arrays),
        lambda arrays: dict(enumerate(arrays)).values(),
        lambda arrays: map(np.asarray, arrays),
        np.stack,
    ],
    ids=["iterator", "tuple", "generator", "dict view", "map", "array"],
)
@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_any_iterable_is_accepted(iterable, axis):
    """5: arrays may come from a generator, a view, an iterator or a larger array."""
    arrays = [np.arange(6).reshape(2, 3) + k for k in range(4)]
    assert_same_bits(ops.concatenate(iterable(arrays), axis), np.concatenate(arrays, axis))


def test_the_error_of_a_generator_is_not_hidden():
    """5: what the iterable raises is what the caller sees."""

    def broken():
        yield np.zeros(3)
        msg = "no more images"
        raise OSError(msg)

    with pytest.raises(OSError, match="no more images"):
        ops.concatenate(broken())


# --- kinds of inputs


@pytest.mark.parametrize("kind", [Label, FavouredLabel, np.matrix, np.recarray])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mixed", [False, True])
@on_every_engine
def test_subclasses_come_out_as_numpy_has_them(engine, kind, axis, mixed):
    """The class of the result is that of the highest __array_priority__."""
    dtype = {np.recarray: [("a", "i4"), ("b", "f8")]}.get(kind, "f8")
    plain = filled((2, 3), np.dtype(dtype))
    special = plain.view(kind)
    arrays = [plain, special] if mixed else [special, special]
    expected = np.concatenate(arrays, axis)
    with running(engine):
        assert_same_bits(ops.concatenate(arrays, axis), expected)


class ByArray:
    def __init__(self, x):
        self._x = x

    def __array__(self, dtype=None, copy=None):
        return self._x


class ByInterface:
    def __init__(self, x):
        self._x = x
        self.__array_interface__ = x.__array_interface__


class ByDLPack:
    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **kwargs):
        return self._x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


@pytest.mark.parametrize(
    "form",
    [np.ndarray.tolist, ByArray, ByInterface, ByDLPack, memoryview, lambda x: tuple(map(tuple, x.tolist()))],
    ids=["list", "array method", "array interface", "DLPack", "buffer", "tuple"],
)
@on_every_engine
def test_what_can_become_an_array_is_joined(engine, form):
    """Nested sequences, buffers, and objects that export an array or DLPack are taken as they are."""
    x = np.arange(6).reshape(2, 3)
    with running(engine):
        assert_same_bits(ops.concatenate([form(x), form(x + 1)], 1), np.concatenate([x, x + 1], 1))


def test_ragged_lists_are_refused_as_numpy_does():
    """What NumPy cannot make an array of is NumPy's ValueError."""
    with pytest.raises(ValueError, match="inhomogeneous"):
        ops.concatenate([[[1, 2], [3]]])


@pytest.mark.parametrize("axis", [0, 1, None])
def test_one_array_is_copied_too(axis):
    """The result never shares memory with an input, for one input as for many."""
    x = np.arange(12.0).reshape(3, 4)
    for arrays in ([x], [x.T], [x[:, :0], x] if axis == 1 else [x[:0], x], [np.broadcast_to(x[0], (3, 4))]):
        result = ops.concatenate(arrays, axis)
        result[...] = -5
        assert x.sum() == 66.0


@pytest.mark.parametrize("code", ["i2", "i4", "i8", "u4", "f4", "f8", "c16"])
@pytest.mark.parametrize("orders", [">>", "><", "<>", ">"])
def test_byte_orders_are_read_as_values(code, orders):
    """Big-endian inputs give native results of the same values."""
    arrays = [np.array([1, 2, 250, 3]).astype(order + code) for order in orders]
    result = ops.concatenate(arrays)
    assert result.dtype == np.dtype(code)
    assert result.dtype.isnative
    assert result.tolist() == [value for array in arrays for value in array.tolist()]


def test_large_big_endian_arrays_are_read_as_values():
    """Beyond the threshold too, where bytes could be copied as they are."""
    x = np.arange(400_000).astype(">f8")
    assert_same_bits(ops.concatenate([x, x[::-1]]), np.concatenate([x, x[::-1]]))


def test_record_fields_are_joined_by_name():
    """Records padded in another way are joined field by field."""
    padded = np.array([(3, 4)], np.dtype([("k", "i2"), ("w", "i8")], align=True))
    packed = np.array([(5, 6)], np.dtype([("k", "i2"), ("w", "i8")]))
    result = ops.concatenate([padded, packed, padded])
    assert result["k"].tolist() == [3, 5, 3]
    assert result["w"].tolist() == [4, 6, 4]
    assert ops.concatenate([padded] * 1000)["w"].sum() == 4000


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype({"names": ["a", "b"], "formats": ["i1", "i4"], "offsets": [0, 8], "itemsize": 16}),
        np.dtype([("a", ">f4", (2,)), ("b", "i1")]),
        np.dtype([("a", "i1"), ("b", "i4")], align=True),
        np.dtype([("a", [("x", ">u2")]), ("b", "S3")]),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_arrays", [1, 2])
def test_the_layout_of_records_is_numpys(dtype, n_arrays):
    """Offsets, item size and byte order of a joined record are those that NumPy gives it."""
    arrays = [filled((3,), dtype)] * n_arrays
    expected = np.concatenate(arrays)
    result = ops.concatenate(arrays)
    assert result.dtype == expected.dtype
    assert result.dtype.isalignedstruct == expected.dtype.isalignedstruct
    assert_same_bits(result, expected)


def test_datetime_units_become_the_finer_one():
    """Values are converted and NaT stays what it is."""
    days = np.array(["2031-05-06", "NaT"], "M8[D]")
    hours = np.array(["2031-05-06T07"], "M8[h]")
    result = ops.concatenate([days, hours, np.array(["NaT"], "M8[s]")])
    assert result.dtype == np.dtype("M8[s]")
    assert result[0] == np.datetime64("2031-05-06T00:00:00")
    assert result[2] == np.datetime64("2031-05-06T07:00:00")
    assert np.isnat(result).tolist() == [False, True, False, True]
    spans = ops.concatenate([np.array([2], "m8[h]"), np.array([30], "m8[m]")])
    assert spans.dtype == np.dtype("m8[m]")
    assert spans.astype(int).tolist() == [120, 30]


def test_a_hundred_string_lengths_are_joined():
    """The number of different dtypes is not bounded by what one NumPy call takes."""
    arrays = [np.full(2, "x" * k, f"S{k}") for k in range(1, 101)]
    assert_same_bits(ops.concatenate(arrays), np.concatenate(arrays))


# --- objects and their counts


@on_every_engine
@given(join=joins(OWNING_DTYPES[:1]), budget=budgets)
def test_objects_are_counted(engine, join, budget):
    """Each element of an object array is the same object, held once more, and freed with the last array."""
    arrays, axis = join
    objects = [item for array in arrays for item in array.ravel().tolist()]
    before = [sys.getrefcount(item) for item in objects]
    with running(engine, budget):
        result = ops.concatenate(arrays, axis)
    during = [sys.getrefcount(item) for item in objects]
    del result
    assert [sys.getrefcount(item) for item in objects] == before
    assert sum(during) - sum(before) == _references_in(arrays, objects)


def _references_in(arrays, objects):
    """Each place of the output holds one reference; an object that stands n times in `objects` is summed n times."""
    times = {}
    for item in objects:
        times[id(item)] = times.get(id(item), 0) + 1
    return sum(n * n for n in times.values())


@pytest.mark.parametrize("dtype", [np.dtype(object), np.dtype([("a", "i4"), ("b", object)])], ids=str)
def test_no_object_is_freed_early_or_kept(dtype):
    """The number of live objects is exact while results live, and zero after."""
    gc.collect()
    start = Token.live
    with ops.threads(4):
        parts = [filled((5000,), dtype, k) for k in range(4)]
        result = ops.concatenate(parts)
        del parts
        gc.collect()
        assert Token.live - start == 20_000
        square = result.reshape(100, 200)
        joined = ops.concatenate([square, square], axis=1)
        item = joined["b"][0, 0] if dtype.names else joined[0, 0]
        # The two arrays hold three references, `item` and the argument two more.
        assert sys.getrefcount(item) == 5
        del item, square, joined, result
        gc.collect()
    assert Token.live == start


def test_objects_are_joined_from_many_threads_at_once():
    """Reference counts stay exact when four threads join the same objects."""
    x = filled((2000,), np.dtype(object))
    before = [sys.getrefcount(item) for item in x]
    barrier, right = threading.Barrier(4), []

    def join():
        barrier.wait()
        for _ in range(20):
            right.append(all(one is other for one, other in zip(ops.concatenate([x, x])[2000:], x, strict=True)))

    threads = [threading.Thread(target=join) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80
    assert [sys.getrefcount(item) for item in x] == before


def test_long_strings_outlive_their_inputs():
    """Variable-length strings are copied, not referred to."""
    arrays = [np.array(["x" * 400 + str(k)] * 300, np.dtypes.StringDType()) for k in range(3)]
    result = ops.concatenate(arrays)
    expected = [text for array in arrays for text in array.tolist()]
    del arrays
    gc.collect()
    assert result.tolist() == expected


# --- errors


@pytest.mark.parametrize("axis", [2, -3, 10, -(2**31), 2**31, 2**40])
def test_an_axis_out_of_range_is_an_axis_error(axis):
    """The message states the range, and the error is both builtins that NumPy's is."""
    with pytest.raises(
        np.exceptions.AxisError, match=rf"`axis` must be an integer in \[-2, 1\] .*2-d arrays, got {axis};"
    ):
        ops.concatenate([np.ones((2, 3)), np.zeros((2, 3))], axis)
    assert issubclass(np.exceptions.AxisError, ValueError)
    assert issubclass(np.exceptions.AxisError, IndexError)


@pytest.mark.parametrize("axis", [1, 10, -2])
def test_an_axis_is_checked_for_flat_arrays_too(axis):
    """No axis of a 1-d array is taken for 0 in silence."""
    with pytest.raises(np.exceptions.AxisError, match="must be an integer in"):
        ops.concatenate([np.arange(3), np.arange(2)], axis)


@pytest.mark.parametrize("axis", [1.0, "0", [0], (0,), 1j, True, np.True_])
@pytest.mark.parametrize("shape", [(2, 3), (1, 3)])
def test_an_axis_is_an_integer(axis, shape):
    """What NumPy refuses as an axis is a TypeError that shows the value, whatever path the arrays take."""
    arrays = [np.ones((2, 3)), np.ones(shape)]
    with pytest.raises(TypeError):
        np.concatenate(arrays, axis)
    with pytest.raises(TypeError, match=r"`axis` must be an integer in .*, got"):
        ops.concatenate(arrays, axis)


@pytest.mark.parametrize("axis", [np.int8(1), np.int64(-1), np.array(1), np.uint64(1)])
def test_an_axis_may_be_any_integer_object(axis):
    """NumPy's integers count as integers."""
    arrays = [np.ones((2, 3)), np.zeros((2, 3))]
    assert_same_bits(ops.concatenate(arrays, axis), np.concatenate(arrays, axis))


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [
        ([(2, 3), (1, 3)], 1),
        ([(2, 3), (2, 1)], 0),
        ([(3,), (3, 1)], 0),
        ([(1, 3), (1, 1, 1)], 1),
        ([(2, 3), (3,)], 0),
        ([(4, 2, 3), (4, 1, 3)], 0),
        ([(4, 2, 3), (2, 3)], 0),
        ([(1, 1), (1, 1, 1)], 0),
        ([(5, 1), (1, 1, 1)], 0),
        ([(2, 3), (2, 3), (0, 4)], 0),
        ([(2,), ()], 0),
    ],
)
@pytest.mark.parametrize("step", [1, -1])
@on_every_engine
def test_shapes_that_do_not_fit_are_refused(engine, shapes, axis, step):
    """Nothing is broadcast, ones least of all."""
    arrays = [np.full(shape, k + 1.0) for k, shape in enumerate(shapes)][::step]
    with running(engine), pytest.raises(ValueError, match=r"shapes for concatenate must be equal|at least one dim"):
        ops.concatenate(arrays, axis)


def test_a_shape_mismatch_names_both_arrays():
    """The message has the axis, both shapes and which arrays they belong to."""
    with pytest.raises(
        ops.ShapeMismatchError, match=r"axis 0, got \(2, 3\) for input 0 and \(2, 4\) for input 2; reshape"
    ):
        ops.concatenate([np.ones((2, 3)), np.ones((5, 3)), np.ones((2, 4))])


@pytest.mark.parametrize("arrays", [[np.array(1), np.array(2)], [1, 2], np.arange(3), "abc"], ids=str)
def test_scalars_are_refused(arrays):
    """0-d arrays have no axis to be joined along."""
    with pytest.raises(ValueError, match="at least one dimension, got a 0-d one; give"):
        ops.concatenate(arrays)


@pytest.mark.parametrize("form", [list, iter])
def test_scalars_are_joined_without_an_axis(form):
    """axis=None flattens 0-d arrays to one element each."""
    assert_same_bits(ops.concatenate(form([1, np.int64(2)]), None), np.concatenate([1, 2], None))


@pytest.mark.parametrize("arrays", [[], (), iter([])], ids=repr)
def test_no_arrays_are_refused(arrays):
    """There is no dtype for a result of nothing."""
    with pytest.raises(ValueError, match="concatenate needs at least one array, got none; pass a non-empty"):
        ops.concatenate(arrays)


@pytest.mark.parametrize("arrays", [5, None, np.array(5), 2.5], ids=repr)
def test_what_is_no_iterable_is_refused(arrays):
    """A single scalar is a TypeError, as NumPy has it."""
    with pytest.raises(TypeError):
        np.concatenate(arrays)
    with pytest.raises(TypeError, match=r"iterab|iteration"):
        ops.concatenate(arrays)


@pytest.mark.process
def test_lengths_beyond_2_to_63_are_an_error():
    """What crashes NumPy, or no machine can hold, is a ValueError or a MemoryError that says so."""
    printed = run_child(
        """
        import numpy as np
        import accel_ops as ops

        def huge(*shape, dtype="i1"):
            return np.broadcast_to(np.zeros((), dtype), shape)

        for function, arrays, axis in (
            (ops.concatenate, [huge(2**62)] * 2, 0),
            (ops.concatenate, [huge(2**62)] * 4, 0),
            (ops.concatenate, [huge(2**62)] * 4, None),
            (ops.concatenate, [huge(2**62), huge(2**62 - 1), huge(3)], 0),
            (ops.concatenate, [huge(2**59, dtype="i8")] * 8, 0),
            (ops.concatenate, [huge(3, 2**60)] * 8, 0),
            (ops.concatenate, [huge(2**59, dtype="O")] * 16, 0),
            (ops.concatenate, [np.zeros((2**62, 0), "i1")] * 2, 0),
            (ops.stack, [huge(2**62)] * 2, 0),
            (ops.stack, [huge(2**61)] * 8, 1),
            (ops.concatenate, [huge(2**61)] * 2, 0),
        ):
            try:
                function(arrays, axis)
            except (ValueError, MemoryError) as exc:
                print(type(exc).__name__)
        try:
            ops.batch([(2**62,)] * 4, "i8")
        except ValueError as exc:
            print(type(exc).__name__)
        assert ops.concatenate([np.ones(3), np.ones(2)]).sum() == 5
        """,
        deadline_s=30,
    )
    assert printed.split() == ["ValueError"] * 10 + ["MemoryError", "ValueError"]


def test_a_result_that_is_too_large_says_so():
    """The message has rule, shape and cure."""
    huge = np.broadcast_to(np.int8(0), (2**62,))
    with pytest.raises(ValueError, match=r"fewer than 2\*\*63 bytes, got shape \(9223372036854775808,\).*join fewer"):
        ops.concatenate([huge, huge])


@pytest.mark.parametrize("accelerator", ["cuda:0", 0, "cuda"])
def test_an_accelerator_that_is_not_there_is_an_error(accelerator):
    """A named device is never replaced in silence."""
    with pytest.raises(ops.BackendUnavailableError, match=r"is not there.*pass accelerator=None"):
        ops.concatenate([np.ones(2)], accelerator=accelerator)


@pytest.mark.parametrize("accelerator", [None, "cpu"])
def test_host_memory_can_be_named(accelerator):
    """None and "cpu" mean plain host memory."""
    assert ops.concatenate([np.ones(2)], accelerator=accelerator).tolist() == [1, 1]


def test_an_error_leaves_the_library_working():
    """The call after a failed one is like any other."""
    with pytest.raises(ops.ShapeMismatchError, match="must be equal but for axis 0"):
        ops.concatenate([np.ones((2, 3)), np.ones((2, 2))])
    assert ops.concatenate([np.ones((2, 3)), np.zeros((2, 1))], axis=1).shape == (2, 4)


# --- min_chunk_size_mb


@pytest.mark.parametrize(
    "size",
    [0, 0.0, 1e-9, 0.5, 50, 1e300, 1e308, 2**70, 10**400, float("inf"), np.float32(0.5), np.int8(3), np.uint64(9)],
    ids=lambda size: f"{type(size).__name__} {str(size)[:9]}",
)
def test_any_number_from_0_is_a_chunk_size(size):
    """Zero, fractions, sizes beyond any array and NumPy's numbers are taken."""
    arrays = [np.arange(700_000.0), np.arange(9.0)]
    assert_same_bits(ops.concatenate(arrays, min_chunk_size_mb=size), np.concatenate(arrays))


@pytest.mark.parametrize("size", [-1, -0.001, float("-inf"), float("nan"), np.float64(-2)])
def test_a_chunk_size_below_0_is_refused(size):
    """Neither is NaN a size; the message shows the value and says what to pass."""
    with pytest.raises(ValueError, match=r"`min_chunk_size_mb` must be 0 or more, got .*; pass 0 for no bound"):
        ops.concatenate([np.ones(2)], min_chunk_size_mb=size)


@pytest.mark.parametrize("size", [True, np.False_, "50", b"1", 1j, [1], np.ones(1)], ids=repr)
def test_a_chunk_size_is_a_number(size):
    """A bool, a text or a complex number is a TypeError that shows it."""
    with pytest.raises(TypeError, match="`min_chunk_size_mb` must be a number of MiB or None, got"):
        ops.concatenate([np.ones(2)], min_chunk_size_mb=size)


def _bytes_of_each_task(arrays, axis, size, monkeypatch):
    """Run a join task by task, and return for each what it wrote of the array k, which holds k + 1 everywhere."""
    tasks_seen = []
    out = np.zeros(np.concatenate(arrays, axis).shape, np.uint8)

    def run_in_order(function, n_pieces, *, tasks=None, **kwargs):
        starts = list(range(n_pieces) if tasks is None else tasks)
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        before = np.zeros(256, np.int64)
        for start, stop in zip(starts, [*starts[1:], n_pieces], strict=True):
            for piece in range(start, stop):
                function(piece)
            after = np.bincount(out.ravel(), minlength=256)
            tasks_seen.append(
                {k: after[k + 1] - before[k + 1] for k in range(len(arrays)) if after[k + 1] != before[k + 1]}
            )
            before = after

    with monkeypatch.context() as patch:
        patch.setattr(pool, "run", run_in_order)
        ops.concatenate(arrays, axis, out=out, min_chunk_size_mb=size)
    assert_same_bits(out, np.concatenate(arrays, axis).astype(np.uint8))
    return tasks_seen


def _assert_no_piece_is_smaller(arrays, axis, size, monkeypatch):
    tasks = _bytes_of_each_task(arrays, axis, size, monkeypatch)
    smallest = size * MIB
    too_small = [
        (k, n_bytes) for task in tasks for k, n_bytes in task.items() if n_bytes < min(smallest, arrays[k].nbytes)
    ]
    assert not too_small


@pytest.mark.parametrize("n_bytes", [1, 63, 64, 65, 100, 128, 191, 500, 1000, 4000])
@pytest.mark.parametrize("layout", ["C", "F", "moved", "reversed"])
@pytest.mark.parametrize(
    "shape", [(1000,), (10, 100), (7, 13, 11), (3, 331), (331, 3), (10, 40, 9), (6, 5, 7, 5), (1, 1001)]
)
def test_no_array_is_cut_smaller_than_the_chunk_size(n_bytes, layout, shape, monkeypatch):
    """Each task covers at least that much of an array, or all of it, however the array lies in memory."""
    arrays = []
    for k in range(2):
        x = np.full(shape, k + 1, np.uint8)
        arrays.append(
            {
                "C": x,
                "F": np.array(x, order="F"),
                "moved": np.moveaxis(np.moveaxis(x, 0, -1).copy(), -1, 0),
                "reversed": x[::-1],
            }[layout]
        )
    with running("tiny pieces"):
        for axis in range(len(shape)):
            _assert_no_piece_is_smaller(arrays, axis, n_bytes / MIB, monkeypatch)


@pytest.mark.parametrize("size", [0.5, 1, 2.5, 7, 50])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_large_array_is_cut_smaller_than_the_chunk_size(size, transposed, monkeypatch):
    """The same as shipped, where a piece is about a mebibyte."""
    arrays = [np.full((3001, 2999), k + 1, np.uint8) for k in range(2)]
    if transposed:
        arrays = [array.T for array in arrays]
    _assert_no_piece_is_smaller(arrays, 0, size, monkeypatch)


@pytest.mark.parametrize("size", [1e6, 2**70, float("inf")])
def test_an_array_smaller_than_the_chunk_size_is_not_cut(size, monkeypatch):
    """However large the bound, each array is one task, infinity not excepted."""
    arrays = [np.full(3 * MIB, k + 1, np.uint8) for k in range(3)]
    tasks = _bytes_of_each_task(arrays, 0, size, monkeypatch)
    assert [list(task) for task in tasks] == [[0], [1], [2]]


def test_whole_arrays_are_spread_whatever_the_chunk_size(monkeypatch):
    """The bound keeps no array from being a task of its own."""
    arrays = [np.full(2 * MIB, k + 1, np.uint8) for k in range(8)]
    assert len(_bytes_of_each_task(arrays, 0, 1000, monkeypatch)) == 8


def test_large_arrays_are_cut_where_nothing_forbids_it(monkeypatch):
    """One array alone is shared by the threads, and so is one with an axis of length 1."""
    assert len(_bytes_of_each_task([np.full(16 * MIB, 1, np.uint8)], 0, 0, monkeypatch)) >= 8
    assert len(_bytes_of_each_task([np.full((1, 16 * MIB), 1, np.uint8)], 0, None, monkeypatch)) >= 8


def test_a_piece_is_about_a_mebibyte():
    """What the sizes above rely on."""
    assert copying.PIECE_BYTES <= 2 * MIB


# --- many and changing sizes


def test_a_crowd_of_one_element_arrays_is_no_crowd_of_tasks():
    """60,000 arrays take no more than 25 times NumPy's time (or 3 s), from one thread and from four at once."""
    arrays = [np.array([k]) for k in range(60_000)]
    expected = np.arange(60_000)
    start = time.perf_counter()
    np.concatenate(arrays)
    numpys_s = time.perf_counter() - start
    threads_before = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    with ops.threads(4):
        start = time.perf_counter()
        result = ops.concatenate(arrays)
        assert time.perf_counter() - start < max(3.0, 25 * numpys_s)
    assert_same_bits(result, expected)
    right = []
    callers = [
        threading.Thread(target=lambda: right.append(np.array_equal(ops.concatenate(arrays), expected)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 4
    assert len(os.listdir("/proc/self/task")) <= threads_before + 64  # noqa: PTH208


def changing_sizes():
    import gc
    import random
    from pathlib import Path

    import numpy as np

    import accel_ops as ops

    def resident_mb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    random.seed(3)
    row = np.zeros(20_000, np.float32)
    with ops.threads(4):
        ops.concatenate([row] * 200)  # loads the kernels, whose code stays
        start = peak = resident_mb()
        for _ in range(250):
            result = ops.concatenate([row[None]] * random.randrange(5, 300))
            peak = max(peak, resident_mb())
    del result
    gc.collect()
    assert peak - start < 250, (start, peak)
    assert resident_mb() - start < 120, (start, resident_mb())


@pytest.mark.process
def test_changing_sizes_do_not_pile_up_memory():
    """250 joins of changing size (24 MB at most) stay within 250 MB, and most is given back."""
    run_child(changing_sizes, deadline_s=60)


def test_random_joins_of_mixed_sizes_are_right():
    """Small, medium and large arrays in one join are each put in their place."""
    random.seed(5)
    for _ in range(6):
        lengths = [random.choice([0, 1, 100, 5000, 70_000, 400_000, 1_500_000]) for _ in range(12)]
        arrays = [filled((length,), np.dtype("i4"), length) for length in lengths]
        with ops.threads(3):
            assert_same_bits(ops.concatenate(arrays), np.concatenate(arrays))


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_large_ml_dtypes_arrays_are_right(kind):
    """The dtypes of models go through the engine too."""
    arrays = [filled((3001, 1501), np.dtype(kind), k) for k in range(3)]
    assert_same_bits(ops.concatenate(arrays, 1), np.concatenate(arrays, 1))
    turned = [array.T for array in arrays]
    assert_same_bits(ops.concatenate(turned), np.ascontiguousarray(np.concatenate(turned)))


@given(join=joins(DTYPES, mixed=True))
def test_mixed_dtypes_raise_or_agree_with_numpy(join):
    """Where dtypes differ the call is refused, or does what NumPy does: never a third thing."""
    arrays, axis = join
    try:
        ops.concatenate(arrays, axis)
    except ops.DTypeMismatchError:
        assert len({array.dtype for array in arrays}) > 1
        return
    except ValueError:
        pass  # a time without a unit cannot be given one
    assert_same_outcome(lambda: ops.concatenate(arrays, axis), lambda: np.concatenate(arrays, axis))


def test_the_comparison_notices_a_difference():
    """What other tests rely on fails for another byte, dtype, shape, sign of zero, object, class or warning."""
    x = np.array([0.0, 1.0])
    for other in (-x, x.astype("f4"), x[:1], x.reshape(1, 2), x.astype(">f8"), x.view(Label), np.array([0.0, 2.0])):
        with pytest.raises(AssertionError):
            assert_same_bits(other, x)
    with pytest.raises(AssertionError):
        assert_same_bits(np.array([[]], object).ravel(), np.array([None]))
    with pytest.raises(AssertionError):
        assert_same_bits(np.array([(1, 2)], "i4,i4"), np.array([(1, 3)], "i4,i4"))
    with pytest.raises(AssertionError):
        assert_same_outcome(lambda: x, lambda: 1 / 0)
    with pytest.raises(AssertionError):
        assert_same_outcome(lambda: np.float64(1e300).astype("f4"), lambda: np.array(np.inf, "f4"))
