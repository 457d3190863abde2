"""The bits of ``matmul`` beside those of BLIS: ``python -m benchmarks.compare_with_blis --library libblis.so.4``.

BLIS 0.9.0 in its configuration for Zen 3 cuts the terms of a large float64 product as accel_ops does: blocks of 256,
in each a chain of fused multiply-adds from +0.0, the blocks' results added in ascending order. Two libraries written
apart that agree in every bit are evidence that neither lets the other dimensions, edges or packing into the order.
Debian's package libblis4-pthread has that version; no other is tried, because the call hands over a struct whose
layout may change.

The products are of random numbers in C order, alpha = 1 and beta = 0, on one thread, of every size from 1: m and n up
to 500, k up to 1,100. BLIS has two ways to multiply. Where m, n or k is below a threshold it takes its kernels for
small matrices, which read operands that are not packed; some of them, such as those for a single last column, add
the terms in another order. So the comparison switches these kernels off (the field ``l3_sup`` of its runtime
settings, which only ``bli_dgemm_ex`` takes) and all sizes are multiplied in the large way, edges included. For
information the products are also given to ``cblas_dgemm``, which chooses for itself.
"""

import argparse
import ctypes
import os
import sys

import numpy as np

import accel_ops as ops

N_PRODUCTS = 1000
LARGEST_SIDE, MOST_TERMS = 500, 1100
VERSION, CONFIGURATION = "0.9.0", "zen3"
# What BLIS_ARCH_TYPE calls the configuration: this version knows numbers only, those of its enumeration.
CONFIGURATION_NUMBER = "6"
ROW_MAJOR, NO_TRANSPOSE = 101, 111  # of CBLAS
KEEP_AS_IT_IS = 0  # of BLIS: neither transposed nor conjugated

Address = ctypes.c_void_p
Integer = ctypes.c_int64
ONE, ZERO = ctypes.c_double(1), ctypes.c_double(0)


class Settings(ctypes.Structure):
    """BLIS's rntm_t of version 0.9.0, with room to spare."""

    _fields_ = (
        ("auto_factor", ctypes.c_bool),
        ("num_threads", Integer),
        ("ways", Integer * 6),
        ("pack_a", ctypes.c_bool),
        ("pack_b", ctypes.c_bool),
        ("l3_sup", ctypes.c_bool),
        ("pools", Address * 2),
        ("spare", ctypes.c_char * 64),
    )


class Blis:
    """BLIS on one thread, in the one configuration that is compared with."""

    def __init__(self, path: str) -> None:
        # Read when the library is first used.
        os.environ["BLIS_ARCH_TYPE"] = CONFIGURATION_NUMBER
        os.environ["BLIS_NUM_THREADS"] = "1"
        self.functions = ctypes.CDLL(path)
        self.functions.bli_init()
        for name in ("bli_info_get_version_str", "bli_arch_string"):
            getattr(self.functions, name).restype = ctypes.c_char_p
        self.version = self.functions.bli_info_get_version_str().decode()
        self.configuration = self.functions.bli_arch_string(self.functions.bli_arch_query_id()).decode()
        if (self.version, self.configuration) != (VERSION, CONFIGURATION):
            msg = f"BLIS {VERSION} {CONFIGURATION} is needed, got {self.version} {self.configuration}"
            raise SystemExit(msg)
        if self.functions.bli_info_get_blas_int_type_size() != 32:
            msg = "a BLIS whose BLAS interface has integers of 32 bits is needed"
            raise SystemExit(msg)
        self.settings = Settings()
        self.functions.bli_rntm_init_from_global(ctypes.byref(self.settings))
        if (self.settings.auto_factor, self.settings.num_threads, self.settings.ways[0]) != (True, 1, 1):
            msg = f"BLIS's runtime settings are laid out otherwise than in version {VERSION}"
            raise SystemExit(msg)
        self.settings.l3_sup = False

    def multiply_packed(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Multiply as large matrices are multiplied, whatever the size."""
        c = empty_result(a, b)
        scale, nothing = ctypes.byref(ONE), ctypes.byref(ZERO)
        operands = [stored(x) for x in (a, b, c)]
        self.functions.bli_dgemm_ex(
            *(KEEP_AS_IT_IS, KEEP_AS_IT_IS, *sizes(a, b), scale, *operands[0], *operands[1], nothing, *operands[2]),
            *(None, ctypes.byref(self.settings)),
        )
        return c

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Multiply by the way that BLIS chooses."""
        c = empty_result(a, b)
        m, n, k = (size.value for size in sizes(a, b))
        address_a, address_b, address_c = (Address(x.ctypes.data) for x in (a, b, c))
        self.functions.cblas_dgemm(
            *(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, m, n, k, ONE, address_a, k, address_b, n, ZERO, address_c, n)
        )
        return c


def empty_result(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A result in which nothing could pass for the answer: beta = 0 must overwrite a NaN."""
    return np.full((a.shape[0], b.shape[1]), np.nan)


def sizes(a: np.ndarray, b: np.ndarray) -> tuple[Integer, Integer, Integer]:
    return Integer(a.shape[0]), Integer(b.shape[1]), Integer(a.shape[1])


def stored(array: np.ndarray) -> tuple[Address, Integer, Integer]:
    """Where an array begins, and its strides in elements."""
    return (Address(array.ctypes.data), *(Integer(stride // array.itemsize) for stride in array.strides))


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left.view(np.uint64), right.view(np.uint64))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.compare_with_blis", description="bits of matmul and BLIS")
    add = parser.add_argument
    add("--library", required=True, metavar="PATH", help=f"libblis.so.4 of version {VERSION}")
    add("--products", type=int, default=N_PRODUCTS, help="how many (%(default)s)")
    add("--seed", type=int, default=0, help="of the random sizes and numbers (%(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    blis = Blis(arguments.library)
    print(f"BLIS {blis.version}, configuration {blis.configuration}, one thread")
    print(f"accel_ops {ops.__version__}, threads {ops.get_num_threads()}, NumPy {np.__version__}")
    generator = np.random.default_rng(arguments.seed)
    n_agreed = n_chosen = n_outputs = 0
    for _ in range(arguments.products):
        m, n = generator.integers(1, LARGEST_SIDE, 2, endpoint=True)
        k = generator.integers(1, MOST_TERMS, endpoint=True)
        a, b = generator.standard_normal((m, k)), generator.standard_normal((k, n))
        ours = ops.matmul(a, b)
        agrees = same_bits(ours, blis.multiply_packed(a, b))
        n_agreed += agrees
        n_chosen += same_bits(ours, blis.multiply(a, b))
        n_outputs += ours.size
        if not agrees:
            print(f"  {m} x {k} by {k} x {n}: other bits")
    print(f"{arguments.products} float64 products of random sizes, {n_outputs} results")
    print(f"the same bits as BLIS's packed way: {n_agreed} of {arguments.products}")
    print(f"the same bits as BLIS's own choice, small-matrix kernels included: {n_chosen} of {arguments.products}")
    return 0 if n_agreed == arguments.products else 1


if __name__ == "__main__":
    sys.exit(main())
