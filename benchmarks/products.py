"""Products beside NumPy's OpenBLAS: ``python -m benchmarks.products``.

Each library runs at each number of threads in a long-lived process of its own. NumPy's number of threads is set by
``OPENBLAS_NUM_THREADS`` before its process starts, that of accel_ops by ``set_num_threads``. An idle OpenBLAS thread
spins for a while and steals the other core, so only one process works at a time, the others sleep in a pipe, and the
parent sleeps after each measurement until OpenBLAS's threads do too. The rounds alternate between the libraries, so
that a slow drift of a noisy machine hits both alike.

Both write to an ``out=`` that is reused, with the same operands. The ratio is NumPy's median time over that of
accel_ops: above 1, accel_ops is faster. Each result is once compared with the other's, to within what the rounding of
its sums allows.

GFLOP/s counts a multiplication and an addition as two operations, those of complex numbers as eight. Where every
operand is used once, memory decides, and GB/s counts 10**9 bytes of operands and result per second.

The peak, of which a part is given, is measured too: what the tile of accel_ops reaches on operands that stay in the
first-level cache, the best of some stretches on as many threads. It is no figure of a data sheet. A complex128 product
consists of float64 operations, so its peak is that of float64.
"""

import argparse
import contextlib
import csv
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from .cases import random_array
from .compare import PeerError, Worker, machine_lines
from .contestants import Call
from .report import Measurement, milliseconds
from .worker import calls_per_stretch, timed, warm_up

# Two samples in each of 9 rounds are a median of 18.
ROUNDS, SAMPLES_PER_ROUND = 9, 2
# Longer than OpenBLAS's threads spin after their last work.
SETTLE_S = 0.1
THREADS = (1, 2)
LIBRARIES = ("NumPy", "accel_ops")
# Operands of the peak fit a first-level cache of 32 KiB with room to spare.
CACHED_BYTES = 20 << 10
PEAK_PRODUCTS, PEAK_STRETCHES = 20_000, 15
TOLERANCES = {"float32": 1e-4, "float64": 1e-10, "complex128": 1e-10}
CSV_COLUMNS = [
    *("row", "threads", "library", "calls_per_sample", "median_ms", "min_ms", "quartile_1_ms", "quartile_3_ms"),
    *("max_ms", "speed", "unit", "part_of_peak", "times_numpy", "goal", "samples_ms"),
]


@dataclass(frozen=True)
class Row:
    """One product, and how many times NumPy's speed is the goal at a number of threads."""

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    dtype: str = "float64"
    operation: str = "matmul"
    goals: dict[int, float] = field(default_factory=dict)

    @property
    def is_memory_bound(self) -> bool:
        return self.operation != "matmul"

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.left[:-1], *(self.right[-1:] if len(self.right) > 1 else ()))

    @property
    def unit(self) -> str:
        return "GB/s" if self.is_memory_bound else "GFLOP/s"

    @property
    def work(self) -> int:
        """Bytes that are read and written, or floating-point operations."""
        shapes = (self.left, self.right, self.result_shape)
        if self.is_memory_bound:
            return sum(int(np.prod(shape)) for shape in shapes) * np.dtype(self.dtype).itemsize
        return int(np.prod(self.result_shape)) * self.left[-1] * (8 if self.dtype == "complex128" else 2)

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        return random_operand(self.left, self.dtype, 0), random_operand(self.right, self.dtype, 1)


