"""assert_same_bits and digest tell apart what differs in bits, and nothing else."""

import hashlib
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from arrays import BYTE_DTYPES, LAYOUTS, ML_DTYPES, OWNING_DTYPES, filled, laid_out
from child_processes import run_child

from accel_ops import testing
from accel_ops.errors import UnsupportedArrayError, UnsupportedDTypeError
from accel_ops.testing import assert_same_bits, digest

EMPTY_DTYPES = [
    np.dtype("V0"),
    np.dtype("U0"),
    np.dtype([]),
    np.dtype({"names": [], "formats": [], "itemsize": 8}),
    np.dtype([("a", "f4", (0,))]),
]
every_dtype = pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)


def _differs(actual, expected) -> str:
    """Return the message about a difference, which the digests show too."""
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected)
    assert digest(actual) != digest(expected)
    return str(caught.value)


@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4)])
def test_a_copy_is_the_same(dtype, shape):
    """Whatever the dtype, NaN and NaT included."""
    x = filled(shape, dtype)
    assert_same_bits(x, x.copy())
    assert digest(x) == digest(x.copy())


@pytest.mark.parametrize("dtype", EMPTY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_elements_without_bytes_are_the_same(dtype, shape):
    """Their shapes still count."""
    assert_same_bits(np.zeros(shape, dtype), np.zeros(shape, dtype))
    assert digest(np.zeros(shape, dtype)) == digest(np.zeros(shape, dtype))
    _differs(np.zeros(shape, dtype), np.zeros((7,), dtype))


@every_dtype
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_layout_does_not_count(dtype, layout):
    """Elements are compared in C order, however they lie."""
    x = laid_out(filled((3, 4, 5), dtype), layout)
    assert_same_bits(x, x.copy())
    assert digest(x) == digest(x.copy())


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_pieces_do_not_count(layout, monkeypatch):
    """An array is the same cut into pieces as whole, and a difference is found in any of them."""
    x = laid_out(filled((3, 4, 5), np.dtype("u1")), layout)
    other = x.copy()
    other[1:, 2, 3] ^= 1
    whole = digest(x), _differs(x, other)
    for n_bytes in (1, 2, 7, 20, 40, 59):
        monkeypatch.setattr(testing, "_PIECE_BYTES", n_bytes)
        assert_same_bits(x, x.copy())
        assert (digest(x), _differs(x, other)) == whole
    assert "2 of 60 elements differ, first at index (1, 2, 3)" in whole[1]


def _first_byte_of_a_value(dtype: np.dtype) -> int:
    if dtype.names is None:
        return 0
    field, offset = dtype.fields[dtype.names[0]][:2]
    return offset + _first_byte_of_a_value(field.base)


@every_dtype
def test_every_bit_counts(dtype):
    """One bit of one element is a difference, and is found."""
    zeros = np.zeros((2, 3), dtype)
    memory = bytearray(zeros.tobytes())
    memory[5 * dtype.itemsize + _first_byte_of_a_value(dtype)] = 1
    other = np.frombuffer(memory, dtype).reshape(2, 3)
    assert "1 of 6 elements differs, first at index (1, 2)" in _differs(zeros, other)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (np.float16, (0x7E00, 0xFE00, 0x7C01, 0xFFFF)),
        (ml_dtypes.bfloat16, (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF)),
        (np.float32, (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)),
        (np.float64, (0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, (1 << 64) - 1)),
    ],
    ids=["float16", "bfloat16", "float32", "float64"],
)
def test_any_nan_equals_any_other(dtype, bits):
    """Whatever payload, sign and kind, in a number, in a part of a complex one, in a field; infinity is no NaN."""
    dtype = np.dtype(dtype)
    x = np.array(bits, f"u{dtype.itemsize}").view(dtype)
    candidates = [x, x.astype(dtype.newbyteorder()).view(dtype.newbyteorder())]
    record = np.zeros(4, [("a", "i1"), ("b", dtype, 2)])
    record["b"] = x[:, np.newaxis]
    candidates.append(record)
    if dtype.itemsize >= 4 and dtype.kind == "f":
        candidates += [np.stack((x, np.ones(4, dtype)), 1).view(f"c{2 * dtype.itemsize}")]
        candidates += [np.stack((np.ones(4, dtype), x), 1).view(f"c{2 * dtype.itemsize}")]
    for each in candidates:
        assert_same_bits(each[:1], each[1:2])
        assert len({digest(each[k : k + 1]) for k in range(4)}) == 1
    _differs(x[:1], np.array([np.inf]).astype(dtype))


