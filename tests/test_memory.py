"""Host memory for outputs: recycled once nothing refers to it, never before, and bounded."""

import ctypes
import gc
import mmap
import os
import threading

import numpy as np
import pytest
from child_processes import run_child
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops.cpu import memory

MIB = 1 << 20
WAIT_S = 30
BYTE = np.dtype(np.uint8)


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch):
    """Start with an empty cache of 64 MiB; blocks of other tests' arrays go back to the one they came from."""
    monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", "64")
    fresh = memory.BlockCache(memory._Block, memory.kept_bytes)
    monkeypatch.setattr(memory, "_cache", fresh)
    monkeypatch.setattr(memory, "_others", [])
    memory.kept_bytes.cache_clear()
    yield fresh
    memory.kept_bytes.cache_clear()


def block(mib):
    """Return an array of so many MiB."""
    return memory.empty((int(mib * MIB),), BYTE)


def address(array):
    return array.__array_interface__["data"][0]


# --- recycling


@pytest.mark.parametrize("mib", [1, 1.5, 4, 48])
def test_the_memory_of_a_dead_array_is_used_again(mib):
    """The next output of the same size lies where the one before it lay."""
    first = address(block(mib))
    assert address(block(mib)) == first


def test_an_output_of_a_join_is_recycled():
    """A join's output lies where an earlier one has died; the bytes are its own."""
    arrays = [np.arange(300_000.0) + k for k in range(4)]
    first = address(ops.concatenate(arrays))
    second = ops.stack(arrays)
    assert address(second) == first
    assert np.array_equal(second, np.stack(arrays))


def test_sizes_of_one_class_share_a_block_and_others_do_not():
    """A block serves requests that waste less than 1/8 of it, no smaller ones."""
    first = address(block(8))
    assert address(memory.empty((8 * MIB - 100_000,), BYTE)) == first
    array = block(8)
    assert address(array) == first
    assert address(block(4)) != first


KEEPERS = {
    "the array": lambda array: array,
    "a view": lambda array: array[100:200],
    "a view of a view": lambda array: array[100:200][5:].reshape(5, -1).T,
    "an element's field": lambda array: array.view([("a", "u4"), ("b", "u4")])["b"],
    "a memoryview": memoryview,
    "a part of a memoryview": lambda array: memoryview(array)[7:9],
    "a DLPack capsule": lambda array: array.__dlpack__(),
    "an array from DLPack": np.from_dlpack,
    "numpy.frombuffer": lambda array: np.frombuffer(array, np.uint16),
    "ctypes' from_buffer": lambda array: (ctypes.c_char * 100).from_buffer(array),
    "numpy.ctypeslib": lambda array: array.ctypes.data_as(ctypes.c_void_p),
    "a flat iterator": lambda array: array.flat,
    "an array of another class": lambda array: array.view(np.matrix),
    "a broadcast": lambda array: np.broadcast_to(array[:10], (5, 10)),
    "a cycle": lambda array: cycle_with(array),
}


def cycle_with(array):
    cycle = [array]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("name", KEEPERS)
def test_memory_that_something_refers_to_is_not_handed_out(name):
    """While it lives, neither a new array nor a release touches what it refers to."""
    array = block(2)
    array[...] = 7
    kept_at = address(array)
    keeper = KEEPERS[name](array)
    del array
    others = []
    for _ in range(5):
        others.append(block(2))
        others[-1][...] = 9
    assert kept_at not in {address(other) for other in others}
    ops.release_host_memory()
    assert (np.ctypeslib.as_array((ctypes.c_uint8 * (2 * MIB)).from_address(kept_at)) == 7).all()
    assert ops.host_memory_info().in_use_bytes == 6 * 2 * MIB
    del keeper, others
    gc.collect()
    assert ops.host_memory_info().in_use_bytes == 0


def test_memory_that_another_thread_refers_to_is_not_handed_out():
    """A reference in a running thread's frame counts like any other."""
    has_it, release, seen = threading.Event(), threading.Event(), []

    def hold(arrays):
        array = arrays.pop()
        has_it.set()
        assert release.wait(WAIT_S)
        seen.append(bool((array == 7).all()))

    arrays = [block(2)]
    arrays[0][...] = 7
    held_at = address(arrays[0])
    thread = threading.Thread(target=hold, args=(arrays,))
    thread.start()
    assert has_it.wait(WAIT_S)
    for _ in range(5):
        other = block(2)
        assert address(other) != held_at
        other[...] = 9
    release.set()
    thread.join(WAIT_S)
    assert seen == [True]


