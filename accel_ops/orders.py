"""The constants that define the bits of results. They know lengths, never threads.

Every kernel takes its edges from here. A change of one changes results and is a new major version.
"""

__all__ = ["ORDER_VERSION", "PRODUCT_BLOCK"]

# Of the orders as a whole. Golden digests are kept together with it.
ORDER_VERSION = 1

# Terms of a product that make one chain of fused multiply-adds. Long enough that adding a block's result to the
# rest costs nothing beside the block, and short enough that the operands of a block of outputs fit the caches:
# 256 is what optimised libraries take for float64. Rounding errors grow with 256 + K/256 instead of K.
PRODUCT_BLOCK = 256
