"""Products in processes: kernels kept on disk or not, forks, interrupts, refused memory and pieces that fail."""

import shutil
import threading
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from child_processes import run_child
from product_oracle import oracle_matmul
from product_settings import set_everywhere

import accel_ops as ops
from accel_ops.cpu import matrix_products, pool
from accel_ops.testing import assert_same_bits

pytestmark = pytest.mark.process

# Every kernel of float64 is called, and the bits are checked by digests that the parent computes.
_CALLS = """
    import hashlib, sys
    import numpy as np
    import accel_ops as ops
    from accel_ops.testing import digest

    def operands():
        a = (np.arange(3 * 600) % 97 / 7.0 - 5).reshape(3, 600)
        b = (np.arange(600 * 200) % 89 / 11.0 - 3).reshape(600, 200)
        return a, b

    def digests():
        a, b = operands()
        many = np.tile(b.T, (2, 1))
        results = [ops.matmul(a, b), ops.vecmat(a[0], b), ops.matvec(b.T, a[0]), ops.vecdot(a[0], a[1]),
                   ops.vecdot(many, many), ops.matmul(a[:, np.newaxis], b[:, :2])]
        return " ".join(digest(result)[:16] for result in results)
"""


def _calls():
    """Return what the digests must be: those of this process, whose bits other tests check."""
    namespace = {}
    exec(dedent(_CALLS), namespace)
    return namespace["digests"]()


def _run(source, **options):
    return run_child(f"{dedent(_CALLS)}\n{dedent(source)}", **options)


def test_the_digests_are_those_of_the_oracle():
    """So that the right bits are what the processes below are compared with."""
    namespace = {}
    exec(dedent(_CALLS), namespace)
    a, b = namespace["operands"]()
    assert_same_bits(ops.matmul(a, b), oracle_matmul(a, b))
    assert_same_bits(ops.vecmat(a[0], b), oracle_matmul(a[:1], b)[0])
    assert_same_bits(ops.matvec(b.T, a[0]), oracle_matmul(a[:1], b)[0])
    assert_same_bits(
        ops.vecdot(b.T, b.T), np.array([oracle_matmul(x[np.newaxis], x[:, np.newaxis])[0, 0] for x in b.T])
    )


# --- the cache on disk

# One kernel is enough where it is compiled again and again.
_ONE_CALL = """
    print(digest(ops.matmul(*operands()))[:16])
"""


def _one_call():
    return _calls().split()[0]


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory):
    """Give a cache with all kernels of float64, to be copied."""
    cache = tmp_path_factory.mktemp("filled")
    assert _run("print(digests())", deadline_s=120, env={"NUMBA_CACHE_DIR": str(cache)}) == f"{_calls()}\n"
    return cache


_COUNTED = """
    print(digests())
    from accel_ops.cpu import product_kernels
    counts = [getattr(product_kernels, name).stats for name in product_kernels.__all__]
    print(sum(sum(count.cache_hits.values()) for count in counts),
          sum(sum(count.cache_misses.values()) for count in counts))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """Each kernel is taken from the disk, where the first one put it."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = _run(_COUNTED, deadline_s=120, env=environment).splitlines()
    second = _run(_COUNTED, deadline_s=60, env=environment).splitlines()
    assert first[0] == second[0] == _calls()
    hits, misses = map(int, first[1].split())
    assert (hits, misses >= 4) == (0, True)
    assert second[1] == f"{misses} 0"


# Root may write anywhere until it gives up its capabilities; then its own files are as closed to it as to anyone.
_OBEYING_MODES = """
    import ctypes
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
    try:
        open(f"{sys.argv[1]}/new", "w")
    except PermissionError:
        pass
    else:
        raise SystemExit("the folder can be written")
    sys.path.insert(0, sys.argv[1])
"""


def test_a_change_of_what_kernels_are_made_of_compiles_afresh(tmp_path):
    """Numba's cache looks at the file of a kernel alone, which need not be the one that an upgrade changes."""
    package = Path(ops.__file__).parent
    shutil.copytree(package, tmp_path / "accel_ops", ignore=shutil.ignore_patterns("__pycache__"))
    source = """
        from accel_ops.cpu import product_kernels
        print(product_kernels.__file__, product_kernels.multiply.py_func.__qualname__)
    """
    env = {"PYTHONPATH": str(tmp_path)}
    file, before = run_child(source, deadline_s=30, env=env).split()
    assert Path(file).is_relative_to(tmp_path)
    assert run_child(source, deadline_s=30, env=env).split() == [file, before]
    with (tmp_path / "accel_ops" / "cpu" / "tile.py").open("a") as tile:
        tile.write("# changed\n")
    assert run_child(source, deadline_s=30, env=env).split() != [file, before]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("home", ["missing", "read-only"])
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, filled_cache, filled, home):
    """Nor can the package's folder or the home be: kernels are compiled in each process then."""
    cache, site = tmp_path / "cache", tmp_path / "site"
    shutil.copytree(filled_cache, cache) if filled else cache.mkdir()
    shutil.copytree(Path(ops.__file__).parent, site / "accel_ops", ignore=shutil.ignore_patterns("__pycache__"))
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        where = str(cache if home == "read-only" else cache / "missing")
        printed = run_child(
            "\n".join(map(dedent, ("import sys", _OBEYING_MODES, _CALLS, _ONE_CALL, _WITHOUT_A_CACHE))),
            deadline_s=120,
            env={"NUMBA_CACHE_DIR": str(cache), "HOME": where, "XDG_CACHE_HOME": None, "PYTHONDONTWRITEBYTECODE": "1"},
            arguments=[str(site)],
        )
    finally:
        for path in paths:
            path.chmod(0o755)
    assert printed == f"{_one_call()}\nNullCache {site}\n"


