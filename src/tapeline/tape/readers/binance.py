"""Binance: raw recordings of its websocket, spot or futures, of one instrument.

    1723161254206652067 {"lastUpdateId":50093239218,"bids":[["61837.63","3.788"],…],"asks":[…]}
    1723161254236551067 {"stream":"btcusdt@depth@100ms","data":{"e":"depthUpdate","U":…,"u":…,…}}

A line is known from the local time before it on. The exchange's stamps aren't read but to tell how
far they are ahead of it.

`BinanceReader` rebuilds the book from a snapshot, as its REST interface gives it, and the updates
of `@depth`, as https://developers.binance.com/docs tells for spot and for futures:

- An update covers the ids after `pu` (futures) or before `U` (spot) up to `u`. It is applied if the
  book's id lies in between, which makes the book's id `u`. One that ends before the book is left
  out. One that begins after it shows a gap: the book is unknown from there to the next snapshot.
- While the book is unknown updates wait, and follow the snapshot at its time: what was received
  before it makes a book only with it. The oldest are given up when `MAX_WAITING` levels wait; if
  the snapshot needs them, that is a gap.
- A snapshot older than the book is left out; another one replaces the book.

Levels beyond the snapshot's depth are unknown until they change. A file that continues another one
has no snapshot of its own, and is read together with it.

`BinanceTickerReader` reads `@bookTicker`, the best bid and ask: a book of one level.

Does not cover: trades, partial books (`@depth20`), which are counted; several symbols in one file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from operator import index
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from tapeline.errors import TapeError
from tapeline.tape.blocks import BookStates, Level, LevelEvents
from tapeline.tape.grid import GridOptions
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.jsonlines import (
    looks_recorded,
    price_of,
    recorded,
    refuse_several,
    size_of,
    units_of,
)
from tapeline.tape.report import Counts

MAX_WAITING: Final = 1 << 18  # levels: some 50 MB, and at the usual pace a quarter of an hour
_NS_PER_MS: Final = 10**6
_BOOK: Final = re.compile(rb'"depthUpdate"|"lastUpdateId"')
_TICKER: Final = re.compile(rb'"B": ?"[\d.]+", ?"a": ?"[\d.]+", ?"A": ?"')
_PARTIAL: Final = re.compile(r"@depth\d")
_CLEAR: Final = (True, False, 0, 0)


class _Change(NamedTuple):
    """Levels that lead to the book of id `last`: from that of id `before`, or a snapshot's if None.

    A snapshot has all levels, an update those that changed.
    """

    time_ns: int
    before: int | None
    last: int
    levels: list[Level]


class _Quote(NamedTuple):
    """The best bid and ask: two prices, two sizes."""

    time_ns: int
    prices: tuple[int, int]
    sizes: tuple[float, float]


class _BinanceFeed(Reader):
    """What both readers share: the kinds of messages, and the symbol."""

    def __init__(self, source: Source, options: Any) -> None:
        super().__init__(source, options)
        self._symbols: list[str] = []
        self._ahead_ns: tuple[int, int, int] = (0, 2**63, 0)  # how many, the least, the most

    def instrument(self) -> str | None:
        """The symbol."""
        return self._symbols[0] if self._symbols else None

    def _note_symbol(self, data: dict[str, Any]) -> None:
        symbol = str(data["s"])
        if symbol not in self._symbols:
            self._symbols.append(symbol)

    def _note_clock(self, time_ns: int, data: dict[str, Any]) -> None:
        """Compare the exchange's stamp, if there is one, with the time of receipt."""
        ahead_ns = index(data["E"]) * _NS_PER_MS - time_ns if "E" in data else 0
        if ahead_ns > 0:
            num, least, most = self._ahead_ns
            self._ahead_ns = num + 1, min(least, ahead_ns), max(most, ahead_ns)

    def _count_clock(self) -> None:
        num, least, most = self._ahead_ns
        self.source.counts.count(
            "messages stamped by the exchange after they were received, by "
            f"{least / 1e9:.3f} to {most / 1e9:.3f} s: the clocks differ",
            num,
        )

    def _left_out(self, message: dict[str, Any], data: dict[str, Any]) -> None:
        """Count a message that isn't needed."""
        kind = data.get("e")
        what = "other messages"
        if _is_quote(data):
            what = "best quotes"
        elif kind in ("trade", "aggTrade"):
            what = "trades"
        elif "lastUpdateId" in message:
            what = "snapshots of the book"
        elif "lastUpdateId" in data or _is_partial(message):
            what = "partial books"
        elif kind == "depthUpdate":
            what = "updates of the book"
        self.source.counts.count(f"{what}, left out")


