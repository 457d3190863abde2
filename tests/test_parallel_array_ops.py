"""ParallelArrayOps: what it joins, how it is capped, and that its end is the end in every situation."""

import functools
import gc
import inspect
import math
import threading
import time
import weakref

import numpy as np
import pytest
from child_processes import run_child

import accel_ops as ops
from accel_ops import limits
from accel_ops.cpu import copying, memory, pool
from accel_ops.cpu import staging as cpu_staging

WAIT_S = 30
MIB = 1 << 20


@pytest.fixture(autouse=True)
def budget_of_eight(monkeypatch):
    """Let calls use up to eight threads, on any host, of a pool that starts empty."""
    monkeypatch.setattr(limits, "available_cpus", lambda: 8)
    monkeypatch.setattr(pool, "_pool", pool._Pool())


@pytest.fixture
def arrays():
    """Four arrays, 9.6 MB together, that nothing may write to."""
    arrays = [np.arange(300_000.0) + k for k in range(4)]
    for array in arrays:
        array.flags.writeable = False
    return arrays


@pytest.fixture
def planned(monkeypatch):
    """Collect what each call asks of the pool: pieces, threads and where tasks begin."""
    seen = []
    run = pool.run

    def recording(function, n_pieces, **options):
        seen.append((n_pieces, options["workers"], list(options.get("tasks") or range(n_pieces))))
        run(function, n_pieces, **options)

    monkeypatch.setattr(cpu_staging.pool, "run", recording)
    return seen


@pytest.fixture
def around_pieces(monkeypatch):
    """Take a function that is called with the index of each piece of later calls, and the piece itself."""
    run = pool.run

    def install(around):
        def running(function, n_pieces, **options):
            run(lambda index: around(index, functools.partial(function, index)), n_pieces, **options)

        monkeypatch.setattr(cpu_staging.pool, "run", running)

    yield install
    monkeypatch.setattr(cpu_staging.pool, "run", run)


class SlowCall:
    """A call in another thread that has begun and ends when it is told to."""

    def __init__(self, joiner, arrays):
        self.inside, self.release, self.results = threading.Event(), threading.Event(), []
        self._joiner, self._arrays = joiner, arrays
        self.thread = threading.Thread(target=self._body)
        self.thread.start()
        assert self.inside.wait(WAIT_S)

    def _slow(self):
        self.inside.set()
        assert self.release.wait(WAIT_S)
        yield from self._arrays

    def _body(self):
        try:
            self.results.append(self._joiner.concatenate(self._slow()))
        except BaseException as exc:  # noqa: BLE001 - looked at by the test
            self.results.append(exc)

    def end(self):
        self.release.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.results[0]


# --- signature and semantics