@pytest.mark.process
def test_memory_is_not_handed_out_twice_across_a_fork():
    """A child's outputs leave what the parent's arrays refer to alone, in the child and in the parent."""
    source = """
        import os
        import numpy as np
        from accel_ops.cpu import memory

        held = memory.empty((2 << 20,), np.dtype("u1"))
        free = memory.empty((2 << 20,), np.dtype("u1"))
        held[...] = 7
        view, free = memoryview(held)[10:], None
        del held
        children = [os.fork() for _ in range(1)]
        arrays = [memory.empty((2 << 20,), np.dtype("u1")) for _ in range(4)]
        for array in arrays:
            array[...] = 9
        right = bytes(view) == b"\\7" * len(view)
        if children == [0]:
            os._exit(0 if right else 1)
        assert right
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        print("done")
    """
    assert run_child(source, deadline_s=20) == "done\n"


# --- sizes and alignment


@given(st.integers(memory.LARGE_BYTES, 1 << 45))
def test_a_size_class_wastes_less_than_an_eighth(n_bytes):
    """The block is large enough, whole pages, and less than 1/8 larger than what was asked for."""
    size = memory.size_class(n_bytes)
    assert n_bytes <= size < n_bytes * 9 / 8
    assert size % mmap.PAGESIZE == 0
    assert memory.size_class(size) == size


@given(st.integers(memory.LARGE_BYTES, 1 << 45), st.integers(0, 1 << 40))
def test_a_larger_request_has_no_smaller_class(n_bytes, more):
    """Classes grow with the request."""
    assert memory.size_class(n_bytes) <= memory.size_class(n_bytes + more)


@pytest.mark.parametrize("n_bytes", [4096, 4097, 10_000, MIB - 1, MIB, MIB + 1, 3 * MIB + 5])
def test_outputs_are_aligned(n_bytes):
    """To 64 bytes from 4 KiB upward, to a page from 1 MiB."""
    for _ in range(3):
        array = memory.empty((n_bytes,), BYTE)
        assert address(array) % (64 if n_bytes < MIB else mmap.PAGESIZE) == 0
        assert array.nbytes == n_bytes
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("dtype", [object, [("a", object), ("b", "f8")], "T"])
def test_arrays_of_references_are_numpys_own(dtype):
    """They are initialised and take nothing from the cache."""
    array = memory.empty((300_000,), np.dtype(dtype))
    assert ops.host_memory_info().in_use_bytes == 0
    assert array.base is None
    assert array[:3].tolist() == np.empty(3, dtype).tolist()


def test_small_arrays_are_numpys_own():
    """Below 1 MiB nothing comes from the cache."""
    array = memory.empty((MIB - 1,), BYTE)
    assert array.nbytes == MIB - 1
    assert ops.host_memory_info().in_use_bytes == 0


@pytest.mark.parametrize("shape", [(0,), (5, 0, 3), (), (1,)])
def test_tiny_shapes_work(shape):
    """Zero sizes and scalars are no special case."""
    assert memory.empty(iter(shape), np.dtype("f8")).shape == shape


@pytest.mark.parametrize("n_bytes", [2**63, 2**64, 2**80])
def test_what_cannot_be_addressed_is_a_value_error(n_bytes):
    """A size beyond 2**63 bytes is refused with a text."""
    with pytest.raises(ValueError, match=r"must have fewer than 2\*\*63 bytes"):
        memory.empty((n_bytes,), BYTE)


@pytest.mark.parametrize("n_bytes", [2**50, 2**62, 2**63 - 1])
def test_what_no_machine_has_is_a_memory_error(n_bytes):
    """A size that could be addressed, but that no system grants, is a MemoryError up to the largest."""
    with pytest.raises(MemoryError, match=r"refused \d+ bytes"):
        memory.empty((n_bytes,), BYTE)
    assert ops.host_memory_info().in_use_bytes == 0


# --- the cap


@pytest.mark.parametrize(("text", "mib"), [("0", 0), ("3", 3), (" 64 ", 64), ("0012", 12), ("100000000", 10**8)])
def test_the_variable_sets_the_cap(text, mib, monkeypatch, fresh_cache):
    """A whole number of MiB is taken as it is."""
    monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", text)
    assert ops.host_memory_info().cap_bytes == mib * MIB


@pytest.mark.parametrize("text", ["-1", "1.5", "1_0", "+5", "many", "0x10", "٣", "1 2", "9" * 5000])
def test_a_senseless_variable_is_skipped_with_one_warning(text, monkeypatch):
    """The warning names the variable and the value, and the default is used from then on."""
    monkeypatch.setattr(memory, "available_memory", lambda: 4 << 30)
    monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", text)
    with pytest.warns(ops.HostMemoryWarning, match="ACCEL_OPS_CACHE_MIB must be a whole number of MiB") as caught:
        assert ops.host_memory_info().cap_bytes == 512 * MIB
    assert len(caught) == 1
    assert text[:20] in str(caught[0].message)
    assert ops.host_memory_info().cap_bytes == 512 * MIB


