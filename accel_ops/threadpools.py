"""Make the budget visible to threadpoolctl, and let it be limited there.

threadpoolctl looks for shared libraries by file name and asks a controller for each. This package has no
library of its own to look for, so its controller goes by one that every process has loaded: the C library.

A limit becomes a ceiling on top of every source of the budget. Leaving ``threadpool_limits`` sets every
library back to the number it reported before, also libraries that were never limited. Taken as a plain
number this would leave a ceiling behind, or undo a `set_num_threads` of the meantime. So the number that
is reported remembers when it was reported, and setting it back removes exactly the ceilings placed since.
"""

import itertools
import operator
import threading
from typing import SupportsIndex

import threadpoolctl

from accel_ops import budget
from accel_ops.environment import MAX_THREADS

__all__ = ["register"]

_serial_numbers = itertools.count(1)
_registered = False


class _Asking(threading.local):
    """Whether this thread has been told a number that it could set back."""

    was_told = False


_asking = _Asking()


class ReportedBudget(int):
    """The budget as reported to threadpoolctl, with the moment and the thread."""

    serial: int
    thread: int

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # In a copy or another process the moment means nothing.
        return int, (int(self),)


class BudgetController(threadpoolctl.LibController):  # type: ignore[misc]  # threadpoolctl has no types
    """Shows the budget to threadpoolctl and takes its limits."""

    user_api = "accel_ops"
    internal_api = "accel_ops"
    filename_prefixes = (
        "libc.so",  # glibc
        "libc-2.",  # glibc before 2.34
        "ld-musl-",  # musl, whose loader and library are one file
        "libsystem.b.",  # macOS
    )

    def get_version(self) -> str:
        """Return the version of accel_ops."""
        from accel_ops import __version__

        return __version__

    def get_num_threads(self) -> ReportedBudget:
        """Return the budget of the calling context."""
        reported = ReportedBudget(budget.get_num_threads())
        reported.serial = next(_serial_numbers)
        reported.thread = threading.get_ident()
        _asking.was_told = True
        return reported

    def set_num_threads(self, num_threads: SupportsIndex) -> None:
        """Place a ceiling, or, given a number that was reported, go back to how things were then.

        A number below 1 counts as 1: code that limits every library at once shall not fail because this
        one has been imported.
        """
        if isinstance(num_threads, ReportedBudget):
            _remove_ceilings_since(num_threads)
        else:
            _place_ceiling(min(max(operator.index(num_threads), 1), MAX_THREADS))


def register() -> None:
    """Tell threadpoolctl about the budget, once.

    Notes
    -----
    *Threads:* starts none and changes no limit.

    Examples
    --------
    >>> import threadpoolctl
    >>> from accel_ops import threadpools
    >>> threadpools.register()
    >>> [entry["user_api"] for entry in threadpoolctl.threadpool_info()].count("accel_ops")
    1
    """
    global _registered
    if not _registered:
        threadpoolctl.register(BudgetController)
        _registered = True


def _remove_ceilings_since(reported: ReportedBudget) -> None:
    """Remove what the thread that was told this number has placed since then.

    Limits of other threads stay until those threads leave them: limits may overlap. A ceiling placed by a
    thread that was never told a number has no one else to remove it.
    """
    for serial, ceiling in budget.placed_ceilings():
        if serial > reported.serial and ceiling.thread in (reported.thread, None):
            budget.remove_ceiling(serial)


def _place_ceiling(limit: int) -> None:
    placed = budget.placed_ceilings()
    thread = threading.get_ident() if _asking.was_told else None
    # Setting back, as a plain number, what was reported without a ceiling means: no ceiling any more.
    lifted = bool(placed) and limit == placed[0][1].unlimited
    ceiling = budget.Ceiling(None if lifted else limit, thread, budget.num_threads_without_ceiling())
    # The same once more would change nothing, and programs that limit before each task would pile it up.
    if not placed or placed[-1][1][:2] != ceiling[:2]:
        budget.place_ceiling(next(_serial_numbers), ceiling)
