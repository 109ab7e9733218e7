"""The tape: where sessions come from, a seeded synthetic market or real files on a grid.

Readers turn files into `blocks`, `sessions` says where to cut, `replay` (event by event) and
`states` (block by block) put them on the `grid` without look-ahead, `report` says what became of
everything, and `read` joins the parts.
"""

from tapeline.tape.derive import Derivation, derivations, derive
from tapeline.tape.grid import GridOptions, Policy, book_columns
from tapeline.tape.read import Tape, detect, read_orders, read_tape, reader_named
from tapeline.tape.readers import READERS, demo_tape
from tapeline.tape.report import Counts, EvictedOrder, TapeReport
from tapeline.tape.sessions import Calendar, Gaps, LocalHours, Sessions, UtcDays
from tapeline.tape.synthetic import synthetic_session, synthetic_sessions

__all__ = [
    "READERS",
    "Calendar",
    "Counts",
    "Derivation",
    "EvictedOrder",
    "Gaps",
    "GridOptions",
    "LocalHours",
    "Policy",
    "Sessions",
    "Tape",
    "TapeReport",
    "UtcDays",
    "book_columns",
    "demo_tape",
    "derivations",
    "derive",
    "detect",
    "read_orders",
    "read_tape",
    "reader_named",
    "synthetic_session",
    "synthetic_sessions",
]