_WITHOUT_A_CACHE = """
    from accel_ops.cpu import product_kernels
    print(type(product_kernels.multiply._cache).__name__, ops.__file__.rpartition("/accel_ops/")[0])
"""


def test_a_cache_that_cannot_be_a_folder_is_no_error(tmp_path):
    """A file lies where the folder should be."""
    (tmp_path / "file").write_text("")
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "cache")}
    assert _run(_ONE_CALL, deadline_s=120, env=environment) == f"{_one_call()}\n"


def test_a_full_disk_is_no_error(tmp_path):
    """What cannot be written is compiled again by the next process."""
    source = """
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # each write to a file is an OSError
        found = digest(ops.matmul(*operands()))[:16]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(found)
    """
    assert _run(source, deadline_s=120, env={"NUMBA_CACHE_DIR": str(tmp_path)}) == f"{_one_call()}\n"
    assert not any(file.stat().st_size for file in tmp_path.rglob("*.nb?"))


@pytest.mark.parametrize("kept", [0, 0.5, None])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_cache_is_no_error(tmp_path, filled_cache, suffix, kept):
    """Files that are empty, cut off or full of zeros, as a crash of the machine leaves them."""
    cache = tmp_path / "cache"
    shutil.copytree(filled_cache, cache)
    files = list(cache.rglob(f"*{suffix}"))
    assert files
    for file in files:
        data = file.read_bytes()
        file.write_bytes(bytes(len(data)) if kept is None else data[: int(len(data) * kept)])
    assert _run(_ONE_CALL, deadline_s=120, env={"NUMBA_CACHE_DIR": str(cache)}) == f"{_one_call()}\n"


# --- forks


def test_a_fork_while_other_threads_multiply():
    """Children compute the same bits, on threads of their own, whatever the parent's were doing."""
    source = """
        import os, signal, threading
        a = (np.arange(400 * 700) % 97 / 7.0).reshape(400, 700)
        expected, small = digest(ops.matmul(a, a.T)), digests()
        stop, failures = threading.Event(), []

        def multiply():
            with ops.threads(3):
                while not stop.is_set():
                    if digest(ops.matmul(a, a.T)) != expected:
                        failures.append(1)

        threads = [threading.Thread(target=multiply) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(30):
            process = os.fork()
            if process == 0:
                signal.alarm(20)
                with ops.threads(1 + number % 3):
                    right = digest(ops.matmul(a, a.T)) == expected and digests() == small
                os._exit(0 if right else 1)
            _, status = os.waitpid(process, 0)
            if status:
                failures.append(status)
        stop.set()
        for thread in threads:
            thread.join()
        print(failures)
    """
    assert _run(source, deadline_s=90) == "[]\n"


def test_a_signal_handler_may_fork_in_the_middle_of_a_product():
    """The child finishes the call: it does again what its lost helpers had taken, which changes nothing."""
    source = """
        import os, signal
        from accel_ops.cpu import matrix_products, product_pieces
        matrix_products.STEP_WORK, product_pieces.GRAIN = 1 << 20, 1 << 16
        a = (np.arange(500 * 3000) % 97 / 7.0).reshape(500, 3000)
        expected, children = digest(ops.matmul(a, a.T)), []

        def fork(number, frame):
            if len(children) < 15:
                process = os.fork()
                if process == 0:
                    children.clear()
                    children.extend([None] * 99)
                    signal.alarm(0)
                else:
                    children.append(process)

        signal.signal(signal.SIGALRM, fork)
        with ops.threads(4):
            while len(children) < 15:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.001 * len(children))
                right = digest(ops.matmul(a, a.T)) == expected
                if children[-1:] == [None]:
                    os._exit(0 if right else 1)
                assert right
        print([os.waitpid(process, 0)[1] for process in children])
    """
    assert _run(source, deadline_s=90) == f"{[0] * 15}\n"


