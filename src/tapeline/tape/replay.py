"""Books rebuilt event by event, looked at by the grid in between.

Covers events of orders and of price levels: their rules, and from the numbers that `kernel` takes
down to rows. Does not cover sessions or files.

The rules for orders, each counted:

- A delete of an order that was never created is ignored. If its create follows within ten seconds,
  the two came in the wrong order and the create is ignored too.
- A delete takes off what the book holds under its id, whatever price it names.
- A change of an unknown order, and a create of a known one, put the order where they say.
- An order of size zero rests at no level, nor does one whose price stands for none.
- Of two orders that cross for `Policy.stale_cross_s` or longer, the older is evicted: its delete
  was lost. They cross from when the younger was placed; of two placed at once the bid goes. An
  order that is changed keeps its age if it keeps its side and price. An evicted one stays known.

Events of levels that share a time are one update, and so are events of orders up to one that is
said to be the last: nothing in between is ever shown.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple

import numpy as np

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import Block, Float64Array, LevelEvents, OrderEvents
from tapeline.tape.book import (
    BILLIONTHS,
    BORN,
    ID,
    IS_ASK,
    IS_BID,
    KIND,
    PLACED_NS,
    PRICE,
    UNITS,
    WHOLE,
    Book,
    Orders,
    words_of,
)
from tapeline.tape.grid import GridOptions, Policy, Rows, to_ns
from tapeline.tape.report import Counts, EvictedOrder

_BUFFER_BYTES: Final = 4 << 20
_NEVER_NS: Final = 2**63 - 1
_EXACT: Final = 1 << 53  # integers up to it are floats, and their quotients rounded once


class Grid(NamedTuple):
    """What the kernel knows beside the book, and the rows it takes down: the last is for the book
    that is held.

    Attributes:
        now: int64 numbers, at the places that `kernel` names.
        counted: int64 `[len(kernel.COUNTED)]`.
        limits_ns: int64 `[4]`, of `Policy`.
        times_ns, since_ns, marks: int64 `[rows + 1]`, as `Rows.add` takes them.
        prices: int64 `[rows + 1, depth, 2]`.
        sizes: int64 `[rows + 1, depth, 2, 2]`: whole units and billionths.
        nums: int64 `[rows + 1, 2]`: levels that are known of each side.
    """

    now: Int64Array
    counted: Int64Array
    limits_ns: Int64Array
    times_ns: Int64Array
    since_ns: Int64Array
    marks: Int64Array
    prices: Int64Array
    sizes: Int64Array
    nums: Int64Array


class Replay(ABC):
    """Applies blocks of events to a book, and takes the rows of one session after the other.

    For each session `open`, then `apply` its blocks, then `close`. A step back in time is settled
    beforehand.
    """

    def __init__(self, options: GridOptions, policy: Policy, counts: Counts) -> None:
        assert options.step_ns is not None, "events have no rows of their own"
        # Importing numba takes a second, which only books of events need.
        self._kernel = kernel = importlib.import_module("tapeline.tape.kernel")
        num = max(16, _BUFFER_BYTES // (48 * options.depth)) + 1
        shape = (num, options.depth, 2)
        self._grid = Grid(
            now=_zeros(kernel.IS_WHOLE + 1),
            counted=_zeros(len(kernel.COUNTED)),
            limits_ns=policy.limits_ns(),
            times_ns=_zeros(num),
            since_ns=_zeros(num),
            marks=_zeros(num),
            prices=_zeros(*shape),
            sizes=_zeros(*shape, 2),
            nums=_zeros(num, 2),
        )
        now = self._grid.now
        now[kernel.STEP_NS], now[kernel.IS_WHOLE] = options.step_ns, 1
        now[[kernel.STALE_NS, kernel.LAST_NS, kernel.EVICTED_NS]] = -1
        self.evicted: list[EvictedOrder] = []
        self._book = Book.empty()
        self._depth = options.depth
        self._counts = counts
        self._rows: Rows | None = None

    def open(self, rows: Rows | None) -> None:
        """Begin a session; None for events outside every session, which no row shows."""
        kernel, now = self._kernel, self._grid.now
        self._rows = rows
        now[[kernel.HAS_HELD, kernel.NUM_EVENTS, kernel.NUM_SINCE_ROW]] = 0
        now[kernel.NEXT_NS] = _NEVER_NS

    def apply(self, block: Block) -> None:
        """Apply a block whose times never step back, nor before the last one's."""
        if not len(block.times_ns):
            return
        kernel, now = self._kernel, self._grid.now
        if self._rows is not None and not now[kernel.NUM_EVENTS]:
            first_ns = int(block.times_ns[0])
            self._rows.begin(first_ns)
            now[kernel.NEXT_NS], now[kernel.BAD_SINCE_NS] = self._rows.next_ns, first_ns
        self._apply(block)
        self._tell()

    def close(self, until_ns: int) -> None:
        """Take the rows up to `until_ns`."""
        if self._rows is not None:
            kernel = self._kernel
            if self._grid.now[kernel.NUM_EVENTS]:
                while code := kernel.advance(self._book, self._grid, until_ns + 1):
                    self._help(code, until_ns + 1)
                self._flush(self._rows)
            self._counts.events_after_last_row += int(self._grid.now[kernel.NUM_SINCE_ROW])
            self._tell()
        self._rows = None

    def finish(self) -> None:  # noqa: B027 - an event of an order is complete by itself
        """Nothing follows on the tape."""

    @abstractmethod
    def _apply(self, block: Block) -> None:
        """Run the kernel to the end of a block that isn't empty."""

    def _tell(self) -> None:
        """Hand over what the kernel has counted."""
        for name, number in zip(self._kernel.COUNTED, self._grid.counted.tolist(), strict=True):
            setattr(self._counts, name, getattr(self._counts, name) + number)
        self._grid.counted[:] = 0

    def _help(self, code: int, time_ns: int) -> None:
        """Do what the kernel stopped for, before an event at `time_ns` or the session's end."""
        kernel = self._kernel
        if code == kernel.LEVELS_FULL:
            self._book = self._book.grown()
            return
        assert self._rows is not None, "outside sessions no row is due"
        self._flush(self._rows)
        if code == kernel.TOO_MANY_ROWS:
            self._rows.due(time_ns - 1)

    def _flush(self, rows: Rows) -> None:
        """Hand over the rows that wait."""
        kernel, grid = self._kernel, self._grid
        rows.next_ns = int(grid.now[kernel.NEXT_NS])
        num = int(grid.now[kernel.NUM_ROWS])
        if num:
            taken = Grid(*grid[:3], *(array[:num] for array in grid[3:]))
            values = self._values(rows, taken)
            rows.add(taken.times_ns.copy(), taken.since_ns, taken.marks, values)
            grid.now[kernel.NUM_ROWS] = 0

    def _values(self, rows: Rows, taken: Grid) -> Float64Array:
        """Differences are exact, and rounded once each."""
        are_known = taken.nums > 0  # [rows, 2]
        if rows.origin is None and are_known.any():
            row = int(np.argmax(are_known.any(axis=1)))
            rows.origin = int(taken.prices[row, 0, int(np.argmax(are_known[row]))])
        prices = taken.prices - int(rows.origin or 0)
        has_both = are_known.all(axis=1)
        num_thin = np.count_nonzero(has_both & (taken.nums.min(axis=1) < self._depth))
        self._counts.rows_thin += int(num_thin)
        values = np.empty((len(prices), 1 + 4 * self._depth))
        values[:, 0] = np.where(has_both, _quotient(prices[:, 0].sum(axis=1), 2 * UNITS), np.nan)
        levels = values[:, 1:].reshape(-1, self._depth, 2, 2)
        levels[..., 0], levels[..., 1] = _quotient(prices, UNITS), _in_units(taken.sizes)
        levels[np.broadcast_to(~are_known[:, None], levels.shape[:3])] = np.nan
        return values


