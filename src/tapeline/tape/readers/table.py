"""Any CSV or Parquet file with a time column: bars, ticks, or rows of features.

Columns are matched by name. What isn't named is detected in the first block, told in the report,
and can be pinned: the time column by its name, its unit or layout by the times, the columns of
numbers by what stands in them, prices by their names, the interval of bars by the step that is most
frequent.

A bar is known at its end, and belongs to the session that it opens in: the one that closes with a
session is the session's last. So a table of bars must say whether a stamp is the bar's `open` or
its `close`; without it, open, high, low and close together are refused. Times without a zone are
refused too, until `zone` says it.

A blank cell is missing: its row is kept, and marked. A cell that is no number, or a time that is
none, leaves its line out, and is counted.

By default each row of the file is a row of a session. With a step, rows are put on a grid.

Does not cover: several instruments in one file, dates and times in two columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import Float64Array, TableRows
from tapeline.tape.grid import GridOptions, to_ns
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.columns import (
    PARQUET,
    TableBlocks,
    column_names,
    csv_blocks,
    is_parquet,
    parquet_blocks,
)
from tapeline.tape.readers.text import Unreadable, halved
from tapeline.tape.readers.times import Times, TimeUnit

_TIMES: Final = (
    "ts_recv",
    "local_timestamp",
    "timestamp",
    "datetime",
    "date_time",
    "ts_event",
    "time",
    "ts",
    "date",
)
_PRICES: Final = frozenset(
    ("open", "high", "low", "close", "price", "bid", "ask", "mid", "last", "vwap", "microprice")
)
_BAR: Final = frozenset(("open", "high", "low", "close"))
_INSTRUMENTS: Final = frozenset(
    ("symbol", "sym", "ticker", "instrument", "instrument_id", "product_id", "pair", "coin")
)
_BLOCK_ROWS: Final = 1 << 15


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What may be said about a table.

    Attributes:
        time: name of the time column.
        columns: names of the columns of numbers, in the order that they are to have.
        prices: those of them that are prices.
        time_unit: s, ms, us or ns, of times that are numbers.
        time_format: `iso` or a pattern of strptime, of times that are text.
        zone: of times that don't say theirs.
        stamp: whether a bar's time is its `open` or its `close`.
        interval_s: length of a bar, in seconds.
    """

    time: str | None = None
    columns: Sequence[str] | None = None
    prices: Sequence[str] | None = None
    time_unit: TimeUnit | None = None
    time_format: str | None = None
    zone: str | None = None
    stamp: Literal["open", "close"] | None = None
    interval_s: float | None = None


