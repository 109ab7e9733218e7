"""Blocks without a file, and the rows they must give, worked out the slow way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.tape.blocks import CHANGED, CREATED, DELETED, BookStates, LevelEvents, OrderEvents
from tapeline.tape.book import UNITS
from tapeline.tape.grid import GridOptions, Policy
from tapeline.tape.read import Tape
from tapeline.tape.readers.base import Reader, Source
from tapeline.tape.report import Counts
from tapeline.tape.sessions import Sessions, UtcDays

# A state: its time, bids and asks as lists of (price, size), best first.
Side = list[tuple[int, int]]
State = tuple[int, Side, Side]


class Given(Reader):
    """Yields what it is given."""

    name = "given"
    looks_for = "nothing"

    def __init__(self, blocks: list[Any]) -> None:
        super().__init__(Source([], Counts(), max_lifted_share=1), None)
        self._blocks = blocks

    @classmethod
    def recognises(cls, head):
        return False

    def blocks(self):
        yield from self._blocks

    def instrument(self):
        return "X"


def put_on_grid(
    blocks: list[Any],
    grid: GridOptions,
    policy: Policy | None = None,
    sessions: Sessions | None = None,
) -> tuple[list[Session], Counts]:
    """The sessions and the counts of some blocks."""
    reader = Given(blocks)
    reader.source.paths.append("given")  # type: ignore[arg-type]
    tape = Tape(reader, None, sessions or UtcDays(), grid, policy or Policy())
    found = []
    try:
        found.extend(tape)
    except TapeError as error:  # every row is marked, which is what some tests are about
        if "none of them valid" not in str(error):
            raise
    return found, reader.source.counts


def states_block(states: list[State], num_levels: int = 3) -> BookStates:
    """Whole books; where a level is missing stands a sentinel of size zero."""
    prices = np.full((len(states), num_levels, 2), 2**62, np.int64)
    sizes = np.zeros((len(states), num_levels, 2))
    for row, (_, *sides) in enumerate(states):
        for side, levels in enumerate(sides):
            for level, (price, size) in enumerate(levels[:num_levels]):
                prices[row, level, side] = price * UNITS
                sizes[row, level, side] = size
    times = np.array([time_ns for time_ns, *_ in states], np.int64)
    return BookStates(times, prices, sizes)


def levels_block(states: list[State]) -> LevelEvents:
    """The same books as one update each: what is gone is set to zero, then what is there."""
    events: list[tuple[int, bool, bool, int, int]] = []
    books: list[dict[int, int]] = [{}, {}]
    for time_ns, *sides in states:
        for number, levels in enumerate(sides):
            now = dict(levels)
            gone = [(price, 0) for price in books[number] if price not in now]
            events += [
                (time_ns, False, number == 0, price * UNITS, size * UNITS)
                for price, size in [*gone, *levels]
            ]
            books[number] = now
    times, *columns = zip(*events, strict=True) if events else ((),) * 5
    return LevelEvents(np.array(times, np.int64), *(list(column) for column in columns))


def orders_block(events: list[tuple[int, bytes, tuple[bool, int, int] | None]]) -> OrderEvents:
    """Time, id, and side, price and size of an order, or None for a delete."""
    known: set[bytes] = set()
    rows = []
    for time_ns, order_id, order in events:
        is_bid, price, size = order or (True, 0, 0)
        action = DELETED if order is None else CHANGED if order_id in known else CREATED
        known.add(order_id)
        rows.append((time_ns, order_id, action, is_bid, price, size, True, True))
    return order_events(rows)


def order_events(rows: list[tuple[Any, ...]], scale: int = UNITS) -> OrderEvents:
    """The fields of `OrderEvents` row by row, ids as bytes.

    Prices and sizes are multiplied by `scale` to give billionths.
    """
    names = ("times_ns", "ids", "actions", "are_bids", "prices", "sizes", "have_price", "are_last")
    columns = dict(zip(names, zip(*rows, strict=True) if rows else ((),) * 8, strict=True))
    longest = max(map(len, columns["ids"]), default=1)
    sizes = [divmod(size * scale, UNITS) for size in columns["sizes"]]
    return OrderEvents(
        np.array(columns["times_ns"], np.int64),
        np.array(columns["ids"], f"S{-8 * (-longest // 8) or 8}"),
        np.array(columns["actions"], np.int64),
        np.array(columns["are_bids"], bool),
        np.array([price * scale for price in columns["prices"]], np.int64),
        np.array(sizes, np.int64).reshape(-1, 2),
        np.array(columns["have_price"], bool),
        np.array(columns["are_last"], bool),
    )


def kind_of(state: State) -> str:
    """What a state shows: `good`, `crossed`, `locked` or `one_sided`."""
    _, bids, asks = state
    if not bids or not asks:
        return "one_sided"
    gap = asks[0][0] - bids[0][0]
    return "good" if gap > 0 else "locked" if gap == 0 else "crossed"


def expected_row(
    known: list[State], t: int, policy: Policy, grid: GridOptions
) -> tuple[bool, int, list[float]]:
    """Validity, age and absolute numbers of the row at `t`, from the states of the session ≤ t."""
    blank = [math.nan] * (1 + 4 * grid.depth)
    answers = [
        "keep" if kind_of(state) == "good" else getattr(policy, kind_of(state)) for state in known
    ]
    shown, since = known[-1], known[-1][0]
    if answers[-1] != "keep":
        good = max((i for i, answer in enumerate(answers) if answer == "keep"), default=-1)
        since = known[good + 1][0]
        limit = {"nan": -1, "hold": round(policy.hold_s * 1e9), "drop": math.inf}[answers[-1]]
        if good < 0 or t - since > limit:
            return False, t - since, blank
        shown = known[good]
    age = t - since
    is_stale = grid.max_age_s is not None and age > round(grid.max_age_s * 1e9)
    if is_stale and kind_of(shown) != "one_sided":
        return False, age, blank
    _, bids, asks = shown
    mid = (bids[0][0] + asks[0][0]) / 2 if bids and asks else math.nan
    row = [mid]
    padded = [side + [(side[-1][0], 0)] * grid.depth if side else side for side in (bids, asks)]
    for level in range(grid.depth):
        for side in padded:
            row += side[level] if side else (math.nan, math.nan)
    return bool(bids and asks), age, row


def absolute(session: Session) -> np.ndarray:
    """The session's values with the origin added back to prices."""
    values = session.values.astype(np.float64)
    for number, name in enumerate(session.columns):
        if "price" in name or name == "mid":
            values[:, number] += session.origin
    return values
