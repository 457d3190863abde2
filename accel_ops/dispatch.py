"""Which backend does the work: what an ``accelerator=`` argument names, and whether it is there."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu import staging as cpu
from accel_ops.errors import BackendUnavailableError

__all__ = ["Array", "Backend", "ProductBackend", "backend_for", "backend_of"]

Array = np.ndarray[Any, Any]


class Backend(Protocol):
    """What the public functions ask of the place where a result lies; a module is one."""

    def empty(self, shape: Iterable[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised C-ordered array."""

    def join(
        self,
        arrays: Sequence[Array],
        axis: int | None,
        out: Array,
        *,
        casting: Any,
        min_chunk_bytes: int = 0,
        max_workers: int | None = None,
        call: pool.Call | None = None,
    ) -> None:
        """Write arrays, joined along an axis, into an output that overlaps none of them."""

    def fill(self, dst: Array, src: Array, *, max_workers: int | None = None) -> None:
        """Write one array into another of the same shape."""

    def is_small(self, n_bytes: int, *, changes: bool) -> bool:
        """Return whether NumPy alone, on the calling thread, joins so much soonest."""


class ProductBackend(Protocol):
    """What the public products ask of the place where their operands lie; a module is one."""

    def empty(self, shape: Iterable[int], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised C-ordered array."""

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """Multiply stacks of matrices, of one dtype and one shape of stack, into an output that overlaps neither."""


def backend_of(_arrays: Sequence[Array]) -> ProductBackend:
    """Return the backend where arrays lie: all in host memory, as far as there is no other backend."""
    from accel_ops.cpu import products  # with its compiled kernels, which staging does without

    return products


def backend_for(accelerator: object) -> Backend:
    """Return the backend that an ``accelerator=`` argument names.

    Raises
    ------
    BackendUnavailableError
        It names a device: none can be used by this version.
    TypeError
        It names nothing that could be a device.
    """
    if accelerator is None or (name := _device_name(accelerator)) == "cpu":
        return cpu
    msg = (
        f"accelerator={accelerator!r} names the device {name}, which is not there: this version of accel_ops "
        f"has no GPU backend yet, nor does installing cupy-cuda12x or cupy-cuda13x add one; "
        f"pass accelerator=None to use plain host memory"
    )
    raise BackendUnavailableError(msg)


def _device_name(accelerator: object) -> str:
    """Return "cpu" or "cuda:<index>" for every form of device that is understood."""
    if isinstance(accelerator, str):
        kind, colon, index = accelerator.partition(":")
        if accelerator == "cpu":
            return "cpu"
        if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal())):
            return f"cuda:{index or 0}"
    elif _is_instance(accelerator, "torch", "device"):
        torch_device: Any = accelerator
        return "cpu" if torch_device.type == "cpu" else f"{torch_device.type}:{torch_device.index or 0}"
    elif _is_instance(accelerator, "cupy.cuda", "Device"):
        cupy_device: Any = accelerator
        return f"cuda:{cupy_device.id}"
    elif isinstance(accelerator, (int, np.integer)) and not isinstance(accelerator, bool):
        number = operator.index(accelerator)
        if number >= 0:
            return f"cuda:{number}"
    msg = (
        f"accelerator must be None, 'cpu', 'cuda', 'cuda:<index>', an index of 0 or more, a torch.device or a "
        f"cupy.cuda.Device, got {accelerator!r}; pass None for plain host memory"
    )
    raise TypeError(msg)


def _is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class of a library, which then has been imported already."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
