"""Staging onto a device: the right bytes however late the device is. Nothing here needs one: see adversary.py."""

import collections
import gc
import inspect
import os
import random
import signal
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import adversary
import numpy as np
import pytest
from adversary import CALLER, FOREIGN, Adversary
from child_processes import run_child
from hypothesis import given
from hypothesis import strategies as st

import accel_ops as ops
from accel_ops.cpu import memory as host_memory
from accel_ops.gpu import driver as drivers
from accel_ops.gpu import filling, memory, staging

# How many random schedules are tried; the full figure is 10,000.
SCHEDULES = int(os.environ.get("ACCEL_OPS_TEST_SCHEDULES", "1000"))


@pytest.fixture
def device(monkeypatch):
    """A late device as cuda:0, with chunks so small that a few kilobytes take many."""
    return installed(monkeypatch, Adversary())


def installed(monkeypatch, device):
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(drivers, "_drivers", {0: device})
    monkeypatch.setattr(drivers, "_inherited", set())
    monkeypatch.setattr(staging, "_stagings", {})
    monkeypatch.setattr(host_memory, "_others", [])
    return device


def seen(device, array):
    """What work in the caller's stream finds in an array, at the latest possible time."""
    values = array.read()
    device.finish()
    assert device.violations == []
    return values[0]


# --- cutting


@st.composite
def joins(draw):
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    arrays = []
    for length in lengths:
        size = [length if k == axis else n for k, n in enumerate(shape)]
        order = draw(st.permutations(range(len(shape))))
        array = np.random.default_rng(len(arrays)).integers(0, 1 << 30, [size[k] for k in order], dtype=np.int32)
        arrays.append(array.transpose(np.argsort(order)))
    return arrays, axis


@given(join=joins(), n_bytes=st.sampled_from([4, 8, 12, 100, 1000]))
def test_the_parts_of_a_join_follow_one_another(join, n_bytes):
    """Joined and laid end to end they are the whole; none is empty or larger than allowed."""
    arrays, axis = join
    expected = np.concatenate(arrays, axis)
    parts = list(staging.cut(arrays, axis, expected.shape, n_bytes, 4))
    joined = [np.concatenate(part.arrays, part.axis) if part.shape else np.array(part.arrays[0]) for part in parts]
    assert [each.shape for each in joined] == [part.shape for part in parts]
    assert all(0 < each.nbytes <= n_bytes for each in joined)
    assert b"".join(each.tobytes() for each in joined) == expected.tobytes()


# --- one call


@pytest.mark.parametrize("axis", [0, 1, 2, -1, None])
def test_a_staged_batch_has_the_joined_bytes(device, axis):
    arrays = [np.arange(600.0).reshape(4, 10, 15) + k for k in range(3)]
    batch = ops.stage(arrays, axis, accelerator="cuda:0")
    for array in arrays:
        array[...] = -1  # the host's arrays are free again
    expected = np.concatenate([np.arange(600.0).reshape(4, 10, 15) + k for k in range(3)], axis)
    np.testing.assert_array_equal(seen(device, batch), expected)


def test_a_batch_is_cast_on_the_way(device):
    arrays = [np.linspace(0, 1, 1000), np.linspace(1, 2, 500, dtype=np.float32)]
    batch = ops.stage(arrays, accelerator=0, dtype=np.float16)
    assert batch.dtype == np.float16
    np.testing.assert_array_equal(seen(device, batch), np.concatenate(arrays).astype(np.float16))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_batch_is_no_copy(device, shape):
    batch = ops.stage([np.zeros(shape), np.zeros(shape)], accelerator=0)
    assert seen(device, batch).shape == np.concatenate([np.zeros(shape)] * 2).shape
    assert device.calls["copy_to_device"] == 0


def test_without_an_accelerator_the_batch_stays_on_the_host():
    batch = ops.stage([np.ones(3), np.zeros(2)], accelerator=None)
    assert isinstance(batch, np.ndarray)
    assert batch.tolist() == [1, 1, 1, 0, 0]


