"""Tardis: CSV of `book_snapshot_*` and of `incremental_book_L2`, of one instrument.

    exchange,symbol,timestamp,local_timestamp,asks[0].price,asks[0].amount,bids[0].price,…
    exchange,symbol,timestamp,local_timestamp,is_snapshot,side,price,amount

Columns are matched by name, in any order. Times are microseconds as Tardis writes them; their unit
is told by magnitude.

- A row is known from its `local_timestamp` on, when Tardis received the message. `clock` takes
  `timestamp` instead, the exchange's, which knows each row earlier than anyone could.
- In a snapshot a level whose price or amount is blank, or whose amount is zero, isn't there.
- Of updates, rows that share a time are one message. Where rows of a snapshot follow others, what
  was known of the book before is discarded; an amount is the new total at its price, zero deletes
  it. Updates before the first snapshot are left out, for nobody knows what else was in the book.

The rules of updates are those of https://docs.tardis.dev/downloadable-csv-files/data-types.

Does not cover: `trades`, `quotes` and the like; `table` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import BookStates, Float64Array, LevelEvents
from tapeline.tape.book import UNITS
from tapeline.tape.readers.base import Head, Reader, Source, joined
from tapeline.tape.readers.text import CsvBlocks, csv_header, exact_integers, halved
from tapeline.tape.readers.times import Times, TimeUnit

Clock = Literal["local_timestamp", "timestamp"]

_CELL: Final = re.compile(r"(bids|asks)\[(\d+)\]\.(price|amount)")
_UPDATE: Final = ("is_snapshot", "side", "price", "amount")
_SIDES: Final = (b"ask", b"bid")
_FLAGS: Final = (b"false", b"true")


@dataclass(frozen=True, slots=True)
class TardisOptions:
    """What may be said about files from Tardis.

    Attributes:
        clock: the column of times that rows are known at.
        time_unit: s, ms, us or ns; detected by magnitude if None.
    """

    clock: Clock = "local_timestamp"
    time_unit: TimeUnit | None = None


class TardisReader(Reader):
    """Tardis's files of books."""

    name = "tardis"
    looks_for = f"a CSV header with symbol, local_timestamp and asks[0].price or {_UPDATE[0]}"
    Options = TardisOptions

    def __init__(self, source: Source, options: TardisOptions) -> None:
        super().__init__(source, options)
        if options.clock not in get_args(Clock):
            raise TapeError(
                "clock",
                expected=joined(get_args(Clock)),
                found=repr(options.clock),
                fix="Give one of them",
            )
        self._times = Times(f"{source.paths[0]}, column {options.clock}", options.time_unit)
        self._names: dict[str, bytes] = {}  # of the exchange and of the symbol
        self._is_snapshot = False  # the last row was of one
        self._is_known = False  # there has been one

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether the first line has the columns of books or of updates."""
        names = set(head.header)
        has_book = "asks[0].price" in names or set(_UPDATE) <= names
        return {"symbol", "local_timestamp"} <= names and has_book

    def blocks(self) -> Iterator[BookStates | LevelEvents]:
        """The states of the book, or what happens to its levels."""
        first = _num_levels(self.source.paths[0])
        for path in self.source.paths:
            num_levels = _num_levels(path)
            if num_levels != first:
                raise TapeError(
                    path,
                    expected=f"{_layout(first)}, as {self.source.paths[0].name} has",
                    found=_layout(num_levels),
                    fix="Read files of different layouts one by one",
                )
            cells = _UPDATE if not num_levels else _cell_names(num_levels)
            columns = ("exchange", "symbol", self.options.clock, *cells)
            lines = CsvBlocks(path, columns, self.source.progress)
            num_readable = 0
            for num_before, batch in lines:
                times_ns, readable = self._times.parse(batch.column(self.options.clock))
                parse = self._states if num_levels else self._events
                block, readable = parse(batch, times_ns, readable)
                lines.leave_out(batch, num_before, np.flatnonzero(~readable))
                num_readable += int(readable.sum())
                yield block
            self.source.close(path, lines.unreadable, num_readable)
        if not (first or self._is_known):
            raise TapeError(
                self.source.paths[0],
                expected="a snapshot of the book before its updates",
                found=f"{self.source.counts.lines_read:,} rows, none with is_snapshot true",
                fix="Give the file before it first, and both as one tape (`--continues`)",
            )

    def detected(self) -> dict[str, str]:
        """The clock and the unit of its times."""
        return {"clock": self.options.clock, **self._times.detected()}

    def instrument(self) -> str | None:
        """The symbol."""
        symbol = self._names.get("symbol")
        return None if symbol is None else symbol.decode("utf-8", "replace")

    def _states(
        self, batch: pa.RecordBatch, times_ns: Int64Array, readable: BoolArray
    ) -> tuple[BookStates, BoolArray]:
        num_levels = (batch.num_columns - 3) // 4
        prices = np.zeros((len(batch), num_levels, 2), np.int64)
        sizes = np.zeros(prices.shape)
        for level in range(num_levels):
            for side, name in enumerate(("bids", "asks")):
                price, has_price, no_price = _prices(batch.column(f"{name}[{level}].price"))
                size, has_size, no_size = _amounts(batch.column(f"{name}[{level}].amount"))
                exist = has_price & has_size & (size > 0)
                prices[exist, level, side] = price[exist]
                sizes[exist, level, side] = size[exist]
                readable = readable & (has_price | no_price) & (has_size | no_size)
        self._check_names(batch, readable)
        return BookStates(times_ns[readable], prices[readable], sizes[readable]), readable

    def _events(
        self, batch: pa.RecordBatch, times_ns: Int64Array, readable: BoolArray
    ) -> tuple[LevelEvents, BoolArray]:
        prices, are_prices, _ = _prices(batch.column("price"))
        sizes, are_sizes, _ = _amounts(batch.column("amount"))
        sides = _index_of(batch.column("side"), _SIDES)
        flags = _index_of(batch.column("is_snapshot"), _FLAGS)
        readable = readable & are_prices & are_sizes & (sides >= 0) & (flags >= 0)
        self._check_names(batch, readable)
        rows = np.flatnonzero(readable)
        of_snapshot = flags[rows] == 1
        starts = of_snapshot & ~np.concatenate([[self._is_snapshot], of_snapshot])[:-1]
        known = np.logical_or.accumulate(starts) | self._is_known
        if len(rows):
            self._is_snapshot, self._is_known = bool(of_snapshot[-1]), bool(known[-1])
        self.source.counts.count("updates before a snapshot, left out", int((~known).sum()))
        rows, starts = rows[known], starts[known]
        clears = np.flatnonzero(starts)  # each stands before the row that it is the start of
        rows = np.insert(rows, clears, rows[clears])
        are_clears = np.insert(np.zeros(len(starts), bool), clears, True)
        events = LevelEvents(
            times_ns[rows],
            are_clears.tolist(),
            (sides[rows] == 1).tolist(),
            prices[rows].tolist(),
            [round(size * UNITS) for size in sizes[rows].tolist()],
        )
        return events, readable

    def _check_names(self, batch: pa.RecordBatch, readable: BoolArray) -> None:
        """Refuse a second exchange or symbol."""
        for name in ("exchange", "symbol"):
            found = batch.column(name).filter(pa.array(readable)).unique().to_pylist()
            names = {self._names.setdefault(name, found[0]), *found} if found else set()
            if len(names) > 1:
                shown = sorted(other.decode("utf-8", "replace") for other in names)
                raise TapeError(
                    self.source.paths[0],
                    expected=f"rows of one {name}",
                    found=joined(shown[:4], "and"),
                    fix=f"Split the files by {name}, and read them one by one",
                )


def _num_levels(path: Path) -> int:
    """Levels per side that each row has, zero for a file of updates."""
    names, _ = csv_header(path)
    if "is_snapshot" in names:
        return 0
    return max((int(found[2]) + 1 for found in map(_CELL.fullmatch, names) if found), default=1)


def _cell_names(num_levels: int) -> tuple[str, ...]:
    return tuple(
        f"{side}[{level}].{part}"
        for level in range(num_levels)
        for side in ("asks", "bids")
        for part in ("price", "amount")
    )


def _layout(num_levels: int) -> str:
    return f"books of {num_levels} levels" if num_levels else "updates"


def _index_of(column: pa.Array, values: tuple[bytes, ...]) -> Int64Array:
    """The place of each cell among `values`, −1 for others."""
    found = pc.index_in(column, pa.array(values, pa.binary())).fill_null(-1)
    return np.asarray(found, np.int64)


def _blank(column: pa.Array) -> tuple[pa.Array, BoolArray]:
    """The cells with null for blank ones, and which those are."""
    is_blank = pc.equal(pc.binary_length(column), 0)
    return pc.if_else(is_blank, None, column), np.asarray(is_blank)


def _prices(column: pa.Array) -> tuple[npt.NDArray[Any], BoolArray, BoolArray]:
    """Prices in billionths, which cells are one, and which are blank."""
    column, is_blank = _blank(column)
    prices, are_numbers = exact_integers(column, 9)
    fits = ((prices > 0) & (prices < 2**63)).astype(bool)
    return prices, are_numbers & fits, is_blank


def _amounts(column: pa.Array) -> tuple[Float64Array, BoolArray, BoolArray]:
    """Amounts in units, which cells are one, and which are blank."""
    column, is_blank = _blank(column)
    amounts = halved(column, lambda part: part.cast(pa.string()).cast(pa.float64()), pa.float64())
    values = np.asarray(amounts.fill_null(np.nan))
    return values, np.isfinite(values) & (values >= 0), is_blank