@pytest.mark.parametrize(
    ("m", "k", "n"), [(33, 4700, 40), (300, 600, 70), (1, 5000, 2), (1, 700, 300), (300, 700, 1), (1, 9000, 1)], ids=str
)
@pytest.mark.parametrize("dtype", ["f8", "F", "f2"])
def test_each_piece_may_run_twice(monkeypatch, m, k, n, dtype):
    """A forked child does again what its lost helpers had taken, of which it cannot know how far they came."""
    run = pool.run
    cut = []

    def run_twice(function, n_pieces, **options):
        cut.append(n_pieces)
        run(lambda index: (function(index), function(index)), n_pieces, **options)

    sizes = {"GRAIN": 1, "GRAIN_BYTES": 1, "STEP_WORK": 1, "SMALL_WORK": 0, "_SHARED_WORK": 1, "_CHAIN_MULTIPLE": 3}
    sizes |= {"_LEAST_ROWS": 99, "_LEAST_COLUMNS": 99, "_LONG_TERMS": 512, "_KEPT_BYTES": 43_000}
    set_everywhere(monkeypatch, sizes | {"_RUN_COLUMNS": 16, "_RUN_BYTES": 8 << 10})
    a = (np.arange(m * k) % 97 / 7.0 - 5).reshape(m, k).astype(dtype)
    b = (np.arange(k * n) % 89 / 11.0 - 3).reshape(k, n).astype(dtype)
    expected = ops.matmul(a, b)
    monkeypatch.setattr(pool, "run", run_twice)
    with ops.threads(3):
        assert_same_bits(ops.matmul(a, b), expected)
    assert cut or dtype == "f2"  # whose parts are larger
    assert_same_bits(expected, oracle_matmul(a, b))


