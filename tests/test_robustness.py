"""Faults that long-running servers meet: small stacks, refused memory, late finalisers, signals at bad moments.

All of it runs in child processes with deadlines.
"""

import pytest
from child_processes import run_child

pytestmark = pytest.mark.process


def test_threads_with_small_stacks_can_stage():
    """Kernels keep their scratch memory elsewhere: a stack of 128 KiB is enough for callers and workers."""
    source = """
        import threading
        import numpy as np
        import accel_ops as ops
        threading.stack_size(128 << 10)
        right = []

        def stage():
            for code in ("u2", "f4", "f8"):
                columns = 6_000_000 // np.dtype(code).itemsize // 1000
                arrays = [np.arange(1000 * columns).astype(code).reshape(columns, 1000).T] * 6
                with ops.threads(2):
                    joined = ops.concatenate(arrays)
                right.append(np.array_equal(joined, np.concatenate(arrays)))

        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()
        print(right)
    """
    assert run_child(source, deadline_s=60) == "[True, True, True]\n"


@pytest.mark.parametrize("headroom_mib", [8, 64, 150, 300])
def test_where_address_space_is_short_a_join_works_or_raises_memory_error(headroom_mib):
    """No kernel can be compiled then, so NumPy copies; afterwards everything works."""
    source = """
        import resource, sys
        import numpy as np
        import accel_ops as ops
        headroom = int(sys.argv[1]) << 20
        arrays = [np.arange(3_000_000, dtype="f4").reshape(1000, 3000) + k for k in range(3)]
        turned = [array.T for array in arrays]
        expected = [np.concatenate(arrays), np.concatenate(turned), np.concatenate(arrays).astype("f2")]
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()

        def outcomes():
            for join in (lambda: ops.concatenate(arrays), lambda: ops.concatenate(turned),
                         lambda: ops.concatenate(arrays, dtype="f2", casting="unsafe")):
                try:
                    yield join()
                except MemoryError:
                    yield None

        with np.errstate(over="ignore"):
            resource.setrlimit(resource.RLIMIT_AS, (used + headroom, hard))
            for got, right in zip(outcomes(), expected):
                assert got is None or np.array_equal(got, right)
                del got
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            assert all(np.array_equal(got, right) for got, right in zip(outcomes(), expected))
        print("done")
    """
    assert run_child(source, deadline_s=60, arguments=[str(headroom_mib)]) == "done\n"


def test_a_finaliser_may_shut_down_while_the_interpreter_ends():
    """It does not wait for the call of a daemon thread, which will never end."""
    source = """
        import sys, threading, types
        import numpy as np
        import accel_ops as ops
        joiner, begun = ops.ParallelArrayOps(), threading.Event()

        class Owner:
            def __init__(self):
                self.joiner = joiner
            def __del__(self):
                self.joiner.shutdown()
                print("shut down", flush=True)

        def requests():
            begun.set()
            threading.Event().wait()
            yield

        def stage(joiner=joiner, requests=requests):
            joiner.concatenate(requests())

        sys.modules["elsewhere"] = types.ModuleType("elsewhere")
        sys.modules["elsewhere"].owner = Owner()
        threading.Thread(target=stage, daemon=True).start()
        begun.wait(20)
    """
    assert run_child(source, deadline_s=20) == "shut down\n"


def test_two_threads_may_shut_down_from_within_their_calls():
    """Neither waits for the other."""
    source = """
        import threading
        import numpy as np
        import accel_ops as ops
        first, second, both = ops.ParallelArrayOps(), ops.ParallelArrayOps(), threading.Barrier(2)

        def requests(other):
            both.wait(10)
            other.shutdown()
            yield np.ones(3)

        threads = [
            threading.Thread(target=lambda: first.concatenate(requests(second))),
            threading.Thread(target=lambda: second.concatenate(requests(first))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


@pytest.mark.parametrize(
    "make",
    ["[np.ones(4 << 10, 'u1')] * 200_000", "[np.ones(1_000_000, object)] * 20", "[np.ones(1 << 20, 'S8')] * 60"],
)
def test_an_interrupt_takes_effect_within_a_long_join(make):
    """Nothing hands NumPy so much at once that an exception would wait for it for a second."""
    source = f"""
        import signal, time
        import numpy as np
        import accel_ops as ops
        arrays = {make}
        ops.concatenate(arrays[:3])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for round in range(5):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                sent = time.monotonic() + 0.02
                while True:
                    ops.concatenate(arrays)
            except KeyboardInterrupt:
                assert time.monotonic() - sent < 1, time.monotonic() - sent
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