def test_the_signature_is_the_documented_one():
    """Names, order and defaults of the constructor and the two methods."""
    parameters = {
        function.__name__: [(p.name, p.default) for p in inspect.signature(function).parameters.values()][1:]
        for function in (ops.ParallelArrayOps.__init__, ops.ParallelArrayOps.concatenate, ops.ParallelArrayOps.shutdown)
    }
    assert parameters["__init__"] == [("accelerator", None), ("max_workers", 24)]
    assert [name for name, _ in parameters["concatenate"]] == [
        "arrays",
        "axis",
        "min_chunk_size_mb",
        "accelerator",
        "out",
    ]
    assert parameters["concatenate"][1:3] == [("axis", 0), ("min_chunk_size_mb", 50.0)]
    assert parameters["shutdown"] == [("wait", True)]


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("rows", [3, 3000])
def test_it_joins_as_numpy_does(rows, axis):
    """Small and large arrays, along any axis, give NumPy's values, dtype and shape."""
    inputs = [np.arange(rows * 400, dtype=np.int32).reshape(rows, 400) + k for k in range(3)]
    joined = ops.ParallelArrayOps(max_workers=3).concatenate(inputs, axis)
    expected = np.concatenate(inputs, axis)
    assert (joined.dtype, joined.shape, joined.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    assert joined.flags.c_contiguous


def test_out_is_filled_and_returned(arrays):
    """The result goes where `out` says, and is that object."""
    out = np.empty(1_200_000)
    assert ops.ParallelArrayOps().concatenate(arrays, out=out) is out
    assert np.array_equal(out, np.concatenate(arrays))


def test_any_iterable_will_do(arrays):
    """A generator of arrays is joined."""
    assert np.array_equal(ops.ParallelArrayOps().concatenate(a for a in arrays), np.concatenate(arrays))


@pytest.mark.parametrize("accelerator", ["cuda", "cuda:1", 0])
def test_a_device_that_is_not_there_is_an_error(accelerator, arrays):
    """For the instance and for a call, before anything is done; the message says what to pass."""
    with pytest.raises(ops.BackendUnavailableError, match="accelerator=None"):
        ops.ParallelArrayOps(accelerator)
    joiner = ops.ParallelArrayOps("cpu")
    with pytest.raises(RuntimeError, match="accelerator=None"):
        joiner.concatenate(arrays, accelerator=accelerator)
    assert np.array_equal(joiner.concatenate(arrays, accelerator=None), np.concatenate(arrays))


@pytest.mark.parametrize("max_workers", [0, -1, 1.5, True, np.True_, "2", None, [2]])
def test_max_workers_must_be_a_positive_integer(max_workers):
    """Anything else is refused when the instance is made."""
    with pytest.raises(ValueError, match="`max_workers` must be a positive integer, got"):
        ops.ParallelArrayOps(max_workers=max_workers)


@pytest.mark.parametrize("max_workers", [1, 2, np.int64(3), 24])
def test_max_workers_caps_the_threads_of_a_call(max_workers, planned):
    """A call uses no more threads than the instance's cap and than the budget."""
    array = np.ones(5_000_000)
    ops.ParallelArrayOps(max_workers=max_workers).concatenate([array], 0, None)
    assert [workers for _, workers, _ in planned] == [min(max_workers, 8)]
    assert pool.size() <= min(max_workers, 8) - 1
    planned.clear()
    with ops.threads(2):
        ops.ParallelArrayOps(max_workers=max_workers).concatenate([array], 0, None)
    assert [workers for _, workers, _ in planned] == [min(max_workers, 2)]


def test_instances_share_the_pool(arrays):
    """Ten instances start no more threads than one."""
    for _ in range(10):
        ops.ParallelArrayOps(max_workers=3).concatenate(arrays)
    assert pool.size() <= 2


@pytest.mark.parametrize("mib", [None, 0, 0.5, 1, 4, 7, 50, 1000, math.inf, 1e308, np.float32(4), np.int64(4)])
def test_no_array_is_cut_into_pieces_smaller_than_the_minimum(mib, planned):
    """What one thread takes of one array is at least so many MiB, or the whole array."""
    array = np.ones(5_000_000)  # 38.1 MiB
    joined = ops.ParallelArrayOps().concatenate([array], 0, mib)
    assert np.array_equal(joined, array)
    ((n_pieces, _, tasks),) = planned
    lengths = np.diff([*tasks, n_pieces])
    assert lengths.sum() == n_pieces
    if mib is None or mib == 0:
        assert len(tasks) > 8
    else:
        # Pieces are copying.PIECE_BYTES long but for the last.
        smallest = (lengths[:-1].min() if len(tasks) > 1 else math.inf) * copying.PIECE_BYTES / MIB
        assert len(tasks) == 1 or smallest >= mib
        assert len(tasks) == 1 or (lengths[-1] - 1) * copying.PIECE_BYTES / MIB + array.nbytes / MIB % 1 >= mib
        assert len(tasks) >= min(2, 38.1 // float(mib))  # it is not made larger than need be either


@pytest.mark.parametrize("mib", [-1, -math.inf, math.nan])
def test_a_minimum_below_zero_is_a_value_error(mib, arrays):
    """The message says what to pass."""
    with pytest.raises(ValueError, match="`min_chunk_size_mb` must be 0 or more"):
        ops.ParallelArrayOps().concatenate(arrays, 0, mib)


@pytest.mark.parametrize("mib", ["1", True, [1], 1j])
def test_a_minimum_that_is_no_number_is_a_type_error(mib, arrays):
    """The message says what to pass."""
    with pytest.raises(TypeError, match="`min_chunk_size_mb` must be a number of MiB or None"):
        ops.ParallelArrayOps().concatenate(arrays, 0, mib)


# --- its end


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("n_arrays", [0, 1, 2, 4])
def test_after_shutdown_every_call_is_refused(wait, n_arrays, arrays):
    """With one array as with many, with `out` and without; the message says what to do."""
    joiner = ops.ParallelArrayOps()
    joiner.concatenate(arrays)
    joiner.shutdown(wait=wait)
    for out in (None, np.empty(n_arrays * 300_000)):
        with pytest.raises(ops.ShutdownError, match="make a new one"):
            joiner.concatenate(arrays[:n_arrays], out=out)
    with pytest.raises(RuntimeError):
        joiner.concatenate(arrays[:n_arrays])


@pytest.mark.parametrize("waits", [(True, True), (False, True), (True, False), (False, False)])
def test_shutting_down_twice_is_allowed(waits):
    """The second time nothing is left to do."""
    joiner = ops.ParallelArrayOps()
    for wait in waits:
        joiner.shutdown(wait)


def test_shutdown_ends_one_instance_only(arrays):
    """Other instances and the functions go on working."""
    ended, other = ops.ParallelArrayOps(), ops.ParallelArrayOps()
    ended.shutdown()
    expected = np.concatenate(arrays)
    assert np.array_equal(other.concatenate(arrays), expected)
    assert np.array_equal(ops.concatenate(arrays), expected)


def test_leaving_the_block_shuts_down(arrays):
    """The context manager is the instance, and is closed afterwards."""
    with ops.ParallelArrayOps() as joiner:
        joiner.concatenate(arrays)
    with pytest.raises(ops.ShutdownError):
        joiner.concatenate(arrays)


def test_an_exception_ends_the_block_and_comes_out(arrays):
    """The block is closed and hides nothing."""
    with pytest.raises(KeyError, match="7"), ops.ParallelArrayOps() as joiner:
        raise KeyError(7)
    with pytest.raises(ops.ShutdownError):
        joiner.concatenate(arrays)


@pytest.mark.parametrize("n_closers", [1, 3])
def test_shutdown_waits_for_the_calls_of_other_threads(n_closers, arrays):
    """However many threads shut down, all of them return when the call has ended, which is not cut short."""
    joiner = ops.ParallelArrayOps()
    call = SlowCall(joiner, arrays)
    returned = []
    closers = [threading.Thread(target=lambda: (joiner.shutdown(), returned.append(1))) for _ in range(n_closers)]
    for closer in closers:
        closer.start()
    while not joiner._closed:
        time.sleep(0)  # gives way to the closers
    with pytest.raises(ops.ShutdownError):
        joiner.concatenate(arrays)
    assert returned == []
    assert np.array_equal(call.end(), np.concatenate(arrays))
    for closer in closers:
        closer.join(WAIT_S)
    assert returned == [1] * n_closers


def test_an_abrupt_shutdown_cuts_calls_short(arrays):
    """With wait=False it returns at once, and the call raises instead of going on."""
    joiner = ops.ParallelArrayOps()
    call = SlowCall(joiner, arrays)
    joiner.shutdown(wait=False)
    assert call.thread.is_alive()
    outcome = call.end()
    assert isinstance(outcome, ops.ShutdownError)
    assert "wait=False" in str(outcome)


@pytest.mark.parametrize("n_callers", [1, 6])
def test_every_call_ends_when_its_instance_is_shut_down_abruptly(n_callers, arrays):
    """Threads in the middle of copies get a right result or the error, and none is left waiting."""
    expected = np.concatenate(arrays)
    for _ in range(10):
        joiner, outcomes, begun = ops.ParallelArrayOps(max_workers=4), [], threading.Event()

        def call(joiner=joiner, outcomes=outcomes, begun=begun):
            try:
                while True:
                    begun.set()
                    assert np.array_equal(joiner.concatenate(arrays), expected)
            except ops.ShutdownError:
                outcomes.append("ended")

        callers = [threading.Thread(target=call) for _ in range(n_callers)]
        for caller in callers:
            caller.start()
        assert begun.wait(WAIT_S)
        joiner.shutdown(wait=False)
        for caller in callers:
            caller.join(WAIT_S)
        assert outcomes == ["ended"] * n_callers


def test_a_call_that_fails_is_waited_for_no_longer(arrays):
    """A failed call leaves nothing behind that a shutdown would wait for."""
    joiner = ops.ParallelArrayOps()
    for bad in ([], [np.ones(3), np.ones((2, 2))], None):
        with pytest.raises((ValueError, TypeError)):
            joiner.concatenate(bad)
    joiner.shutdown()


def test_a_dropped_instance_is_freed_at_once(arrays):
    """Nothing of the library refers to it, nor to what it joined."""
    joiner = ops.ParallelArrayOps()
    array = np.arange(1_000_000.0)
    joiner.concatenate([array, array])
    last, last_array = weakref.ref(joiner), weakref.ref(array)
    del joiner, array
    assert last() is None
    assert last_array() is None


def test_an_instance_that_was_not_made_is_no_trouble():
    """The finaliser of an instance whose constructor failed says nothing."""
    with pytest.raises(ValueError, match="max_workers"):
        ops.ParallelArrayOps(max_workers=0)
    gc.collect()
    ops.ParallelArrayOps.__new__(ops.ParallelArrayOps).__del__()


@pytest.mark.parametrize("where", ["caller", "worker"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_finaliser_that_shuts_down_in_the_middle_of_the_call_does_not_wait_for_it(where, wait, arrays, around_pieces):
    """An owner collected by a thread that is copying for its joiner's call lets that call end."""
    joiner = ops.ParallelArrayOps(max_workers=2)
    barrier, finalised = threading.Barrier(2), threading.Event()

    class Owner:
        def __del__(self):
            joiner.shutdown(wait)
            finalised.set()

    def meet_and_finalise(index, piece):
        if index < 2:  # one on each thread
            barrier.wait(WAIT_S)
            if threading.current_thread().name.startswith("accel-ops-") == (where == "worker"):
                Owner()
        piece()

    around_pieces(meet_and_finalise)
    outcomes = []

    def call():
        try:
            outcomes.append(joiner.concatenate(arrays, 0, None))
        except ops.ShutdownError as exc:
            outcomes.append(exc)

    caller = threading.Thread(target=call, daemon=True)  # so that a hang fails this test alone
    caller.start()
    caller.join(10)
    assert not caller.is_alive(), "the call waits for a worker that waits for the call"
    assert finalised.is_set()
    if wait:
        assert np.array_equal(outcomes[0], np.concatenate(arrays))
    else:
        # The other thread may have been through with all pieces by then.
        assert isinstance(outcomes[0], ops.ShutdownError) or np.array_equal(outcomes[0], np.concatenate(arrays))


HANDLER = """
    import os, signal, sys, threading
    import numpy as np
    import accel_ops as ops

    arrays = [np.arange(300_000.0) + k for k in range(4)]
    expected = np.concatenate(arrays)
    joiner = ops.ParallelArrayOps(max_workers=4)
    handled = []
    wait = sys.argv[1] == "wait"

    def handler(number, frame):
        joiner.shutdown(wait)
        handled.append(number)

    signal.signal(signal.SIGUSR1, handler)

    def interrupt():
        os.kill(os.getpid(), signal.SIGUSR1)
"""


def run_with_handler(source, wait):
    lines = [line[4:] if line.startswith("    ") else line for line in source.splitlines()]
    head = [line[4:] if line.startswith("    ") else line for line in HANDLER.splitlines()]
    program = "\n".join([*head, *lines])
    assert run_child(program, deadline_s=20, arguments=["wait" if wait else "no wait"]) == "done\n"


@pytest.mark.process
@pytest.mark.parametrize("wait", [True, False])
def test_a_signal_handler_may_shut_down_in_the_middle_of_a_call(wait):
    """The handler returns; the call that it interrupted then ends, or is cut short, and others are refused."""
    source = """
    def interrupting():
        yield from arrays[:2]
        interrupt()
        yield from arrays[2:]

    with ops.threads(4):
        try:
            right = (joiner.concatenate(interrupting()) == expected).all()
        except ops.ShutdownError:
            right = not wait
        assert right and handled
        try:
            joiner.concatenate(arrays)
        except ops.ShutdownError:
            print("done")
    """
    run_with_handler(source, wait)


@pytest.mark.process
@pytest.mark.parametrize("wait", [True, False])
def test_a_signal_handler_may_shut_down_at_any_moment_of_copying(wait):
    """Handlers that come in the middle of copies, at many moments, neither hang nor spoil a result."""
    source = """
    signal.signal(signal.SIGALRM, handler)
    with ops.threads(4):
        for round in range(40):
            joiner = ops.ParallelArrayOps(max_workers=4)
            signal.setitimer(signal.ITIMER_REAL, 1e-4 * (round + 1))
            try:
                while True:
                    assert (joiner.concatenate(arrays) == expected).all()
            except ops.ShutdownError:
                pass
    assert len(handled) == 40
    print("done")
    """
    run_with_handler(source, wait)


@pytest.mark.process
@pytest.mark.parametrize("wait", [True, False])
def test_a_signal_handler_may_shut_down_in_the_middle_of_a_shutdown(wait):
    """The handler waits, or does not, and the shutdown that it interrupted ends with the call."""
    source = """
    inside, release, outcomes = threading.Event(), threading.Event(), []

    def slow():
        inside.set()
        release.wait(20)
        yield from arrays

    def call():
        try:
            outcomes.append((joiner.concatenate(slow()) == expected).all())
        except ops.ShutdownError:
            outcomes.append(not wait)

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait(20)
    signal.signal(signal.SIGALRM, lambda *_: (threading.Timer(0.1, release.set).start(), handler(0, None)))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    joiner.shutdown()
    caller.join()
    assert handled and outcomes == [True], (handled, outcomes)
    print("done")
    """
    run_with_handler(source, wait)


@pytest.mark.process
def test_a_signal_handler_may_shut_down_while_its_thread_holds_what_another_call_needs():
    """A call of another thread that finds this one compiling does without the kernel, so waiting for it is safe."""
    source = """
    from accel_ops.cpu import native
    holds, waits = threading.Event(), threading.Event()

    def call():
        holds.wait(20)
        with ops.threads(4):
            waits.set()
            joiner.concatenate(arrays)

    caller = threading.Thread(target=call)
    caller.start()
    attempt = object()
    assert native.the_compiler.take(attempt)  # as in the middle of a first join by this thread
    holds.set()
    waits.wait(20)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    while not handled:
        signal.pause()
    native.the_compiler.drop(attempt)
    caller.join()
    print("done")
    """
    run_with_handler(source, True)


@pytest.mark.process
def test_an_interrupt_ends_a_waiting_shutdown():
    """KeyboardInterrupt comes out of shutdown(), which can be called again."""
    source = """
    inside, release = threading.Event(), threading.Event()

    def slow():
        inside.set()
        release.wait(20)
        yield from arrays

    caller = threading.Thread(target=lambda: joiner.concatenate(slow()))
    caller.start()
    inside.wait(20)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        joiner.shutdown()
    except KeyboardInterrupt:
        release.set()
        joiner.shutdown()
        assert not joiner._calls
        print("done")
    caller.join()
    """
    run_with_handler(source, True)


@pytest.mark.process
@pytest.mark.parametrize("when", ["atexit", "a global's __del__", "a daemon thread in a call"])
@pytest.mark.parametrize("wait", [True, False])
def test_shutting_down_while_the_interpreter_ends_neither_hangs_nor_complains(when, wait):
    """At exit and in finalisers of module globals, also while a daemon thread is in a call."""
    source = f"""
    import atexit
    when = {when!r}

    class Owner:
        def __init__(self):
            self.joiner, self.wait, self.when = ops.ParallelArrayOps(max_workers=4), wait, when
        def __del__(self):
            self.joiner.shutdown(self.wait)
            if self.when == "a global's __del__":
                print("done", flush=True)

    owner = Owner()
    with ops.threads(4):
        owner.joiner.concatenate(arrays)
    if when == "atexit":
        atexit.register(print, "done", flush=True)
        atexit.register(lambda: (joiner.shutdown(wait), joiner.shutdown()))
    elif when == "a daemon thread in a call":
        begun = threading.Event()
        def stage():
            with ops.threads(4):
                while True:
                    begun.set()
                    joiner.concatenate(arrays)
        def quiet(stage=stage):
            try:
                stage()
            except ops.ShutdownError:
                pass
        threading.Thread(target=quiet, daemon=True).start()
        begun.wait(20)
        atexit.register(print, "done", flush=True)
        atexit.register(joiner.shutdown, wait)
    """
    run_with_handler(source, wait)


@pytest.mark.process
def test_a_forked_child_has_instances_of_its_own():
    """In a child, open instances work and closed ones stay closed; ending one does not end the parent's."""
    source = """
    closed = ops.ParallelArrayOps()
    closed.shutdown()
    with ops.threads(4):
        joiner.concatenate(arrays)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(15)
                assert (joiner.concatenate(arrays) == expected).all()
                joiner.shutdown()
                for each in (joiner, closed):
                    try:
                        each.concatenate(arrays)
                    except RuntimeError:
                        continue
                    raise AssertionError
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (joiner.concatenate(arrays) == expected).all()
    print("done")
    """
    run_with_handler(source, True)


# --- eleven ways in which an object of this kind can fail its users


def test_1_an_abrupt_shutdown_does_not_leave_a_caller_waiting(arrays, around_pieces):
    """A thread that is inside concatenate while shutdown(wait=False) is called returns from it."""
    joiner, copying_now, go_on = ops.ParallelArrayOps(), threading.Event(), threading.Event()

    def hold(index, piece):
        if index == 0:
            copying_now.set()
            assert go_on.wait(WAIT_S)
        elif index == 1:
            assert copying_now.wait(WAIT_S)
            assert go_on.wait(WAIT_S)  # so that pieces are left that have not begun
        piece()

    around_pieces(hold)
    outcomes = []

    def call():
        try:
            joiner.concatenate(arrays)
        except ops.ShutdownError:
            outcomes.append("ended")

    caller = threading.Thread(target=call)
    caller.start()
    assert copying_now.wait(WAIT_S)
    joiner.shutdown(wait=False)
    go_on.set()
    caller.join(WAIT_S)
    assert outcomes == ["ended"]


@pytest.mark.process
def test_2_a_fork_after_use_does_not_hang_the_child():
    """With every worker started and used, children join right bytes."""
    source = """
    from accel_ops.cpu import pool
    barrier = threading.Barrier(4)
    with ops.threads(4):
        pool.run(lambda _: barrier.wait(20), 4, workers=4)
        joiner.concatenate(arrays)
        for _ in range(4):
            child = os.fork()
            if child == 0:
                signal.alarm(15)
                os._exit(0 if (joiner.concatenate(arrays) == expected).all() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("done")
    """
    run_with_handler(source, True)


@pytest.mark.process
def test_3_shutdown_in_a_handler_during_shutdown_does_not_deadlock():
    """Both return once the call that they wait for has ended."""
    source = """
    inside = threading.Event()
    release = threading.Event()

    def slow():
        inside.set()
        release.wait(20)
        yield from arrays

    def end_soon(number, frame):
        threading.Timer(0.1, release.set).start()
        joiner.shutdown(wait=True)
        handled.append(number)

    caller = threading.Thread(target=lambda: joiner.concatenate(slow()))
    caller.start()
    inside.wait(20)
    signal.signal(signal.SIGALRM, end_soon)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    joiner.shutdown(wait=True)
    caller.join()
    assert handled
    print("done")
    """
    run_with_handler(source, True)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_4_no_copies_run_on_after_an_error(error, arrays, around_pieces):
    """When concatenate raises, no thread writes into `out` any more."""
    ran = []

    def failing(index, piece):
        ran.append(1)
        if index == 1:
            raise error
        piece()

    around_pieces(failing)
    out = np.zeros(1_200_000)
    with pytest.raises(error):
        ops.ParallelArrayOps().concatenate(arrays, 0, None, out=out)
    after, n_ran = out.tobytes(), len(ran)
    around_pieces(lambda _index, piece: piece())
    barrier = threading.Barrier(8)
    pool.run(lambda _: barrier.wait(WAIT_S), 8, workers=8)  # all workers are back
    assert out.tobytes() == after
    assert len(ran) == n_ran


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(50_000_000,)], id="one big array"),
        pytest.param([(50_000_000,)] + [(4096,)] * 20, id="a big one among many"),
        pytest.param([(1, 50_000_000)], id="axis length 1"),
        pytest.param([(1, 5_000_000)] * 10, id="many of axis length 1"),
    ],
)
def test_5_one_big_array_is_copied_in_parallel(shapes, planned):
    """The bytes of the output are shared among the threads, however they are spread over arrays."""
    inputs = [np.ones(shape, np.uint8) for shape in shapes]
    joined = ops.ParallelArrayOps().concatenate(inputs, 0, 1)
    assert joined.tobytes() == b"\1" * sum(array.nbytes for array in inputs)
    ((n_pieces, workers, tasks),) = planned
    assert workers == 8
    assert np.diff([*tasks, n_pieces]).max() <= n_pieces / 8


