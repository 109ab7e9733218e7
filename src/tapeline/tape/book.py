"""The limit order book, rebuilt from its orders.

Covers total sizes by price on each side, best prices, the first levels, crossed states, and orders
by id. Does not cover time: what a row of a grid shows, and when, is `grid`'s.

Prices and sizes are integers in billionths (`UNITS` to one), so a level is empty when its size is
exactly zero, and two prices are equal when they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, NamedTuple

UNITS: Final = 1_000_000_000  # nine decimals: no tick has to be known before the first price


class Levels:
    """One side of a book: the total size at each price.

    Args:
        sign: +1 for bids, −1 for asks. `sign · price` grows towards the market on both sides, so
            the best level is the last key, where inserting and deleting move the least.
    """

    __slots__ = ("_sign", "_sizes", "keys")

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._sizes: dict[int, int] = {}
        self.keys: list[int] = []

    def add(self, price: int, size: int) -> None:
        """Add `size` (negative to take away) at `price`; a level of size zero is gone."""
        before = self._sizes.get(price, 0)
        after = before + size
        assert after >= 0, "more taken from a level than it holds"
        if after:
            self._sizes[price] = after
            if not before:
                insort(self.keys, self._sign * price)
        elif before:
            del self._sizes[price]
            del self.keys[bisect_left(self.keys, self._sign * price)]

    def put(self, price: int, size: int) -> None:
        """Make `size` the total at `price`; zero removes the level."""
        self.add(price, size - self._sizes.get(price, 0))

    def clear(self) -> None:
        """Remove every level."""
        self._sizes.clear()
        self.keys.clear()

    @property
    def best(self) -> int | None:
        """The price nearest to the market; None for an empty side."""
        return self._sign * self.keys[-1] if self.keys else None

    def top(self, num_levels: int) -> list[tuple[int, int]]:
        """Price and size of up to `num_levels` levels, best first."""
        prices = [self._sign * key for key in self.keys[: -num_levels - 1 : -1]]
        return [(price, self._sizes[price]) for price in prices]


class Book:
    """Two sides of prices and sizes. Crossed here means crossed or locked: best bid ≥ best ask."""

    __slots__ = ("asks", "bids")

    def __init__(self) -> None:
        self.bids = Levels(+1)
        self.asks = Levels(-1)

    @property
    def is_crossed(self) -> bool:
        """Whether both sides exist and the best bid is at or above the best ask."""
        bids, asks = self.bids.keys, self.asks.keys
        return bool(bids) and bool(asks) and bids[-1] + asks[-1] >= 0

    def clear(self) -> None:
        """Empty both sides."""
        self.bids.clear()
        self.asks.clear()

    def would_cross(self, is_bid: bool, price: int) -> bool:
        """Whether anything resting at `price` would cross the other side's best price."""
        other, key = (self.asks.keys, price) if is_bid else (self.bids.keys, -price)
        return bool(other) and key + other[-1] >= 0


class Order(NamedTuple):
    """An order known to the book; one of size zero is known by its id but rests at no level."""

    is_bid: bool
    price: int
    size: int
    placed_ns: int


class OrderBook(Book):
    """A book that follows single orders by id.

    An id is any hashable value, compared and never computed with.
    """

    __slots__ = ("_orders",)

    def __init__(self) -> None:
        super().__init__()
        self._orders: dict[bytes, Order] = {}

    def __contains__(self, order_id: bytes) -> bool:
        return order_id in self._orders

    def __len__(self) -> int:
        return len(self._orders)

    def place(self, order_id: bytes, order: Order) -> None:
        """Put an order into the book, in the place of the one it had before, if any.

        An order that keeps its side and price keeps the time it was placed at.
        """
        old = self._orders.get(order_id)
        if old is not None:
            self._take_off(old)
            if old.size and (old.is_bid, old.price) == (order.is_bid, order.price):
                order = order._replace(placed_ns=old.placed_ns)
        self._orders[order_id] = order
        if order.size:
            (self.bids if order.is_bid else self.asks).add(order.price, order.size)

    def reduce(self, order_id: bytes, size: int) -> bool:
        """Take `size` off an order, all of it at most; False if it isn't known.

        An order with nothing left is forgotten.
        """
        order = self._orders.get(order_id)
        if order is None:
            return False
        if size >= order.size:
            return self.remove(order_id)
        self.place(order_id, order._replace(size=order.size - size))
        return True

    def clear(self) -> None:
        """Forget every order."""
        super().clear()
        self._orders.clear()

    def remove(self, order_id: bytes) -> bool:
        """Forget an order; False if it isn't known. Where it rests is taken from the book."""
        order = self._orders.pop(order_id, None)
        if order is None:
            return False
        self._take_off(order)
        return True

    def evict_stale(self, now_ns: int, stale_ns: int) -> list[tuple[bytes, Order]]:
        """Take off the older of each two orders that have crossed for `stale_ns` or longer.

        Two orders cross from when the younger was placed. Of two placed at once the bid goes. An
        evicted order stays known, so its late delete is no surprise. Reads every order: call it
        only for a book that has been crossed that long.
        """
        evicted = []
        while pair := self._stale_pair(now_ns - stale_ns):
            order_id, order = min(pair, key=lambda entry: entry[1].placed_ns)
            self._take_off(order)
            self._orders[order_id] = order._replace(size=0)
            evicted.append((order_id, order))
        return evicted

    def _stale_pair(self, latest_ns: int) -> tuple[tuple[bytes, Order], ...]:
        """The best bid and the best ask placed by `latest_ns`, if they cross; else nothing."""
        best: dict[bool, tuple[bytes, Order]] = {}
        for order_id, order in self._orders.items():
            if not order.size or order.placed_ns > latest_ns:
                continue
            held = best.get(order.is_bid)
            if held is None or _rank(order) > _rank(held[1]):
                best[order.is_bid] = (order_id, order)
        if len(best) < 2 or best[True][1].price < best[False][1].price:
            return ()
        return best[True], best[False]

    def _take_off(self, order: Order) -> None:
        if order.size:
            (self.bids if order.is_bid else self.asks).add(order.price, -order.size)


def _rank(order: Order) -> tuple[int, int]:
    """Price priority, then age."""
    return (order.price if order.is_bid else -order.price, -order.placed_ns)
