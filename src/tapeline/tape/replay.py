"""Books rebuilt event by event, looked at by the grid in between.

Covers events of orders and of price levels: their rules, the policy for books that show no market,
and the rows. Does not cover sessions or files.

The rules for orders, each counted:

- A delete of an order that was never created is ignored. If its create follows within ten seconds,
  the two came in the wrong order and the create is ignored too.
- A delete takes off what the book holds under its id, whatever price it names.
- A change of an unknown order, and a create of a known one, put the order where they say.
- An order of size zero rests at no level, nor does one whose price stands for none.
- Of two orders that cross for `Policy.stale_cross_s` or longer, the older is evicted: its delete
  was lost.

Events of levels that share a time are one update, and so are events of orders up to one that is
said to be the last: nothing in between is ever shown.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np

from tapeline.tape.blocks import (
    CLEARED,
    CREATED,
    DELETED,
    REDUCED,
    Block,
    LevelEvents,
    OrderEvents,
)
from tapeline.tape.book import UNITS, Book, Order, OrderBook
from tapeline.tape.grid import (
    CROSSED,
    GOOD,
    KEEP,
    LOCKED,
    ONE_SIDED,
    GridOptions,
    Policy,
    Rows,
    to_ns,
)
from tapeline.tape.report import Counts, EvictedOrder

_Side = list[tuple[int, int]]

_EARLY_DELETE_NS: Final = 10 * 10**9
_FLUSH_ROWS: Final = 1_024


class BookGrid:
    """Takes the rows of a book that changes.

    `before_row` is called with each instant before its row is taken, to tidy the book.

    For each session `open`; for each event in time order `advance(time)`, then `hold()` if it may
    leave the book without a market, then change the book; `close` at the session's end. A step
    back in time is settled beforehand.
    """

    def __init__(
        self,
        book: Book,
        options: GridOptions,
        policy: Policy,
        counts: Counts,
        before_row: Callable[[int], None] | None = None,
    ) -> None:
        assert options.step_ns is not None, "events have no rows of their own"
        self._book = book
        self._depth = options.depth
        self._step_ns = options.step_ns
        self._limits_ns: list[int] = policy.limits_ns().tolist()
        self._counts = counts
        self._before_row = before_row
        self._rows: Rows | None = None
        self._num_events = 0  # of the session
        self._held: tuple[_Side, _Side] | None = None
        self._bad_since_ns = -1  # meaningful while the book is bad, and never before the session
        self._due_ns = -1  # an event later than this has rows to be taken before it
        self._num_since_row = 0
        self._taken: list[tuple[int, int, int, list[float]]] = []
        self.last_ns = -1

    def open(self, rows: Rows | None) -> None:
        """Begin a session; None for events outside every session, which no row shows."""
        self._rows, self._held, self._num_events = rows, None, 0
        self._due_ns = -1 if rows is not None else 2**63 - 1
        self._num_since_row = 0

    def kind(self) -> int:
        """What is wrong with the book: `GOOD`, `CROSSED`, `LOCKED` or `ONE_SIDED`."""
        bids, asks = self._book.bids.keys, self._book.asks.keys
        if not bids or not asks:
            return ONE_SIDED
        spread = bids[-1] + asks[-1]  # an ask's key is minus its price
        return GOOD if spread < 0 else LOCKED if spread == 0 else CROSSED

    def advance(self, time_ns: int) -> None:
        """Take every row that is due before an event at `time_ns` changes the book."""
        if time_ns > self._due_ns:
            assert self._rows is not None
            if not self._num_events:
                self._rows.begin(time_ns)
                self._bad_since_ns = time_ns
            self._take_until(self._rows, time_ns - 1)
            self._due_ns = self._rows.next_ns
        self.last_ns = time_ns
        self._num_events += 1
        self._num_since_row += 1

    def hold(self) -> None:
        """Remember the book as it is, if good: the event in hand may be the end of that.

        What the book was before the session's first event is not the session's.
        """
        if self._num_events > 1 and self._limits_ns[self.kind()] == KEEP:
            self._held = self._top()
            self._bad_since_ns = self.last_ns

    def forget(self) -> None:
        """What was remembered is no longer known to have been followed by what comes."""
        self._held = None
        self._bad_since_ns = self.last_ns

    def close(self, until_ns: int) -> None:
        """Take the rows up to `until_ns`."""
        if self._rows is not None:
            if self._num_events:
                self._take_until(self._rows, until_ns)
                self._flush(self._rows)
            self._counts.events_after_last_row += self._num_since_row
        self._rows = None

    def _take_until(self, rows: Rows, until_ns: int) -> None:
        if rows.next_ns > until_ns:
            return
        self._num_since_row = 0
        for instant_ns in rows.due(until_ns).tolist():
            if self._before_row is not None:
                self._before_row(instant_ns)
            self._taken.append(self._row(rows, instant_ns))
            if len(self._taken) == _FLUSH_ROWS:
                self._flush(rows)

    def _flush(self, rows: Rows) -> None:
        if self._taken:
            *numbers, values = zip(*self._taken, strict=True)
            times, since, marks = np.array(numbers, np.int64)
            rows.add(times, since, marks, np.array(values))
            self._taken.clear()

    def _row(self, rows: Rows, instant_ns: int) -> tuple[int, int, int, list[float]]:
        """Instant, since when, mark, and values of one row."""
        kind = self.kind()
        limit_ns = self._limits_ns[kind]
        since_ns, sides = self.last_ns, self._held
        if limit_ns == KEEP:
            sides = self._top()
        else:
            since_ns = self._bad_since_ns
            if sides is None or instant_ns - since_ns > limit_ns:
                return instant_ns, since_ns, kind, [math.nan] * (1 + 4 * self._depth)
            self._counts.rows_held += 1
        assert sides is not None
        mark = GOOD if all(sides) else ONE_SIDED
        return instant_ns, since_ns, mark, self._values(rows, *sides)

    def _values(self, rows: Rows, bids: _Side, asks: _Side) -> list[float]:
        """Differences are exact, and rounded once each."""
        if rows.origin is None:
            rows.origin = next((side[0][0] for side in (bids, asks) if side), None)
        origin = int(rows.origin or 0)
        mid = math.nan
        if bids and asks:
            mid = (bids[0][0] + asks[0][0] - 2 * origin) / (2 * UNITS)
            self._counts.rows_thin += min(len(bids), len(asks)) < self._depth
        values = [mid]
        for bid, ask in zip(
            _levels(bids, self._depth, origin), _levels(asks, self._depth, origin), strict=True
        ):
            values += (*bid, *ask)
        return values

    def _top(self) -> tuple[_Side, _Side]:
        return self._book.bids.top(self._depth), self._book.asks.top(self._depth)


def _levels(side: _Side, depth: int, origin: int) -> list[tuple[float, float]]:
    if not side:
        return [(math.nan, math.nan)] * depth
    levels = [((price - origin) / UNITS, size / UNITS) for price, size in side]
    return levels + [(levels[-1][0], 0.0)] * (depth - len(levels))


class Replay(ABC):
    """Applies blocks of events to a book, with a `grid` that looks at it."""

    def __init__(self, grid: BookGrid, counts: Counts) -> None:
        self.grid = grid
        self.evicted: list[EvictedOrder] = []
        self._counts = counts

    @abstractmethod
    def apply(self, block: Block) -> None:
        """Apply a block whose times never step back, nor before the last one's."""

    @abstractmethod
    def finish(self) -> None:
        """Nothing follows on the tape."""

    def _count_state(self) -> None:
        kind, counts = self.grid.kind(), self._counts
        counts.states += 1
        if kind != GOOD:
            counts.states_crossed += kind == CROSSED
            counts.states_locked += kind == LOCKED
            counts.states_one_sided += kind == ONE_SIDED