@pytest.mark.parametrize(("n_arrays", "n_bytes"), [(1, 8), (2, 8), (64, 4096), (20_000, 8)])
def test_6_small_inputs_touch_no_thread(n_arrays, n_bytes):
    """Small joins are done on the calling thread; none is started or woken, and no task is made for each array."""
    inputs = [np.full(n_bytes, k % 256, np.uint8) for k in range(n_arrays)]
    joined = ops.ParallelArrayOps().concatenate(inputs)
    assert joined.tobytes() == np.concatenate(inputs).tobytes()
    assert pool.size() == 0


def test_6_many_small_arrays_are_grouped(planned):
    """Where they make a large output together, there is one task for many of them."""
    inputs = [np.full(100, k, np.int64) for k in range(20_000)]
    joined = ops.ParallelArrayOps().concatenate(inputs)
    assert np.array_equal(joined, np.concatenate(inputs))
    ((n_pieces, _, _),) = planned
    assert n_pieces <= 20


@pytest.mark.parametrize("axis", [0, 1])
def test_7_inputs_that_are_not_contiguous_are_copied_once(axis, planned, monkeypatch):
    """No full copy of an input is made, and the work is shared."""
    inputs = [np.asfortranarray(np.arange(4_000_000.0).reshape(2000, 2000) + k) for k in range(3)]
    allocated = []
    empty = memory.empty
    monkeypatch.setattr(cpu_staging, "empty", lambda *args: allocated.append(args) or empty(*args))
    for name in ("copy", "ascontiguousarray"):
        monkeypatch.setattr(np, name, lambda *_args, **_options: pytest.fail("an input was copied"))
    joined = ops.ParallelArrayOps().concatenate(inputs, axis, 1)
    monkeypatch.undo()
    assert joined.tobytes() == np.concatenate(inputs, axis).tobytes()
    assert len(allocated) == 1
    assert planned[0][1] > 1
    assert len(planned[0][2]) > 8


