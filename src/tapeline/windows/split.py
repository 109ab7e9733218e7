"""Cuts in time: one instant for all sessions, found by a share of the rows or given.

Covers where a part begins and ends in each session. Which windows that leaves is the index's.
Where the store has no times, rows follow each other in store order and the cut is a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from numbers import Integral
from typing import Literal, TypeAlias

import numpy as np

from tapeline.errors import WindowError
from tapeline.session import Int64Array
from tapeline.store import Shards
from tapeline.windows.blocks import Part
from tapeline.windows.rows import whole

Until: TypeAlias = float | int | str | date | Literal["rest"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHARES_ADD_UP = Fraction(1, 10**9)  # 1 − 0.7 is a little more than 0.3


class Timeline(ABC):
    """All rows in one order; a point in it lies before, between or after them.

    Args:
        lengths: rows of each session.
        embargo: how far behind the end of a part the next one may start.
    """

    def __init__(self, lengths: Int64Array, embargo: int) -> None:
        self.lengths = lengths
        self.embargo = embargo

    @abstractmethod
    def rows_before(self, point: int) -> Int64Array:
        """How many rows of each session lie before a point, int64 `[sessions]`."""

    @abstractmethod
    def point_after(self, num_rows: int) -> int:
        """The earliest point with at least `num_rows` rows before it."""

    def part(self, start: int | None, stop: int | None, embargo: int = 0) -> Part:
        """The rows from one point to another; None for no end on that side."""
        if start is None:
            cuts = lows = np.zeros_like(self.lengths)
        else:
            cuts, lows = self.rows_before(start), self.rows_before(start + embargo)
        return Part(cuts, lows, self.lengths if stop is None else self.rows_before(stop))

    def share(self, share: Fraction) -> int:
        """The earliest point with this share of all rows before it."""
        return self.point_after(round(int(self.lengths.sum()) * share))


class RowOrder(Timeline):
    """Rows as the store holds them; points are row numbers of the whole."""

    def __init__(self, lengths: Int64Array, embargo_rows: int) -> None:
        super().__init__(lengths, embargo_rows)
        self._offsets = np.cumsum(lengths) - lengths

    def rows_before(self, point: int) -> Int64Array:
        """Rows of each session among the first `point` of the whole."""
        before: Int64Array = np.clip(point - self._offsets, 0, self.lengths)
        return before

    def point_after(self, num_rows: int) -> int:
        """The number itself."""
        return num_rows


class TimeOrder(Timeline):
    """Rows by their times; points are nanoseconds UTC, and a row at the point lies after it."""

    def __init__(self, shards: Shards, lengths: Int64Array, embargo_ns: int) -> None:
        super().__init__(lengths, embargo_ns)
        self._shards = shards
        self._held: dict[int, Int64Array] = {}  # times of sessions that a cut went through
        self._filled = np.flatnonzero(self.lengths)
        ends = [(t[0], t[-1]) for t in map(self._times, self._filled.tolist())]
        self._held.clear()
        self._first, self._last = np.array(ends, np.int64).reshape(-1, 2).T

    def rows_before(self, point: int) -> Int64Array:
        """Rows of each session that are earlier than `point`."""
        before = np.zeros_like(self.lengths)
        ended = self._filled[self._last < point]
        before[ended] = self.lengths[ended]
        for number in self._filled[(self._first < point) & (self._last >= point)].tolist():
            if number not in self._held:
                self._held[number] = self._times(number)
            before[number] = np.searchsorted(self._held[number], np.int64(point))
        return before

    def point_after(self, num_rows: int) -> int:
        """Found by bisection on time."""
        if not len(self._filled):
            return 0
        low, high = int(self._first.min()), int(self._last.max()) + 1
        while low < high:
            middle = (low + high) // 2
            if int(self.rows_before(middle).sum()) >= num_rows:
                high = middle
            else:
                low = middle + 1
        return low

    def _times(self, number: int) -> Int64Array:
        times = self._shards.times(number)
        assert times is not None
        return times


def timeline_of(
    shards: Shards | None, lengths: Int64Array, embargo_ns: int, embargo_rows: int
) -> Timeline:
    """The order of a store's rows: by time where there are times.

    Args:
        shards: the store, if it is known.
        lengths: int64 `[sessions]`, rows of each session that is to be divided; 0 for others.
        embargo_ns, embargo_rows: how far behind the end of a part the next one may start.

    Raises:
        WindowError: an embargo below 0, or in a unit that the rows aren't ordered by.
    """
    whole("embargo_ns", embargo_ns, 0)
    whole("embargo_rows", embargo_rows, 0)
    if shards is None or "times" not in shards.index.beside:
        if embargo_ns:
            raise WindowError(
                "embargo_ns",
                expected="a store with times",
                found="rows without",
                fix="Give embargo_rows instead",
            )
        return RowOrder(lengths, embargo_rows)
    if embargo_rows:
        raise WindowError(
            "embargo_rows",
            expected="a store without times",
            found="rows with times, of which each session has its own",
            fix="Give embargo_ns instead",
        )
    return TimeOrder(shards, lengths, embargo_ns)


def consecutive_parts(timeline: Timeline, ends: Mapping[str, Until]) -> dict[str, Part]:
    """Parts that follow each other, each from where the one before ends.

    Args:
        timeline: the rows in order.
        ends: for each part in order, where it ends: a share of all rows, an instant, or "rest".

    Raises:
        WindowError: shares that don't lie between 0 and 1 or add up to more, an instant that
            isn't one or isn't later than the one before, or "rest" for a part that isn't the last.
    """
    parts: dict[str, Part] = {}
    start: int | None = None
    used = Fraction(0)
    shares = isinstance(next(iter(ends.values())), float)
    for number, (name, until) in enumerate(ends.items(), start=1):
        stop: int | None = None
        if until != "rest" and isinstance(until, float) != shares:
            raise WindowError(
                name,
                expected="a share of the rows for each part, or for each an instant",
                found=f"{until} after {next(iter(ends.values()))}",
                fix="Give all parts' ends in the same way",
            )
        if isinstance(until, float):
            used += _share(name, until, used)
            stop = timeline.share(min(used, Fraction(1)))
        elif until != "rest":
            stop = to_instant(name, until)
            if not isinstance(timeline, TimeOrder):
                raise WindowError(
                    name,
                    expected="a share of the rows, since these have no times",
                    found=str(until),
                    fix="Take 0.2 for a fifth, or write the sessions with times",
                )
            if start is not None and stop <= start:
                raise WindowError(
                    name,
                    expected="an end later than that of the part before",
                    found=str(until),
                    fix="Give the parts' ends in the order of time",
                )
        elif number < len(ends):
            raise WindowError(
                name,
                expected="the last part, if it takes the rest",
                found="parts behind it",
                fix='Say where it ends, and give "rest" to the last part',
            )
        parts[name] = timeline.part(start, stop, timeline.embargo)
        start = stop
    return parts


def to_instant(name: str, value: int | str | date) -> int:
    """Nanoseconds UTC of an instant.

    Args:
        name: what it is for, in the message.
        value: nanoseconds, a date (its midnight), a datetime, or either in ISO 8601. What has no
            zone is UTC. Parts of a microsecond can only be given as nanoseconds.

    Raises:
        WindowError: it is none of these, or lies outside int64.
    """
    moment: object = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
    if isinstance(moment, datetime):
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        moment = (moment - _EPOCH) // timedelta(microseconds=1) * 1000
    if isinstance(moment, Integral) and not isinstance(moment, bool):
        ns = int(moment)
        if -(1 << 63) <= ns < 1 << 63:
            return ns
    raise WindowError(
        name,
        expected="an instant: nanoseconds UTC, a datetime, a date, or ISO 8601",
        found=str(value),
        fix="Write it as 2024-03-01 or 2024-03-01T09:30:00-05:00",
    )


def rolling_parts(
    timeline: Timeline, folds: int, train_parts: int | None
) -> list[tuple[Part, Part]]:
    """Equal parts of all rows: for each fold those to train on, and the next one to validate on.

    Raises:
        WindowError: `folds` or `train_parts` below 1.
    """
    least = 1 if train_parts is None else whole("train_parts", train_parts)
    num_parts = whole("folds", folds) + least
    points = [timeline.share(Fraction(p, num_parts)) for p in range(1, num_parts)]
    cuts = [None, *points, None]
    return [
        (
            timeline.part(cuts[0 if train_parts is None else fold], cuts[fold + least]),
            timeline.part(cuts[fold + least], cuts[fold + least + 1], timeline.embargo),
        )
        for fold in range(folds)
    ]


def _share(name: str, value: float, used: Fraction) -> Fraction:
    """The share as the decimal fraction that was written."""
    if not 0.0 < value < 1.0:
        raise WindowError(
            name,
            expected="a share of the rows, as a number between 0 and 1",
            found=str(value),
            fix='Take 0.2 for a fifth, or "rest" for all that is left',
        )
    share = Fraction(repr(float(value)))  # NumPy's own repr says more than the number
    if used + share > 1 + _SHARES_ADD_UP:
        raise WindowError(
            name,
            expected="shares that add up to 1 or less",
            found=f"{float(used + share):g}",
            fix='Give "rest" to the last part',
        )
    return share
