"""Products against NumPy's: shapes, dtypes, scalars, outputs, errors and values within the bound of their rounding.

Values are small integers wherever results are compared exactly: every sum of them is exact in any order.
"""

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from arrays import (
    WRITABLE_LAYOUTS,
    assert_same_bits,
    assert_same_values,
    frozen,
    laid_out,
    layouts,
    outcome,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops.cpu import matrix_products

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(code) for code in ("f2", "f4", "f8", "F", "D")]
DTYPES = [*FLOATS, *(np.dtype(code) for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"))]


# NumPy has these from 2.2 on; here they follow from its matmul.
def _matvec(a, b, **options):
    a, b = np.asanyarray(a), np.asanyarray(b)
    if a.ndim < 2 or b.ndim < 1:
        raise ValueError
    out = options.pop("out", None)
    if out is not None:
        np.matmul(a, b[..., np.newaxis], out=out[..., np.newaxis], **options)
        return out
    return np.matmul(a, b[..., np.newaxis], **options)[..., 0]


def _vecmat(a, b, **options):
    a, b = np.asanyarray(a), np.asanyarray(b)
    if a.ndim < 1 or b.ndim < 2:
        raise ValueError
    out = options.pop("out", None)
    if out is not None:
        np.matmul(a.conj()[..., np.newaxis, :], b, out=out[..., np.newaxis, :], **options)
        return out
    return np.matmul(a.conj()[..., np.newaxis, :], b, **options)[..., 0, :]


NUMPYS = {
    "matmul": np.matmul,
    "matvec": getattr(np, "matvec", _matvec),
    "vecmat": getattr(np, "vecmat", _vecmat),
    "vecdot": np.vecdot,
    "dot": np.dot,
    "inner": np.inner,
    "outer": np.outer,
    "tensordot": np.tensordot,
}
UFUNCS = ("matmul", "matvec", "vecmat", "vecdot")
OURS = {name: getattr(ops, name) for name in NUMPYS}
of_every_name = pytest.mark.parametrize("name", list(NUMPYS))
of_every_ufunc = pytest.mark.parametrize("name", UFUNCS)


def small_integers(shape, dtype, seed=0):
    """Return a new array of a few small whole numbers, of which 60 products add to what bfloat16 holds exactly."""
    rng = np.random.default_rng([seed, *shape])
    low = 0 if dtype.kind in "bu" else -2
    values = rng.integers(low, 3, math.prod(shape)).reshape(shape)
    if dtype.kind == "c":
        return np.asarray(values + 1j * rng.integers(-2, 3, shape), dtype)
    return values.astype(dtype)


def _positive_zeros(x):
    """Return a result with +0.0 for -0.0: the sign of a sum of zeros is one that NumPy does not define."""
    if x.dtype.kind not in "fc":
        return x
    if not isinstance(x, np.ndarray):
        return x + x.dtype.type(0)
    result = x.copy()
    result += 0
    return result


def assert_same_outcome(ours, numpys):
    """Fail unless a call returns what NumPy's returns, or raises the same builtin error (or a finer one)."""
    expected, wanted_error, allowed = outcome(numpys)
    actual, error, warned = outcome(ours)
    assert warned <= allowed  # such as a ComplexWarning
    if wanted_error is None or error is None:
        assert error is wanted_error, f"{error} was raised, not {wanted_error}"
        assert_same_values(actual, expected)
    else:
        wanted = next(each for each in wanted_error.__mro__ if each.__module__ == "builtins")
        # Too few dimensions for tensordot are an IndexError of NumPy's, by accident.
        assert issubclass(error, ValueError if wanted is IndexError else wanted), f"{error}, not {wanted_error}"


# --- strategies

_lengths = st.integers(0, 5) | st.sampled_from([8, 17, 33])


def _stacks(draw):
    """Draw leading dimensions of two operands that broadcast."""
    whole = draw(st.lists(st.integers(0, 3), max_size=3))
    return tuple(
        tuple(1 if draw(st.integers(0, 3)) == 0 else length for length in whole[draw(st.integers(0, len(whole))) :])
        for _ in range(2)
    )


@st.composite
def shape_pairs(draw, name):
    """Shapes of two operands that fit together, and further arguments."""
    m, k, n = draw(_lengths), draw(_lengths), draw(_lengths)
    first, second = _stacks(draw)
    if name == "matmul":
        a = (k,) if draw(st.integers(0, 4)) == 0 else (*first, m, k)
        b = (k,) if draw(st.integers(0, 4)) == 0 else (*second, k, n)
        return a, b, {}
    if name == "matvec":
        return (*first, m, k), (*second, k), {}
    if name == "vecmat":
        return (*first, k), (*second, k, n), {}
    if name == "vecdot":
        a, b, axis = [*first], [*second], draw(st.integers(-1 - min(len(first), len(second)), -1))
        for shape in (a, b):
            shape.insert(len(shape) + 1 + axis, k)
        return tuple(a), tuple(b), {"axis": axis} if axis != -1 or draw(st.booleans()) else {}
    if name == "dot":
        kind = draw(st.sampled_from(["scalar", "vectors", "any"]))
        if kind == "scalar":
            pair = [(), (*first, m)]
            return (*draw(st.permutations(pair)), {})
        return ((*first[:1], k), (k,), {}) if kind == "vectors" else ((*first[:2], k), (*second[:1], k, n), {})
    if name == "inner":
        return (*first, k), (*second[:1], k), {}
    if name == "outer":
        return first, (*second, n), {}
    n_axes = draw(st.integers(0, 2))
    summed = [draw(st.integers(1, 4)) for _ in range(n_axes)]
    if draw(st.booleans()):
        return (*first[:2], *summed), (*summed, *second[:2]), {"axes": n_axes}
    a, b = [*first[:1], *summed], [*second[:1], *summed]
    places = [draw(st.permutations(range(len(shape)))) for shape in (a, b)]
    shapes = [tuple(shape[p] for p in order) for shape, order in zip((a, b), places, strict=True)]
    axes = tuple(
        [
            order.index(len(shape) - n_axes + number) - (len(shape) if draw(st.booleans()) else 0)
            for number in range(n_axes)
        ]
        for shape, order in zip((a, b), places, strict=True)
    )
    return (*shapes, {"axes": axes})


# --- results


@of_every_name
@given(data=st.data(), layout_of_a=layouts, layout_of_b=layouts, seed=seeds)
def test_results_are_numpys(name, data, layout_of_a, layout_of_b, seed):
    """Class, shape, dtype and values, for every pair of dtypes, with 1-d, empty and broadcast operands."""
    shape_of_a, shape_of_b, options = data.draw(shape_pairs(name))
    dtype = data.draw(st.sampled_from(DTYPES))
    other = data.draw(st.sampled_from([dtype, dtype, *DTYPES]))
    a = frozen(laid_out(small_integers(shape_of_a, dtype, seed), layout_of_a))
    b = frozen(laid_out(small_integers(shape_of_b, other, seed + 1), layout_of_b))
    before = a.tobytes(), b.tobytes()
    expected = NUMPYS[name](a, b, **options)
    with ops.threads(data.draw(st.sampled_from([1, 3]))):
        actual = OURS[name](a, b, **options)
    assert_same_bits(actual, _positive_zeros(expected))
    assert (a.tobytes(), b.tobytes()) == before


@of_every_name
@given(data=st.data(), seed=seeds)
def test_bfloat16_is_multiplied_as_float32(name, data, seed):
    """The result is bfloat16 again; where all is exact it is the one of float32."""
    shape_of_a, shape_of_b, options = data.draw(shape_pairs(name))
    a, b = (small_integers(shape, np.dtype("f4"), seed) for shape in (shape_of_a, shape_of_b))
    expected = _positive_zeros(NUMPYS[name](a, b, **options))
    actual = OURS[name](a.astype(BFLOAT16), b.astype(BFLOAT16), **options)
    assert actual.dtype == BFLOAT16
    assert_same_bits(np.asarray(actual), np.asarray(expected).astype(BFLOAT16))
    assert isinstance(actual, np.ndarray if isinstance(expected, np.ndarray) else ml_dtypes.bfloat16)


@of_every_name
@given(data=st.data(), seed=seeds)
def test_shapes_that_do_not_fit_are_refused_where_numpy_refuses_them(name, data, seed):
    """With a ValueError; what NumPy takes is taken."""
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    a, b = (small_integers(data.draw(shapes), np.dtype("f8"), seed) for _ in range(2))
    assert_same_outcome(lambda: OURS[name](a, b), lambda: _positive_zeros(NUMPYS[name](a, b)))


@of_every_name
def test_a_result_is_a_new_writable_array(name):
    """Of plain C order, that shares memory with no operand."""
    a, b = frozen(np.ones((4, 4))), frozen(np.ones((4, 4)))
    result = OURS[name](a, b, 1) if name == "tensordot" else OURS[name](a, b)
    assert type(result) is np.ndarray
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert not np.may_share_memory(result, a)


@pytest.mark.parametrize("dtype", [*DTYPES, BFLOAT16], ids=str)
def test_products_of_vectors_are_scalars(dtype):
    """NumPy's scalars, no 0-d arrays."""
    x = np.ones(3, dtype)
    total = x[0] if dtype.kind == "b" else dtype.type(3)
    for function in (ops.matmul, ops.vecdot, ops.dot, ops.inner):
        assert type(function(x, x)) is type(x[0])
        assert function(x, x) == total
    for function in (ops.dot, ops.inner):
        assert type(function(x[0], x[0])) is type(x[0])
        assert function(x[0], x[0]) == x[0]


@pytest.mark.parametrize("name", ["matmul", "vecdot", "dot", "inner"])
def test_array_likes_are_taken(name):
    """Lists, tuples, Python numbers within, and what has __array__."""

    class Wrapped:
        def __array__(self, dtype=None, copy=None):
            return np.array([1.0, 2.0])

    for x, y in [([1, 2], [3, 4]), ((1.5, 2), [3, 4j]), ([True, False], [True, True]), (Wrapped(), [3, 4])]:
        assert_same_bits(OURS[name](x, y), NUMPYS[name](np.asarray(x), np.asarray(y)))
    assert_same_bits(ops.matmul([[1, 2], [3, 4]], [[1], [1]]), np.array([[3], [7]]))
    assert_same_bits(ops.dot(2, [1.5, 2.5]), np.array([3.0, 5.0]))
    assert_same_bits(ops.dot(np.ones(2, "f4"), 2), np.dot(np.ones(2, "f4"), 2))


def test_what_only_exports_dlpack_is_taken():
    """Without a copy, where it lies in host memory."""

    class Exporting:
        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **options):
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    x = np.arange(6.0).reshape(2, 3)
    assert_same_bits(ops.matmul(Exporting(x), Exporting(x.T)), np.matmul(x, x.T))


@of_every_name
@pytest.mark.parametrize("code", ["f2", "f4", "f8", "F", "D", "i2", "u4", "i8"])
def test_byte_order_does_not_matter(name, code):
    """Results are in native order."""
    a, b = small_integers((4, 4), np.dtype(code)), small_integers((4, 4), np.dtype(code), 1)
    expected = OURS[name](a, b)
    swapped = np.dtype(code).newbyteorder()
    for left, right in [(a.astype(swapped), b), (a, b.astype(swapped)), (a.astype(swapped), b.astype(swapped))]:
        assert_same_bits(OURS[name](left, right), expected)


def test_bfloat16_of_another_byte_order_is_taken():
    """As every other dtype is."""
    swapped = BFLOAT16.newbyteorder()
    a = np.arange(6).astype(BFLOAT16).reshape(2, 3)
    assert_same_bits(ops.matmul(a.astype(swapped), a.T.astype(swapped)), ops.matmul(a, a.T))


def test_results_are_kept_apart():
    """A result is its caller's: the next call does not write there."""
    results = [ops.matmul(np.full((40, 40), value), np.eye(40)) for value in range(6)]
    for value, result in enumerate(results):
        assert (result == value).all()


@of_every_name
def test_truth_values_that_are_not_0_or_1_are_true(name):
    """A byte of another library's mask may be any: NumPy takes all but 0 for true."""
    a = np.array([[2, 0], [0, 4]], np.uint8).view(bool)
    b = np.array([[1, 8], [16, 0]], np.uint8).view(bool)
    plain = np.array([[True, False], [False, True]]), np.array([[True, True], [True, False]])
    assert OURS[name](a, b).tolist() == NUMPYS[name](*plain).tolist()


# --- values


def _bound(a, b):
    """Return how far rounding may carry a product of matrices from the exact one."""
    part = np.dtype(f"f{a.dtype.itemsize // 2}") if a.dtype.kind == "c" else a.dtype
    wide = np.abs(a).astype("g"), np.abs(b).astype("g")
    info = ml_dtypes.finfo(part)
    n_terms, eps = max(a.shape[-1], 1), float(info.eps)
    accumulated = float(np.finfo(np.float32).eps) if part.itemsize == 2 else eps
    product = np.matmul(*wide)
    bound = (2 if a.dtype.kind == "c" else 1) * n_terms * accumulated * product
    return bound + (eps * product if part.itemsize == 2 else 0) + float(info.tiny)


@pytest.mark.parametrize("dtype", [*FLOATS, BFLOAT16], ids=str)
@given(m=st.integers(1, 40), k=st.integers(0, 700), n=st.integers(1, 40), seed=seeds)
def test_values_are_within_the_bound_of_rounding(dtype, m, k, n, seed):
    """n eps |a||b| around a product in extended precision. So are NumPy's own, within a bound of their own."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if dtype.kind == "c":
        a, b = a + 1j * rng.standard_normal((m, k)), b + 1j * rng.standard_normal((k, n))
    a, b = a.astype(dtype), b.astype(dtype)
    widest = "G" if dtype.kind == "c" else "g"
    exact, bound = np.matmul(a.astype(widest), b.astype(widest)), _bound(a, b)
    actual = ops.matmul(a, b)
    assert (np.abs(actual.astype(widest) - exact) <= bound).all()
    if dtype.itemsize > 2:
        assert (np.abs(actual - np.matmul(a, b)) <= 2 * bound).all()


@of_every_name
def test_no_floating_point_error_is_reported(name):
    """Overflow, invalid operations and underflow give inf, NaN and 0 without a warning, under any errstate."""
    for dtype in ("f2", "f4", "f8", "F", "D", BFLOAT16):
        large = np.full((2, 2), float(ml_dtypes.finfo(np.dtype(dtype).type(0).real.dtype).max)).astype(dtype)
        with np.errstate(all="raise"):
            product = OURS[name](large, large, **({"axes": 1} if name == "tensordot" else {}))
            infinite = OURS[name](np.full((2, 2), np.inf).astype(dtype), np.zeros((2, 2), dtype))
            tiny = OURS[name](*[np.full((2, 2), float(ml_dtypes.finfo(np.float16).tiny)).astype(dtype)] * 2)
        assert not np.isfinite(product).any()
        assert np.isnan(infinite).all()
        assert np.isfinite(tiny).all()


def test_products_of_one_term_are_multiplications_apart_from_negative_zero():
    """The chain begins with +0.0, so -0.0 becomes that; NumPy's outer keeps it."""
    x, y = np.array([-1.0, 0.0, 3.5, np.inf, 1e-320]), np.array([2.0, -0.0, 0.1, 1e300])
    with np.errstate(all="ignore"):
        expected = np.outer(x, y)
    assert np.signbit(expected[1, 1])
    assert np.signbit(expected[2, 1])
    got = ops.outer(x, y)
    np.testing.assert_array_equal(got, expected)
    assert not np.signbit(got[got == 0]).any()


# --- outputs


@of_every_ufunc
@given(data=st.data(), layout=st.sampled_from(WRITABLE_LAYOUTS), seed=seeds)
def test_out_of_any_layout_and_dtype_is_filled_and_returned(name, data, layout, seed):
    """Where the cast to it is allowed; else nothing is written and it is the TypeError that NumPy raises."""
    shape_of_a, shape_of_b, options = data.draw(shape_pairs(name))
    dtype, target = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([*DTYPES, np.dtype(">f8")]))
    casting = data.draw(st.sampled_from(["same_kind", "unsafe", "safe", "no", "equiv"]))
    a, b = (small_integers(shape, dtype, seed) for shape in (shape_of_a, shape_of_b))
    shape = NUMPYS[name](a, b, **options).shape
    outs = [laid_out(np.full(shape, 1, target), layout) for _ in range(2)]

    def call(functions, out):
        result = functions[name](a, b, out=out, casting=casting, **options)
        assert result is out
        return _positive_zeros(np.array(out))

    with np.errstate(all="ignore"):
        assert_same_outcome(lambda: call(OURS, outs[0]), lambda: call(NUMPYS, outs[1]))