@pytest.mark.parametrize("dtype", [*ML_DTYPES[:-1], "f2", "f4", "f8", "g", "F", "D", "G"], ids=str)
def test_minus_zero_differs_from_zero(dtype):
    """Where the dtype has both, and in either part of a complex number."""
    zero = np.zeros(2, dtype)
    if zero.dtype.kind == "c":
        for part in ("real", "imag"):
            other = zero.copy()
            getattr(other, part)[1] = -0.0
            _differs(zero, other)
    elif "fnuz" not in str(dtype):
        _differs(zero, np.array([0.0, -0.0]).astype(dtype))


@pytest.mark.parametrize("dtype", ["g", "G", ">g", [("a", "i1"), ("b", "g")]], ids=str)
def test_padding_of_long_doubles_does_not_count(dtype):
    """The bytes of an element that carry no value may hold anything."""
    dtype = np.dtype(dtype)
    ones = np.ones(3, dtype)
    other = np.frombuffer(bytearray(b"\xff" * ones.nbytes), dtype).copy()
    fields = [(ones, other)] if dtype.names is None else [(ones[name], other[name]) for name in dtype.names]
    for mine, theirs in fields:
        theirs[...] = mine
    assert_same_bits(ones, other)
    assert digest(ones) == digest(other)


def test_padding_of_records_does_not_count():
    """What lies between fields is no value."""
    dtype = np.dtype([("a", "i1"), ("b", "i4")], align=True)
    zeros, other = np.zeros(3, dtype), np.frombuffer(bytearray(b"\xff" * 24), dtype)
    other["a"] = other["b"] = 0
    assert zeros.tobytes() != other.tobytes()
    assert_same_bits(zeros, other)
    assert digest(zeros) == digest(other) == digest(zeros.astype([("a", "i1"), ("b", ">i4")]))


def test_booleans_are_bytes():
    """Two values that are both true differ where their bytes do."""
    _differs(np.array([1], np.uint8).view(bool), np.array([2], np.uint8).view(bool))


def test_shape_and_dtype_count():
    """The same bytes under another shape or dtype are something else."""
    x = np.zeros(4, np.int32)
    assert "must have the same shape, got (4,), expected (2, 2)" in _differs(x, x.reshape(2, 2))
    assert "must have the same dtype, got int32, expected uint32" in _differs(x, x.view(np.uint32))
    assert "got datetime64[s], expected datetime64[ms]" in _differs(x.astype("M8[s]"), x.astype("M8[ms]"))
    _differs(np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")]))
    _differs(np.zeros(2, [("a", "i4", 2)]), np.zeros(2, [("a", "i8")]))


@every_dtype
def test_byte_order_counts_for_bits_and_not_for_digests(dtype):
    """A digest is of values, wherever they were computed; arrays compared here have one dtype."""
    x = filled((3, 4), dtype)
    swapped = x.astype(dtype.newbyteorder())
    assert digest(x) == digest(swapped)
    if swapped.dtype != dtype:
        with pytest.raises(AssertionError, match="must have the same dtype"):
            assert_same_bits(x, swapped)


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (1.0, -1.0, "index (): got np.float64(1.0) (0x3ff0000000000000), expected np.float64(-1.0) (0xbff"),
        ([[1, 2]], [[1, 3]], "index (0, 1): got np.int64(2) (0x0000000000000002), expected np.int64(3)"),
        ([True], [False], "got np.True_ (0x01), expected np.False_ (0x00)"),
        (np.complex64(1 + 2j), np.complex64(1), "(0x3f800000, 0x40000000), expected np.complex64(1+0j)"),
        (np.longdouble(1), np.longdouble(2), "got np.longdouble('1.0') (0x3fff8000000000000000)"),
        (np.float16([1]), np.float16([2]), "got np.float16(1.0) (0x3c00), expected np.float16(2.0) (0x4000)"),
        (np.ones(1, ml_dtypes.bfloat16), np.zeros(1, ml_dtypes.bfloat16), "got 1 (0x3f80), expected 0 (0x0000)"),
        (np.ones(1, ">f4"), np.zeros(1, ">f4"), "got np.float32(1.0) (0x3f800000)"),
        (np.array("NaT", "M8[D]"), np.array(0, "M8[D]"), "got np.datetime64('NaT','D') (0x8000000000000000)"),
        (["ab"], ["ac"], "got np.str_('ab') (bytes 6100000062000000)"),
        (np.ones(1, "u4").view("U1"), np.full(1, 1 << 31, "u4").view("U1"), "expected an invalid <U1 (bytes 00000080)"),
        (np.void(b"ab"), np.void(b"ac"), "(bytes 6162), expected"),
        (np.ones(1, [("a", ">i2")]), np.zeros(1, [("a", ">i2")]), "(bytes 0100), expected"),
    ],
)  # fmt: skip
def test_the_message_names_the_first_difference_and_its_bits(actual, expected, text):
    """With the index, both values, and digits in the order in which one writes them."""
    assert text in _differs(actual, expected)


