"""The same bits on other CPUs: what Numba compiles for one without FMA, one with AVX2 and one with AVX-512.

Each runs in a process of its own, with a cache of its own, and prints digests of the same products, which are golden
values here too. LLVM calls the C library's fma where an instruction is missing.
"""

import hashlib
import platform
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from child_processes import run_child
from product_oracle import oracle_matmul

import accel_ops as ops
from accel_ops.orders import ORDER_VERSION
from accel_ops.testing import digest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the targets are x86 CPUs"),
]

# Of ORDER_VERSION 1. They change with the order of the terms alone, which is a new major version.
GOLDEN = {
    "float64": "803680d95954154ffb5a495540f25e3b",
    "float32": "adc81f86773a78270181fc3296f56650",
    "complex128": "3baae3423fea7a54916624e05761f8d7",
    "complex64": "798c6e28ee5c389f733291a2b8c20e5c",
    "float16": "67f2bb63942bf94504bbef1212892c98",
    "bfloat16": "f87111c0dabfa83993c920e67b780833",
}

_BASELINE = "+sse,+sse2,-sse3,-ssse3,-sse4.1,-sse4.2,-avx,-avx2,-fma,-f16c"
_WITHOUT_AVX512 = "-avx512f,-avx512vl,-avx512bw,-avx512dq,-avx512cd"
TARGETS = {
    "without FMA": ("x86-64", f"{_BASELINE},{_WITHOUT_AVX512}", ()),
    "AVX2": ("haswell", f"+avx,+avx2,+fma,+f16c,{_WITHOUT_AVX512}", ("avx2", "fma")),
    "AVX-512": (
        "skylake-avx512",
        "+avx,+avx2,+fma,+f16c,+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512cd",
        ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"),
    ),
}
# (m, k, n): tiles and their tails, one row, one column, single vectors, several blocks of terms, and more columns
# than are packed at once.
SHAPES = [
    (1, 1, 1),
    (2, 3, 4),
    (7, 19, 37),
    (13, 257, 61),
    (9, 600, 50),
    (33, 530, 29),
    (1, 700, 45),
    (45, 700, 1),
    (1, 1025, 1),
    (5, 513, 640),
]


def numbers(shape, dtype, seed):
    """Return values of many magnitudes from a generator written out here: the numbers of a library's may change."""
    n = int(np.prod(shape))
    parts = 2 if dtype.kind == "c" else 1
    state = np.uint64(seed * 2 + 1)
    bits = np.empty(n * parts, np.uint64)
    for index in range(bits.size):
        # Knuth's linear congruential generator, modulo 2**64.
        state = np.uint64((int(state) * 6364136223846793005 + 1442695040888963407) % (1 << 64))
        bits[index] = state
    mantissas = (bits >> np.uint64(40)).astype(np.int64) - (1 << 23)  # 24 bits, all of which a float32 holds
    exponents = (bits >> np.uint64(8)).astype(np.int64) % 24 - 12
    values = np.ldexp(mantissas.astype(np.float64), exponents - 23)
    values[(bits >> np.uint64(20)) % np.uint64(53) == 0] = -0.0
    if parts == 2:
        whole = np.empty(n, np.complex128)
        whole.real, whole.imag = values[:n], values[n:]
        values = whole
    with np.errstate(all="ignore"):
        return values.astype(dtype).reshape(shape)


def corpus(dtype):
    """Return pairs of operands."""
    return [
        (numbers((m, k), dtype, 1000 + number), numbers((k, n), dtype, 2000 + number))
        for number, (m, k, n) in enumerate(SHAPES)
    ]


def combined(arrays):
    """Return one digest for many results."""
    return hashlib.sha256("\n".join(digest(array) for array in arrays).encode()).hexdigest()[:32]


def products_of(dtype):
    """Return all products of the corpus, each of which comes about in several ways that must agree."""
    results = []
    for a, b in corpus(dtype):
        left = a.conj() if dtype.kind == "c" else a
        whole = ops.matmul(a, b)
        results.append(whole)
        others = [
            ops.matmul(np.asfortranarray(a), np.asfortranarray(b)),
            ops.matmul(np.stack([a, a]), b)[1],
            ops.matmul(b.T, a.T).T,
        ]
        others.append(np.array([ops.vecmat(row, b) for row in left[:3]] + list(whole[3:])))
        columns = [ops.matvec(a, b[:, j]) for j in range(min(3, b.shape[1]))]
        others.append(np.concatenate([np.array(columns).T, whole[:, 3:]], axis=1))
        if whole.size <= 200 or b.shape[1] == 1:
            others.append(ops.vecdot(left[:, np.newaxis], b.T))
        results += [np.asarray(other) for other in others]
    return results


def expected_products_of(dtype):
    """Return what they must be."""
    results = []
    for (a, b), (m, _, n) in zip(corpus(dtype), SHAPES, strict=True):
        results += [oracle_matmul(a, b)] * (7 if m * n <= 200 or n == 1 else 6)
    return results


def print_digests(names):
    """Print a line for each dtype: what the child processes run."""
    for name in names:
        print(name, combined(products_of(np.dtype(name))), flush=True)


DTYPES = [*(np.dtype(name) for name in list(GOLDEN)[:-1]), np.dtype(ml_dtypes.bfloat16)]


def host_flags():
    """Return what this CPU can do, in the words of Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


def test_golden_digests_belong_to_this_order():
    """A new order has new ones."""
    assert ORDER_VERSION == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_golden_digests_are_those_of_the_oracle(dtype):
    """So that they stand for the order that is written down, not for what some version computed."""
    assert combined(expected_products_of(dtype)) == GOLDEN[dtype.name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_this_cpu_has_the_golden_digests(dtype):
    """The kernels as they are compiled here."""
    assert combined(products_of(dtype)) == GOLDEN[dtype.name]


@pytest.mark.parametrize("names", [("float64", "float16", "bfloat16"), ("complex128",), ("complex64",)], ids=str)
@pytest.mark.parametrize("target", list(TARGETS))
def test_other_cpus_have_the_golden_digests(target, names, tmp_path):
    """float16 and bfloat16 are multiplied by the kernels of float32."""
    cpu, features, needed = TARGETS[target]
    if missing := set(needed) - host_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    source = """
        import sys
        from numba.core import config
        from accel_ops.cpu.elements import _vector_registers
        from test_product_targets import print_digests
        print_digests(sys.argv[1:])
        print(config.CPU_NAME, *_vector_registers())
    """
    environment = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    lines = run_child(source, deadline_s=200, env=environment, arguments=names).splitlines()
    registers = {"without FMA": "16 16", "AVX2": "32 16", "AVX-512": "64 32"}[target]
    assert lines == [*(f"{name} {GOLDEN[name]}" for name in names), f"{cpu} {registers}"]
