"""Casts on the way: NumPy's values, rules and floating-point warnings, whatever the thread's rounding mode."""

import contextlib
import ctypes
import platform
import warnings

import ml_dtypes
import numpy as np
import pytest
from arrays import (
    BYTE_DTYPES,
    DTYPES,
    LAYOUTS,
    assert_same_bits,
    assert_same_outcome,
    assert_same_values,
    budgets,
    filled,
    frozen,
    joins,
    laid_out,
    layouts,
    on_every_engine,
    outcome,
    running,
    seeds,
    shapes,
)
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops

RULES = ["no", "equiv", "safe", "same_kind", "unsafe"]
FLOATS = [np.dtype(code) for code in ("f2", "f4", ">f4", "f8", "bfloat16")]
TO_16_BITS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


# --- rules


@pytest.mark.parametrize("casting", RULES)
@pytest.mark.parametrize("to", [d for d in DTYPES if d.names is None], ids=str)
def test_which_casts_are_allowed_is_numpys_rule(casting, to):
    """For each pair of dtypes a cast is refused where NumPy refuses it, for arrays without elements too."""
    for dtype in DTYPES:
        if dtype.names is not None:
            continue
        array = np.empty((0,), dtype)
        expected, error, _ = outcome(lambda array=array: np.concatenate([array], dtype=to, casting=casting))
        actual, our_error, _ = outcome(lambda array=array: ops.concatenate([array], dtype=to, casting=casting))
        assert our_error is error, f"{dtype} to {to}: {our_error}, not {error}"
        assert error is not None or actual.dtype == expected.dtype, f"{dtype} to {to}: {actual.dtype}"


@pytest.mark.parametrize("casting", ["foo", "", "Safe"])
@pytest.mark.parametrize("dtype", [None, "f4", "f8"])
def test_an_unknown_rule_is_a_value_error(casting, dtype):
    """It is one even where no cast is needed, and the message lists the rules."""
    with pytest.raises(
        ValueError, match="`casting` must be one of 'no', 'equiv', 'safe', 'same_kind' or 'unsafe', got"
    ):
        ops.concatenate([np.ones(2)], dtype=dtype, casting=casting)


@pytest.mark.parametrize("casting", [3, None])
@pytest.mark.parametrize("dtype", [None, "f4"])
def test_a_rule_is_a_text(casting, dtype):
    """What is no text is a TypeError, as for NumPy."""
    with pytest.raises(TypeError):
        np.concatenate([np.ones(2)], dtype=dtype, casting=casting)
    with pytest.raises(TypeError, match="casting"):
        ops.concatenate([np.ones(2)], dtype=dtype, casting=casting)


def test_a_refused_cast_names_both_dtypes_and_the_cure():
    """Rule, values received, cure."""
    with pytest.raises(
        TypeError, match=r"from float64 to int32 under casting='same_kind'; convert .* another casting="
    ):
        ops.concatenate([np.ones(2)], dtype=np.int32)


@pytest.mark.parametrize("dtype", [("f8", (2,)), ("i4", 3)], ids=str)
def test_a_subarray_dtype_is_refused(dtype):
    """It cannot be the dtype of an array, which NumPy says with a TypeError."""
    with pytest.raises(TypeError):
        np.concatenate([np.zeros(4)], dtype=dtype)
    with pytest.raises(TypeError, match="dtype"):
        ops.concatenate([np.zeros(4)], dtype=dtype)


# --- values


@on_every_engine
@given(data=st.data(), budget=budgets)
def test_floats_are_cast_as_numpy_does(engine, data, budget):
    """Any bits of any floating-point dtype, mixed ones too, give NumPy's values and warnings."""
    arrays, axis = data.draw(joins(FLOATS, mixed=True))
    dtype = data.draw(st.sampled_from([*FLOATS, np.dtype(ml_dtypes.float8_e5m2), np.dtype("D")]))
    with running(engine, budget):
        assert_same_outcome(
            lambda: ops.concatenate(arrays, axis, dtype=dtype),
            lambda: np.concatenate(arrays, axis, dtype=dtype),
        )


