"""A device that does what CUDA allows and nobody hopes for: every copy at the last moment, streams out of step.

It implements `accel_ops.gpu.driver.Driver` over host memory. Work given to a stream waits there until an event is
waited for, or until chance lets some of it happen. Memory that is freed is poisoned. A copy from page-locked memory
that is not allocated any more, or into memory of the device that has been freed meanwhile, is noted as a violation. A
call in a forked child ends it.
"""

import collections
import functools
import os
import random
import sys

import numpy as np

from accel_ops import UnsupportedDTypeError

CALLER = 1  # the stream in which the calling thread's work is done; it is ordered with the default stream, 0
FOREIGN = 7  # a stream that is not
POISON = 0xDD


def end_if_forked(device, name):
    """End a forked child that calls the device."""
    if os.getpid() != device.process:
        print("a forked child called the device:", name, file=sys.stderr, flush=True)
        os._exit(99)


def device_call(method):
    """Count a call, let chance do some waiting work, and finish before an interrupt is seen, as calls in C do."""

    @functools.wraps(method)
    def call(self, *args):
        end_if_forked(self, method.__name__)
        self.depth += 1
        try:
            self.calls[method.__name__] += 1
            while self.random.random() < self.eagerness:
                waiting = [stream for stream, work in self.streams.items() if work]
                if not waiting:
                    break
                self.step(self.random.choice(waiting), force=False)
            result = method(self, *args)
        finally:
            self.depth -= 1
        if self.depth == 0 and self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt
        return result

    return call


class Event:
    """Happens when the stream has done what it had been given."""

    def __init__(self, device, stream, others=()):
        self.device = device
        self.stream, self.others, self.done, self.asked = stream, others, False, 0

    def __del__(self):  # CuPy's call CUDA then
        end_if_forked(self.device, "event destroyed")


class DeviceArray:
    """Memory of the device. When it dies it is given to the next array for the same stream, or freed in its order."""

    def __init__(self, device, shape, dtype, stream):
        self.device, self.shape, self.dtype, self.stream = device, shape, dtype, stream
        n_bytes = max(1, int(np.prod(shape, dtype=object)) * dtype.itemsize)
        reused = [memory for memory in device.reusable[stream] if len(memory) == n_bytes]
        if reused:
            self.memory = reused[0]
            device.reusable[stream] = [memory for memory in device.reusable[stream] if memory is not reused[0]]
        else:
            self.memory = np.full(n_bytes, POISON, np.uint8)
        self.address = self.memory.ctypes.data
        device.memory[self.address] = self.memory

    def read(self, stream=CALLER):
        """Ask for the values, as a kernel in a stream would see them; return a list that will hold them."""
        seen = []
        shape, dtype, memory = self.shape, self.dtype, self.memory  # not the array, which may die before
        n_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self.device.give(stream, lambda: seen.append(memory[:n_bytes].copy().view(dtype).reshape(shape)))
        return seen

    def reshape(self, shape):
        """Return a view."""
        return DeviceView(self, shape)

    def __del__(self):
        if os.getpid() == self.device.process:  # an interrupt waits, as it does for a deallocation in C
            if self.device.random.random() < 0.75:
                self.device.reusable[self.stream].append(self.memory)
            else:
                self.device.give(self.stream, lambda device=self.device, at=self.address: device.free(at))


class DeviceView:
    """An array of the device in another shape."""

    def __init__(self, base, shape):
        self.base, self.shape = base, shape

    def read(self, stream=CALLER):
        seen, base = [], self.base.read(stream)
        self.base.device.give(stream, lambda: seen.append(base[0].reshape(self.shape)))
        return seen


class Adversary:
    """The device. ``eagerness`` is how likely some waiting work is done at each call."""

    def __init__(self, seed=0, eagerness=0.0):
        self.random = random.Random(seed)
        self.eagerness = eagerness
        self.process = os.getpid()
        self.pinned = {}
        self.memory = {}
        self.reusable = collections.defaultdict(list)  # by the stream for which the memory was taken
        self.streams = collections.defaultdict(collections.deque)
        self.n_streams = 10
        self.current = CALLER
        self.violations = []
        self.calls = collections.Counter()
        self.depth = 0  # of calls of the device that the thread is inside of
        self.interrupt = None  # an exception that came meanwhile

    # --- what staging calls

    @device_call
    def allocate_pinned(self, n_bytes):
        memory = np.full(n_bytes + 4096, POISON, np.uint8)
        memory = memory[-memory.ctypes.data % 4096 :][:n_bytes]
        self.pinned[memory.ctypes.data] = memory
        return memory.ctypes.data

    @device_call
    def free_pinned(self, address):
        self.pinned.pop(address)[...] = POISON  # whatever is still to be copied from it

    @device_call
    def is_pinned(self, address):
        return any(start <= address < start + len(memory) for start, memory in self.pinned.items())

    @device_call
    def new_stream(self):
        self.n_streams += 1
        return self.n_streams

    @device_call
    def current_stream(self):
        return self.current

    @device_call
    def empty(self, shape, dtype, stream):
        if dtype.char not in "?bBhHiIlLqQefdFD" or not dtype.isnative:
            msg = f"CuPy has no arrays of {dtype}; cast to another dtype"
            raise UnsupportedDTypeError(msg)
        return DeviceArray(self, shape, dtype, stream)

    def address(self, array):
        return array.address

    @device_call
    def copy_to_device(self, target, source, n_bytes, stream):
        self.give(stream, lambda: self.copy(target, source, n_bytes))

    @device_call
    def record(self, stream):
        others = ()
        if stream == 0:  # CUDA's default stream waits for those that are ordered with it
            others = (self.recorded(CALLER),)
        return self.recorded(stream, others)

    @device_call
    def has_happened(self, event):
        event.asked += 1
        if event.asked > 3:  # the last moment: who asks again and again may be waiting
            self.run_until(event)
        return event.done

    @device_call
    def wait(self, stream, event):
        self.give(stream, event)

    # --- how it does it

    def give(self, stream, work):
        self.streams[stream].append(work)

    def recorded(self, stream, others=()):
        event = Event(self, stream, others)

        def happen():
            event.done = True

        if others:
            for other in others:
                self.give(stream, other)
        self.give(stream, happen)
        return event

    def step(self, stream, *, force):
        """Do the next work of a stream; return whether it could be done."""
        work = self.streams[stream][0]
        if isinstance(work, Event):
            if not work.done:
                if not force:
                    return False
                self.run_until(work)
        else:
            work()
        self.streams[stream].popleft()
        return True

    def run_until(self, event):
        while not event.done:
            self.step(event.stream, force=True)

    @device_call
    def finish(self):
        """Do all that is waiting, in any order that the events allow."""
        while any(self.streams.values()):
            self.step(self.random.choice([stream for stream, work in self.streams.items() if work]), force=True)

    def copy(self, target, source, n_bytes):
        read = self.part(self.pinned, source, n_bytes)
        written = self.part(self.memory, target, n_bytes)
        if read is None:
            self.violations.append("a copy from page-locked memory that is not allocated")
        elif written is None:
            self.violations.append("a copy to memory of the device that is not allocated")
        else:
            written[...] = read

    def free(self, address):
        self.memory.pop(address)[...] = POISON

    @staticmethod
    def part(memories, address, n_bytes):
        for start, memory in memories.items():
            if start <= address and address + n_bytes <= start + len(memory):
                return memory[address - start : address - start + n_bytes]
        return None
