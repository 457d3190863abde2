"""The floating-point environment of a computation, and the errors that it reports.

Results must not follow a mode that some other library has set: flush-to-zero and rounding modes belong to a
thread. Workers start in the default environment; a calling thread is put into it for the time of a computation
and then back.

Overflow and the like are reported once for a call, wherever its pieces ran, as the caller's `numpy.errstate`
says and at the caller's line.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from accel_ops.errors import warn

__all__ = ["call_in_default_environment", "call_reporting_errors", "reset_floating_point_environment"]

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_SETTINGS = {"divide by zero": "divide", "overflow": "over", "underflow": "under", "invalid value": "invalid"}
_ENVIRONMENT_BYTES = 256  # fenv_t takes 8 to 32 bytes on the platforms there are


@functools.cache
def _libm() -> Any:
    libm = ctypes.PyDLL(None)  # the interpreter is linked with it; calls so short need not release the GIL
    libm.fesetenv.argtypes = libm.fegetenv.argtypes = [ctypes.c_void_p]
    return libm


def reset_floating_point_environment() -> None:
    """Put the calling thread into the default environment: nearest rounding, subnormals kept, no traps."""
    _libm().fesetenv(_DEFAULT_ENVIRONMENT)


def call_in_default_environment(function: Callable[..., object], *args: object) -> None:
    """Call a function in the default environment and restore the caller's.

    The restoring call follows the protected one without a point in between at which CPython would deliver a
    signal, so that no exception can be raised before it.
    """
    fesetenv = _libm().fesetenv
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _libm().fegetenv(saved)
    try:
        fesetenv(_DEFAULT_ENVIRONMENT)
        function(*args)
    finally:
        fesetenv(saved)


def call_reporting_errors(function: Callable[..., object], *args: object) -> None:
    """Call a function that casts, and report what NumPy found in it afterwards, each kind of error once."""
    found: dict[str, int] = {}  # what NumPy calls the error, and its flag
    with np.errstate(all="call", call=found.__setitem__):
        function(*args)
    for kind, flag in sorted(found.items()):
        _report(kind, flag)


def _report(kind: str, flag: int) -> None:
    setting = {**np.geterr()}[_SETTINGS[kind]]
    message = f"{kind} encountered in cast"
    if setting == "warn":
        warn(message, RuntimeWarning)
    elif setting == "raise":
        raise FloatingPointError(message)
    elif setting == "call":
        handler: Any = np.geterrcall()
        handler(kind, flag)
    elif setting == "log":
        log: Any = np.geterrcall()
        log.write(f"Warning: {message}\n")
    elif setting == "print":
        print(f"Warning: {message}")  # noqa: T201 - what the caller's errstate asks for
