"""The pool: who runs which piece, which failure is raised, and that nothing runs on when a call has ended."""

import _thread
import contextvars
import ctypes
import gc
import itertools
import platform
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from child_processes import run_child

import accel_ops as ops
from accel_ops.cpu import pool

WAIT_S = 30  # how long anything here may take before it counts as a hang


@pytest.fixture(autouse=True)
def fresh_pool(monkeypatch):
    """Start from a pool without workers; those of earlier tests are idle for good."""
    fresh = pool._Pool()
    monkeypatch.setattr(pool, "_pool", fresh)
    yield fresh
    assert not fresh.busy, "a worker still counts as busy although no call is running"


def on_worker():
    return threading.current_thread().name.startswith("accel-ops-")


def all_at_once(n_threads):
    """Return a piece that ends when `n_threads` threads are running it, and the set of those threads' names."""
    barrier, names = threading.Barrier(n_threads), set()

    def piece(_index):
        barrier.wait(WAIT_S)
        names.add(threading.current_thread().name)

    return piece, names


def in_threads(functions):
    """Run each function in a thread of its own, all released together, and pass on the first exception."""
    barrier, failures = threading.Barrier(len(functions)), []

    def body(function):
        barrier.wait(WAIT_S)
        try:
            function()
        except BaseException as exc:  # noqa: BLE001 - raised below, in the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=body, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


# --- which pieces, on which threads


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("n_pieces", [1, 2, 3, 64, 1000])
def test_every_piece_is_run_once(workers, n_pieces):
    """Each index is passed exactly once, at every number of threads."""
    seen = []
    pool.run(seen.append, n_pieces, workers=workers)
    assert sorted(seen) == list(range(n_pieces))


def test_no_pieces_are_no_work():
    """A call of zero pieces returns."""
    seen = []
    pool.run(seen.append, 0, workers=2)
    assert seen == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("tasks", [[0], [0, 1], [0, 9], [0, 3, 4, 8], list(range(10))])
def test_a_task_is_run_in_order_by_one_thread(workers, tasks):
    """The pieces of a task follow one another on one thread, and every piece belongs to one task."""
    seen = []
    pool.run(lambda piece: seen.append((piece, threading.get_ident())), 10, workers=workers, tasks=tasks)
    assert sorted(piece for piece, _ in seen) == list(range(10))
    for start, stop in itertools.pairwise([*tasks, 10]):
        mine = [(piece, thread) for piece, thread in seen if start <= piece < stop]
        assert [piece for piece, _ in mine] == list(range(start, stop))
        assert len({thread for _, thread in mine}) == 1


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_as_many_threads_take_part_as_the_call_is_worth(workers):
    """The caller and workers - 1 helpers run pieces at the same time."""
    piece, names = all_at_once(workers)
    pool.run(piece, workers, workers=workers)
    assert len(names) == workers
    assert threading.current_thread().name in names


def test_workers_are_named_and_numbered():
    """Each worker has a name of its own, accel-ops-<i>, counted from 0."""
    piece, names = all_at_once(5)
    pool.run(piece, 5, workers=5)
    assert names == {threading.current_thread().name} | {f"accel-ops-{i}" for i in range(4)}


@pytest.mark.parametrize(("n_pieces", "workers", "budget"), [(1, 8, 8), (8, 1, 8), (8, 8, 1), (8, 1, None)])
def test_what_does_not_pay_starts_no_thread(n_pieces, workers, budget):
    """One piece, one thread's worth of work or a budget of one stay on the caller and leave the pool empty."""
    names = set()
    pool.run(lambda _: names.add(threading.current_thread().name), n_pieces, workers=workers, budget=budget)
    assert names == {threading.current_thread().name}
    assert pool.size() == ops.thread_info().pool_size == 0


