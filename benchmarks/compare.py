"""accel_ops beside its peers: ``python -m benchmarks.compare``.

Each library runs in a long-lived process of its own, so that no library's threads disturb another. The
parent asks them in turn, round by round (A B C, A B C, ...), so that a slow drift of a noisy machine hits
all alike. A process holds the inputs of the current row only.

Every library runs as it comes. The one setting is torch's number of threads, which is accel_ops' budget.
OpenMP threads spin for some 10 ms after a call, so the parent sleeps for longer than that before it asks
the next process; making them passive instead would slow torch down.

``--busy`` measures each row a second time while another process computes without pause, as on a shared
host, and reports how much slower every contestant got. The neighbour is not pinned: the scheduler places
it as it would any other.
"""

import argparse
import contextlib
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cases import FAMILIES, Row
from .contestants import CONTESTANTS, LIBRARIES
from .report import Measurement, Results, ceiling_lines, goal_lines, plot, table_lines, write_csv
from .worker import serve

# Two samples in each of 15 rounds are a median of 30. Beside a busy neighbour the same 30 come in longer
# runs: a process that has just slept is favoured by the scheduler, and contention shows after that.
ROUNDS, SAMPLES_PER_ROUND = 15, 2
BUSY_ROUNDS, BUSY_SAMPLES_PER_ROUND = 3, 10
# Longer than OpenMP's threads spin after their last work (10 ms measured with torch 2.13).
SETTLE_S = 0.025
# A peer that does not answer for so long is taken to hang, and the others go on without it.
DEADLINE_S = 300.0

NEIGHBOUR = """
import os
parent = os.getppid()
print("started", flush=True)
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


class PeerError(Exception):
    """A worker that failed, hung or died; the text says which."""


class Worker:
    """The parent's end of one library's process."""

    def __init__(self, name: str, n_threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, n_threads), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self.answer()
        except PeerError:
            self.stop()
            raise

    def answer(self) -> Any:
        if not self.connection.poll(DEADLINE_S):
            self.process.kill()
            msg = f"{self.name}: no answer for {DEADLINE_S:.0f} s"
            raise PeerError(msg)
        try:
            status, value = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join(10)
            msg = f"{self.name}: process ended with status {self.process.exitcode}"
            raise PeerError(msg) from error
        if status != "done":
            msg = f"{self.name}: {status}: {value.strip()}"
            raise PeerError(msg)
        return value

    def ask(self, *request: Any) -> Any:
        try:
            self.connection.send(request)
        except OSError as error:
            msg = f"{self.name}: process has ended"
            raise PeerError(msg) from error
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy; the neighbour also ends by itself if this process dies."""
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        yield
    finally:
        neighbour.kill()
        neighbour.communicate()


def start_workers() -> tuple[dict[str, Worker], list[str]]:
    """accel_ops first: its budget is the number of threads the others get."""
    workers: dict[str, Worker] = {}
    absent: list[str] = []
    n_threads = len(os.sched_getaffinity(0))
    for name in sorted(LIBRARIES, key=lambda name: name != "accel_ops"):
        try:
            workers[name] = Worker(name, n_threads)
        except PeerError as error:
            absent.append(str(error))
            continue
        if name == "accel_ops":
            n_threads = workers[name].facts["threads"]
    return {name: workers[name] for name in LIBRARIES if name in workers}, absent


def measure_rounds(
    results: Results, row: Row, workers: dict[str, Worker], rounds: int, n_samples: int, load: str
) -> None:
    running = [c for c in CONTESTANTS if (row.name, *c, load) in results.measurements]
    for _ in range(rounds):
        for library, mode in list(running):
            time.sleep(SETTLE_S)
            try:
                samples = workers[library].ask("measure", mode, n_samples)
            except PeerError as error:
                results.failures.append(f"{row.name}: {error}")
                running.remove((library, mode))
                continue
            results.measurements[row.name, library, mode, load].samples.extend(samples)


def measure_row(
    results: Results, row: Row, workers: dict[str, Worker], rounds: int, n_samples: int, busy: bool
) -> None:
    for library, worker in workers.items():
        try:
            prepared = worker.ask("prepare", row.name)
        except PeerError as error:
            results.failures.append(f"{row.name}: {error}")
            continue
        for mode, repeats in prepared["repeats"].items():
            for load in ("quiet", "busy") if busy else ("quiet",):
                key = (row.name, library, mode, load)
                results.measurements[key] = Measurement(prepared["bytes"], repeats)
    measure_rounds(results, row, workers, rounds, n_samples, "quiet")
    if busy:
        with busy_neighbour():
            measure_rounds(results, row, workers, rounds, n_samples, "busy")
    for worker in workers.values():
        with contextlib.suppress(PeerError):  # its failure has been noted already
            worker.ask("drop")


def machine_lines(workers: dict[str, Worker]) -> Iterator[str]:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    huge_pages = "unknown"
    with contextlib.suppress(OSError):
        huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    yield f"CPU: {model}; {len(os.sched_getaffinity(0))} usable; load average {load}; huge pages {huge_pages}"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    for name, worker in workers.items():
        yield f"{name}: version {worker.facts['version']}, threads {worker.facts['threads']}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description="accel_ops beside its peers")
    names = [row.name for rows in FAMILIES.values() for row in rows]
    rounds = f"{ROUNDS} of {SAMPLES_PER_ROUND} samples, with --busy {BUSY_ROUNDS} of {BUSY_SAMPLES_PER_ROUND}"
    output = Path("benchmarks/results")
    add = parser.add_argument
    add("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    add("--only", choices=list(FAMILIES), help="measure one family of operations")
    add("--rounds", type=int, help=rounds)
    add("--busy", action="store_true", help="again with another process busy on one core")
    add("--output", type=Path, default=output, help="folder of the CSV, the plot and the table (%(default)s)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    families = [arguments.only] if arguments.only else list(FAMILIES)
    rows = [row for family in families for row in FAMILIES[family] if row.name in arguments.rows]
    n_samples = BUSY_SAMPLES_PER_ROUND if arguments.busy else SAMPLES_PER_ROUND
    n_rounds = arguments.rounds or (BUSY_ROUNDS if arguments.busy else ROUNDS)
    results = Results(rows)
    workers, absent = start_workers()
    facts = list(machine_lines(workers))
    print("\n".join(facts))
    for line in absent:
        print(f"not measured: {line}")
    try:
        for row in rows:
            print(f"measuring {row.name}", file=sys.stderr, flush=True)
            measure_row(results, row, workers, n_rounds, n_samples, arguments.busy)
    finally:
        for worker in workers.values():
            worker.stop()
    lines = [
        *(f"{n_rounds} rounds of {n_samples} samples; medians, and quartiles of the samples", ""),
        *(*table_lines(results), ""),
        *(*ceiling_lines(results), ""),
        *goal_lines(results),
    ]
    print("\n".join(["", *lines]))
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = "contention" if arguments.busy else "comparison"
    write_csv(results, arguments.output / f"{name}.csv")
    plot(results, arguments.output / f"{name}.png", facts[0].split(";")[0])
    (arguments.output / f"{name}.txt").write_text("\n".join([*facts, *lines, ""]))
    print(f"written: {arguments.output}/{name}.csv, .png, .txt")
    for failure in results.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if results.failures or "accel_ops" not in workers else 0


if __name__ == "__main__":
    sys.exit(main())