def random_operand(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """An array in C order whose every page has been written; real and imaginary parts are alike random."""
    if dtype == "complex128":
        return random_array((*shape[:-1], 2 * shape[-1]), "float64", seed).view(dtype)
    return random_array(shape, dtype, seed)


def rows() -> Iterator[Row]:
    for dtype in ("float64", "float32", "complex128"):
        for n in (256, 512, 1024, 2048):
            goals = {1: 0.97, 2: 0.97} if n >= 512 else {1: 0.97}
            yield Row(f"{dtype}-{n}", (n, n), (n, n), dtype, goals=goals)
    for dtype, goals in (("float64", {1: 1.0, 2: 1.4}), ("complex128", {1: 2.0, 2: 2.0})):
        yield Row(f"10000x16x16-{dtype}", (10_000, 16, 16), (10_000, 16, 16), dtype, goals=goals)
    yield Row("64x200000x64", (64, 200_000), (200_000, 64), goals={2: 1.2})
    for n, goal in ((512, 0.6), (8192, 1.0)):
        goals = {1: goal, 2: goal}
        yield Row(f"matvec-{n}", (n, n), (n,), operation="matvec", goals=goals)
        yield Row(f"vecmat-{n}", (n,), (n, n), operation="vecmat", goals=goals)
    yield Row("vecdot-10000000", (10**7,), (10**7,), operation="vecdot")


ROWS = {row.name: row for row in rows()}


# A process of one library at one number of threads


def numpy_facts(_n_threads: int) -> dict[str, Any]:
    """NumPy's OpenBLAS has read its number of threads from the environment: tell what it made of it."""
    from threadpoolctl import threadpool_info

    blas = next((found for found in threadpool_info() if found["user_api"] == "blas"), None)
    if blas is None:
        return {"version": f"{np.__version__}, BLAS unknown", "threads": "unknown"}
    name = f"{blas['internal_api']} {blas['version']} {blas.get('architecture', '')}".rstrip()
    return {"version": f"{np.__version__} with {name}", "threads": blas["num_threads"]}


def accel_ops_facts(n_threads: int) -> dict[str, Any]:
    import accel_ops as ops

    ops.set_num_threads(n_threads)
    return {"version": ops.__version__, "threads": ops.get_num_threads()}


def numpy_function(operation: str) -> Callable[..., Any]:
    """matvec and vecmat came with NumPy 2.2; matmul with a vector is the same work."""
    return np.vecdot if operation == "vecdot" else np.matmul


def accel_ops_function(operation: str) -> Callable[..., Any]:
    import accel_ops as ops

    function: Callable[..., Any] = getattr(ops, operation)
    return function


FACTS = {"NumPy": numpy_facts, "accel_ops": accel_ops_facts}
FUNCTIONS = {"NumPy": numpy_function, "accel_ops": accel_ops_function}


def cached_product(dtype: str) -> tuple[Callable[[int], None], int]:
    """A loop over the tile on operands that stay in the first-level cache, one pair for each thread.

    Returns what a thread runs, and how many operations that are.
    """
    import numba

    from accel_ops.cpu.elements import element_of, tile_shape
    from accel_ops.cpu.jit import kernel

    zero = np.dtype(dtype).type(0)
    shape = tile_shape(element_of(numba.typeof(zero)))
    m, n = shape.rows, shape.columns
    k = min(256, CACHED_BYTES // (zero.itemsize * (m + n)))
    pairs = [[np.ones(size, dtype) for size in ((m, k), (k, n), (m, n))] for _ in range(max(THREADS))]
    multiply = kernel("product_kernels", "multiply", zero.dtype)

    def run(thread: int) -> None:
        a, b, c = pairs[thread]
        places = np.tile([x.ctypes.data for x in (a, b, c)], PEAK_PRODUCTS)
        multiply(zero, places, m, n, k, *a.strides, *b.strides, c.strides[0], 0, 0, False, 0)

    return run, 2 * m * n * k * PEAK_PRODUCTS


class Bench:
    """The row that is being measured: its operands live here until the next row."""

    def __init__(self, library: str, n_threads: int) -> None:
        self.library, self.n_threads = library, n_threads
        self.facts = FACTS[library](n_threads)
        self.drop()

    def prepare(self, name: str) -> int:
        """Make the operands and the output, warm up, and find how often to call in a timed stretch."""
        row = ROWS[name]
        left, right = row.operands()
        # Nothing that could pass for the result, and every page written.
        self.out = out = np.full(row.result_shape, np.nan, row.dtype)
        function = FUNCTIONS[self.library](row.operation)
        self.call = Call(lambda: function(left, right, out=out))
        self.n_calls = calls_per_stretch(self.call)
        return self.n_calls

    def result(self) -> np.ndarray | None:
        return self.out

    def measure(self, n_stretches: int) -> list[float]:
        """Seconds per call of some stretches, after an untimed call that wakes caches and threads."""
        self.call.run()
        return [timed(self.call, self.n_calls) for _ in range(n_stretches)]

    def drop(self) -> None:
        self.call, self.n_calls, self.out = Call(lambda: None), 0, None
        gc.collect()

    def peak(self, dtype: str) -> float:
        """The most operations per second of some stretches, on all threads."""
        from accel_ops.cpu import pool

        run, operations = cached_product(dtype)
        n = self.n_threads
        call = Call(lambda: pool.run(run, n, workers=n))
        warm_up(call)
        return n * operations / min(timed(call, 1) for _ in range(PEAK_STRETCHES))


def serve(connection: Connection, library: str, n_threads: int) -> None:
    """Answer requests until the parent says None or goes away."""
    gc.disable()  # the same for both: a collection inside a stretch belongs to nobody
    try:
        bench = Bench(library, n_threads)
    except ImportError as error:
        connection.send(("missing", str(error)))
        return
    connection.send(("done", bench.facts))
    while (request := connection.recv()) is not None:
        name, *arguments = request
        try:
            connection.send(("done", getattr(bench, name)(*arguments)))
        except Exception:  # noqa: BLE001 - whatever a library raises is told, and the other rows go on
            connection.send(("failed", traceback.format_exc(limit=-2)))


# The parent


class Child(Worker):
    """The parent's end of the process of one library at one number of threads."""

    def __init__(self, library: str, n_threads: int) -> None:
        self.name = label(library, n_threads)
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, library, n_threads), daemon=True)
        with openblas_threads(n_threads if library == "NumPy" else 1):
            self.process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self.answer()
        except PeerError:
            self.stop()
            raise

    def ask(self, *request: Any) -> Any:
        try:
            return super().ask(*request)
        finally:
            time.sleep(SETTLE_S)


