"""For tests of what must have the same bits: a comparison to the last bit, and a digest to keep."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ops.arguments import as_array
from accel_ops.dispatch import Array
from accel_ops.errors import UnsupportedDTypeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["assert_same_bits", "digest"]

# Arrays are read in pieces of about this size, each copied once: small beside the array, and it stays in the cache.
_PIECE_BYTES = 1 << 18


def assert_same_bits(actual: ArrayLike, expected: ArrayLike) -> None:
    """Raise an AssertionError unless two arrays have the same shape, dtype and bits.

    Parameters
    ----------
    actual, expected : array_like
        Any shape, and any dtype without Python objects.

    Raises
    ------
    AssertionError
        The shapes, dtypes or bits differ. It names the first element that differs, in C order, with its bits.
    UnsupportedDTypeError
        The elements refer to Python objects or lie elsewhere (object, StringDType). It is a TypeError.
    UnsupportedArrayError
        An argument is a masked array or the like. It is a TypeError.

    Notes
    -----
    *Determinism:* a NaN equals any other NaN, also in a part of a complex number or in a field, because the payload
    and sign of a NaN are promised by nobody. -0.0 differs from +0.0. NaT has one bit pattern and is compared by it.

    What carries no value takes no part: the memory layout, and padding in records and in long doubles. dtypes are
    compared with ``==``, so byte orders must agree: what differs in them has the same `digest` but not the same bits.

    *Threads:* everything happens on the calling thread.

    Examples
    --------
    >>> import numpy as np
    >>> from accel_ops.testing import assert_same_bits
    >>> assert_same_bits(np.array([1.0, np.nan]), np.array([1.0, -np.nan]))
    >>> assert_same_bits(np.array([1.0, 0.0]), np.array([1.0, -0.0]))
    Traceback (most recent call last):
    AssertionError: arrays must have the same bits, but 1 of 2 elements differs, first at index (1,): \
got np.float64(0.0) (0x0000000000000000), expected np.float64(-0.0) (0x8000000000000000)
    """
    __tracebackhide__ = True  # pytest points at the caller
    got = _plain_array(actual, "assert_same_bits")
    wanted = _plain_array(expected, "assert_same_bits")
    if got.shape != wanted.shape:
        msg = f"arrays must have the same shape, got {got.shape}, expected {wanted.shape}"
        raise AssertionError(msg)
    if got.dtype != wanted.dtype:
        msg = f"arrays must have the same dtype, got {got.dtype}, expected {wanted.dtype}"
        raise AssertionError(msg)
    n_before = n_different = first = 0
    for piece, wanted_piece in zip(_pieces(got), _pieces(wanted), strict=True):
        mine, theirs = _canonical_bytes(piece), _canonical_bytes(wanted_piece)
        if not np.array_equal(mine, theirs):
            different = (mine != theirs).any(axis=1)
            if not n_different:
                first = n_before + int(different.argmax())
            n_different += int(np.count_nonzero(different))
        n_before += piece.size
    if n_different:
        index = tuple(int(position) for position in np.unravel_index(first, got.shape))
        msg = (
            f"arrays must have the same bits, but {n_different} of {got.size} elements "
            f"differ{'s' if n_different == 1 else ''}, first at index {index}: "
            f"got {_with_bits(got, index)}, expected {_with_bits(wanted, index)}"
        )
        raise AssertionError(msg)


def digest(array: ArrayLike) -> str:
    """Return a digest of the dtype, shape and bits of an array, to compare across processes and machines.

    Parameters
    ----------
    array : array_like
        Any shape, and any dtype without Python objects.

    Returns
    -------
    str
        SHA-256 as 64 hexadecimal digits.

    Raises
    ------
    UnsupportedDTypeError
        The elements refer to Python objects or lie elsewhere (object, StringDType). It is a TypeError.
    UnsupportedArrayError
        The argument is a masked array or the like. It is a TypeError.

    Notes
    -----
    *Determinism:* what `assert_same_bits` accepts has the same digest. So have arrays that differ in byte order
    alone, because a machine's own order is not a property of results. Elements are read in C order as little-endian
    bytes, each NaN as the one positive quiet NaN without payload. Long doubles are of different dtypes or bits on
    different kinds of machines, and their digests differ with them.

    *Threads:* everything happens on the calling thread.

    Examples
    --------
    >>> import numpy as np
    >>> from accel_ops.testing import digest
    >>> x = np.arange(6.0).reshape(2, 3)
    >>> digest(x)
    'f2c19a0b6304f875c06db7fd4f5c166419bec47bb044ca6724feb7b1484c96d0'
    >>> digest(x) == digest(np.asfortranarray(x)) == digest(x.astype(">f8"))
    True
    """
    values = _plain_array(array, "digest")
    result = hashlib.sha256(f"{_name(values.dtype)} {values.shape}\n".encode())
    for piece in _pieces(values):
        result.update(_canonical_bytes(piece).data)
    return result.hexdigest()


def _plain_array(value: Any, name: str) -> Array:
    array = as_array(value, name)
    if array.dtype.hasobject:
        msg = (
            f"{name} takes arrays whose elements are bits, got dtype {array.dtype}, whose elements lie elsewhere; "
            f"convert it first, for example with astype(float) or astype('U')"
        )
        raise UnsupportedDTypeError(msg)
    return array.view(np.ndarray)


def _name(dtype: np.dtype[Any]) -> str:
    """Return what a dtype is called, whatever its byte order and padding."""
    if dtype.names is not None:
        return "{" + ", ".join(f"{field!r}: {_name(dtype[field])}" for field in dtype.names) + "}"
    if dtype.subdtype is not None:
        return f"{_name(dtype.base)} {dtype.shape}"
    return dtype.name


def _packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the little-endian dtype without padding between fields."""
    if dtype.names is not None:
        return np.dtype([(field, _packed(dtype[field])) for field in dtype.names])
    if dtype.subdtype is not None:
        return np.dtype((_packed(dtype.base), dtype.shape))
    return dtype.newbyteorder("<")