class BinanceReader(_BinanceFeed):
    """A book rebuilt from a snapshot and updates."""

    name = "binance"
    looks_for = "lines of `<local ns> <json>` with depthUpdate or lastUpdateId"

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is a recording with updates or a snapshot among its first lines."""
        return looks_recorded(head) and _BOOK.search(head.text) is not None

    def blocks(self) -> Iterator[LevelEvents]:
        """What happens to the levels once there is a snapshot."""
        book = _Book(self.source.counts)
        for path in self.source.paths:
            for changes in recorded(self.source, path, self._parse):
                for change in changes:
                    book.add(change)
                refuse_several(self.source, "symbol", self._symbols)
                yield book.take()
        book.finish(self.source)
        self._count_clock()

    def _parse(self, time_ns: int, message: dict[str, Any]) -> _Change | None:
        if "lastUpdateId" in message:
            levels = _levels(message["bids"], message["asks"])
            return _Change(time_ns, None, index(message["lastUpdateId"]), levels)
        data = _data(message)
        self._note_clock(time_ns, data)
        if data.get("e") != "depthUpdate" or _is_partial(message):
            self._left_out(message, data)
            return None
        before = index(data["pu"]) if "pu" in data else index(data["U"]) - 1
        update = _Change(time_ns, before, index(data["u"]), _levels(data["b"], data["a"]))
        self._note_symbol(data)
        return update


class BinanceTickerReader(_BinanceFeed):
    """Best bids and asks."""

    name = "binance-ticker"
    looks_for = "lines of `<local ns> <json>` with b, B, a, A and no updates of a book"
    grid: ClassVar[GridOptions] = GridOptions(depth=1)

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is a recording with best quotes, and no book to rebuild."""
        is_book = _BOOK.search(head.text) is not None
        return looks_recorded(head) and not is_book and _TICKER.search(head.text) is not None

    def blocks(self) -> Iterator[BookStates]:
        """The quotes, each a book of one level."""
        for path in self.source.paths:
            for quotes in recorded(self.source, path, self._parse):
                refuse_several(self.source, "symbol", self._symbols)
                yield BookStates(
                    np.array([quote.time_ns for quote in quotes], np.int64),
                    np.array([quote.prices for quote in quotes], np.int64).reshape(-1, 1, 2),
                    np.array([quote.sizes for quote in quotes], float).reshape(-1, 1, 2),
                )
        self._count_clock()

    def _parse(self, time_ns: int, message: dict[str, Any]) -> _Quote | None:
        data = _data(message)
        self._note_clock(time_ns, data)
        if "lastUpdateId" in message or not _is_quote(data):
            self._left_out(message, data)
            return None
        sizes = size_of(data["B"]), size_of(data["A"])
        bid, ask = (
            price_of(price) if size else 0  # a side without a quote has a price of zero
            for price, size in zip((data["b"], data["a"]), sizes, strict=True)
        )
        self._note_symbol(data)
        return _Quote(time_ns, (bid, ask), sizes)