def test_the_callers_stream_waits_for_the_copies_and_no_other_thread_does(device):
    """Nothing is copied while the host is not in need of a chunk; what the stream does next finds the batch."""
    small = ops.stage([np.arange(10.0)], accelerator=0)
    assert device.calls["has_happened"] == 0
    np.testing.assert_array_equal(seen(device, small), np.arange(10.0))


def test_any_stream_can_be_named(device):
    class Foreign:
        def __cuda_stream__(self):
            return (0, FOREIGN)

    batch = ops.stage([np.arange(5000.0)], accelerator=0, stream=Foreign())
    values = batch.read(FOREIGN)
    device.finish()
    np.testing.assert_array_equal(values[0], np.arange(5000.0))
    with pytest.raises(TypeError, match="__cuda_stream__"):
        ops.stage([np.zeros(3)], accelerator=0, stream="fast")


def test_a_join_for_a_device_lies_in_pinned_memory(device):
    batch = ops.concatenate([np.arange(10), np.arange(5)], accelerator="cuda:0")
    assert device.is_pinned(batch.ctypes.data)
    assert ops.is_pinned(batch)
    assert batch.tolist() == [*range(10), *range(5)]
    assert ops.is_pinned(batch[3:7].reshape(2, 2))
    assert not ops.is_pinned(batch.copy())
    stacked = ops.stack([np.zeros(3), np.ones(3)], accelerator="cuda:0")
    assert ops.is_pinned(stacked)
    assert stacked.shape == (2, 3)
    with ops.batch([(2, 3), (1, 3)], np.float32, accelerator="cuda:0") as filled:
        filled[0], filled[1] = np.zeros((2, 3)), np.ones((1, 3))
    assert ops.is_pinned(filled.array)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_parts_of_a_batch_travel_when_their_slots_are_filled(device, axis):
    """Along the first axis each megabyte on its own, along another the whole."""
    shapes = [(300, 400), (0, 400), (500, 400), (300, 400)] if axis == 0 else [(300, 400), (300, 0), (300, 700)]
    values = [np.random.default_rng(k).standard_normal(shape) for k, shape in enumerate(shapes)]
    with ops.batch(shapes, float, axis, accelerator=0) as batch:
        sent = []
        for k in reversed(range(len(shapes))):
            batch[k] = values[k]
            sent.append(device.calls["copy_to_device"])
        with pytest.raises(ops.UnfilledSlotError):
            _ = ops.batch(shapes, float, axis, accelerator=0).staged
    assert sent == ([1, 1, 1, 2] if axis == 0 else [0, 0, 1])
    np.testing.assert_array_equal(seen(device, batch.staged), np.concatenate(values, axis))
    np.testing.assert_array_equal(batch.array, np.concatenate(values, axis))


def test_many_threads_fill_a_batch_for_a_device(device):
    n = 40
    with ops.batch([(70, 500)] * n, np.float32, accelerator=0) as batch:

        def fill(k):
            batch.slots[k][...] = k
            batch.filled(k)

        with ThreadPoolExecutor(8) as producers:
            list(producers.map(fill, range(n)))
    assert device.calls["copy_to_device"] == 5  # of eight slots each
    assert (seen(device, batch.staged) == np.repeat(np.arange(n), 70)[:, None]).all()


def test_a_batch_that_is_given_up_leaves_no_copy_behind(device):
    """Its memory on the device may be used again: the copies come before that in the stream."""
    device.random.random = lambda: 0.6  # memory is reused
    batch = ops.batch([(1 << 18,)] * 2, float, accelerator=0)
    batch[0] = np.zeros(1 << 18)
    del batch
    gc.collect()
    again = ops.stage([np.ones(1 << 19)], accelerator=0)
    assert (seen(device, again) == 1).all()


def test_a_batch_on_the_host_is_its_own_array():
    with ops.batch([(2,)], float) as batch:
        batch[0] = [1, 2]
    assert batch.staged is batch.array


Sample = collections.namedtuple("Sample", "image label")


