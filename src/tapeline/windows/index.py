"""The index: which windows there are, in memory that grows with sessions, not with rows.

Covers counting, finding, and splitting in time. Split and purge act here, before any order
exists: shuffling first and splitting afterwards would leak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

import numpy as np
import numpy.typing as npt
import xxhash

from tapeline.errors import WindowError
from tapeline.session import Int64Array
from tapeline.store import Shards


class WindowIndex:
    """All windows of a store, as blocks of consecutive starts.

    A run of `n` valid rows holds `max(0, n − T − horizon + 1)` windows (formulas.md, section 7).
    A session is one run, or several where rows are marked invalid.

    Args:
        shards: the store.
        T: rows in a window.
        horizon: rows from a window's last row to its target's.

    Attributes:
        sessions, firsts, counts: int64 `[blocks]`; block b holds the windows of session
            `sessions[b]` that start at rows `firsts[b]` … `firsts[b] + counts[b] − 1`.

    Raises:
        WindowError: T or horizon below 1, or no session is long enough for one window.
    """

    def __init__(self, shards: Shards, T: int = 20, horizon: int = 10) -> None:
        runs = [
            (number, start, stop)
            for number, entry in enumerate(shards.index.sessions)
            for start, stop in _gaps(entry.invalid, entry.rows)
        ]
        self._build(runs, len(shards), T, horizon)

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | npt.ArrayLike, T: int = 20, horizon: int = 10
    ) -> WindowIndex:
        """The index of sessions of which only the numbers of rows are known."""
        rows = np.asarray(lengths)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size) or (rows < 0).any():
            raise WindowError(
                "lengths",
                expected="one non-negative whole number of rows per session",
                found=f"{rows.dtype} of shape {list(rows.shape)}, {_short(lengths)}",
                fix="Pass `Shards.lengths`, or a list of whole numbers",
            )
        index = cls.__new__(cls)
        index._build([(s, 0, int(n)) for s, n in enumerate(rows)], len(rows), T, horizon)
        return index

    def _build(
        self, runs: list[tuple[int, int, int]], num_sessions: int, T: int, horizon: int
    ) -> None:
        self.T, self.horizon = whole("T", T), whole("horizon", horizon)
        blocks = [(s, a, b - a - self.span + 1) for s, a, b in runs]
        self._set([block for block in blocks if block[2] > 0])
        if not self.num_windows:
            longest = max((b - a for _, a, b in runs), default=0)
            raise WindowError(
                f"windows of {T} rows with a target {horizon} later",
                expected=f"a session with at least {T + horizon} valid rows in sequence",
                found=f"{longest} in the longest of {num_sessions}",
                fix="Shorten T or horizon, or give longer sessions",
            )

    def _set(self, blocks: list[tuple[int, int, int]]) -> None:
        table = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        self.sessions, self.firsts, self.counts = (np.ascontiguousarray(c) for c in table.T)
        self._ends = np.cumsum(self.counts)

    @property
    def span(self) -> int:
        """Rows from a window's first to its target's, both included: T + horizon."""
        return self.T + self.horizon

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, windows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where windows are.

        Args:
            windows: int64 `[n]`, each in 0…num_windows−1.

        Returns:
            Their sessions and first rows, int64 `[n]` each.
        """
        block = np.searchsorted(self._ends, windows, side="right")
        within = windows - (self._ends[block] - self.counts[block])
        return self.sessions[block], self.firsts[block] + within

    def input_ranges(self) -> Iterator[tuple[int, int, int]]:
        """The rows that some window reads as input: (session, start, stop), none twice."""
        # Blocks never touch: each ends `horizon` rows before a marked row, a close or a cut.
        stops = self.firsts + self.counts + self.T - 1
        return zip(self.sessions.tolist(), self.firsts.tolist(), stops.tolist(), strict=True)

    def split(self, shards: Shards, fraction: float) -> tuple[WindowIndex, WindowIndex]:
        """Cut in time: the last `fraction` of all rows for validation, what is before to train on.

        The cut is one instant for all sessions (where the store has no times, one row in store
        order). A window belongs to a side only if its whole span, from the first input row to the
        target's row, lies there, so `T + horizon − 1` windows at each cut belong to neither.

        Returns:
            The training and the validation index.

        Raises:
            WindowError: `fraction` is not between 0 and 1, or one side would hold no window.
        """
        if not 0.0 < fraction < 1.0:
            raise WindowError(
                "validation fraction",
                expected="a number between 0 and 1",
                found=str(fraction),
                fix="Take 0.2 for the last fifth",
            )
        cuts = _cut_rows(shards, fraction)
        before: list[tuple[int, int, int]] = []
        after: list[tuple[int, int, int]] = []
        for session, first, count in zip(
            self.sessions.tolist(), self.firsts.tolist(), self.counts.tolist(), strict=True
        ):
            cut, stop = cuts[session], first + count
            last = min(stop, cut - self.span + 1)
            if last > first:
                before.append((session, first, last - first))
            start = max(first, cut)
            if stop > start:
                after.append((session, start, stop - start))
        for name, blocks in (("training", before), ("validation", after)):
            if not blocks:
                raise WindowError(
                    f"split at {1 - fraction:g} of the rows",
                    expected=f"at least one {name} window of {self.span} rows",
                    found="none",
                    fix="Move the cut, shorten the windows, or give more data",
                )
        return self._with(before), self._with(after)

    def _with(self, blocks: list[tuple[int, int, int]]) -> WindowIndex:
        index = type(self).__new__(type(self))
        index.T, index.horizon = self.T, self.horizon
        index._set(blocks)
        return index

    def check_within(self, shards: Shards) -> None:
        """Raise unless each of these windows, target included, is valid rows of one session.

        An index made from lengths alone knows nothing of rows that are marked invalid.

        Raises:
            WindowError: a window isn't there; names the first.
        """
        there = WindowIndex(shards, self.T, self.horizon)
        width = 1 + max(int(there.firsts.max()), int(self.firsts.max()))
        block = (
            np.searchsorted(
                there.sessions * width + there.firsts,
                self.sessions * width + self.firsts,
                side="right",
            )
            - 1
        )
        last = there.firsts[block] + there.counts[block]
        wrong = (block < 0) | (there.sessions[block] != self.sessions)
        wrong |= self.firsts + self.counts > last
        if wrong.any():
            b = int(np.argmax(wrong))
            raise WindowError(
                f"windows of session {self.sessions[b]}",
                expected=f"{self.span} valid rows of the store for each",
                found=f"starts {self.firsts[b]} to {self.firsts[b] + self.counts[b] - 1}, "
                "some outside the session or on rows marked invalid",
                fix="Make the sampler from `WindowIndex(shards, T, horizon)` of this store",
            )

    def fingerprint(self) -> str:
        """Which windows these are: xxh3-64 over T, horizon and all blocks."""
        digest = xxhash.xxh3_64(np.array([self.T, self.horizon], "<i8").data)
        for array in (self.sessions, self.firsts, self.counts):
            digest.update(array.astype("<i8").data)
        return digest.hexdigest()