@pytest.mark.process
def test_7_a_join_of_inputs_that_are_not_contiguous_holds_no_copy_in_memory():
    """The peak of memory grows by the output, not by the inputs once more."""
    source = """
    import resource
    inputs = [np.asfortranarray(np.ones((4000, 1000)) * k) for k in range(4)]  # 128 MB
    small = [np.asfortranarray(np.ones((1000, 1000)) * k) for k in range(4)]
    out = np.ones((16_000, 1000))
    with ops.threads(3):
        joiner.concatenate(small, 0, 1)
        ops.release_host_memory()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        joiner.concatenate(inputs, 0, 1, out=out)
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    assert grown_mb < 40, grown_mb
    assert (out[::4000, 0] == range(4)).all()
    print("done")
    """
    run_with_handler(source, True)


def test_8_a_minimum_of_zero_means_no_minimum(arrays):
    """min_chunk_size_mb=0 joins."""
    assert np.array_equal(ops.ParallelArrayOps().concatenate(arrays, 0, 0), np.concatenate(arrays))


def test_8_a_bad_cap_is_refused_when_it_is_given():
    """max_workers=None fails in the constructor, with what to pass."""
    with pytest.raises(ValueError, match="got None; 24 is the default"):
        ops.ParallelArrayOps(max_workers=None)


