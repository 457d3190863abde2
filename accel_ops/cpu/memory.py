"""Host memory for outputs: recycled, page-aligned blocks for large ones, NumPy's own for the rest.

Fresh pages cost more than the copy that fills them, so a block whose array has died is kept for the next output
of its size class. Each array made here refers to a lease, and so does every view, memoryview and DLPack capsule
made from it; only the end of the lease gives the block back.

All state is in containers whose single operations are atomic. A lease may end at any moment: in another thread,
in the garbage collector, in a signal handler, in a forked child. Nothing but its block's reference is noted then;
the next large request, or question, puts the block among the free ones and unmaps what is too much.
"""

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from accel_ops.errors import HostMemoryWarning, warn
from accel_ops.limits import available_memory

__all__ = [
    "HostMemoryInfo",
    "address",
    "empty",
    "host_memory_info",
    "is_leased",
    "is_plain",
    "release_host_memory",
    "size_class",
]

LARGE_BYTES = 1 << 20  # from here a fresh output's page faults cost NumPy more than our bookkeeping
_ALIGNED_BYTES = 4 << 10  # from here 64-byte alignment is promised
_ALIGNMENT = 64
_RECENT_REQUESTS = 32
_MAX_CACHE_BYTES = 1 << 30
_CACHE_VARIABLE = "ACCEL_OPS_CACHE_MIB"
_MOST_DIGITS = 12  # of that variable: more MiB than a 64-bit address space has


class HostMemoryInfo(NamedTuple):
    """What the host memory cache holds.

    Attributes
    ----------
    cached_bytes : int
        Bytes of free blocks, kept for outputs to come.
    cached_blocks : int
        The number of those blocks.
    in_use_bytes : int
        Bytes of the blocks that arrays refer to.
    limit_bytes : int
        The most that ``cached_bytes`` may be at this moment: the cap, or twice the largest of the last 32 large
        requests where that is less.
    cap_bytes : int
        The most it may ever be: ``ACCEL_OPS_CACHE_MIB``, or the smaller of 1 GiB and 1/8 of the memory that
        this process may use.
    """

    cached_bytes: int
    cached_blocks: int
    in_use_bytes: int
    limit_bytes: int
    cap_bytes: int


class _Block:
    """Anonymous pages of one size class; unmapped when the last reference to it goes."""

    __slots__ = ("address", "freed", "mapping", "size")

    def __init__(self, size: int) -> None:
        self.freed = 0  # the number of the release after which it was last free
        self.mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = address(np.frombuffer(self.mapping, np.uint8))
        self.size = size


class _Lease:
    """What arrays over a block refer to; NumPy reads where the memory lies from ``__array_interface__``."""

    __slots__ = ("__array_interface__", "__weakref__", "block", "size")

    def __init__(self, block: _Block, n_bytes: int) -> None:
        self.block: _Block | None = block
        self.size = block.size
        self.__array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


class _Return(weakref.ref["_Lease"]):
    """Brings a block back when its lease has ended."""

    __slots__ = ("block",)

    block: _Block


