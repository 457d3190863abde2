"""The oracle of products against exact arithmetic, and against cases that were worked out by hand."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from product_oracle import fused_multiply_add, oracle_matmul

FLOATS = [np.dtype(np.float64), np.dtype(np.float32)]
# Bits of the significand, and the exponents of the smallest subnormal number and of the largest power of two.
_FORMATS = {
    "float64": (53, -1074, 1023),
    "float32": (24, -149, 127),
    "float16": (11, -24, 15),
    "bfloat16": (8, -133, 127),
}


def rounded(value: Fraction, dtype: np.dtype) -> Fraction | float:
    """Return the nearest number of a format to an exact value that is not 0, the even one of two; inf beyond all."""
    precision, lowest, highest = _FORMATS[dtype.name]
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    assert Fraction(2) ** exponent <= magnitude < Fraction(2) ** (exponent + 1)
    spacing = Fraction(2) ** max(exponent - precision + 1, lowest)
    nearest = round(magnitude / spacing) * spacing  # round() of a Fraction takes the even one of two
    if nearest >= Fraction(2) ** (highest + 1):
        nearest = float("inf")
    return nearest if value > 0 else -nearest


def assert_is(actual: np.generic, exact: Fraction, dtype: np.dtype, what: object) -> None:
    expected = rounded(exact, dtype) if exact else Fraction(0)
    if isinstance(expected, float):
        assert float(actual) == expected, what
    else:
        assert np.isfinite(actual), what
        assert Fraction(float(actual)) == expected, what


def scalars(dtype: np.dtype, rng: np.random.Generator, n: int, low: int, high: int) -> np.ndarray:
    """Return numbers of either sign whose exponents are anywhere between two."""
    mantissas = rng.integers(1 << 23, 1 << 24, n) if dtype.itemsize == 4 else rng.integers(1 << 52, 1 << 53, n)
    width = _FORMATS[dtype.name][0]
    values = np.ldexp(mantissas.astype(np.float64), rng.integers(low, high, n) - width + 1)
    return (values * rng.choice([-1.0, 1.0], n)).astype(dtype)


def triples(dtype: np.dtype, kind: str) -> list[tuple[np.generic, np.generic, np.generic]]:
    rng = np.random.default_rng([dtype.itemsize, len(kind)])
    n, high = 3000, _FORMATS[dtype.name][2]
    if kind == "all near 1":
        a, b, c = (scalars(dtype, rng, n, -3, 4) for _ in range(3))
    elif kind == "far apart":
        a, b = (scalars(dtype, rng, n, -20, 21) for _ in range(2))
        c = scalars(dtype, rng, n, -90, 91)
    elif kind == "cancelling":  # c is minus the product, rounded or a neighbour of that
        a, b = (scalars(dtype, rng, n, -20, 21) for _ in range(2))
        c = -(a * b)
        c = np.where(rng.random(n) < 0.5, c, np.nextafter(c, dtype.type(0)))
    elif kind == "subnormal":  # products around the smallest numbers, and nothing or as little to add them to
        lowest = _FORMATS[dtype.name][1]
        a, b = (scalars(dtype, rng, n, lowest // 2 - 12, lowest // 2 + 30) for _ in range(2))
        c = np.where(rng.random(n) < 0.3, 0, rng.integers(-100, 100, n) * np.finfo(dtype).smallest_subnormal)
    elif kind == "halfway":  # 1 + an ulp's half and a little, which a second rounding would lose
        a = b = np.ones(n, dtype)
        ulp = np.finfo(dtype).eps
        a = (1 + rng.integers(0, 8, n) * ulp).astype(dtype)
        b = (1 - rng.integers(0, 8, n) * ulp / 2).astype(dtype)
        c = (rng.integers(-8, 8, n) * ulp / 2).astype(dtype)
    else:  # around the largest numbers
        a, b = (scalars(dtype, rng, n, high // 2 - 2, high // 2 + 3) for _ in range(2))
        with np.errstate(over="ignore"):
            c = np.clip(-(a * b), np.finfo(dtype).min, np.finfo(dtype).max)
        c = np.where(rng.random(n) < 0.5, c, scalars(dtype, rng, n, high - 4, high))
    return list(zip(a.astype(dtype), b.astype(dtype), c.astype(dtype), strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["all near 1", "far apart", "cancelling", "subnormal", "halfway", "overflowing"])
def test_a_fused_multiply_add_is_the_exact_result_rounded_once(dtype, kind):
    """To the nearest, ties to even, with subnormal results and overflow to infinity."""
    finite = 0
    for a, b, c in triples(dtype, kind):
        result = fused_multiply_add(a, b, c)
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        assert_is(result, exact, dtype, (a, b, c))
        finite += bool(np.isfinite(result))
    assert finite > 100
    assert (finite < 3000) == (kind == "overflowing")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_fused_multiply_add_has_the_zeros_infinities_and_nans_of_ieee(dtype):
    """An exact zero is +0.0 unless both parts are -0.0; invalid operations give NaN."""
    zero, one, inf, nan = (dtype.type(value) for value in (0, 1, np.inf, np.nan))
    assert not np.signbit(fused_multiply_add(one, one, -one))
    assert not np.signbit(fused_multiply_add(-zero, one, zero))
    assert np.signbit(fused_multiply_add(-zero, one, -zero))
    assert fused_multiply_add(inf, -one, one) == -inf
    for a, b, c in [(inf, zero, one), (inf, one, -inf), (nan, one, one), (one, nan, one), (one, one, nan)]:
        assert np.isnan(fused_multiply_add(a, b, c))


def test_rounding_twice_would_be_noticed():
    """For 1 - 2**-104 minus 1, a multiplication and an addition give 0."""
    a, b = np.float64(1 + 2**-52), np.float64(1 - 2**-52)
    assert a * b - 1 == 0
    assert oracle_matmul(np.array([[1.0, a]]), np.array([[-1.0], [b]]))[0, 0] == -(2.0**-104)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "bfloat16", "D", "F"])
def test_no_terms_give_plus_zero(dtype):
    """So does every product whose terms are -0.0: a chain begins with +0.0."""
    nothing = oracle_matmul(np.ones((2, 0), dtype), np.ones((0, 3), dtype))
    assert nothing.tobytes() == np.zeros((2, 3), dtype).tobytes()
    zeros = oracle_matmul(np.full((1, 2), -0.0, "f8").astype(dtype), np.ones((2, 1), dtype))
    assert zeros.tobytes() == np.zeros((1, 1), dtype).tobytes()


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "bfloat16", "D", "F"])
def test_small_integers_are_exact(dtype):
    """[[1, 2], [3, 4]] times [[5, 6], [7, 8]]."""
    product = oracle_matmul(np.array([[1, 2], [3, 4]], dtype), np.array([[5, 6], [7, 8]], dtype))
    assert product.dtype == np.dtype(dtype)
    assert product.tolist() == [[19, 22], [43, 50]]


def test_a_chain_goes_upwards():
    """1 is lost beside 2**53, one by one; in the other direction two of them would not be."""
    ones = np.ones((1, 3))
    assert oracle_matmul(ones, np.array([[2.0**53], [1.0], [1.0]]))[0, 0] == 2.0**53
    assert oracle_matmul(ones, np.array([[1.0], [1.0], [2.0**53]]))[0, 0] == 2.0**53 + 2


@pytest.mark.parametrize("n_terms", [255, 256, 257, 512, 513])
def test_a_block_has_256_terms(n_terms):
    """2**53 and 255 times 1 make 2**53, what follows is another chain, in which the ones count."""
    b = np.ones((n_terms, 1))
    b[0] = 2.0**53
    blocks = [2.0**53, *(min(256, n_terms - first) for first in range(256, n_terms, 256))]
    expected = blocks[0]
    for block in blocks[1:]:
        expected += block
    assert oracle_matmul(np.ones((1, n_terms)), b)[0, 0] == expected


def test_blocks_are_added_upwards_from_the_first():
    """((2**53 + 1) + 1) is 2**53, as 1 + (1 + 2**53) is not; and -0.0 of a first block cannot be, +0.0 is kept."""
    b = np.zeros((3 * 256, 1))
    b[0], b[256], b[512] = 2.0**53, 1, 1
    assert oracle_matmul(np.ones((1, 768)), b)[0, 0] == 2.0**53
    assert oracle_matmul(np.ones((1, 768)), b[::-1])[0, 0] == 2.0**53 + 2
    assert not np.signbit(oracle_matmul(np.ones((1, 768)), np.full((768, 1), -0.0))[0, 0])


def test_a_complex_product_has_four_chains():
    """(1 + e + i)(1 - e + i): the real part is the rounded (1 - e**2) minus 1, which a chain of both would keep."""
    e = 2.0**-52
    product = oracle_matmul(np.array([[complex(1 + e, 1)]]), np.array([[complex(1 - e, 1)]]))[0, 0]
    assert product == complex(0, 2)  # 1 - e*e rounds to 1
    a = np.array([[complex(2.0**53, 0), complex(1, 1), complex(1, -1)]])
    b = np.array([[1], [complex(1, 1)], [complex(1, 1)]])
    # rr = 2**53 + 1 + 1 term by term = 2**53, ii = 1 - 1 = 0; ri = 1 + 1 = 2, ir = 1 - 1 = 0
    assert oracle_matmul(a, b)[0, 0] == complex(2.0**53, 2)


def test_complex_blocks_are_added_part_by_part():
    """The chains of a block are joined before they meet those of the next."""
    a, b = np.zeros((1, 257), "D"), np.zeros((257, 1), "D")
    a[0, 0], b[0, 0] = complex(2.0**53, 0), complex(1, 1)
    a[0, 256], b[256, 0] = complex(1, 1), complex(0, 1)
    # first block (2**53, 2**53); second: rr = 0, ii = 1, ri = 1, ir = 0: (-1, 1)
    assert oracle_matmul(a, b)[0, 0] == complex(2.0**53 - 1, 2.0**53)


@pytest.mark.parametrize("dtype", [np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_halves_round_once_at_the_end(dtype):
    """What one rounding of the exact sum gives, where the sum has room in float32."""
    rng = np.random.default_rng(7)
    a = rng.integers(-40, 40, (30, 9)).astype(dtype)
    b = rng.integers(-40, 40, (9, 30)).astype(dtype)
    product = oracle_matmul(a, b)
    for i in range(30):
        for j in range(30):
            exact = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j], strict=True))
            assert_is(product[i, j], exact, dtype, (i, j))


def test_float16_overflows_at_the_end_only():
    """200 * 400 - 200 * 399 is 200, though neither product is a float16."""
    product = oracle_matmul(np.array([[200, 200]], "f2"), np.array([[400], [-399]], "f2"))
    assert product[0, 0] == 200
    assert oracle_matmul(np.array([[300]], "f2"), np.array([[300]], "f2"))[0, 0] == np.inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_element_is_its_own_chain(dtype):
    """Larger products by the exact fused operation, in plain Python."""
    rng = np.random.default_rng(11)
    a = rng.standard_normal((2, 258)).astype(dtype)
    b = rng.standard_normal((258, 3)).astype(dtype)
    product = oracle_matmul(a, b)
    for i, j in np.ndindex(2, 3):
        results = []
        for first in (0, 256):
            p = Fraction(0)
            for x, y in zip(a[i, first : first + 256], b[first : first + 256, j], strict=True):
                p = rounded(Fraction(float(x)) * Fraction(float(y)) + p, dtype)
            results.append(p)
        assert Fraction(float(product[i, j])) == rounded(results[0] + results[1], dtype)
