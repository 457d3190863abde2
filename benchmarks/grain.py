"""What one more thread costs and gains: ``python -m benchmarks.grain``.

The measurement behind ``GRAIN`` and ``GRAIN_BYTES`` of ``accel_ops/cpu/product_pieces.py``, and behind
``_SHARED_WORK`` of ``matrix_products.py``, below which one pair of matrices is not cut. It runs accel_ops alone and
needs a machine on which nothing else computes: a second thread that finds its core taken gains nothing.

- **waking**: how long after a call has begun a worker begins its first piece, while the caller computes its own; with
  calls one after the other, and after 10 ms of rest. The core could have multiplied so many pairs meanwhile.
- **gaining**: the time of a product at budgets 1 and 2, the samples alternating, at sizes below and above the cut-off.
  Below it the cut-offs are lowered so far that two threads share the product, in two pieces.

Three products are measured, since each has its own cut-off: a stack of 16 x 16 matrices (2 ``GRAIN`` multiplications
in all), one square matrix by another (more than ``_SHARED_WORK`` multiplications) and a square matrix by a vector
(2 ``GRAIN_BYTES`` of matrix). "Gains from" is the smallest size from which on two threads took at most 0.95 of the
time of one. All in float64.
"""

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import accel_ops as ops
from accel_ops.cpu import matrix_products, pool, product_pieces, vector_products

from .cases import random_array
from .contestants import Call
from .worker import calls_per_stretch, timed

WAKE_UPS, REST_S = 300, 0.010
SAMPLES = 15
# Two threads gain where they take no more than this part of the time of one: less is within the noise.
GAINS_BELOW = 0.95
# Multiplications that keep the caller busy while the worker wakes: about a millisecond.
BUSY_SIDE, BUSY_ITEMS = 64, 60


@dataclass(frozen=True)
class Family:
    """Products of growing size, and the constants that decide whether they go parallel."""

    name: str
    sizes: tuple[int, ...]
    operands: Callable[[int], tuple[np.ndarray, np.ndarray]]
    # What is compared with the cut-off, and the cut-off.
    measure: str
    amount: Callable[[int], int]
    cut_off: int
    constant: str


def square(n: int, seed: int) -> np.ndarray:
    return random_array((n, n), "float64", seed)


FAMILIES = (
    Family(
        "items of 16 x 16",
        (64, 128, 256, 384, 512, 768, 1024, 2048, 4096),
        lambda n: (random_array((n, 16, 16), "float64", 0), random_array((n, 16, 16), "float64", 1)),
        "multiplications",
        lambda n: n * 16**3,
        2 * product_pieces.GRAIN,
        "2 GRAIN",
    ),
    Family(
        "n x n by n x n",
        (96, 128, 160, 192, 224, 256, 320, 384, 416, 512),
        lambda n: (square(n, 0), square(n, 1)),
        "multiplications",
        lambda n: n**3,
        matrix_products._SHARED_WORK + 1,
        "_SHARED_WORK",
    ),
    Family(
        "n x n by a vector",
        (256, 384, 512, 640, 768, 1024, 1448, 2048),
        lambda n: (square(n, 0), random_array((n,), "float64", 1)),
        "bytes of the matrix",
        lambda n: 8 * n * n,
        2 * product_pieces.GRAIN_BYTES,
        "2 GRAIN_BYTES",
    ),
)

