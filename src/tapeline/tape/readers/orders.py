"""Order-by-order CSV, in the layout of Bitstamp's live orders.

    id,timestamp,exchange_timestamp,price,volume,action,direction

Columns are matched by name, and others may stand beside them. A line says that an order was
`created`, `changed` or `deleted`; direction is `bid` or `ask`; volume is what remains of it.

The rules, each counted in the report:

- Events are taken in the order of the lines, at their `timestamp`: the moment the recorder had
  them, which is what look-ahead is measured by. (`exchange_timestamp` is earlier by the delay of
  the feed, and isn't read.) A time earlier than one already reached is lifted to it. So a snapshot
  that stands before updates received while it was being fetched is known from its own time on, and
  so are they.
- A delete of an order that was never created is ignored. If its create follows within ten seconds,
  the two came in the wrong order and the create is ignored too.
- A delete takes off what the book holds under its id; the price it names is that of the last fill.
- A change of an unknown order, and a create of a known one, put the order where they say.
- An order of size zero rests at no level. Nor does one whose price stands for none: zero or less,
  999,999,999 or 9,999,999,999, which market orders are written as. Orders that are merely far from
  the market are kept, and lie deep in the book.
- Of two orders that cross for `stale_cross_s` or longer, the older is evicted: its delete was lost.
- A line with a missing or unreadable field, an unknown action or side, a negative volume, more than
  nine decimals, a price off a pinned tick, or a time outside 1990 to 2100 is left out.

Does not cover: trades, level-by-level files, several instruments in one file.
"""

from __future__ import annotations

import importlib.util
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array, Session
from tapeline.tape.book import UNITS, Order, OrderBook
from tapeline.tape.grid import Cut, Grid, utc_day
from tapeline.tape.readers.text import CsvBlocks, Progress, exact_integers
from tapeline.tape.report import Counts, EvictedOrder, TapeReport

TimeUnit = Literal["s", "ms", "us", "ns"]

COLUMNS: Final = ("id", "timestamp", "price", "volume", "action", "direction")
_ACTIONS: Final = (b"created", b"changed", b"deleted")
_CREATED, _CHANGED, _DELETED = range(3)
_SIDES: Final = (b"ask", b"bid")
_NS: Final[dict[str, int]] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_YEAR_1990_S: Final = 631_152_000
_YEAR_2100_S: Final = 4_102_444_800
_NO_PRICE: Final = (999_999_999 * UNITS, 9_999_999_999 * UNITS)
_EARLY_DELETE_NS: Final = 10 * 10**9


def demo_tape() -> Path | None:
    """The half hour of BTC/USD in the data package of the `demo` extra; None without it."""
    package = importlib.util.find_spec("ob_analytics")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "_sample_data" / "orders.csv.gz"
    return path if path.exists() else None


def read_orders(
    path: Path | str,
    *,
    instrument: str,
    step_ns: int = 500_000_000,
    depth: int = 10,
    stale_cross_s: float = 1.0,
    hold_s: float = 1.0,
    max_unreadable_share: float = 0.001,
    time_unit: TimeUnit | None = None,
    tick: str | float | None = None,
    cut: Cut = utc_day,
    progress: Progress | None = None,
) -> tuple[list[Session], TapeReport]:
    """Rebuild the book of a file of orders and put it on a grid.

    Memory is bounded by a block of the file, the orders that rest in the book, and the rows.

    Args:
        path: CSV file, plain or gzipped.
        instrument: name in the sessions' keys.
        step_ns: nanoseconds between rows.
        depth: levels per side.
        stale_cross_s: how long two orders may cross before the older is evicted.
        hold_s: how old a cross may be for a row to show the state before it.
        max_unreadable_share: largest share of lines that may be left out.
        time_unit: unit of the times; detected by magnitude if None.
        tick: step of the prices, to refuse lines that are off it; only reported if None.
        cut: from the time of an event to the span of its session; UTC days by default.
        progress: called with the bytes read and the bytes of the file.

    Returns:
        Sessions of `book_columns(depth)` (see `grid`), and the account of what became of each line.

    Raises:
        TapeError: the file can't be read as what it claims to be, or gives no valid row.
    """
    path = Path(path)
    counts = Counts()
    parser = _Parser(path, time_unit, _tick_units(tick))
    blocks = CsvBlocks(path, COLUMNS, progress)
    replay = _Replay(instrument, counts, step_ns, depth, stale_cross_s, hold_s, cut)
    for num_before, batch in blocks:
        events, unreadable_rows = parser.parse(batch)
        counts.lines_read += len(events.ids)
        blocks.leave_out(batch, num_before, unreadable_rows)
        replay.apply(events)
    counts.lines_unreadable = blocks.unreadable.num
    counts.lines_read += blocks.unreadable.num
    blocks.unreadable.check(path, counts.lines_read, max_unreadable_share)
    sessions = replay.grid.finish()
    return sessions, _report(blocks, parser, replay, counts, sessions)