@pytest.mark.parametrize("dtype", [*FLOATS, BFLOAT16, np.dtype("i4")], ids=str)
@pytest.mark.parametrize("n", [3, 40, 300])
def test_out_may_overlap_operands(dtype, n):
    """The result is as if the operands had been copied first: NumPy's, not garbage."""
    a, b = small_integers((n, n), dtype, 1), small_integers((n, n), dtype, 2)
    expected = ops.matmul(a, b)
    for left, right, out in [
        (lambda w: w[:n, :n], lambda w: b, lambda w: w[:n, :n]),
        (lambda w: a, lambda w: w[:n, n:], lambda w: w[:n, n:]),
        (lambda w: w[:n, :n], lambda w: w[:n, n:], lambda w: w[:n, 1 : n + 1]),
        (lambda w: w[:n, :n], lambda w: w[:n, n:], lambda w: w[1:, :n]),
        (lambda w: w[:n, :n], lambda w: w[:n, n:], lambda w: w[:n, :n].T),
        (lambda w: w[:n, :n], lambda w: w[:n, n:], lambda w: w[::-1, ::-1][:n, :n]),
    ]:
        memory = np.zeros((n + 1, 2 * n), dtype)
        memory[:n, :n], memory[:n, n:] = a, b
        target = out(memory)
        assert ops.matmul(left(memory), right(memory), out=target) is target
        assert_same_bits(np.array(target), expected)
    square = a.copy()
    ops.matmul(square, square, out=square)
    assert_same_bits(square, ops.matmul(a, a))
    x = a[0].copy()
    ops.matvec(a, x, out=x)
    assert_same_bits(x, ops.matvec(a, a[0].copy()))