def test_budgets_alternate_without_restarting_threads(fresh_pool):
    """A call uses the workers that there are; none is started again or ended when the budget changes."""
    for workers in (4, 1, 2, 4, 3, 4):
        piece, names = all_at_once(workers)
        pool.run(piece, workers, workers=workers)
        assert len(names) == workers
        if workers == 4:
            first = fresh_pool.workers[:]
            threads = {thread for thread in threading.enumerate() if thread.name in names}
    assert fresh_pool.workers == first
    assert pool.size() == 3
    assert all(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("workers", [1, 4])
def test_nested_work_runs_in_place(workers):
    """A call made by a piece runs on the piece's thread, whatever it asks for."""
    barrier = threading.Barrier(workers)
    seen = []

    def piece(_index):
        barrier.wait(WAIT_S)
        here = threading.get_ident()
        assert pool.is_inside_call()
        inner = []
        pool.run(lambda _: inner.append(threading.get_ident()), 5, workers=4, budget=64)
        seen.append(inner == [here] * 5)

    pool.run(piece, workers, workers=workers)
    assert seen == [True] * workers
    assert not pool.is_inside_call()
    assert pool.size() == workers - 1


def test_a_nested_failure_is_a_failure_of_its_piece():
    """What a nested call raises comes out of the outer call."""

    def inner(piece):
        if piece >= 2:
            raise KeyError(piece)

    with pytest.raises(KeyError, match="2"):
        pool.run(lambda _: pool.run(inner, 5, workers=2), 4, workers=2)


VARIABLE = contextvars.ContextVar("a variable of the caller", default="unset")


@pytest.mark.parametrize("workers", [1, 3])
def test_each_piece_runs_in_its_own_copy_of_the_callers_context(workers):
    """Pieces see the caller's variables, and what one sets is seen by no other piece nor by the caller."""
    barrier, seen = threading.Barrier(workers), []

    def piece(index):
        if index < workers:
            barrier.wait(WAIT_S)
        seen.append(VARIABLE.get())
        VARIABLE.set(f"set by {index}")

    token = VARIABLE.set("the caller's")
    try:
        pool.run(piece, 12, workers=workers, tasks=[0, 1, 2, 7] if workers > 1 else [0])
        assert seen == ["the caller's"] * 12
        assert VARIABLE.get() == "the caller's"
    finally:
        VARIABLE.reset(token)


def test_pieces_follow_the_callers_errstate():
    """NumPy's error state is the caller's on every thread, and the workers keep none of it."""
    piece, names = all_at_once(3)
    seen = []

    def divide(index):
        piece(index)
        seen.append(np.geterr())

    with np.errstate(all="raise", under="ignore"):
        expected = np.geterr()
        pool.run(divide, 3, workers=3)
    assert seen == [expected] * 3
    pool.run(divide, 3, workers=3)
    assert seen[3:] == [np.geterr()] * 3
    assert len(names) == 3


def test_a_budget_of_the_context_is_seen_by_pieces():
    """A threads() block of the caller holds on the workers too."""
    piece, _ = all_at_once(3)
    seen = []

    def ask(index):
        piece(index)
        seen.append(ops.get_num_threads())

    with ops.threads(7):
        pool.run(ask, 3, workers=3)
    assert seen == [7] * 3


# --- the floating-point environment

UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


@pytest.fixture
def rounding_upward():
    """Let the calling thread round upward, as another library might, and yield a function that asks."""
    if UPWARD is None:
        pytest.skip("the code of this machine's rounding modes is not known here")
    libm = ctypes.CDLL(None)
    assert libm.fesetround(UPWARD) == 0
    try:
        yield libm.fegetround
    finally:
        libm.fesetround(0)


def test_workers_round_to_nearest(rounding_upward):
    """A worker started by a thread with another rounding mode is in the default one; the caller keeps its own."""
    modes = {}
    piece, _ = all_at_once(3)

    def ask(index):
        piece(index)
        modes[threading.current_thread().name] = rounding_upward()

    pool.run(ask, 3, workers=3)
    assert rounding_upward() == UPWARD
    assert [mode for name, mode in modes.items() if name.startswith("accel-ops")] == [0, 0]


@pytest.mark.parametrize("size", [10, 4_000_000])
def test_casts_round_to_nearest_and_the_callers_mode_comes_back(size, rounding_upward):
    """The result of a cast is that of the default environment, which ends with the call."""
    exact = np.full(size, 1 + 2.0**-40)  # nearest is 1, upward is the next larger float32
    with ops.threads(2):
        joined = ops.concatenate([exact, exact], dtype=np.float32)
    assert rounding_upward() == UPWARD
    assert (joined == 1).all()


# --- failures


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_failure_of_the_lowest_index_is_raised(workers):
    """Every piece from 7 on fails: what one thread would have raised is raised."""

    def piece(index):
        if index >= 7:
            raise KeyError(index)

    for _ in range(20):
        with pytest.raises(KeyError, match=r"^7$"):
            pool.run(piece, 64, workers=workers)


@pytest.mark.parametrize("tasks", [None, [0, 4]])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_failure_of_the_lowest_index_is_raised_if_a_later_one_comes_first(workers, tasks):
    """A piece that fails while one of a lower index has not yet failed does not decide."""
    later_fails, call = threading.Event(), pool.Call()

    def piece(index):
        if index == 1:
            assert later_fails.wait(WAIT_S)
            while not call._failures:  # until the later failure has been noted
                later_fails.wait(0.001)
            raise KeyError(index)
        if index == 5:
            later_fails.set()
            raise IndexError(index)

    with pytest.raises(KeyError, match=r"^1$"):
        pool.run(piece, 8, workers=workers, tasks=tasks, call=call)


def test_pieces_before_a_failure_are_run_and_none_after_it_begins():
    """On one thread the pieces up to the failing one have been run, as in a plain loop."""
    seen = []

    def piece(index):
        seen.append(index)
        if index == 3:
            raise KeyError(index)

    with pytest.raises(KeyError):
        pool.run(piece, 10, workers=1, tasks=[0, 2, 6])
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("failing", ["worker", "caller"])
@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_nothing_runs_on_after_a_failure(failing, error):
    """When the call raises, pieces that had begun have ended, and no further one begins."""
    barrier, fails = threading.Barrier(4), threading.Event()
    began, ended = [], []

    def piece(index):
        began.append(index)
        if index < 4:
            barrier.wait(WAIT_S)
            if on_worker() == (failing == "worker") and index not in ended and not fails.is_set():
                fails.set()
                raise error(index)
            assert fails.wait(WAIT_S)
            for _ in range(1000):  # the others take longer than the one that fails
                np.ones(100).sum()
        ended.append(index)

    with pytest.raises(error):
        pool.run(piece, 100, workers=4)
    after = began[:], ended[:]
    assert len(began) < 100
    flush, _ = all_at_once(4)
    pool.run(flush, 4, workers=4)  # each worker has come back for this
    assert (began, ended) == after
    assert len(set(began)) == len(began)


@pytest.mark.parametrize("where", ["worker", "caller"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_comes_out_too(where, error):
    """A BaseException from a piece ends the call, and the pool works afterwards."""
    barrier = threading.Barrier(2)

    def piece(_index):
        barrier.wait(WAIT_S)
        if on_worker() == (where == "worker"):
            raise error(where)

    with pytest.raises(error, match=where):
        pool.run(piece, 2, workers=2)
    again, names = all_at_once(2)
    pool.run(again, 2, workers=2)
    assert len(names) == 2


def test_the_callers_stack_is_in_the_traceback_of_a_workers_failure():
    """The traceback shows the caller and the piece."""
    barrier = threading.Barrier(2)

    def the_piece(_index):
        barrier.wait(WAIT_S)
        if on_worker():
            raise KeyError

    with pytest.raises(KeyError) as caught:
        pool.run(the_piece, 2, workers=2)
    names = [entry.name for entry in caught.traceback]
    assert names[0] == "test_the_callers_stack_is_in_the_traceback_of_a_workers_failure"
    assert names[-1] == "the_piece"


# --- cancelling


@pytest.mark.parametrize("workers", [1, 3])
def test_a_cancelled_call_begins_no_further_piece(workers):
    """After cancel() the pieces that run end, no other begins, and the call says so."""
    call, began = pool.Call(), []
    barrier = threading.Barrier(workers)

    def piece(index):
        began.append(index)
        barrier.wait(WAIT_S)
        call.cancel()

    with pytest.raises(pool.CallCancelledError):
        pool.run(piece, 100, workers=workers, call=call)
    assert sorted(began) == list(range(workers))


def test_a_call_cancelled_before_it_begins_runs_nothing():
    """The first piece does not begin either."""
    call, seen = pool.Call(), []
    call.cancel()
    with pytest.raises(pool.CallCancelledError):
        pool.run(seen.append, 3, workers=2, call=call)
    assert seen == []


def test_cancelling_when_all_is_done_changes_nothing():
    """A call whose last piece has begun succeeds."""
    call, seen = pool.Call(), []

    def piece(index):
        seen.append(index)
        if len(seen) == 2:
            call.cancel()

    pool.run(piece, 2, workers=1, call=call)
    assert seen == [0, 1]


def test_a_failure_counts_more_than_cancelling():
    """A call that failed and was cancelled raises the failure."""
    call = pool.Call()

    def piece(_index):
        call.cancel()
        raise KeyError

    with pytest.raises(KeyError):
        pool.run(piece, 2, workers=1, call=call)


# --- concurrent callers


class BusyWorkers:
    """Counts, inside the pieces, the workers that are busy, and compares with the budgets of the running calls."""

    def __init__(self):
        self._lock = threading.Lock()
        self._busy = set()
        self._budgets = []
        self.most = 0
        self.violations = []
        self._load = np.ones(50_000)

    def piece(self, _index):
        me = threading.current_thread().name
        if me.startswith("accel-ops-"):
            with self._lock:
                self._busy.add(me)
                self.most = max(self.most, len(self._busy))
                if len(self._busy) > max(self._budgets) - 1:
                    self.violations.append((sorted(self._busy), sorted(self._budgets)))
        np.copyto(np.empty_like(self._load), self._load)  # without the GIL, so that others get their turn
        with self._lock:
            self._busy.discard(me)

    def call(self, budget):
        with self._lock:
            self._budgets.append(budget)
        pool.run(self.piece, 20, workers=budget)
        with self._lock:
            self._budgets.remove(budget)


def test_64_threads_with_budget_2_keep_one_worker_busy():
    """Beside the callers never more than one worker runs a piece, and no more than one has been started."""
    busy = BusyWorkers()
    in_threads([lambda: [busy.call(2) for _ in range(3)]] * 64)
    assert busy.violations == []
    assert busy.most == 1
    assert pool.size() == 1


@pytest.mark.parametrize("budgets", [(2, 3, 5), (1, 2, 4), (4, 4, 2, 1)])
def test_busy_workers_stay_below_the_largest_budget_that_runs(budgets):
    """With calls of several budgets at once, busy workers never exceed the largest of those running, less one."""
    busy = BusyWorkers()
    in_threads([lambda b=b: [busy.call(b) for _ in range(8)] for b in budgets * 4])
    assert busy.violations == []
    assert pool.size() <= max(budgets) - 1


def test_no_more_workers_are_started_than_the_budget_allows(monkeypatch):
    """Callers that compete for the one worker, switched at every moment, start one thread and not more."""
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            monkeypatch.setattr(pool, "_pool", pool._Pool())
            in_threads([lambda: pool.run(lambda _: None, 4, workers=2)] * 24)
            assert pool.size() <= 1
    finally:
        sys.setswitchinterval(interval)


def test_a_call_never_waits_for_a_worker_that_is_busy():
    """While one call holds the only worker in a piece, others with the same budget go on alone."""
    holding, release = threading.Event(), threading.Event()

    def held(_index):
        if on_worker():
            holding.set()
            assert release.wait(WAIT_S)
        else:
            assert holding.wait(WAIT_S)

    first = threading.Thread(target=lambda: pool.run(held, 2, workers=2))
    first.start()
    try:
        assert holding.wait(WAIT_S)
        seen = []
        pool.run(lambda _: seen.append(threading.get_ident()), 50, workers=2)
        assert seen == [threading.get_ident()] * 50
        # A call with a larger budget may have the difference.
        piece, names = all_at_once(2)
        pool.run(piece, 2, workers=2, budget=3)
        assert len(names) == 2
    finally:
        release.set()
        first.join(WAIT_S)
    assert not first.is_alive()


def test_results_are_right_with_many_callers():
    """Threads that stage at once, each with its own budget, get their own bytes."""
    inputs = [[np.arange(200_000.0) + 10 * t + k for k in range(4)] for t in range(8)]
    expected = [np.concatenate(arrays) for arrays in inputs]

    def stage(t):
        with ops.threads(1 + t % 4):
            for _ in range(5):
                assert np.array_equal(ops.concatenate(inputs[t]), expected[t])

    in_threads([lambda t=t: stage(t) for t in range(8)])


# --- threads that cannot be started


@pytest.fixture
def refuse_after(monkeypatch):
    """Let the system refuse worker threads from the k-th on; return a function that says k and counts attempts."""
    attempts, allowed = [], [0]
    start = _thread.start_new_thread

    def refusing(function, args):
        attempts.append(args)
        if len(attempts) > allowed[0]:
            msg = "can't start new thread"
            raise RuntimeError(msg)
        return start(function, args)

    def after(k):
        allowed[0] = k
        attempts.clear()
        return attempts

    monkeypatch.setattr(pool, "_thread", types.SimpleNamespace(start_new_thread=refusing))
    return after


@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
def test_where_threads_are_refused_the_call_goes_on_with_fewer(allowed, refuse_after):
    """The result is the same with the workers that could be started, down to the caller alone."""
    refuse_after(allowed)
    seen = []
    pool.run(seen.append, 100, workers=8)
    assert sorted(seen) == list(range(100))
    assert pool.size() == allowed


def test_refused_threads_are_asked_for_by_halves(refuse_after):
    """A refusal halves what is still asked for, so that a call does not try hundreds of times."""
    attempts = refuse_after(0)
    pool.run(lambda _: None, 100, workers=65)
    assert len(attempts) == 7  # 64, 32, 16, 8, 4, 2, 1


def test_threads_refused_once_are_started_later(refuse_after):
    """A later call tries again."""
    refuse_after(0)
    pool.run(lambda _: None, 8, workers=3)
    assert pool.size() == 0
    refuse_after(2)
    piece, names = all_at_once(3)
    pool.run(piece, 3, workers=3)
    assert len(names) == 3


def test_calls_that_nobody_could_help_with_are_not_kept(refuse_after):
    """Where no thread can be started, memory does not grow with the number of calls."""
    refuse_after(0)
    pool.run(lambda _: None, 8, workers=4)
    gc.collect()
    before = sum(isinstance(each, pool.Call) for each in gc.get_objects())
    for _ in range(50):
        pool.run(lambda _: None, 8, workers=4)
    gc.collect()
    assert sum(isinstance(each, pool.Call) for each in gc.get_objects()) <= before + 1


def test_an_interrupt_while_threads_are_started_loses_none(monkeypatch):
    """A worker whose start was interrupted is counted, and no two workers have one name."""

    def interrupted(function, args):
        _thread.start_new_thread(function, args)
        monkeypatch.setattr(pool, "_thread", _thread)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(pool, "_thread", types.SimpleNamespace(start_new_thread=interrupted))
    with pytest.raises(KeyboardInterrupt):
        pool.run(lambda _: None, 8, workers=3)
    piece, _ = all_at_once(3)
    pool.run(piece, 3, workers=3)
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert len(names) == len(set(names)) == pool.size() == 2


# --- what is left when a call is over


def test_an_idle_worker_keeps_no_array_alive():
    """When a call is over, nothing of it refers to the arrays that its pieces used."""
    piece, _ = all_at_once(4)
    array = np.ones(10)
    last = weakref.ref(array)

    def use(index, array=array):
        piece(index)
        array.sum()

    pool.run(use, 4, workers=4)
    del array, use
    assert last() is None


def test_a_dropped_failure_keeps_no_array_alive():
    """Once the exception is gone, nothing refers to the arrays, without the garbage collector."""
    piece, _ = all_at_once(4)

    def call():
        array = np.ones(10)

        def use(index):
            piece(index)
            raise KeyError(array.sum())

        try:
            pool.run(use, 4, workers=4)
        except KeyError:
            return weakref.ref(array)
        return None

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


# --- interrupts


def raise_in(thread, error):
    """Let an exception be raised in a thread at its next bytecode."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error)) == 1


class Interrupts:
    """A call in a thread whose helper is held in a piece, and exceptions for that thread."""

    def __init__(self):
        self.delivered, self.held, self.release = threading.Event(), threading.Event(), threading.Event()
        self.inside, self.left, self.array = [], [], None
        interrupts = self

        class Interrupt(BaseException):
            def __init__(self):
                interrupts.delivered.set()

        self.error = Interrupt
        self.thread = threading.Thread(target=self._body)

    def _piece(self, _index):
        if on_worker():
            self.inside.append(None)
            self.held.set()
            assert self.release.wait(WAIT_S)
            self.inside.pop()
        else:
            assert self.held.wait(WAIT_S)

    def _body(self):
        array = np.ones(10)
        self.array = weakref.ref(array)
        try:
            pool.run(lambda index, _array=array: self._piece(index), 2, workers=2)
        except self.error:
            self.left.append(len(self.inside))

    def interrupt(self):
        if not self.left:
            self.delivered.clear()
            raise_in(self.thread, self.error)
            assert self.delivered.wait(WAIT_S)


@pytest.mark.parametrize("n_interrupts", [1, 2, 3, 8])
def test_no_number_of_interrupts_lets_a_call_leave_before_its_helper(n_interrupts):
    """Exceptions set from another thread while the call waits end it only when its helper's piece has ended."""
    interrupts = Interrupts()
    interrupts.thread.start()
    assert interrupts.held.wait(WAIT_S)
    for _ in range(n_interrupts):
        interrupts.interrupt()
    interrupts.release.set()
    interrupts.thread.join(WAIT_S)
    assert not interrupts.thread.is_alive()
    assert interrupts.left == [0]
    piece, names = all_at_once(2)
    pool.run(piece, 2, workers=2)
    assert len(names) == 2


def test_a_dropped_interrupt_keeps_no_array_alive():
    """After an interrupted wait nothing refers to the arrays, without the garbage collector."""
    interrupts = Interrupts()
    gc.disable()
    try:
        interrupts.thread.start()
        assert interrupts.held.wait(WAIT_S)
        interrupts.interrupt()
        interrupts.release.set()
        interrupts.thread.join(WAIT_S)
        assert interrupts.left == [0]
        assert interrupts.array() is None
    finally:
        gc.enable()


INTERRUPTED = """
    import ctypes, os, signal, sys, threading
    import numpy as np
    from accel_ops.cpu import pool

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in processes of a background shell
    main = threading.get_ident()
    written = np.zeros(4096)

    def piece(index):
        written[index % 4096] += 1
        np.copyto(np.empty(20_000), 1.0)

    def endless(before_piece=lambda index: None):
        def function(index):
            before_piece(index)
            piece(index)
        pool.run(function, 10**8, workers=3, tasks=range(0, 10**8, 10**5))

    def nothing_runs_on():
        after = written.copy()
        barrier = threading.Barrier(3)
        pool.run(lambda _: barrier.wait(20), 3, workers=3)
        assert (written == after).all() and not pool._pool.busy

    def sent_from_a_thread(round):
        def send():
            go.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
        go = threading.Event()
        sender = threading.Thread(target=send)
        sender.start()
        try:
            endless(lambda index: go.set() if index % 10**5 == round else None)
        finally:
            sender.join()

    def sent_by_a_piece(round):
        endless(lambda index: os.kill(os.getpid(), signal.SIGINT) if index % 10**5 == 10 * round else None)

    def asynchronous(round):
        def send():
            go.wait(20)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt)
            )
        go = threading.Event()
        sender = threading.Thread(target=send)
        sender.start()
        endless(lambda index: go.set() if index % 10**5 == round else None)

    # Workers are started first: until a thread runs, CPython may give it the exception that is meant for its creator.
    nothing_runs_on()
    for round in range(12):
        try:
            globals()[sys.argv[1]](round)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the call ended without its interrupt")
        nothing_runs_on()
    print("done")
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["sent_from_a_thread", "sent_by_a_piece", "asynchronous"])
def test_an_interrupt_ends_a_call_at_once(how):
    """KeyboardInterrupt ends an endless call, nothing writes afterwards, and the pool goes on working."""
    assert run_child(INTERRUPTED, deadline_s=60, arguments=[how]) == "done\n"


@pytest.mark.process
def test_a_burst_of_interrupts_ends_a_call_once_its_helpers_have_stopped():
    """Interrupts that come one after the other, also while an earlier one is settled, never leave a helper behind."""
    source = """
        import os, signal, threading
        from accel_ops.cpu import pool

        delivered, inside, left = [], [], []

        def handler(number, frame):
            # Inside of the call only: the code around it could not defend itself against a burst.
            while frame is not None:
                if frame.f_code is pool.Call.run.__code__:
                    delivered.append(None)
                    raise KeyboardInterrupt
                frame = frame.f_back

        signal.signal(signal.SIGINT, handler)
        for _ in range(20):
            held, release = threading.Event(), threading.Event()
            delivered.clear()
            left.clear()

            def piece(_index):
                if threading.current_thread() is threading.main_thread():
                    held.wait(20)
                else:
                    inside.append(None)
                    held.set()
                    release.wait(20)
                    inside.pop()

            def bombard():
                held.wait(20)
                while len(delivered) < 20 and not left:
                    os.kill(os.getpid(), signal.SIGINT)
                release.set()

            bomber = threading.Thread(target=bombard)
            bomber.start()
            try:
                pool.run(piece, 2, workers=2)
            except KeyboardInterrupt:
                left.append(len(inside))
            bomber.join()
            assert left == [0], left
            assert not pool._pool.busy
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


@pytest.mark.process
def test_a_dropped_keyboard_interrupt_keeps_no_array_alive():
    """After Ctrl-C in a wait for a helper nothing refers to the arrays, without the garbage collector."""
    source = """
        import gc, os, signal, threading, weakref
        import numpy as np
        from accel_ops.cpu import pool

        gc.disable()
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        held, release = threading.Event(), threading.Event()

        def call():
            array = np.ones(10)
            last = weakref.ref(array)

            def piece(_index, array=array):
                if threading.current_thread() is threading.main_thread():
                    held.wait(20)
                    signal.setitimer(signal.ITIMER_REAL, 0.1)
                    threading.Timer(0.3, release.set).start()
                else:
                    held.set()
                    release.wait(20)

            try:
                pool.run(piece, 2, workers=2)
            except KeyboardInterrupt:
                return last
            raise AssertionError("the call ended without its interrupt")

        last = call()
        assert last() is None, "the array lives on"
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


@pytest.mark.process
def test_a_signal_handler_may_stage_while_its_thread_does():
    """A handler that joins arrays in the middle of a join gets its own bytes, and so does the join."""
    source = """
        import signal
        import numpy as np
        import accel_ops as ops

        arrays = [np.arange(400_000.0) + k for k in range(4)]
        expected = np.concatenate(arrays)
        handled = []

        def handler(number, frame):
            handled.append(np.array_equal(ops.concatenate(arrays[::-1]), np.concatenate(arrays[::-1])))

        signal.signal(signal.SIGALRM, handler)
        with ops.threads(3):
            ops.concatenate(arrays)  # compiles
            while len(handled) < 40:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-4 * (len(handled) % 17))
                assert np.array_equal(ops.concatenate(arrays), expected)
        assert all(handled)
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


# --- the beginning and the end of a process


@pytest.mark.process
@pytest.mark.parametrize("imported", ["before", "by each thread"])
def test_the_first_calls_may_come_from_many_threads_at_once(imported):
    """Sixteen threads whose first call is the process's first get right results and one pool's worth of threads."""
    source = """
        import sys, threading
        import numpy as np
        if sys.argv[1] == "before":
            import accel_ops
        sys.setswitchinterval(1e-6)
        arrays = [np.arange(300_000.0)] * 4
        expected, barrier, right = np.concatenate(arrays), threading.Barrier(16), []

        def first():
            barrier.wait(20)
            import accel_ops as ops
            with ops.threads(4):
                right.append(np.array_equal(ops.concatenate(arrays), expected))

        threads = [threading.Thread(target=first) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert right == [True] * 16, right
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("accel-ops-")]
        assert len(workers) <= 3, workers
        print("done")
    """
    assert run_child(source, deadline_s=60, arguments=[imported]) == "done\n"


ENDING = """
    import atexit, sys
    import numpy as np
    import accel_ops as ops
    from accel_ops.cpu import pool

    class Late:
        # Module globals may be gone by then.
        def __init__(self):
            self.arrays = [np.arange(400_000.0)] * 4
            self.expected = np.concatenate(self.arrays).tobytes()
            self.run, self.concatenate, self.threads = pool.run, ops.concatenate, ops.threads
            self.what = sys.argv[1]

        def work(self):
            with self.threads(4):
                if self.what == "pool":
                    seen = []
                    self.run(seen.append, 20, workers=4)
                    right = sorted(seen) == list(range(20))
                else:
                    # Not by a method such as `all`: NumPy imports it on use, for which it is too late.
                    right = self.concatenate(self.arrays).tobytes() == self.expected
            print("late", right, flush=True)

    class Dying(Late):
        def __del__(self):
            self.work()

    _, _, when, warm = sys.argv
    if warm == "warm":
        with ops.threads(4):
            ops.concatenate([np.ones(400_000)] * 4)
    if when == "atexit":
        atexit.register(Late().work)
    else:
        the_global = Dying()
"""


@pytest.mark.process
@pytest.mark.parametrize("warm", ["warm", "cold"])
@pytest.mark.parametrize("when", ["atexit", "a global's __del__"])
@pytest.mark.parametrize("what", ["pool", "concatenate"])
def test_calls_work_while_the_interpreter_ends(what, when, warm):
    """Exit handlers and the finalisers of module globals get right results, with and without earlier calls."""
    assert run_child(ENDING, deadline_s=20, arguments=[what, when, warm]) == "late True\n"


@pytest.mark.process
@pytest.mark.parametrize("where", ["caller", "daemon thread"])
def test_a_process_may_end_in_the_middle_of_calls(where):
    """Neither a thread that is staging nor a busy worker keeps the process from ending with its own status."""
    source = """
        import sys, threading
        import numpy as np
        import accel_ops as ops
        arrays, begun = [np.ones(400_000)] * 4, threading.Event()

        def stage():
            with ops.threads(4):
                while True:
                    ops.concatenate(arrays)
                    begun.set()

        threading.Thread(target=stage, daemon=True).start()
        begun.wait(20)
        if sys.argv[1] == "caller":
            with ops.threads(4):
                ops.concatenate(arrays)
        sys.exit(7)
    """
    assert run_child(source, deadline_s=20, arguments=[where], expected_status=7) == ""


def test_names_follow_one_pattern():
    """Workers are called accel-ops-<i>, counted from 0."""
    piece, names = all_at_once(3)
    pool.run(piece, 3, workers=3)
    assert names == {threading.current_thread().name, "accel-ops-0", "accel-ops-1"}