class _Book:
    """Snapshots and updates in the order of their ids, as events of levels."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._id: int | None = None  # of the last update in the book; None: the book is unknown
        self._waiting: deque[_Change] = deque()
        self._num_waiting = 0  # updates and their levels
        self._times: list[int] = []
        self._levels: list[Level] = []
        self._num_updates = self._num_applied = 0
        self._first_before = 0
        self._snapshot_id: int | None = None

    def add(self, change: _Change) -> None:
        """Take what the file has next."""
        if change.before is None:
            self._replace(change)
        else:
            self._first_before = self._first_before if self._num_updates else change.before
            self._num_updates += 1
            self._follow(change, change.before)

    def take(self) -> LevelEvents:
        """The events since the last time."""
        events = LevelEvents.of(self._times, self._levels)
        self._times, self._levels = [], []
        return events

    def finish(self, source: Source) -> None:
        """Nothing follows.

        Raises:
            TapeError: the book was never known.
        """
        if self._id is None and not self._num_applied:
            raise self._never_known(source)
        self._counts.count("updates that no snapshot follows, left out", len(self._waiting))

    def _replace(self, snapshot: _Change) -> None:
        self._snapshot_id = snapshot.last
        if self._id is not None and snapshot.last < self._id:
            self._counts.count("snapshots older than the book, left out")
            return
        self._put(snapshot.time_ns, [_CLEAR, *snapshot.levels])
        self._id = snapshot.last
        waiting, self._waiting, self._num_waiting = self._waiting, deque(), 0
        for update in waiting:
            assert update.before is not None, "snapshots don't wait"
            self._follow(update._replace(time_ns=snapshot.time_ns), update.before)

    def _follow(self, update: _Change, before: int) -> None:
        if self._id is None:
            self._wait(update)
        elif update.last <= self._id:
            self._counts.count("updates older than the book, left out")
        elif before > self._id:
            self._counts.count("gaps in the ids of updates, after which the book is unknown")
            self._put(update.time_ns, [_CLEAR])
            self._id = None
            self._wait(update)
        else:
            self._put(update.time_ns, update.levels)
            self._id = update.last
            self._num_applied += 1

    def _wait(self, update: _Change) -> None:
        self._waiting.append(update)
        self._num_waiting += 1 + len(update.levels)
        while self._num_waiting > MAX_WAITING:
            self._num_waiting -= 1 + len(self._waiting.popleft().levels)
            self._counts.count("updates given up while waiting for a snapshot")

    def _put(self, time_ns: int, levels: list[Level]) -> None:
        self._times += [time_ns] * len(levels)
        self._levels += levels

    def _never_known(self, source: Source) -> TapeError:
        if not self._num_updates:
            return TapeError(
                source.paths[0],
                expected="updates of a book",
                found="none",
                fix="Read a recording of best quotes as format binance-ticker",
            )
        updates = f"{self._num_updates:,} updates from id {self._first_before + 1} on"
        if self._snapshot_id is not None:
            return TapeError(
                source.paths[0],
                expected="updates that continue a snapshot",
                found=f"{updates}, and a snapshot of id {self._snapshot_id}",
                fix="Put the files into the order of their times; if they are, no file has what "
                "lies between, and the recording must begin before the snapshot is asked for",
            )
        return TapeError(
            source.paths[0],
            expected="a snapshot of the book (lastUpdateId, bids, asks) among its updates",
            found=f"{updates}, and no snapshot",
            fix="Give the file before it first, which ends with id "
            f"{self._first_before}, and both as one tape (`--continues`)",
        )


def _data(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the wrapper that combined streams have."""
    data = message.get("data", message)
    if not isinstance(data, dict):
        raise TypeError(data)
    return data


def _is_quote(data: dict[str, Any]) -> bool:
    return data.get("e", "bookTicker") == "bookTicker" and "B" in data and "A" in data


def _is_partial(message: dict[str, Any]) -> bool:
    """Whether it holds the first levels alone: of futures such a book looks like an update."""
    return _PARTIAL.search(str(message.get("stream", ""))) is not None


def _levels(bids: list[list[str]], asks: list[list[str]]) -> list[Level]:
    return [
        (False, is_bid, price_of(price), units_of(size))
        for is_bid, side in ((True, bids), (False, asks))
        for price, size, *_ in side
    ]
