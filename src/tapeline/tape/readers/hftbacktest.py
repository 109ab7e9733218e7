"""hftbacktest: npz files of event arrays, with levels of a book, of one instrument.

    ev u8, exch_ts i8, local_ts i8, px f8, qty f8, order_id u8, ival i8, fval f8

An event's kind stands in the low byte of `ev`, and in its high bits whether it is the local side's
(30) or the exchange's (31), and a bid's (29) or an ask's (28): https://hftbacktest.readthedocs.io,
"Data". An event that overtook another on its way is written twice, once for each side.

- Events of the local side are read, at `local_ts`: when they were received.
- An update sets the quantity at a price, zero deletes it. An event that clears takes off the levels
  of its side from the best to its price, all if the price is no number, or both sides if it has
  none; a snapshot follows it.
- Before a snapshot, or a clear of both sides, nobody knows what is in the book: updates are left
  out, unless `from_empty` lets the book grow out of nothing. A snapshot in a file of its own, as
  `create_last_snapshot` makes it, goes first; its events have no time, and get the next one's.
- Prices are floats. Each is taken as the decimal number of fewest digits that it is as near to as
  its neighbours among the floats, nine decimals at most.

Nothing is unpickled. Does not cover: order-by-order events, which are refused; trades and events of
other kinds, which are counted; the arrays of version 1, whose times are floats.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import Float64Array, Level, LevelEvents
from tapeline.tape.book import UNITS
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.text import Unreadable, open_stream
from tapeline.tape.readers.times import are_possible

_ZIP: Final = b"PK\x03\x04"
_NAME: Final = slice(30, 286)  # where a zip file has the name of its first member
_FIELDS: Final = {"ev": "u", "local_ts": "i", "px": "f", "qty": "f"}
_BLOCK_EVENTS: Final = 1 << 14
_UPDATE, _TRADE, _CLEAR, _SNAPSHOT = 1, 2, 3, 4
_ORDERS: Final = (10, 11, 12, 13)
_LOCAL, _BID, _ASK = 30, 29, 28  # bits
_ULPS: Final = 4  # a tick times a number of ticks is off by as much

_Event = tuple[int, int, bool, bool, int, int]  # time, kind, whether bid, whether ask, price, size


@dataclass(frozen=True, slots=True)
class HftbacktestOptions:
    """What may be said about event arrays.

    Attributes:
        from_empty: take the book as empty at the start. Its levels are right from when they change
            first; those that don't are missing, and so may be the best ones.
    """

    from_empty: bool = False


class HftbacktestReader(Reader):
    """Event arrays of hftbacktest."""

    name = "hftbacktest"
    looks_for = "npz with an array of events"
    Options = HftbacktestOptions

    def __init__(self, source: Source, options: HftbacktestOptions) -> None:
        super().__init__(source, options)
        self._is_known = options.from_empty
        self._untimed: list[_Event] = []
        self._prices: tuple[set[int], set[int]] = (set(), set())  # of asks and of bids

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is a zip file that begins with an array."""
        return head.raw.startswith(_ZIP) and b".npy" in head.raw[_NAME]

    def blocks(self) -> Iterator[LevelEvents]:
        """What happens to the levels."""
        for path in self.source.paths:
            unreadable, num_events = Unreadable(), 0
            for records in _records(path):
                parsed, readable = self._parsed(path, records)
                if not readable.all():
                    row = int(np.argmin(readable))
                    unreadable.add(num_events + row + 1, str(records[row]), int((~readable).sum()))
                num_events += len(records)
                yield self._events(parsed)
            self.source.close(path, unreadable, num_events - unreadable.num)
        if not self._is_known:
            raise TapeError(
                self.source.paths[0],
                expected="a snapshot of the book before its updates",
                found=f"{self.source.counts.lines_read:,} events, none of a snapshot",
                fix="Give the snapshot's file first, and both as one tape (`--continues`), or set "
                "from_empty if a book without the levels that don't change is all right",
            )
        if self._untimed:
            raise TapeError(
                self.source.paths[-1],
                expected="updates after the snapshot",
                found="a snapshot alone, which has no time",
                fix="Give the file that continues it too, and both as one tape (`--continues`)",
            )

    def _parsed(self, path: Path, records: npt.NDArray[Any]) -> tuple[list[_Event], BoolArray]:
        """The events of levels on the local side, and which records could be read."""
        flags, times_ns = records["ev"], records["local_ts"]
        kinds = (flags & 0xFF).astype(np.int64)
        is_local, is_bid, is_ask = (flags >> bit & 1 == 1 for bit in (_LOCAL, _BID, _ASK))
        if (orders := np.isin(kinds, _ORDERS)).any():
            raise TapeError(
                path,
                expected="events of price levels",
                found=f"one of kind {kinds[orders][0]}, of a single order",
                fix="Convert the market's data to levels, or read them in their own format",
            )
        of_level = is_local & np.isin(kinds, (_UPDATE, _CLEAR, _SNAPSHOT))
        for what, left_out in (
            ("events of the exchange's side alone, left out", ~is_local),
            ("trades, left out", is_local & (kinds == _TRADE)),
            ("other events, left out", is_local & ~of_level & (kinds != _TRADE)),
        ):
            self.source.counts.count(what, int(left_out.sum()))
        prices, are_prices = _billionths(records["px"])
        sizes = records["qty"]
        is_level = are_prices & np.isfinite(sizes) & (sizes >= 0) & (is_bid ^ is_ask)
        is_time = are_possible(times_ns) | ((kinds == _SNAPSHOT) & (times_ns == 0))
        readable = ~of_level | (is_time & (is_level | (kinds == _CLEAR)))
        rows = of_level & readable
        events = zip(
            times_ns[rows].tolist(),
            kinds[rows].tolist(),
            is_bid[rows].tolist(),
            is_ask[rows].tolist(),
            np.where(are_prices, prices, -1)[rows].tolist(),
            [round(size * UNITS) for size in np.nan_to_num(sizes[rows]).tolist()],
            strict=True,
        )
        return list(events), readable

    def _events(self, parsed: list[_Event]) -> LevelEvents:
        times: list[int] = []
        levels: list[Level] = []
        num_unknown = 0
        for event in parsed:
            time_ns, kind, is_bid, is_ask = event[:4]
            if not self._is_known and (kind == _UPDATE or (kind == _CLEAR and is_bid != is_ask)):
                num_unknown += kind == _UPDATE
                continue
            self._is_known = True
            if not time_ns:
                self._untimed.append(event)
                continue
            if self._untimed:  # it is the whole book
                levels += self._changes(_CLEAR, False, False, -1, 0)
                for untimed in self._untimed:
                    levels += self._changes(*untimed[1:])
                self._untimed.clear()
            levels += self._changes(*event[1:])
            times += [time_ns] * (len(levels) - len(times))
        self.source.counts.count("updates before a snapshot, left out", num_unknown)
        return LevelEvents.of(times, levels)

    def _changes(self, kind: int, is_bid: bool, is_ask: bool, price: int, size: int) -> list[Level]:
        """What an event does to levels."""
        prices = self._prices[is_bid]
        if kind != _CLEAR:
            (prices.add if size else prices.discard)(price)
            return [(False, is_bid, price, size)]
        if is_bid == is_ask:
            for side in self._prices:
                side.clear()
            return [(True, False, 0, 0)]
        gone = {
            other for other in prices if price < 0 or (other >= price if is_bid else other <= price)
        }
        prices -= gone
        return [(False, is_bid, other, 0) for other in sorted(gone)]