def test_out_may_add_dimensions_of_the_stack():
    """The operands are broadcast to it, as NumPy does."""
    a, b = np.arange(4.0).reshape(2, 2), np.arange(12.0).reshape(3, 2, 2)
    for left, right, shape in [(a, a, (3, 2, 2)), (a, b, (4, 3, 2, 2)), (a[np.newaxis], b[:1], (2, 2, 2))]:
        outs = np.empty(shape), np.empty(shape)
        ops.matmul(left, right, out=outs[0])
        np.matmul(left, right, out=outs[1])
        assert_same_bits(*outs)


@of_every_ufunc
def test_wrong_outputs_are_refused(name):
    """Read-only, of the wrong shape or no array: the message says what it must be, and nothing is written."""
    a = b = np.ones((3, 3))
    shape = NUMPYS[name](a, b).shape
    read_only = frozen(np.zeros(shape))
    with pytest.raises(ValueError, match=rf"`out` of {name} must be writable, got a read-only array; pass"):
        OURS[name](a, b, out=read_only)
    assert not read_only.any()
    for wrong in [(*shape[:-1], shape[-1] + 1), (), shape[1:], (2, *shape[:-1], 1)]:
        if wrong == shape:
            continue
        with pytest.raises(ops.ShapeMismatchError):
            OURS[name](a, b, out=np.zeros(wrong))
    with pytest.raises(TypeError, match=rf"`out` of {name} must be an ndarray, got list; allocate"):
        OURS[name](a, b, out=[[0.0] * 3] * 3)
    with pytest.raises(TypeError, match=rf"cannot cast the result of {name} from float64 to int64"):
        OURS[name](a, b, out=np.zeros(shape, np.int64))


