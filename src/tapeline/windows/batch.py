"""Batches: windows and targets as arrays, window by window or in one gather, of equal bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.kernel import gather
from tapeline.windows.scale import Normaliser

_NO_SCALING = np.empty((2, 0), np.float32)


def make_batch(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int = 20,
    horizon: int = 10,
    target_col: int = 0,
) -> tuple[Float32Array, Float32Array]:
    """A batch, window by window: slow, obvious, and what `make_batch_vec` is tested against.

    Args:
        shards: the store.
        sessions: whole numbers `[batch]`, the session of each window.
        starts: whole numbers `[batch]`, each window's first row within its session.
        T: rows in a window.
        horizon: rows from a window's last row to its target's.
        target_col: the column whose change is the target.

    Returns:
        x, float32 `[batch, T · columns]`, and y, float32 `[batch]`: the column at row
        `start + T + horizon − 1` minus the same column at row `start + T − 1`.

    Raises:
        WindowError: a window or its target doesn't lie within its session.
    """
    sessions, starts = _checked(shards, sessions, starts, T, horizon, target_col)
    x = np.empty((len(starts), T * shards.mm.shape[1]), np.float32)
    y = np.empty(len(starts), np.float32)
    for b, (session, start) in enumerate(zip(sessions, starts, strict=True)):
        values = shards.values(session)
        x[b] = values[start : start + T].reshape(-1)
        y[b] = values[start + T + horizon - 1, target_col] - values[start + T - 1, target_col]
    return x, y


def make_batch_vec(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int = 20,
    horizon: int = 10,
    target_col: int = 0,
) -> tuple[Float32Array, Float32Array]:
    """The same batch as `make_batch`, bit for bit, in one gather.

    To gather many batches into the same memory, keep a `BatchSource`.
    """
    sessions, starts = _checked(shards, sessions, starts, T, horizon, target_col)
    source = BatchSource(shards, T, horizon, target_col)
    return source.batch(sessions, starts)


class BatchSource:
    """Gathers batches of one shape from a store, into memory that is handed in or fresh.

    Args:
        shards: the store.
        T, horizon, target_col: as in `make_batch`.
        scale: scales x on the way; y stays in the column's own units.
    """

    def __init__(
        self,
        shards: Shards,
        T: int = 20,
        horizon: int = 10,
        target_col: int = 0,
        scale: Normaliser | None = None,
    ) -> None:
        self.num_columns = shards.mm.shape[1]
        self.T = T
        self._flat = shards.mm.reshape(-1)
        self._offsets = shards.offsets
        self._target = np.array([T, horizon, target_col], np.int64)
        self._scaling = (
            _NO_SCALING
            if scale is None
            else np.stack([np.tile(factor, T) for factor in scale.factors()])
        )

    def empty(self, batch: int) -> tuple[Float32Array, Float32Array]:
        """Memory for a batch: x `[batch, T · columns]` and y `[batch]`."""
        width = self.T * self.num_columns
        return np.empty((batch, width), np.float32), np.empty(batch, np.float32)

    def batch(
        self,
        sessions: Int64Array,
        starts: Int64Array,
        out: tuple[Float32Array, Float32Array] | None = None,
    ) -> tuple[Float32Array, Float32Array]:
        """Gather windows that are known to exist, such as a sampler's.

        Args:
            sessions, starts: int64 `[batch]`. Not checked: `make_batch_vec` checks.
            out: memory from `empty`, to be overwritten; fresh memory by default.

        Returns:
            x and y.
        """
        x, y = self.empty(len(starts)) if out is None else out
        rows = self._offsets[sessions] + starts
        gather(self._flat, rows, self.num_columns, self._target, self._scaling, x, y)
        return x, y


def _checked(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int,
    horizon: int,
    target_col: int,
) -> tuple[Int64Array, Int64Array]:
    """The windows as int64 arrays, once it is certain that all of them exist."""
    which, first = np.asarray(sessions), np.asarray(starts)
    if (
        which.shape != first.shape
        or which.ndim != 1
        or {which.dtype.kind, first.dtype.kind} - {*"iu"}
    ):
        raise WindowError(
            "batch",
            expected="as many sessions as starts, whole numbers",
            found=f"{which.dtype} {list(which.shape)} and {first.dtype} {list(first.shape)}",
            fix="Pass what `WindowSampler.next()` returned",
        )
    if T < 1 or horizon < 1 or not 0 <= target_col < shards.mm.shape[1]:
        raise WindowError(
            "batch",
            expected=f"T and horizon from 1, target_col from 0 to {shards.mm.shape[1] - 1}",
            found=f"T {T}, horizon {horizon}, target_col {target_col}",
            fix="Correct the one outside its range",
        )
    which, first = which.astype(np.int64), first.astype(np.int64)
    known = (which >= 0) & (which < len(shards))
    rows = shards.lengths[np.where(known, which, 0)]
    wrong = ~known | (first < 0) | (first + T + horizon > rows)
    if wrong.any():
        b = int(np.argmax(wrong))
        raise WindowError(
            f"window {b} of the batch",
            expected=f"{T + horizon} rows within one of {len(shards)} sessions",
            found=f"session {which[b]} of {rows[b] if known[b] else 0} rows, start {first[b]}",
            fix="Draw windows from a sampler made for this store",
        )
    return which, first
