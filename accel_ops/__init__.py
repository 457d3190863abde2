"""accel_ops: stage batches at the speed of memory, and compute the same bits every time."""

from accel_ops import threadpools
from accel_ops.budget import ThreadInfo, get_num_threads, set_num_threads, thread_info, threads
from accel_ops.cpu.memory import HostMemoryInfo, host_memory_info, release_host_memory
from accel_ops.staging import concatenate, stack

__version__ = "0.1.0.dev0"

threadpools.register()