def test_batches_are_sent_ahead_with_all_their_arrays(device):
    """Two have been sent when the first is given; what holds the arrays keeps its class."""
    made = []

    def loader():
        for k in range(4):
            made.append(k)
            ordered = collections.OrderedDict(x=np.full((2, 3), k), name=str(k))
            yield ordered, [Sample(np.arange(k), np.array(k)), None]

    given = ops.prefetch(loader(), accelerator=0, depth=2)
    assert made == []
    for k, (ordered, (sample, nothing)) in enumerate(given):
        assert made == list(range(min(k + 2, 4)))
        assert (type(ordered), ordered["name"], type(sample), nothing) == (
            collections.OrderedDict,
            str(k),
            Sample,
            None,
        )
        assert (seen(device, ordered["x"]) == np.full((2, 3), k)).all()
        assert seen(device, sample.image).tolist() == list(range(k))
        assert (sample.label.shape, seen(device, sample.label).tolist()) == ((), k)
    assert made == [0, 1, 2, 3]


def test_a_loaders_failure_comes_after_its_batches(device):
    def loader():
        yield np.zeros(1)
        yield np.ones(1)
        raise ZeroDivisionError

    given = ops.prefetch(loader(), accelerator=0, depth=5)
    assert [seen(device, next(given)).tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(ZeroDivisionError):
        next(given)


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, "2"])
def test_a_senseless_depth_is_an_error(depth):
    with pytest.raises(ValueError, match="`depth` must be a positive integer"):
        ops.prefetch([], accelerator=None, depth=depth)


@pytest.mark.parametrize("accelerator", [None, 0])
def test_an_empty_pinned_array_has_the_shape_and_dtype(device, accelerator):
    array = ops.empty_pinned((2, np.int64(3)), ">i4", accelerator=accelerator)
    assert (array.shape, array.dtype, ops.is_pinned(array)) == ((2, 3), np.dtype("i4"), accelerator == 0)
    assert ops.empty_pinned(4, accelerator=accelerator).shape == (4,)
    assert ops.empty_pinned((), "S0", accelerator=accelerator).shape == ()
    for shape in [(3, -1), (-1,)]:
        with pytest.raises(ValueError, match="lengths of 0 or more"):
            ops.empty_pinned(shape, accelerator=accelerator)
    for shape in [(2.7,), "34", 2.5]:
        with pytest.raises(TypeError, match="tuple of integers"):
            ops.empty_pinned(shape, accelerator=accelerator)


def test_pinned_memory_is_counted_and_released(device):
    before = ops.host_memory_info()
    array = ops.empty_pinned(1 << 20, np.uint8, accelerator=0)
    assert ops.host_memory_info().in_use_bytes == before.in_use_bytes + (1 << 20)
    del array
    device.finish()
    assert ops.host_memory_info().cached_bytes >= 1 << 20
    device.finish()
    assert ops.release_host_memory() >= 1 << 20
    ops.empty_pinned(1, accelerator=0)
    assert device.calls["free_pinned"] == 1


def test_staging_again_and_again_allocates_nothing_and_does_not_wait(device, monkeypatch):
    """Even while the caller's stream is busy, as long as the copies before have been made."""
    monkeypatch.setattr(device, "eagerness", 0.0)
    for k in range(30):
        batch = ops.stage([np.full(300, k)], accelerator=0)
        assert (seen(device, batch) == k).all()
    assert device.calls["allocate_pinned"] <= 2
    device.give(CALLER, adversary.Event(device, CALLER))  # work that does not end
    sent = [ops.stage([np.full(300, k)], accelerator=0, stream=FOREIGN) for k in range(5)]
    assert device.calls["allocate_pinned"] <= 7
    assert len(sent) == 5


def test_what_casts_find_is_reported_once(device):
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast") as caught:
        ops.stage([np.full(5000, 1e300)], accelerator=0, dtype=np.float32)
    assert len(caught) == 1


@pytest.mark.parametrize("dtype", ["M8[s]", "S3", "U3", [("x", "i4")]])
def test_what_no_device_has_is_an_error(device, dtype):
    for use in (
        lambda: ops.stage([np.zeros(3, dtype)], accelerator=0),
        lambda: ops.batch([(3,)], dtype, accelerator=0),
    ):
        with pytest.raises(ops.UnsupportedDTypeError, match="CuPy has no arrays of"):
            use()
    assert ops.is_pinned(ops.concatenate([np.zeros(3, dtype)], accelerator=0))