# The constants that keep a product on one thread, or in one piece, and what lets one of a given amount go on two.
CUT_OFFS: tuple[tuple[ModuleType, str, Callable[[int], int]], ...] = (
    (product_pieces, "GRAIN", lambda amount: amount // 2),
    (product_pieces, "GRAIN_BYTES", lambda amount: amount // 2),
    (matrix_products, "GRAIN", lambda amount: amount // 2),
    (matrix_products, "_SHARED_WORK", lambda amount: amount - 1),
    (matrix_products, "_LEAST_COLUMNS", lambda _amount: 64),
    (vector_products, "_RUN_BYTES", lambda amount: amount // 2),
)


# What a thread costs


def wake_ups(rest_s: float) -> list[float]:
    """Microseconds from the beginning of a call to that of a worker's first piece; the caller computes meanwhile."""
    busy = [random_array((BUSY_ITEMS, BUSY_SIDE, BUSY_SIDE), "float64", seed) for seed in (0, 1)]
    out = np.empty_like(busy[0])
    caller = threading.get_ident()
    begun: list[float] = []

    def piece(_index: int) -> None:
        if threading.get_ident() != caller:
            begun.append(time.perf_counter())
        else:
            ops.matmul(*busy, out=out)  # in place: it is inside a call

    waits = []
    for _ in range(WAKE_UPS):
        time.sleep(rest_s)
        begun.clear()
        started = time.perf_counter()
        pool.run(piece, 2, workers=2)
        if begun:
            waits.append(1e6 * (begun[0] - started))
    return waits


def dispatch_us() -> float:
    """Microseconds that a call of two empty pieces takes its caller longer than doing them itself."""
    shared = Call(lambda: pool.run(abs, 2, workers=2))
    alone = Call(lambda: (abs(0), abs(1)))
    n_calls = calls_per_stretch(shared)
    times = [[timed(call, n_calls) for call in (shared, alone)] for _ in range(SAMPLES)]
    return 1e6 * (statistics.median(first for first, _ in times) - statistics.median(last for _, last in times))


def multiplications_per_us() -> float:
    """How many pairs of float64 one core multiplies in a microsecond, in a product that the caches hold."""
    n = 256
    a, b, out = square(n, 0), square(n, 1), np.empty((n, n))
    call = Call(lambda: ops.matmul(a, b, out=out))
    with ops.threads(1):
        n_calls = calls_per_stretch(call)
        return n**3 / (1e6 * min(timed(call, n_calls) for _ in range(SAMPLES)))


def cost_lines() -> Iterator[str]:
    rate = multiplications_per_us()
    yield f"one core: {rate / 1e3:.1f} * 10**9 multiplications per second"
    for words, rest_s in (("one after the other", 0.0), ("after 10 ms of rest", REST_S)):
        waits = wake_ups(rest_s)
        if len(waits) < 2:
            yield f"calls {words}: the worker never came in time"
            continue
        first, median, third = statistics.quantiles(waits, n=4, method="inclusive")
        yield (
            f"calls {words}: a worker begins after {median:.0f} us (quartiles {first:.0f} .. {third:.0f}),"
            f" in which a core does 2**{np.log2(median * rate):.1f} multiplications"
        )
    yield f"a call of two empty pieces costs its caller {dispatch_us():.0f} us"


# What it gains


@contextlib.contextmanager
def cut_offs_up_to(amount: int) -> Iterator[None]:
    """Let two threads share a product of this amount; one that they would share anyway is cut as always."""
    before = [(module, name, getattr(module, name)) for module, name, _ in CUT_OFFS]
    for module, name, lowered in CUT_OFFS:
        setattr(module, name, min(getattr(module, name), lowered(amount)))
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def times_of(family: Family, size: int) -> tuple[float, float]:
    """Median seconds of a product as the package does it on one thread, and on two whatever its size."""
    operands = family.operands(size)
    out = np.empty_like(ops.matmul(*operands))
    call = Call(lambda: ops.matmul(*operands, out=out))

    def alone(n_calls: int | None) -> Any:
        with ops.threads(1):
            return calls_per_stretch(call) if n_calls is None else timed(call, n_calls)

    def shared(n_calls: int) -> float:
        with ops.threads(2), cut_offs_up_to(family.amount(size)):
            call.run()
            return timed(call, n_calls)

    n_calls = alone(None)
    samples = [(alone(n_calls), shared(n_calls)) for _ in range(SAMPLES)]
    return statistics.median(one for one, _ in samples), statistics.median(two for _, two in samples)


def gain_lines(family: Family) -> Iterator[str]:
    yield f"{family.name:<18} {family.measure:>19} {'1 thread us':>11} {'2 threads us':>12} {'part':>5}  package's own"
    gains_from = None
    for size in family.sizes:
        one, two = times_of(family, size)
        amount = family.amount(size)
        own = "2 threads" if amount >= family.cut_off else "1 thread"
        figures = f"{f'2**{np.log2(amount):.1f}':>19} {1e6 * one:>11.0f} {1e6 * two:>12.0f} {two / one:>5.2f}"
        yield f"{size:>18} {figures}  {own}"
        if two > GAINS_BELOW * one:
            gains_from = None
        elif gains_from is None:
            gains_from = amount
    found = (
        "at none of these sizes (does another process compute?)"
        if gains_from is None
        else f"from 2**{np.log2(gains_from):.1f} {family.measure}"
    )
    yield f"two threads gain {found}; the cut-off, {family.constant}, is 2**{np.log2(family.cut_off):.1f}"


def main() -> int:
    if len(os.sched_getaffinity(0)) < 2:
        print("two threads need two CPUs", file=sys.stderr)
        return 1
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"accel_ops {ops.__version__}; {len(os.sched_getaffinity(0))} usable CPUs; load average {load}")
    print(f"float64, medians of {SAMPLES} samples")
    for line in cost_lines():
        print(line, flush=True)
    for family in FAMILIES:
        print()
        for line in gain_lines(family):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
