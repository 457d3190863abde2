"""Products of vectors and matrices: the same bits whatever the threads, the batch or the layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import accel_ops.cpu.products  # noqa: F401 - together with this module, apart from signals: see native.import_apart
from accel_ops import dispatch
from accel_ops.arguments import (
    as_array,
    as_subclass,
    check_casting,
    check_casts,
    may_overlap,
    may_overlap_itself,
    normalize_axis,
)
from accel_ops.cpu.floating_point import call_in_default_environment
from accel_ops.dispatch import Array
from accel_ops.errors import ShapeMismatchError, UnsupportedDTypeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

__all__ = ["dot", "inner", "matmul", "matvec", "outer", "tensordot", "vecdot", "vecmat"]

# Indices that add the axes which vectors lack, and that drop them again.
_WITH_AXES: dict[tuple[int, ...], Any] = {
    (): (),
    (-1,): (..., np.newaxis),
    (-2,): (..., np.newaxis, slice(None)),
    (-2, -1): (..., np.newaxis, np.newaxis),
}
_WITHOUT_AXES: dict[tuple[int, ...], Any] = {
    (-1,): (..., 0),
    (-2,): (..., 0, slice(None)),
    (-2, -1): (..., 0, 0),
}
_Axes = int | tuple[Sequence[int] | int, Sequence[int] | int]


def matmul(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    out: Array | None = None,
    *,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Any:
    """Multiply matrices, or stacks of them, as `numpy.matmul` does.

    Parameters
    ----------
    x1 : array_like
        Shape (..., m, k), or (k,), which counts as one row.
    x2 : array_like
        Shape (..., k, n), or (k,), which counts as one column. The leading dimensions broadcast.
    out : ndarray, optional
        Where the result goes: any layout and overlap.
    dtype : dtype_like, optional
        What to multiply in; by default what NumPy promotes the operands to.
    casting : {"same_kind", "no", "equiv", "safe", "unsafe"}, default "same_kind"
        Which casts of operands to ``dtype``, and of the result to ``out``, are allowed.

    Returns
    -------
    ndarray or scalar
        Shape (..., m, n) without the axis of an operand that is a vector; a scalar for two vectors. Of ``dtype``, or
        of what NumPy promotes the operands to; or ``out``.

    Raises
    ------
    ShapeMismatchError
        The shapes do not fit together. It is a ValueError.
    UnsupportedDTypeError
        The dtype is not boolean, integer, float16, bfloat16, float32, float64, complex64 or complex128. It is a
        TypeError.
    UnsupportedArrayError
        An operand is a masked array or the like. It is a TypeError.
    TypeError
        A cast that ``casting`` does not allow, or an ``out`` that is no ndarray.
    ValueError
        ``out`` is read-only, or ``casting`` is no rule for casts.
    MemoryError
        The operating system refused the memory.

    See Also
    --------
    matvec, vecmat, vecdot, tensordot

    Notes
    -----
    *Determinism:* each output is the sum of its terms in one fixed order, which depends on their number alone:
    blocks of 256 consecutive terms, each a chain of fused multiply-adds that begins with +0.0, added in ascending
    order. A complex block has four such chains. float16 and bfloat16 are multiplied in float32 and rounded once.
    Integers wrap. So a row has the same bits alone or in any batch, in any layout and on any CPU. No floating-point
    error is reported.

    *Threads:* the output is cut by its shape, where that gives too little by blocks of terms; small products stay
    on the calling thread.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.matmul(np.arange(6.0).reshape(2, 3), np.ones((3, 2)))
    array([[ 3.,  3.],
           [12., 12.]])
    """
    a, b = _operands(x1, x2, "matmul")
    if a.ndim == 0 or b.ndim == 0:
        msg = f"matmul takes arrays of 1 dimension or more, got shapes {a.shape} and {b.shape}; use numpy.multiply"
        raise ShapeMismatchError(msg)
    left = a[np.newaxis] if a.ndim == 1 else a
    right = b[:, np.newaxis] if b.ndim == 1 else b
    dropped = tuple(axis for axis, operand in ((-2, a), (-1, b)) if operand.ndim == 1)
    return _multiply(left, right, dropped, out, dtype, casting, "matmul", (a, b))


def matvec(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    out: Array | None = None,
    *,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Any:
    """Multiply a matrix, or a stack of them, with vectors, as `numpy.matvec` does.

    Parameters
    ----------
    x1 : array_like
        Shape (..., m, k).
    x2 : array_like
        Shape (..., k).
    out, dtype, casting
        See `matmul`.

    Returns
    -------
    ndarray
        Shape (..., m).

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.matvec(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([[1., 2.],
           [3., 4.]])
    """
    a, b = _operands(x1, x2, "matvec")
    _check_dimensions((a, 2), (b, 1), "matvec")
    return _multiply(a, b[..., np.newaxis], (-1,), out, dtype, casting, "matvec", (a, b))


def vecmat(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    out: Array | None = None,
    *,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Any:
    """Multiply vectors, conjugated where they are complex, with a matrix or a stack, as `numpy.vecmat` does.

    Parameters
    ----------
    x1 : array_like
        Shape (..., k).
    x2 : array_like
        Shape (..., k, n).
    out, dtype, casting
        See `matmul`.

    Returns
    -------
    ndarray
        Shape (..., n).

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.vecmat(np.array([1.0, 2.0]), np.ones((2, 3)))
    array([3., 3., 3.])
    """
    a, b = _operands(x1, x2, "vecmat")
    _check_dimensions((a, 1), (b, 2), "vecmat")
    return _multiply(_conjugated(a)[..., np.newaxis, :], b, (-2,), out, dtype, casting, "vecmat", (a, b))


def vecdot(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    out: Array | None = None,
    *,
    axis: int = -1,
    dtype: DTypeLike | None = None,
    casting: str = "same_kind",
) -> Any:
    """Multiply vectors along an axis, the first conjugated where it is complex, as `numpy.vecdot` does.

    Parameters
    ----------
    x1, x2 : array_like
        Of equal length along ``axis``; the other dimensions broadcast.
    out : ndarray, optional
        Where the result goes.
    axis : int, default -1
        The axis that holds the vectors.
    dtype, casting
        See `matmul`.

    Returns
    -------
    ndarray or scalar
        The broadcast shape without ``axis``.

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.
    numpy.exceptions.AxisError
        The axis is out of range.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has; vecdot(x, x) is real.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> float(ops.vecdot(np.array([1.0, 2.0]), np.array([3.0, 4.0])))
    11.0
    """
    a, b = _operands(x1, x2, "vecdot")
    _check_dimensions((a, 1), (b, 1), "vecdot")
    left, right = _with_axis_last(_conjugated(a), axis), _with_axis_last(b, axis)
    return _multiply(left[..., np.newaxis, :], right[..., np.newaxis], (-2, -1), out, dtype, casting, "vecdot", (a, b))


def dot(a: ArrayLike, b: ArrayLike, out: Array | None = None) -> Any:
    """Multiply two arrays over the last axis of the first and the last but one of the second, as `numpy.dot` does.

    Parameters
    ----------
    a, b : array_like
        A 0-d operand multiplies every element of the other.
    out : ndarray, optional
        Where the result goes: C-ordered and of the result's very dtype, as NumPy wants it here.

    Returns
    -------
    ndarray or scalar
        Shape ``a.shape[:-1] + b.shape[:-2] + b.shape[-1:]``.

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.dot(np.eye(2), np.ones((2, 2)))
    array([[1., 1.],
           [1., 1.]])
    """
    left, right = _operands(a, b, "dot")
    if left.ndim == 0 or right.ndim == 0:
        return _contracted(left, right, ((), ()), out, "dot")
    return _contracted(left, right, ((left.ndim - 1,), (max(right.ndim - 2, 0),)), out, "dot")


def inner(a: ArrayLike, b: ArrayLike, /) -> Any:
    """Multiply two arrays over their last axes, as `numpy.inner` does.

    Parameters
    ----------
    a, b : array_like
        Of equal length along the last axis; a 0-d operand multiplies every element of the other.

    Returns
    -------
    ndarray or scalar
        Shape ``a.shape[:-1] + b.shape[:-1]``.

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.inner(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 1.0]))
    array([3., 7.])
    """
    left, right = _operands(a, b, "inner")
    if left.ndim == 0 or right.ndim == 0:
        return _contracted(left, right, ((), ()), None, "inner")
    return _contracted(left, right, ((left.ndim - 1,), (right.ndim - 1,)), None, "inner")


def outer(a: ArrayLike, b: ArrayLike, out: Array | None = None) -> Any:
    """Multiply each element of one array with each of another, as `numpy.outer` does.

    Parameters
    ----------
    a, b : array_like
        Flattened if they have more than one dimension.
    out : ndarray, optional
        Where the result goes.

    Returns
    -------
    ndarray
        Shape (a.size, b.size).

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.

    Notes
    -----
    *Determinism:* products of one term each: the bits of a multiplication, but that -0.0 becomes +0.0, because
    the chain begins with +0.0. *Threads:* as for `matmul`.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.outer(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    array([[3., 4.],
           [6., 8.]])
    """
    left, right = (operand.view(np.ndarray) for operand in _operands(a, b, "outer"))
    return _multiply(left.reshape(-1, 1), right.reshape(1, -1), (), out, None, "same_kind", "outer", (left, right))


def tensordot(a: ArrayLike, b: ArrayLike, axes: _Axes = 2) -> Any:
    """Multiply two arrays over any of their axes, as `numpy.tensordot` does.

    Parameters
    ----------
    a, b : array_like
        The operands.
    axes : int or (axes of a, axes of b), default 2
        The axes to sum over, pair by pair; an int n means the last n of ``a`` and the first n of ``b``. The terms
        count in C order of these axes, as they are listed.

    Returns
    -------
    ndarray or scalar
        The other axes of ``a``, then those of ``b``.

    Raises
    ------
    ShapeMismatchError, UnsupportedDTypeError, UnsupportedArrayError, TypeError, ValueError, MemoryError
        As `matmul` does.
    numpy.exceptions.AxisError
        An axis is out of range.

    Notes
    -----
    *Determinism:* and *Threads:* as for `matmul`, whose bits it has.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> ops.tensordot(np.ones((2, 3, 4)), np.ones((4, 3)), axes=((1, 2), (1, 0)))
    array([12., 12.])
    """
    left, right = _operands(a, b, "tensordot")
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(left.ndim, right.ndim):
            msg = (
                f"`axes` of tensordot must be from 0 to {min(left.ndim, right.ndim)} for {left.ndim}-d and "
                f"{right.ndim}-d arrays, got {axes}; pass one of those, or two lists of axes"
            )
            raise ShapeMismatchError(msg)
        pairs = (tuple(range(left.ndim - axes, left.ndim)), tuple(range(axes)))
    else:
        try:
            first, second = axes
        except (TypeError, ValueError) as exc:
            msg = f"`axes` of tensordot must be an int or two lists of axes, got {axes!r}; pass one of those"
            raise type(exc)(msg) from None
        pairs = (
            np.lib.array_utils.normalize_axis_tuple(first, left.ndim, "axes"),
            np.lib.array_utils.normalize_axis_tuple(second, right.ndim, "axes"),
        )
    return _contracted(left, right, pairs, None, "tensordot")


def _operands(x1: ArrayLike, x2: ArrayLike, name: str) -> tuple[Array, Array]:
    return as_array(x1, name), as_array(x2, name)


def _conjugated(array: Array) -> Array:
    return array.conj() if array.dtype.kind == "c" else array


def _with_axis_last(array: Array, axis: int) -> Array:
    position = normalize_axis(axis, array.ndim, "vecdot")
    return array if position == array.ndim - 1 else np.moveaxis(array, position, -1)


def _check_dimensions(first: tuple[Array, int], second: tuple[Array, int], name: str) -> None:
    """Check that both operands have as many dimensions as the operation needs."""
    if any(array.ndim < needed for array, needed in (first, second)):
        msg = (
            f"{name} takes arrays of at least {first[1]} and {second[1]} dimensions, got shapes {first[0].shape} and "
            f"{second[0].shape}; add an axis with numpy.newaxis"
        )
        raise ShapeMismatchError(msg)


def _contracted(a: Array, b: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], out: Array | None, name: str) -> Any:
    """Multiply over pairs of axes: one product of matrices."""
    over_a, over_b = axes
    lengths = [a.shape[axis] for axis in over_a]
    if lengths != [b.shape[axis] for axis in over_b]:
        msg = (
            f"the axes that {name} sums over must have equal lengths, got axes {over_a} of shape {a.shape} and "
            f"{over_b} of shape {b.shape}; transpose or reshape an operand"
        )
        raise ShapeMismatchError(msg)
    kept_a = [axis for axis in range(a.ndim) if axis not in over_a]
    kept_b = [axis for axis in range(b.ndim) if axis not in over_b]
    n_terms = math.prod(lengths)
    shape = [a.shape[axis] for axis in kept_a] + [b.shape[axis] for axis in kept_b]
    m, n = math.prod(shape[: len(kept_a)]), math.prod(shape[len(kept_a) :])
    left = a.view(np.ndarray).transpose((*kept_a, *over_a)).reshape(m, n_terms)
    right = b.view(np.ndarray).transpose((*over_b, *kept_b)).reshape(n_terms, n)
    if out is None:
        result = _multiply(left, right, (), None, None, "same_kind", name, (left, right)).reshape(shape)
        if name != "tensordot" and shape:  # NumPy's tensordot makes plain arrays, the others numpy.matrix
            result = as_subclass(result, (a, b))
        return result if shape or name == "tensordot" else result[()]  # NumPy's tensordot alone gives 0-d arrays
    _target(out, (), name)
    dtype = np.result_type(a, b)
    if out.shape != tuple(shape) or out.dtype != dtype or not out.flags.c_contiguous:
        msg = (
            f"`out` of {name} must be C-ordered, of the result's shape {tuple(shape)} and dtype {dtype}, got "
            f"{out.shape} of {out.dtype}; allocate it so, or leave it out"
        )
        raise ValueError(msg)
    _multiply(left, right, (), out.reshape(m, n), None, "same_kind", name, (a, b))
    return out


def _multiply(
    a: Array,
    b: Array,
    dropped: tuple[int, ...],
    out: Array | None,
    dtype: DTypeLike | None,
    casting: Any,
    name: str,
    given: tuple[Array, Array],
) -> Any:
    """Validate, cast, broadcast, allocate and delegate: c = a b, of whose shape the axes ``dropped`` are left out."""
    check_casting(casting)
    wanted = given[0].dtype
    if dtype is not None or wanted != given[1].dtype or not wanted.isnative:
        wanted = np.result_type(*given) if dtype is None else np.result_type(np.dtype(dtype))  # in native byte order
        check_casts(given, wanted, casting)
    if not _has_kernel(wanted):
        msg = (
            f"{name} takes booleans, integers, float16, bfloat16, float32, float64, complex64 and complex128, got "
            f"{wanted}; convert the operands with astype first"
        )
        raise UnsupportedDTypeError(msg)
    if a.shape[-1] != b.shape[-2]:
        msg = (
            f"the lengths that {name} sums over must be equal, got {a.shape[-1]} and {b.shape[-2]} for shapes "
            f"{given[0].shape} and {given[1].shape}; transpose or reshape an operand"
        )
        raise ShapeMismatchError(msg)
    stack = a.shape[:-2]
    try:
        target = None if out is None else _target(out, dropped, name)
        if stack != b.shape[:-2] or (target is not None and stack != target.shape[:-2]):
            others = () if target is None else (target.shape[:-2],)
            stack = np.broadcast_shapes(stack, b.shape[:-2], *others)
    except ValueError as exc:
        msg = (
            f"the leading dimensions of {name} must broadcast, got shapes {given[0].shape} and {given[1].shape}"
            f"{'' if out is None else f' and {out.shape} of out'}; reshape an operand ({exc})"
        )
        raise ShapeMismatchError(msg) from None
    shape = (*stack, a.shape[-2], b.shape[-1])
    if target is not None and target.shape != shape:
        msg = f"`out` of {name} must have the shape of the result, got {target.shape} for {shape}; allocate it so"
        raise ShapeMismatchError(msg)
    if target is not None and target.dtype != wanted and not np.can_cast(wanted, target.dtype, casting):
        msg = f"cannot cast the result of {name} from {wanted} to {target.dtype} under casting={casting!r}; pass dtype="
        raise TypeError(msg)

    backend = dispatch.backend_of(given)
    left, right = _operand(a, wanted, stack), _operand(b, wanted, stack)
    is_direct = (
        target is not None
        and target.dtype == wanted
        and target.dtype.isnative
        and not may_overlap(target, (left, right))
        and (target.flags.c_contiguous or not may_overlap_itself(target))
    )
    result = target if target is not None and is_direct else backend.empty(shape, wanted)
    backend.matmul(left, right, result)
    if target is not None:
        if not is_direct:
            _convert(target, result, casting)
        return out
    if dropped:
        result = result[_WITHOUT_AXES[dropped]]
    return as_subclass(result, given) if result.ndim else result[()]


def _target(out: Any, dropped: tuple[int, ...], name: str) -> Array:
    """Return the output with the axes that an operand lacks."""
    if not isinstance(out, np.ndarray):
        msg = f"`out` of {name} must be an ndarray, got {type(out).__name__}; allocate one of the result's shape"
        raise TypeError(msg)
    if not out.flags.writeable:
        msg = f"`out` of {name} must be writable, got a read-only array; pass a copy or set its writeable flag"
        raise ValueError(msg)
    if dropped and out.ndim + len(dropped) < 2:
        msg = f"`out` of {name} must have the shape of the result, got {out.shape}; allocate it so"
        raise ShapeMismatchError(msg)
    target: Array = out.view(np.ndarray)[_WITH_AXES[dropped]]
    return target


@functools.cache
def _has_kernel(dtype: np.dtype[Any]) -> bool:
    return dtype.char in "?bBhHiIlLqQefdFD" or dtype.name == "bfloat16"


def _operand(array: Array, dtype: np.dtype[Any], stack: tuple[int, ...]) -> Array:
    """Return an operand as it is multiplied: in its dtype, in native byte order, with the whole stack's dimensions."""
    operand = array.view(np.ndarray)
    if operand.dtype != dtype:  # another byte order too
        operand = np.empty(array.shape, dtype)
        _convert(operand, array.view(np.ndarray), "unsafe")  # what may be cast has been checked
    return operand if operand.shape[:-2] == stack else np.broadcast_to(operand, (*stack, *operand.shape[-2:]))


def _convert(target: Array, values: Array, casting: Any) -> None:
    """Copy into another dtype, to nearest whatever the caller's mode, and without a report of errors."""
    with np.errstate(all="ignore"):
        call_in_default_environment(functools.partial(np.copyto, target, values, casting=casting))
