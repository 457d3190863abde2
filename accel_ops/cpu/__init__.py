"""The CPU backend: NumPy, compiled kernels, one pool of threads and recycled memory."""

from accel_ops.cpu import (
    fork as fork,
)  # what must hold across a fork is registered when this package is imported