class _Cache:
    """The free blocks of this process."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[_Block]] = {}  # by size class, the longest free first
        self._leased: dict[int, weakref.ref[_Lease]] = {}  # by the reference's id
        # References of leases that have ended. Appending is all that happens then, in C: in Python code an
        # interrupt could strike, and the interpreter drops what is raised while an object dies.
        self._returned: collections.deque[weakref.ref[_Lease]] = collections.deque()
        self._releases = itertools.count()
        self._recent: collections.deque[int] = collections.deque(maxlen=_RECENT_REQUESTS)
        self._cap: int | None = None

    def lease(self, n_bytes: int) -> _Lease:
        size = size_class(n_bytes)
        self._take_back()
        block = self._take(size)
        if block is None:
            block = self._map(size)
        self._recent.append(size)
        cached_bytes = self.cached_bytes()
        if cached_bytes:
            self.trim()
        lease = _Lease(block, n_bytes)
        # Blocks come back without being looked at, so no more are lent out to come back than may be kept.
        if cached_bytes + self._coming_back() + size <= self.cap():
            reference = _Return(lease, self._returned.append)
            reference.block = block
            lease.block = None
            self._leased[id(reference)] = reference
        else:
            plain = weakref.ref(lease, self._returned.append)
            self._leased[id(plain)] = plain
        return lease

    def _take_back(self) -> None:
        while self._returned:
            with contextlib.suppress(IndexError):  # another thread took the last one
                reference = self._returned.popleft()
                self._leased.pop(id(reference), None)
                if isinstance(reference, _Return):
                    block = reference.block
                    block.freed = next(self._releases)
                    blocks = self._free.get(block.size)
                    if blocks is None:
                        blocks = self._free.setdefault(block.size, collections.deque())
                    blocks.append(block)

    def _coming_back(self) -> int:
        """Return the bytes of the blocks in use that will be kept."""
        references = list(self._leased.values())
        return sum(reference.block.size for reference in references if isinstance(reference, _Return))

    def trim(self, limit: int | None = None) -> int:
        """Unmap the longest free blocks beyond the limit; return how many bytes that were."""
        self._take_back()
        limit = self.limit() if limit is None else limit
        excess = self.cached_bytes() - limit
        unmapped = 0
        while unmapped < excess:
            oldest: list[_Block] = []
            for size in list(self._free):
                with contextlib.suppress(IndexError):  # none of this size, or another thread took it
                    oldest.append(self._free[size][0])
            if not oldest:
                break
            block = min(oldest, key=lambda block: block.freed)
            with contextlib.suppress(ValueError):  # another thread took it
                self._free[block.size].remove(block)
                unmapped += block.size
        return unmapped

    def limit(self) -> int:
        return min(self.cap(), 2 * max(list(self._recent), default=0))

    def cap(self) -> int:
        if self._cap is None:
            self._cap = _configured_cap()
        return self._cap

    def cached_bytes(self) -> int:
        # A list of keys is made in one step. One of pairs allocates, which may let a lease end and add a key.
        return sum(size * len(self._free[size]) for size in list(self._free))

    def info(self) -> HostMemoryInfo:
        self.trim()
        leases = [reference() for reference in list(self._leased.values())]
        return HostMemoryInfo(
            cached_bytes=self.cached_bytes(),
            cached_blocks=sum(len(self._free[size]) for size in list(self._free)),
            in_use_bytes=sum(lease.size for lease in leases if lease is not None),
            limit_bytes=self.limit(),
            cap_bytes=self.cap(),
        )

    def _take(self, size: int) -> _Block | None:
        blocks = self._free.get(size)
        try:
            return blocks.pop() if blocks else None  # the one used last, whose pages may still be in a cache
        except IndexError:  # another thread took it
            return None

    def _map(self, size: int) -> _Block:
        try:
            return _Block(size)
        except (OSError, OverflowError):
            self.trim(0)
        try:
            return _Block(size)
        except (OSError, OverflowError) as exc:
            msg = f"the operating system refused {size} bytes for an output; free memory or join fewer arrays"
            raise MemoryError(msg) from exc


def size_class(n_bytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that less than 1/8 is wasted."""
    step = 1 << max(n_bytes.bit_length() - 4, mmap.PAGESIZE.bit_length() - 1)
    return -(-n_bytes // step) * step


def _configured_cap() -> int:
    default = min(_MAX_CACHE_BYTES, available_memory() // 8)
    text = os.environ.get(_CACHE_VARIABLE, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        msg = (
            f"{_CACHE_VARIABLE} must be a whole number of MiB (0 keeps nothing), got {text!r}; "
            f"the default of {default >> 20} MiB is used"
        )
        warn(msg, HostMemoryWarning)
        return default
    return int(text) << 20


_cache = _Cache()


def empty(shape: Iterable[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised C-ordered array: aligned to 64 bytes from 4 KiB, to a page from 1 MiB.

    Arrays of Python objects (and of NumPy's variable-length strings) are NumPy's own and initialised.
    """
    shape = tuple(shape)
    n_bytes = dtype.itemsize
    for length in shape:
        n_bytes *= length
    if n_bytes < _ALIGNED_BYTES or not is_plain(dtype):
        return np.empty(shape, dtype)
    if n_bytes > np.iinfo(np.intp).max:
        msg = f"an array must have fewer than 2**63 bytes, got shape {shape} of {dtype}; join fewer arrays"
        raise ValueError(msg)
    if n_bytes >= LARGE_BYTES:
        memory = np.asarray(_cache.lease(n_bytes))
    else:
        memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
        start = -address(memory) % _ALIGNMENT
        memory = memory[start : start + n_bytes]
    return memory.view(dtype).reshape(shape)


def address(array: np.ndarray[Any, Any]) -> int:
    """Return where the first element lies."""
    # An array object begins with what every object begins with, and then this pointer: a part of NumPy's binary
    # interface, which all extension modules are compiled for. To ask for `__array_interface__` takes six times as long.
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether an element is nothing but its bytes: no reference to an object or to another buffer."""
    return not dtype.hasobject and (dtype.isbuiltin != 0 or dtype.kind in "biufcmMSUV")


def is_leased(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array lies directly on a block of the cache, which nothing else can refer to."""
    return isinstance(array.base, _Lease)


def host_memory_info() -> HostMemoryInfo:
    """Tell what the cache of host memory for large outputs holds.

    Returns
    -------
    HostMemoryInfo
        Sizes in bytes.

    Notes
    -----
    *Threads:* of the whole process, at this moment.

    Examples
    --------
    >>> import accel_ops as ops
    >>> info = ops.host_memory_info()
    >>> info.cached_bytes <= info.cap_bytes
    True
    """
    return _cache.info()


def release_host_memory() -> int:
    """Give all cached host memory back to the operating system. Arrays in use are not touched.

    Returns
    -------
    int
        How many bytes were given back.

    Notes
    -----
    *Threads:* for the whole process; safe at any time.

    Examples
    --------
    >>> import accel_ops as ops
    >>> _ = ops.release_host_memory()
    >>> ops.host_memory_info().cached_bytes
    0
    """
    return _cache.trim(0)
