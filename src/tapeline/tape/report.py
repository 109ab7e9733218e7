"""What became of everything a reader saw: read, handled by a rule, or left out.

Covers the counts and how they print. Does not cover the rules, which stand where they are applied:
in the reader's docstring and in `grid`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tapeline.clock import utc


@dataclass(slots=True)
class Counts:
    """What is counted on the way; `TapeReport` gives the meaning of each to the user.

    Attributes:
        lines_read: data lines, blank ones not among them.
        lines_unreadable: of these, the ones that were left out.
        created, changed, deleted: readable lines by action.
        times_stepped_back: lines with an earlier time than the line before.
        times_lifted: lines taken as of the latest time so far, being earlier than it.
        deletes_unknown: deletes of an order that was never created.
        deletes_before_create: deletes whose create came after them; neither took effect.
        changes_unknown: changes of an unknown order, taken as creates.
        creates_repeated: creates of a known order, taken as changes.
        orders_without_price: creates at a price that stands for none; known, but at no level.
        orders_without_size: creates of size zero; known, but at no level.
        rows: rows of all sessions.
        rows_held: valid rows that show the last uncrossed state, the book being crossed.
        rows_crossed: rows marked because the book had been crossed for too long.
        rows_one_sided: rows marked because a side was empty.
        rows_thin: valid rows in which a side has fewer levels than columns.
        events_after_last_row: events that came after the last row of their session.
        sessions_without_rows: sessions too short to hold an instant of the grid.
    """

    lines_read: int = 0
    lines_unreadable: int = 0
    created: int = 0
    changed: int = 0
    deleted: int = 0
    times_stepped_back: int = 0
    times_lifted: int = 0
    deletes_unknown: int = 0
    deletes_before_create: int = 0
    changes_unknown: int = 0
    creates_repeated: int = 0
    orders_without_price: int = 0
    orders_without_size: int = 0
    rows: int = 0
    rows_held: int = 0
    rows_crossed: int = 0
    rows_one_sided: int = 0
    rows_thin: int = 0
    events_after_last_row: int = 0
    sessions_without_rows: int = 0

    @property
    def rows_marked(self) -> int:
        """Rows that hold no numbers and that no window may touch."""
        return self.rows_crossed + self.rows_one_sided


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
        source: the file.
        time_unit: unit of its times: s, ms, us or ns.
        tick: the step of its prices, as a decimal number.
        first_ns, last_ns: times of the first and the last event, nanoseconds UTC.
        num_sessions: sessions made.
        counts: how many of what.
        first_unreadable: number and text of the first line left out; None if all were readable.
        evicted: orders taken off the book by the stale rule, in the order of it.
    """

    source: str
    time_unit: str
    tick: str
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
        lines = [
            f"{self.source}: {counts.lines_read:,} lines, {utc(self.first_ns)} to "
            f"{utc(self.last_ns)} (times in {self.time_unit}, price step {self.tick})",
            f"{self.num_sessions} sessions, {counts.rows:,} rows: {counts.rows_held:,} show the "
            f"book before a momentary cross, {counts.rows_marked:,} are marked "
            f"({counts.rows_crossed:,} crossed, {counts.rows_one_sided:,} one-sided), "
            f"{counts.rows_thin:,} have a side of few levels",
            f"orders: {counts.created:,} created, {counts.changed:,} changed, "
            f"{counts.deleted:,} deleted",
        ]
        lines += [f"  {number:,} {what}" for number, what in self._handled() if number]
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
            (counts.lines_unreadable, "lines unreadable, left out"),
            (counts.times_stepped_back, "times stepped back"),
            (counts.times_lifted, "lines taken as of a later time, already reached"),
            (counts.deletes_unknown, "deletes of an order never created, ignored"),
            (counts.deletes_before_create, "deletes before their create, both ignored"),
            (counts.changes_unknown, "changes of an unknown order, taken as creates"),
            (counts.creates_repeated, "creates of a known order, taken as changes"),
            (counts.orders_without_price, "creates without a real price, at no level"),
            (counts.orders_without_size, "creates of size zero, at no level"),
            (counts.events_after_last_row, "events after the last row of their session"),
            (counts.sessions_without_rows, "sessions too short for a row, left out"),
        ]