def _pieces(array: Array) -> Iterator[Array]:
    """Cut an array into views that follow each other in C order."""
    n_most = max(1, _PIECE_BYTES // max(1, array.itemsize))
    if array.size <= n_most:
        yield array
        return
    n_rows = n_most // (array.size // len(array))
    if n_rows == 0:
        for row in array:
            yield from _pieces(row)
    else:
        for start in range(0, len(array), n_rows):
            yield array[start : start + n_rows]


def _canonical_bytes(piece: Array) -> Array:
    """Return the bytes of a piece, shape (elements, bytes of one), equal where the values are the same."""
    items = np.array(piece, _packed(piece.dtype), order="C", subok=False).reshape(-1)
    _make_canonical(items)
    if items.itemsize == 0:
        return np.empty((items.size, 0), np.uint8)
    return items.view(np.uint8).reshape(items.size, items.itemsize)


def _make_canonical(items: Array) -> None:
    """Give every NaN the same bits, and padding inside of elements zeros."""
    dtype = items.dtype
    if dtype.names is not None:
        for field in dtype.names:
            _make_canonical(items[field])
    elif dtype.kind == "c":
        _make_canonical(items.real)
        _make_canonical(items.imag)
    elif dtype.kind == "f" or _is_extension(dtype):
        with np.errstate(invalid="ignore"):  # some kinds of NaN report themselves when they are compared
            is_nan = items != items
        if is_nan.any():
            items[is_nan] = np.array(np.nan).astype(dtype)
        n_value = _value_bytes(dtype)
        if n_value < dtype.itemsize:
            padded = np.dtype([("value", np.uint8, n_value), ("padding", np.uint8, dtype.itemsize - n_value)])
            items.view(padded)["padding"] = 0


def _is_extension(dtype: np.dtype[Any]) -> bool:
    """Return whether another library defines the dtype, as ml_dtypes does bfloat16; NumPy calls those void."""
    return dtype.kind == "V" and dtype.names is None and dtype.type is not np.void


def _value_bytes(dtype: np.dtype[Any]) -> int:
    """Return how many bytes of an element carry its value: 10 of an x87 long double."""
    is_x87 = dtype.type is np.longdouble and np.finfo(np.longdouble).nmant == 63
    return 10 if is_x87 else dtype.itemsize


def _with_bits(array: Array, index: tuple[int, ...]) -> str:
    """Return an element and its bits: the digits of numbers as one writes them, the bytes of all else as they lie."""
    try:
        value = repr(array[index])
    except (SystemError, ValueError):
        value = f"an invalid {array.dtype}"  # text that is not Unicode, a date without unit
    # An array of no dimensions, where the index alone gives a scalar, which has forgotten the dtype of records.
    item = np.array(array[(*index, ...)], _packed(array.dtype))  # type: ignore[arg-type]  # NumPy knows no dtype of Any
    if item.dtype.kind == "c":
        return f"{value} (0x{_digits(item.real)}, 0x{_digits(item.imag)})"
    if item.dtype.kind in "biufmM" or _is_extension(item.dtype):
        return f"{value} (0x{_digits(item)})"
    return f"{value} (bytes {item.tobytes().hex()})"


def _digits(number: Array) -> str:
    return number.tobytes()[: _value_bytes(number.dtype)][::-1].hex()
