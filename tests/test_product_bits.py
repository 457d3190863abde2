"""Products have the bits of the oracle: at every length, budget, layout, batch and way through the engine."""

import contextlib
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from arrays import WRITABLE_LAYOUTS, frozen, laid_out, layouts, seeds
from hypothesis import given
from hypothesis import strategies as st
from product_oracle import oracle_matmul
from product_settings import set_everywhere

import accel_ops as ops
from accel_ops.testing import assert_same_bits

DTYPES = [np.dtype(code) for code in ("f8", "f4", "D", "F", "f2", ml_dtypes.bfloat16)]
INTEGERS = [np.dtype(code) for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
LENGTHS = (
    *(0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 254, 255, 256, 257, 258, 300, 511, 512, 513),
    *(600, 767, 768, 769, 1023, 1024, 1025, 1100),
)
BUDGETS = (1, 2, 3, 4, 8, 64)

# What cuts the work and picks the kernels, so small, or so large, that little arrays go every way.
_ENGINES = {
    "as shipped": {},
    "tiny parts": {
        "GRAIN": 1,
        "GRAIN_BYTES": 1,
        "STEP_WORK": 1,
        "MANY": 64,
        "SMALL_WORK": 0,
        "_ROWS": 8,
        "_COLUMNS": 8,
        "_LEAST_ROWS": 1,
        "_LEAST_COLUMNS": 20,
        "_SHARED_WORK": 1,
        "_DIRECT_BYTES": 0,
        "_DIRECT_ROWS": 0,
        "_KEPT_BYTES": 0,
        "_RUN_COLUMNS": 16,
        "_RUN_BYTES": 8 << 10,
        "_PAIR_WORK": 1,
        "_PAIRS": 1,
        "_TERMS": 256,
        "_ELEMENTS": 1,
    },
    "read in place": {
        "GRAIN": 1,
        "GRAIN_BYTES": 1,
        "STEP_WORK": 1 << 12,
        "SMALL_WORK": 0,
        "_ROWS": 16,
        "_LEAST_ROWS": 16,
        "_SHARED_WORK": 1000,
        "_DIRECT_BYTES": 1 << 60,
        "_RUN_COLUMNS": 7,
        "_RUN_BYTES": 16 << 10,
        "_PAIR_WORK": 1,
        "_TERMS": 512,
    },
    "split": {
        "GRAIN": 1,
        "GRAIN_BYTES": 1,
        "STEP_WORK": 1,
        "SMALL_WORK": 0,
        "_SHARED_WORK": 1,
        "_LONG_TERMS": 257,
        "_KEPT_BYTES": 16 << 10,
        "_CHAIN_MULTIPLE": 3,
        "_RUN_BYTES": 8 << 10,
    },
    "small": {
        "GRAIN": 1,
        "GRAIN_BYTES": 1,
        "SMALL_WORK": 1 << 60,
        "_BATCH_WORK": 1 << 8,
        "_BATCH_ITEMS": 3,
        "_RUN_BYTES": 8 << 10,
        "_PAIRS": 70,
        "_ELEMENTS": 50,
    },
}
engines = st.sampled_from(list(_ENGINES))
on_every_engine = pytest.mark.parametrize("engine", list(_ENGINES))
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@contextlib.contextmanager
def running(engine, budget=2):
    """Run calls on an engine of that name under a thread budget."""
    with pytest.MonkeyPatch.context() as patch, ops.threads(budget):
        set_everywhere(patch, _ENGINES[engine])
        yield


# --- values


def _reals(rng, n, part, kind, n_terms):
    """Return real numbers of a dtype: ``n_terms`` make one output, most of which shall stay finite."""
    info = ml_dtypes.finfo(part) if part.kind == "V" else np.finfo(part)
    lowest, highest = int(info.minexp) - int(info.nmant), int(info.maxexp)
    normal = rng.standard_normal(n)
    if kind == "near 1":
        values = normal
    elif kind == "wide":  # of any magnitude, though so that most sums are numbers
        exponents = rng.integers(lowest // 2, highest // 2 - 8, n)
        anywhere = rng.random(n) < 0.5 / max(n_terms, 1)
        values = np.ldexp(normal, np.where(anywhere, rng.integers(lowest, highest - 2, n), exponents))
    elif kind == "cancelling":  # of a few magnitudes: sums cancel, terms are swallowed, and none is too large
        values = np.ldexp(normal, rng.integers(-8, 9, n)) * rng.choice([1, 2.0**-20], n)
    elif kind == "subnormal":  # products around the smallest numbers there are
        values = np.ldexp(normal, rng.integers(lowest // 2 - 6, lowest // 2 + 14, n))
    else:
        values = rng.integers(-3, 4, n) * 1.0
    values = values.astype(part)
    if kind == "special":
        specials = [-0.0, np.inf, -np.inf, np.nan, info.max, info.min, info.tiny, info.smallest_subnormal]
        places = rng.random(n) < 0.5 / max(n_terms, 1)
        values[places] = np.array([float(x) for x in specials]).astype(part)[rng.integers(0, 8, n)][places]
        values[rng.random(n) < 0.2] = -0.0
    return values


KINDS = ("near 1", "wide", "cancelling", "subnormal", "special")


def numbers(shape, dtype, seed, kind="cancelling", n_terms=None):
    """Return a new C-ordered array of values of a kind, the same for the same arguments."""
    rng = np.random.default_rng([seed, *shape])
    n, n_terms = math.prod(shape), shape[-1] if n_terms is None else n_terms
    with np.errstate(all="ignore"):
        if dtype.kind != "c":
            return _reals(rng, n, dtype, kind, n_terms).reshape(shape)
        result = np.empty(shape, dtype)
        part = np.dtype(f"f{dtype.itemsize // 2}")
        result.real, result.imag = (_reals(rng, n, part, kind, n_terms).reshape(shape) for _ in range(2))
    return result


def pair(m, k, n, dtype, seed, kind="cancelling", stack=()):
    """Return a left and a right operand."""
    return numbers((*stack, m, k), dtype, seed, kind, k), numbers((*stack, k, n), dtype, seed + 1, kind, k)


# --- comparison


def assert_product(actual, expected, what=""):
    """Fail unless two results have one shape, dtype and all bits in common; NaN is NaN."""
    try:
        assert_same_bits(actual, expected)
    except AssertionError as exc:
        exc.add_note(f"in the case {what}")
        raise


def oracle_of_stacks(a, b):
    """Return the oracle's products of stacks that broadcast."""
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = np.broadcast_to(a, (*stack, *a.shape[-2:])), np.broadcast_to(b, (*stack, *b.shape[-2:]))
    expected = np.zeros((*stack, a.shape[-2], b.shape[-1]), a.dtype)
    for index in np.ndindex(stack):
        expected[index] = oracle_matmul(a[index], b[index])
    return expected


# --- shapes and values


@in_every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_has_the_bits_of_the_oracle(dtype, kind):
    """Around every power of two, block and tile, with values of any magnitude, infinities, NaN and -0.0."""
    rng = np.random.default_rng(3)
    for k in (*LENGTHS, *rng.integers(1, 1200, 6)):
        m, n = rng.integers(1, 21), rng.integers(1, 61)
        a, b = pair(m, k, n, dtype, int(k), kind)
        assert_product(ops.matmul(a, b), oracle_matmul(a, b), (m, k, n))


@pytest.mark.parametrize("kind", KINDS)
@in_every_dtype
def test_values_are_what_they_are_meant_to_be(dtype, kind):
    """Most outputs are finite where they can be checked to the last bit, and the rest are there too."""
    a, b = pair(20, 300, 60, dtype, 5, kind)
    product = oracle_matmul(a, b)
    finite = np.isfinite(product).mean()
    assert finite > 0.1
    assert kind != "special" or finite < 1
    assert (product != 0).mean() > 0.1


@in_every_dtype
@pytest.mark.parametrize(("k", "kind"), [(19, "cancelling"), (300, "special")])
def test_every_small_height_and_width_has_the_same_elements(dtype, k, kind):
    """From 1 x 1 to 20 x 60: whatever tiles there are at the edges, an element has the bits it has in the whole."""
    a, b = pair(20, k, 60, dtype, 17, kind)
    expected = oracle_matmul(a, b)
    for m, n in itertools.product(range(1, 21), range(1, 61)):
        assert_product(ops.matmul(a[:m], b[:, :n]), expected[:m, :n], (m, n))


@on_every_engine
@in_every_dtype
def test_tiles_packed_or_not_have_the_same_elements(dtype, engine):
    """Edges of tiles again, where the right operand is packed and where it is read in place, in either order."""
    a, b = pair(19, 257, 130, dtype, 23)
    b_columns = np.asfortranarray(b)
    expected = oracle_matmul(a, b)
    sizes = [1, 2, 3, 7, 8, 9, 12, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 128, 129, 130]
    with running(engine, 1):
        for m, n in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 19), sizes):
            assert_product(ops.matmul(a[:m], b[:, :n]), expected[:m, :n], (m, n, "C"))
            assert_product(ops.matmul(a[:m], b_columns[:, :n]), expected[:m, :n], (m, n, "F"))


@in_every_dtype
@pytest.mark.parametrize(("m", "k", "n"), [(40, 530, 1200), (1100, 300, 33), (3, 257, 5000), (70, 70, 2500)])
def test_outputs_wider_than_a_panel_have_the_bits_of_the_oracle(dtype, m, k, n):
    """Larger than what is packed at once, as shipped, on several threads."""
    a, b = pair(m, k, n, dtype, 29)
    with ops.threads(2):
        assert_product(ops.matmul(a, b), oracle_matmul(a, b))
        assert_product(ops.matmul(a, np.asfortranarray(b)), oracle_matmul(a, b))


@in_every_dtype
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 700, 9001), (1, 70_001, 2), (1, 20_000, 63), (2000, 700, 1), (5, 6000, 7), (1, 300_001, 1), (20, 17_000, 30)],
)
def test_long_vectors_and_few_chains_have_the_bits_of_the_oracle(dtype, m, k, n):
    """Where pieces are runs of columns, or blocks of terms whose results are kept and added, as shipped."""
    a, b = pair(m, k, n, dtype, 31)
    expected = oracle_matmul(a, b)
    for budget in (1, 3):
        with ops.threads(budget):
            assert_product(ops.matmul(a, b), expected)
            assert_product(ops.matmul(np.asfortranarray(a), np.asfortranarray(b)), expected)


