"""One library in a process of its own, which does what the parent asks and then sleeps in a pipe."""

import gc
import time
import traceback
from importlib.metadata import PackageNotFoundError
from multiprocessing.connection import Connection
from typing import Any

from .cases import FAMILIES
from .contestants import LIBRARIES, Call, Calls, same_bytes

__all__ = ["Missing", "serve"]

ROWS = {row.name: row for rows in FAMILIES.values() for row in rows}
# A timed stretch is made at least this long by repeating quick calls: the clock and one wake-up of a
# thread are then below a percent of it.
SHORTEST_STRETCH_S = 0.010
# Calls go on for so long before the first sample. On a virtual machine the host maps a guest's memory
# in steps: the first dozen calls of a 400 MB join were up to twice as slow as all later ones.
WARM_UP_S = 0.4


class Missing(Exception):  # noqa: N818 - not an error: the table says that the library is not there
    """A library that is not installed."""


def timed(call: Call, n_calls: int) -> float:
    """Seconds per call. Each result is dropped before the next call, as a loader drops its last batch."""
    run = call.run
    started = time.perf_counter()
    for _ in range(n_calls):
        run()
    return (time.perf_counter() - started) / n_calls


def warm_up(call: Call) -> None:
    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        call.run()


def calls_per_stretch(call: Call) -> int:
    """How often to call, found after a warm-up."""
    warm_up(call)
    n_calls = 1
    while (seconds := timed(call, n_calls)) * n_calls < SHORTEST_STRETCH_S:
        n_calls = max(2 * n_calls, int(SHORTEST_STRETCH_S / max(seconds, 1e-9)))
    return n_calls


class Bench:
    """The row that is being measured: its inputs live here until the next row."""

    def __init__(self, library_name: str, n_threads: int) -> None:
        self.library = LIBRARIES[library_name]
        self.calls: Calls = {}
        self.n_calls: dict[str, int] = {}
        try:
            self.facts = self.library.facts(n_threads)
        except (ImportError, PackageNotFoundError) as error:
            raise Missing(str(error)) from error

    def prepare(self, row_name: str) -> dict[str, Any]:
        """Make the inputs, check every byte of each mode's result once, and find the repeats."""
        row = ROWS[row_name]
        arrays = row.make()
        expected = row.expected(arrays)
        self.calls = self.library.calls(row, arrays)
        for mode, call in self.calls.items():
            if not same_bytes(call.view(call.run()), expected):
                msg = f"wrong bytes: {self.library.package} {mode} on {row_name}"
                raise RuntimeError(msg)
        n_bytes = expected.nbytes
        del expected
        self.n_calls = {mode: calls_per_stretch(call) for mode, call in self.calls.items()}
        return {"bytes": n_bytes, "repeats": self.n_calls}

    def measure(self, mode: str, n_stretches: int) -> list[float]:
        """Seconds per call of some stretches, after an untimed call that wakes pages, caches, threads."""
        call = self.calls[mode]
        call.run()
        return [timed(call, self.n_calls[mode]) for _ in range(n_stretches)]

    def drop(self) -> None:
        self.calls, self.n_calls = {}, {}
        gc.collect()
        self.library.forget()


def serve(connection: Connection, library_name: str, n_threads: int) -> None:
    """Answer requests until the parent says None or goes away."""
    gc.disable()  # the same for all: a collection inside a stretch belongs to nobody
    try:
        bench = Bench(library_name, n_threads)
    except Missing as missing:
        connection.send(("missing", str(missing)))
        return
    connection.send(("done", bench.facts))
    while (request := connection.recv()) is not None:
        name, *arguments = request
        try:
            connection.send(("done", getattr(bench, name)(*arguments)))
        except Exception:  # noqa: BLE001 - whatever a peer raises is told, and the others go on
            connection.send(("failed", traceback.format_exc(limit=-2)))
