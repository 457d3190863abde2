"""The process's one pool of worker threads, and the only place that starts threads.

A call is cut into pieces beforehand, by shape alone. Caller and helpers take tasks (runs of consecutive pieces)
from one shared iterator until none is left, so threads decide who does a piece and never what a piece is.

    run(function, n_pieces, workers=3)
      issue up to 2 tickets  ──►  queue  ──►  idle workers use a ticket, take tasks, leave
      take tasks                              (a ticket nobody used yet is void when the caller is done)
      void the tickets left, wait for the helpers that are inside, raise the failure of the lowest index

Three rules keep it free of deadlocks. A caller never waits for a helper to begin, only for the end of a piece
that one has begun. There is no lock that both a caller and a worker take: shared state consists of containers
whose single operations are atomic, so a signal handler or a fork finds nothing held. A forked child starts with
a new pool, and a call that was being run by the thread that forked does what its lost helpers had taken again.
"""

import _thread
import contextlib
import contextvars
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from accel_ops.cpu.floating_point import reset_floating_point_environment

__all__ = ["Call", "CallCancelledError", "acting_thread", "is_inside_call", "run", "run_apart", "size"]

# A wait that is not a signal handler's business still looks up this often, because an exception set from
# another thread (PyThreadState_SetAsyncExc) does not end a wait for a lock.
_POLL_S = 0.02

_Result = TypeVar("_Result")

_apart = threading.local()  # on a thread of `run_apart`: that it is one, and who waits for it
_inside_call: contextvars.ContextVar[bool] = contextvars.ContextVar("accel_ops_inside_call", default=False)


def is_inside_call() -> bool:
    """Return whether this code runs as a piece of a call; such work is done in place."""
    return _inside_call.get()


def size() -> int:
    """Return how many worker threads the process's pool has started."""
    return len(_pool.workers)


def run(
    function: Callable[[int], object],
    n_pieces: int,
    *,
    workers: int,
    budget: int | None = None,
    tasks: Sequence[int] | None = None,
    call: "Call | None" = None,
) -> None:
    """Run ``function(0) ... function(n_pieces - 1)``, on at most ``workers`` threads, the calling one included.

    Parameters
    ----------
    function
        Called with the index of a piece, in a copy of the caller's context. It must release the GIL to gain
        from helpers, and should take 10 ms at the most: an interrupt waits for the pieces that are being run.
        In a forked child a piece may be run twice.
    n_pieces
        The number of pieces.
    workers
        The most threads that this call is worth.
    budget
        The most threads the process's calls may keep busy for this one to take helpers; ``workers`` if None.
    tasks
        Where each task begins: increasing piece indices, the first 0. None makes each piece a task.
    call
        The Call to use, for an owner that may want to cancel it.

    Raises
    ------
    Exception
        What the piece of the lowest index raised, after which nothing of the call is running any more.
    CallCancelledError
        ``call`` was cancelled.
    """
    call = Call() if call is None else call
    call.run(function, n_pieces, workers, workers if budget is None else budget, tasks)


def run_apart(function: Callable[[], _Result], patience_s: float) -> _Result | None:
    """Run a function on a thread of its own, which no signal interrupts, and return its result.

    The caller waits, so that no more threads are busy than before. An interrupt ends the waiting and not the
    function; so does running out of patience, which returns None. Where no thread can be had the caller runs it, and
    where it is such a thread itself: what it needs may be what it is in the middle of.
    """
    if getattr(_apart, "is_here", False):
        return function()
    ended: queue.SimpleQueue[tuple[_Result | None, BaseException | None]] = queue.SimpleQueue()

    def body() -> None:
        _apart.is_here, _apart.caller = True, caller
        try:
            ended.put((function(), None))
        except BaseException as exc:  # noqa: BLE001 - raised by the caller
            ended.put((None, exc))

    caller = threading.get_ident()
    process = os.getpid()  # before the start, in the middle of which a handler may fork
    try:
        _thread.start_new_thread(body, ())
    except (RuntimeError, MemoryError):
        return function()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and os.getpid() == process:  # a forked child does not have that thread
        with contextlib.suppress(queue.Empty):
            result, failure = ended.get(timeout=_POLL_S)
            if failure is not None:
                raise failure
            return result
    return None


