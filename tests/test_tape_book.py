"""The book against a list of orders that is searched afresh for every answer."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tapeline.tape.book import Levels, Order, OrderBook

PRICES = st.integers(1, 12)
ORDERS = st.builds(Order, st.booleans(), PRICES, st.integers(0, 3), st.integers(0, 20))
IDS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"])
STEPS = st.lists(st.tuples(IDS, ORDERS | st.none()), max_size=60)


def levels(orders: dict[bytes, Order], is_bid: bool) -> list[tuple[int, int]]:
    sizes: defaultdict[int, int] = defaultdict(int)
    for order in orders.values():
        if order.is_bid == is_bid and order.size:
            sizes[order.price] += order.size
    return sorted(sizes.items(), reverse=is_bid)


@given(STEPS, st.integers(1, 5), st.booleans(), PRICES)
def test_book_is_what_its_orders_say(steps, depth, is_bid, price):
    book, orders = OrderBook(), {}
    for order_id, order in steps:
        if order is None:
            assert book.remove(order_id) == (orders.pop(order_id, None) is not None)
        else:
            book.place(order_id, order)
            orders[order_id] = order
        bids, asks = levels(orders, True), levels(orders, False)
        assert (book.bids.top(depth), book.asks.top(depth)) == (bids[:depth], asks[:depth])
        assert book.bids.best == (bids[0][0] if bids else None)
        assert book.asks.best == (asks[0][0] if asks else None)
        assert book.is_crossed == bool(bids and asks and bids[0][0] >= asks[0][0])
        assert len(book) == len(orders)
        assert all((order_id in book) == (order_id in orders) for order_id in (b"a", b"h"))
    other = asks[:1] if steps and is_bid else bids[:1] if steps else []
    expected = any(price >= best if is_bid else price <= best for best, _ in other)
    assert book.would_cross(is_bid, price) == expected


def stale_pairs(orders: dict[bytes, Order], now_ns: int, stale_ns: int) -> list[set[bytes]]:
    return [
        {bid_id, ask_id}
        for bid_id, bid in orders.items()
        for ask_id, ask in orders.items()
        if bid.is_bid and not ask.is_bid and bid.size and ask.size
        if bid.price >= ask.price and now_ns - max(bid.placed_ns, ask.placed_ns) >= stale_ns
    ]


@given(st.dictionaries(IDS, ORDERS), st.integers(0, 15))
def test_eviction_leaves_no_stale_pair_and_takes_the_older_of_each(orders, stale_ns):
    book = OrderBook()
    for order_id, order in orders.items():
        book.place(order_id, order)
    for order_id, evicted in book.evict_stale(20, stale_ns):
        pairs = [pair for pair in stale_pairs(orders, 20, stale_ns) if order_id in pair]
        assert any(
            evicted.placed_ns <= orders[other].placed_ns for pair in pairs for other in pair
        ), "it was the older of no stale pair"
        orders[order_id] = evicted._replace(size=0)
    assert stale_pairs(orders, 20, stale_ns) == []
    assert book.bids.top(9) == levels(orders, True)
    assert book.asks.top(9) == levels(orders, False)


def test_eviction_takes_the_older_order_and_no_other():
    book = OrderBook()
    book.place(b"old ask", Order(False, 100, 5, placed_ns=0))
    book.place(b"bid", Order(True, 101, 5, placed_ns=10))
    book.place(b"another", Order(True, 99, 5, placed_ns=0))
    assert book.evict_stale(19, 10) == []
    assert book.evict_stale(20, 10) == [(b"old ask", Order(False, 100, 5, 0))]
    assert book.bids.top(3) == [(101, 5), (99, 5)]
    assert book.asks.best is None


def test_of_orders_at_one_price_the_oldest_goes_first():
    book = OrderBook()
    book.place(b"younger", Order(False, 100, 5, placed_ns=2))
    book.place(b"older", Order(False, 100, 5, placed_ns=1))
    book.place(b"bid", Order(True, 100, 5, placed_ns=3))
    assert [order_id for order_id, _ in book.evict_stale(9, 1)] == [b"older", b"younger"]


def test_of_two_orders_placed_at_once_the_bid_goes():
    book = OrderBook()
    book.place(b"ask", Order(False, 100, 5, placed_ns=3))
    book.place(b"bid", Order(True, 100, 5, placed_ns=3))
    assert [order_id for order_id, _ in book.evict_stale(9, 1)] == [b"bid"]


def test_an_evicted_order_stays_known_and_comes_back_by_a_change():
    book = OrderBook()
    book.place(b"ask", Order(False, 100, 5, placed_ns=0))
    book.place(b"bid", Order(True, 101, 5, placed_ns=1))
    book.evict_stale(9, 1)
    assert b"ask" in book
    book.place(b"ask", Order(False, 103, 2, placed_ns=9))
    assert book.asks.top(1) == [(103, 2)]
    assert book.remove(b"ask")
    assert book.asks.best is None


def test_an_evicted_order_that_comes_back_where_it_was_is_new():
    book = OrderBook()
    book.place(b"ask", Order(False, 100, 5, placed_ns=0))
    book.place(b"bid", Order(True, 101, 5, placed_ns=1))
    book.evict_stale(9, 5)
    book.place(b"ask", Order(False, 100, 5, placed_ns=9))
    assert book.evict_stale(13, 5) == []
    assert [order_id for order_id, _ in book.evict_stale(14, 5)] == [b"bid"]


def test_a_changed_order_keeps_its_age_at_its_price_only():
    book = OrderBook()
    book.place(b"ask", Order(False, 100, 5, placed_ns=0))
    book.place(b"ask", Order(False, 100, 4, placed_ns=8))
    book.place(b"bid", Order(True, 100, 5, placed_ns=4))
    assert book.evict_stale(10, 5) == [(b"ask", Order(False, 100, 4, 0))]
    book.place(b"ask", Order(False, 99, 4, placed_ns=11))
    assert book.evict_stale(15, 5) == []
    assert book.evict_stale(16, 5) == [(b"bid", Order(True, 100, 5, 4))]


def test_numbers_have_no_upper_limit():
    side = Levels(+1)
    side.add(10**30, 10**30)
    side.add(10**30, 1)
    assert side.top(1) == [(10**30, 10**30 + 1)]
