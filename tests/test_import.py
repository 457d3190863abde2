"""Importing costs nothing and changes nothing."""

import ast
from pathlib import Path

import pytest
from child_processes import run_child

from accel_ops import orders

pytestmark = pytest.mark.process

HEAVY = ("numba", "llvmlite", "scipy", "cupy", "torch", "multiprocessing.pool", "concurrent.futures.thread")


def test_importing_loads_nothing_heavy_and_starts_no_thread():
    """Of other packages only NumPy and threadpoolctl are loaded, and the process has the threads that it had."""
    source = f"""
        import os, sys, threading
        import numpy, threadpoolctl
        before, tasks = set(sys.modules), len(os.listdir("/proc/self/task"))
        import accel_ops
        new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        foreign = new - set(sys.stdlib_module_names) - {{"accel_ops", "numpy", "threadpoolctl"}}
        assert not foreign, foreign
        assert not [name for name in {HEAVY!r} if name in sys.modules]
        assert "accel_ops.products" not in sys.modules and "matmul" in dir(accel_ops)
        assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == tasks
        assert accel_ops.thread_info().pool_size == 0
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


def test_importing_leaves_the_state_of_the_process_alone():
    """Environment, BLAS threads, NumPy's error state, warnings, signals, affinity and the like are unchanged."""
    source = """
        import locale, logging, multiprocessing, os, random, resource, signal, sys, threading, warnings
        import numpy as np, scipy.linalg, threadpoolctl

        def state():
            return {
                "environment": dict(os.environ),
                "BLAS": sorted(
                    (each["filepath"], each["num_threads"])
                    for each in threadpoolctl.threadpool_info() if each["user_api"] in ("blas", "openmp")
                ),
                "errors": np.geterr(),
                "error call": np.geterrcall(),
                "printing": np.get_printoptions(),
                "random": np.random.get_state()[1].tolist(),
                "filters": list(warnings.filters),
                "showwarning": warnings.showwarning,
                "signals": [signal.getsignal(number) for number in signal.valid_signals()],
                "affinity": os.sched_getaffinity(0),
                "start method": multiprocessing.get_start_method(allow_none=True),
                "threads": threading.active_count(),
                "tasks": len(os.listdir("/proc/self/task")),
                "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.meta_path[:], sys.path[:]),
                "switch interval": sys.getswitchinterval(),
                "recursion": sys.getrecursionlimit(),
                "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
                "loggers": (logging.root.level, logging.root.handlers[:]),
                "locale": locale.setlocale(locale.LC_ALL),
                "directory": os.getcwd(),
                "files": len(os.listdir("/proc/self/fd")),
                "sum": np.sum(np.full(1000, 0.1)).hex(),
                "children": len(multiprocessing.active_children()),
            }

        before = state()
        import accel_ops
        after = state()
        changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
        assert not changed, changed
        print("done")
    """
    assert run_child(source, deadline_s=30) == "done\n"


def test_importing_reads_no_file_and_no_variable():
    """The environment and the control groups are read at first use, so a program may set variables after it."""
    source = """
        import os
        import accel_ops as ops
        os.environ["ACCEL_OPS_NUM_THREADS"] = "1"
        os.environ["ACCEL_OPS_CACHE_MIB"] = "5"
        assert ops.get_num_threads() == 1
        assert ops.host_memory_info().cap_bytes == 5 << 20
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


@pytest.mark.parametrize("n_arrays", [1, 4])
@pytest.mark.parametrize("n_items", [1, 1000, 300_000, 3_000_000])
def test_contiguous_joins_never_load_numba(n_arrays, n_items):
    """Of any size, on one thread and on several, along any axis."""
    source = """
        import sys
        import numpy as np
        import accel_ops as ops
        n_arrays, n_items = map(int, sys.argv[1:])
        arrays = [np.arange(float(n_items)) + k for k in range(n_arrays)]
        for n_threads in (1, 3):
            with ops.threads(n_threads), ops.ParallelArrayOps() as joiner:
                for join in (ops.concatenate, ops.stack, joiner.concatenate):
                    assert join(arrays).tobytes() == np.concatenate(arrays).tobytes()
        matrices = [array.reshape(1, -1) for array in arrays]
        assert np.array_equal(ops.concatenate(matrices, axis=1), np.concatenate(matrices, axis=1))
        assert not [name for name in ("numba", "scipy", "cupy", "torch") if name in sys.modules]
        print("done")
    """
    assert run_child(source, deadline_s=30, arguments=[str(n_arrays), str(n_items)]) == "done\n"


@pytest.mark.parametrize("n_items", [1, 1000, 200_000])
def test_small_joins_load_no_compiler(n_items):
    """Below 4 MiB of output not even llvmlite is loaded, nor a thread started."""
    source = """
        import sys, threading
        import numpy as np
        import accel_ops as ops
        arrays = [np.arange(float(sys.argv[1]))] * 2
        with ops.threads(4):
            assert ops.concatenate(arrays).tobytes() == np.concatenate(arrays).tobytes()
            assert ops.stack(arrays, axis=1).tobytes() == np.stack(arrays, axis=1).tobytes()
        assert not [name for name in ("numba", "llvmlite") if name in sys.modules]
        assert threading.active_count() == 1
        print("done")
    """
    assert run_child(source, deadline_s=20, arguments=[str(n_items)]) == "done\n"


def test_the_orders_know_nothing_of_threads():
    """What defines the bits cannot import the pool, nor anything else."""
    source = Path(orders.__file__).read_text()
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imported == []
