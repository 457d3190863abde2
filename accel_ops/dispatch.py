"""Which backend does the work. Nothing else imports the GPU's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accel_ops.cpu import pool
from accel_ops.cpu import staging as cpu
from accel_ops.cpu.memory import address
from accel_ops.devices import device_index

if TYPE_CHECKING:
    from accel_ops.gpu.staging import DeviceStaging

__all__ = ["Array", "Backend", "ProductBackend", "backend_for", "backend_of", "device_staging", "is_pinned"]

Array = np.ndarray[Any, Any]


class Backend(Protocol):
    """What the public functions ask of the place where a result lies; a module or an object is one."""

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
    """What the public products ask of the place where their operands lie; a module or an object is one."""

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
        It names a device that is not there, or that cannot be used without CuPy.
    ForkedDeviceError
        It names a device, and this process was forked from one that had used one.
    TypeError
        It names nothing that could be a device.
    """
    index = device_index(accelerator)
    return cpu if index is None else device_staging(index)


def device_staging(index: int) -> DeviceStaging:
    """Return what stages for a device."""
    from accel_ops.gpu.staging import staging_for  # which makes the first CUDA calls

    return staging_for(index)


def is_pinned(array: Array) -> bool:
    """Return whether an array lies in page-locked memory, as far as this process has used a device."""
    driver = sys.modules.get("accel_ops.gpu.driver")
    return driver is not None and any(each.is_pinned(address(array)) for each in driver.opened())
