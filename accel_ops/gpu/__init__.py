"""The GPU backend: pinned memory and copies through a driver, which CuPy implements."""
