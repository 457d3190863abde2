"""What the environment variables say about the number of threads."""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["LARGEST_ACCEPTED", "MAX_THREADS", "VARIABLES", "Environment", "interpreted"]

# In the order of precedence: ours, then those that users of Numba and OpenMP have set already.
VARIABLES: Final = ("ACCEL_OPS_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS")
# More threads than any host has CPUs; a larger number asks for "all" and must not become a thread count.
MAX_THREADS: Final = 65_535
LARGEST_ACCEPTED: Final = 2**63 - 1


class Environment(NamedTuple):
    """What the variables said when they were read."""

    num_threads: int | None
    source: str
    report: dict[str, tuple[str | None, str]]
    warnings: list[str]


def interpreted(variables: Mapping[str, str], cpus: int) -> Environment:
    """Make a number, or words why there is none, of each variable; the first number decides."""
    num_threads: int | None = None
    source = ""
    report: dict[str, tuple[str | None, str]] = {}
    messages: list[str] = []
    for name in VARIABLES:
        text = variables.get(name)
        number, words = _number_in(name, text)
        if source:
            words += f"; {source} comes first" if words != "not set" else ""
        elif number is not None:
            num_threads, source = number, name
            if number > cpus:
                messages.append(
                    f"{name}={text!r} asks for more threads than the {cpus} CPUs that this process may use, "
                    f"which is slower, not faster; unset it to use all {cpus}"
                )
        elif words.startswith("skipped"):
            messages.append(f"{name}={text!r} is {words}; correct it or unset it")
        report[name] = (text, words)
    return Environment(num_threads, source, report, messages)


def _number_in(name: str, text: str | None) -> tuple[int | None, str]:
    """Return the number that a variable's text stands for, or None, and that in words."""
    if text is None:
        return None, "not set"
    # OpenMP takes a list, one entry for each level of nesting.
    entry = (text.partition(",")[0] if name == "OMP_NUM_THREADS" else text).strip()
    if not entry:
        return None, "empty, which means not set"
    digits = entry.lstrip("0")
    # int() would take signs, underscores and digits of other scripts; and refuse very long text.
    plain = entry.isascii() and entry.isdigit() and len(digits) <= 19
    if not plain or int(digits or "0") > LARGEST_ACCEPTED:
        return None, "skipped: not a whole number in plain digits, at most 2**63-1"
    if not digits:
        return None, "0, which means not set"
    number = int(digits)
    if number > MAX_THREADS:
        return MAX_THREADS, f"{MAX_THREADS} threads, the most there can be"
    return number, f"{number} thread{'s' if number > 1 else ''}"
