"""Databento: DBN of versions 1 to 3, its CSV and its Parquet, of one instrument.

Covers the schemas `mbp-1` and `mbp-10`, where each record holds the book after it, and `mbo`, from
which the book is rebuilt. Its rules are `databento_mbo`'s, the spellings `databento_dbn`'s and
`databento_table`'s.

- Records are ordered by `ts_recv`, when Databento's capture server had them: before it nobody else
  did. `clock` takes `ts_event` instead, the exchange's clock, which may step back; such a tape
  knows each record earlier than anyone could.
- A level with an undefined price, or without size, isn't there.
- Of records of one time, a book that isn't flagged `F_LAST` is the middle of an event, and not a
  state. The flag can't be asked of the last one: a file of books lacks the records that don't touch
  its levels, and the flag may stand on one of those.
- A book flagged `F_MAYBE_BAD_BOOK`, after a gap in the channel, is taken as empty.
- A price ten times off the best of the other side is most likely a stub quote, which nobody trades
  at: such books are counted, and kept.
- Books of several instruments or publishers aren't one tape: choose one.

Does not cover: other schemas, and the DBZ format that came before DBN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import BookStates, OrderEvents
from tapeline.tape.readers.base import Head, Reader, Source, joined
from tapeline.tape.readers.columns import PARQUET
from tapeline.tape.readers.databento_dbn import DBN, DbnFile
from tapeline.tape.readers.databento_mbo import F_LAST, F_MAYBE_BAD_BOOK, OrderFlow
from tapeline.tape.readers.databento_records import (
    UNDEFINED_PRICE,
    UNDEFINED_SIZE,
    Clock,
    PriceFormat,
    RecordFile,
    Records,
    Schema,
    Spelling,
)
from tapeline.tape.readers.databento_table import TableFile
from tapeline.tape.readers.text import open_stream
from tapeline.tape.readers.times import TimeUnit

_STUB_FACTOR: Final = 10
_DBZ: Final = b"DBZ"
_DBZ_AT: Final = 8  # behind the head of a Zstandard frame to be skipped


@dataclass(frozen=True, slots=True)
class DatabentoOptions:
    """What may be said about files from Databento.

    Attributes:
        instrument_id: of the instrument to read; needed where a file has several.
        publisher_id: of the venue to read; needed where a file has several.
        clock: the time that records are known at.
        schema: what a live file's records are, which doesn't say it.
        prices: whether a CSV's are decimals, or integers in billionths; detected if None.
        time_unit: s, ms, us or ns, of times that are numbers; detected if None.
    """

    instrument_id: int | None = None
    publisher_id: int | None = None
    clock: Clock = "ts_recv"
    schema: Schema | None = None
    prices: PriceFormat | None = None
    time_unit: TimeUnit | None = None


class DatabentoReader(Reader):
    """Databento's files."""

    name = "databento"
    looks_for = "DBN, or a table with action, flags and bid_px_00 or order_id"
    Options = DatabentoOptions

    def __init__(self, source: Source, options: DatabentoOptions) -> None:
        super().__init__(source, options)
        self._spelling = Spelling(options.clock, options.schema, options.prices, options.time_unit)
        self._spelling.check()
        self._books: dict[tuple[int, int], str] = {}  # seen, with the instrument's name
        self._detected: dict[str, str] = {}

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is DBN or the format before it, or has the columns of books or orders."""
        if head.text.startswith(DBN) or _is_dbz(head.raw):
            return True
        names = set(head.header)
        if head.raw.startswith(PARQUET):
            try:
                names = set(pq.read_schema(head.path).names)
            except (pa.ArrowInvalid, OSError):
                return False
        has_book = "bid_px_00" in names or {"order_id", "side"} <= names
        return {"action", "flags", "ts_event"} <= names and has_book

    def blocks(self) -> Iterator[BookStates | OrderEvents]:
        """States of the book, or what happens to its orders."""
        first: RecordFile | None = None
        books = _Books(self._spelling.clock, self.source)
        flow = OrderFlow(self.source.paths[0], self._spelling.clock, self.source.counts)
        for path in self.source.paths:
            file = _open(path, self.source, self._spelling)
            first = first or file
            if file.schema != first.schema:
                raise TapeError(
                    path,
                    expected=f"{first.schema}, as the first file has",
                    found=file.schema,
                    fix="Read files of different schemas one by one",
                )
            for records in file.records():
                chosen = self._chosen(file, records)
                yield flow.add(chosen) if file.schema == "mbo" else books.add(chosen)
            self._detected |= file.detected()
        yield from books.finish()
        flow.finish()

    def detected(self) -> dict[str, str]:
        """How the files are written, the clock, and whose book it is."""
        found = {**self._detected, "clock": self._spelling.clock}
        for publisher, instrument in self._books:
            found |= {"instrument_id": str(instrument), "publisher_id": str(publisher)}
        return found

    def instrument(self) -> str | None:
        """The symbol."""
        return next((name for name in self._books.values() if name), None)

    def _chosen(self, file: RecordFile, records: Records) -> Records:
        """The records of the one book that is read.

        Raises:
            TapeError: there are several.
        """
        for name in ("publisher_id", "instrument_id"):
            number = getattr(self.options, name)
            if number is not None:
                others = records[name] != number
                if others.any():
                    self.source.counts.count(
                        f"records of another {name}, left out", int(others.sum())
                    )
                    records = records[~others]
        if not len(records):
            return records
        ids = records[["publisher_id", "instrument_id"]]
        if (ids != ids[0]).any() or tuple(ids[0].tolist()) not in self._books:
            for publisher, instrument in np.unique(ids).tolist():
                symbol = file.symbols.get(instrument, "")
                self._books.setdefault((publisher, instrument), symbol)
        if len(self._books) > 1:
            raise TapeError(
                self.source.paths[0],
                expected="records of one instrument and publisher",
                found=joined(
                    [
                        f"{instrument}{name and f' ({name})'} of publisher {publisher}"
                        for (publisher, instrument), name in self._books.items()
                    ],
                    "and",
                ),
                fix="Choose with instrument_id and publisher_id",
            )
        return records


class _Books:
    """Records that hold the book after them, as states of it."""

    def __init__(self, clock: Clock, source: Source) -> None:
        self._clock = clock
        self._counts = source.counts
        self._pending: Records | None = None

    def add(self, records: Records) -> BookStates:
        """The states that nothing more can be known about."""
        if self._pending is not None:
            records = np.concatenate([self._pending, records])
        self._pending = records[-1:]  # the next may share its time
        times = records[self._clock]
        is_inside = (records["flags"][:-1] & F_LAST == 0) & (times[1:] == times[:-1])
        self._counts.count("books in the middle of an event, left out", int(is_inside.sum()))
        return self._states(records[:-1][~is_inside])

    def finish(self) -> Iterator[BookStates]:
        """The last state: nothing follows it."""
        if self._pending is not None:
            yield self._states(self._pending)

    def _states(self, records: Records) -> BookStates:
        levels = records["levels"]
        prices = np.stack([levels["bid_px"], levels["ask_px"]], axis=-1)
        sizes = np.stack([levels["bid_sz"], levels["ask_sz"]], axis=-1)
        is_doubtful = records["flags"] & F_MAYBE_BAD_BOOK > 0
        self._counts.count(
            "books after a gap in the channel, taken as empty", int(is_doubtful.sum())
        )
        exist = (prices != UNDEFINED_PRICE) & (sizes > 0) & (sizes != UNDEFINED_SIZE)
        exist &= ~is_doubtful[:, None, None]
        prices = np.where(exist, prices, 0)
        self._counts.count(
            f"books with a price {_STUB_FACTOR} times off the other side, kept: stub quotes?",
            int(np.count_nonzero(_have_stubs(prices))),
        )
        return BookStates(
            records[self._clock].astype(np.int64),
            prices,
            np.where(exist, sizes, 0).astype(np.float64),
        )


def _have_stubs(prices: Int64Array) -> BoolArray:
    """Which books have an ask far above the best bid, or a bid far below the best ask."""
    bids, asks = prices[..., 0], prices[..., 1]
    best_bids, best_asks = bids[:, :1], asks[:, :1]
    far_asks = (best_bids > 0) & (asks // _STUB_FACTOR > best_bids)
    far_bids = (bids > 0) & (best_asks // _STUB_FACTOR > bids)
    return np.asarray((far_asks | far_bids).any(axis=1))


def _open(path: Path, source: Source, spelling: Spelling) -> RecordFile:
    """The reader of a file's spelling, told by its content.

    Raises:
        TapeError: it is in the format before DBN, lacks a column, or is damaged.
    """
    with open_stream(path) as (raw, stream):
        start = raw.read(_DBZ_AT + len(_DBZ))
        raw.seek(0)
        is_dbn = bytes(stream.read(len(DBN))) == DBN
    if _is_dbz(start):
        raise TapeError(
            path,
            expected="DBN of version 1, 2 or 3",
            found="DBZ, the format before it",
            fix="Request the data from Databento again, or convert the file with a release of its "
            "command `dbn` that still reads DBZ",
        )
    return (DbnFile if is_dbn else TableFile)(path, source, spelling)


def _is_dbz(start: bytes) -> bool:
    """Whether a file that begins so is in the format before DBN."""
    return start[_DBZ_AT:].startswith(_DBZ)
