"""The tape: where sessions come from, a seeded synthetic market or real files on a grid.

Readers turn files into events, `book` turns events into a book, `grid` puts the book on regular
instants without look-ahead and cuts sessions, `report` says what became of every line.
"""

from tapeline.tape.grid import book_columns, utc_day
from tapeline.tape.readers import demo_tape, read_orders
from tapeline.tape.report import Counts, EvictedOrder, TapeReport
from tapeline.tape.synthetic import synthetic_session, synthetic_sessions

__all__ = [
    "Counts",
    "EvictedOrder",
    "TapeReport",
    "book_columns",
    "demo_tape",
    "read_orders",
    "synthetic_session",
    "synthetic_sessions",
    "utc_day",
]
