"""The rows of a session: which instants get one, and what one says.

Covers the grid's options, the policy for books that show no market, and the rows as they collect.
Does not cover how a row's numbers are found: for blocks of whole books or of a table `states` does
it, for a book rebuilt event by event `replay`.

The rules, the same for every kind of block:

- Row `t` shows what was known at `t`: every event of a time ≤ t, and nothing later. Nothing is
  filled across a session's start, and a book that rests overnight is seen from the session's first
  event on.
- In a session by UTC day or by gap, rows run from the first instant at or after its first event to
  the last instant at or before its last. One by calendar or explicit hours has a row for each of
  its instants: those before its first event are marked, and so are those after the last event of
  the tape, for nobody knows what came then.
- A state is carried on until the next, for `max_age_s` at most: a row older than that is marked.
- A book that is crossed, locked or without one of its sides shows no market, and `Policy` says what
  its rows hold. A mid exists only if both sides do.
- Where a side has fewer levels than `depth`, the missing ones repeat the price of its last level
  with size 0: no price that nobody quoted, and no jump to a sentinel.
- A marked row is not `valid`, and holds NaN where nothing is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from tapeline.errors import TapeError
from tapeline.session import Int64Array, Session, SessionKey
from tapeline.tape.blocks import Float64Array
from tapeline.tape.book import UNITS
from tapeline.tape.report import Counts
from tapeline.tape.sessions import Span

Answer = Literal["keep", "drop", "hold", "nan"]

# Why a row is marked, and `GOOD` for one that isn't; also what is wrong with a state.
GOOD, CROSSED, LOCKED, ONE_SIDED, MISSING, BEFORE, AFTER, STALE = range(8)
_COUNTS: Final = (
    "rows_good",
    "rows_crossed",
    "rows_locked",
    "rows_one_sided",
    "rows_missing",
    "rows_before_first",
    "rows_after_last",
    "rows_stale",
)
KEEP: Final = -2  # a limit that isn't one: the state counts as good
NEVER: Final = -1
FOREVER: Final = 2**62
UNKNOWN_AGE: Final = -1
_MAX_DEPTH: Final = 1_000
MAX_ROWS: Final = 100_000_000
_MAX_S: Final = 4_102_444_800.0  # from 1970 to 2100


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Which instants get a row, and which columns it has.

    Attributes:
        step_ns: nanoseconds between rows; None: a row for each state of the file, at its time.
        depth: levels per side of a book.
        max_age_s: how old a state may be for a row to show it; None: any age.
        age_column: whether a column `age_s` stands behind the others, in seconds.
    """

    step_ns: int | None = 500_000_000
    depth: int = 10
    max_age_s: float | None = 60.0
    age_column: bool = False

    def __post_init__(self) -> None:
        for name, value in (("step_ns", self.step_ns), ("depth", self.depth)):
            if value is not None and value < 1:
                raise TapeError(name, expected="1 or more", found=str(value), fix=f"Raise {name}")
        if self.depth > _MAX_DEPTH:
            raise TapeError(
                "depth",
                expected=f"at most {_MAX_DEPTH:,} levels a side",
                found=f"{self.depth:,}",
                fix="Lower depth: a row holds four numbers for each level",
            )
        if self.max_age_s is not None:
            to_ns("max_age_s", self.max_age_s)

    @property
    def max_age_ns(self) -> int:
        """The limit in nanoseconds."""
        return FOREVER if self.max_age_s is None else to_ns("max_age_s", self.max_age_s)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a row holds while the book shows no market.

    - `keep`: the book as it is. A row without one of the sides has no mid, and is marked.
    - `drop`: such states are ignored; the row shows the last good one of the session.
    - `hold`: the same, for `hold_s` at most since that state ended. Then as `nan`.
    - `nan`: the row is marked.

    The age of a row that shows an earlier state counts from when that state ended.

    Attributes:
        crossed: answer for a best bid above the best ask.
        locked: answer for a best bid equal to the best ask.
        one_sided: answer for a book without bids, without asks, or empty.
        hold_s: the limit of `hold`, in seconds.
        stale_cross_s: of two orders that cross for this long the older is taken off the book; None:
            never. For tapes of orders that lose deletes; others have no orders to take off.
        max_unclear_share: largest share of local times that may lie in an hour which daylight
            saving skips or repeats: their moment is a guess, and counted.
    """

    crossed: Answer = "nan"
    locked: Answer = "nan"
    one_sided: Answer = "nan"
    hold_s: float = 1.0
    stale_cross_s: float | None = None
    max_unclear_share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("crossed", "locked", "one_sided"):
            if getattr(self, name) not in get_args(Answer):
                raise TapeError(
                    f"policy, {name}",
                    expected="keep, drop, hold or nan",
                    found=repr(getattr(self, name)),
                    fix="Give one of them",
                )
        check_share("max_unclear_share", self.max_unclear_share)
        to_ns("hold_s", self.hold_s)
        if self.stale_cross_s is not None:
            to_ns("stale_cross_s", self.stale_cross_s)

    def limits_ns(self) -> Int64Array:
        """For each of `GOOD` … `ONE_SIDED`, how old a stand-in may be, or `KEEP`."""
        limits = {"keep": KEEP, "drop": FOREVER, "nan": NEVER, "hold": to_ns("hold_s", self.hold_s)}
        answers = (self.crossed, self.locked, self.one_sided)
        return np.array([KEEP, *(limits[answer] for answer in answers)], np.int64)


def made_by(options: GridOptions, policy: Policy | None) -> dict[str, str]:
    """What makes rows comparable, beside their columns; `policy` for rows of a book."""
    step_ns = options.step_ns
    age = "any" if options.max_age_s is None else f"{options.max_age_s:g}"
    made = {"step_s": "none" if step_ns is None else f"{step_ns / 1e9:.9g}", "max_age_s": age}
    if policy is not None:
        names = ("crossed", "locked", "one_sided")
        made |= {name: getattr(policy, name) for name in names}
        if "hold" in made.values():
            made["hold_s"] = f"{policy.hold_s:g}"
        if policy.stale_cross_s is not None:
            made["stale_cross_s"] = f"{policy.stale_cross_s:g}"
    return made


def to_ns(name: str, seconds: float) -> int:
    """Seconds as whole nanoseconds.

    Raises:
        TapeError: they are negative, not finite, or longer than there are times.
    """
    if not 0 <= seconds < _MAX_S:  # also refuses NaN
        raise TapeError(
            name, expected="seconds, zero or more", found=str(seconds), fix=f"Correct {name}"
        )
    return round(seconds * 1e9)


def check_share(name: str, share: float) -> None:
    """Refuse what is no share.

    Raises:
        TapeError: it isn't from 0 to 1.
    """
    if not 0 <= share <= 1:  # also refuses NaN
        raise TapeError(
            name,
            expected="a share from 0 to 1",
            found=f"{share:g}",
            fix=f"Give {name} as a fraction: 0.05 is five percent",
        )


def book_columns(depth: int) -> tuple[str, ...]:
    """`mid`, then price and size of the bid and of the ask for each level, 1 being the best."""
    parts = ("bid_price", "bid_size", "ask_price", "ask_size")
    return ("mid", *(f"{part}_{level}" for level in range(1, depth + 1) for part in parts))


class Rows:
    """The rows of one session as they come, in the bytes that they end up in.

    Attributes:
        origin: what is taken off prices: an integer in billionths for books, a float for tables;
            None until the first row that shows something.
    """

    def __init__(
        self, span: Span, columns: tuple[str, ...], options: GridOptions, counts: Counts
    ) -> None:
        self.span = span
        self.origin: float | None = None
        self._columns = (*columns, "age_s") if options.age_column else columns
        self._options = options
        self._counts = counts
        self._max_age_ns = options.max_age_ns
        self._next_ns: int | None = span.start_ns if span.whole else None
        self._values = bytearray()
        self._times = bytearray()
        self._ages = bytearray()
        self._valid = bytearray()

    def __len__(self) -> int:
        return len(self._valid)

    @property
    def next_ns(self) -> int:
        """The next instant without a row, once `begin` has been called."""
        assert self._next_ns is not None, "`begin` comes first"
        return self._next_ns

    @next_ns.setter
    def next_ns(self, next_ns: int) -> None:
        """For who finds the instants itself: rows for all of them before must follow."""
        self._next_ns = next_ns

    def begin(self, first_ns: int) -> None:
        """Tell the time of the session's first event; instants before it are marked, if any."""
        step_ns = self._options.step_ns
        if step_ns is None:
            self._next_ns = first_ns
        elif self._next_ns is None:
            start_ns = self.span.start_ns
            self._next_ns = start_ns - (start_ns - first_ns) // step_ns * step_ns
        else:
            self._blank(self.due(first_ns - 1), BEFORE)

    def due(self, until_ns: int) -> Int64Array:
        """The instants up to `until_ns` that have no row yet; rows for all of them must follow."""
        step_ns = self._options.step_ns
        assert step_ns is not None, "a grid"
        if self.span.whole:  # a bar that opens in a session may be known after its end
            until_ns = min(until_ns, self.span.end_ns - 1)
        if (until_ns - self.next_ns) // step_ns >= MAX_ROWS:
            raise TapeError(
                "step_ns",
                expected=f"fewer than {MAX_ROWS:,} rows from one event to the next",
                found=f"{(until_ns - self.next_ns) // step_ns:,} of {step_ns} ns",
                fix="Raise step_ns (`--set step_s=…`), or cut sessions by hours, by a calendar or "
                "by gap (`--sessions`)",
            )
        instants: Int64Array = np.arange(self.next_ns, until_ns + 1, step_ns, dtype=np.int64)
        self._next_ns = self.next_ns + len(instants) * step_ns
        return instants

    def add(
        self, times_ns: Int64Array, since_ns: Int64Array, marks: Int64Array, values: Float64Array
    ) -> None:
        """Add rows.

        Args:
            times_ns: int64 `[n]`.
            since_ns: int64 `[n]`: from when on the row is as old as it is.
            marks: `[n]`, `GOOD` or why not.
            values: float64 `[n, columns]`, prices relative to `origin`.
        """
        ages = times_ns - since_ns
        stale = (marks == GOOD) & (ages > self._max_age_ns)
        if stale.any():
            marks = np.where(stale, STALE, marks)
            values = np.where(stale[:, None], np.nan, values)
        if self._options.age_column:
            values = np.column_stack([values, ages / 1e9])
        self._append(times_ns, ages, marks, values)

    def finish(self, instrument: str, is_tape_over: bool) -> Session | None:
        """The session, or None if it has no row; the rest of a whole one is marked."""
        if self.span.whole and self._options.step_ns is not None and is_tape_over:
            self._blank(self.due(self.span.end_ns - 1), AFTER)
        if not len(self):
            self._counts.sessions_without_rows += 1
            return None
        scale = UNITS if isinstance(self.origin, int) else 1
        return Session(
            SessionKey(instrument, self.span.date, self.span.segment),
            np.frombuffer(self._values, np.float32).reshape(len(self), len(self._columns)),
            self._columns,
            times=np.frombuffer(self._times, np.int64),
            age_ns=np.frombuffer(self._ages, np.int64),
            valid=np.frombuffer(self._valid, np.bool_),
            origin=(self.origin or 0) / scale,
        )

    def until(self, last_ns: int, is_tape_over: bool) -> int:
        """Up to when the session's last state is carried on."""
        is_filled = self.span.whole and not is_tape_over
        return self.span.end_ns - 1 if is_filled else last_ns

    def _blank(self, instants: Int64Array, mark: int) -> None:
        if len(instants):
            values = np.full((len(instants), len(self._columns)), math.nan)
            ages = np.full(len(instants), UNKNOWN_AGE)
            self._append(instants, ages, np.full(len(instants), mark), values)

    def _append(
        self, times_ns: Int64Array, ages_ns: Int64Array, marks: Int64Array, values: Float64Array
    ) -> None:
        counts = self._counts
        counts.rows += len(marks)
        found = np.bincount(marks, minlength=len(_COUNTS)).tolist()
        for name, number in zip(_COUNTS[1:], found[1:], strict=True):
            if number:
                setattr(counts, name, getattr(counts, name) + number)
        with np.errstate(over="ignore"):  # what overflows becomes inf, which the store refuses
            self._values += values.astype(np.float32).tobytes()
        self._times += times_ns.tobytes()
        self._ages += ages_ns.astype(np.int64, copy=False).tobytes()
        self._valid += (marks == GOOD).tobytes()
