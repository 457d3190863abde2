"""The kernels of products: serial loops around the tile, one call for a part of the output or of a batch.

All addresses and strides are in bytes. The first argument is a zero of the element, which chooses the version of
the kernel. The bits do not depend on which of the ways here an output is computed.
"""

import numba

from accel_ops.cpu.chains import multiply_blocks, multiply_matrix, multiply_rows
from accel_ops.cpu.elements import (
    blocks_of_chains,
    item_bytes,
    lanes_of_chains,
    panel_columns,
    row_step,
    rows_of_chains,
    tile_columns,
    tile_lanes,
)
from accel_ops.cpu.jit import compiled
from accel_ops.cpu.outputs import RESUME, add_row
from accel_ops.cpu.packing import pack_columns
from accel_ops.cpu.product_pieces import ADD, STORE
from accel_ops.cpu.rounding import enter_default_mode, restore_mode
from accel_ops.cpu.tile import long_row_columns, multiply_long_row, multiply_tile
from accel_ops.orders import PRODUCT_BLOCK

__all__ = ["add_blocks", "multiply", "multiply_pairs", "multiply_rows_by_vector", "multiply_vector", "multiply_vectors"]


@compiled
def multiply(zero, places_table, m, n, k, a_row, a_term, b_term, b_column, c_row, c_block, start, packs, scratch):
    """Multiply each a (m x k) with its b (k x n) into its c (m x n), whose rows are contiguous.

    The table holds where each a, its b and its c begin. ``start`` is what becomes of the first block of terms: STORE or
    ADD. With ``c_block`` each block's result goes to an output of its own, so many bytes further on.
    """
    mode = enter_default_mode()
    for item in range(0, len(places_table), 3):
        a_item, b_item, c_item = places_table[item], places_table[item + 1], places_table[item + 2]
        for column in range(0, n, panel_columns(zero)):
            width = min(panel_columns(zero), n - column)
            c = c_item + column * item_bytes(zero)
            does = start
            for term in range(0, k, PRODUCT_BLOCK):
                depth = min(PRODUCT_BLOCK, k - term)
                a = a_item + term * a_term
                b = b_item + term * b_term + column * b_column
                if packs:
                    _pack(zero, b, b_term, b_column, depth, width, scratch)
                    _multiply_panel(zero, m, width, depth, a, a_row, a_term, scratch, 0, c, c_row, does)
                else:
                    _multiply_panel(zero, m, width, depth, a, a_row, a_term, b, b_term, c, c_row, does)
                if c_block != 0:
                    c += c_block
                else:
                    does = ADD
    restore_mode(mode)


@numba.njit(nogil=True)
def _pack(zero, b, b_term, b_column, depth, width, scratch):
    """Pack a panel, tile by tile."""
    for column in range(0, width, tile_columns(zero)):
        columns = min(tile_columns(zero), width - column)
        target = scratch + column * depth * item_bytes(zero)
        pack_columns(zero, b + column * b_column, b_term, b_column, depth, columns, target)


@numba.njit(nogil=True)
def _multiply_panel(zero, m, width, depth, a, a_row, a_term, b, b_term, c, c_row, does):
    """Multiply all rows with one panel, which is packed where ``b_term`` is 0."""
    row = 0
    while row < m:
        rows = row_step(zero, m - row)
        for column in range(0, width, tile_columns(zero)):
            columns = min(tile_columns(zero), width - column)
            at = column * item_bytes(zero)
            if b_term == 0:
                lanes = tile_lanes(zero)
                step = (columns + lanes - 1) // lanes * lanes * item_bytes(zero)
                b_tile = b + depth * at
            else:
                step = b_term
                b_tile = b + at
            multiply_tile(
                zero,
                rows,
                depth,
                a + row * a_row,
                a_row,
                a_term,
                b_tile,
                step,
                c + row * c_row + at,
                c_row,
                columns,
                does,
            )
        row += rows