@on_every_engine
@in_every_dtype
def test_few_outputs_of_many_terms_have_the_bits_of_the_oracle(dtype, engine):
    """On every engine: blocks of terms are multiplied side by side on some of them."""
    for m, k, n in [(5, 4700, 7), (8, 4096, 3), (1, 5000, 2), (2, 4353, 1), (1, 4609, 1), (6, 4100, 20)]:
        a, b = pair(m, k, n, dtype, k)
        expected = oracle_matmul(a, b)
        for budget in (1, 4):
            with running(engine, budget):
                assert_product(ops.matmul(a, b), expected, (m, k, n))


# --- threads


@in_every_dtype
@pytest.mark.parametrize("part", range(5))
def test_every_budget_gives_the_bits_of_the_oracle(dtype, part):
    """Ten random shapes, stacks among them, on random engines and layouts, with 1 to 64 threads."""
    rng = np.random.default_rng([part, DTYPES.index(dtype)])
    for number in range(10):
        stack = tuple(rng.integers(1, 5, rng.choice([0, 0, 1, 2])))
        m, n = (int(rng.choice([1, rng.integers(1, 21), rng.integers(1, limit)])) for limit in (80, 150))
        k = int(rng.choice([rng.integers(1, 40), rng.integers(1, 700), rng.choice(LENGTHS[1:])]))
        a, b = pair(m, k, n, dtype, number, rng.choice(KINDS), stack)
        layout_of_a, layout_of_b = rng.choice(["C", "F", "transposed", "sliced", "half reversed"], 2)
        a, b = laid_out(a, layout_of_a), laid_out(b, layout_of_b)
        expected = oracle_of_stacks(a, b)
        engine = list(_ENGINES)[number % len(_ENGINES)]
        for budget in BUDGETS:
            with running(engine, budget):
                assert_product(ops.matmul(a, b), expected, (engine, budget, stack, m, k, n, layout_of_a, layout_of_b))