def _report(
    blocks: CsvBlocks, parser: _Parser, replay: _Replay, counts: Counts, sessions: list[Session]
) -> TapeReport:
    if counts.rows == counts.rows_marked:
        raise TapeError(
            blocks.path,
            expected="a book with both sides at one instant of the grid or more",
            found=f"{counts.lines_read:,} lines and {counts.rows:,} rows, none of them valid",
            fix="Check the file, or lower step_ns",
        )
    return TapeReport(
        source=str(blocks.path),
        time_unit=parser.time_unit or "",
        tick=parser.tick,
        first_ns=replay.first_ns,
        last_ns=replay.now_ns,
        num_sessions=len(sessions),
        counts=counts,
        first_unreadable=blocks.unreadable.first,
        evicted=tuple(replay.evicted),
    )


def _tick_units(tick: str | float | None) -> int | None:
    if tick is None:
        return None
    try:
        units = Decimal(str(tick)) * UNITS
        if units > 0 and units == int(units):
            return int(units)
    except (InvalidOperation, OverflowError, ValueError):
        pass
    raise TapeError(
        "tick",
        expected="a price step above zero of nine decimals or fewer",
        found=repr(tick),
        fix="Give it as a decimal number such as 0.01, or leave it out",
    )


class _Events(NamedTuple):
    """Readable lines, column by column."""

    times_ns: Int64Array
    ids: list[bytes]
    actions: list[int]
    are_bids: list[bool]
    prices: list[int]
    sizes: list[int]
    have_price: list[bool]