@pytest.mark.parametrize("text", [None, "", "  "])
@pytest.mark.parametrize(("gib", "cap_mib"), [(1, 128), (4, 512), (8, 1024), (64, 1024)])
def test_the_default_cap_is_an_eighth_of_memory_and_at_most_a_gibibyte(text, gib, cap_mib, monkeypatch):
    """Without the variable, the memory that the process may use decides."""
    monkeypatch.setattr(memory, "available_memory", lambda: gib << 30)
    if text is None:
        monkeypatch.delenv("ACCEL_OPS_CACHE_MIB")
    else:
        monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", text)
    assert ops.host_memory_info().cap_bytes == cap_mib * MIB


def test_a_cap_of_zero_keeps_nothing(monkeypatch):
    """Every block goes back to the system when its array dies."""
    monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", "0")
    arrays = [block(2) for _ in range(3)]
    assert ops.host_memory_info().in_use_bytes == 6 * MIB
    del arrays
    info = ops.host_memory_info()
    assert (info.cached_bytes, info.cached_blocks, info.in_use_bytes) == (0, 0, 0)


def test_the_cache_stays_within_the_cap(monkeypatch):
    """However many arrays die, no more than the cap is kept."""
    arrays = [block(24) for _ in range(5)]
    while arrays:
        del arrays[0]
        assert ops.host_memory_info().cached_bytes <= 64 * MIB
    assert ops.host_memory_info().cached_bytes == 48 * MIB


def test_a_block_larger_than_the_cap_is_not_kept():
    """What exceeds the cap alone is unmapped, and smaller blocks stay."""
    small = block(4)
    del small
    large = block(80)
    del large
    assert ops.host_memory_info().cached_bytes <= 64 * MIB


def test_unused_blocks_go_when_the_last_32_requests_were_small():
    """Beyond twice the largest of the last 32 large requests nothing free is kept."""
    large = block(32)
    del large
    assert ops.host_memory_info().limit_bytes == 64 * MIB
    for _ in range(31):
        assert ops.host_memory_info().cached_bytes >= 32 * MIB
        block(1)
    block(1)
    info = ops.host_memory_info()
    assert info.limit_bytes == 2 * MIB
    assert info.cached_bytes <= 2 * MIB


def test_unused_blocks_go_at_a_call_that_is_served_from_the_cache(monkeypatch):
    """The rule holds after each large call, also while all recent outputs live."""
    monkeypatch.setenv("ACCEL_OPS_CACHE_MIB", "200")
    smalls = [block(1) for _ in range(33)]
    large = block(48)
    del smalls, large
    assert ops.host_memory_info().cached_bytes == 81 * MIB
    kept = []
    for _ in range(33):
        kept.append(block(1))
        info = ops.host_memory_info()
        assert info.cached_bytes <= info.limit_bytes


# --- what is seen and given back


def test_the_information_adds_up():
    """Bytes in use and free bytes and blocks are what arrays took and left."""
    before = ops.host_memory_info()
    assert (before.cached_bytes, before.cached_blocks, before.in_use_bytes) == (0, 0, 0)
    arrays = [block(1), block(2), memory.empty((2 * MIB + 1,), BYTE)]
    assert ops.host_memory_info().in_use_bytes == 3 * MIB + memory.size_class(2 * MIB + 1)
    del arrays[1]
    info = ops.host_memory_info()
    assert (info.cached_bytes, info.cached_blocks) == (2 * MIB, 1)
    assert info.in_use_bytes == MIB + memory.size_class(2 * MIB + 1)
    assert info.limit_bytes == 2 * memory.size_class(2 * MIB + 1)
    assert info.cap_bytes == 64 * MIB


def test_releasing_gives_back_what_is_free_and_says_how_much():
    """Arrays in use stay as they are."""
    kept = block(2)
    kept[...] = 7
    gone = [block(3), block(1)]
    del gone
    assert ops.release_host_memory() == 4 * MIB
    assert ops.release_host_memory() == 0
    info = ops.host_memory_info()
    assert (info.cached_bytes, info.cached_blocks, info.in_use_bytes) == (0, 0, 2 * MIB)
    assert (kept == 7).all()


# --- arrays that die at any moment