@in_every_dtype
def test_runs_repeat_on_many_threads(dtype):
    """Twenty times the same call gives the same bits, whichever worker takes which piece."""
    a, b = pair(50, 600, 130, dtype, 37)
    expected = oracle_matmul(a, b)
    with running("tiny parts", 8):
        for _ in range(20):
            assert_product(ops.matmul(a, b), expected)


# --- batches


@in_every_dtype
@pytest.mark.parametrize("k", [1, 33, 256, 257, 700])
def test_a_row_has_the_bits_it_has_in_its_batch(dtype, k):
    """Alone as a vector or as a matrix of one row, at any place in a batch of any size."""
    a, b = pair(70, k, 45, dtype, 41)
    whole = ops.matmul(a, b)
    for row in (0, 1, 7, 8, 33, 69):
        assert_product(ops.matmul(a[row], b), whole[row])
        assert_product(ops.matmul(a[row : row + 1], b), whole[row : row + 1])
        assert_product(ops.vecmat(a[row].conj() if dtype.kind == "c" else a[row], b), whole[row])
        assert_product(ops.matmul(a[: row + 1], b)[row], whole[row])
        assert_product(ops.matmul(a[row:], b)[0], whole[row])
    for column in (0, 3, 44):
        assert_product(ops.matmul(a, b[:, column]), whole[:, column])
        assert_product(ops.matvec(a, b[:, column]), whole[:, column])
        assert_product(ops.matmul(a, b[:, column : column + 1]), whole[:, column : column + 1])


