"""Which rows windows may touch: sessions chosen, rows marked invalid, rows too old, gaps in time.

Covers the runs that windows are cut from. Does not know about windows: lengths, horizons and
strides are the index's. Reads times and ages session by session and keeps runs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, NamedTuple, get_args

import numpy as np

from tapeline.errors import WindowError
from tapeline.session import BoolArray, Int64Array, SessionKey
from tapeline.store import Shards
from tapeline.store.intake import runs_of, some

NanPolicy = Literal["skip-window", "error"]
Chosen = Iterable[int] | Callable[[SessionKey], bool] | None
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """Which rows of a session may follow each other in a window.

    Attributes:
        nan: what to do about rows marked invalid, the only ones that may hold NaN: "skip-window"
            keeps windows off them and counts what that costs, "error" refuses the session.
        max_gap_ns: rows whose times are further apart don't follow each other. None: where more
            than half of a session's rows are one step apart, rows two steps apart or more have a
            row missing between them; other sessions are in event time, in which nothing is.
        max_age_ns: rows whose last update is older are treated as invalid. None: of any age.

    Raises:
        WindowError: another `nan`, or a limit below 0.
    """

    nan: NanPolicy = "skip-window"
    max_gap_ns: int | None = None
    max_age_ns: int | None = None

    def __post_init__(self) -> None:
        if self.nan not in get_args(NanPolicy):
            raise WindowError(
                f"nan={self.nan!r}",
                expected=f"one of {', '.join(get_args(NanPolicy))}",
                found="another name",
                fix="Skip windows that touch rows marked invalid, or refuse such sessions",
            )
        for name in ("max_gap_ns", "max_age_ns"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0)


class Runs(NamedTuple):
    """Rows that follow each other: rows `starts[i]` … `stops[i] − 1` of session `sessions[i]`."""

    sessions: Int64Array
    starts: Int64Array
    stops: Int64Array


class Stages(NamedTuple):
    """The runs as each rule leaves them, in the order the rules are applied."""

    chosen: Runs
    valid: Runs
    fresh: Runs
    joined: Runs


def select(
    shards: Shards,
    *,
    instruments: Iterable[str] | None = None,
    dates: Iterable[object] | None = None,
) -> list[int]:
    """The numbers of the sessions of some instruments, dates, or both.

    Args:
        shards: the store.
        instruments: their names; None for all.
        dates: trade dates, as ISO strings or `datetime.date`; None for all.

    Raises:
        WindowError: no session is of one of them, or none is of both.
    """
    wanted = {
        "instrument": None if instruments is None else {str(i) for i in instruments},
        "date": None if dates is None else {str(d) for d in dates},
    }
    for name, values in wanted.items():
        known = {getattr(key, name) for key in shards.keys}
        if values is not None and (unknown := sorted(values - known)):
            raise WindowError(
                f"{name} {unknown[0]}",
                expected=f"one of the store's {len(known)}: {some(sorted(known))}",
                found="none of that name",
                fix="Look at them with `tapeline store info`",
            )
    found = [
        number
        for number, key in enumerate(shards.keys)
        if all(v is None or getattr(key, name) in v for name, v in wanted.items())
    ]
    if not found:
        raise WindowError(
            "selection",
            expected="a session of one of the instruments on one of the dates",
            found="none",
            fix="Look at the store's sessions with `tapeline store info`",
        )
    return found


def chosen_sessions(shards: Shards, sessions: Chosen) -> BoolArray:
    """Which sessions of the store are meant, bool `[sessions]`.

    Raises:
        WindowError: a number that isn't a session's, a number twice, or none at all.
    """
    if sessions is None:
        return np.ones(len(shards), np.bool_)
    numbers = (
        [number for number, key in enumerate(shards.keys) if sessions(key)]
        if callable(sessions)
        else list(sessions)
    )
    chosen = np.zeros(len(shards), np.bool_)
    for number in numbers:
        known = isinstance(number, Integral) and 0 <= number < len(shards)
        if not known or chosen[number]:
            raise WindowError(
                "sessions",
                expected=f"numbers from 0 to {len(shards) - 1}, each once",
                found=f"{number} twice" if known else str(number),
                fix="Pass numbers of sessions of this store, such as `select` gives",
            )
        chosen[number] = True
    if not numbers:
        raise WindowError(
            "sessions",
            expected=f"at least one of the store's {len(shards)}",
            found="none",
            fix="Choose by `SessionKey`, or by number",
        )
    return chosen


def usable_runs(shards: Shards, chosen: BoolArray, policy: RowPolicy) -> Stages:
    """The runs of rows that windows may be cut from, in store order.

    Raises:
        WindowError: the policy is "error" and a chosen session has rows marked invalid, or a
            limit is given for times or ages that the store hasn't got.
    """
    for name, beside in (("max_gap_ns", "times"), ("max_age_ns", "age_ns")):
        if getattr(policy, name) is not None and beside not in shards.index.beside:
            raise WindowError(
                name,
                expected=f"a store that holds {beside}",
                found=f"one of {', '.join(['values', *shards.index.beside])}",
                fix=f"Write the sessions with {beside}, or leave {name} out",
            )
    numbers = np.flatnonzero(chosen)
    valid, fresh, joined = [], [], []
    for number in numbers.tolist():
        runs = _valid_runs(shards, number, policy)
        valid.append(runs)
        if policy.max_age_ns is not None:
            ages = shards.age_ns(number)
            assert ages is not None
            runs = runs_of(shards.valid(number) & (ages <= policy.max_age_ns))
        fresh.append(runs)
        times = shards.times(number)
        if times is not None and len(gaps := gap_rows(times, policy.max_gap_ns)):
            runs = _cut(*runs, gaps)
        joined.append(runs)
    whole_sessions = Runs(numbers, np.zeros_like(numbers), shards.lengths[numbers])
    return Stages(whole_sessions, *(_table(numbers, runs) for runs in (valid, fresh, joined)))


def gap_rows(times: Int64Array, max_gap_ns: int | None) -> Int64Array:
    """The rows that come too long after the row before them; `RowPolicy` says what that is."""
    if len(times) < 2:
        return _NO_ROWS
    first, last = int(times[0]), int(times[-1])
    # On a grid no rows are closer than its step: if they are a step apart on average, all are.
    if max_gap_ns is None and last - first == (int(times[1]) - first) * (len(times) - 1):
        return _NO_ROWS
    # Unsigned, since times never step back and the difference of two int64 can wrap.
    apart = np.diff(np.asarray(times).view(np.uint64))
    if max_gap_ns is not None:
        return np.flatnonzero(apart > np.uint64(max_gap_ns)) + 1
    middle = (len(apart) - 1) // 2
    step = np.partition(apart, middle)[middle]
    if step == 0 or 2 * int((apart == step).sum()) <= len(apart):
        return _NO_ROWS
    # Halved instead of doubled: twice a step could wrap.
    return np.flatnonzero(apart // np.uint64(2) >= step) + 1


_TOO_LARGE = 1 << 62  # two of them still add up in 64 bits


def whole(name: str, value: int, least: int = 1) -> int:
    """`value` as an int, if it is a whole number of at least `least`, and below 2^62."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value < _TOO_LARGE:
        below = f"below {_TOO_LARGE:,}" if is_whole and value >= least else f"{least} or more"
        raise WindowError(
            name,
            expected=f"a whole number, {below}",
            found=str(value),
            fix=f"Choose another {name}",
        )
    return int(value)