class OrderReplay(Replay):
    """Follows single orders."""

    def __init__(self, options: GridOptions, policy: Policy, counts: Counts) -> None:
        self._book = OrderBook()
        stale_s = policy.stale_cross_s
        self._stale_ns = 0 if stale_s is None else to_ns("stale_cross_s", stale_s)
        evict = None if stale_s is None else self._evict
        super().__init__(BookGrid(self._book, options, policy, counts, evict), counts)
        self._crossed_since_ns = -1  # meaningful while the book is crossed
        self._is_whole = True  # no update is half applied
        self._early_deletes: dict[bytes, int] = {}

    def apply(self, block: Block) -> None:
        """Apply a block of order events."""
        assert isinstance(block, OrderEvents)
        book, grid, counts = self._book, self.grid, self._counts
        bids, asks = book.bids.keys, book.asks.keys
        are_last = block.are_last or [True] * len(block.ids)
        for time_ns, order_id, action, is_bid, price, size, has_price, is_last in zip(
            block.times_ns.tolist(), *block[1:-1], are_last, strict=True
        ):
            grid.advance(time_ns)
            crosses = action < DELETED and book.would_cross(is_bid, price)
            if crosses and not book.is_crossed:
                self._crossed_since_ns = time_ns
            if self._is_whole and (not is_last or crosses or len(bids) < 2 or len(asks) < 2):
                grid.hold()
            if action >= DELETED:
                self._take_off(time_ns, order_id, action, size)
            elif order_id not in self._early_deletes or not self._was_deleted(order_id, time_ns):
                self._count_odd(action == CREATED, order_id in book, size, has_price)
                resting = size if has_price else 0
                book.place(order_id, Order(is_bid, price, resting, time_ns))
            self._is_whole = is_last
            if is_last:
                self._count_state()
        for action, name in enumerate(("created", "changed", "deleted", "reduced", "cleared")):
            setattr(counts, name, getattr(counts, name) + block.actions.count(action))
        self._forget_early_deletes()

    def finish(self) -> None:
        """Each event was complete."""

    def _take_off(self, time_ns: int, order_id: bytes, action: int, size: int) -> None:
        if action == CLEARED:
            self._book.clear()
            self._early_deletes.clear()
            self.grid.forget()
        elif action == REDUCED:
            self._counts.deletes_unknown += not self._book.reduce(order_id, size)
        elif not self._book.remove(order_id):
            self._counts.deletes_unknown += 1
            self._early_deletes[order_id] = time_ns

    def _was_deleted(self, order_id: bytes, time_ns: int) -> bool:
        if time_ns - self._early_deletes.pop(order_id) > _EARLY_DELETE_NS:
            return False
        self._counts.deletes_unknown -= 1
        self._counts.deletes_before_create += 1
        return True

    def _forget_early_deletes(self) -> None:
        """Drop those whose create can no longer follow: a long file must not pile them up."""
        self._early_deletes = {
            order_id: time_ns
            for order_id, time_ns in self._early_deletes.items()
            if self.grid.last_ns - time_ns <= _EARLY_DELETE_NS
        }

    def _count_odd(self, is_create: bool, is_known: bool, size: int, has_price: bool) -> None:
        counts = self._counts
        if is_create:
            counts.creates_repeated += is_known
            counts.orders_without_price += not has_price
            counts.orders_without_size += has_price and not size
        else:
            counts.changes_unknown += not is_known

    def _evict(self, instant_ns: int) -> None:
        crossed_ns = instant_ns - self._crossed_since_ns
        if not self._book.is_crossed or crossed_ns < self._stale_ns:
            return
        for order_id, order in self._book.evict_stale(instant_ns, self._stale_ns):
            self.evicted.append(
                EvictedOrder(
                    order_id=order_id.decode("utf-8", "replace"),
                    side="bid" if order.is_bid else "ask",
                    price=order.price / UNITS,
                    placed_ns=order.placed_ns,
                    evicted_ns=instant_ns,
                )
            )