@on_every_engine
@in_every_dtype
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (1, 300, 1), (3, 40, 5), (9, 257, 1), (1, 31, 20), (17, 513, 30)])
def test_a_stack_has_the_bits_of_its_items(engine, dtype, m, k, n):
    """Many pairs, one operand shared, and both axes of a stack broadcast."""
    a, b = pair(m, k, n, dtype, 43, stack=(3, 4))
    with running(engine, 3):
        for left, right in [(a, b), (a, b[0, 0]), (a[1, 1], b), (a[:, :1], b[1:2]), (a[0], b[:, :1])]:
            product = ops.matmul(left, right)
            assert_product(product, oracle_of_stacks(left, right))
            wide = (
                np.broadcast_to(left, (*product.shape[:-2], m, k)),
                np.broadcast_to(right, (*product.shape[:-2], k, n)),
            )
            for index in np.ndindex(product.shape[:-2]):
                assert_product(ops.matmul(wide[0][index], wide[1][index]), product[index])


@pytest.mark.parametrize("n_items", [1, 2, 15, 16, 17, 65, 129, 40_000])
@in_every_dtype
def test_stacks_of_any_length_have_the_bits_of_the_oracle(dtype, n_items):
    """Pairs of vectors are multiplied side by side, as many as a vector has lanes; a long stack goes in parts."""
    a, b = pair(1, 5, 1, dtype, 47, stack=(n_items,))
    expected = oracle_of_stacks(a, b)
    assert_product(ops.matmul(a, b), expected)
    left = a[:, 0].conj() if dtype.kind == "c" else a[:, 0]
    assert_product(ops.vecdot(left, b[..., 0]), expected[:, 0, 0])
    a, b = pair(2, 3, 2, dtype, 53, stack=(n_items,))
    assert_product(ops.matmul(a, b), oracle_of_stacks(a, b))


# --- layouts


@given(
    dtype=st.sampled_from(DTYPES),
    engine=engines,
    budget=st.sampled_from(BUDGETS),
    stack=st.lists(st.integers(0, 3), max_size=2),
    m=st.integers(0, 30),
    k=st.integers(0, 70) | st.sampled_from(LENGTHS),
    n=st.integers(0, 70),
    layout_of_a=layouts,
    layout_of_b=layouts,
    layout_of_out=st.none() | st.sampled_from(WRITABLE_LAYOUTS),
    kind=st.sampled_from(KINDS),
    seed=seeds,
)
def test_every_layout_has_the_bits_of_the_oracle(
    dtype, engine, budget, stack, m, k, n, layout_of_a, layout_of_b, layout_of_out, kind, seed
):
    """C and Fortran order, sliced, reversed, broadcast and unaligned operands and outputs."""
    a, b = pair(m, k, n, dtype, seed, kind, tuple(stack))
    a, b = frozen(laid_out(a, layout_of_a)), frozen(laid_out(b, layout_of_b))
    expected = oracle_of_stacks(a, b)
    with running(engine, budget):
        if layout_of_out is None:
            assert_product(ops.matmul(a, b), expected)
        else:
            out = laid_out(np.full(expected.shape, 77).astype(dtype), layout_of_out)
            assert ops.matmul(a, b, out=out) is out
            assert_product(out, expected)


