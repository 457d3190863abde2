"""Host memory for outputs: recycled, page-aligned blocks for large ones, NumPy's own for the rest.

Fresh pages cost more than the copy that fills them, so a block whose array has died is kept for the next output
of its size class. `cpu.blocks` does that.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from accel_ops.cpu.blocks import BlockCache, HostMemoryInfo, Lease, size_class
from accel_ops.errors import HostMemoryWarning, warn
from accel_ops.limits import available_memory

__all__ = [
    "HostMemoryInfo",
    "add_cache",
    "address",
    "empty",
    "host_memory_info",
    "is_leased",
    "is_plain",
    "kept_bytes",
    "release_host_memory",
    "size_class",
]

LARGE_BYTES = 1 << 20  # from here a fresh output's page faults cost NumPy more than our bookkeeping
_ALIGNED_BYTES = 4 << 10  # from here 64-byte alignment is promised
_ALIGNMENT = 64
_MAX_CACHE_BYTES = 1 << 30
_CACHE_VARIABLE = "ACCEL_OPS_CACHE_MIB"
_MOST_DIGITS = 12  # of that variable: more MiB than a 64-bit address space has


class _Block:
    """Anonymous pages of one size class; unmapped when the last reference to it goes.

    Raises
    ------
    MemoryError
        The operating system refused them.
    """

    __slots__ = ("address", "freed", "mapping", "size")

    def __init__(self, size: int) -> None:
        self.freed = 0  # the number of the release after which it was last free
        try:
            self.mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            msg = f"the operating system refused {size} bytes for an output; free memory or join fewer arrays"
            raise MemoryError(msg) from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = address(np.frombuffer(self.mapping, np.uint8))
        self.size = size

    def retire(self) -> None:
        """Nothing has to be noted."""

    def is_idle(self) -> bool:
        """No device reads it: it may be written again at once."""
        return True

    def lend(self) -> None:
        """Nothing has to be noted."""


@functools.cache
def kept_bytes() -> int:
    """Return how many bytes of free blocks of one kind of memory may be kept."""
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


_cache = BlockCache(_Block, kept_bytes)
_others: list[BlockCache] = []  # of page-locked memory


def add_cache(cache: BlockCache) -> None:
    """Count another kind of host memory in `host_memory_info`, and release it with this one, in this process."""
    _others.append(cache)


# A forked child does not touch what a device has locked.
os.register_at_fork(after_in_child=lambda: _others.clear())


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
    # interface, which all extension modules are compiled for. To ask for `__array_interface__` makes a dict.
    return ctypes.c_size_t.from_address(id(array) + object.__basicsize__).value


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether an element is nothing but its bytes: no reference to an object or to another buffer."""
    return not dtype.hasobject and (dtype.isbuiltin != 0 or dtype.kind in "biufcmMSUV")


def is_leased(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array lies directly on a block of the cache, which nothing else can refer to."""
    return isinstance(array.base, Lease)


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
    infos = [cache.info() for cache in (_cache, *_others)]
    return HostMemoryInfo(*(sum(fields) for fields in zip(*infos, strict=True)))


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
    return sum(cache.trim(0) for cache in (_cache, *_others))