SMALL_NUMBERS = [np.dtype(code) for code in ("?", "i1", "u2", ">i4", "u8", "f2", "f4", ">f8", "bfloat16", "F", "D")]


@on_every_engine
@given(shape=shapes(), layout=layouts, data=st.data(), budget=budgets)
def test_numbers_are_cast_as_numpy_does(engine, shape, layout, data, budget):
    """Between kinds under every rule: the same values, errors and warnings, that of a lost imaginary part too."""
    source, target = (
        data.draw(st.sampled_from(SMALL_NUMBERS)),
        data.draw(st.sampled_from([*SMALL_NUMBERS, "S9", "U9", "O"])),
    )
    values = np.random.default_rng(data.draw(seeds)).integers(0, 100, shape).astype(source)
    arrays = [frozen(laid_out(values, layout)), frozen(values)]
    casting = data.draw(st.sampled_from(RULES))
    expected, error, warned = outcome(lambda: np.concatenate(arrays, dtype=target, casting=casting))
    with running(engine, budget):
        actual, our_error, our_warned = outcome(lambda: ops.concatenate(arrays, dtype=target, casting=casting))
    assert our_error is error
    assert error is not None or our_warned == warned  # NumPy may have cast the arrays before the one that it refuses
    if error is None and actual.dtype != object:
        assert_same_values(actual, expected)
    elif error is None:
        assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("to", ["S", "U", "V", "S3", "M8", "M8[s]", "m8", np.dtypes.StringDType()], ids=str)
@pytest.mark.parametrize(
    "arrays",
    [
        [np.array(["abc", "d"]), np.array(["xyzuv"])],
        [np.array([b"abc"]), np.array([b"xyzuv"])],
        [np.array([12345]), np.array([7], "i1")],
        [np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-01T01"], "M8[h]")],
        [np.array([2], "m8[h]"), np.array([3], "m8[m]")],
    ],
    ids=["U", "S", "int", "M8", "m8"],
)
@pytest.mark.parametrize("casting", ["same_kind", "unsafe"])
def test_a_dtype_without_a_length_or_unit_is_completed(to, arrays, casting):
    """Lengths of strings and units of times that dtype= leaves open are found in the inputs, as NumPy finds them."""
    assert_same_outcome(
        lambda: ops.concatenate(arrays, dtype=to, casting=casting),
        lambda: np.concatenate(arrays, dtype=to, casting=casting),
    )


@pytest.mark.parametrize(
    "to", [np.dtypes.Float64DType, np.dtypes.StringDType, float, "float32", ">f4", np.float16, ">i8"], ids=str
)
def test_a_dtype_may_be_anything_that_names_one(to):
    """Classes, types, codes and byte orders other than the machine's."""
    arrays = [np.arange(3, dtype="i2")]
    assert_same_outcome(
        lambda: ops.concatenate(arrays, dtype=to, casting="unsafe"),
        lambda: np.concatenate(arrays, dtype=to, casting="unsafe"),
    )


@pytest.mark.parametrize("to", TO_16_BITS, ids=str)
@pytest.mark.parametrize("engine", ["tiny pieces", "tiny pieces streamed"])
def test_every_16_bit_boundary_is_rounded_to_even(to, engine):
    """Each 16-bit value, halfway to its neighbours, and one bit to each side of that: NumPy's values."""
    codes = np.arange(1 << 16, dtype=np.uint16).view(to)
    with np.errstate(all="ignore"):
        exact = codes.astype(np.float32)
        halves = exact.astype(np.float64) + np.diff(exact.astype(np.float64), append=0.0) / 2
        half = np.where(np.isfinite(halves), halves, 0).astype(np.float32)
        values = np.concatenate(
            [exact, half, np.nextafter(half, np.inf, dtype="f4"), np.nextafter(half, -np.inf, dtype="f4")]
        )
        expected = values.astype(to)
        with running(engine, 3):
            assert_same_values(ops.concatenate([values], dtype=to, casting="unsafe"), expected)


@pytest.mark.parametrize("to", TO_16_BITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(67,), (5, 33), (3, 65, 7)], ids=str)
@pytest.mark.parametrize("axis", [0, -1])
@on_every_engine
def test_casts_to_16_bits_take_any_layout(engine, to, layout, shape, axis):
    """An input of any layout, into a whole row or a part of one."""
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    arrays = [frozen(laid_out(x, layout)), frozen(-x)]
    expected = np.concatenate(arrays, axis, dtype=to, casting="unsafe")
    with running(engine, 3):
        assert_same_bits(ops.concatenate(arrays, axis, dtype=to, casting="unsafe"), expected)


