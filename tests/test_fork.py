"""Forked children work, whatever their parent was doing. Everything here runs in child processes with deadlines."""

import os

import pytest
from child_processes import run_child

pytestmark = pytest.mark.process

# How often a process forks while its other threads stage and compile.
FORKS = int(os.environ.get("ACCEL_OPS_TEST_FORKS", "100"))

# What the programs below begin with. A forked child that hangs is ended by its alarm and noticed by its parent.
PRELUDE = """
import contextlib, functools, os, signal, sys, threading, traceback
import numpy as np
import accel_ops as ops
from accel_ops.cpu import copy_kernels, native, pool

ARRAYS = [np.arange(300_000.0) + k for k in range(4)]
EXPECTED = np.concatenate(ARRAYS).tobytes()
COLUMNS = [np.arange(1_000_000, dtype=np.int32).reshape(1000, 1000).T + k for k in range(2)]
COLUMNS_EXPECTED = np.concatenate(COLUMNS, axis=1).tobytes()

def verify(n_threads=4):
    "Join in parallel, by two kinds of kernel, and compare bytes."
    with ops.threads(n_threads):
        assert ops.concatenate(ARRAYS).tobytes() == EXPECTED
        assert ops.concatenate(COLUMNS, axis=1).tobytes() == COLUMNS_EXPECTED

def saturate(n_threads=4):
    "Start workers and see each of them inside a piece."
    barrier, names = threading.Barrier(n_threads), set()
    def piece(index):
        barrier.wait(20)
        names.add(threading.current_thread().name)
    pool.run(piece, n_threads, workers=n_threads)
    assert len(names) == n_threads, names

def forget_kernels():
    "Make the next use of each copy kernel compile it."
    for function in vars(copy_kernels).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()

@contextlib.contextmanager
def compiling():
    "Be in the middle of a compilation of ours, as far as other threads can see."
    attempt = object()
    assert native.the_compiler.take(attempt)
    try:
        yield
    finally:
        native.the_compiler.drop(attempt)

def in_child(work, alarm_s=30):
    "Fork, do the work in the child alone, and return the child's id."
    process = os.fork()
    if process == 0:
        end_child(work, alarm_s)
    return process

def end_child(work, alarm_s=30):
    status = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.alarm(alarm_s)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)

def check(process):
    while True:
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        except InterruptedError:
            continue
        assert status == 0, f"a forked child ended with {status} (-14 is a hang)"
        return
"""


def run(source, *, deadline_s=90, arguments=(), env=None):
    body = f"{PRELUDE}\n{_dedented(source)}\nprint('done')\n"
    assert run_child(body, deadline_s=deadline_s, arguments=arguments, env=env) == "done\n"


def _dedented(source):
    lines = source.splitlines()
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[margin:] for line in lines)


# --- processes that find the pool in use


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_of_every_start_method_works(method):
    """With all workers started and used, a child joins right bytes and starts workers of its own."""
    source = f"""
        {PRELUDE.replace(chr(10), chr(10) + " " * 8)}
        import multiprocessing

        def work(queue):
            verify()
            saturate()
            verify()
            queue.put(pool.size())

        if __name__ == "__main__":
            saturate()
            verify()
            context = multiprocessing.get_context(sys.argv[1])
            queue = context.SimpleQueue()
            for _ in range(2):
                child = context.Process(target=work, args=(queue,))
                child.start()
                child.join(60)
                assert child.exitcode == 0, child.exitcode
                assert queue.get() == 3
            verify()
            print("done")
    """
    assert run_child(source, deadline_s=90, arguments=[method], grace_s=5) == "done\n"


