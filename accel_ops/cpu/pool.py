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

import contextvars
import os
import queue
import threading
from collections.abc import Callable, Sequence

from accel_ops.cpu.floating_point import reset_floating_point_environment

__all__ = ["Call", "CallCancelledError", "is_inside_call", "run", "size"]

# A wait that is not a signal handler's business still looks up this often, because an exception set from
# another thread (PyThreadState_SetAsyncExc) does not end a wait for a lock.
_POLL_S = 0.02

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


class CallCancelledError(Exception):
    """The owner of a Call cancelled it before its last piece had begun."""


class Call:
    """One call of `run`: what its caller and its helpers share."""

    def __init__(self) -> None:
        self.cancelled = False
        self._process = os.getpid()
        self._issued: list[_Ticket] = []
        self._tickets: list[_Ticket] = []  # issued, and not yet used
        self._entered: list[None] = []  # one for each helper that looked for a ticket ...
        self._left: list[None] = []  # ... and one for each that is done with the call
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
        starts: Sequence[int] = range(n_pieces) if tasks is None else tasks
        self._function = function
        self._ranges = list(zip(starts, [*starts[1:], n_pieces], strict=True))
        self._indices = iter(range(len(self._ranges)))
        self._context = contextvars.copy_context()
        self._context.run(_inside_call.set, True)
        try:
            try:
                helpers = min(workers, len(self._ranges)) - 1
                if helpers > 0 and not is_inside_call():
                    _pool.lend(self, helpers, budget)
                self._take_tasks(caller=True)
            except BaseException:
                self.cancelled = True
                raise
            finally:
                self._settle()
        except BaseException:
            self.cancelled = True
            self._settle()  # again: an interrupt may have come before the line above could do its work
            raise
        finally:
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
        self._entered.append(None)
        try:
            ticket = self._tickets.pop()
        except IndexError:
            self._left.append(None)
            return
        self._take_tasks(caller=False)
        _pool.busy.pop(ticket, None)
        self._left.append(None)
        self._changed.put(None)

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
            except BaseException as exc:
                self.cancelled = True
                if caller:
                    raise
                self._failures[piece] = exc
                return
        self._finished.append(index)

    def _settle(self) -> None:
        """Void the tickets left and wait until no helper is inside. May be called again after an interrupt."""
        self._tickets.clear()
        if os.getpid() != self._process:
            self._redo_after_fork()
        interrupt: BaseException | None = None
        while len(self._left) < len(self._entered):
            try:
                self._changed.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            except BaseException as exc:  # noqa: BLE001 - raised below, when nothing runs any more
                self.cancelled = True
                interrupt = interrupt or exc
        for ticket in self._issued:
            _pool.busy.pop(ticket, None)
        if interrupt is not None:
            raise interrupt

    def _redo_after_fork(self) -> None:
        """Run what helpers had begun or might have begun: in this forked child they no longer exist."""
        self._process = os.getpid()
        self._entered, self._left = [], []
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
        self.workers: list[_Worker] = []
        self.busy: dict[_Ticket, None] = {}  # tickets that are issued and neither void nor handed back
        self.queue: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._starting = threading.RLock()  # reentrant: a signal handler may interrupt its own thread

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
        self._start_workers(len(self.busy))
        for ticket in call._issued:
            if ticket in self.busy:
                call._tickets.append(ticket)
                self.queue.put(call)

    def _start_workers(self, n: int) -> None:
        if len(self.workers) >= n:
            return
        with self._starting:
            missing = n - len(self.workers)
            while missing > 0:
                worker = _Worker(self, len(self.workers))
                try:
                    worker.start()
                except (RuntimeError, MemoryError):  # refused by the system, or the interpreter is ending
                    missing //= 2
                else:
                    self.workers.append(worker)
                    missing -= 1


class _Worker(threading.Thread):
    """A thread that waits for calls to help with, until the process ends."""

    def __init__(self, pool: _Pool, index: int) -> None:
        super().__init__(name=f"accel-ops-{index}", daemon=True)
        self._pool = pool

    def run(self) -> None:
        reset_floating_point_environment()
        process = os.getpid()
        while os.getpid() == process:  # False in a child forked by a piece that this thread was running
            call = self._pool.queue.get()
            call.help()
            del call  # an idle worker keeps nobody's arrays alive


_pool = _Pool()


def _start_afresh() -> None:
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_start_afresh)