def whole(name: str, value: int, least: int = 1) -> int:
    """`value` as an int, if it is a whole number of at least `least`."""
    if not isinstance(value, Integral) or value < least:
        raise WindowError(
            name,
            expected=f"a whole number, {least} or more",
            found=str(value),
            fix=f"Choose another {name}",
        )
    return int(value)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _gaps(taken: list[tuple[int, int]], rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of 0…rows that `taken` leaves."""
    edge = 0
    for start, stop in taken:
        if start > edge:
            yield edge, start
        edge = stop
    if edge < rows:
        yield edge, rows


def _cut_rows(shards: Shards, fraction: float) -> list[int]:
    """For each session, the first row that is at or after the cut."""
    total = int(shards.offsets[-1])
    wanted = total - round(total * fraction)
    times = [shards.times(number) for number in range(len(shards))]
    known = [t for t in times if t is not None and len(t)]
    if not known:
        return [
            int(np.clip(wanted - offset, 0, rows))
            for offset, rows in zip(shards.offsets[:-1], shards.lengths, strict=True)
        ]
    # Bisection on time: the earliest instant with at least `wanted` rows before it.
    low, high = min(int(t[0]) for t in known), max(int(t[-1]) for t in known) + 1
    while low < high:
        middle = (low + high) // 2
        if sum(int(np.searchsorted(t, middle)) for t in known) >= wanted:
            high = middle
        else:
            low = middle + 1
    return [0 if t is None else int(np.searchsorted(t, low)) for t in times]