@pytest.mark.parametrize("to", ["f2", "f4", "bfloat16"])
@pytest.mark.parametrize("source", ["f4", "f8"])
@on_every_engine
def test_casts_to_the_other_byte_order_are_swapped(engine, source, to):
    """No kernel takes a dtype for its namesake of the other byte order."""
    swapped = np.dtype(to).newbyteorder()
    x = np.random.default_rng(4).standard_normal((40, 50)).astype(source)
    expected = x.astype(to).view(f"u{swapped.itemsize}").byteswap()
    with running(engine, 2):
        result = ops.concatenate([x], dtype=swapped, casting="unsafe")
    assert result.dtype == swapped
    assert_same_bits(result.view(expected.dtype), expected)


@pytest.mark.parametrize("to", ["f4", "f2", "bfloat16", ">f8"])
@pytest.mark.parametrize("source", ["f8", "f4"])
@pytest.mark.parametrize("layout", ["C", "F", "sliced"])
def test_large_casts_are_right_as_shipped(source, to, layout):
    """Tens of megabytes, streamed past the caches or not."""
    x = laid_out(np.random.default_rng(1).standard_normal((2003, 1501)).astype(source), layout)
    expected = np.concatenate([x, x], dtype=to, casting="unsafe")
    with ops.threads(3):
        assert_same_bits(ops.concatenate([x, x], dtype=to, casting="unsafe"), expected.copy(order="C"))


def test_casts_leave_the_inputs_alone():
    """Inputs that are read-only and converted keep every bit."""
    x = frozen(filled((70, 33), np.dtype("f4")))
    before = x.tobytes()
    with running("tiny pieces"), np.errstate(all="ignore"):
        ops.concatenate([x, x.T[:, :33].copy()[:33]], dtype="f2")
    assert x.tobytes() == before


# --- floating-point errors

SPECIAL = {
    "exact": [1.0, -0.5, 0.0, -0.0, 65504.0, 2.0**-24, 2.0**-14],
    "rounded": [1.1, 65519.0, 0.1],
    "overflow": [65520.0],
    "overflow negative": [-1e30],
    "infinite": [np.inf, -np.inf],
    "nan": [np.nan],
    "underflow": [2.0**-24 * 1.25],
    "underflow to zero": [1e-30],
    "underflow of a subnormal": [1e-40],
    "rounded up to a normal": [np.float32(2.0**-14) * np.float32(1 - 2.0**-13)],
    "both": [1e30, 1e-30],
    "signalling nan": np.array([0x7F800001], np.uint32).view(np.float32),
}


