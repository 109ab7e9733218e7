"""Order-by-order CSV, in the layout of Bitstamp's live orders.

    id,timestamp,exchange_timestamp,price,volume,action,direction

Columns are matched by name, and others may stand beside them. A line says that an order was
`created`, `changed` or `deleted`; direction is `bid` or `ask`; volume is what remains of it.

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
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import Int64Array
from tapeline.tape.blocks import OrderEvents
from tapeline.tape.book import UNITS
from tapeline.tape.grid import Policy
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.text import CsvBlocks, exact_integers
from tapeline.tape.readers.times import Times, TimeUnit

COLUMNS: Final = ("id", "timestamp", "price", "volume", "action", "direction")
_ACTIONS: Final = (b"created", b"changed", b"deleted")
_SIDES: Final = (b"ask", b"bid")
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
        tick: step of the prices, to refuse lines that are off it; only reported if None.
    """

    time_unit: TimeUnit | None = None
    tick: str | float | None = None


class OrdersReader(Reader):
    """Order-by-order CSV."""

    name = "orders"
    looks_for = f"a CSV header with {', '.join(COLUMNS)}"
    Options = OrdersOptions
    policy: ClassVar[Policy] = Policy(crossed="hold", locked="hold", stale_cross_s=1.0)

    def __init__(self, source: Source, options: OrdersOptions) -> None:
        super().__init__(source, options)
        self._parser = _Parser(source.paths[0], options.time_unit, _tick_units(options.tick))

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
                events, unreadable_rows = self._parser.parse(batch)
                num_readable += len(events.ids)
                lines.leave_out(batch, num_before, unreadable_rows)
                yield events
            self.source.close(path, lines.unreadable, num_readable)

    def detected(self) -> dict[str, str]:
        """The unit of the times and the step of the prices."""
        return {**self._parser.times.detected(), "tick": self._parser.tick}


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


class _Parser:
    """From blocks of text to events. What it detects in the first block holds for all."""

    def __init__(self, path: Path, time_unit: TimeUnit | None, tick: int | None) -> None:
        self._tick = tick
        self._price_divisor = 0
        self.times = Times(f"{path}, column timestamp", time_unit)

    @property
    def tick(self) -> str:
        """The pinned tick, or the decimals that the prices so far make use of."""
        units = self._tick
        if units is None:
            units = UNITS
            while self._price_divisor % units:
                units //= 10
        return f"{(Decimal(units) / UNITS).normalize():f}"

    def parse(self, batch: pa.RecordBatch) -> tuple[OrderEvents, Int64Array]:
        """The block's events, and the rows that are none."""
        times_ns, in_range = self.times.parse(batch.column("timestamp"))
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
        events = OrderEvents(
            times_ns[rows],
            ids.take(rows).to_pylist(),
            actions.take(rows).to_pylist(),
            [side == 1 for side in sides.take(rows).to_pylist()],
            prices.tolist(),
            sizes[rows].tolist(),
            have_price[rows].tolist(),
        )
        return events, np.flatnonzero(~readable)
