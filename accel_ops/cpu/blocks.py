"""Recycled blocks of memory: what is kept when an array dies, and for how long.

Each array over a block refers to a lease, and so does every view, memoryview and DLPack capsule made from it; only the
end of the lease gives the block back.

All state is in containers whose single operations are atomic. A lease may end at any moment: in another thread,
in the garbage collector, in a signal handler, in a forked child. Nothing but its block's reference is noted then;
the next large request, or question, puts the block among the free ones and gives up what is too much.
"""

import collections
import contextlib
import itertools
import mmap
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["Block", "BlockCache", "HostMemoryInfo", "Lease", "size_class"]

_RECENT_REQUESTS = 32


class Block(Protocol):
    """Memory of one size class, which goes back to where it comes from with the last reference to the block."""

    address: int
    size: int
    freed: int  # the number of the release after which it was last free

    def retire(self) -> None:
        """Note that nothing refers to the memory any more."""

    def is_idle(self) -> bool:
        """Return whether it may be written again: a device may still read it."""

    def lend(self) -> None:
        """Note that something refers to the memory again."""


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


class Lease:
    """What arrays over a block refer to; NumPy reads where the memory lies from ``__array_interface__``."""

    __slots__ = ("__array_interface__", "__weakref__", "block", "size")

    def __init__(self, block: Block, n_bytes: int) -> None:
        self.block: Block | None = block
        self.size = block.size
        self.__array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


class _Return(weakref.ref["Lease"]):
    """Brings a block back when its lease has ended."""

    __slots__ = ("block",)

    block: Block


class BlockCache:
    """The free blocks of one kind of memory.

    ``make(size)`` maps a block, and raises MemoryError where it cannot. ``cap()`` is how many bytes may be kept.
    """

    def __init__(self, make: Callable[[int], Block], cap: Callable[[], int]) -> None:
        self._make = make
        self.cap = cap
        self._free: dict[int, collections.deque[Block]] = {}  # by size class, the longest free first
        self._leased: dict[int, weakref.ref[Lease]] = {}  # by the reference's id
        # References of leases that have ended. Appending is all that happens then, in C: in Python code an
        # interrupt could strike, and the interpreter drops what is raised while an object dies.
        self._returned: collections.deque[weakref.ref[Lease]] = collections.deque()
        self._releases = itertools.count()
        self._recent: collections.deque[int] = collections.deque(maxlen=_RECENT_REQUESTS)

    def lease(self, n_bytes: int) -> Lease:
        """Lend a block of at least so many bytes."""
        size = size_class(n_bytes)
        self._take_back()
        block = self._take(size)
        if block is None:
            block = self._map(size)
        block.lend()
        self._recent.append(size)
        cached_bytes = self.cached_bytes()
        if cached_bytes:
            self.trim()
        lease = Lease(block, n_bytes)
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
        # An interrupt may come at any point: what has not been looked at stays in the queue, and a block that nobody
        # has goes back to where it comes from.
        while self._returned:
            with contextlib.suppress(IndexError, ValueError):  # another thread was faster
                reference = self._returned[0]
                is_mine = self._leased.pop(id(reference), None) is not None
                if is_mine and isinstance(reference, _Return):
                    block = reference.block
                    block.retire()
                    block.freed = next(self._releases)
                    blocks = self._free.get(block.size)
                    if blocks is None:
                        blocks = self._free.setdefault(block.size, collections.deque())
                    blocks.append(block)
                self._returned.remove(reference)

    def _coming_back(self) -> int:
        """Return the bytes of the blocks in use that will be kept."""
        references = list(self._leased.values())
        return sum(reference.block.size for reference in references if isinstance(reference, _Return))

    def trim(self, limit: int | None = None) -> int:
        """Give up the longest free blocks beyond the limit, but none that is busy; return how many bytes that were."""
        self._take_back()
        limit = self.limit() if limit is None else limit
        excess = self.cached_bytes() - limit
        given_up = 0
        while given_up < excess:
            oldest: list[Block] = []
            for size in list(self._free):
                oldest += next(([block] for block in tuple(self._free[size]) if block.is_idle()), [])
            if not oldest:
                break
            block = min(oldest, key=lambda block: block.freed)
            with contextlib.suppress(ValueError):  # another thread took it
                self._free[block.size].remove(block)
                given_up += block.size
        return given_up

    def limit(self) -> int:
        """Return how many bytes may be kept at this moment."""
        return min(self.cap(), 2 * max(list(self._recent), default=0))

    def cached_bytes(self) -> int:
        """Return the bytes of the free blocks."""
        # A list of keys is made in one step. One of pairs allocates, which may let a lease end and add a key.
        return sum(size * len(self._free[size]) for size in list(self._free))

    def info(self) -> HostMemoryInfo:
        """Tell what is kept and what is lent."""
        self.trim()
        leases = [reference() for reference in list(self._leased.values())]
        return HostMemoryInfo(
            cached_bytes=self.cached_bytes(),
            cached_blocks=sum(len(self._free[size]) for size in list(self._free)),
            in_use_bytes=sum(lease.size for lease in leases if lease is not None),
            limit_bytes=self.limit(),
            cap_bytes=self.cap(),
        )

    def _take(self, size: int) -> Block | None:
        """Return an idle block, the one used last where there is a choice: its pages may still be in a cache."""
        blocks = self._free.get(size, ())
        for block in reversed(tuple(blocks)):
            if block.is_idle():
                with contextlib.suppress(ValueError):  # another thread took it
                    self._free[size].remove(block)
                    return block
        return None

    def _map(self, size: int) -> Block:
        try:
            return self._make(size)
        except MemoryError:
            self.trim(0)
        return self._make(size)


def size_class(n_bytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that less than 1/8 is wasted."""
    step = 1 << max(n_bytes.bit_length() - 4, mmap.PAGESIZE.bit_length() - 1)
    return -(-n_bytes // step) * step
