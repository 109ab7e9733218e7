"""Scaling of inputs: statistics of the training rows, in float64, applied in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Float32Array
from tapeline.store import Shards
from tapeline.windows.index import WindowIndex

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Normaliser:
    """Scales each column to mean 0 and standard deviation 1 over the rows it was fitted on.

    A column that is constant there becomes 0 everywhere.

    Attributes:
        mean: float64 `[columns]`.
        std: float64 `[columns]`, of the population; 0 for a constant column.
        num_rows: how many rows it was fitted on.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    num_rows: int

    @classmethod
    def fit(cls, shards: Shards, index: WindowIndex) -> Normaliser:
        """Fit on the rows that the windows of `index` read, each once: pass the training index.

        Two passes in float64: float32 sums are wrong from about 2^25 rows on, and the one-pass
        formula cancels where the mean is large against the deviation.

        Raises:
            WindowError: the index is of another store, or a column's range is too wide or too
                narrow to be scaled in float32.
        """
        index.check_within(shards)
        num = sum(stop - start for _, start, stop in index.input_ranges())
        total = np.zeros(shards.mm.shape[1])
        for rows in _chunks(shards, index):
            total += rows.sum(axis=0, dtype=np.float64)
        mean = total / num
        squares = np.zeros_like(mean)
        low, high = np.full_like(mean, np.inf), np.full_like(mean, -np.inf)
        for rows in _chunks(shards, index):
            squares += np.square(rows.astype(np.float64) - mean).sum(axis=0)
            low, high = np.minimum(low, rows.min(axis=0)), np.maximum(high, rows.max(axis=0))
        # From 2^29 rows on, the sum of a constant is rounded; its range is exactly 0.
        std = np.where(low == high, 0.0, np.sqrt(squares / num))
        limit = float(np.finfo(np.float32).max)
        wrong = (high - low > limit) | ((std > 0) & (std < 1 / limit))
        if wrong.any():
            column = int(np.argmax(wrong))
            raise WindowError(
                f"column {shards.columns[column]}",
                expected="values that differ by 0, or by what float32 can divide by",
                found=f"{low[column]:g} to {high[column]:g}",
                fix="Give the column another unit, or leave it out",
            )
        return cls(mean, std, num)

    def factors(self) -> tuple[Float32Array, Float32Array]:
        """What is subtracted and what is multiplied by, float32 `[columns]` each.

        Scaled values are `(x − mean) · (1 / std)`, each operation rounded to float32.
        """
        inverse = np.divide(1.0, self.std, out=np.zeros_like(self.std), where=self.std > 0)
        return self.mean.astype(np.float32), inverse.astype(np.float32)

    def __call__(self, x: Float32Array) -> Float32Array:
        """Scale float32 `[…, k · columns]`: rows of columns one after the other."""
        mean, inverse = self.factors()
        if x.shape[-1] % len(mean):
            raise WindowError(
                "normaliser",
                expected=f"rows of {len(mean)} columns",
                found=f"a last axis of {x.shape[-1]}",
                fix="Scale batches of the store that the normaliser was fitted on",
            )
        repeats = x.shape[-1] // len(mean)
        scaled: Float32Array = (x - np.tile(mean, repeats)) * np.tile(inverse, repeats)
        return scaled

    def as_dict(self) -> dict[str, Any]:
        """The statistics as JSON can hold them; `from_dict` gives back the same bits."""
        return {
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "num_rows": self.num_rows,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Normaliser:
        """The normaliser that `as_dict` described."""
        return cls(
            np.array(values["mean"], np.float64),
            np.array(values["std"], np.float64),
            int(values["num_rows"]),
        )


def _chunks(shards: Shards, index: WindowIndex) -> Iterator[Float32Array]:
    """The training rows, a bounded number at a time."""
    for session, start, stop in index.input_ranges():
        values = shards.values(session)
        for low in range(start, stop, _CHUNK_ROWS):
            yield values[low : min(low + _CHUNK_ROWS, stop)]