class OrderReplay(Replay):
    """Follows single orders."""

    def __init__(self, options: GridOptions, policy: Policy, counts: Counts) -> None:
        super().__init__(options, policy, counts)
        if policy.stale_cross_s is not None:
            stale_ns = to_ns("stale_cross_s", policy.stale_cross_s)
            self._grid.now[self._kernel.STALE_NS] = stale_ns
        self._orders = Orders.empty(1)
        self._ids: np.dtype[Any] = np.dtype(np.uint64)

    def _apply(self, block: Block) -> None:
        assert isinstance(block, OrderEvents)
        kernel = self._kernel
        ids = block.ids
        if ids.dtype.itemsize < 8 * self._orders.num_words:
            ids = ids.astype(self._ids)
        words = words_of(ids)
        self._ids = ids.dtype
        if words.shape[1] > self._orders.num_words:
            self._orders = self._orders.widened(words.shape[1])
        are_last = np.ones(len(ids), bool) if block.are_last is None else block.are_last
        events = (block.times_ns, words, *block[2:-1], are_last)
        at = 0
        while at < len(ids):
            code, at = kernel.orders(events, at, self._book, self._orders, self._grid)
            if code:
                self._help(code, int(block.times_ns[at]))
        for action, name in enumerate(("created", "changed", "deleted", "reduced", "cleared")):
            number = int(np.count_nonzero(block.actions == action))
            setattr(self._counts, name, getattr(self._counts, name) + number)

    def _help(self, code: int, time_ns: int) -> None:
        kernel, now = self._kernel, self._grid.now
        if code == kernel.ORDERS_FULL:
            old = self._orders
            self._orders = Orders.empty(old.num_words, 2 * len(old.slots))
            kernel.rehash(old, self._orders, now[kernel.LAST_NS])
        elif code == kernel.EVICT:
            instant_ns = int(now[kernel.NEXT_NS])
            now[kernel.EVICTED_NS] = instant_ns
            self._evict(instant_ns, instant_ns - int(now[kernel.STALE_NS]))
        else:
            super()._help(code, time_ns)

    def _evict(self, instant_ns: int, latest_ns: int) -> None:
        """Take off the older of each two orders that cross, both placed by `latest_ns`."""
        while pair := self._stale_pair(latest_ns):
            at = min(pair, key=lambda place: int(self._orders.slots[place, PLACED_NS]))
            slot = self._orders.slots[at]
            self.evicted.append(
                EvictedOrder(
                    order_id=_shown(slot[ID:], self._ids),
                    side="bid" if slot[KIND] == IS_BID else "ask",
                    price=int(slot[PRICE]) / UNITS,
                    placed_ns=int(slot[PLACED_NS]),
                    evicted_ns=instant_ns,
                )
            )
            self._kernel.take_off(self._book, self._orders.slots, at)
            slot[WHOLE] = slot[BILLIONTHS] = 0

    def _stale_pair(self, latest_ns: int) -> tuple[int, ...]:
        """The slots of the best bid and the best ask placed by then, if they cross; else none."""
        slots = self._orders.slots
        rests = (slots[:, WHOLE] > 0) | (slots[:, BILLIONTHS] > 0)
        rests &= slots[:, PLACED_NS] <= latest_ns
        best = []
        for kind, sign in ((IS_BID, -1), (IS_ASK, 1)):
            places = np.flatnonzero(rests & (slots[:, KIND] == kind))
            if not len(places):
                return ()
            found = slots[places]
            ranks = (found[:, BORN], found[:, PLACED_NS], sign * found[:, PRICE])
            best.append(int(places[np.lexsort(ranks)[0]]))
        bid, ask = best
        return (bid, ask) if slots[bid, PRICE] >= slots[ask, PRICE] else ()