def _unaligned_from_bytes(x):
    """Return a copy that begins at an odd address."""
    return np.frombuffer(b"\0" + x.tobytes(), np.uint8, offset=1).view(x.dtype).reshape(x.shape)


def _one_field_of_records(x):
    """Return a copy whose elements lie in packed records, so that strides are no multiple of the element."""
    records = np.zeros(x.shape, [("tag", "u1"), ("value", x.dtype), ("more", "u2")])
    records["value"] = x
    return records["value"]


@on_every_engine
@in_every_dtype
@pytest.mark.parametrize("form", [_unaligned_from_bytes, _one_field_of_records])
@pytest.mark.parametrize(("m", "k", "n"), [(9, 300, 50), (1, 600, 50), (30, 600, 1), (1, 700, 1), (20, 20, 20)])
def test_operands_at_any_address_have_the_bits_of_the_oracle(engine, dtype, form, m, k, n):
    """No kernel relies on alignment, or on strides that are multiples of the element."""
    a, b = pair(m, k, n, dtype, 59)
    expected = oracle_matmul(a, b)
    with running(engine, 2):
        assert_product(ops.matmul(form(a), form(b)), expected)
        assert_product(ops.matmul(form(a), b), expected)
        assert_product(ops.matmul(a, form(b).T.copy().T), expected)
        out = np.zeros((m, n), [("tag", "u1"), ("value", dtype), ("more", "u2")])
        ops.matmul(form(a), form(b), out=out["value"])
        assert_product(out["value"], expected)
        assert not out["tag"].any()
        assert not out["more"].any()


@on_every_engine
@in_every_dtype
@pytest.mark.parametrize(("m", "k", "n"), [(9, 30, 11), (1, 600, 50), (30, 600, 1), (17, 257, 65), (1, 700, 1)])
def test_nothing_beside_the_output_is_written(engine, dtype, m, k, n):
    """An output that lies in the middle of other memory, in rows with gaps, columns or stacks."""
    a, b = pair(m, k, n, dtype, 61)
    expected = oracle_matmul(a, b)
    for turned in (False, True):
        memory = np.full((n + 9, m + 5) if turned else (m + 5, n + 9), 55).astype(dtype)
        frame = memory.T if turned else memory
        with running(engine, 3):
            ops.matmul(a, b, out=frame[2:-3, 4:-5])
        assert_product(frame[2:-3, 4:-5], expected)
        frame[2:-3, 4:-5] = np.array(55).astype(dtype)
        assert (memory == np.array(55).astype(dtype)).all()


@in_every_dtype
@pytest.mark.parametrize("k", [3, 300])
def test_many_vectors_go_into_outputs_of_any_layout(dtype, k):
    """Pairs of vectors whose results lie apart, backwards or in another order."""
    a, b = numbers((5, 7, k), dtype, 89), numbers((5, 7, k), dtype, 97)
    left = a.conj() if dtype.kind == "c" else a
    expected = oracle_of_stacks(a[:, :, np.newaxis], b[..., np.newaxis])[..., 0, 0]
    for layout in WRITABLE_LAYOUTS:
        out = laid_out(np.full((5, 7), 77).astype(dtype), layout)
        ops.vecdot(left, b, out=out)
        assert_product(out, expected, layout)


# --- other forms


@in_every_dtype
@on_every_engine
@pytest.mark.parametrize("k", [1, 16, 255, 257, 513])
def test_every_form_of_a_product_has_the_same_bits(dtype, engine, k):
    """matmul, matvec, vecmat, vecdot, dot, inner and tensordot of the same rows and columns."""
    a, b = pair(11, k, 14, dtype, 67, "special")
    whole = oracle_matmul(a, b)

    def conjugated(x):
        return x.conj() if x.dtype.kind == "c" else x

    with running(engine, 2):
        assert_product(ops.matmul(a, b), whole)
        assert_product(ops.dot(a, b), whole)
        assert_product(ops.inner(a, b.T), whole)
        assert_product(ops.tensordot(a, b, 1), whole)
        assert_product(ops.tensordot(a, b, ([1], [0])), whole)
        assert_product(ops.matvec(a, b.T), whole.T)
        assert_product(ops.vecmat(conjugated(a), b), whole)
        assert_product(ops.vecdot(conjugated(a)[:, np.newaxis], b.T), whole)
        assert_product(ops.vecdot(conjugated(a.T)[:, :, np.newaxis], b[:, np.newaxis], axis=0), whole)
        assert_product(ops.matmul(b.T, a.T).T, whole)  # the operands can be interchanged
        for i, j in [(0, 0), (3, 7), (10, 13)]:
            expected = whole[i, j]
            for scalar in (
                ops.dot(a[i], b[:, j]),
                ops.inner(a[i], b[:, j]),
                ops.matmul(a[i], b[:, j]),
                ops.tensordot(a[i], b[:, j], 1),
                ops.vecdot(conjugated(a[i]), b[:, j]),
            ):
                assert_product(scalar, expected)
        outer = ops.outer(a[:, 0], b[0])
        assert_product(outer, oracle_matmul(a[:, :1], b[:1]))
        assert_product(ops.tensordot(a[:, 0], b[0], 0), outer)
        assert_product(ops.dot(a[3, 0], b[0]), outer[3])


