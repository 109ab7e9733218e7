"""Databento's records as CSV or Parquet.

Covers columns in any order, matched by name, and others between them; prices as decimals, floats or
integers in billionths, blank where undefined; times in ISO 8601 or as numbers. Does not cover what
the records mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.session import BoolArray
from tapeline.tape.readers.base import Source
from tapeline.tape.readers.columns import (
    column_names,
    csv_blocks,
    is_parquet,
    parquet_blocks,
)
from tapeline.tape.readers.databento_records import (
    MBO,
    UNDEFINED_PRICE,
    RecordFile,
    Records,
    Spelling,
    mbp,
)
from tapeline.tape.readers.text import Unreadable, exact_integers
from tapeline.tape.readers.times import Times

_PRICE_DECIMALS: Final = 9
_BLOCK_ROWS: Final = 1 << 14


class TableFile(RecordFile):
    """CSV or Parquet, columns matched by name."""

    def __init__(self, path: Path, source: Source, spelling: Spelling) -> None:
        names = column_names(path)
        num_levels = sum(f"bid_px_{level:02}" in names for level in range(10))
        schema = spelling.schema or (f"mbp-{num_levels}" if num_levels else "mbo")
        super().__init__(path, source, spelling, schema)
        num_levels = num_levels or 1  # if there are none, the lack of the first is told
        self._dtype = MBO if schema == "mbo" else mbp(num_levels)
        self._times = Times(f"{path}, column {spelling.clock}", spelling.time_unit)
        self._prices: str | None = spelling.prices
        self._cells: dict[str, tuple[str, int | None]]  # the field of each column, and its level
        letters = ["action"]
        if schema == "mbo":
            self._cells = {name: (name, None) for name in ("order_id", "price", "size")}
            letters.append("side")
        else:
            self._cells = {
                f"{part}_{level:02}": (part, level)
                for part in ("bid_px", "ask_px", "bid_sz", "ask_sz")
                for level in range(num_levels)
            }
        for name in ("flags", "publisher_id", "instrument_id"):
            self._cells[name] = (name, None)
        self._names = tuple(dict.fromkeys([spelling.clock, *letters, *self._cells]))
        if "symbol" in names:
            self._names = (*self._names, "symbol")

    def detected(self) -> dict[str, str]:
        """The schema, and how prices and times are written."""
        prices = {} if self._prices is None else {"prices": self._prices}
        unit = {} if self._times.unit is None else {"time_unit": self._times.unit}
        return {**super().detected(), **prices, **unit}

    def records(self) -> Iterator[Records]:
        """The rows that can be read."""
        unreadable, num_readable = Unreadable(), 0
        blocks = (
            parquet_blocks(self._path, self._names, unreadable, _BLOCK_ROWS)
            if is_parquet(self._path)
            else csv_blocks(self._path, self._names, unreadable, self._source.progress)
        )
        for batch, leave_out in blocks:
            records, readable = self._parsed(batch)
            leave_out(np.flatnonzero(~readable))
            records = records[readable]
            num_readable += len(records)
            if "symbol" in self._names and len(records):
                for number in set(np.unique(records["instrument_id"]).tolist()) - set(self.symbols):
                    at = int(np.flatnonzero(readable)[records["instrument_id"] == number][0])
                    self.symbols[number] = str(batch.column("symbol").cast(pa.string())[at])
            yield records
        self._source.close(self._path, unreadable, num_readable)

    def _parsed(self, batch: pa.RecordBatch) -> tuple[Records, BoolArray]:
        """A record for each row, and which of them could be read."""
        records = np.zeros(len(batch), self._dtype)
        times_ns, readable = self._times.parse(batch.column(self._spelling.clock))
        records[self._spelling.clock] = times_ns
        for name in ("action", "side"):
            if name in self._names:
                column = batch.column(name).cast(pa.binary()).fill_null(b"")
                records[name] = np.array(column.to_pylist(), "S1")
        for name, (part, level) in self._cells.items():
            is_price = part in ("price", "bid_px", "ask_px")
            decimals = self._decimals(batch.column(name)) if is_price else 0
            numbers, is_number, is_blank = _whole(batch.column(name), decimals)
            target = records[part] if level is None else records["levels"][part][:, level]
            limits = np.iinfo(target.dtype)
            fits = ((numbers >= limits.min) & (numbers <= limits.max)).astype(bool)
            blank = UNDEFINED_PRICE if is_price else 0
            target[:] = np.where(is_number & fits, numbers, blank).astype(target.dtype)
            readable &= (is_number & fits) | is_blank
        return records, readable

    def _decimals(self, column: pa.Array) -> int:
        """By how many decimals a price has to be moved: detected once a price is seen."""
        if self._prices is None:
            if pa.types.is_integer(column.type):
                self._prices = "integer"
            elif pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
                self._prices = "decimal"
            else:
                written = [price for price in column.to_pylist() if price]
                if written:
                    # Of seven digits or more: no price in billionths is below a thousandth.
                    is_whole = all(b"." not in price for price in written)
                    is_long = max(map(len, written)) > 6
                    self._prices = "integer" if is_whole and is_long else "decimal"
        return 0 if self._prices == "integer" else _PRICE_DECIMALS


def _whole(column: pa.Array, decimals: int) -> tuple[npt.NDArray[Any], BoolArray, BoolArray]:
    """Numbers times 10^`decimals`, which cells are a number, and which are blank.

    A float gives back the decimals it was written with, for prices up to nine millions.
    """
    if pa.types.is_floating(column.type):
        values = np.asarray(column.cast(pa.float64()).fill_null(np.nan))
        scaled = np.rint(values * 10**decimals)
        is_number = np.abs(scaled) < 2.0**63  # the undefined price is not, as a float
        return np.where(is_number, scaled, 0).astype(np.int64), is_number, ~is_number
    if pa.types.is_integer(column.type):
        is_number = np.asarray(column.is_valid())
        return np.asarray(column.fill_null(0)), is_number, ~is_number
    words = column.cast(pa.string())
    is_blank = pc.equal(words, "").fill_null(True)
    # A blank that isn't null would be looked for by halves, as what can't be cast is.
    numbers, is_number = exact_integers(pc.if_else(is_blank, None, words), decimals)
    return numbers, is_number, np.asarray(is_blank)