@pytest.mark.parametrize("values", SPECIAL)
@pytest.mark.parametrize("action", ["ignore", "warn", "raise"])
@pytest.mark.parametrize("to", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("n", [1, 32, 77])
@pytest.mark.parametrize("budget", [1, 3])
@on_every_engine
def test_float32_casts_report_what_numpy_reports(engine, values, action, to, n, budget):
    """Overflow and underflow are ignored, warned of or raised as errstate says, on the kernel and without it."""
    x = np.ones(n, np.float32)
    x[-len(SPECIAL[values]) :] = SPECIAL[values][-n:]
    arrays = [x, np.zeros(5, np.float32)]
    with np.errstate(over=action, under=action, invalid=action), running(engine, budget):
        assert_same_outcome(lambda: ops.concatenate(arrays, dtype=to), lambda: np.concatenate(arrays, dtype=to))


@pytest.mark.parametrize("name", ["overflow", "underflow"])
def test_a_raised_floating_point_error_is_numpys(name):
    """FloatingPointError, with the text that NumPy gives it."""
    x = np.full(100, SPECIAL[name][0], np.float32)
    with running("tiny pieces", 3), np.errstate(over="raise", under="raise"):
        with pytest.raises(FloatingPointError, match=f"{name} encountered in cast"):
            np.concatenate([x], dtype="f2")
        with pytest.raises(FloatingPointError, match=f"{name} encountered in cast"):
            ops.concatenate([x], dtype="f2")


@pytest.mark.parametrize("source", ["f8", "f4", ">f4"])
@pytest.mark.parametrize("to", ["f2", "f4", "i2"])
@on_every_engine
def test_a_large_value_is_reported_whatever_the_dtypes(engine, source, to):
    """One value among many that the target cannot hold gives NumPy's warning."""
    x = np.ones((40, 50), source)
    x[31, 17] = 3e38
    with running(engine, 3):
        _, error, warned = outcome(lambda: ops.concatenate([x, x], dtype=to, casting="unsafe"))
        assert (error, warned) == outcome(lambda: np.concatenate([x, x], dtype=to, casting="unsafe"))[1:]


def test_a_warning_is_an_error_where_the_caller_wants_it_to_be():
    """The filter that makes warnings errors works for what a worker finds."""
    x = np.full(5000, 1e30, np.float32)
    with running("tiny pieces", 3), pytest.raises(RuntimeWarning, match="overflow encountered in cast"):
        ops.concatenate([x], dtype=np.float16)


# --- rounding modes

_LIBM = ctypes.CDLL(None)
_LIBM.fegetenv.argtypes = _LIBM.fesetenv.argtypes = [ctypes.c_void_p]
_IS_X86 = platform.machine() == "x86_64"
_DIRECTED = {"up": 0x800 if _IS_X86 else 0x400000, "down": 0x400 if _IS_X86 else 0x800000, "to zero": 0xC00}
# In fenv_t: MXCSR behind 28 bytes of x87 state, or FPCR first; and what makes subnormals zero there.
_CONTROL, _FLUSH = (28, 0x8040) if _IS_X86 else (0, 1 << 24)


@contextlib.contextmanager
def floating_point_mode(mode):
    """Put this thread into a rounding mode, or flush-to-zero, and take that back."""
    saved = ctypes.create_string_buffer(256)
    _LIBM.fegetenv(saved)
    changed = ctypes.create_string_buffer(saved.raw, 256)
    if mode == "flush to zero":
        control = ctypes.c_uint32.from_buffer(changed, _CONTROL)
        control.value |= _FLUSH
    try:
        if mode == "flush to zero":
            _LIBM.fesetenv(changed)
        else:
            _LIBM.fesetround(_DIRECTED[mode])
        yield
    finally:
        _LIBM.fesetenv(saved)


def mode_now():
    """The control bits of this thread's floating-point unit, without the flags that results leave."""
    environment = ctypes.create_string_buffer(256)
    _LIBM.fegetenv(environment)
    control = ctypes.c_uint32.from_buffer(environment, _CONTROL).value
    return control & ~0x3F if _IS_X86 else control, _LIBM.fegetround()


MODES = ["up", "down", "to zero", "flush to zero"]


def joined(x, to):
    return ops.concatenate([x, x], dtype=to)


def joined_over_itself(x, to):
    x = x.copy()
    memory = np.zeros(2 * len(x) * max(x.itemsize, np.dtype(to).itemsize), np.uint8)
    source = memory[: x.nbytes].view(x.dtype)
    source[...] = x
    out = memory[: 2 * len(x) * np.dtype(to).itemsize].view(to)
    return ops.concatenate([source, x], out=out)


def stacked(x, to):
    return ops.stack([x, x], dtype=to).reshape(-1)


def batched(x, to):
    with ops.batch([x.shape, x.shape], to) as batch:
        batch[0], batch[1] = x, x
    return batch.array


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "to"), [("f8", "f4"), ("f4", "f2"), ("f4", "bfloat16"), ("f8", "f2"), ("f4", "f8"), ("f2", "f4")]
)
@pytest.mark.parametrize("function", [joined, joined_over_itself, stacked, batched])
@pytest.mark.parametrize("budget", [1, 3])
@on_every_engine
def test_casts_round_to_nearest_whatever_the_threads_mode(engine, function, source, to, mode, budget):
    """The calling thread's rounding mode and flush-to-zero change no bit, and are back afterwards."""
    rng = np.random.default_rng(7)
    x = np.concatenate(
        [
            rng.standard_normal(500),
            rng.standard_normal(100) * 2.0**-14 * rng.random(100),
            rng.standard_normal(100) * 1e-39,
            rng.standard_normal(100) * 2.0**-126,
        ]
    )
    with np.errstate(all="ignore"):
        x = x.astype(source)
        expected = np.concatenate([x, x]).astype(to)
        with running(engine, budget):
            function(x, to)  # compiled in the default mode
            with floating_point_mode(mode):
                before = mode_now()
                result = function(x, to)
                after = mode_now()
    assert_same_values(result, expected)
    assert after == before


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_of_these_tests_do_change_results(mode):
    """Outside the library the mode that a test sets is felt."""
    tiny, third = np.full(64, 1e-310), np.full(64, 1 / 3)
    negative = -third
    nearest = [x.astype("f4").tobytes() for x in (third, negative)], (tiny * 1.5).tobytes()
    with floating_point_mode(mode):
        felt = [x.astype("f4").tobytes() for x in (third, negative)], (tiny * 1.5).tobytes()
    assert felt != nearest


