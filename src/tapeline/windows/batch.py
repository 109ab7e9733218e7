"""Batches: windows and targets as arrays, window by window or in one gather, of equal bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.index import WindowIndex, whole
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
        WindowError: a window or its target doesn't lie within its session, or touches a row that
            is marked invalid.
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

    Raises:
        WindowError: T, horizon or target_col outside its range, or a scale of other columns.
    """

    def __init__(
        self,
        shards: Shards,
        T: int = 20,
        horizon: int = 10,
        target_col: int = 0,
        scale: Normaliser | None = None,
    ) -> None:
        self.shards = shards
        self.num_columns = shards.mm.shape[1]
        _check_shape(self.num_columns, T, horizon, target_col)
        if scale is not None and len(scale.mean) != self.num_columns:
            raise WindowError(
                "normaliser",
                expected=f"one of {self.num_columns} columns, as the store has",
                found=f"one of {len(scale.mean)}",
                fix="Fit the normaliser on this store",
            )
        self.T, self.horizon = T, horizon
        self._flat = shards.mm.reshape(-1)
        self._offsets = shards.offsets
        self._target = np.array([T, horizon, target_col], np.int64)
        self._scaling = (
            _NO_SCALING
            if scale is None
            else np.stack([np.tile(factor, T) for factor in scale.factors()])
        )

    def check(self, index: WindowIndex) -> None:
        """Raise unless the windows of `index` are this source's: same shape, and in its store.

        Raises:
            WindowError: another T or horizon, or a window that the store doesn't hold.
        """
        if (index.T, index.horizon) != (self.T, self.horizon):
            raise WindowError(
                "windows",
                expected=f"T {self.T} and horizon {self.horizon}, as the batches have",
                found=f"T {index.T} and horizon {index.horizon}",
                fix="Give the sampler and the batches the same T and horizon",
            )
        index.check_within(self.shards)

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

        Raises:
            WindowError: `out` has another shape or dtype.
        """
        x, y = self.empty(len(starts)) if out is None else out
        # The compiled loop writes without looking: this keeps it inside the memory.
        fitting = (len(starts), self.T * self.num_columns), (len(starts),)
        if (x.shape, y.shape) != fitting or {x.dtype, y.dtype} != {np.dtype(np.float32)}:
            raise WindowError(
                "memory for the batch",
                expected=f"float32 of shapes {list(fitting[0])} and {list(fitting[1])}",
                found=f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}",
                fix=f"Take it from `BatchSource.empty({len(starts)})`",
            )
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
    _check_shape(shards.mm.shape[1], T, horizon, target_col)
    which, first = which.astype(np.int64), first.astype(np.int64)
    known = (which >= 0) & (which < len(shards))
    rows = shards.lengths[np.where(known, which, 0)]
    wrong = ~known | (first < 0) | (first > rows - T - horizon)  # a sum might overflow
    if wrong.any():
        b = int(np.argmax(wrong))
        raise WindowError(
            f"window {b} of the batch",
            expected=f"{T + horizon} rows within one of {len(shards)} sessions",
            found=f"session {which[b]} of {rows[b] if known[b] else 0} rows, start {first[b]}",
            fix="Draw windows from a sampler made for this store",
        )
    _check_valid(shards, which, first, T + horizon)
    return which, first


def _check_shape(num_columns: int, T: int, horizon: int, target_col: int) -> None:
    whole("T", T)
    whole("horizon", horizon)
    if whole("target_col", target_col, 0) >= num_columns:
        raise WindowError(
            "target_col",
            expected=f"0 to {num_columns - 1}, a column of the store",
            found=str(target_col),
            fix="Name the column with `Shards.column`",
        )


def _check_valid(shards: Shards, sessions: Int64Array, starts: Int64Array, span: int) -> None:
    """Raise if a window touches a row that is marked invalid."""
    marked = [
        (entry.offset + start, entry.offset + stop)
        for entry in shards.index.sessions
        for start, stop in entry.invalid
    ]
    if not marked:
        return
    low, high = np.array(marked, np.int64).T
    first = shards.offsets[sessions] + starts
    after = np.searchsorted(high, first, side="right")  # the first range that ends behind a start
    touched = np.append(low, np.iinfo(np.int64).max)[after] < first + span
    if touched.any():
        b = int(np.argmax(touched))
        row = int(low[after[b]] - shards.offsets[sessions[b]])
        raise WindowError(
            f"window {b} of the batch",
            expected=f"{span} valid rows from start {starts[b]} of session {sessions[b]}",
            found=f"rows marked invalid from row {row}",
            fix="Make the sampler from `WindowIndex(shards, T, horizon)` of this store",
        )