def acting_thread() -> int:
    """Return the thread for which this code works: the waiting one, on a thread of `run_apart`."""
    caller: int = getattr(_apart, "caller", 0)
    return caller or threading.get_ident()


class CallCancelledError(Exception):
    """The owner of a Call cancelled it before its last piece had begun."""


class Call:
    """One call of `run`: what its caller and its helpers share."""

    def __init__(self) -> None:
        self.cancelled = False
        self._process = os.getpid()
        self._issued: list[_Ticket] = []
        self._tickets: list[_Ticket] = []  # issued, and not yet used
        self._entered: list[int] = []  # the process of each helper that looked for a ticket ...
        self._left: list[int] = []  # ... and of each that is done with the call
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failures: dict[int, BaseException] = {}
        self._finished: list[int] = []

    def cancel(self) -> None:
        """Let no further piece begin; the call raises CallCancelledError unless all of them have been run."""
        self.cancelled = True

    def run(
        self,
        function: Callable[[int], object],
        n_pieces: int,
        workers: int,
        budget: int,
        tasks: Sequence[int] | None,
    ) -> None:
        """See `run`."""
        if n_pieces == 0:
            return
        starts: Sequence[int] = range(n_pieces) if tasks is None else tasks
        self._function = function
        self._ranges = list(zip(starts, [*starts[1:], n_pieces], strict=True))
        self._indices = iter(range(len(self._ranges)))
        self._context = contextvars.copy_context()
        self._context.run(_inside_call.set, True)
        try:
            # Settling again is harmless. Each `finally` survives one interrupt that falls between two of its steps.
            try:
                try:
                    self._share(min(workers, len(self._ranges)) - 1, budget)
                finally:
                    self._settle()
            finally:
                self._settle()
        finally:
            self._settle()
            failures, self._failures = self._failures, {}
            self._forget()
        if failures:
            try:
                raise failures[min(failures)]
            finally:
                del failures  # the traceback holds this frame, which would hold the failure
        if len(self._finished) < len(self._ranges):
            raise CallCancelledError

    def help(self) -> None:
        """Take tasks as a worker thread, if there is a ticket left for one."""
        process = os.getpid()
        ticket = None
        self._entered.append(process)
        try:
            if self._tickets:
                ticket = self._tickets.pop()
                self._take_tasks(caller=False)
        except IndexError:
            pass  # another worker, or the caller, was faster
        finally:
            if ticket is not None:
                _pool.busy.pop(ticket, None)
            self._left.append(process)
            self._changed.put(None)

    def _share(self, helpers: int, budget: int) -> None:
        try:
            if helpers > 0 and not is_inside_call():
                _pool.lend(self, helpers, budget)
            self._take_tasks(caller=True)
        except BaseException:  # before the helpers are waited for, so that they begin nothing more
            self.cancelled = True
            raise

    def _take_tasks(self, *, caller: bool) -> None:
        for index in self._indices:
            if self.cancelled:
                return
            self._run_task(index, caller=caller)

    def _run_task(self, index: int, *, caller: bool) -> None:
        function, context = self._function, self._context
        for piece in range(*self._ranges[index]):
            # What comes before the lowest failure is still run: one of them may fail too, and would be the
            # one that a single thread had raised.
            if self.cancelled or (self._failures and piece > min(self._failures)):
                return
            try:
                context.copy().run(function, piece)
            except Exception as exc:  # noqa: BLE001 - raised by the caller, in `run`
                self._failures[piece] = exc
                return
            except BaseException as exc:  # an interrupt or an exit: unlike a failure it ends what comes before it too
                self.cancelled = True
                if caller:
                    raise
                self._failures[piece] = exc
                return
            finally:
                if not caller and os.getpid() != self._process:
                    # The piece forked and came back: this child has no caller to return to.
                    os._exit(1 if piece in self._failures else 0)
        self._finished.append(index)

    def _settle(self) -> None:
        """Void the tickets left, wait until no helper is inside, do what helpers lost by a fork had not done."""
        self._tickets.clear()
        interrupt: BaseException | None = None
        while True:
            try:
                while self._left.count(process := os.getpid()) < self._entered.count(process):
                    with contextlib.suppress(queue.Empty):
                        self._changed.get(timeout=_POLL_S)
                break
            except BaseException as exc:  # noqa: BLE001 - raised below, when nothing runs any more
                self.cancelled = True
                interrupt = interrupt or exc
        try:
            if interrupt is not None:
                raise interrupt
            if process != self._process:
                self._redo_after_fork(process)
        finally:
            del interrupt  # the traceback holds this frame
            for ticket in self._issued:
                _pool.busy.pop(ticket, None)

    def _redo_after_fork(self, process: int) -> None:
        """Run what helpers had begun or might have begun: in this forked child they no longer exist."""
        self._process = process
        if not self.cancelled:
            for index in sorted(set(range(len(self._ranges))) - set(self._finished)):
                self._run_task(index, caller=True)

    def _forget(self) -> None:
        """Drop what refers to the caller's arrays: a worker may find this call in the queue much later."""
        self._function, self._context = _nothing, contextvars.Context()