def test_a_device_gets_native_byte_order(device):
    batch = ops.stage([np.arange(3.0)], accelerator=0, dtype=">f4")
    assert batch.dtype == np.dtype("f4")
    assert seen(device, batch).tolist() == [0, 1, 2]
    with ops.batch([(2,)], ">i8", accelerator=0) as filled:
        filled[0] = [1, 2]
    assert seen(device, filled.staged).tolist() == [1, 2]


def test_objects_cannot_be_pinned(device):
    with pytest.raises(ops.UnsupportedDTypeError, match="page-locked memory holds plain elements"):
        ops.concatenate([np.array([None])], accelerator="cuda:0")


# --- memory that the device still reads


def test_a_pinned_array_may_die_before_its_copy(device):
    """Its memory is not written again until the caller's copy, which the device does at the last moment, is done."""
    results = []
    for k in range(20):
        batch = ops.concatenate([np.full(500, k, np.int64)], accelerator=0)
        target = device.empty(batch.shape, batch.dtype, CALLER)
        device.copy_to_device(target.address, batch.ctypes.data, batch.nbytes, CALLER)  # as a user's library does
        results.append((k, target.read(), target))
        del batch
    device.finish()
    assert device.violations == []
    assert all((values[0] == k).all() for k, values, _ in results)


def test_pinned_memory_is_used_again_when_the_device_has_done_with_it(device):
    for _ in range(20):
        del_me = ops.concatenate([np.zeros(1000)], accelerator=0)
        del del_me
        device.finish()
    assert device.calls["allocate_pinned"] <= 2


# --- schedules


class InterruptedByAlarmError(Exception):
    """What the handler raises."""


def schedule(device, seed, *, forks, interrupts):
    """A random program of stage, concatenate, copy, free, fork and interrupt; every byte is looked at in the end."""
    rng = random.Random(seed)
    kept = []  # host batches and device batches that are alive
    checks = []  # what a stream saw, and what it should have

    armed = False

    def interrupt(*_):
        if armed and device.depth:
            device.interrupt = InterruptedByAlarmError()
        elif armed:
            raise InterruptedByAlarmError

    def act():
        value = rng.randrange(1 << 30)
        lengths = [rng.choice([0, 300]) for _ in range(rng.randrange(1, 4))]
        arrays = [np.arange(value, value + n) for n in lengths]
        expected = np.concatenate(arrays)
        action = rng.choice(["stage", "batch", "concatenate", "copy", "free"])
        if action == "stage":
            stream = rng.choice([CALLER, FOREIGN])
            batch = ops.stage(arrays, accelerator=0, stream=stream)
            checks.append((batch.read(stream), expected))
            kept.append(batch)
        elif action == "concatenate":
            kept.append((ops.concatenate(arrays, accelerator=0), expected))
        elif action == "batch":
            device.current = rng.choice([CALLER, FOREIGN])
            batch = ops.batch([array.shape for array in arrays], np.int64, accelerator=0)
            for index, array in enumerate(arrays):
                batch[index] = array
            checks.append((batch.staged.read(device.current), expected))
            kept.append(batch.staged)
            device.current = CALLER
        elif action == "copy":
            hosts = [each for each in kept if isinstance(each, tuple)]
            if hosts:
                host, values = rng.choice(hosts)
                target = device.empty(host.shape, host.dtype, CALLER)
                device.copy_to_device(target.address, host.ctypes.data, host.nbytes, CALLER)
                checks.append((target.read(), values))
        elif kept:
            kept.pop(rng.randrange(len(kept)))

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for step in range(20):
            try:
                try:
                    armed = interrupts and rng.random() < 0.2
                    if armed:
                        signal.setitimer(signal.ITIMER_REAL, rng.random() * 1e-3)
                    act()
                finally:
                    armed = False
            except InterruptedByAlarmError:
                device.current = CALLER
            device.interrupt = None
            if len(kept) > 3:  # so that memory is used again
                kept.pop(rng.randrange(len(kept)))
            if step == 6 and forks:
                _fork(kept)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    for host, values in (each for each in kept if isinstance(each, tuple)):
        np.testing.assert_array_equal(host, values)
    kept.clear()
    device.finish()
    assert device.violations == [], device.violations
    for values, expected in checks:
        np.testing.assert_array_equal(values[0], expected)


