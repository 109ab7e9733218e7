"""What became of everything a reader saw: read, handled by a rule, or left out.

Covers the counts and how they print. Does not cover the rules, which stand where they are applied:
in the reader's docstring and in `grid`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tapeline.clock import utc


@dataclass(slots=True)
class Counts:
    """What is counted on the way; `TapeReport` gives the meaning of each to the user.

    Attributes:
        lines_read: data lines, blank ones not among them.
        lines_unreadable: of these, the ones that were left out.
        created, changed, deleted, reduced, cleared, levels_set: events by what they do.
        states: states of the book, after each event or update.
        states_crossed, states_locked, states_one_sided: of these, the ones that show no market.
        times_stepped_back: lines with an earlier time than the line before.
        times_lifted: lines taken as of the latest time so far, being earlier than it.
        times_skipped, times_repeated: local times in an hour that daylight saving skips, taken as
            the first moment after it, or repeats, taken as the earlier of the two.
        events_stray: events left out, of a time far ahead of those on both sides.
        deletes_unknown: deletes of an order that was never created.
        deletes_before_create: deletes whose create came after them; neither took effect.
        changes_unknown: changes of an unknown order, taken as creates.
        creates_repeated: creates of a known order, taken as changes.
        orders_without_price: creates at a price that stands for none; known, but at no level.
        orders_without_size: creates of size zero; known, but at no level.
        rows: rows of all sessions.
        rows_held: valid rows that show the last uncrossed state, the book being crossed.
        rows_crossed, rows_locked, rows_one_sided: rows marked because the book was.
        rows_missing: rows marked because a cell was missing.
        rows_before_first: rows marked because the session had no event yet.
        rows_after_last: rows marked because the tape had ended.
        rows_stale: rows marked because their state was too old.
        rows_undefined: rows marked because a derived column is undefined there, by its name.
        rows_thin: rows of both sides in which a side has fewer levels than columns.
        events_after_last_row: events that came after the last row of their session.
        sessions_without_rows: sessions too short to hold an instant of the grid.
        outside: events outside every session.
        outside_first_ns, outside_last_ns: times of the first and the last of them.
        other: what the reader of a format counts beyond this, by the words it is told in.
    """

    lines_read: int = 0
    lines_unreadable: int = 0
    created: int = 0
    changed: int = 0
    deleted: int = 0
    reduced: int = 0
    cleared: int = 0
    levels_set: int = 0
    states: int = 0
    states_crossed: int = 0
    states_locked: int = 0
    states_one_sided: int = 0
    times_stepped_back: int = 0
    times_lifted: int = 0
    times_skipped: int = 0
    times_repeated: int = 0
    events_stray: int = 0
    deletes_unknown: int = 0
    deletes_before_create: int = 0
    changes_unknown: int = 0
    creates_repeated: int = 0
    orders_without_price: int = 0
    orders_without_size: int = 0
    rows: int = 0
    rows_held: int = 0
    rows_crossed: int = 0
    rows_locked: int = 0
    rows_one_sided: int = 0
    rows_missing: int = 0
    rows_before_first: int = 0
    rows_after_last: int = 0
    rows_stale: int = 0
    rows_undefined: dict[str, int] = field(default_factory=dict)
    rows_thin: int = 0
    events_after_last_row: int = 0
    sessions_without_rows: int = 0
    outside: int = 0
    outside_first_ns: int | None = None
    outside_last_ns: int | None = None
    other: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        """Add to what only one format has, told in the words `what`."""
        if number:
            self.other[what] = self.other.get(what, 0) + number

    def undefine(self, column: str, number: int) -> None:
        """Add rows marked because a derived column is undefined there."""
        if number:
            self.rows_undefined[column] = self.rows_undefined.get(column, 0) + number

    @property
    def rows_marked(self) -> int:
        """Rows that no window may touch."""
        return sum(number for number, _ in self.marked())

    def marked(self) -> list[tuple[int, str]]:
        """How many rows are marked, for each reason."""
        return [
            (self.rows_crossed, "crossed"),
            (self.rows_locked, "locked"),
            (self.rows_one_sided, "one-sided"),
            (self.rows_missing, "with a missing cell"),
            (self.rows_before_first, "before the first event"),
            (self.rows_after_last, "after the end of the tape"),
            (self.rows_stale, "too old"),
            *((number, f"without {column}") for column, number in self.rows_undefined.items()),
        ]


@dataclass(frozen=True, slots=True)
class EvictedOrder:
    """An order taken off the book because it crossed a younger one for too long."""

    order_id: str
    side: str
    price: float
    placed_ns: int
    evicted_ns: int


@dataclass(frozen=True, slots=True)
class TapeReport:
    """The account of one reading.

    Attributes:
        source: the file, or the files that continue each other.
        format: name of the reader.
        instrument: name in the sessions' keys.
        detected: what was found out about the file, and can be pinned by the option of that name.
        first_ns, last_ns: times of the first and the last event, nanoseconds UTC.
        num_sessions: sessions made.
        counts: how many of what.
        first_unreadable: number and text of the first line left out; None if all were readable.
        evicted: orders taken off the book by the stale rule, in the order of it.
    """

    source: str
    format: str
    instrument: str
    detected: dict[str, str]
    first_ns: int
    last_ns: int
    num_sessions: int
    counts: Counts
    first_unreadable: str | None = None
    evicted: tuple[EvictedOrder, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """One flat dictionary as JSON can hold it; `evicted` is a list of dictionaries."""
        values = asdict(self)
        counts = values.pop("counts")
        return {
            **values,
            "evicted": list(values["evicted"]),
            **counts,
            "rows_marked": self.counts.rows_marked,
        }

    def __str__(self) -> str:
        counts = self.counts
        detected = "".join(f", {name} {value}" for name, value in self.detected.items())
        lines = [
            f"{self.source} ({self.format}{detected}): {counted(counts.lines_read, 'record')}, "
            f"{utc(self.first_ns)} to {utc(self.last_ns)}",
            f"{self.instrument}: {counted(self.num_sessions, 'session')}, "
            f"{counted(counts.rows, 'row')}, "
            f"{counts.rows_marked:,} of them marked{listed(counts.marked())}",
        ]
        lines += [f"  {_told(number, what)}" for number, what in self._handled() if number]
        lines += [f"  {_told(number, what)}" for what, number in counts.other.items()]
        if counts.outside_first_ns is not None and counts.outside_last_ns is not None:
            lines.append(
                f"  {counts.outside:,} events outside every session, "
                f"{utc(counts.outside_first_ns)} to {utc(counts.outside_last_ns)}"
            )
        lines += [
            f"  evicted {order.side} {order.order_id} at {order.price:,}, placed "
            f"{utc(order.placed_ns)}, crossed until {utc(order.evicted_ns)}"
            for order in self.evicted
        ]
        if self.first_unreadable is not None:
            lines.append(f"  the first unreadable: {self.first_unreadable}")
        return "\n".join(lines)

    def _handled(self) -> list[tuple[int, str]]:
        counts = self.counts
        return [
            (counts.created, "orders created"),
            (counts.changed, "orders changed"),
            (counts.deleted, "orders deleted"),
            (counts.reduced, "orders reduced"),
            (counts.levels_set, "levels set"),
            (counts.cleared, "times the whole book was cleared"),
            (counts.states_crossed, f"of {counts.states:,} book states crossed"),
            (counts.states_locked, f"of {counts.states:,} book states locked"),
            (counts.states_one_sided, f"of {counts.states:,} book states one-sided or empty"),
            (counts.rows_held, "rows of the book before it was crossed, locked or one-sided"),
            (counts.rows_thin, "rows with a side of few levels"),
            (counts.lines_unreadable, "lines unreadable, left out"),
            (counts.times_stepped_back, "times stepped back"),
            (counts.times_lifted, "events taken as of a later time, already reached"),
            (
                counts.times_skipped,
                "times in an hour skipped by daylight saving, taken as the first moment after it",
            ),
            (
                counts.times_repeated,
                "times in an hour repeated by daylight saving, taken as the earlier of the two",
            ),
            (counts.events_stray, "events of a time far ahead of both neighbours, left out"),
            (counts.deletes_unknown, "deletes of an order never created, ignored"),
            (counts.deletes_before_create, "deletes before the create, both ignored"),
            (counts.changes_unknown, "changes of an unknown order, taken as creates"),
            (counts.creates_repeated, "creates of a known order, taken as changes"),
            (counts.orders_without_price, "creates without a real price, at no level"),
            (counts.orders_without_size, "creates of size zero, at no level"),
            (counts.events_after_last_row, "events after the last row of a session"),
            (counts.sessions_without_rows, "sessions too short for a row, left out"),
        ]


def counted(number: int, noun: str) -> str:
    """A number with its noun, which has an `s` unless there is one of it."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _told(number: int, what: str) -> str:
    """A number with words that begin with a plural, or with `of`."""
    noun, space, rest = what.partition(" ")
    return (
        f"{counted(number, noun.removesuffix('s'))}{space}{rest}"
        if noun != "of"
        else (f"{number:,} {what}")
    )


def listed(parts: list[tuple[int, str]]) -> str:
    """Those that aren't zero, in brackets; nothing if none is."""
    shown = ", ".join(f"{number:,} {what}" for number, what in parts if number)
    return f" ({shown})" if shown else ""