def test_the_output_of_a_scalar_is_a_0d_array():
    """It is filled and returned."""
    for name in ("matmul", "vecdot", "dot"):
        out = np.zeros(())
        assert OURS[name](np.arange(4.0), np.arange(4.0), out=out) is out
        assert out == 14


def test_the_output_of_dot_must_be_just_right():
    """C order, shape and dtype, as NumPy demands."""
    a = np.arange(6.0).reshape(2, 3)
    out = np.empty((2, 2))
    assert ops.dot(a, a.T, out) is out
    assert_same_bits(out, np.dot(a, a.T))
    for wrong in (np.empty((2, 2), "f4"), np.empty((2, 2), order="F"), np.empty((2, 3)), np.empty(4), frozen(out)):
        with pytest.raises(ValueError, match="`out` of dot must be"):
            ops.dot(a, a.T, wrong)
    operand = np.arange(4.0).reshape(2, 2)
    ops.dot(operand, operand, operand)
    assert operand.tolist() == [[2, 3], [6, 11]]


def test_the_output_of_outer_is_filled():
    """Of any layout and of a dtype that the result may be cast to."""
    x, y = np.arange(3.0), np.arange(4.0)
    for out in (np.empty((3, 4)), np.empty((4, 3)).T, np.empty((3, 4), "f4"), np.empty((6, 8))[::2, ::-2]):
        assert ops.outer(x, y, out) is out
        np.testing.assert_array_equal(out, np.outer(x, y))


