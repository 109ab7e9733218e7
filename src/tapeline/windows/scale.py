"""Scaling of inputs: statistics of the training rows, in float64, applied in float32.

Covers fitting, applying and keeping. Batches that aren't to be scaled get no normaliser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.index import WindowIndex

Per = Literal["column", "price"]
_CHUNK_ROWS = 1 << 16
_MID = "mid"
_PRICE = re.compile(r"mid|(bid|ask)_price_\d+")  # as the columns of a book are named


@dataclass(frozen=True, slots=True, eq=False)
class Normaliser:
    """Scales each column to mean 0 and standard deviation 1 over the rows it was fitted on.

    A column that is constant there becomes 0 everywhere. Fitted per "price", the prices of a book
    share the mean and deviation of `mid`: their distances stay as they are to each other.

    Attributes:
        mean: float64 `[columns]`.
        std: float64 `[columns]`, of the population; 0 for a constant column.
        num_rows: how many rows it was fitted on.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    num_rows: int

    @classmethod
    def fit(cls, shards: Shards, index: WindowIndex, per: Per = "column") -> Normaliser:
        """Fit on the rows that the windows of `index` read, each once: pass the training index.

        Args:
            shards: the store.
            index: the training windows.
            per: "column", or "price" for `mid`, `bid_price_…` and `ask_price_…` in one block
                with the statistics of `mid`, all others per column.

        Two passes in float64: float32 sums are wrong from about 2^25 rows on, and the one-pass
        formula cancels where the mean is large against the deviation.

        Raises:
            WindowError: the index is of another store, a column's range is too wide or too
                narrow to be scaled in float32, or there is no `mid` to scale prices by.
        """
        block = _price_block(shards, per)
        index.check_within(shards)
        num = index.num_input_rows
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
        if len(block):
            mid = shards.column(_MID)
            mean[block], std[block] = mean[mid], std[mid]
            low[block], high[block] = low[block].min(), high[block].max()
        limit = float(np.finfo(np.float32).max)
        # Neither the distance from the mean, nor that divided by the deviation, may overflow.
        wrong = high - low > limit * np.where(std > 0, np.minimum(std, 1.0), 1.0)
        wrong |= (std > 0) & (std < 1 / limit)
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


def _price_block(shards: Shards, per: Per) -> Int64Array:
    """The columns that share the statistics of `mid`; none where each has its own."""
    if per not in get_args(Per):
        raise WindowError(
            f"normaliser per {per!r}",
            expected=f"one of {', '.join(get_args(Per))}",
            found="another name",
            fix="Scale each column by itself, or the prices of a book together",
        )
    if per == "price" and _MID not in shards.columns:
        raise WindowError(
            "normaliser per price",
            expected=f"a column `{_MID}`",
            found=f"{len(shards.columns)} columns without it",
            fix="Scale per column, or name the columns as `tapeline ingest` does",
        )
    prices = [c for c, name in enumerate(shards.columns) if _PRICE.fullmatch(name)]
    return np.array(prices if per == "price" else [], np.int64)


def _chunks(shards: Shards, index: WindowIndex) -> Iterator[Float32Array]:
    """The training rows, a bounded number at a time."""
    for session, rows in index.input_rows(_CHUNK_ROWS):
        yield shards.values(session)[rows]
