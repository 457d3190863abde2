"""accel_ops: stage batches at the speed of memory, and compute the same bits every time."""

__version__ = "0.1.0.dev0"