def test_many_threads_keep_the_accounting_right():
    """Threads that take and drop arrays at once never share a block, and nothing is lost from the books."""
    barrier, failures = threading.Barrier(8), []

    def churn(seed):
        random = np.random.default_rng(seed)
        kept = []
        barrier.wait(WAIT_S)
        try:
            for _ in range(300):
                array = memory.empty((int(random.integers(MIB, 3 * MIB)),), BYTE)
                array[:: 1 << 18] = seed
                kept.append(array)
                if len(kept) > 3:
                    old = kept.pop(int(random.integers(3)))
                    assert (old[:: 1 << 18] == seed).all(), "another thread wrote into this array"
        except BaseException as exc:  # noqa: BLE001 - raised below, in the test's own thread
            failures.append(exc)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if failures:
        raise failures[0]
    info = ops.host_memory_info()
    assert info.in_use_bytes == 0
    assert info.cached_bytes == sum(each.size for blocks in memory._cache._free.values() for each in blocks)
    assert info.cached_bytes <= info.limit_bytes
    ops.release_host_memory()
    assert ops.host_memory_info().cached_bytes == 0


@pytest.mark.parametrize("what", ["empty", "host_memory_info", "release_host_memory"])
def test_arrays_may_die_in_the_garbage_collector_at_any_allocation(what):
    """A collection that drops arrays of other sizes in the middle of any call here does no harm."""
    use = {
        "empty": lambda: block(1.75),
        "host_memory_info": ops.host_memory_info,
        "release_host_memory": ops.release_host_memory,
    }[what]
    sizes = [1 + k / 8 for k in range(8)] + [2 + k / 4 for k in range(8)]
    before = gc.get_threshold()
    gc.disable()
    try:
        for n_allocations in range(40):
            memory._cache._free.clear()
            for size in sizes[:6]:
                block(size)  # leaves a free block
            cycles = [cycle_with(block(size)) for size in sizes[6:]]
            spent = [(k, k) for k in range(3000)]  # tuples that Python keeps for reuse are no allocations
            gc.collect(0)  # the cycles are in the middle generation now, and no allocation has been counted
            gc.set_threshold(n_allocations, 0, 10**6)
            cycles.clear()
            gc.enable()
            use()
            gc.disable()
            del spent
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    assert ops.host_memory_info().in_use_bytes == 0


@pytest.mark.process
def test_arrays_may_die_in_a_signal_handler():
    """A handler that takes and drops arrays in the middle of the same leaves the books right."""
    source = """
        import signal
        import numpy as np
        import accel_ops as ops
        from accel_ops.cpu import memory

        kept, handled = [], []

        def take(n_mib, value):
            array = memory.empty((n_mib << 20,), np.dtype("u1"))
            array[::65536] = value
            return array

        def handler(number, frame):
            array = take(1 + len(handled) % 3, 3)
            if len(handled) % 2:
                kept.clear()
            handled.append(bool((array[::65536] == 3).all()))

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 7e-4)
        while len(handled) < 300:
            kept.append(take(1 + len(handled) % 4, 5))
            array = take(2, 6)
            assert (array[::65536] == 6).all()
            ops.host_memory_info()
            if len(handled) % 11 == 0:
                ops.release_host_memory()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert all(handled)
        del array
        kept.clear()
        info = ops.host_memory_info()
        assert info.in_use_bytes == 0, info
        assert 0 <= info.cached_bytes <= info.limit_bytes, info
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


# --- what the operating system sees


@pytest.mark.process
def test_refused_memory_is_an_error_and_the_next_call_works():
    """Under a limit a join raises MemoryError, lets go of what is cached, and works when the limit is lifted."""
    source = """
        import resource
        import numpy as np
        import accel_ops as ops

        arrays = [np.arange(4_000_000.0)] * 4
        expected = np.concatenate(arrays)
        small = [np.arange(300_000.0)] * 4
        with ops.threads(3):
            ops.concatenate(arrays)
            ops.concatenate(small)
            ops.release_host_memory()
            del expected
            for _ in range(3):
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                old = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), old[1]))
                try:
                    ops.concatenate(arrays)
                except MemoryError as exc:
                    assert "refused" in str(exc), exc
                else:
                    raise AssertionError("no error")
                assert ops.host_memory_info().in_use_bytes == 0
                assert (ops.concatenate(small) == np.concatenate(small)).all()
                resource.setrlimit(resource.RLIMIT_AS, old)
                joined = ops.concatenate(arrays)
                assert (joined.reshape(4, -1) == arrays[0]).all()
                del joined
                ops.release_host_memory()
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


