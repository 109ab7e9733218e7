"""Batches: windows and targets as arrays, window by window or in one gather, of equal bits.

Covers NumPy memory on the host. Tensors and devices are `device.py`'s, threads the loader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.index import WindowIndex, whole
from tapeline.windows.kernel import gather, gather_drawn
from tapeline.windows.memory import on_large_pages
from tapeline.windows.order import Draw
from tapeline.windows.scale import Normaliser

Dtype = Literal["float32", "bfloat16"]
Layout = Literal["flat", "rows"]
_SCALED_ONCE_BYTES = 1 << 24  # 16 MiB: beyond, the memory is worth more than the time
_NO_SCALING = np.empty((2, 0), np.float32)
_FLOAT32 = np.dtype(np.float32)


def make_batch(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int = 20,
    horizon: int | Sequence[int] = 10,
    target_col: int = 0,
) -> tuple[Float32Array, Float32Array]:
    """A batch, window by window: slow, obvious, and what `make_batch_vec` is tested against.

    Args:
        shards: the store.
        sessions: whole numbers `[batch]`, the session of each window.
        starts: whole numbers `[batch]`, each window's first row within its session.
        T: rows in a window.
        horizon: rows from a window's last row to its target's; several give several targets.
        target_col: the column whose change is the target.

    Returns:
        x, float32 `[batch, T · columns]`, and y, float32 `[batch]`: the column at row
        `start + T + horizon − 1` minus the same column at row `start + T − 1`. For a sequence of
        horizons y is `[batch, horizons]`, in its order.

    Raises:
        WindowError: a window or its target doesn't lie within its session, or touches a row that
            is marked invalid.
    """
    sessions, starts = _checked(shards, sessions, starts, T, horizon, target_col)
    x = np.empty((len(starts), T * shards.mm.shape[1]), np.float32)
    horizons = _several(horizon)
    y = np.empty((len(starts), len(horizons)), np.float32)
    for b, (session, start) in enumerate(zip(sessions, starts, strict=True)):
        values = shards.values(session)
        x[b] = values[start : start + T].reshape(-1)
        for h, rows in enumerate(horizons):
            y[b, h] = values[start + T + rows - 1, target_col] - values[start + T - 1, target_col]
    return x, y if isinstance(horizon, Sequence) else y.reshape(-1)


def make_batch_vec(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int = 20,
    horizon: int | Sequence[int] = 10,
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
        T: rows in a window.
        horizon: rows from a window's last row to its target's; several give several targets.
        target_col: the column whose change is the target; several give as many targets for each
            horizon. One number for both gives y `[batch]`, anything else `[batch, targets]`,
            with all columns of the first horizon first.
        scale: scales x on the way; y stays in the column's own units.
        dtype: of x: "float32", or "bfloat16", whose bits NumPy holds as uint16.
        layout: x as "flat" `[batch, T · columns]` or in "rows" `[batch, T, columns]`.

    Raises:
        WindowError: T, horizon, target_col, dtype or layout outside its range, or a scale of
            other columns.
    """

    def __init__(
        self,
        shards: Shards,
        T: int = 20,
        horizon: int | Sequence[int] = 10,
        target_col: int | Sequence[int] = 0,
        scale: Normaliser | None = None,
        dtype: Dtype = "float32",
        layout: Layout = "flat",
    ) -> None:
        self.shards = shards
        self.num_columns = shards.mm.shape[1]
        self.horizons, columns = _several(horizon), _several(target_col)
        for one in self.horizons:
            for column in columns:
                _check_shape(self.num_columns, T, one, column)
        _check_named("dtype", dtype, get_args(Dtype))
        _check_named("layout", layout, get_args(Layout))
        if scale is not None and len(scale.mean) != self.num_columns:
            raise WindowError(
                "normaliser",
                expected=f"one of {self.num_columns} columns, as the store has",
                found=f"one of {len(scale.mean)}",
                fix="Fit the normaliser on this store",
            )
        self.T, self.dtype, self.layout = T, dtype, layout
        self.flat: Float32Array = shards.mm.reshape(-1)
        self.targets = np.array([(h, c) for h in self.horizons for c in columns], np.int64)
        self.scaling: Float32Array = (
            _NO_SCALING
            if scale is None
            else np.stack([np.tile(factor, T) for factor in scale.factors()])
        )
        # A small store is scaled once instead of with every window that a row is in: same bits.
        is_small = scale is not None and self.flat.nbytes <= _SCALED_ONCE_BYTES
        self._inputs = _scaled(shards.mm, scale) if scale is not None and is_small else self.flat
        self._to_scale = _NO_SCALING if is_small else self.scaling
        one = not isinstance(horizon, Sequence) and not isinstance(target_col, Sequence)
        self._y_tail: tuple[int, ...] = () if one else (len(self.targets),)
        self._x_tail = (T * self.num_columns,) if layout == "flat" else (T, self.num_columns)
        self._x_dtype = np.dtype(np.float32 if dtype == "float32" else np.uint16)

    def check(self, index: WindowIndex) -> None:
        """Raise unless the windows of `index` are this source's: same shape, and in its store.

        Raises:
            WindowError: another T or horizon, or a window that the store doesn't hold.
        """
        if (index.T, index.horizons) != (self.T, self.horizons):
            raise WindowError(
                "windows",
                expected=f"T {self.T} and horizon {_list(self.horizons)}, as the batches have",
                found=f"T {index.T} and horizon {_list(index.horizons)}",
                fix="Give the sampler and the batches the same T and horizon",
            )
        index.check_within(self.shards)

    def blocks(self, index: WindowIndex) -> Int64Array:
        """Where the windows of `index` lie in the matrix, int64 `[3, blocks]`, for `draw`.

        For each block the number behind its last window, the row its first window starts at, and
        the rows from one start to the next.
        """
        origins = self.shards.offsets[index.sessions] + index.firsts
        return np.stack([np.cumsum(index.counts), origins, np.full_like(origins, index.stride)])

    def x_shape(self, batch: int) -> tuple[int, ...]:
        """The shape of a batch's x."""
        return (batch, *self._x_tail)

    def y_shape(self, batch: int) -> tuple[int, ...]:
        """The shape of a batch's y."""
        return (batch, *self._y_tail)

    def empty(self, batch: int) -> tuple[npt.NDArray[Any], Float32Array]:
        """Memory for a batch: x and y."""
        x = np.empty(self.x_shape(batch), self._x_dtype)
        return x, np.empty(self.y_shape(batch), np.float32)

    def batch(
        self,
        sessions: Int64Array,
        starts: Int64Array,
        out: tuple[npt.NDArray[Any], Float32Array] | None = None,
    ) -> tuple[npt.NDArray[Any], Float32Array]:
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
        flat_x, flat_y = self._fitting(len(starts), x, y)
        rows = self.shards.offsets[sessions] + starts
        gather(
            self.flat,
            self._inputs,
            rows,
            *self._shape,
            self.targets,
            self._to_scale,
            flat_x,
            flat_y,
        )
        return x, y

    def draw(self, draw: Draw, blocks: Int64Array, x: npt.NDArray[Any], y: Float32Array) -> None:
        """Gather the windows of consecutive positions of an order, drawn in the kernel.

        Args:
            draw: the positions.
            blocks: from `blocks(index)`, of the index that is drawn from.
            x, y: memory of `draw.positions` windows, such as a part of what `empty` gives.

        Raises:
            WindowError: the memory has another shape or dtype.
        """
        flat_x, flat_y = self._fitting(draw.positions, x, y)
        _, first, base, num, bits, keys, replace = draw
        gather_drawn(
            self.flat,
            self._inputs,
            blocks,
            first,
            base,
            num,
            bits,
            keys,
            replace,
            *self._shape,
            self.targets,
            self._to_scale,
            flat_x,
            flat_y,
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_columns, self.T

    def _fitting(
        self, batch: int, x: npt.NDArray[Any], y: Float32Array
    ) -> tuple[npt.NDArray[Any], Float32Array]:
        """The memory as the kernel takes it, once it is certain that it stays inside."""
        wanted = self.x_shape(batch), self.y_shape(batch)
        fitting = (x.shape, y.shape) == wanted and (x.dtype, y.dtype) == (self._x_dtype, _FLOAT32)
        if not fitting or not (x.flags.c_contiguous and y.flags.c_contiguous):
            raise WindowError(
                "memory for the batch",
                expected=f"{self._x_dtype} of shape {list(wanted[0])} and float32 of "
                f"{list(wanted[1])}, contiguous",
                found=f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}",
                fix=f"Take it from `BatchSource.empty({batch})`",
            )
        return x.reshape(batch, self.T * self.num_columns), y.reshape(batch, len(self.targets))


