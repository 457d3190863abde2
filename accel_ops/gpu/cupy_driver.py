"""CuPy's runtime as the driver of a device."""

# ruff: noqa: D102 - what the methods do is said where the protocol is, in driver.py

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from accel_ops.cpu.native import import_apart
from accel_ops.errors import BackendUnavailableError, UnsupportedDTypeError
from accel_ops.gpu.driver import first_call, forked_error, is_forked

__all__ = ["CupyDriver"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# CUDA's numbers of the errors cudaErrorMemoryAllocation and cudaErrorInitializationError.
_MEMORY_ALLOCATION, _INITIALIZATION_ERROR = 2, 3


def _on_device(
    method: Callable[Concatenate[CupyDriver, _Parameters], _Result],
) -> Callable[Concatenate[CupyDriver, _Parameters], _Result]:
    """Decorate a method: its device is the current one meanwhile, and out of memory is a MemoryError."""

    @functools.wraps(method)
    def call(self: CupyDriver, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        previous = self._runtime.getDevice()
        try:
            if previous != self._index:
                self._runtime.setDevice(self._index)
            return method(self, *args, **kwargs)
        except self._runtime.CUDARuntimeError as exc:
            if exc.status == _MEMORY_ALLOCATION:
                msg = f"cuda:{self._index} or its page-locked host memory is used up; free arrays or stage less at once"
                raise MemoryError(msg) from exc
            raise
        finally:
            if previous != self._index:
                self._runtime.setDevice(previous)

    return call


class _Named:
    """A stream of which only CUDA's number is known."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class CupyDriver:
    """A device through CuPy. Implements `accel_ops.gpu.driver.Driver`.

    Raises
    ------
    BackendUnavailableError
        CuPy is not installed, finds no driver, or there is no device of this index.
    """

    def __init__(self, index: int) -> None:
        name = f"cuda:{index}"
        try:
            # Apart from signals and forks, which would leave half of it.
            cupy: Any = import_apart("cupy")
        except ImportError as exc:
            msg = (
                f"the device {name} is not there: it is used through CuPy, which cannot be imported ({exc}); install "
                f"accel_ops[cuda12] or accel_ops[cuda13], as the driver needs, or pass accelerator=None for host memory"
            )
            raise BackendUnavailableError(msg) from exc
        self._cupy = cupy
        self._runtime: Any = cupy.cuda.runtime
        with first_call(index):
            try:
                n_devices = self._runtime.getDeviceCount()
            except self._runtime.CUDARuntimeError as exc:
                if exc.status == _INITIALIZATION_ERROR and is_forked():  # by a process that used CUDA without us
                    raise forked_error() from exc
                msg = f"the device {name} is not there: {exc}; pass accelerator=None for plain host memory"
                raise BackendUnavailableError(msg) from exc
            if index >= n_devices:
                msg = f"the device {name} is not there: this process sees {n_devices}; see accel_ops.accelerators()"
                raise BackendUnavailableError(msg)
        self._index = index
        self._streams: list[Any] = []
        self._named: dict[int, Any] = {}

    @_on_device
    def allocate_pinned(self, n_bytes: int) -> int:
        address: int = self._runtime.hostAlloc(n_bytes, self._runtime.hostAllocPortable)
        return address

    @_on_device
    def free_pinned(self, address: int) -> None:
        self._runtime.freeHost(address)

    @_on_device
    def is_pinned(self, address: int) -> bool:
        attributes = self._runtime.pointerGetAttributes(address)
        return bool(attributes.type == self._runtime.memoryTypeHost)

    @_on_device
    def new_stream(self) -> int:
        stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streams.append(stream)
        pointer: int = stream.ptr
        return pointer

    @_on_device
    def current_stream(self) -> int:
        pointer: int = self._cupy.cuda.get_current_stream().ptr
        return pointer

    @_on_device
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        try:
            if stream == self._cupy.cuda.get_current_stream().ptr:
                return self._cupy.empty(shape, dtype)
            with self._foreign(stream):  # CuPy reuses memory in the order of the stream for which it is taken
                return self._cupy.empty(shape, dtype)
        except (TypeError, ValueError) as exc:
            msg = f"CuPy has no arrays of {dtype} ({exc}); cast to another dtype, or stage a view as bytes"
            raise UnsupportedDTypeError(msg) from exc

    def _foreign(self, stream: int) -> Any:
        """Return CuPy's object for a stream, kept for ever: CuPy may end the stream with it."""
        found = self._named.get(stream)
        if found is None:
            make = getattr(self._cupy.cuda.Stream, "from_external", None)  # CuPy 13 does not have it yet
            found = self._cupy.cuda.ExternalStream(stream) if make is None else make(_Named(stream))
            self._named[stream] = found
        return found

    def address(self, array: Any) -> int:
        address: int = array.data.ptr
        return address

    @_on_device
    def copy_to_device(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, n_bytes, self._runtime.memcpyHostToDevice, stream)

    @_on_device
    def record(self, stream: int) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, stream)
        return event

    @_on_device
    def has_happened(self, event: Any) -> bool:
        return bool(event.done)

    @_on_device
    def wait(self, stream: int, event: Any) -> None:
        self._runtime.streamWaitEvent(stream, event.ptr)
