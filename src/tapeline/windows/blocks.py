"""Blocks: evenly spaced window starts, many in one row of a table.

Covers the arithmetic of an index. Does not know stores, sessions' names or why a window is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tapeline.session import Int64Array


class Part(NamedTuple):
    """Rows `lows[s]` … `highs[s] − 1` of each session s; `cuts` are the lows before embargo."""

    cuts: Int64Array
    lows: Int64Array
    highs: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Windows starting at rows `firsts[b] + k · stride` of session `sessions[b]`, k < `counts[b]`.

    Attributes:
        sessions, firsts, counts: int64 `[blocks]`, in the order of session and row.
        stops: int64 `[blocks]`, the row that a block's windows and targets lie before.
        stride: rows from one start to the next.
        reach: rows that each window needs, up to the last target that must exist.
        ends: int64 `[blocks]`, windows up to the end of each block.
    """

    sessions: Int64Array
    firsts: Int64Array
    counts: Int64Array
    stops: Int64Array
    stride: int
    reach: int
    ends: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        held = self.counts > 0
        for name in ("sessions", "firsts", "counts", "stops"):
            object.__setattr__(self, name, getattr(self, name)[held])
        object.__setattr__(self, "ends", np.cumsum(self.counts))

    @property
    def num_windows(self) -> int:
        """Windows of all blocks."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def lasts(self) -> Int64Array:
        """The last start of each block."""
        return self.firsts + (self.counts - 1) * self.stride

    def locate(self, windows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Sessions and starts of windows, which are numbered over all blocks."""
        block = np.searchsorted(self.ends, windows, side="right")
        within = windows - (self.ends[block] - self.counts[block])
        return self.sessions[block], self.firsts[block] + within * self.stride

    def starting_before(self, rows: Int64Array) -> Int64Array:
        """How many windows of each block start before a row of it, int64 `[blocks]`."""
        before: Int64Array = np.clip(-(-(rows - self.firsts) // self.stride), 0, self.counts)
        return before

    def within(self, part: Part) -> tuple[Blocks, dict[str, Int64Array]]:
        """The windows whose whole reach lies in a part.

        Returns:
            Them, and how many of each of these blocks are lost, by reason.
        """
        cut, low, high = (edges[self.sessions] for edges in part)
        stops = np.minimum(self.stops, high)
        before, ends = self.starting_before(low), self.starting_before(stops - self.reach + 1)
        kept = np.maximum(ends - before, 0)
        but_for_embargo = np.maximum(ends - self.starting_before(cut), 0)
        ended = self.starting_before(cut - self.reach + 1)
        begun_after = self.counts - self.starting_before(high)
        elsewhere = np.where(cut < high, ended + begun_after, self.counts)
        lost = {
            "other_part": elsewhere,
            "purge": self.counts - elsewhere - but_for_embargo,
            "embargo": but_for_embargo - kept,
        }
        firsts = self.firsts + before * self.stride
        return Blocks(self.sessions, firsts, kept, stops, self.stride, self.reach), lost


def last_at_or_before(
    sessions: Int64Array, firsts: Int64Array, wanted: Int64Array, rows: Int64Array
) -> Int64Array:
    """For each wanted (session, row), the last of sorted (session, first); −1 for none."""
    width = 1 + max(int(firsts.max(initial=0)), int(rows.max(initial=0)))
    return np.searchsorted(sessions * width + firsts, wanted * width + rows, side="right") - 1


def per_session(sessions: Int64Array, counts: Int64Array, num_sessions: int) -> Int64Array:
    """The sum of `counts` for each session, int64 `[num_sessions]`."""
    totals = np.zeros(num_sessions, np.int64)
    np.add.at(totals, sessions, counts)
    return totals