def _records(path: Path) -> Iterator[npt.NDArray[Any]]:
    """The events of a file, a block at a time."""
    try:
        with open_stream(path) as (raw, _), zipfile.ZipFile(raw) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            with archive.open("data.npy" if "data.npy" in names else names[0]) as stream:
                num_left, dtype = _header(path, stream)
                while num_left:
                    num = min(num_left, _BLOCK_EVENTS)
                    data = stream.read(num * dtype.itemsize)
                    if len(data) < num * dtype.itemsize:
                        raise EOFError(f"{num_left:,} events fewer than it says")
                    yield np.frombuffer(data, dtype)
                    num_left -= num
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:
        if isinstance(error, TapeError):
            raise
        raise TapeError(
            path,
            expected="npz that can be read to its end",
            found=str(error) or type(error).__name__,
            fix="Fetch the file again: it may be cut short or damaged",
        ) from None


def _header(path: Path, stream: IO[bytes]) -> tuple[int, np.dtype[Any]]:
    """How many events an array has, and their layout."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    kinds = {name: dtype[name].kind for name in dtype.names or ()}
    if dtype.hasobject or len(shape) != 1 or not _FIELDS.items() <= kinds.items():
        raise TapeError(
            path,
            expected="an array of events with the fields ev, exch_ts, local_ts, px and qty",
            found=f"{dtype} of shape {list(shape)}",
            fix="Convert the data with hftbacktest 2",
        )
    return shape[0], dtype


def _billionths(values: Float64Array) -> tuple[Int64Array, BoolArray]:
    """Prices as integers in billionths, and which values are a price."""
    left = np.isfinite(values) & (values > 0) & (values < 2**63 / UNITS)
    fits, units = np.zeros(len(values), bool), np.zeros(len(values), np.int64)
    values = np.where(left, values, 1.0)
    margins = _ULPS * np.spacing(values)
    for decimals in range(10):
        scaled = np.rint(values * 10**decimals)
        near = left & (np.abs(scaled / 10**decimals - values) <= margins)
        units[near] = scaled[near].astype(np.int64) * 10 ** (9 - decimals)
        fits |= near
        left &= ~near
        if not left.any():
            break
    return units, fits
