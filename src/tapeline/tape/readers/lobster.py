"""LOBSTER: a file of messages and a file of order books, line beside line.

    TICKER_2012-06-21_34200000_57600000_message_10.csv     time,type,order id,size,price,direction
    TICKER_2012-06-21_34200000_57600000_orderbook_10.csv   ask price,ask size,bid price,bid size, …

Neither has a header. Times are seconds after midnight in New York, of the date in the file's name,
and are read as decimal text to the nanosecond. Prices are ten-thousandths. A level that isn't there
has the price 9999999999 or −9999999999 and size 0. Every line is a state of the book: also those
that repeat the one before, as a hidden execution does.

Give either file of a pair, or both; pairs that continue each other in order. A line that can't be
read is an error, for it would put two files out of step.

Does not cover: what the messages say; the book is taken as LOBSTER rebuilt it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from tapeline.errors import TapeError
from tapeline.session import Int64Array
from tapeline.tape.blocks import BookStates
from tapeline.tape.book import UNITS
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.text import CsvBlocks, csv_header, exact_integers

_MESSAGE: Final = re.compile(r"\d{1,5}\.\d{1,9},[1-7],\d+,\d+,-?\d+,-?1")
_BOOK: Final = re.compile(r"-?\d+,\d+,-?\d+,\d+(,-?\d+,\d+,-?\d+,\d+)*")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_NEW_YORK: Final = "America/New_York"
_PRICE_UNITS: Final = UNITS // 10_000
_NO_PRICE: Final = 9_999_999_999
_DAY_NS: Final = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class LobsterOptions:
    """What may be said about a pair.

    Attributes:
        date: the trade date, ISO 8601, where the files' names don't say it.
    """

    date: str | None = None


class LobsterReader(Reader):
    """LOBSTER pairs; either file of each will do."""

    name = "lobster"
    looks_for = (
        "lines without a header: `34200.004241176,1,16113575,18,5853300,1`, or whole numbers "
        "by fours"
    )

    Options = LobsterOptions

    def __init__(self, source: Source, options: LobsterOptions) -> None:
        super().__init__(source, options)
        self._pairs = list(dict.fromkeys(_pair(path) for path in source.paths))
        self._dates = [_date_of(message, options.date) for message, _ in self._pairs]

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether the first line is a message or an order book."""
        line = head.lines[0]
        return bool(_MESSAGE.fullmatch(line) or _BOOK.fullmatch(line))

    @classmethod
    def tape_of(cls, path: Path) -> Path:
        """The messages of a pair."""
        return _pair(path)[0]

    def blocks(self) -> Iterator[BookStates]:
        """The states of each block of lines."""
        for (message, book), day in zip(self._pairs, self._dates, strict=True):
            midnight = datetime.combine(day, time(0), ZoneInfo(_NEW_YORK))
            midnight_ns = int(midnight.timestamp()) * 10**9
            num_levels = len(csv_header(book)[0]) // 4
            times = _Lines(message, 6, [0], 9, self.source)
            levels = _Lines(book, 4 * num_levels, range(4 * num_levels), 0, self.source)
            while True:
                num = min(times.fill(), levels.fill())
                if not num:
                    break
                self.source.counts.lines_read += num
                yield _states(midnight_ns, times.take(num)[:, 0], levels.take(num))
            if left := times.fill() + levels.fill():
                raise TapeError(
                    book,
                    expected=f"as many lines as {message.name} has",
                    found=f"{left:,} or more lines without a partner",
                    fix="Fetch both files again: one may be cut short",
                )

    def detected(self) -> dict[str, str]:
        """The first trade date."""
        return {"date": self._dates[0].isoformat()}

    def instrument(self) -> str | None:
        """The ticker in the file's name, if it has one as LOBSTER writes it."""
        name = self._pairs[0][0].name
        return name.split("_")[0] if _DATE.search(name) else None


class _Lines:
    """Whole numbers from a file without a header, as many lines at a time as are asked for."""

    def __init__(
        self, path: Path, num_fields: int, columns: Any, decimals: int, source: Source
    ) -> None:
        names = tuple(str(number) for number in range(num_fields))
        wanted = tuple(names[number] for number in columns)
        self._lines = CsvBlocks(path, wanted, source.progress, names)
        self._batches = iter(self._lines)
        self._decimals = decimals
        self._ready = np.empty((0, len(wanted)), np.int64)

    def fill(self) -> int:
        """Read on if nothing is left; how many lines are ready, zero at the end."""
        while not len(self._ready):
            num_before, batch = next(self._batches, (0, None))
            if batch is not None:
                self._ready = self._parsed(num_before, batch)
            self._lines.unreadable.check(self._lines.path, num_before + len(self._ready), 0)
            if batch is None:
                break
        return len(self._ready)

    def take(self, num: int) -> Int64Array:
        """The next `num` lines, int64 `[num, columns]`."""
        taken, self._ready = self._ready[:num], self._ready[num:]
        return taken

    def _parsed(self, num_before: int, batch: pa.RecordBatch) -> Int64Array:
        parsed = [exact_integers(column, self._decimals) for column in batch.columns]
        readable = np.logical_and.reduce([good for _, good in parsed])
        for numbers, _ in parsed:  # far below what overflows: a day's nanoseconds, and prices
            readable &= (abs(numbers) <= _DAY_NS).astype(bool)
        self._lines.leave_out(batch, num_before, np.flatnonzero(~readable))
        if not readable.all():
            return np.empty((0, len(parsed)), np.int64)
        return np.column_stack([numbers for numbers, _ in parsed]).astype(np.int64)


def _states(midnight_ns: int, since_ns: Int64Array, lines: Int64Array) -> BookStates:
    levels = lines.reshape(len(lines), -1, 2, 2)[:, :, ::-1]  # ask, bid → bid, ask
    prices, sizes = levels[..., 0], levels[..., 1]
    exist = (np.abs(prices) < _NO_PRICE) & (sizes > 0)
    return BookStates(
        midnight_ns + since_ns,
        np.where(exist, prices, 0) * _PRICE_UNITS,
        np.where(exist, sizes, 0).astype(np.float64),
    )


def _pair(path: Path) -> tuple[Path, Path]:
    message = path.with_name(path.name.replace("_orderbook_", "_message_"))
    book = path.with_name(path.name.replace("_message_", "_orderbook_"))
    missing = next((file for file in (message, book) if not file.exists()), None)
    if message == book or missing is not None:
        raise TapeError(
            path,
            expected="a pair of files with `_message_` and `_orderbook_` in their names",
            found="neither in its name" if missing is None else f"no {missing.name} beside it",
            fix="Put both files into one folder, under the names LOBSTER gives them",
        )
    return message, book


def _date_of(path: Path, given: str | None) -> date:
    found = _DATE.search(path.name)
    text = given or (found.group() if found else "no date in the name")
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise TapeError(
            path,
            expected="the trade date, in the file's name or as the option date",
            found=text,
            fix="Give date as YYYY-MM-DD",
        ) from None
