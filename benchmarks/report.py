"""What a run found, as tables, goals, a CSV and a plot."""

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import Row
from .contestants import CONTESTANTS

__all__ = ["Measurement", "Results", "ceiling_lines", "goal_lines", "plot", "table_lines", "write_csv"]

# What torch.cat(out=) reached with two threads on a quiet two-core Zen 4 host: a yardstick that stays the
# same from run to run, beside the ceiling that this run measured.
REFERENCE_GB_PER_S = 28.0
# Outputs from here on are far larger than any cache: they show what the memory allows.
CEILING_BYTES = 200_000_000
# Arrow is compared where the copy counts, not the call.
ARROW_BYTES = 8_000_000
SLOWEST_AGAINST_TORCH_OUT = 1.05
SLOWEST_BUSY = 2.5
# The figures of a median sample, then the samples themselves.
CSV_COLUMNS = [
    *("row", "library", "mode", "load", "output_bytes", "calls_per_sample"),
    *("median_ms", "min_ms", "quartile_1_ms", "quartile_3_ms", "max_ms"),
    *("gb_per_s", "times_numpy_fresh", "times_numpy_out", "samples_ms"),
]


@dataclass
class Measurement:
    """The samples of one contestant on one row, in seconds per call."""

    output_bytes: int
    repeats: int
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    @property
    def gb_per_s(self) -> float:
        return self.output_bytes / self.median / 1e9


@dataclass
class Results:
    """Measurements by (row, library, mode, load), where load is ``quiet`` or ``busy``."""

    rows: list[Row]
    measurements: dict[tuple[str, str, str, str], Measurement] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def get(self, row: Row, library: str, mode: str, load: str = "quiet") -> Measurement | None:
        found = self.measurements.get((row.name, library, mode, load))
        return found if found is not None and found.samples else None

    def ratio(self, row: Row, slow: tuple[str, str], fast: tuple[str, str]) -> float | None:
        """How many times faster ``fast`` is than ``slow``: a ratio of quiet medians."""
        slow_one, fast_one = self.get(row, *slow), self.get(row, *fast)
        return slow_one.median / fast_one.median if slow_one and fast_one else None

    def slowdown(self, row: Row, library: str, mode: str) -> float | None:
        quiet, busy = self.get(row, library, mode), self.get(row, library, mode, "busy")
        return busy.median / quiet.median if quiet and busy else None

    def measured(self) -> Iterator[tuple[Row, str, str, Measurement]]:
        for row in self.rows:
            for library, mode in CONTESTANTS:
                if found := self.get(row, library, mode):
                    yield row, library, mode, found


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def table_lines(results: Results) -> Iterator[str]:
    """One line per row and contestant."""
    with_busy = any(load == "busy" for *_, load in results.measurements)
    yield (
        f"{'row':<17} {'contestant':<16} {'median ms':>9} {'quartiles ms':>18} {'GB/s':>6}"
        f" {'x NumPy fresh':>13} {'x NumPy out=':>12}" + (f" {'busy/quiet':>10}" if with_busy else "")
    )
    last = None
    for row, library, mode, found in results.measured():
        if last not in (None, row.name):
            yield ""
        first, third = found.quartiles
        spread = f"{milliseconds(first)} .. {milliseconds(third)}"
        line = (
            f"{row.name if last != row.name else '':<17} {library + ' ' + mode:<16}"
            f" {milliseconds(found.median):>9} {spread:>18} {found.gb_per_s:>6.1f}"
            f" {times(results.ratio(row, ('NumPy', 'fresh'), (library, mode))):>13}"
            f" {times(results.ratio(row, ('NumPy', 'out='), (library, mode))):>12}"
        )
        yield line + (f" {times(results.slowdown(row, library, mode)):>10}" if with_busy else "")
        last = row.name


def ceiling_lines(results: Results) -> Iterator[str]:
    """How much of what the memory allows is reached where nothing but bytes moves."""
    plain = [row for row in results.rows if row.arrow_can]
    torch_out = {row.name: results.get(row, "torch.cat", "out=") for row in plain}
    reached = [m.gb_per_s for m in torch_out.values() if m and m.output_bytes >= CEILING_BYTES]
    ceiling = max(reached, default=None)
    if ceiling is None:
        yield f"ceiling: not measured (needs torch and a plain row of {CEILING_BYTES // 10**6} MB or more)"
    else:
        yield f"ceiling: {ceiling:.1f} GB/s, the best of torch.cat(out=) in this run"
    for row in plain:
        for mode in ("fresh", "out="):
            found = results.get(row, "accel_ops", mode)
            if found is None or found.output_bytes < CEILING_BYTES:
                continue
            of_ceiling = "" if ceiling is None else f", {found.gb_per_s / ceiling:.0%} of the ceiling"
            yield (
                f"  {row.name} {mode}: {found.gb_per_s:.1f} GB/s{of_ceiling},"
                f" {found.gb_per_s / REFERENCE_GB_PER_S:.0%} of {REFERENCE_GB_PER_S:.0f} GB/s"
            )