@contextlib.contextmanager
def openblas_threads(n_threads: int) -> Iterator[None]:
    """What a process that is started here finds in its environment."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = str(n_threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def label(library: str, n_threads: int) -> str:
    return f"{library} at {n_threads}"


@dataclass
class Results:
    """Measurements by (row, number of threads, library), and the peak by (dtype, number of threads)."""

    measurements: dict[tuple[str, int, str], Measurement] = field(default_factory=dict)
    peaks: dict[tuple[str, int], float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[Row, int]]:
        for name, n_threads in dict.fromkeys(key[:2] for key in self.measurements):
            yield ROWS[name], n_threads

    def get(self, row: Row, n_threads: int, library: str) -> Measurement | None:
        found = self.measurements.get((row.name, n_threads, library))
        return found if found is not None and found.samples else None

    def speed(self, row: Row, n_threads: int, library: str) -> float | None:
        """10**9 operations or bytes per second."""
        found = self.get(row, n_threads, library)
        return row.work / found.median / 1e9 if found else None

    def part_of_peak(self, row: Row, n_threads: int, library: str) -> float | None:
        speed, peak = self.speed(row, n_threads, library), self.peaks.get((peak_dtype(row), n_threads))
        return speed * 1e9 / peak if speed and peak and not row.is_memory_bound else None

    def ratio(self, row: Row, n_threads: int) -> float | None:
        slow, fast = (self.get(row, n_threads, library) for library in LIBRARIES)
        return slow.median / fast.median if slow and fast else None


def peak_dtype(row: Row) -> str:
    return "float32" if row.dtype == "float32" else "float64"


def check_results(row: Row, n_threads: int, left: np.ndarray, right: np.ndarray) -> None:
    """Compare what the libraries computed, relative to what a sum of so many random terms comes to."""
    tolerance = TOLERANCES[row.dtype]
    scale = float(np.sqrt(row.left[-1]))
    if not np.allclose(left, right, rtol=tolerance, atol=tolerance * scale):
        msg = f"{row.name} at {n_threads}: the results differ by {np.abs(left - right).max():.3g}"
        raise PeerError(msg)


def measure_row(results: Results, row: Row, children: dict[str, Child], n_threads: int, n_rounds: int) -> None:
    both = {library: children[label(library, n_threads)] for library in LIBRARIES}
    try:
        for library, child in both.items():
            results.measurements[row.name, n_threads, library] = Measurement(row.work, child.ask("prepare", row.name))
        check_results(row, n_threads, *(child.ask("result") for child in both.values()))
        for _ in range(n_rounds):
            for library, child in both.items():
                samples = child.ask("measure", SAMPLES_PER_ROUND)
                results.measurements[row.name, n_threads, library].samples.extend(samples)
    except PeerError as error:
        results.failures.append(f"{row.name}: {error}")
    for child in both.values():
        with contextlib.suppress(PeerError):  # its failure has been noted already
            child.ask("drop")


def measure_peaks(results: Results, chosen: list[Row], children: dict[str, Child], threads: list[int]) -> None:
    for n_threads in threads:
        for dtype in dict.fromkeys(peak_dtype(row) for row in chosen if not row.is_memory_bound):
            try:
                results.peaks[dtype, n_threads] = children[label("accel_ops", n_threads)].ask("peak", dtype)
            except PeerError as error:
                results.failures.append(f"peak of {dtype}: {error}")


# What is printed and written


def threads_words(n_threads: int) -> str:
    return f"{n_threads} thread{'s' if n_threads > 1 else ''}"


def table_lines(results: Results) -> Iterator[str]:
    """One line per row, number of threads and library."""
    yield (
        f"{'row':<22} {'contestant':<14} {'median ms':>9} {'quartiles ms':>18} {'speed':>14}"
        f" {'of peak':>7} {'x NumPy':>7}"
    )
    last = None
    for row, n_threads in results.pairs():
        if last not in (None, row.name):
            yield ""
        for library in LIBRARIES:
            found = results.get(row, n_threads, library)
            if found is None:
                continue
            first, third = found.quartiles
            part, ratio = results.part_of_peak(row, n_threads, library), results.ratio(row, n_threads)
            of_peak = "-" if part is None else f"{part:.0%}"
            yield (
                f"{row.name if last != row.name else '':<22} {label(library, n_threads):<14}"
                f" {milliseconds(found.median):>9} {milliseconds(first) + ' .. ' + milliseconds(third):>18}"
                f" {results.speed(row, n_threads, library):>6.1f} {row.unit:<7} {of_peak:>7}"
                f" {f'{ratio:.2f}' if ratio and library == 'accel_ops' else '':>7}"
            ).rstrip()
            last = row.name


def peak_lines(results: Results) -> Iterator[str]:
    if results.peaks:
        yield f"peak: the tile on operands in the first-level cache, the best of {PEAK_STRETCHES} stretches"
    for (dtype, n_threads), peak in results.peaks.items():
        yield f"  {dtype} at {threads_words(n_threads)}: {peak / 1e9:.1f} GFLOP/s"


def goal_lines(results: Results) -> Iterator[str]:
    """Every goal that this run could measure, met or missed."""
    n_missed = n_goals = 0
    for row, n_threads in results.pairs():
        goal, ratio = row.goals.get(n_threads), results.ratio(row, n_threads)
        if goal is None or ratio is None:
            continue
        met = ratio >= goal
        n_goals += 1
        n_missed += not met
        words = f"x NumPy at {threads_words(n_threads)}"
        yield f"  {'met' if met else 'MISSED':<6} {row.name:<22} {words}: {ratio:.2f} (at least {goal:.2f})"
    yield f"goals: {n_goals - n_missed} of {n_goals} met"


def write_csv(results: Results, path: Path) -> None:
    """Every figure, the single samples included."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for row, n_threads in results.pairs():
            for library in LIBRARIES:
                found = results.get(row, n_threads, library)
                if found is None:
                    continue
                first, third = found.quartiles
                seconds = [found.median, min(found.samples), first, third, max(found.samples)]
                part, ratio = results.part_of_peak(row, n_threads, library), results.ratio(row, n_threads)
                is_ours = library == "accel_ops"
                writer.writerow(
                    [row.name, n_threads, library, found.repeats]
                    + [f"{1e3 * value:.6g}" for value in seconds]
                    + [f"{results.speed(row, n_threads, library):.4g}", row.unit, f"{part:.4g}" if part else ""]
                    + [f"{ratio:.4g}" if ratio and is_ours else "", row.goals.get(n_threads, "") if is_ours else ""]
                    + [" ".join(f"{1e3 * value:.6g}" for value in found.samples)]
                )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.products", description="products beside NumPy's OpenBLAS")
    output = Path("benchmarks/results")
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    add("--threads", nargs="+", type=int, choices=THREADS, default=list(THREADS), help="(%(default)s)")
    add("--rounds", type=int, default=ROUNDS, help=f"of {SAMPLES_PER_ROUND} samples (%(default)s)")
    add("--output", type=Path, default=output, help="folder of the CSV and the table (%(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    chosen = [row for row in ROWS.values() if row.name in arguments.rows]
    results = Results()
    children: dict[str, Child] = {}
    try:
        for n_threads in arguments.threads:
            for library in LIBRARIES:
                children[label(library, n_threads)] = Child(library, n_threads)
        facts = list(machine_lines(children))
        print("\n".join(facts))
        measure_peaks(results, chosen, children, arguments.threads)
        for row in chosen:
            for n_threads in arguments.threads:
                print(f"measuring {row.name} at {threads_words(n_threads)}", file=sys.stderr, flush=True)
                measure_row(results, row, children, n_threads, arguments.rounds)
    except PeerError as error:  # one that does not even start: there is nothing to compare with
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    finally:
        for child in children.values():
            child.stop()
    lines = [
        *(f"{arguments.rounds} rounds of {SAMPLES_PER_ROUND} samples; medians, and quartiles of the samples", ""),
        *(*table_lines(results), ""),
        *(*peak_lines(results), ""),
        *goal_lines(results),
    ]
    print("\n".join(["", *lines]))
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_csv(results, arguments.output / "products.csv")
    (arguments.output / "products.txt").write_text("\n".join([*facts, *lines, ""]))
    print(f"written: {arguments.output}/products.csv, .txt")
    for failure in results.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
