"""The sampler: batches of windows in a shuffled order, with a state of a few integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from tapeline.errors import WindowError
from tapeline.session import Int64Array
from tapeline.windows import order
from tapeline.windows.index import WindowIndex
from tapeline.windows.plan import Plan, checked_batch


class WindowSampler:
    """Draws batches without replacement: in each epoch every window comes exactly once.

    Epochs follow each other without a seam. A batch may hold the end of one and the start of the
    next, so no window is dropped or repeated, and every batch has the same size.

    Args:
        lengths: rows of each session, or a finished `WindowIndex`, which then decides T and
            horizon.
        T: rows in a window.
        horizon: rows from a window's last row to its target's; one or several.
        batch: windows per batch.
        seed: of the order; any whole number.

    Raises:
        WindowError: `batch` below 1 or of more than 2³¹ − 1 rows, a seed that isn't whole, or no
            session is long enough for one window.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.ArrayLike | WindowIndex,
        T: int = 20,
        horizon: int | Sequence[int] = 10,
        batch: int = 256,
        seed: int = 0,
    ) -> None:
        self.index = (
            lengths
            if isinstance(lengths, WindowIndex)
            else WindowIndex.from_lengths(lengths, T, horizon)
        )
        self.batch = checked_batch(batch, self.index.T)
        if not _is_whole(seed):
            raise WindowError(
                "seed", expected="a whole number", found=repr(seed), fix="Choose another seed"
            )
        self.seed = int(seed)
        self._position = 0  # windows delivered since the start of epoch 0

    @property
    def position(self) -> int:
        """Windows delivered since the start of epoch 0."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next window belongs to."""
        return self._position // self.index.num_windows

    def next(self) -> tuple[Int64Array, Int64Array]:
        """The next batch: sessions and first rows, int64 `[batch]` each."""
        batch = self.batch_at(self._position)
        self.advance()
        return batch

    def advance(self) -> int:
        """Count one batch as delivered; returns the new position."""
        self._position += self.batch
        return self._position

    def batch_at(self, position: int) -> tuple[Int64Array, Int64Array]:
        """The batch that `next` gives at `position`, without moving: for reading ahead."""
        return self.index.locate(self._windows(position, position + self.batch))

    def _windows(self, start: int, stop: int) -> Int64Array:
        num, shuffled = self.index.num_windows, order.Shuffled(self.seed)
        spans = Plan(num, self.batch).spans(start, stop)
        return np.concatenate([shuffled.windows(num, *span) for span in spans])

    def state(self) -> dict[str, Any]:
        """Everything that decides the rest of the order, as JSON can hold it."""
        return {"position": self._position, "seed": self.seed, **self._identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken; the seed is taken over too.

        Raises:
            WindowError: the state belongs to other windows, another batch size or another order;
                nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise WindowError(
                "sampler state",
                expected="a mapping of names to values",
                found=repr(state)[:80],
                fix="Pass what `WindowSampler.state()` returned",
            )
        differing = {
            name: (state.get(name), value)
            for name, value in self._identity().items()
            if state.get(name) != value or isinstance(state[name], bool)
        }
        if differing:
            saved = ", ".join(f"{name} {old}" for name, (old, _) in differing.items())
            ours = ", ".join(f"{name} {new}" for name, (_, new) in differing.items())
            raise WindowError(
                "sampler state",
                expected=f"one of this sampler's windows ({ours})",
                found=saved,
                fix="Resume with the data, T, horizon and batch of the saved run, or start anew",
            )
        position, seed = state.get("position"), state.get("seed")
        if not _is_whole(position) or not _is_whole(seed) or position < 0:
            raise WindowError(
                "sampler state",
                expected="a whole position, 0 or more, and a whole seed",
                found=f"position {position}, seed {seed}",
                fix="Pass what `WindowSampler.state()` returned",
            )
        self._position, self.seed = int(position), int(seed)

    def _identity(self) -> dict[str, Any]:
        return {
            "T": self.index.T,
            "horizon": self.index.horizon,
            "batch": self.batch,
            "windows": self.index.num_windows,
            "fingerprint": self.index.fingerprint(),
            "order": order.VERSION,
        }


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)