def test_the_message_counts_the_differences():
    """Out of all elements, with the first in C order of any layout."""
    x = np.zeros((3, 4), order="F")
    other = x.copy()
    other[2, 0] = other[0, 3] = 1
    assert "2 of 12 elements differ, first at index (0, 3)" in _differs(x, other)


@pytest.mark.parametrize("dtype", OWNING_DTYPES, ids=repr)
@pytest.mark.parametrize("function", [digest, lambda x: assert_same_bits(x, x)], ids=["digest", "assert_same_bits"])
def test_elements_that_lie_elsewhere_are_an_error(function, dtype):
    """Rule, dtype received and cure."""
    expected = f"takes arrays whose elements are bits, got dtype {dtype}, whose elements lie elsewhere; convert it"
    with pytest.raises(UnsupportedDTypeError, match=re.escape(expected)):
        function(np.zeros(2, dtype))


def test_arrays_that_carry_more_than_values_are_an_error():
    """A mask would be dropped unseen."""
    with pytest.raises(UnsupportedArrayError, match="digest takes plain arrays"):
        digest(np.ma.array([1.0]))


def test_subclasses_without_more_are_arrays(tmp_path):
    """Matrices and mapped files are compared by their values."""
    x = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    for each in (x.view(np.matrix), np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert_same_bits(each, x)
        assert digest(each) == digest(x)


def test_digests_are_what_they_were():
    """A change would make every digest that users keep wrong."""
    values = np.array([1.0, -0.0, np.nan, np.inf])
    assert digest(values) == "fb07423b388bc556a79495e481a250f7e5716de984187b0ea6f7088e47b1b74c"
    bits = struct.pack("<4Q", 0x3FF0 << 48, 1 << 63, 0x7FF8 << 48, 0x7FF0 << 48)
    assert digest(values) == hashlib.sha256(b"float64 (4,)\n" + bits).hexdigest()
    assert digest(values.astype(np.complex64)) == "e304d64eea607b4e6c26458878b0b54de0aa28e1ee2c9ccd5af8d6cb533a02c8"
    assert digest(np.array(["a", "bc"])) == "60e1e716f50727428f2ccafc4acb8471762c265c8c706ed97a68004b4da4ab7c"
    record = np.zeros(2, np.dtype([("a", "i1"), ("b", [("c", ">f4", (2, 3))])], align=True))
    assert digest(record) == "051b32ed9f0ffd1bb88f38bdf8b5004d8cc09110821162cac31859a26b3a0299"
    assert digest(np.array("2020-02-02", "M8[D]")) == "7efb09747f11cef0ec768db5c3f0e8650caf08fb28779658e053d435e1bf707d"
    assert (
        digest(values.astype(ml_dtypes.bfloat16)) == "daeea9e408f1c87b0f994b31518ae1556b6f4c3c4f9a5e368e6a1bbc2a86c6af"
    )


@pytest.mark.process
def test_importing_loads_no_compiler_and_no_pytest():
    """What a test imports costs no more than the package."""
    source = """
        import sys
        import accel_ops
        before = set(sys.modules)
        import accel_ops.testing
        new = set(sys.modules) - before - set(sys.stdlib_module_names) - {"_hashlib", "_blake2"}
        assert new == {"accel_ops.testing"}, new
        assert not {"numba", "llvmlite", "pytest"} & set(sys.modules)
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"
