"""A book over time, put on a regular grid without look-ahead, and cut into sessions.

Covers which instants get a row, what a row holds, and where a session ends. Does not cover what
changes the book: a reader does, and tells the grid the time of each change beforehand.

The rules:

- Row `t` shows the book after every event of a time ≤ t, and depends on nothing later.
- A session's rows run from the first instant at or after its first event to the last instant at or
  before its last. So nothing is filled across a session's start, and no row is made up after its
  end. The book itself lives on: orders that rest overnight still rest in the morning.
- A crossed or locked book shows no market. Its row takes the last uncrossed state of the same
  session, if the cross is `hold_ns` old or less; its age is then that of the cross. Else it is
  marked.
- A mid exists only if both sides do: the row of a one-sided book is marked.
- Where a side has fewer levels than `depth`, the missing ones repeat the price of its last level
  with size 0: no price that nobody quoted, and no jump to a sentinel.
- A marked row holds NaN and is not `valid`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from tapeline.errors import TapeError
from tapeline.session import Session, SessionKey
from tapeline.tape.book import UNITS, Book
from tapeline.tape.report import Counts

_DAY_NS = 86_400 * 1_000_000_000
_Side = list[tuple[int, int]]


class Span(NamedTuple):
    """Where a session lies: `start_ns` ≤ time < `end_ns`. Instants count from its start."""

    date: str
    segment: int
    start_ns: int
    end_ns: int


Cut = Callable[[int], Span]  # from the time of an event to the span it belongs to


def utc_day(time_ns: int) -> Span:
    """The UTC day of a time: sessions end at midnight."""
    start_ns = time_ns - time_ns % _DAY_NS
    date = datetime.fromtimestamp(start_ns // 1_000_000_000, UTC).date().isoformat()
    return Span(date, 0, start_ns, start_ns + _DAY_NS)


def book_columns(depth: int) -> tuple[str, ...]:
    """`mid`, then price and size of the bid and of the ask for each level, 1 being the best."""
    parts = ("bid_price", "bid_size", "ask_price", "ask_size")
    return ("mid", *(f"{part}_{level}" for level in range(1, depth + 1) for part in parts))


class Grid:
    """Turns a book that changes into sessions of rows.

    For every event in time order: `advance(time)`, then `hold()` if it may cross the book, then
    change the book. `finish()` at the end. A step back in time is the reader's to settle.

    Args:
        book: the book to show; the grid reads it and never changes it.
        instrument: name in the sessions' keys.
        counts: where rows and what happened to them are counted.
        step_ns: nanoseconds between rows.
        depth: levels per side; a row has 1 + 4 · depth columns.
        hold_ns: how old a cross may be for a row to show the state before it.
        before_row: called with each instant before its row is taken, to tidy the book.
        cut: from the time of an event to the span of its session.
    """

    def __init__(
        self,
        book: Book,
        instrument: str,
        counts: Counts,
        *,
        step_ns: int,
        depth: int,
        hold_ns: int,
        before_row: Callable[[int], None] = lambda _: None,
        cut: Cut = utc_day,
    ) -> None:
        for name, value, least in (("step_ns", step_ns, 1), ("depth", depth, 1)):
            if value < least:
                raise TapeError(
                    name, expected=f"{least} or more", found=str(value), fix=f"Raise {name}"
                )
        self._book = book
        self._instrument = instrument
        self._counts = counts
        self._step_ns = step_ns
        self._depth = depth
        self._hold_ns = hold_ns
        self._before_row = before_row
        self._cut = cut
        self._sessions: list[Session] = []
        self._rows: _Rows | None = None
        self._held: tuple[_Side, _Side] | None = None
        self._due_ns = -1  # an event later than this has something to be done before it
        self._last_ns = -1
        self._num_since_row = 0
        self.crossed_since_ns = -1  # meaningful while the book is crossed

    def advance(self, time_ns: int) -> None:
        """Take every row that is due before an event at `time_ns` changes the book."""
        if time_ns > self._due_ns:
            self._catch_up(time_ns)
        self._last_ns = time_ns
        self._num_since_row += 1

    def hold(self) -> None:
        """Remember the book as it is, if uncrossed: the event in hand may cross it."""
        if not self._book.is_crossed:
            self._held = self._top()
            self.crossed_since_ns = self._last_ns

    def finish(self) -> list[Session]:
        """Take the rows up to the last event, and return all sessions."""
        self._close()
        return self._sessions

    def _catch_up(self, time_ns: int) -> None:
        if self._rows is None or time_ns >= self._rows.span.end_ns:
            self._close()
            span = self._cut(time_ns)
            num_steps = -((span.start_ns - time_ns) // self._step_ns)
            self._rows = _Rows(span, span.start_ns + num_steps * self._step_ns, self._depth)
            self._held = None
        self._take_rows(self._rows, time_ns - 1)
        self._due_ns = min(self._rows.next_ns, self._rows.span.end_ns - 1)

    def _close(self) -> None:
        if self._rows is None:
            return
        self._take_rows(self._rows, self._last_ns)
        self._counts.events_after_last_row += self._num_since_row
        self._num_since_row = 0
        if len(self._rows):
            self._sessions.append(self._rows.session(self._instrument))
        else:
            self._counts.sessions_without_rows += 1
        self._rows = None

    def _take_rows(self, rows: _Rows, until_ns: int) -> None:
        while rows.next_ns <= until_ns:
            self._before_row(rows.next_ns)
            self._take(rows)
            rows.next_ns += self._step_ns
            self._num_since_row = 0

    def _take(self, rows: _Rows) -> None:
        counts = self._counts
        counts.rows += 1
        bids, asks = self._top()
        since_ns = self._last_ns
        is_held = self._book.is_crossed
        if is_held:
            since_ns = self.crossed_since_ns
            if self._held is None or rows.next_ns - since_ns > self._hold_ns:
                counts.rows_crossed += 1
                rows.mark(since_ns)
                return
            bids, asks = self._held
        if not bids or not asks:
            counts.rows_one_sided += 1
            rows.mark(since_ns)
            return
        counts.rows_held += is_held
        counts.rows_thin += min(len(bids), len(asks)) < self._depth
        rows.take(bids, asks, since_ns)

    def _top(self) -> tuple[_Side, _Side]:
        return self._book.bids.top(self._depth), self._book.asks.top(self._depth)


class _Rows:
    """The rows of one session, in the four and eight bytes a number that they end up in."""

    def __init__(self, span: Span, first_ns: int, depth: int) -> None:
        self.span = span
        self.next_ns = first_ns
        self._depth = depth
        self._origin: int | None = None
        self._values = array("f")
        self._times = array("q")
        self._ages = array("q")
        self._valid = bytearray()

    def __len__(self) -> int:
        return len(self._valid)

    def take(self, bids: _Side, asks: _Side, since_ns: int) -> None:
        """Add a row at `next_ns`; differences are exact, and rounded once each."""
        if self._origin is None:
            self._origin = bids[0][0]
        origin = self._origin
        row = [(bids[0][0] + asks[0][0] - 2 * origin) / (2 * UNITS)]
        for (bid, bid_size), (ask, ask_size) in zip(
            _padded(bids, self._depth), _padded(asks, self._depth), strict=True
        ):
            row += (
                (bid - origin) / UNITS,
                bid_size / UNITS,
                (ask - origin) / UNITS,
                ask_size / UNITS,
            )
        self._append(row, since_ns, valid=True)

    def mark(self, since_ns: int) -> None:
        """Add a row at `next_ns` that shows nothing."""
        self._append([math.nan] * (1 + 4 * self._depth), since_ns, valid=False)

    def _append(self, row: list[float], since_ns: int, *, valid: bool) -> None:
        self._values.fromlist(row)
        self._times.append(self.next_ns)
        self._ages.append(self.next_ns - since_ns)
        self._valid.append(valid)

    def session(self, instrument: str) -> Session:
        """What was taken; the rows share its memory."""
        return Session(
            SessionKey(instrument, self.span.date, self.span.segment),
            np.frombuffer(self._values, np.float32).reshape(len(self), 1 + 4 * self._depth),
            book_columns(self._depth),
            times=np.frombuffer(self._times, np.int64),
            age_ns=np.frombuffer(self._ages, np.int64),
            valid=np.frombuffer(self._valid, np.bool_),
            origin=(self._origin or 0) / UNITS,
        )


def _padded(side: _Side, depth: int) -> _Side:
    return side + [(side[-1][0], 0)] * (depth - len(side))