@pytest.mark.parametrize("shapes", [[(5, 1), (1, 1, 1)], [(5, 1), (5,)], [(1, 1, 1), (5, 1)], [(3, 2), (3, 3)]])
def test_8_shapes_that_do_not_fit_are_refused(shapes):
    """Mismatched dimensions are an error that names both shapes, never a result."""
    with pytest.raises(ops.ShapeMismatchError) as caught:
        ops.ParallelArrayOps().concatenate([np.ones(shape) for shape in shapes])
    assert all(str(shape) in str(caught.value) for shape in shapes)


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_9_threads_follow_the_cpus_that_may_be_used(cpus, planned, monkeypatch):
    """The default of 24 is a cap: affinity and quota decide."""
    monkeypatch.setattr(limits, "available_cpus", lambda: cpus)
    ops.ParallelArrayOps().concatenate([np.ones(5_000_000)], 0, None)
    assert [workers for _, workers, _ in planned] == [cpus]
    assert pool.size() <= cpus - 1


@pytest.mark.process
def test_10_a_fresh_output_has_few_page_faults():
    """Huge pages serve the first output, where the system has them; a recycled one has none to speak of."""
    source = """
    import pathlib, resource
    array = np.ones(50_000_000, np.uint8)

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        joined = joiner.concatenate([array, array])
        assert joined.nbytes == 100_000_000
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with ops.threads(2):
        ops.concatenate([array[:5_000_000]] * 2)
        ops.release_host_memory()
        fresh, recycled = faults(), faults()
    assert recycled < 250, recycled
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[never]" not in setting.read_text():
        assert fresh < 5000, fresh  # of 24,414 small pages
    print("done")
    """
    run_with_handler(source, True)


@pytest.mark.parametrize("n_arrays", [1, 2])
def test_11_one_array_is_refused_after_shutdown_like_two(n_arrays):
    """RuntimeError, whatever the number of arrays."""
    joiner = ops.ParallelArrayOps()
    joiner.shutdown()
    with pytest.raises(RuntimeError, match="has not been shut down"):
        joiner.concatenate([np.ones(3)] * n_arrays)