# --- dtype= and casting=


@of_every_ufunc
@pytest.mark.parametrize("casting", ["same_kind", "unsafe", "safe", "no", "equiv"])
@pytest.mark.parametrize("wanted", ["f2", "f4", "f8", "D", "i4", "u1", "?"])
@pytest.mark.parametrize("given_dtypes", ["f8 f8", "f4 f8", "i4 i4", "i4 f4", "? ?", "u8 i8", "f2 i1"])
def test_dtype_and_casting_are_numpys(name, casting, wanted, given_dtypes):
    """The operands are converted first, where casting= allows that."""
    a, b = (small_integers((4, 4), np.dtype(code)) for code in given_dtypes.split())
    assert_same_outcome(
        lambda: OURS[name](a, b, dtype=wanted, casting=casting),
        lambda: _positive_zeros(NUMPYS[name](a, b, dtype=wanted, casting=casting)),
    )


@of_every_ufunc
def test_a_dtype_of_another_byte_order_gives_right_values_or_an_error(name):
    """NumPy refuses it; garbage is no answer."""
    a = np.arange(16.0).reshape(4, 4)
    result, error, _ = outcome(lambda: OURS[name](a, a, dtype=np.dtype("f8").newbyteorder()))
    if error is None:
        np.testing.assert_array_equal(result, OURS[name](a, a))
    else:
        assert issubclass(error, TypeError)