def _nothing(_piece: int) -> None:
    """Stand in for the function of a call that is over."""


class _Ticket:
    """The right of one worker to help with one call."""

    __slots__ = ()


class _Pool:
    """The worker threads of one process."""

    def __init__(self) -> None:
        self.workers: list[object] = []  # one entry for each thread that runs or is being started
        self.busy: dict[_Ticket, None] = {}  # tickets that are issued and neither void nor handed back
        self.queue: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def lend(self, call: Call, helpers: int, budget: int) -> None:
        """Give a call up to ``helpers`` workers that are free, while the process keeps within its budget.

        No more are busy afterwards than this call's budget allows besides its caller. The last of the running
        calls that took workers therefore bounds them all: busy workers never exceed the largest budget among
        the running calls, less one.
        """
        for _ in range(helpers):
            ticket = _Ticket()
            call._issued.append(ticket)
            self.busy[ticket] = None
            if len(self.busy) > budget - 1:
                del self.busy[ticket]
                break
        self._start_workers(min(len(self.busy), budget - 1))
        for position, ticket in enumerate(call._issued):
            if position >= len(self.workers):
                self.busy.pop(ticket, None)  # the system refused the thread
            elif ticket in self.busy:
                call._tickets.append(ticket)
                self.queue.put(call)

    def _start_workers(self, n: int) -> None:
        """Have n workers, or as many as the system grants: asking for ever fewer where it refuses.

        Nobody waits until a thread has begun. One that is started while the interpreter ends never would.
        """
        while len(self.workers) < n and not sys.is_finalizing():
            place = object()
            is_kept = False
            try:
                self.workers.append(place)
                if len(self.workers) > n:  # another caller took the last place at the same time
                    return
                is_kept = True  # even if an interrupt follows the start
                _thread.start_new_thread(self._work, (place, next(self._numbers)))
            except (RuntimeError, MemoryError):
                is_kept = False
                n = (n + len(self.workers) - 1) // 2
            finally:
                if not is_kept:
                    self._leave(place)

    def _work(self, place: object, number: int) -> None:
        """Help with calls until the process ends."""
        try:
            threading.current_thread().name = f"accel-ops-{number}"
            reset_floating_point_environment()
            _inside_call.set(True)  # for finalisers that run between two pieces
            while True:
                call = self.queue.get()
                call.help()
                del call  # an idle worker keeps nobody's arrays alive
        finally:
            self._leave(place)

    def _leave(self, place: object) -> None:
        with contextlib.suppress(ValueError):
            self.workers.remove(place)


_pool = _Pool()


def _start_afresh() -> None:
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_afresh)
