"""accel_ops: stage batches at the speed of memory, and compute the same bits every time.

Joins on the host are imported at once, all else at its first use: `import accel_ops` stays cheap.
"""

import typing

from accel_ops import threadpools
from accel_ops.batches import Batch, batch
from accel_ops.budget import ThreadInfo, get_num_threads, set_num_threads, thread_info, threads
from accel_ops.cpu.memory import HostMemoryInfo, host_memory_info, release_host_memory
from accel_ops.devices import Device, accelerators, default_accelerator
from accel_ops.errors import (
    AccelOpsError,
    BackendUnavailableError,
    DTypeMismatchError,
    ForkedDeviceError,
    HostMemoryWarning,
    ShapeMismatchError,
    ShutdownError,
    ThreadingWarning,
    UnfilledSlotError,
    UnsupportedArrayError,
    UnsupportedDTypeError,
)
from accel_ops.parallel_array_ops import ParallelArrayOps
from accel_ops.staging import concatenate, stack

if typing.TYPE_CHECKING:
    from accel_ops.products import dot, inner, matmul, matvec, outer, tensordot, vecdot, vecmat
    from accel_ops.transfers import empty_pinned, is_pinned, prefetch, stage

__version__ = "0.1.0.dev0"

__all__ = [
    "AccelOpsError",
    "BackendUnavailableError",
    "Batch",
    "DTypeMismatchError",
    "Device",
    "ForkedDeviceError",
    "HostMemoryInfo",
    "HostMemoryWarning",
    "ParallelArrayOps",
    "ShapeMismatchError",
    "ShutdownError",
    "ThreadInfo",
    "ThreadingWarning",
    "UnfilledSlotError",
    "UnsupportedArrayError",
    "UnsupportedDTypeError",
    "accelerators",
    "batch",
    "concatenate",
    "default_accelerator",
    "dot",
    "empty_pinned",
    "get_num_threads",
    "host_memory_info",
    "inner",
    "is_pinned",
    "matmul",
    "matvec",
    "outer",
    "prefetch",
    "release_host_memory",
    "set_num_threads",
    "stack",
    "stage",
    "tensordot",
    "thread_info",
    "threads",
    "vecdot",
    "vecmat",
]

_IMPORTED_AT_FIRST_USE = {
    **dict.fromkeys(
        ("dot", "inner", "matmul", "matvec", "outer", "tensordot", "vecdot", "vecmat"), "accel_ops.products"
    ),
    **dict.fromkeys(("empty_pinned", "is_pinned", "prefetch", "stage"), "accel_ops.transfers"),
}


def __getattr__(name: str) -> object:
    """Import the module of a function at its first use."""
    if name not in _IMPORTED_AT_FIRST_USE:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from accel_ops.cpu.native import import_apart

    function = globals()[name] = getattr(import_apart(_IMPORTED_AT_FIRST_USE[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


threadpools.register()