def test_a_raised_error_gives_the_mode_back():
    """The caller's mode survives a FloatingPointError."""
    x = np.full(100, 1e30, np.float32)
    with running("tiny pieces", 2), floating_point_mode("up"):
        before = mode_now()
        with np.errstate(over="raise"):
            _, error, _ = outcome(lambda: ops.concatenate([x], dtype="f2"))
        after = mode_now()
    assert error is FloatingPointError
    assert after == before


@given(data=st.data())
def test_copies_keep_signalling_nans(data):
    """A copy without a cast moves bits, never values."""
    bits = data.draw(
        st.lists(st.sampled_from([0x7FA00001, 0xFFBFFFFF, 0x7F800001, 0x80000000, 1]), min_size=1, max_size=80)
    )
    x = np.array(bits, np.uint32).view(np.float32)
    for engine in ("as shipped", "tiny pieces", "tiny pieces streamed"):
        with running(engine):
            result = ops.concatenate([x, x[::-1]])
        assert result.view(np.uint32).tolist() == bits + bits[::-1]


def test_same_dtypes_need_no_cast():
    """dtype= of what the inputs have already changes nothing."""
    for dtype in BYTE_DTYPES:
        x = filled((9, 4), dtype)
        assert_same_outcome(
            lambda x=x, dtype=dtype: ops.concatenate([x, x], dtype=dtype),
            lambda x=x, dtype=dtype: np.concatenate([x, x], dtype=dtype),
        )


@pytest.mark.parametrize("n", [100, 4_000_000])
@pytest.mark.parametrize(
    ("source", "to", "category"), [("f4", "f2", RuntimeWarning), ("D", "f8", np.exceptions.ComplexWarning)]
)
def test_a_cast_warns_once_and_at_the_callers_line(n, source, to, category):
    """However many pieces overflow or lose imaginary parts, on however many threads."""
    arrays = [np.full(n, 1e30 if source == "f4" else 1 + 1j, source)] * 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joined = ops.concatenate(arrays, dtype=to, casting="unsafe")
    assert [warning.category for warning in caught] == [category]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(joined, np.concatenate(arrays, dtype=to, casting="unsafe"))