@in_every_dtype
def test_terms_over_several_axes_count_in_their_order(dtype):
    """tensordot over two axes is the product over both in C order, as they are listed."""
    a, b = numbers((4, 9, 40), dtype, 71), numbers((40, 9, 5), dtype, 73)
    expected = oracle_matmul(a.reshape(4, -1), np.ascontiguousarray(b.transpose(1, 0, 2)).reshape(-1, 5))
    assert_product(ops.tensordot(a, b, ([1, 2], [1, 0])), expected)
    expected = oracle_matmul(np.ascontiguousarray(a.transpose(0, 2, 1)).reshape(4, -1), b.reshape(-1, 5))
    assert_product(ops.tensordot(a, b, ([2, 1], [0, 1])), expected)


@pytest.mark.parametrize("dtype", [np.dtype("D"), np.dtype("F")], ids=str)
@pytest.mark.parametrize("k", [1, 5, 256, 700])
def test_a_vector_times_itself_is_real(dtype, k):
    """The two halves of the imaginary part are each other's negative, whatever was rounded."""
    x = numbers((30, k), dtype, 79)
    product = ops.vecdot(x, x)
    assert (product.imag == 0).all()
    assert_product(ops.matmul(x.conj(), x.T).diagonal(), product)
    hermitian = ops.matmul(x.conj(), x.T)
    assert_product(hermitian.T.conj() + 0, hermitian + 0)


@in_every_dtype
def test_a_change_of_dtype_is_made_before_the_product(dtype):
    """dtype= multiplies as if the operands had been converted first; out= of another one rounds the result."""
    a, b = np.arange(-60, 60).reshape(8, 15), np.arange(300).reshape(15, 20) % 23
    expected = oracle_matmul(a.astype(dtype), b.astype(dtype))
    assert_product(ops.matmul(a, b, dtype=dtype, casting="unsafe"), expected)
    wide = np.dtype("D" if dtype.kind == "c" else "f8")
    out = np.empty(expected.shape, wide)
    ops.matmul(a.astype(dtype), b.astype(dtype), out=out)
    assert_product(out, expected.astype(wide))


# --- integers


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@on_every_engine
def test_integers_are_numpys(dtype, engine):
    """They wrap, and booleans are true or false, in every shape and layout."""
    rng = np.random.default_rng(83)
    for m, k, n in [
        (1, 1, 1),
        (3, 7, 5),
        (20, 300, 60),
        (1, 600, 70),
        (70, 520, 1),
        (1, 1000, 1),
        (9, 0, 4),
        (33, 9, 90),
    ]:
        a, b = (np.frombuffer(rng.bytes(8 * r * c), "u8").astype(dtype).reshape(r, c) for r, c in ((m, k), (k, n)))
        if dtype.kind == "b":
            a, b = rng.random((m, k)) < 0.05, rng.random((k, n)) < 0.3
        expected = np.matmul(a, b)
        for budget in (1, 3):
            with running(engine, budget):
                assert_product(ops.matmul(a, b), expected)
                assert_product(ops.matmul(np.asfortranarray(a), np.asfortranarray(b)), expected)
                assert_product(ops.matmul(a[::-1], b[:, ::-1]), expected[::-1, ::-1])
                stack = ops.matmul(np.stack([a, a[::-1]]), b)
                assert_product(stack, np.stack([expected, expected[::-1]]))
