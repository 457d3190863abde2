"""The CPU backend: NumPy, compiled kernels, one pool of threads and recycled memory."""