@of_every_ufunc
def test_casting_must_be_one_of_numpys_rules(name):
    """Anything else is an error that lists them."""
    with pytest.raises(ValueError, match=r"`casting` must be one of .*, got 'maybe'"):
        OURS[name](np.ones((2, 2)), np.ones((2, 2)), casting="maybe")
    with pytest.raises(TypeError, match=r"`casting` must be one of"):
        OURS[name](np.ones((2, 2)), np.ones((2, 2)), casting=None)


# --- errors


@of_every_name
@pytest.mark.parametrize("code", ["O", "g", "G", "U1", "S1", "M8[s]", "m8[s]", "V4", "float8_e5m2", "int4"])
def test_other_dtypes_are_type_errors(name, code):
    """None of them has a kernel, and none is converted in silence."""
    x = np.zeros((2, 2), code)
    with pytest.raises(ops.UnsupportedDTypeError, match=rf"{name} takes booleans, integers, float16, .* convert"):
        OURS[name](x, x)
    if code not in ("float8_e5m2", "int4"):  # which have a common dtype with others that has a kernel
        with pytest.raises(TypeError):
            OURS[name](x, np.ones((2, 2)))
        with pytest.raises(TypeError):
            OURS[name](np.ones((2, 2), "i4"), x)
    records = np.zeros((2, 2), [("a", "f8")])
    with pytest.raises(ops.UnsupportedDTypeError):
        OURS[name](records, records)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("matmul", [(2, 3), (2, 3)], r"lengths that matmul sums over must be equal, got 3 and 2 for shapes \(2, 3\)"),
        ("matmul", [(3,), (2,)], r"lengths that matmul sums over must be equal, got 3 and 2"),
        ("matmul", [(2, 3, 3), (4, 3, 3)], r"leading dimensions of matmul must broadcast, got shapes \(2, 3, 3\) and"),
        ("matmul", [(), (2,)], r"matmul takes arrays of 1 dimension or more, got shapes \(\) and \(2,\); use"),
        ("matvec", [(2, 3), (2,)], r"lengths that matvec sums over must be equal, got 3 and 2"),
        ("matvec", [(2,), (2,)], r"matvec takes arrays of at least 2 and 1 dimensions, got shapes \(2,\) and \(2,\)"),
        ("matvec", [(2, 2), ()], r"matvec takes arrays of at least 2 and 1 dimensions"),
        ("vecmat", [(2,), (3, 2)], r"lengths that vecmat sums over must be equal, got 2 and 3"),
        ("vecmat", [(2,), (2,)], r"vecmat takes arrays of at least 1 and 2 dimensions"),
        ("vecdot", [(2,), (3,)], r"lengths that vecdot sums over must be equal, got 2 and 3"),
        ("vecdot", [(), ()], r"vecdot takes arrays of at least 1 and 1 dimensions"),
        ("vecdot", [(2, 3), (3, 3)], r"leading dimensions of vecdot must broadcast, got shapes \(2, 3\) and \(3, 3\)"),
        (
            "dot",
            [(2, 3), (2, 3)],
            r"axes that dot sums over must have equal lengths, got axes \(1,\) of shape \(2, 3\)",
        ),
        ("inner", [(2, 3), (2, 2)], r"axes that inner sums over must have equal lengths"),
        ("tensordot", [(2, 3), (3, 2)], r"axes that tensordot sums over must have equal lengths"),
        ("tensordot", [(2,), (2, 3)], r"`axes` of tensordot must be from 0 to 1 for 1-d and 2-d arrays, got 2"),
    ],
)
def test_messages_say_what_was_received_and_what_to_do(name, shapes, message):
    """Every one is a ShapeMismatchError, which is a ValueError."""
    with pytest.raises(ops.ShapeMismatchError, match=message) as caught:
        OURS[name](*(np.ones(shape) for shape in shapes))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("shapes", "axis"), [(((2, 3), (2, 3)), 2), (((2, 3), (3,)), 1), (((3,), (2, 3)), -2)], ids=str
)
def test_an_axis_out_of_range_is_an_axis_error(shapes, axis):
    """For either operand, as for NumPy."""
    for functions in (OURS, NUMPYS):
        with pytest.raises(np.exceptions.AxisError):
            functions["vecdot"](*(np.ones(shape) for shape in shapes), axis=axis)


