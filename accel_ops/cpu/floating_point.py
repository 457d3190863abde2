"""The floating-point environment: results must not follow a mode that some other library has set.

Flush-to-zero and rounding modes belong to a thread. Workers start in the default environment. A calling thread
is put into it for the time of a computation and then back.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["call_in_default_environment", "reset_floating_point_environment"]

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_ENVIRONMENT_BYTES = 256  # fenv_t takes 8 to 32 bytes on the platforms there are


@functools.cache
def _libm() -> Any:
    libm = ctypes.CDLL(None)  # the interpreter itself is linked with it
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