class LevelReplay(Replay):
    """Follows price levels."""

    def __init__(self, options: GridOptions, policy: Policy, counts: Counts) -> None:
        self._book = Book()
        super().__init__(BookGrid(self._book, options, policy, counts), counts)

    def apply(self, block: Block) -> None:
        """Apply a block of level events."""
        assert isinstance(block, LevelEvents)
        if not len(block.times_ns):
            return
        book, grid, last_ns = self._book, self.grid, self.grid.last_ns
        bounds = [0, *(np.flatnonzero(np.diff(block.times_ns)) + 1).tolist(), len(block.times_ns)]
        events = list(zip(*block[1:], strict=True))
        for start, stop in pairwise(bounds):
            time_ns = int(block.times_ns[start])
            update = events[start:stop]
            if time_ns != last_ns:
                if last_ns >= 0:
                    self._count_state()
                grid.advance(time_ns)
                # What is left of the last update may stand in the next block: too late to hold.
                if stop == len(events) or self._may_spoil(update):
                    grid.hold()
            last_ns = time_ns
            for is_clear, is_bid, price, size in update:
                if is_clear:
                    book.clear()
                    grid.forget()
                else:
                    (book.bids if is_bid else book.asks).put(price, size)
        self._counts.levels_set += block.are_clears.count(False)
        self._counts.cleared += block.are_clears.count(True)

    def finish(self) -> None:
        """The last update is whole."""
        if self.grid.last_ns >= 0:
            self._count_state()

    def _may_spoil(self, update: list[tuple[bool, bool, int, int]]) -> bool:
        """Whether the book may be left without a market: rather said once too often."""
        bids, asks = self._book.bids, self._book.asks
        num_gone = sum(not size for *_, size in update)
        if min(len(bids.keys), len(asks.keys)) <= num_gone or any(clear for clear, *_ in update):
            return True
        assert bids.best is not None
        assert asks.best is not None
        highest_bid = max(
            [price for _, is_bid, price, size in update if is_bid and size], default=bids.best
        )
        lowest_ask = min(
            [price for _, is_bid, price, size in update if size and not is_bid], default=asks.best
        )
        return max(highest_bid, bids.best) >= min(lowest_ask, asks.best)