@pytest.mark.parametrize("axis", [1.0, None, "0"])
def test_an_axis_is_an_integer(axis):
    """What is none is a TypeError, as for NumPy."""
    with pytest.raises(TypeError):
        ops.vecdot(np.ones((2, 2)), np.ones((2, 2)), axis=axis)


@pytest.mark.parametrize(
    "axes",
    [0, 1, 2, (1, 0), ([1], [0]), ([0, 1], [1, 0]), ([-1], [-2]), ([], []), np.array([[1], [0]]), ((1,), 0), True],
    ids=str,
)
def test_axes_of_tensordot_are_taken_in_every_form(axes):
    """A number, or two numbers, lists, tuples or rows of an array."""
    a, b = np.arange(9.0).reshape(3, 3), np.arange(9.0)[::-1].reshape(3, 3)
    assert_same_bits(ops.tensordot(a, b, axes), np.tensordot(a, b, axes))


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        (3, ValueError),
        (([2], [0]), IndexError),
        (([0, 0], [0, 1]), ValueError),
        (([0, 1], [0]), ValueError),
        (([0], [0], [0]), ValueError),
        (1.0, TypeError),
    ],
    ids=str,
)
def test_wrong_axes_of_tensordot_are_refused(axes, error):
    """An axis out of range is an AxisError, which is a ValueError and an IndexError."""
    with pytest.raises(error):
        ops.tensordot(np.ones((2, 2)), np.ones((2, 2)), axes)


@of_every_name
def test_masked_arrays_are_refused(name):
    """Their masks would be lost; so would be what any array with an __array_function__ of its own carries."""

    class Carrying(np.ndarray):
        def __array_function__(self, function, types, args, kwargs):
            raise AssertionError

    for carrying in (np.ma.array(np.ones((2, 2))), np.ones((2, 2)).view(Carrying)):
        for pair in [(carrying, np.ones((2, 2))), (np.ones((2, 2)), carrying)]:
            with pytest.raises(ops.UnsupportedArrayError, match=rf"{name} takes plain arrays, got"):
                OURS[name](*pair)


