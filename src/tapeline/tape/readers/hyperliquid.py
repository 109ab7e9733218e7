"""Hyperliquid: raw recordings of its websocket's `l2Book`, of one coin.

    1737918843893903000 {"channel":"l2Book","data":{"coin":"BTC","time":…,"levels":[[{"px":…,…

A line is known from the local time before it on. Each book is whole and has up to twenty levels a
side, bids first, the best level first. The stamps inside messages aren't read: the first trades
after a subscription are as old as a minute.

Does not cover: trades, which are counted; several coins in one file; aggregated books.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from tapeline.tape.blocks import BookStates
from tapeline.tape.readers.base import Head, Reader, Source
from tapeline.tape.readers.jsonlines import (
    looks_recorded,
    price_of,
    recorded,
    refuse_several,
    size_of,
)

_NUM_LEVELS: Final = 20
_Side = list[tuple[int, float]]  # price in billionths and size in units, best first


class _Book(NamedTuple):
    """One message: when it was received, and both sides."""

    time_ns: int
    bids: _Side
    asks: _Side


class HyperliquidReader(Reader):
    """Books as they were received."""

    name = "hyperliquid"
    looks_for = "lines of `<local ns> <json>` with l2Book"

    def __init__(self, source: Source, options: Any) -> None:
        super().__init__(source, options)
        self._coins: list[str] = []

    @classmethod
    def recognises(cls, head: Head) -> bool:
        """Whether it is a recording with a book among its first lines."""
        return looks_recorded(head) and b'"l2Book"' in head.text

    def blocks(self) -> Iterator[BookStates]:
        """The books of each block of lines."""
        for path in self.source.paths:
            for books in recorded(self.source, path, self._parse):
                refuse_several(self.source, "coin", self._coins)
                yield _states(books)

    def instrument(self) -> str | None:
        """The coin."""
        return self._coins[0] if self._coins else None

    def _parse(self, time_ns: int, message: dict[str, Any]) -> _Book | None:
        channel = message["channel"]
        if channel != "l2Book":
            what = "trades" if channel == "trades" else "other messages"
            self.source.counts.count(f"{what}, left out")
            return None
        data = message["data"]
        bids, asks = data["levels"]
        book = _Book(time_ns, _side(bids), _side(asks))
        coin = str(data["coin"])
        if coin not in self._coins:
            self._coins.append(coin)
        return book


def _side(levels: list[dict[str, str]]) -> _Side:
    """The levels of one side; a `ValueError` if there are more than Hyperliquid sends."""
    if len(levels) > _NUM_LEVELS:
        raise ValueError(len(levels))
    return [(price_of(level["px"]), size_of(level["sz"])) for level in levels]


def _states(books: list[_Book]) -> BookStates:
    prices = np.zeros((len(books), _NUM_LEVELS, 2), np.int64)
    sizes = np.zeros(prices.shape)
    for row, (_, *sides) in enumerate(books):
        for number, side in enumerate(sides):
            for level, (price, size) in enumerate(side):
                prices[row, level, number], sizes[row, level, number] = price, size
    return BookStates(np.array([book.time_ns for book in books], np.int64), prices, sizes)