def test_a_pool_of_processes_whose_workers_fork_again_works():
    """Worker processes made by fork, each of which forks once more, give right results."""
    source = f"""
        {PRELUDE.replace(chr(10), chr(10) + " " * 8)}
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        def leaf(queue):
            verify()
            queue.put(pool.size())

        def task(index):
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            child = context.Process(target=leaf, args=(queue,))
            child.start()
            child.join(30)
            verify()
            return child.exitcode, queue.get(), pool.size()

        if __name__ == "__main__":
            saturate()
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as processes:
                assert list(processes.map(task, range(6), timeout=60)) == [(0, 3, 3)] * 6
            verify()
            print("done")
    """
    assert run_child(source, deadline_s=90) == "done\n"


def test_seventy_forks_deep_the_pool_works():
    """A child of a child, and so on, each of which uses all its workers before it forks."""
    run(
        """
        def descend(depth):
            saturate()
            verify()
            if depth:
                check(in_child(lambda: descend(depth - 1), alarm_s=80))
                verify()

        descend(70)
        """
    )


def test_a_fork_from_a_thread_that_is_not_the_main_one_works():
    """The pool was first used by a thread that has ended, and helper threads fork."""
    run(
        """
        def in_thread(function):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()

        in_thread(saturate)
        codes = []
        def fork():
            check(in_child(lambda: (verify(), saturate())))
            codes.append(0)
        for _ in range(5):
            in_thread(fork)
        assert codes == [0] * 5
        verify()
        """
    )


def test_many_forks_while_other_threads_stage_and_compile():
    """No child hangs or gets a wrong byte while two threads stage and a third compiles our kernels and Numba's."""
    run(
        """
        import numba

        stop, failures, ready = threading.Event(), [], threading.Barrier(4)

        def forever(function):
            def body():
                try:
                    ready.wait(20)
                    while not stop.is_set():
                        function()
                except BaseException:
                    failures.append(traceback.format_exc())
            thread = threading.Thread(target=body)
            thread.start()
            return thread

        def compile_by_numba():
            return numba.njit(lambda x: x + 1)(1)

        def compile_kernels():
            forget_kernels()
            verify()
            assert compile_by_numba() == 2

        saturate()
        verify()
        compile_by_numba()
        threads = [forever(verify), forever(verify), forever(compile_kernels)]

        def work(round):
            if round % 3 == 0:
                forget_kernels()
            if round % 8 == 0:
                assert compile_by_numba() == 2
            verify()
            if round % 5 == 0:
                saturate()

        ready.wait(20)
        try:
            for round in range(int(sys.argv[1])):
                check(in_child(lambda: work(round), alarm_s=60))
                assert not failures, failures
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures, failures
        verify()
        """,
        deadline_s=60 + FORKS * 1.5,
        arguments=[str(FORKS)],
    )


# --- forks from inside of a call


@pytest.mark.parametrize("where", ["worker", "caller"])
def test_a_fork_by_a_piece_gives_a_child_that_works(where):
    """A piece forks: the child joins right bytes, and the parent's call ends as if nothing had been."""
    run(
        """
        barrier, children = threading.Barrier(3), []

        def piece(index):
            barrier.wait(20)
            if threading.current_thread().name.startswith("accel-ops-") == (sys.argv[1] == "worker"):
                children.append(in_child(verify))

        pool.run(piece, 3, workers=3)
        assert len(children) == (2 if sys.argv[1] == "worker" else 1)
        for child in children:
            check(child)
        saturate()
        verify()
        """,
        arguments=[where],
    )


@pytest.mark.parametrize("n_helpers", [1, 3])
def test_a_child_forked_by_the_callers_piece_finishes_the_call(n_helpers):
    """What the lost helpers had begun is done again by the child, which returns with every piece done."""
    run(
        """
        n_helpers = int(sys.argv[1])
        parent, done = os.getpid(), np.zeros(40, np.int64)
        held, release = threading.Semaphore(0), threading.Event()
        child = None

        def piece(index):
            global child
            if threading.current_thread() is not threading.main_thread():
                held.release()
                release.wait(20)
            elif child is None:
                for _ in range(n_helpers):
                    held.acquire(timeout=20)  # each helper is in the middle of a piece
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                else:
                    release.set()
            done[index] += 1

        pool.run(piece, 40, workers=n_helpers + 1)
        if os.getpid() != parent:
            end_child(lambda: (done.tolist() == [1] * 40 or 1 / 0, verify(), saturate()))
        check(child)
        assert done.tolist() == [1] * 40
        verify()
        """,
        arguments=[str(n_helpers)],
    )


