"""ParallelArrayOps: joins for a loader that wants an object with a cap on threads and an end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np

from accel_ops import dispatch, staging
from accel_ops.cpu import pool
from accel_ops.errors import ShutdownError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["ParallelArrayOps"]

Array = np.ndarray[Any, Any]

# A waiting shutdown still looks up this often: an exception set from another thread does not end a wait.
_POLL_S = 0.02


class _Same:
    def __repr__(self) -> str:
        return "<as the instance's>"


_SAME = _Same()

# Every call that is being made through any instance. A thread that is inside one waits for none: two such threads
# might wait for each other.
_open_calls: dict[_OpenCall, None] = {}


class ParallelArrayOps:
    """Concatenate for a data loader, with a cap on threads of its own. A context manager.

    Parameters
    ----------
    accelerator : None or "cpu" or device, default None
        Whose pinned memory results shall lie in; None and "cpu" mean plain host memory.
    max_workers : int, default 24
        The most threads that a call uses, the calling one included. The budget (`get_num_threads`) holds too.

    Raises
    ------
    BackendUnavailableError
        The accelerator is not there. It is a RuntimeError.
    ValueError
        ``max_workers`` is not a positive integer.

    Notes
    -----
    *Threads:* all instances share the process's pool; an instance has no threads to start or to leak.

    Examples
    --------
    >>> import numpy as np
    >>> import accel_ops as ops
    >>> with ops.ParallelArrayOps(max_workers=4) as joiner:
    ...     joiner.concatenate([np.ones((2, 4)), np.zeros((3, 4))]).shape
    (5, 4)
    """

    # Class attributes, so that __del__ finds them after a failed __init__.
    _closed = False
    _calls: dict[_OpenCall, None]

    def __init__(self, accelerator: object = None, max_workers: int = 24) -> None:
        self._calls = {}
        if (
            isinstance(max_workers, (bool, np.bool))
            or not isinstance(max_workers, (int, np.integer))
            or max_workers < 1
        ):
            msg = f"`max_workers` must be a positive integer, got {max_workers!r}; 24 is the default"
            raise ValueError(msg)
        dispatch.backend_for(accelerator)
        self._accelerator = accelerator
        self._max_workers = int(max_workers)

    def concatenate(
        self,
        arrays: Iterable[ArrayLike],
        axis: SupportsIndex | None = 0,
        min_chunk_size_mb: float | None = 50.0,
        *,
        accelerator: object = _SAME,
        out: Array | None = None,
    ) -> Array:
        """Join arrays along an axis; see `accel_ops.concatenate`.

        Parameters
        ----------
        arrays, axis, out
            As in `accel_ops.concatenate`.
        min_chunk_size_mb : float or None, default 50.0
            No single array is cut into pieces smaller than this, in MiB.
        accelerator : optional
            Overrides the instance's.

        Returns
        -------
        ndarray
            A new C-ordered array, or ``out``.

        Raises
        ------
        ShutdownError
            The instance has been shut down, or was while this call ran (``shutdown(wait=False)``); ``out`` then
            holds a part of the result. It is a RuntimeError.
        Exception
            What `accel_ops.concatenate` raises.

        Notes
        -----
        *Determinism:* and *Threads:* as for `accel_ops.concatenate`, on at most ``max_workers`` threads.
        """
        backend = dispatch.backend_for(self._accelerator if accelerator is _SAME else accelerator)
        call = _OpenCall()
        try:
            _open_calls[call] = None
            self._calls[call] = None  # before the check: a shutdown sees this call, or this call sees the shutdown
            if self._closed:
                msg = "concatenate needs a ParallelArrayOps that has not been shut down; make a new one"
                raise ShutdownError(msg)
            return staging.join(
                backend,
                arrays,
                axis,
                out=out,
                dtype=None,
                casting="same_kind",
                min_chunk_size_mb=min_chunk_size_mb,
                name="concatenate",
                max_workers=self._max_workers,
                call=call.pool_call,
            )
        except pool.CallCancelledError:
            msg = "the ParallelArrayOps was shut down with wait=False during this call; make a new one and repeat"
            raise ShutdownError(msg) from None
        finally:
            self._calls.pop(call, None)
            _open_calls.pop(call, None)
            call.finished.release()

    def shutdown(self, wait: bool = True) -> None:
        """Let no further call begin, and wait for those that run or cut them short.

        Parameters
        ----------
        wait : bool, default True
            True waits until the calls that other threads are making have ended. False lets them end early with
            ShutdownError, and does not wait. Nor does a thread wait that is itself inside a call (in a signal
            handler or a finaliser, say): its call goes on when this returns.

        Notes
        -----
        *Threads:* may be called at any time, from any thread, more than once.
        """
        self._closed = True
        for call in list(self._calls):
            if not wait:
                call.pool_call.cancel()
                continue
            while call in self._calls and call.can_be_waited_for():
                if call.finished.acquire(timeout=_POLL_S):
                    call.finished.release()  # another shutdown may wait for it too
                    break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self._closed = True  # a running call holds the instance, so there is none


class _OpenCall:
    """One call that is being made: by which thread of which process, and when it has ended."""

    def __init__(self) -> None:
        self.pool_call = pool.Call()
        self.finished = threading.Lock()
        self.finished.acquire()
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def can_be_waited_for(self) -> bool:
        """Return whether the call will end while this thread waits.

        It will not where the thread that makes it is this one, or has been lost by a fork or at the end of the
        interpreter. Nor may it where this thread is itself inside a call or a piece of one, which the other may
        be waiting for.
        """
        process, thread = os.getpid(), threading.get_ident()
        if self._process != process or sys.is_finalizing() or pool.is_inside_call():
            return False
        return not any(call._thread == thread and call._process == process for call in list(_open_calls))