def test_many_threads_multiply_at_once():
    """Callers share the pool, and each has scratch memory of its own."""
    operands = [(np.arange(n * 300) % (89 + n) / 7.0 - 5).reshape(n, 300) for n in range(40, 48)]
    expected = [oracle_matmul(a, a.T) for a in operands]
    failures = []

    def multiply(number):
        try:
            with ops.threads(1 + number % 4):
                for _ in range(100):
                    assert_same_bits(ops.matmul(operands[number], operands[number].T), expected[number])
        except BaseException as exc:  # noqa: BLE001 - shown by the test
            failures.append(exc)

    threads = [threading.Thread(target=multiply, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- interrupts


@pytest.mark.parametrize(
    ("budget", "call"),
    [
        (1, "matmul, *[np.ones((6000, 6000))] * 2"),
        (2, "matmul, *[np.ones((6000, 6000))] * 2"),
        (2, "matmul, *[np.ones((4000, 4000), 'F')] * 2"),
        (1, "matmul, *[np.ones((4000, 4000), 'f2')] * 2"),
        (2, "matmul, *[np.ones((4000, 4000), 'f2')] * 2"),
        (1, "matmul, *[np.ones((4000, 4000), 'i8')] * 2"),
        (2, "matmul, *[np.ones((300_000, 8, 8))] * 2"),
        (1, "matmul, np.ones((20, 2_000_000)), np.ones((2_000_000, 20))"),
        (2, "vecdot, *[np.ones((3000, 20_000), 'f4')] * 2"),
        (1, "vecmat, np.ones(20_000, 'f4'), np.ones((20_000, 6000), 'f4')"),
        (2, "matvec, np.ones((20_000, 6000), 'f4').T, np.ones(20_000, 'f4')"),
    ],
)
def test_an_interrupt_takes_effect_within_half_a_second(call, budget):
    """Ctrl-C is a KeyboardInterrupt in the middle of a long product, after which all works with the right bits."""
    source = f"""
        import os, signal, threading, time
        name, *long = "{call.partition(",")[0]}", {call.partition(",")[2]}
        multiply = getattr(ops, name)
        before, waits = digests(), []
        is_square = all(x.ndim == 2 and x.shape[0] == x.shape[1] for x in long)
        multiply(*(x[:99, :99] for x in long) if is_square else long)  # compiles
        for delay in (0.05, 0.2, 0.3):
            sent = []

            def interrupt():
                time.sleep(delay)
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                with ops.threads({budget}):
                    while True:
                        multiply(*long)
            except KeyboardInterrupt:
                waits.append(time.monotonic() - sent[0])
            thread.join()
        assert digests() == before
        print(max(waits))
    """
    assert float(_run(source, deadline_s=90)) < 0.5


# --- memory


@pytest.mark.parametrize("headroom_mib", [1, 8, 40, 200])
def test_where_memory_is_refused_a_product_works_or_raises_memory_error(headroom_mib):
    """Results, block results, converted operands, threads: whatever cannot be had. Afterwards all works again."""
    source = """
        import resource
        a = (np.arange(4000 * 1500) % 97 / 7.0 - 5).reshape(4000, 1500)
        cases = [(a, a[:1500].T), (a, a.T[:, :600]), (a.astype("f2"), a.T[:, :300].astype("f2")),
                 (a.reshape(-1, 40, 30), a.reshape(-1, 30, 40)), (a[:30].reshape(3, -1), a[30:60].reshape(-1, 3)),
                 (a.reshape(1, -1)[:, :2_000_000], a.reshape(-1, 3)), (a, a[0])]
        with ops.threads(3):
            small, expected = digests(), [digest(ops.matmul(x, y)) for x, y in cases]
            ops.release_host_memory()
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20), hard))
            outcomes = []
            for x, y in cases:
                try:
                    outcomes.append(ops.matmul(x, y))
                except MemoryError:
                    outcomes.append(None)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            n_refused = sum(outcome is None for outcome in outcomes)
            assert all(outcome is None or digest(outcome) == right for outcome, right in zip(outcomes, expected))
            assert [digest(ops.matmul(x, y)) for x, y in cases] == expected
            assert digests() == small
        print("refused" if n_refused else "worked")
    """
    printed = _run(source, deadline_s=90, arguments=[str(headroom_mib)])
    assert printed == "refused\n" or (printed == "worked\n" and headroom_mib > 100)


def test_a_kernel_that_cannot_be_compiled_for_want_of_memory_is_a_memory_error(tmp_path):
    """The message says so, and with memory it is compiled."""
    source = """
        import resource
        a, b = operands()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), hard))
        try:
            ops.matmul(a, b)
        except MemoryError as exc:
            print("address space" in str(exc))
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        print(digest(ops.matmul(a, b))[:16])
    """
    assert _run(source, deadline_s=120, env={"NUMBA_CACHE_DIR": str(tmp_path)}) == f"True\n{_one_call()}\n"


# --- failures


@pytest.mark.parametrize("budget", [1, 2, 8])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_piece_that_fails_leaves_everything_usable(monkeypatch, budget, failing):
    """Its error is the caller's, and the next product has the right bits."""
    a = (np.arange(300 * 300) % 97 / 7.0 - 5).reshape(300, 300)
    expected = oracle_matmul(a, a)
    set_everywhere(monkeypatch, {"GRAIN": 1, "SMALL_WORK": 0, "_ROWS": 16, "_COLUMNS": 48})
    multiply, calls = matrix_products.call_multiply, []

    def fail(*args):
        calls.append(1)
        if len(calls) > failing:
            raise ZeroDivisionError
        multiply(*args)

    with ops.threads(budget):
        for _ in range(20):
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(matrix_products, "call_multiply", fail)
                with pytest.raises(ZeroDivisionError):
                    ops.matmul(a, a)
            assert calls
            assert_same_bits(ops.matmul(a, a), expected)


@pytest.mark.parametrize("module", ["numba", "accel_ops.cpu.product_kernels"])
def test_a_first_use_in_a_handler_during_an_import_is_an_error_and_no_hang(module):
    """The handler's thread is the one that imports the compiler, so nothing can be compiled there."""
    source = """
        import importlib, signal, sys
        import numpy as np
        import accel_ops as ops
        import accel_ops.products
        errors = []

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "numba.core.types":
                    try:
                        ops.matmul(np.eye(2), np.eye(2))
                    except RuntimeError as exc:
                        errors.append(exc)
                return None

        sys.meta_path.insert(0, Interrupting())
        importlib.import_module(sys.argv[1])
        assert len(errors) == 1 and "use it once beforehand" in str(errors[0]), errors
        assert (ops.matmul(np.eye(2), np.eye(2)) == np.eye(2)).all()
        print("done")
    """
    assert run_child(source, deadline_s=60, arguments=[module]) == "done\n"


def test_a_finaliser_may_multiply_while_another_product_is_compiled():
    """It runs on the thread that compiles, which does not wait for itself."""
    source = """
        import gc, os, tempfile
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
        import numpy as np
        import accel_ops as ops
        results = []

        class Multiplying:
            def __del__(self):
                results.append(ops.matmul(np.eye(2), np.eye(2)))

        ops.matmul(np.eye(2, dtype="f4"), np.eye(2, dtype="f4"))
        import numba.core.compiler
        compile_ir = numba.core.compiler.CompilerBase._compile_core

        def interrupted(self):
            numba.core.compiler.CompilerBase._compile_core = compile_ir
            Multiplying()
            return compile_ir(self)

        numba.core.compiler.CompilerBase._compile_core = interrupted
        ops.matmul(np.eye(2, dtype="c16"), np.eye(2, dtype="c16"))
        assert len(results) == 1 and (results[0] == np.eye(2)).all()
        print("done")
    """
    assert run_child(source, deadline_s=120) == "done\n"