def _fork(kept):
    gc.collect()  # what earlier schedules left is not the child's to destroy
    process = os.fork()
    if process == 0:
        status = 1
        try:
            with pytest.raises(ops.ForkedDeviceError, match="spawn"):
                ops.stage([np.zeros(3)], accelerator=0)
            with pytest.raises(ops.ForkedDeviceError):
                ops.concatenate([np.zeros(3)], accelerator=0)
            for host, values in (each for each in kept if isinstance(each, tuple)):
                assert (host == values).all()
            kept.clear()
            gc.collect()
            assert (ops.concatenate([np.zeros(3), np.ones(3)]) == [0, 0, 0, 1, 1, 1]).all()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.process
@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_random_schedules_lose_no_byte(eagerness):
    """In a process of their own, which forks once in 50 schedules."""
    source = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        import test_device_staging as these
        these.run_schedules({SCHEDULES // 2}, {eagerness})
        print("done")
    """
    assert run_child(source, deadline_s=600) == "done\n"


def run_schedules(n, eagerness):
    with pytest.MonkeyPatch.context() as patch:
        for seed in range(n):
            device = installed(patch, Adversary(seed, eagerness))
            schedule(device, seed, forks=seed % 50 == 0, interrupts=True)
            drivers._inherited.clear()


# --- the adversary finds what it is there for


def mutant(module, old, new):
    """A module with one part of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, (old, source.count(old))
    changed = types.ModuleType(module.__name__)
    changed.__file__ = module.__file__
    sys.modules[module.__name__], original = changed, sys.modules[module.__name__]
    try:
        exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    finally:
        sys.modules[module.__name__] = original
    return changed


MUTANTS = {
    "the event of a chunk is not waited for": (staging, "self._wait_on_host(events[place])", "pass"),
    "the ring is one chunk short": (staging, "buffer=ring[place]", "buffer=ring[place % 2]"),
    "the caller's stream does not wait": (
        staging,
        "self.driver.wait(stream, self.driver.record(self._copying))",
        "pass",
    ),
    "the copies do not wait for the caller's stream": (staging, "driver.wait(copying, driver.record(caller))", "pass"),
    "pinned memory is given out as soon as it comes back": (
        memory,
        "self.events += [self._driver.record(stream) for stream in self._streams]",
        "pass",
    ),
    "only the default stream is looked at": (staging, "(DEFAULT_STREAM, self._copying)", "(DEFAULT_STREAM,)"),
    "the copies of a batch do not wait for the stream": (
        filling,
        "driver.wait(copying, driver.record(self._caller))",
        "pass",
    ),
    "a part is sent when its first slot is filled": (filling, "        if part.unfilled:\n            return\n", ""),
    "only our own stream is looked at": (staging, "(DEFAULT_STREAM, self._copying)", "(self._copying,)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_adversary_catches_a_mutant(name, monkeypatch):
    """Within the schedules that the correct code passes."""
    module, old, new = MUTANTS[name]
    changed = mutant(module, old, new)

    def try_schedules():
        for seed in range(400):
            device = installed(monkeypatch, Adversary(seed, 0.5 * (seed % 2)))
            changed.CHUNK_BYTES = 1 << 10
            if module is memory:
                monkeypatch.setattr(staging, "PinnedMemory", changed.PinnedMemory)
            elif module is filling:
                monkeypatch.setattr(staging, "Filling", changed.Filling)
            else:
                monkeypatch.setitem(staging._stagings, 0, changed.DeviceStaging(device))
            schedule(device, seed, forks=False, interrupts=False)

    with pytest.raises(AssertionError):
        try_schedules()


def test_a_part_that_could_not_be_sent_is_sent_when_its_slot_is_filled_again(device, monkeypatch):
    """A failed copy leaves the slot unfilled, and nothing garbled behind."""
    batch = ops.batch([(1000,)], float, accelerator=0)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy_to_device", fail)
        with pytest.raises(MemoryError):
            batch[0] = np.ones(1000)
    with pytest.raises(ops.UnfilledSlotError):
        _ = batch.staged
    batch[0] = np.ones(1000)
    assert (seen(device, batch.staged) == 1).all()