def _valid_runs(shards: Shards, number: int, policy: RowPolicy) -> tuple[Int64Array, Int64Array]:
    entry = shards.index.sessions[number]
    marked = np.array(entry.invalid, np.int64).reshape(-1, 2)
    if policy.nan == "error" and len(marked):
        raise WindowError(
            f"session {entry.key}",
            expected="no row marked invalid",
            found=f"{int((marked[:, 1] - marked[:, 0]).sum())} of {entry.rows} rows, "
            f"the first row {marked[0, 0]}",
            fix='Leave the session out, or take nan="skip-window"',
        )
    starts = np.append(0, marked[:, 1])
    stops = np.append(marked[:, 0], entry.rows)
    return starts[stops > starts], stops[stops > starts]


def _cut(starts: Int64Array, stops: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The runs, each cut before those of `rows` that lie inside it."""
    run = np.searchsorted(starts, rows, side="left") - 1
    inside = rows[(run >= 0) & (rows < stops[run])] if len(starts) else _NO_ROWS
    return np.sort(np.append(starts, inside)), np.sort(np.append(stops, inside))


def _table(numbers: Int64Array, runs: list[tuple[Int64Array, Int64Array]]) -> Runs:
    starts = [start for start, _ in runs] or [_NO_ROWS]
    stops = [stop for _, stop in runs] or [_NO_ROWS]
    sessions = np.repeat(numbers, [len(start) for start, _ in runs])
    return Runs(sessions, np.concatenate(starts), np.concatenate(stops))