class _Parser:
    """From blocks of text to events. What it detects in the first block holds for all."""

    def __init__(self, path: Path, time_unit: TimeUnit | None, tick: int | None) -> None:
        if time_unit is not None and time_unit not in get_args(TimeUnit):
            raise TapeError(
                "time_unit", expected="s, ms, us or ns", found=repr(time_unit), fix="Give one"
            )
        self._path = path
        self._tick = tick
        self._price_divisor = 0
        self.time_unit: str | None = time_unit

    @property
    def tick(self) -> str:
        """The pinned tick, or the decimals that the prices so far make use of."""
        units = self._tick
        if units is None:
            units = UNITS
            while self._price_divisor % units:
                units //= 10
        return f"{(Decimal(units) / UNITS).normalize():f}"

    def parse(self, batch: pa.RecordBatch) -> tuple[_Events, Int64Array]:
        """The block's events, and the rows that are none."""
        times, readable = exact_integers(batch.column("timestamp"), 0)
        times_ns, in_range = self._to_ns(times, readable)
        prices, price_readable = exact_integers(batch.column("price"), 9)
        sizes, size_readable = exact_integers(batch.column("volume"), 9)
        actions = pc.index_in(batch.column("action"), pa.array(_ACTIONS, pa.binary()))
        sides = pc.index_in(batch.column("direction"), pa.array(_SIDES, pa.binary()))
        ids = batch.column("id")
        readable = in_range & price_readable & size_readable & (sizes >= 0).astype(bool)
        for other in (actions.is_valid(), sides.is_valid(), pc.greater(pc.binary_length(ids), 0)):
            readable &= np.asarray(other)
        have_price = (prices > 0).astype(bool) & ~np.isin(prices, _NO_PRICE)
        if self._tick is not None:
            readable &= ~have_price | (prices % self._tick == 0).astype(bool)
        rows = np.flatnonzero(readable)
        prices = prices[rows]
        self._price_divisor = int(np.gcd.reduce(prices, initial=self._price_divisor))
        events = _Events(
            times_ns[rows],
            ids.take(rows).to_pylist(),
            actions.take(rows).to_pylist(),
            [side == 1 for side in sides.take(rows).to_pylist()],
            prices.tolist(),
            sizes[rows].tolist(),
            have_price[rows].tolist(),
        )
        return events, np.flatnonzero(~readable)

    def _to_ns(self, times: npt.NDArray[Any], readable: BoolArray) -> tuple[Int64Array, BoolArray]:
        """Nanoseconds, and which of the times are between 1990 and 2100."""
        if self.time_unit is None and readable.any():
            middle = int(np.sort(times[readable])[readable.sum() // 2])
            self.time_unit = self._detect(middle)
        ns = _NS[self.time_unit or "ns"]
        in_range = (times >= _YEAR_1990_S * 10**9 // ns) & (times < _YEAR_2100_S * 10**9 // ns)
        in_range = readable & in_range.astype(bool)
        return np.where(in_range, times, 0).astype(np.int64) * ns, in_range

    def _detect(self, time: int) -> str:
        for unit, ns in _NS.items():
            if _YEAR_1990_S <= time * ns // 10**9 < _YEAR_2100_S:
                return unit
        raise TapeError(
            f"{self._path}, column timestamp",
            expected="times from 1990 to 2100 in s, ms, us or ns since 1970",
            found=f"{time} in the middle of the first block",
            fix="Check the column, or pin time_unit",
        )


class _Replay:
    """Applies events to a book, by the rules, and lets the grid look at it in between."""

    def __init__(
        self,
        instrument: str,
        counts: Counts,
        step_ns: int,
        depth: int,
        stale_cross_s: float,
        hold_s: float,
        cut: Cut,
    ) -> None:
        self._counts = counts
        self._stale_ns = _to_ns("stale_cross_s", stale_cross_s)
        self._book = OrderBook()
        self._early_deletes: dict[bytes, int] = {}
        self._last_raw_ns = 0
        self.grid = Grid(
            self._book,
            instrument,
            counts,
            step_ns=step_ns,
            depth=depth,
            hold_ns=_to_ns("hold_s", hold_s),
            before_row=self._evict,
            cut=cut,
        )
        self.evicted: list[EvictedOrder] = []
        self.first_ns = 0
        self.now_ns = 0

    def apply(self, events: _Events) -> None:
        """Apply a block of events."""
        if not events.ids:
            return
        self.first_ns = self.first_ns or int(events.times_ns[0])
        book, grid = self._book, self.grid
        for time_ns, order_id, action, is_bid, price, size, has_price in zip(
            self._lifted(events.times_ns), *events[1:], strict=True
        ):
            grid.advance(time_ns)
            if action == _DELETED:
                if not book.remove(order_id):
                    self._counts.deletes_unknown += 1
                    self._early_deletes[order_id] = time_ns
                continue
            if order_id in self._early_deletes and self._was_deleted(order_id, time_ns):
                continue
            self._count_odd(action == _CREATED, order_id in book, size, has_price)
            resting = size if has_price else 0
            if book.would_cross(is_bid, price):
                grid.hold()
            book.place(order_id, Order(is_bid, price, resting, time_ns))
        self._counts.created += events.actions.count(_CREATED)
        self._counts.changed += events.actions.count(_CHANGED)
        self._counts.deleted += events.actions.count(_DELETED)
        self._forget_early_deletes()

    def _lifted(self, times_ns: Int64Array) -> list[int]:
        """The times with none earlier than one before it."""
        before = np.concatenate([[self._last_raw_ns], times_ns[:-1]])
        lifted = np.maximum.accumulate(np.maximum(times_ns, self.now_ns))
        self._counts.times_stepped_back += int(np.count_nonzero(times_ns < before))
        self._counts.times_lifted += int(np.count_nonzero(lifted > times_ns))
        self._last_raw_ns, self.now_ns = int(times_ns[-1]), int(lifted[-1])
        times: list[int] = lifted.tolist()
        return times

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
            if self.now_ns - time_ns <= _EARLY_DELETE_NS
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
        crossed_ns = instant_ns - self.grid.crossed_since_ns
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


def _to_ns(name: str, seconds: float) -> int:
    if not 0 <= seconds < _YEAR_2100_S:  # also refuses NaN
        raise TapeError(
            name, expected="seconds, zero or more", found=str(seconds), fix=f"Correct {name}"
        )
    return round(seconds * 1e9)