class LevelReplay(Replay):
    """Follows price levels."""

    def _apply(self, block: Block) -> None:
        assert isinstance(block, LevelEvents)
        kernel = self._kernel
        are_clears = np.array(block.are_clears, bool)
        events = (
            block.times_ns,
            are_clears,
            np.array(block.are_bids, bool),
            _as_int64(block.prices, "a price"),
            _split(block.sizes),
        )
        at = 0
        while at < len(are_clears):
            code, at = kernel.levels(events, at, self._book, self._grid)
            if code:
                self._help(code, int(block.times_ns[at]))
        num_cleared = int(np.count_nonzero(are_clears))
        self._counts.levels_set += len(are_clears) - num_cleared
        self._counts.cleared += num_cleared

    def finish(self) -> None:
        """The last update is whole."""
        if self._grid.now[self._kernel.LAST_NS] >= 0:
            self._kernel.count_state(self._book, self._grid)
            self._tell()


def _zeros(*shape: int) -> Int64Array:
    return np.zeros(shape, np.int64)


def _shown(words: Int64Array, kind: np.dtype[Any]) -> str:
    """An id as the file has it."""
    if kind == np.uint64:
        return str(words.view(np.uint64)[0])
    return words.tobytes().rstrip(b"\0").decode("utf-8", "replace")


def _as_int64(numbers: list[int], what: str) -> Int64Array:
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        highest = max(numbers, key=abs)
        raise TapeError(
            "events of a book",
            expected=f"{what} below {2**63 // UNITS:,}",
            found=f"{highest // UNITS:,}",
            fix="Leave the event out, or write the file in another unit",
        ) from None


def _split(sizes: list[int]) -> Int64Array:
    """Billionths as whole units and the billionths beyond them."""
    try:
        whole, rest = np.divmod(np.array(sizes, np.int64), UNITS)
    except OverflowError:
        whole = _as_int64([size // UNITS for size in sizes], "a size in billionths")
        rest = np.array([size % UNITS for size in sizes], np.int64)
    return np.stack([whole, rest], axis=1)


def _quotient(numbers: Int64Array, by: int) -> Float64Array:
    """`numbers / by`, rounded once."""
    quotients: Float64Array = numbers / by
    are_far: BoolArray = np.abs(numbers) > _EXACT
    if are_far.any():
        quotients[are_far] = [number / by for number in numbers[are_far].tolist()]
    return quotients


def _in_units(sizes: Int64Array) -> Float64Array:
    """Sums of whole units and of billionths `[…, 2]` as units `[…]`, rounded once."""
    wholes = sizes[..., 0] + sizes[..., 1] // UNITS
    billionths = sizes[..., 1] % UNITS
    units: Float64Array = wholes.astype(np.float64)
    rest = billionths > 0
    if rest.any():
        are_small = rest & (wholes < _EXACT // UNITS)
        units[are_small] = (wholes[are_small] * UNITS + billionths[are_small]) / UNITS
        large = rest & ~are_small
        pairs = zip(wholes[large].tolist(), billionths[large].tolist(), strict=True)
        units[large] = [(whole * UNITS + more) / UNITS for whole, more in pairs]
    return units