def test_a_failure_that_a_lost_helper_would_have_had_is_raised_in_the_child():
    """The child raises the failure of the lowest index although the helper that had its piece is gone."""
    run(
        """
        parent, held, release = os.getpid(), threading.Event(), threading.Event()
        child = None

        def piece(index):
            global child
            if threading.current_thread() is not threading.main_thread():
                held.set()
                release.wait(20)
                raise KeyError("of the helper")
            if child is None:
                held.wait(20)
                child = os.fork()
                release.set()
            if os.getpid() != parent and index == 5:
                raise IndexError("of a later piece")
            if os.getpid() != parent and index < 5:
                raise KeyError("of the helper")

        try:
            pool.run(piece, 8, workers=2, tasks=[0, 4])
        except KeyError as exc:
            assert exc.args == ("of the helper",)
        else:
            raise AssertionError("nothing was raised")
        if os.getpid() != parent:
            os._exit(0)
        check(child)
        """
    )


def test_a_signal_handler_may_fork_in_the_middle_of_a_join():
    """At whatever moment the handler forks, the child goes on to finish the join with right bytes."""
    run(
        """
        parent, children = os.getpid(), []

        def handler(number, frame):
            children.append(os.fork())
            if os.getpid() != parent:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(30)

        signal.signal(signal.SIGALRM, handler)
        with ops.threads(4):
            for round in range(40):
                before = len(children)
                if round % 4 == 0:
                    forget_kernels()
                signal.setitimer(signal.ITIMER_REAL, 5e-5 + 1.5e-4 * round)
                while len(children) == before:
                    joined = ops.concatenate(ARRAYS).tobytes()
                if os.getpid() != parent:
                    end_child(lambda: (joined == EXPECTED or 1 / 0, verify(), saturate()))
                assert joined == EXPECTED
                check(children[-1])
        verify()
        """
    )


def test_a_signal_handler_may_fork_while_its_thread_starts_workers():
    """The child of a fork that came while a worker was being started does not wait for that worker."""
    run(
        """
        parent, forked = os.getpid(), threading.Event()
        child = None

        def handler(number, frame):
            global child
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
            forked.set()

        signal.signal(signal.SIGALRM, handler)
        start = pool._thread.start_new_thread

        class InterruptedStart:
            @staticmethod
            def start_new_thread(function, args):
                start(function, args)
                if not forked.is_set():
                    os.kill(parent, signal.SIGALRM)
                    while not forked.is_set():
                        signal.pause()

        pool._thread = InterruptedStart

        with ops.threads(3):
            joined = ops.concatenate(ARRAYS).tobytes()
        if os.getpid() != parent:
            end_child(lambda: (joined == EXPECTED or 1 / 0, verify(), saturate()))
        assert joined == EXPECTED
        check(child)
        """
    )


def test_a_fork_does_not_disturb_a_handler_that_forks_meanwhile():
    """A fork that waits for a compilation, and is interrupted by a handler that forks, leaves no lock held."""
    run(
        """
        holds, release, waiting = threading.Event(), threading.Event(), threading.Event()
        children = []

        def hold():
            with compiling():
                holds.set()
                waiting.wait(20)
                os.kill(os.getpid(), signal.SIGUSR1)
                release.wait(0.3)  # the main thread forks again and waits for this thread twice

        def before():
            waiting.set()

        def handler(number, frame):
            children.append(in_child(verify))

        verify()
        os.register_at_fork(before=before)  # hooks run in reverse order, so this one comes first
        signal.signal(signal.SIGUSR1, handler)
        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait(20)
        children.append(in_child(verify))
        thread.join()
        assert len(children) == 2
        for child in children:
            check(child)

        forget_kernels()
        compiled = threading.Event()
        threading.Thread(target=lambda: (copy_kernels.rows(stream=True), compiled.set()), daemon=True).start()
        assert compiled.wait(20), "another thread cannot compile any more"
        """
    )


