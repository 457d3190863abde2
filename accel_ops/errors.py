"""The error tree. Each error is also the builtin that a caller would catch.

AccelOpsError
├── BackendUnavailableError (RuntimeError)    a named accelerator is not there
├── DTypeMismatchError (TypeError, ValueError) arrays of different dtypes, and no ``dtype=`` to cast to
├── ForkedDeviceError (RuntimeError)          a device is used by a process forked from one that had used it
├── ShapeMismatchError (ValueError)           arrays whose shapes do not fit together
├── UnsupportedArrayError (TypeError)         an array that would lose what it carries
├── UnsupportedDTypeError (TypeError)         a dtype that the operation has no kernel for
├── ShutdownError (RuntimeError)              a call on, or cut short by, a closed ParallelArrayOps
└── UnfilledSlotError (RuntimeError)          a batch was left before each slot had been filled

ThreadingWarning (UserWarning)                a thread setting that is skipped or cannot help
HostMemoryWarning (UserWarning)               a memory setting that is skipped

Where NumPy has an error of its own (`numpy.exceptions.AxisError`), that one is raised.
Every message states the rule, the value received and the cure.
"""

import sys
import warnings

__all__ = [
    "AccelOpsError",
    "BackendUnavailableError",
    "DTypeMismatchError",
    "ForkedDeviceError",
    "HostMemoryWarning",
    "ShapeMismatchError",
    "ShutdownError",
    "ThreadingWarning",
    "UnfilledSlotError",
    "UnsupportedArrayError",
    "UnsupportedDTypeError",
    "warn",
]


class AccelOpsError(Exception):
    """Base of every error that accel_ops defines."""


class BackendUnavailableError(AccelOpsError, RuntimeError):
    """The accelerator that was named is not there, or what drives it is not installed."""


class DTypeMismatchError(AccelOpsError, TypeError, ValueError):
    """Arrays of different dtypes were given without saying which one they should have."""


class ForkedDeviceError(AccelOpsError, RuntimeError):
    """A device call in a process whose parent had used a device before it forked: CUDA does not survive a fork."""


class ShapeMismatchError(AccelOpsError, ValueError):
    """Shapes that do not fit together."""


class UnsupportedArrayError(AccelOpsError, TypeError):
    """An array whose kind carries more than values, which the operation would drop."""


class UnsupportedDTypeError(AccelOpsError, TypeError):
    """A dtype that the operation is not defined for, or has no kernel for."""


class ShutdownError(AccelOpsError, RuntimeError):
    """The ParallelArrayOps has been shut down."""


class UnfilledSlotError(AccelOpsError, RuntimeError):
    """A batch was used as complete while some of its slots had not been filled."""


class ThreadingWarning(UserWarning):
    """A thread setting that was skipped, or that asks for more threads than there are CPUs."""


class HostMemoryWarning(UserWarning):
    """A setting of the host memory cache that was skipped."""


def warn(message: str, category: type[Warning]) -> None:
    """Give a warning that points at the first caller outside of this package."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)