def _scaled(matrix: Float32Array, scale: Normaliser) -> Float32Array:
    mean, inverse = scale.factors()
    scaled: Float32Array = on_large_pages(matrix.nbytes).view(np.float32).reshape(matrix.shape)
    with np.errstate(all="ignore"):  # what isn't finite is of rows that no window touches
        np.subtract(matrix, mean, out=scaled)
        np.multiply(scaled, inverse, out=scaled)
    return scaled.reshape(-1)


def _several(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _check_named(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise WindowError(
            name,
            expected=f"one of {', '.join(known)}",
            found=repr(value),
            fix=f"Choose {known[0]}",
        )


def _checked(
    shards: Shards,
    sessions: npt.ArrayLike,
    starts: npt.ArrayLike,
    T: int,
    horizon: int | Sequence[int],
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
    horizons = _several(horizon)
    for one in horizons:
        _check_shape(shards.mm.shape[1], T, one, target_col)
    span = T + max(horizons, default=0)
    which, first = which.astype(np.int64), first.astype(np.int64)
    known = (which >= 0) & (which < len(shards))
    rows = shards.lengths[np.where(known, which, 0)]
    wrong = ~known | (first < 0) | (first > rows - span)  # a sum might overflow
    if wrong.any():
        b = int(np.argmax(wrong))
        raise WindowError(
            f"window {b} of the batch",
            expected=f"{span} rows within one of {len(shards)} sessions",
            found=f"session {which[b]} of {rows[b] if known[b] else 0} rows, start {first[b]}",
            fix="Draw windows from a sampler made for this store",
        )
    _check_valid(shards, which, first, span)
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