class TableReader(Reader):
    """A table with a time column."""

    name = "table"
    looks_for = f"Parquet, or a CSV header with a time column such as {', '.join(_TIMES[:4])}"
    is_general = True
    Options = TableOptions
    grid: ClassVar[GridOptions] = GridOptions(step_ns=None)

    def __init__(self, source: Source, options: TableOptions) -> None:
        super().__init__(source, options)
        if options.stamp not in (None, "open", "close"):
            raise TapeError(
                "stamp", expected="open or close", found=repr(options.stamp), fix="Give one"
            )
        self._names = column_names(source.paths[0])
        self._time = options.time or _time_column(source.paths[0], self._names)
        self._times = Times(
            f"{source.paths[0]}, column {self._time}",
            options.time_unit,
            options.zone,
            options.time_format,
            source.counts,
        )
        self._instruments: set[str] = set()
        self._columns: tuple[str, ...] = tuple(options.columns or ())
        self._prices: tuple[str, ...] = tuple(options.prices or ())
        for name in (self._time, *self._columns, *self._prices):
            if name not in self._names:
                raise _no_column(source.paths[0], name, self._names)
        seconds = options.interval_s
        self._interval_ns = None if seconds is None else to_ns("interval_s", seconds)

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is Parquet, or the first line names a column that is usually a time."""
        return head.raw.startswith(PARQUET) or any(n.lower() in _TIMES for n in head.header)

    def blocks(self) -> Iterator[TableRows]:
        """The rows of each block."""
        for path in self.source.paths:
            unreadable, num_readable = Unreadable(), 0
            for block, left_out in self._parts(path, unreadable):
                times_ns, is_time = self._times.parse(block.column(self._time))
                self._check_one_instrument(path, block)
                if not self._columns:
                    self._columns = self._numbers_among(block)
                self._decide(times_ns[is_time])
                cells = [_cells(block.column(name)) for name in self._columns]
                readable = np.logical_and.reduce([is_time, *(good for _, good in cells)])
                left_out(np.flatnonzero(~readable))
                values = np.column_stack([values[readable] for values, _ in cells])
                num_readable += len(values)
                yield TableRows(
                    times_ns[readable] + (self._interval_ns or 0) * self._is_stamped_at_open,
                    values,
                    self._columns,
                    tuple(name in self._prices for name in self._columns),
                    self._interval_ns or 0 if self.options.stamp else 0,
                )
            self.source.close(path, unreadable, num_readable)

    def detected(self) -> dict[str, str]:
        """The time column and its layout, the columns, which are prices, and the interval."""
        found = {"time": self._time, **self._times.detected()}
        found |= {"columns": ",".join(self._columns), "prices": ",".join(self._prices)}
        if left := [n for n in self._names if n and n not in (self._time, *self._columns)]:
            found["left_out"] = ",".join(left)
        if self.options.stamp:
            found["interval_s"] = f"{(self._interval_ns or 0) / 1e9:g}"
        return found

    @property
    def _is_stamped_at_open(self) -> bool:
        return bool(self.options.stamp == "open")

    def _parts(self, path: Path, unreadable: Unreadable) -> TableBlocks:
        if not is_parquet(path):
            return csv_blocks(path, self._names, unreadable, self.source.progress)
        whose = [name for name in self._names if name.lower() in _INSTRUMENTS]
        names = [self._time, *self._columns, *whose] if self._columns else None
        return parquet_blocks(path, names, unreadable, _BLOCK_ROWS)

    def _numbers_among(self, block: pa.RecordBatch) -> tuple[str, ...]:
        """The columns that hold numbers in each line of the first block, or nothing."""
        names = [name for name in self._names if name and name != self._time]
        names = [name for name in names if name.lower() not in _INSTRUMENTS]
        found = tuple(name for name in names if _is_of_numbers(block.column(name)))
        for name in names:
            if name.lower() in _BAR and name not in found:
                column = block.column(name)
                at = int(np.argmin(np.isfinite(_cells(column)[0])))
                raise TapeError(
                    f"{self.source.paths[0]}, column {name}",
                    expected="numbers in a bar's prices",
                    found=f"`{_shown(column[at])}`",
                    fix="Write plain numbers, or name the columns to take, with columns "
                    '(`--set \'options.columns=["a", "b"]\'`)',
                )
        if not found:
            raise TapeError(
                self.source.paths[0],
                expected="columns of numbers beside the time",
                found=f"none among {', '.join(names) or 'no others'}",
                fix='Name them, with columns (`--set \'options.columns=["a", "b"]\'`)',
            )
        return found

    def _check_one_instrument(self, path: Path, block: pa.RecordBatch) -> None:
        """A table of several instruments would have windows that hold rows of more than one."""
        for name in block.schema.names:
            if name.lower() not in _INSTRUMENTS:
                continue
            self._instruments |= {_shown(value) for value in pc.unique(block.column(name))}
            if len(self._instruments) > 1:
                shown = ", ".join(sorted(self._instruments)[:4])
                raise TapeError(
                    f"{path}, column {name}",
                    expected="rows of one instrument",
                    found=f"several, such as {shown}",
                    fix="Write a file for each, and ingest them with --instrument",
                )

    def _decide(self, times_ns: Int64Array) -> None:
        """What needs columns and times, once there are some."""
        if self.options.prices is None:
            self._prices = tuple(name for name in self._columns if name.lower() in _PRICES)
        is_bar = {name.lower() for name in self._names} >= _BAR
        if is_bar and self.options.stamp is None:
            raise TapeError(
                self.source.paths[0],
                expected="bars whose stamp is known to be their open or their close",
                found="open, high, low and close, and no word on the stamp",
                fix="Give stamp as open or close (`--set options.stamp=close`): a bar is known "
                "at its end",
            )
        if self.options.stamp and self._interval_ns is None:
            steps, counts = np.unique(np.diff(times_ns), return_counts=True)
            if not (steps > 0).any():
                raise TapeError(
                    self.source.paths[0],
                    expected="two bars or more, to tell their length",
                    found=f"{len(times_ns)}",
                    fix="Give interval_s (`--set options.interval_s=60`)",
                )
            counts = counts[steps > 0]
            self._interval_ns = int(steps[steps > 0][np.argmax(counts)])


def _cells(column: pa.Array) -> tuple[Float64Array, BoolArray]:
    """Numbers, NaN where a cell is blank, and which cells are a number or blank."""
    if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        return np.asarray(column.cast(pa.float64()).fill_null(np.nan)), np.ones(len(column), bool)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    is_blank = np.asarray(pc.equal(pc.utf8_length(text), 0).fill_null(True))
    numbers = halved(text, lambda part: part.cast(pa.float64()), pa.float64())
    values = np.asarray(numbers.fill_null(np.nan))
    return values, np.isfinite(values) | is_blank


def _shown(cell: pa.Scalar) -> str:
    """A cell as it stands in the file."""
    value = cell.as_py()
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _is_of_numbers(column: pa.Array) -> bool:
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return True
    if not (pa.types.is_binary(kind) or pa.types.is_string(kind)):
        return False
    values, _ = _cells(column)
    return bool(np.isfinite(values).mean() > 0.5)


def _time_column(path: Path, names: list[str]) -> str:
    by_lower = {name.lower(): name for name in reversed(names)}
    found = next((by_lower[name] for name in _TIMES if name in by_lower), None)
    if found is None:
        raise TapeError(
            path,
            expected=f"a time column, such as {', '.join(_TIMES[:4])}",
            found=f"{', '.join(names)[:80]}",
            fix="Name it, with time (`--set options.time=…`)",
        )
    return found


def _no_column(path: Path, name: str, names: list[str]) -> TapeError:
    return TapeError(
        path,
        expected=f"a column named {name}",
        found=f"{', '.join(names)[:80]}",
        fix="Correct the name, or leave it out",
    )