def goals(results: Results, row: Row) -> Iterator[tuple[str, float | None, float, bool]]:
    """Each goal of a row: its words, the figure, the limit, and whether more is better."""
    ours, ours_out = ("accel_ops", "fresh"), ("accel_ops", "out=")
    fresh = results.get(row, *ours)
    if fresh is None:
        return
    if row.fresh_goal:
        yield "x NumPy fresh", results.ratio(row, ("NumPy", "fresh"), ours), row.fresh_goal, True
    if row.out_goal:
        yield "out= x NumPy out=", results.ratio(row, ("NumPy", "out="), ours_out), row.out_goal, True
        if row.out_goal > 1:
            against_torch = results.ratio(row, ours_out, ("torch.cat", "out="))
            yield "out= time / torch out= time", against_torch, SLOWEST_AGAINST_TORCH_OUT, False
    if row.microseconds_goal:
        for library, mode in (ours, ours_out):
            found = results.get(row, library, mode)
            yield f"{mode} microseconds", found and found.median * 1e6, row.microseconds_goal, False
    yield "x MAX", results.ratio(row, ("MAX", "fresh"), ours), 1.0, True
    if fresh.output_bytes >= ARROW_BYTES:
        yield "x Arrow", results.ratio(row, ("Arrow", "fresh"), ours), 1.0, True
    for library, mode in (ours, ours_out):
        yield f"{mode} busy/quiet", results.slowdown(row, library, mode), SLOWEST_BUSY, False


def goal_lines(results: Results) -> Iterator[str]:
    """Every goal that this run could measure, met or missed."""
    n_missed = n_goals = 0
    for row in results.rows:
        for words, figure, limit, more_is_better in goals(results, row):
            if figure is None:
                continue
            met = figure >= limit if more_is_better else figure <= limit
            n_goals += 1
            n_missed += not met
            verdict, bound = "met" if met else "MISSED", "at least" if more_is_better else "at most"
            yield f"  {verdict:<6} {row.name:<17} {words}: {figure:.2f} ({bound} {limit:.2f})"
    yield f"goals: {n_goals - n_missed} of {n_goals} met"


def write_csv(results: Results, path: Path) -> None:
    """Every figure, the single samples included."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for (name, library, mode, load), found in results.measurements.items():
            if not found.samples:
                continue
            bases = [results.measurements.get((name, "NumPy", kind, load)) for kind in ("fresh", "out=")]
            first, third = found.quartiles
            seconds = [found.median, min(found.samples), first, third, max(found.samples)]
            writer.writerow(
                [name, library, mode, load, found.output_bytes, found.repeats]
                + [f"{1e3 * value:.6g}" for value in seconds]
                + [f"{found.gb_per_s:.4g}"]
                + [f"{base.median / found.median:.4g}" if base and base.samples else "" for base in bases]
                + [" ".join(f"{1e3 * value:.6g}" for value in found.samples)]
            )


def plot(results: Results, path: Path, subtitle: str) -> None:
    """Horizontal bars on a logarithmic axis: how many times NumPy's fresh speed, per row."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    bars: list[tuple[float, float, str, str]] = []  # place, ratio, label, colour
    names: list[tuple[float, str]] = []
    contestants = [c for c in CONTESTANTS if c != ("NumPy", "fresh")]
    palette: dict[Any, str] = dict(zip(contestants, mpl.color_sequences["tab10"], strict=False))
    place = 0.0
    for row in results.rows:
        top = place
        for contestant in contestants:
            ratio = results.ratio(row, ("NumPy", "fresh"), contestant)
            if ratio is not None:
                bars.append((place, ratio, " ".join(contestant), palette[contestant]))
                place += 1
        names.append(((top + place - 1) / 2, row.name))
        place += 0.8
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.17 * place), layout="constrained")
    low, high = 0.1, max([4.0, *(ratio for _, ratio, _, _ in bars)]) * 1.4
    axes.set(xscale="log", xlim=(low, high), ylim=(place, -1.5))
    axes.set_xlabel("times NumPy's speed with a fresh output")
    seen: set[str] = set()
    for at, ratio, label, colour in bars:
        # A bar starts at 1, NumPy's own speed; one that would leave the axis is cut, its figure is not.
        end = max(ratio, low)
        axes.barh(at, end - 1, left=1, height=0.9, color=colour, label=None if label in seen else label)
        beside = "right" if 2 * low < ratio < 1 else "left"
        colour = "white" if ratio <= 2 * low else "black"
        axes.text(end, at, f" {ratio:.3g} ", va="center", ha=beside, color=colour, fontsize=6.5)
        seen.add(label)
    axes.set(xscale="log", xlim=(low, high), ylim=(place, -1.5), xlabel="times NumPy's speed with a fresh output")
    axes.set_xticks(ticks := [0.1, 0.2, 0.5, 1, 2, 5, 10], [f"{tick:g}" for tick in ticks])
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"Joining a batch\n{subtitle}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