# --- forks while other threads are in the middle of something


def test_a_fork_while_another_thread_shuts_down_and_others_run_calls():
    """In the child a shutdown ends, although the calls that it would wait for have no thread any more."""
    run(
        """
        joiner, inside, release = ops.ParallelArrayOps(), threading.Event(), threading.Event()

        def slow():
            yield ARRAYS[0]
            inside.set()
            release.wait(20)
            yield from ARRAYS[1:]

        def shut_down():
            joiner.shutdown()

        results = []
        caller = threading.Thread(target=lambda: results.append(joiner.concatenate(slow()).tobytes()))
        caller.start()
        inside.wait(20)
        closer = threading.Thread(target=shut_down)
        closer.start()
        while not joiner._closed:
            pass

        def work():
            for wait in (True, False, True):
                joiner.shutdown(wait)
            try:
                joiner.concatenate(ARRAYS)
            except RuntimeError:
                pass
            else:
                raise AssertionError("it is still open")
            with ops.ParallelArrayOps() as another:
                assert another.concatenate(ARRAYS).tobytes() == EXPECTED
            verify()

        check(in_child(work))
        assert closer.is_alive()
        release.set()
        caller.join()
        closer.join()
        assert results == [EXPECTED]
        """
    )


def test_a_signal_handler_may_fork_in_the_middle_of_a_shutdown():
    """The child leaves the shutdown that its thread is in: the call waited for has no thread any more."""
    run(
        """
        parent = os.getpid()
        joiner, inside, release = ops.ParallelArrayOps(), threading.Event(), threading.Event()
        child = None

        def slow():
            yield ARRAYS[0]
            inside.set()
            release.wait(20)
            yield from ARRAYS[1:]

        def handler(number, frame):
            global child
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
            release.set()

        signal.signal(signal.SIGALRM, handler)
        caller = threading.Thread(target=lambda: joiner.concatenate(slow()))
        caller.start()
        inside.wait(20)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        joiner.shutdown()
        if os.getpid() != parent:
            end_child(verify)
        check(child)
        caller.join()
        """
    )


def test_a_fork_while_other_threads_take_and_drop_memory():
    """A child finds the cache of blocks usable whatever the other threads were doing with it."""
    run(
        """
        from accel_ops.cpu import memory
        stop, failures = threading.Event(), []

        def churn(seed):
            random = np.random.default_rng(seed)
            kept = []
            try:
                while not stop.is_set():
                    kept.append(memory.empty((int(random.integers(1 << 20, 4 << 20)),), np.dtype(np.uint8)))
                    kept[-1][::4096] = seed
                    if len(kept) > 4:
                        del kept[int(random.integers(5))]
            except BaseException:
                failures.append(traceback.format_exc())

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()

        def work():
            info = ops.host_memory_info()
            assert 0 <= info.cached_bytes and 0 <= info.in_use_bytes
            verify()
            ops.release_host_memory()
            assert ops.host_memory_info().cached_blocks == 0
            verify()

        try:
            for _ in range(20):
                check(in_child(work))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures, failures
        """
    )