def test_no_interrupt_is_lost_where_results_die():
    """What happens when an array dies runs no Python code, in which an exception would be dropped."""
    source = """
        import signal
        import numpy as np
        import accel_ops as ops
        arrays, raised, lost = [np.ones(9 << 20, "u1")], 0, []
        import sys
        sys.unraisablehook = lost.append

        class Alarm(Exception):
            pass

        def handler(number, frame):
            raise Alarm

        signal.signal(signal.SIGALRM, handler)
        with ops.threads(1):
            for round in range(1500):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-4 + 1e-6 * (round % 500))
                    while True:
                        ops.concatenate(arrays)
                except Alarm:
                    raised += 1
        assert raised == 1500 and not lost, (raised, len(lost))
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


def test_signals_during_forks_leave_no_lock_held():
    """Exceptions that handlers raise in the middle of forks do not keep other threads from forking and compiling."""
    source = """
        import os, signal, sys, threading
        import numpy as np
        import llvmlite.binding as llvm
        import accel_ops as ops
        from accel_ops.cpu import copy_kernels, fork, native
        sys.unraisablehook = lambda _: None

        class Alarm(Exception):
            pass

        armed, handled = False, 0

        def handler(number, frame):
            global handled
            handled += 1
            if armed:
                raise Alarm

        signal.signal(signal.SIGALRM, handler)
        for round in range(300):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (round % 100 + 1))
            process = None
            try:
                armed = True
                process = os.fork()
                if process == 0:
                    os._exit(0)
                armed = False
            except Alarm:
                armed = False
                if process == 0:
                    os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled > 50, handled
        try:
            while True:
                os.wait()
        except ChildProcessError:
            pass
        assert not native.the_compiler._holder
        free = []

        def elsewhere():
            lock = fork._foreign_locks()[-1]
            free.append(lock.acquire(timeout=5))
            lock.release()
            copy_kernels.rows.cache_clear()
            free.append(copy_kernels.rows(stream=False) is not None)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(20)
        assert free == [True, True], free
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


def test_interrupts_during_compilation_leave_no_lock_held():
    """Kernels are compiled where no signal reaches, and the next call has them."""
    source = """
        import signal, threading
        import numpy as np
        import accel_ops as ops
        from accel_ops.cpu import copy_kernels, fork

        class Alarm(Exception):
            pass

        armed = False

        def handler(number, frame):
            if armed:
                raise Alarm

        arrays = [np.ones((1000, 1300)).T] * 2
        signal.signal(signal.SIGALRM, handler)
        raised = 0
        for round in range(60):
            copy_kernels.transpose.cache_clear()
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + 4e-4 * round, 3e-4)
            try:
                armed = True
                ops.concatenate(arrays)
                armed = False
            except Alarm:
                armed = False
                raised += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert raised > 10, raised
        joined = []
        thread = threading.Thread(target=lambda: joined.append(ops.concatenate(arrays, dtype="f2")))
        thread.start()
        thread.join(20)
        assert joined[0].shape == (2600, 1000)
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


def test_a_handler_may_stage_while_its_thread_imports_a_compiler():
    """There is no kernel then, and NumPy copies."""
    source = """
        import sys
        import numpy as np
        import accel_ops as ops
        arrays, joined = [np.ones((1000, 1300)).T] * 2, []

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "llvmlite.binding.value":
                    joined.append(ops.concatenate(arrays))
                return None

        sys.meta_path.insert(0, Interrupting())
        import llvmlite.binding
        assert (joined[0] == 1).all()
        assert (ops.concatenate(arrays) == 1).all()
        print("done")
    """
    assert run_child(source, deadline_s=30) == "done\n"


def test_error_callbacks_run_on_the_calling_thread():
    """A callback or warning hook may take a lock that its own thread holds already, as with NumPy."""
    source = """
        import threading, warnings
        import numpy as np
        import accel_ops as ops
        lock, threads = threading.RLock(), set()

        def called(*_):
            with lock:
                threads.add(threading.current_thread().name)

        overflowing = np.full(4 << 20, 1e30, "f4")
        complex_ = np.full(2 << 20, 1 + 1j)
        with ops.threads(2), lock:
            for _ in range(5):
                with np.errstate(over="call", call=called):
                    ops.concatenate([overflowing] * 2, dtype="f2")
                with warnings.catch_warnings():
                    warnings.showwarning = called
                    warnings.simplefilter("always")
                    ops.concatenate([complex_] * 2, dtype="f8", casting="unsafe")
        assert threads == {"MainThread"}, threads
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"