@pytest.mark.process
def test_cached_blocks_make_room_for_another_size():
    """Where only what is cached stands in the way of an output, the cache gives way."""
    source = """
        import resource
        import numpy as np
        from accel_ops.cpu import memory
        import accel_ops as ops

        held = [memory.empty((20 << 20,), np.dtype("u1")) for _ in range(3)]
        del held
        assert ops.host_memory_info().cached_bytes == 40 << 20
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
        array = memory.empty((32 << 20,), np.dtype("u1"))
        array[...] = 1
        assert ops.host_memory_info().cached_bytes == 0
        print("done")
    """
    assert run_child(source, deadline_s=20, env={"ACCEL_OPS_CACHE_MIB": "100"}) == "done\n"


@pytest.mark.process
def test_the_resident_set_stays_within_the_cap():
    """After 1,000 joins of mixed sizes the process is at most the cap and a tenth larger than before them."""
    source = """
        import random
        import numpy as np
        import accel_ops as ops

        def resident_bytes():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        cap = 64 << 20
        random.seed(3)
        row = np.zeros((1, 20_000), np.float32)
        with ops.threads(2):
            ops.concatenate([row] * 400)
            ops.release_host_memory()
            start, most = resident_bytes(), 0
            for _ in range(1000):
                ops.concatenate([row] * random.randrange(5, 400))
                most = max(most, resident_bytes())
        assert most - start <= 1.1 * cap, (start, most)
        info = ops.host_memory_info()
        assert info.cap_bytes == cap and info.cached_bytes <= info.limit_bytes and info.in_use_bytes == 0
        ops.release_host_memory()
        assert resident_bytes() - start <= 8 << 20, (start, resident_bytes())
        print("done")
    """
    assert run_child(source, deadline_s=60, env={"ACCEL_OPS_CACHE_MIB": "64"}) == "done\n"


@pytest.mark.process
def test_a_recycled_output_of_400_mb_has_no_page_faults():
    """Joining into memory that has been used before costs fewer than 1,000 faults."""
    source = """
        import resource
        import numpy as np
        import accel_ops as ops

        array = np.ones(200_000_000, np.uint8)
        with ops.threads(2):
            ops.concatenate([array, array])
            ops.concatenate([array, array])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            joined = ops.concatenate([array, array])
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < 1000, faults
        assert joined.nbytes == 400_000_000 and joined.min() == 1
        print("done")
    """
    assert run_child(source, deadline_s=60, env={"ACCEL_OPS_CACHE_MIB": "600"}) == "done\n"


@pytest.mark.process
def test_objects_are_neither_lost_nor_freed_early():
    """Every element of an object join keeps its identity, and the live count is exact at every point."""
    source = """
        import gc, sys
        import numpy as np
        import accel_ops as ops

        class Token:
            live = 0
            def __init__(self, number):
                self.number = number
                Token.live += 1
            def __del__(self):
                Token.live -= 1

        def part(start, n):
            array = np.empty(n, object)
            for k in range(n):
                array[k] = Token(start + k)
            return array

        with ops.threads(4):
            for large in (5_000, 200_000):  # 8 MB in the second round
                parts = [part(k * large, large) for k in range(4)]
                joined = ops.concatenate(parts)
                del parts
                gc.collect()
                assert Token.live == 4 * large
                assert all(token.number == k for k, token in enumerate(joined))
                both = ops.stack([joined, joined])
                assert sys.getrefcount(joined[0]) == 4
                del both, joined
                gc.collect()
                assert Token.live == 0
        print("done")
    """
    assert run_child(source, deadline_s=60) == "done\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")  # noqa: PTH110
def test_blocks_are_advised_to_use_huge_pages(monkeypatch):
    """The kernel is asked for huge pages, and a kernel without them is no error."""
    asked = []

    class Mapping(mmap.mmap):
        def madvise(self, advice):
            asked.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    array = block(4)
    array[...] = 1
    assert asked == [mmap.MADV_HUGEPAGE]


def test_an_interrupt_while_blocks_are_taken_back_loses_none(monkeypatch, fresh_cache):
    """What has not been looked at is looked at the next time, and what is in nobody's hands is unmapped."""

    class Interrupting(dict):
        def pop(self, *args):
            monkeypatch.setattr(fresh_cache, "_leased", dict(self))
            raise KeyboardInterrupt

    array = block(4)
    monkeypatch.setattr(fresh_cache, "_leased", Interrupting(fresh_cache._leased))
    del array
    with pytest.raises(KeyboardInterrupt):
        memory.host_memory_info()
    info = memory.host_memory_info()
    assert (info.cached_bytes, info.in_use_bytes) == (4 * MIB, 0)
