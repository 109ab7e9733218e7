"""Order-by-order CSV, in the layout of Bitstamp's live orders.

    id,timestamp,exchange_timestamp,price,volume,action,direction

Columns are matched by name, and others may stand beside them. A line says that an order was
`created`, `changed` or `deleted`; direction is `bid` or `ask`; both in any case; volume is what
remains of it. A time is a number since 1970 or in ISO 8601, with up to nine decimals.

The rules, each counted in the report, beside those of `replay`:

- Events are taken in the order of the lines, at their `timestamp`: the moment the recorder had
  them, which is what look-ahead is measured by. (`exchange_timestamp` is earlier by the delay of
  the feed, and isn't read.) A snapshot that stands before updates received while it was being
  fetched is known from its own time on, and so are they.
- A price that stands for none is zero or less, 999,999,999 or 9,999,999,999, which market orders
  are written as. Orders that are merely far from the market are kept, and lie deep in the book.
- A line with a missing or unreadable field, an unknown action or side, a negative volume, more than
  nine decimals, a price off a pinned tick, or a time outside 1990 to 2100 is left out.

Does not cover: trades, level-by-level files, several instruments in one file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import OrderEvents
from tapeline.tape.book import UNITS
from tapeline.tape.grid import Policy
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.text import CsvBlocks, exact_integers
from tapeline.tape.readers.times import Times, TimeUnit

COLUMNS: Final = ("id", "timestamp", "price", "volume", "action", "direction")
_ACTIONS: Final = (b"created", b"changed", b"deleted")
_SIDES: Final = (b"ask", b"bid")
_MAX_ID_BYTES: Final = 64
_MAX_PRICE: Final = 9_000_000_000
_MAX_SIZE: Final = 10**15  # thousands of such orders at one price add up without overflow
_NO_PRICE: Final = (999_999_999 * UNITS, 9_999_999_999 * UNITS)


def demo_tape() -> Path | None:
    """The half hour of BTC/USD in the data package of the `demo` extra; None without it."""
    package = importlib.util.find_spec("ob_analytics")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "_sample_data" / "orders.csv.gz"
    return path if path.exists() else None


@dataclass(frozen=True, slots=True)
class OrdersOptions:
    """What may be said about a file of orders.

    Attributes:
        time_unit: unit of the times; detected by magnitude if None.
        zone: of times that don't say theirs, such as UTC; such times are refused without it.
        tick: step of the prices, to refuse lines that are off it; only reported if None.
    """

    time_unit: TimeUnit | None = None
    zone: str | None = None
    tick: str | float | None = None


class OrdersReader(Reader):
    """Order-by-order CSV."""

    name = "orders"
    looks_for = f"a CSV header with {', '.join(COLUMNS)}"
    Options = OrdersOptions
    policy: ClassVar[Policy] = Policy(crossed="hold", locked="hold", stale_cross_s=1.0)

    def __init__(self, source: Source, options: OrdersOptions) -> None:
        super().__init__(source, options)
        self._tick = _tick_units(options.tick)
        self._price_divisor = 0
        self._times = Times(
            f"{source.paths[0]}, column timestamp",
            options.time_unit,
            options.zone,
            counts=source.counts,
        )

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether the first line has the columns."""
        return set(COLUMNS) <= set(head.header)

    def blocks(self) -> Iterator[OrderEvents]:
        """The events of each block of lines."""
        for path in self.source.paths:
            lines = CsvBlocks(path, COLUMNS, self.source.progress)
            num_readable = 0
            for num_before, batch in lines:
                events, faults = self._parse(batch)
                num_readable += len(events.ids)
                lines.leave_out(batch, num_before, faults.rows, faults.why)
                yield events
            self.source.close(path, lines.unreadable, num_readable)

    def detected(self) -> dict[str, str]:
        """The unit of the times and the step of the prices."""
        return {**self._times.detected(), "tick": self._told_tick()}

    def _told_tick(self) -> str:
        """The pinned tick, or the decimals that the prices so far make use of."""
        units = self._tick
        if units is None:
            units = UNITS
            while self._price_divisor % units:
                units //= 10
        return f"{(Decimal(units) / UNITS).normalize():f}"

    def _parse(self, batch: pa.RecordBatch) -> tuple[OrderEvents, _Faults]:
        """The block's events, and what is wrong with the rows that are none."""
        times_ns, in_range = self._times.parse(batch.column("timestamp"))
        prices, price_readable = exact_integers(batch.column("price"), 9)
        sizes, size_readable = exact_integers(batch.column("volume"), 9)
        actions = _index_in(_ACTIONS, batch.column("action"))
        sides = _index_in(_SIDES, batch.column("direction"))
        ids = batch.column("id")
        have_price = (prices > 0).astype(bool) & ~np.isin(prices, _NO_PRICE)
        faults = _Faults()
        faults.add(pc.greater(pc.binary_length(ids), 0), "the id is missing")
        too_long = f"the id is longer than {_MAX_ID_BYTES} bytes"
        faults.add(pc.less_equal(pc.binary_length(ids), _MAX_ID_BYTES), too_long)
        faults.add(in_range, "the timestamp is no time from 1990 to 2100")
        faults.add(price_readable, "the price is no number of nine decimals or fewer")
        faults.add(size_readable, "the volume is no number of nine decimals or fewer")
        faults.add(~size_readable | (sizes >= 0), "the volume is negative")
        faults.add(
            ~size_readable | (sizes <= _MAX_SIZE * UNITS), f"the volume is above {_MAX_SIZE:,}"
        )
        faults.add(
            ~have_price | (prices <= _MAX_PRICE * UNITS), f"the price is above {_MAX_PRICE:,}"
        )
        faults.add(actions.is_valid(), "the action is none of created, changed and deleted")
        faults.add(sides.is_valid(), "the direction is neither bid nor ask")
        if self._tick is not None:
            faults.add(~have_price | (prices % self._tick == 0), "the price is off the tick")
        rows = np.flatnonzero(~faults.are_there)
        prices, sizes, have_price = prices[rows], sizes[rows], have_price[rows]
        self._price_divisor = int(np.gcd.reduce(prices, initial=self._price_divisor))
        events = OrderEvents(
            times_ns[rows],
            _ids(ids.take(rows)),
            np.asarray(actions.take(rows), np.int64),
            np.asarray(sides.take(rows)) == 1,
            np.where(have_price, prices, 0).astype(np.int64),
            np.stack([sizes // UNITS, sizes % UNITS], axis=1).astype(np.int64),
            have_price,
        )
        return events, faults


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


class _Faults:
    """What is wrong with the lines of a block."""

    def __init__(self) -> None:
        self._found: list[tuple[BoolArray, str]] = []

    def add(self, is_good: npt.ArrayLike, what: str) -> None:
        """Tell where `what`, which is a fault, is not the case."""
        self._found.append((~np.asarray(is_good, np.bool_), what))

    @property
    def are_there(self) -> BoolArray:
        """Which lines have one."""
        found: BoolArray = np.logical_or.reduce([where for where, _ in self._found])
        return found

    @property
    def rows(self) -> Int64Array:
        """The rows of these lines."""
        return np.flatnonzero(self.are_there)

    def why(self, row: int) -> str:
        """The first fault of one of them."""
        return next(what for where, what in self._found if where[row])


def _ids(column: pa.Array) -> npt.NDArray[np.bytes_]:
    """The ids, with zeros behind them up to a multiple of eight bytes."""
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    return np.array(column.to_pylist(), f"S{max(8, -8 * (-longest // 8))}")


def _index_in(names: tuple[bytes, ...], column: pa.Array) -> pa.Array:
    """The place of each field among `names`, whatever its case; null if it is none of them."""
    known = pa.array(names, pa.binary())
    found = pc.index_in(column, known)
    if found.null_count:
        lower = pa.array([field.lower() for field in column.to_pylist()], pa.binary())
        found = pc.index_in(lower, known)
    return found