def test_memory_of_the_parents_arrays_is_not_handed_out_in_the_child():
    """What an array refers to at the fork stays as it is, in both processes, while each recycles blocks."""
    run(
        """
        from accel_ops.cpu import memory
        held = ops.concatenate(ARRAYS)
        view = memoryview(held)[1000:]
        thread_holds, release = threading.Event(), threading.Event()

        def hold(array):
            thread_holds.set()
            release.wait(60)
            return array[0]

        other = ops.concatenate(ARRAYS)
        holder = threading.Thread(target=hold, args=(other,))
        address = other.ctypes.data
        del other
        holder.start()
        thread_holds.wait(20)

        def churn():
            addresses = set()
            for k in range(20):
                array = memory.empty((held.nbytes,), np.dtype(np.uint8))
                array[...] = k
                addresses.add(array.ctypes.data)
            assert not addresses & {held.ctypes.data, address}
            assert held.tobytes() == EXPECTED and view[0] == held[1000]

        children = [in_child(churn) for _ in range(3)]
        churn()
        for child in children:
            check(child)
        assert held.tobytes() == EXPECTED
        release.set()
        holder.join()
        """
    )


# --- the budget


def test_the_budget_is_inherited_and_then_belongs_to_the_child():
    """A child starts with the parent's value, changes it for itself alone, and keeps an open block."""
    run(
        """
        import warnings
        warnings.simplefilter("ignore", ops.ThreadingWarning)
        ops.set_num_threads(3)
        verify()

        def work():
            assert ops.get_num_threads() == 3
            ops.set_num_threads(1)
            assert ops.get_num_threads() == 1
            with ops.threads(5):
                assert ops.get_num_threads() == 5
                verify(5)
            assert ops.get_num_threads() == 1

        check(in_child(work))
        assert ops.get_num_threads() == 3

        def in_a_block():
            assert ops.get_num_threads() == 2

        with ops.threads(2):
            check(in_child(in_a_block))
        assert ops.get_num_threads() == 3
        """
    )


def test_a_child_with_fewer_cpus_has_a_smaller_budget():
    """The CPUs that a child may use decide its budget, not those of its parent."""
    run(
        """
        saturate()
        before = ops.get_num_threads()

        def work():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            assert ops.get_num_threads() == 1
            verify(1)
            assert ops.thread_info().pool_size == 0
            verify(4)

        check(in_child(work))
        assert ops.get_num_threads() == before
        """
    )


def test_a_child_starts_with_an_empty_pool():
    """The parent's workers are not counted in the child, and its own are named from 0."""
    run(
        """
        saturate()

        def work():
            assert ops.thread_info().pool_size == 0
            saturate()
            names = sorted(thread.name for thread in threading.enumerate())
            assert names == ["MainThread", "accel-ops-0", "accel-ops-1", "accel-ops-2"], names

        check(in_child(work))
        """
    )


# --- compilation


def test_all_locks_around_compilation_are_found():
    """With Numba and llvmlite loaded there are two locks of theirs, and they are those that the two take."""
    run(
        """
        from accel_ops.cpu import fork
        assert fork._foreign_locks() == []
        import llvmlite.binding as llvm
        assert len(fork._foreign_locks()) == 1
        import numba
        from numba.core import event
        numbas, llvms = fork._foreign_locks()

        def waits_for(lock, function):
            "Whether the function, in another thread, ends only when the lock is released."
            ended = threading.Event()
            thread = threading.Thread(target=lambda: (function(), ended.set()))
            with lock:  # an RLock, by which neither library can tell us from one of its own threads
                thread.start()
                waited = not ended.wait(0.5)
            assert ended.wait(20)
            thread.join()
            return waited

        add = numba.njit(lambda x: x + 1)
        assert waits_for(numbas, lambda: add(1))
        assert waits_for(llvms, llvm.get_process_triple)
        assert not waits_for(numbas, lambda: add(1))  # it has been compiled
        """
    )


def test_nobody_waits_for_a_kernel_that_is_being_compiled():
    """Joins go on without it, in other threads and in a handler of the same one, with the right bytes."""
    run(
        """
        with compiling():
            assert copy_kernels.rows(stream=False) is None
            verify()
        assert copy_kernels.rows(stream=False) is not None
        verify()
        """
    )


