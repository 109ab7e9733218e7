"""Blocks of whole books, and of table rows, put on the grid without a loop over events.

Covers finding each instant's state, the policy for books that show no market, and what must be
carried from a block to the next. Does not cover sessions, nor books rebuilt from events.

What is carried is at most three states: the last good one, the first bad one after it, and the
last. Put before the next block they make its rows what they would be in one block with all before.
"""

from __future__ import annotations

import numpy as np

from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import BookStates, Float64Array, TableRows
from tapeline.tape.book import UNITS
from tapeline.tape.grid import (
    CROSSED,
    FOREVER,
    GOOD,
    KEEP,
    LOCKED,
    MISSING,
    ONE_SIDED,
    GridOptions,
    Policy,
    Rows,
)
from tapeline.tape.report import Counts


class StateGrid:
    """Turns the states of one session after another into rows.

    For each session `open`, then `add` its blocks, then `close`. Times never step back.
    """

    def __init__(self, options: GridOptions, policy: Policy, counts: Counts) -> None:
        self._options = options
        self._limits_ns = policy.limits_ns()
        self._counts = counts
        self._rows: Rows | None = None
        self._carried: BookStates | TableRows | None = None
        self._num_since_row = 0

    def open(self, rows: Rows | None) -> None:
        """Begin a session, None for what is outside all: nothing is carried into it."""
        self._rows, self._carried, self._num_since_row = rows, None, 0

    def add(self, block: BookStates | TableRows) -> None:
        """Take the rows that the block decides."""
        assert self._rows is not None, "`open` comes first"
        num_carried = 0
        self._num_since_row += len(block)
        if self._carried is None:
            self._rows.begin(int(block.times_ns[0]))
        else:
            num_carried = len(self._carried)
            block = _joined(self._carried, block)
        kinds = _kinds(block)
        if isinstance(block, BookStates):
            self._count(kinds[num_carried:])
        elif block.bar_ns:
            self._count_bars(block)
        if self._options.step_ns is None:
            at = np.arange(num_carried, len(block))
            at = at[self._limits_ns[kinds[at]] != FOREVER]
            self._take(block, kinds, at, block.times_ns[at])
        else:
            # A later event may share the time of the last: what it shows isn't known yet.
            self._take_until(block, kinds, int(block.times_ns[-1]) - 1)
        good = self._limits_ns[kinds] == KEEP
        last = len(block) - 1
        kept = {last}
        if not good[last]:
            before = np.flatnonzero(good)[-1:].tolist()
            kept |= {*before, *(number + 1 for number in before or [-1])}
        self._carried = block.take(np.array(sorted(kept)))

    def close(self, until_ns: int) -> None:
        """Take the rows up to `until_ns`, and forget."""
        if self._options.step_ns is not None and self._carried is not None:
            self._take_until(self._carried, _kinds(self._carried), until_ns)
            self._counts.events_after_last_row += self._num_since_row
        self._carried = None

    def _take_until(self, block: BookStates | TableRows, kinds: Int64Array, until_ns: int) -> None:
        assert self._rows is not None, "`open` comes first"
        instants = self._rows.due(until_ns)
        at = np.searchsorted(block.times_ns, instants, side="right") - 1
        if len(at):
            self._num_since_row = len(block) - 1 - int(at[-1])
        self._take(block, kinds, at, instants)

    def _take(
        self,
        block: BookStates | TableRows,
        kinds: Int64Array,
        at: Int64Array,
        instants: Int64Array,
    ) -> None:
        """Add a row for each of `instants`, of which the state `at` is the last one known."""
        if not len(instants):
            return
        limits_ns = self._limits_ns[kinds]
        good = limits_ns == KEEP
        shown = np.maximum.accumulate(np.where(good, np.arange(len(good)), -1))[at]
        is_bad = ~good[at]
        since_ns = block.times_ns[np.where(is_bad, shown + 1, at)]
        is_held = is_bad & (shown >= 0) & (instants - since_ns <= limits_ns[at])
        marks = np.where(is_bad & ~is_held, kinds[at], GOOD)
        source = np.where(is_held, shown, at)
        if isinstance(block, BookStates):
            self._counts.rows_held += int(np.count_nonzero(is_held))
            values, marks = self._book_values(block.take(source), marks, kinds[source])
        else:
            values = self._table_values(block.take(source), marks)
        assert self._rows is not None
        self._rows.add(instants, since_ns, marks, values)

    def _book_values(
        self, shown: BookStates, marks: Int64Array, kinds: Int64Array
    ) -> tuple[Float64Array, Int64Array]:
        assert self._rows is not None, "`open` comes first"
        depth = self._options.depth
        prices, sizes, exist = _levels(shown, depth)
        blank = marks != GOOD
        lone = (kinds == ONE_SIDED) & ~blank
        known = exist[:, 0] & ~blank[:, None]  # [n, 2]
        if self._rows.origin is None and known.any():
            first = int(np.argmax(known.any(axis=1)))
            self._rows.origin = int(prices[first, 0, int(np.argmax(known[first]))])
        origin = int(self._rows.origin or 0)
        values = np.empty((len(prices), 1 + 4 * depth))
        best = prices[:, 0].sum(axis=1) - 2 * origin
        values[:, 0] = best / (2 * UNITS)
        book = values[:, 1:].reshape(-1, depth, 2, 2)
        book[..., 0] = (prices - origin) / UNITS
        book[..., 1] = sizes
        self._counts.rows_thin += int(
            np.count_nonzero(~blank & ~lone & ~exist[:, depth - 1].all(axis=1))
        )
        values[blank] = np.nan
        if lone.any():
            values[lone, 0] = np.nan
            absent = ~exist[:, 0] & lone[:, None]  # [n, 2]
            book[np.broadcast_to(absent[:, None], book.shape[:3])] = np.nan
            marks = np.where(lone, ONE_SIDED, marks)
        return values, marks

    def _table_values(self, shown: TableRows, marks: Int64Array) -> Float64Array:
        assert self._rows is not None, "`open` comes first"
        are_prices = np.array(shown.are_prices)
        values = shown.values.copy()
        missing = np.isnan(values).any(axis=1)
        marks[missing] = MISSING
        if self._rows.origin is None and not missing.all():
            first = values[int(np.argmin(missing))]
            self._rows.origin = float(first[are_prices][0]) if are_prices.any() else 0.0
        values[:, are_prices] -= self._rows.origin or 0.0
        return values

    def _count(self, kinds: Int64Array) -> None:
        found = np.bincount(kinds, minlength=ONE_SIDED + 1).tolist()
        self._counts.states += len(kinds)
        self._counts.states_crossed += found[CROSSED]
        self._counts.states_locked += found[LOCKED]
        self._counts.states_one_sided += found[ONE_SIDED]

    def _count_bars(self, bars: TableRows) -> None:
        """Bars that share a time, or lack between two of a session: no rule repairs either."""
        steps_ns, on_grid = np.diff(bars.times_ns), self._options.step_ns is not None
        missing = np.maximum(-(-steps_ns // bars.bar_ns) - 1, 0).sum()
        self._counts.count(
            "bars of the same time as the one before, "
            + ("which they replace" if on_grid else "each a row of its own"),
            int(np.count_nonzero(steps_ns == 0)),
        )
        self._counts.count(
            "bars missing inside a session, "
            + (
                "the one before shown as long as `max_age_s` lets it"
                if on_grid
                else "the rows around them being neighbours: `step_s` gives each a row"
            ),
            int(missing),
        )


def _kinds(block: BookStates | TableRows) -> Int64Array:
    """What is wrong with each state: `GOOD`, `CROSSED`, `LOCKED` or `ONE_SIDED`."""
    if isinstance(block, TableRows):
        return np.full(len(block), GOOD)  # a missing cell takes nothing from the others
    if not block.prices.shape[1]:
        return np.full(len(block), ONE_SIDED)
    bid, ask = block.prices[:, 0].T
    kinds = np.where(bid > ask, CROSSED, np.where(bid == ask, LOCKED, GOOD))
    kinds[(block.sizes[:, 0] <= 0).any(axis=1)] = ONE_SIDED
    return kinds


def _joined(
    earlier: BookStates | TableRows, block: BookStates | TableRows
) -> BookStates | TableRows:
    if isinstance(block, BookStates) and isinstance(earlier, BookStates):
        return block.after(earlier)
    assert isinstance(block, TableRows), "one kind of block in a tape"
    assert isinstance(earlier, TableRows), "one kind of block in a tape"
    return block.after(earlier)


def _levels(shown: BookStates, depth: int) -> tuple[Int64Array, Float64Array, BoolArray]:
    """Prices, sizes and which levels exist, of `depth` levels; missing ones repeat the price."""
    given = shown.prices.shape[1]
    shape = (len(shown), max(depth, given), 2)
    prices, sizes = np.zeros(shape, np.int64), np.zeros(shape)
    prices[:, :given], sizes[:, :given] = shown.prices, shown.sizes
    prices, sizes = prices[:, :depth], sizes[:, :depth]
    exist = sizes > 0
    if not exist.all():
        for level in range(1, depth):
            np.copyto(prices[:, level], prices[:, level - 1], where=~exist[:, level])
    return prices, sizes, exist