@compiled
def multiply_vector(zero, a, a_term, b, b_term, k, n, c, start, scratch):
    """Multiply a row a (k) with b (k x n), whose rows are contiguous, into the row c, reading b in long runs.

    ``scratch`` has room for a row.
    """
    mode = enter_default_mode()
    does = start
    for term in range(0, k, PRODUCT_BLOCK):
        # A block's chains are kept in memory, a few terms are added to all of them at a time.
        block = c if does == STORE else scratch
        stop = min(term + PRODUCT_BLOCK, k)
        continues = STORE
        for first in range(term, stop, _TERMS_AT_ONCE):
            depth = min(_TERMS_AT_ONCE, stop - first)
            _add_rows(zero, depth, a + first * a_term, a_term, b + first * b_term, b_term, block, n, continues)
            continues = RESUME
        if does == ADD:
            add_row(zero, scratch, c, n, ADD)
        does = ADD
    restore_mode(mode)


_TERMS_AT_ONCE = 8  # so many rows are read side by side


@numba.njit(nogil=True)
def _add_rows(zero, depth, a, a_term, b, b_term, c, width, does):
    """Add a few terms to a row of chains."""
    whole = width // long_row_columns(zero) * long_row_columns(zero)
    multiply_long_row(zero, depth, a, a_term, b, b_term, c, whole, does)
    for column in range(whole, width, tile_columns(zero)):
        columns = min(tile_columns(zero), width - column)
        at = column * item_bytes(zero)
        multiply_tile(zero, 1, depth, a, 0, a_term, b + at, b_term, c + at, 0, columns, does)


@compiled
def multiply_rows_by_vector(zero, a, a_row, a_term, b, b_term, m, k, c, start):
    """Multiply a (m x k) with the vector b (k) into the contiguous c (m)."""
    mode = enter_default_mode()
    row = 0
    while row < m:
        rows = rows_of_chains(zero)
        blocks = blocks_of_chains(zero)
        if m - row < rows:
            rows, blocks = min(lanes_of_chains(zero), m - row), 1
        does = start
        term = 0
        while term < k:
            depth = blocks * PRODUCT_BLOCK
            if k - term < depth:
                depth = min(PRODUCT_BLOCK, k - term)
            matrix, x = a + row * a_row + term * a_term, b + term * b_term
            multiply_matrix(zero, rows, depth, matrix, a_row, a_term, x, b_term, c + row * item_bytes(zero), does)
            does = ADD
            term += depth
        row += rows
    restore_mode(mode)


@compiled
def multiply_pairs(zero, a_table, b_table, a_term, b_term, k, c):
    """Multiply pairs of rows of up to a block's terms, whose addresses are in the tables, into the contiguous c."""
    mode = enter_default_mode()
    for first in range(0, len(a_table), lanes_of_chains(zero)):
        n_chains = min(lanes_of_chains(zero), len(a_table) - first)
        a, b = a_table[first:].ctypes.data, b_table[first:].ctypes.data
        multiply_rows(zero, n_chains, k, a, 0, a_term, b, b_term, c + first * item_bytes(zero), STORE)
    restore_mode(mode)


@compiled
def multiply_vectors(zero, a, b, n_blocks, c):
    """Multiply two contiguous vectors of whole blocks, each block into one of the contiguous c."""
    mode = enter_default_mode()
    size = item_bytes(zero)
    for first in range(0, n_blocks, lanes_of_chains(zero)):
        n_chains = min(lanes_of_chains(zero), n_blocks - first)
        at = first * PRODUCT_BLOCK * size
        multiply_blocks(zero, n_chains, PRODUCT_BLOCK, a + at, 0, size, b + at, size, c + first * size, STORE)
    restore_mode(mode)


@compiled
def add_blocks(zero, blocks, n_blocks, block_bytes, c, n):
    """Add the results of blocks, n contiguous ones each, in ascending order into c."""
    mode = enter_default_mode()
    add_row(zero, blocks, c, n, STORE)
    for block in range(1, n_blocks):
        add_row(zero, blocks + block * block_bytes, c, n, ADD)
    restore_mode(mode)