def test_a_child_forked_while_a_thread_compiles_can_compile():
    """The fork waits until the compilation is over, Numba's or ours, so that no child inherits half of one."""
    run(
        """
        import numba
        from numba.core.compiler_lock import global_compiler_lock
        import llvmlite.binding

        def compiled():
            forget_kernels()
            verify()
            assert numba.njit(lambda x: x + 1)(1) == 2

        compiled()
        compile_ours = llvmlite.binding.get_process_triple
        compile_numbas = lambda: numba.njit(lambda x: x * 2)(1.0)
        for held, function in ((lambda: global_compiler_lock, compile_numbas), (compiling, compile_ours)) * 2:
            holds = threading.Event()

            def hold():
                with held():
                    holds.set()
                    function()

            thread = threading.Thread(target=hold)
            thread.start()
            holds.wait(20)
            check(in_child(compiled))
            thread.join()
        compiled()
        """
    )


@pytest.mark.parametrize("module", ["llvmlite.binding", "numba"])
def test_a_child_forked_while_a_thread_imports_the_compiler_can_compile(module):
    """A user's thread that has not yet finished its import does not make the child wait for ever."""
    run(
        """
        import importlib
        inside, forked = threading.Event(), threading.Event()

        class Slow:
            "Stops the import in the middle, without touching what is imported."
            def find_spec(self, name, path=None, target=None):
                if name == "llvmlite.binding.value":
                    inside.set()
                    forked.wait(20)
                return None

        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=importlib.import_module, args=(sys.argv[1],))
        thread.start()
        inside.wait(20)
        release = threading.Timer(1, forked.set)  # for a fork that waits until the import is over
        release.start()
        child = in_child(lambda: verify(1), alarm_s=15)
        forked.set()
        thread.join()
        check(child)
        verify()
        """,
        arguments=[module],
    )


@pytest.mark.parametrize("forks", ["another thread", "a handler of the thread that waits for it"])
def test_a_child_forked_while_products_are_imported_can_multiply(forks):
    """The first use of a product imports its module, and no child inherits half of that."""
    run(
        """
        inside, forked, children = threading.Event(), threading.Event(), []
        multiply = lambda: np.testing.assert_array_equal(ops.matmul(np.eye(3), np.eye(3)), np.eye(3))

        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "accel_ops.cpu.vector_products":
                    inside.set()
                    forked.wait(20)
                return None

        assert "accel_ops.products" not in sys.modules
        sys.meta_path.insert(0, Slow())
        release = threading.Timer(2, forked.set)  # for a fork that waits until the import is over
        release.start()
        if sys.argv[1] == "another thread":
            thread = threading.Thread(target=multiply)
            thread.start()
            inside.wait(20)
            children.append(in_child(multiply))
            thread.join()
        else:
            signal.signal(signal.SIGALRM, lambda *_: children.append(in_child(multiply)))
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            multiply()
        assert inside.is_set()
        check(*children)
        multiply()
        """,
        arguments=[forks],
    )


def test_a_fork_from_within_an_import_of_a_compiler_does_not_wait_for_it():
    """A handler that forks while its own thread imports llvmlite gets its child at once."""
    run(
        """
        children = []

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "llvmlite.binding.value":
                    children.append(in_child(lambda: None))
                return None

        sys.meta_path.insert(0, Interrupting())
        import llvmlite.binding
        check(*children)
        verify()
        """,
        deadline_s=30,
    )


def test_a_fork_leaves_the_locks_free_in_parent_and_child():
    """After a fork another thread of either process can compile."""
    run(
        """
        import numba
        numba.njit(lambda x: x)(1)
        verify()

        def another_thread_compiles():
            forget_kernels()
            done = []
            thread = threading.Thread(target=lambda: (verify(), done.append(numba.njit(lambda x: x + 3)(1))))
            thread.start()
            thread.join(25)
            assert done == [4]

        check(in_child(another_thread_compiles, alarm_s=60))
        another_thread_compiles()
        """
    )
