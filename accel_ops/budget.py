"""How many threads one call may use: the budget, and where it comes from.

The first of these that says something decides: the `threads` block opened last in this context,
`set_num_threads`, the environment variables, the CPUs that the process may use. A ceiling placed through
threadpoolctl caps whichever it was.

There is no lock: every change is one assignment or one dict operation, so that neither a fork nor a
signal handler can find the state half changed.
"""

import functools
import inspect
import operator
import os
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, SupportsIndex, TypeVar, cast

import numpy as np

from accel_ops import limits
from accel_ops.cpu import pool
from accel_ops.environment import LARGEST_ACCEPTED, MAX_THREADS, Environment, interpreted
from accel_ops.errors import ThreadingWarning, warn

__all__ = ["ThreadInfo", "get_num_threads", "set_num_threads", "thread_info", "threads"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class ThreadInfo(NamedTuple):
    """What `thread_info` found."""

    num_threads: int
    """Threads that one call may use here and now, the calling thread included."""
    source: str
    """Where the number comes from: "threads()", "set_num_threads()", the name of an environment variable,
    "available CPUs", or "threadpoolctl" while its ceiling is below what the others say."""
    available_cpus: int
    """CPUs that this process may use."""
    ceiling: int | None
    """The ceiling that threadpoolctl placed, or None."""
    environment: Mapping[str, tuple[str | None, str]]
    """For each variable its text (None if not set) and, in words, what was made of it."""
    pool_size: int
    """Worker threads that have been started."""


class Ceiling(NamedTuple):
    """One limit that threadpoolctl placed on top of every source."""

    limit: int | None
    """None lifts the ceilings placed before, for as long as this one lasts."""
    thread: int | None
    """The thread that can take it back; None where no thread can, because none had asked for the value."""
    unlimited: int
    """The budget at that moment without any ceiling."""


_open_blocks: ContextVar[tuple["_ThreadsBlock", ...]] = ContextVar("accel_ops_open_blocks", default=())
_set_by_call: int | None = None
_environment: Environment | None = None
_environment_claim: dict[str, Environment] = {}
# By serial number, in the order of placing: the last one decides.
_ceilings: dict[int, Ceiling] = {}


def get_num_threads() -> int:
    """Return how many threads one call may use, the calling thread included.

    Returns
    -------
    int
        The budget of this context, at least 1.

    Notes
    -----
    *Determinism:* no result depends on it.

    *Threads:* the value holds for the calling context; `thread_info` says where it comes from.

    Examples
    --------
    >>> import accel_ops as ops
    >>> with ops.threads(2):
    ...     ops.get_num_threads()
    2
    """
    num_threads = _before_ceiling()[0]
    # The empty dict is asked first: this runs in every call.
    if _ceilings and (ceiling := current_ceiling()) is not None and ceiling < num_threads:
        return ceiling
    return num_threads


def set_num_threads(n: SupportsIndex | None) -> None:
    """Set the budget of the whole process, wherever no `threads` block is open.

    Parameters
    ----------
    n : int or None
        Threads for one call, from 1 to 2**63-1; what exceeds 65,535 counts as 65,535. None takes the
        setting back, so that the environment or the available CPUs decide again.

    Raises
    ------
    ValueError
        If `n` is anything else.

    Notes
    -----
    *Determinism:* no result depends on it.

    *Threads:* for all threads of the process. A number above the available CPUs gives a
    `ThreadingWarning` before the change, and is used.

    Examples
    --------
    >>> import accel_ops as ops
    >>> ops.set_num_threads(1)
    >>> ops.get_num_threads()
    1
    >>> ops.set_num_threads(None)
    """
    global _set_by_call
    number = None if n is None else _validated(n, "or None to take the setting back")
    if number is not None and number > (cpus := limits.available_cpus()):
        warn(
            f"set_num_threads({number}) asks for more threads than the {cpus} CPUs that this process may "
            f"use, which is slower, not faster; set_num_threads(None) uses all {cpus}",
            ThreadingWarning,
        )
    _set_by_call = number


def threads(n: SupportsIndex) -> "_ThreadsBlock":
    """Set the budget for a block of code or a function, in the calling context only.

    Parameters
    ----------
    n : int
        Threads for one call, from 1 to 2**63-1; what exceeds 65,535 counts as 65,535.

    Returns
    -------
    context manager and decorator
        For a ``with`` block, or for a ``def`` or ``async def`` function. It can be used again, also
        inside itself.

    Raises
    ------
    ValueError
        If `n` is anything else. The budget stays as it is.
    TypeError
        If it decorates a generator function or a class.

    Notes
    -----
    *Determinism:* no result depends on it.

    *Threads:* local to the context: ``asyncio.to_thread`` and new tasks inherit it, a new
    ``threading.Thread`` starts outside. Of the blocks still open in a context the last opened decides,
    in whatever order they close.

    Examples
    --------
    >>> import accel_ops as ops
    >>> @ops.threads(3)
    ... def budget():
    ...     return ops.get_num_threads()
    >>> budget()
    3
    """
    return _ThreadsBlock(_validated(n, "such as threads(1)"))


def thread_info() -> ThreadInfo:
    """Tell the budget, where it comes from, and what else was considered.

    Returns
    -------
    ThreadInfo
        Number, source, available CPUs, ceiling, environment variables and the size of the pool.

    Notes
    -----
    *Determinism:* no result depends on it.

    *Threads:* starts none.

    Examples
    --------
    >>> import accel_ops as ops
    >>> with ops.threads(1):
    ...     ops.thread_info().source
    'threads()'
    """
    num_threads, source = _before_ceiling()
    ceiling = current_ceiling()
    if ceiling is not None and ceiling < num_threads:
        num_threads, source = ceiling, "threadpoolctl"
    return ThreadInfo(
        num_threads=num_threads,
        source=source,
        available_cpus=limits.available_cpus(),
        ceiling=ceiling,
        environment=dict(_read_environment().report),
        pool_size=pool.size(),
    )


class _ThreadsBlock:
    """What `threads` returns. It holds no state but the number, so any context may use it at any time."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def __repr__(self) -> str:
        return f"threads({self.n_threads})"

    def __enter__(self) -> None:
        _open_blocks.set((*_open_blocks.get(), self))

    def __exit__(self, *_: object) -> None:
        blocks = _open_blocks.get()
        # Not a reset to the value at entry: blocks opened since then may still be open.
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index] is self:
                _open_blocks.set(blocks[:index] + blocks[index + 1 :])
                return

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        if isinstance(function, type) or not callable(function):
            message = f"{self!r} decorates functions, got {function!r}; decorate its methods instead"
            raise TypeError(message)
        if _is_kind(function, inspect.isgeneratorfunction) or _is_kind(function, inspect.isasyncgenfunction):
            message = (
                f"{self!r} cannot decorate the generator function {function!r}, whose body runs after the "
                f"call has returned; write `with {self!r}:` inside it instead"
            )
            raise TypeError(message)
        if _is_kind(function, inspect.iscoroutinefunction):
            asynchronous = cast("Callable[_Parameters, Coroutine[Any, Any, Any]]", function)

            @functools.wraps(function)
            async def awaited(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Any:
                with self:
                    return await asynchronous(*args, **kwargs)

            return cast("Callable[_Parameters, _Result]", awaited)

        @functools.wraps(function)
        def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            with self:
                return function(*args, **kwargs)

        return called


def current_ceiling() -> int | None:
    """Return the limit of the ceiling placed last, or None."""
    while _ceilings:
        try:
            return _ceilings[next(reversed(_ceilings))].limit
        except (KeyError, RuntimeError, StopIteration):
            continue  # another thread placed or removed one between the two steps
    return None


def placed_ceilings() -> tuple[tuple[int, Ceiling], ...]:
    """Return the ceilings in force with their serial numbers, the deciding one last."""
    return tuple(_ceilings.items())


def place_ceiling(serial: int, ceiling: Ceiling) -> None:
    """Put a ceiling on top of every source."""
    _ceilings[serial] = ceiling


def remove_ceiling(serial: int) -> None:
    """Take a ceiling away; the one placed before it decides again."""
    _ceilings.pop(serial, None)


def num_threads_without_ceiling() -> int:
    """Return the budget of this context as if no ceiling had been placed."""
    return _before_ceiling()[0]


def _before_ceiling() -> tuple[int, str]:
    """Return what the deciding source says, and its name."""
    if blocks := _open_blocks.get():
        return blocks[-1].n_threads, "threads()"
    if (set_by_call := _set_by_call) is not None:
        return set_by_call, "set_num_threads()"
    environment = _environment or _read_environment()
    if environment.num_threads is not None:
        return environment.num_threads, environment.source
    return limits.available_cpus(), "available CPUs"


def _read_environment() -> Environment:
    """Return what the variables say; they are read, and warned about, once."""
    global _environment
    if _environment is not None:
        return _environment
    environment = interpreted(os.environ, limits.available_cpus())
    # Threads that come here at the same moment read the same; one of them gives the warnings.
    if _environment_claim.setdefault("claim", environment) is environment:
        try:
            for message in environment.warnings:
                warn(message, ThreadingWarning)
        except BaseException:  # an interrupt too
            # The user made warnings errors: nothing has been taken over, the next call says it again.
            _environment_claim.clear()
            raise
    _environment = environment
    return environment


def _validated(n: object, cure: str) -> int:
    """Return the thread count that the argument stands for."""
    if not isinstance(n, bool | np.bool):
        try:
            number = operator.index(cast("SupportsIndex", n))
        except TypeError:
            pass
        else:
            if 1 <= number <= LARGEST_ACCEPTED:
                return min(number, MAX_THREADS)
    # repr() refuses very long integers.
    long = isinstance(n, int) and n.bit_length() > 128
    received = f"an integer of {cast('int', n).bit_length()} bits" if long else repr(n)
    message = f"`n` must be an integer from 1 to 2**63-1, got {received}; give a thread count, {cure}"
    raise ValueError(message)


def _is_kind(function: Callable[..., object], test: Callable[[object], bool]) -> bool:
    """Apply the test to a function, or to what calling an object runs."""
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - not a test of callable
