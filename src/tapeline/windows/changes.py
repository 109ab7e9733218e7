"""The targets of all windows of an index, and the moves that windows end in, without the windows.

For what is fitted on training targets, and for predictors that look at one column alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tapeline.session import Float32Array, Int64Array
from tapeline.windows.batch import BatchSource
from tapeline.windows.index import WindowIndex

_CHUNK_WINDOWS = 1 << 18


def changes(source: BatchSource, index: WindowIndex) -> Iterator[Float32Array]:
    """The targets of every window once, in order, float32 `[n, targets]`, a bounded n at a time."""
    for first in range(0, index.num_windows, _CHUNK_WINDOWS):
        windows = np.arange(first, min(first + _CHUNK_WINDOWS, index.num_windows))
        last = _last_values(source, *index.locate(windows))
        yield source.flat[last + source.targets[:, 0] * source.num_columns] - source.flat[last]


def last_moves(source: BatchSource, sessions: Int64Array, starts: Int64Array) -> Float32Array:
    """What each target's column did in the window's last rows, float32 `[n, targets]`.

    Over as many rows as the target's horizon, and over `T − 1` where the window isn't longer than
    that: `move_rows` says over how many. Rows before the window are never read.
    """
    last = _last_values(source, sessions, starts)
    moves: Float32Array = (
        source.flat[last] - source.flat[last - move_rows(source) * source.num_columns]
    )
    return moves


def move_rows(source: BatchSource) -> Int64Array:
    """The rows that `last_moves` are over, int64 `[targets]`."""
    return np.minimum(source.targets[:, 0], source.T - 1)


def _last_values(source: BatchSource, sessions: Int64Array, starts: Int64Array) -> Int64Array:
    """Where each target's column stands in the store at the windows' last rows, `[n, targets]`."""
    rows = source.shards.offsets[sessions] + starts + source.T - 1
    places: Int64Array = (rows * source.num_columns)[:, None] + source.targets[:, 1]
    return places