@of_every_name
def test_what_numpy_cannot_make_an_array_of_is_its_error(name):
    """Ragged lists are a ValueError, None is refused."""
    with pytest.raises(ValueError, match="inhomogeneous"):
        OURS[name]([[1, 2], [3]], [[1, 2], [3, 4]])
    with pytest.raises((TypeError, ValueError)):
        OURS[name](None, None)


# --- subclasses


@pytest.mark.parametrize("name", [name for name in NUMPYS if name not in ("outer", "tensordot")])
def test_a_product_of_matrices_is_a_matrix(name):
    """np.matrix, always of two dimensions, wherever NumPy makes one."""
    a, b, x = np.arange(9.0).reshape(3, 3).view(np.matrix), np.eye(3), np.arange(3.0)
    for pair in [(a, a), (a, b), (b, a), (a, x), (x, a)]:
        if (name == "matvec" and pair[0] is x) or (name == "vecmat" and pair[1] is x):
            continue
        assert_same_bits(OURS[name](*pair), NUMPYS[name](*pair))


@pytest.mark.parametrize("name", ["outer", "tensordot"])
def test_outer_and_tensordot_of_matrices_have_numpys_values(name):
    """Arrays of any kind are taken for their values."""
    a = np.arange(9.0).reshape(3, 3).view(np.matrix)
    np.testing.assert_array_equal(np.asarray(OURS[name](a, a)).ravel(), np.asarray(NUMPYS[name](a, a)).ravel())


def test_memory_mapped_operands_are_plain(tmp_path):
    """np.memmap carries nothing that could be lost."""
    x = np.memmap(tmp_path / "x", np.float64, "w+", shape=(3, 3))
    x[...] = np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(ops.matmul(x, x), np.matmul(np.array(x), np.array(x)))


# --- empty


@of_every_name
@pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype("D"), np.dtype("f2"), BFLOAT16, np.dtype("i2")], ids=str)
def test_no_terms_give_zero(name, dtype):
    """A product over nothing is +0.0, and an output of no elements has NumPy's shape."""
    shapes = {
        "matmul": [((2, 0), (0, 3)), ((0, 4), (4, 3)), ((3, 2, 0), (0, 1)), ((0,), (0,)), ((0, 2, 2), (2, 2))],
        "matvec": [((2, 0), (0,)), ((0, 3), (3,)), ((0, 2, 2), (2,))],
        "vecmat": [((0,), (0, 2)), ((3,), (3, 0)), ((0, 2), (2, 2))],
        "vecdot": [((0,), (0,)), ((3, 0), (3, 0)), ((0, 3), (0, 3))],
        "dot": [((2, 0), (0, 3)), ((0,), (0,)), ((), (0,)), ((0, 3), (3, 2))],
        "inner": [((2, 0), (3, 0)), ((0,), (0,)), ((0, 2), (3, 2))],
        "outer": [((0,), (3,)), ((2,), (0,))],
        "tensordot": [((2, 0, 3), (0, 3, 4)), ((0, 2, 2), (2, 2)), ((2, 2), (2, 2, 0))],
    }
    for a, b in shapes[name]:
        expected = np.zeros(np.shape(NUMPYS[name](np.zeros(a), np.zeros(b))), dtype)
        result = OURS[name](np.ones(a, dtype), np.ones(b, dtype))
        assert_same_bits(np.asarray(result), expected)
    out = np.full((2, 3), 5).astype(dtype)
    ops.matmul(np.ones((2, 0), dtype), np.ones((0, 3), dtype), out=out)
    assert_same_bits(out, np.zeros((2, 3), dtype))


def test_a_handler_that_multiplies_while_memory_is_taken_leaves_it_valid(monkeypatch):
    """Each thread has one panel; a handler may come in between and take one too."""
    real = matrix_products.address
    monkeypatch.setattr(matrix_products, "_memory", threading.local())

    def interrupted(array):
        monkeypatch.setattr(matrix_products, "address", real)
        matrix_products.scratch()
        return real(array)

    monkeypatch.setattr(matrix_products, "address", interrupted)
    start = matrix_products.scratch()
    kept_at, memory = matrix_products._memory.panel
    assert start == kept_at == matrix_products.scratch()
    assert memory.ctypes.data <= start < memory.ctypes.data + memory.nbytes
