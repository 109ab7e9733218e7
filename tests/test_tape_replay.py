"""Books replayed by the kernel, against a dictionary of orders that is searched afresh."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from helpers_tape import absolute, expected_row, order_events, put_on_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.tape.blocks import CHANGED, CLEARED, CREATED, DELETED, REDUCED, LevelEvents
from tapeline.tape.book import UNITS
from tapeline.tape.grid import GridOptions, Policy, Rows, book_columns
from tapeline.tape.replay import OrderReplay
from tapeline.tape.report import Counts, EvictedOrder
from tapeline.tape.sessions import Span

GRID = GridOptions(step_ns=10, depth=3, max_age_s=None)
NAMES = ["deletes_unknown", "deletes_before_create", "changes_unknown", "creates_repeated"]
EARLY_NS = 10 * 10**9
ACTIONS = [CREATED, CREATED, CREATED, CHANGED, DELETED, REDUCED]


@st.composite
def tapes(draw: Any) -> list[tuple[Any, ...]]:
    """Events with times that never step back, and whether each ends its update."""
    rows, time_ns, is_last = [], 0, True
    for _ in range(draw(st.integers(1, 60))):
        if is_last:
            time_ns += draw(st.sampled_from([0, 0, 1, 4, 9, 23]))
        is_last = draw(st.sampled_from([True, True, False]))
        action = draw(st.sampled_from([*ACTIONS, *ACTIONS, CLEARED]))
        order_id = draw(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g" * 20]))
        is_bid, size = draw(st.booleans()), draw(st.integers(0, 3))
        price = draw(st.integers(1, 8)) + (0 if is_bid else 3)
        has_price = draw(st.sampled_from([True] * 9 + [False]))
        rows.append((time_ns, order_id, action, is_bid, price, size, has_price, is_last))
    rows[-1] = (*rows[-1][:-1], True)
    return rows


def levels(orders: dict[bytes, tuple[bool, int, int]], is_bid: bool) -> list[tuple[int, int]]:
    sizes: defaultdict[int, int] = defaultdict(int)
    for side, price, size in orders.values():
        if side == is_bid and size:
            sizes[price] += size
    return sorted(sizes.items(), reverse=is_bid)


def replayed(rows: list[tuple[Any, ...]]) -> tuple[list[Any], dict[str, int]]:
    """Each state with whether it is the first one after a clear, and what is odd."""
    orders: dict[bytes, tuple[bool, int, int]] = {}
    early: dict[bytes, int] = {}
    odd, states, is_cleared = dict.fromkeys(NAMES, 0), [], False
    for time_ns, order_id, action, is_bid, price, size, has_price, is_last in rows:
        if action == CLEARED:
            orders, early, is_cleared = {}, {}, True
        elif action == DELETED and order_id not in orders:
            odd["deletes_unknown"] += 1
            early[order_id] = time_ns
        elif action == DELETED:
            del orders[order_id]
        elif action == REDUCED and order_id not in orders:
            odd["deletes_unknown"] += 1
        elif action == REDUCED:
            side, at, left = orders.pop(order_id)
            if left > size:
                orders[order_id] = (side, at, left - size)
        elif order_id in early and time_ns - early.pop(order_id) <= EARLY_NS:
            odd["deletes_unknown"] -= 1
            odd["deletes_before_create"] += 1
        else:
            is_known = order_id in orders
            odd["creates_repeated"] += action == CREATED and is_known
            odd["changes_unknown"] += action == CHANGED and not is_known
            orders[order_id] = (is_bid, price, size if has_price else 0)
        if is_last:
            states.append((is_cleared, (time_ns, levels(orders, True), levels(orders, False))))
            is_cleared = False
    return states, odd


def known_at(states: list[Any], instant_ns: int) -> list[Any]:
    known: list[Any] = []
    for is_cleared, state in states:
        if state[0] <= instant_ns:
            known = [*([] if is_cleared else known), state]
    return known


@settings(max_examples=150)
@given(
    tapes(),
    st.lists(st.integers(1, 59), max_size=4),
    st.builds(
        Policy,
        *[st.sampled_from(["keep", "drop", "hold", "nan"])] * 3,
        st.sampled_from([0.0, 5e-9, 20e-9]),
    ),
)
def test_rows_and_counts_are_what_the_orders_say(rows, cuts, policy):
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    blocks = [order_events(rows[a:b]) for a, b in itertools.pairwise(bounds)]
    sessions, counts = put_on_grid(blocks, GRID, policy)
    states, odd = replayed(rows)
    assert {name: getattr(counts, name) for name in NAMES} == odd
    assert counts.states == len(states)
    instants = range(-(-rows[0][0] // 10) * 10, rows[-1][0] + 1, 10)
    wanted = [expected_row(known_at(states, t), t, policy, GRID) for t in instants]
    found: list[Any] = []
    for session in sessions:
        columns = (session.valid, session.age_ns, absolute(session))
        found += zip(*(column.tolist() for column in columns), strict=True)
    assert len(found) == len(wanted)
    for (valid, age, values), row in zip(found, wanted, strict=True):
        assert (valid, age) == row[:2]
        np.testing.assert_array_equal(values, row[2])


def take_rows(
    rows: list[tuple[Any, ...]], stale_ns: int, until_ns: int, step_ns: int = 10
) -> tuple[Session, list[EvictedOrder]]:
    options, counts = GridOptions(step_ns=step_ns, depth=9), Counts()
    replay = OrderReplay(
        options, Policy("keep", "keep", "keep", stale_cross_s=stale_ns / 1e9), counts
    )
    taken = Rows(Span("2024-01-02", 0, 0, until_ns + 1), book_columns(9), options, counts)
    replay.open(taken)
    replay.apply(order_events(rows))
    replay.close(until_ns)
    session = taken.finish("X", is_tape_over=True)
    assert session is not None
    return session, replay.evicted


def create(time_ns: int, order_id: bytes, is_bid: bool, price: int, size: int = 5) -> Any:
    return (time_ns, order_id, CREATED, is_bid, price, size, True, True)


def change(*args: Any) -> Any:
    time_ns, order_id, _, *rest = create(*args)
    return (time_ns, order_id, CHANGED, *rest)


def ids(evicted: list[EvictedOrder]) -> list[str]:
    return [order.order_id for order in evicted]


def stale_pairs(orders: dict[str, Any], latest_ns: int) -> list[set[str]]:
    sized = {name: order for name, order in orders.items() if order[5] and order[0] <= latest_ns}
    return [
        {a, b}
        for a, bid in sized.items()
        for b, ask in sized.items()
        if bid[3] and not ask[3] and bid[4] >= ask[4]
    ]


@given(
    st.lists(
        st.tuples(st.integers(1, 19), st.booleans(), st.integers(1, 12), st.integers(0, 3)),
        max_size=8,
    ),
    st.integers(0, 15),
)
def test_eviction_leaves_no_stale_pair_and_takes_the_older_of_each(given_orders, stale_ns):
    rows = [create(t, b"%d" % n, *rest) for n, (t, *rest) in enumerate(sorted(given_orders))]
    orders = {row[1].decode(): row for row in rows}
    far = create(1, b"far", True, 0, 1)  # a row without a book is none to look at
    session, evicted = take_rows([far, *rows], stale_ns, 20, step_ns=20)
    for order in evicted:
        pairs = [pair for pair in stale_pairs(orders, 20 - stale_ns) if order.order_id in pair]
        assert any(order.placed_ns <= orders[other][0] for pair in pairs for other in pair), (
            "it was the older of no stale pair"
        )
        orders[order.order_id] = (*orders[order.order_id][:5], 0, True, True)
    assert stale_pairs(orders, 20 - stale_ns) == []
    left = {name.encode(): order[3:6] for name, order in orders.items()}
    bids = [*levels(left, True), (0, 1)]
    assert absolute(session)[-1, 1::4].tolist()[: len(bids)] == [price for price, _ in bids]
    assert session.values[-1, 2::4].tolist()[: len(bids)] == [size for _, size in bids]


def test_eviction_takes_the_older_order_and_no_other():
    rows = [
        create(0, b"old ask", False, 100),
        create(0, b"another", True, 99),
        create(10, b"bid", True, 101),
        create(30, b"end", True, 1),
    ]
    session, evicted = take_rows(rows, 10, 30)
    assert evicted == [EvictedOrder("old ask", "ask", 100, 0, 20)]
    assert absolute(session)[:, 3].tolist()[:2] == [100] * 2
    assert np.isnan(session.values[2:, 3]).all()


def test_of_orders_at_one_price_the_oldest_goes_first():
    rows = [
        create(1, b"older", False, 100),
        create(2, b"younger", False, 100),
        create(3, b"bid", True, 100),
        create(9, b"end", True, 1),
    ]
    assert ids(take_rows(rows, 1, 10)[1]) == ["older", "younger"]


def test_of_two_orders_placed_at_once_the_bid_goes_and_of_two_such_bids_the_first():
    rows = [create(3, name, name != b"ask", 100) for name in (b"ask", b"bid", b"bid too")]
    assert ids(take_rows(rows, 1, 10)[1]) == ["bid", "bid too"]


def test_an_evicted_order_stays_known_and_comes_back_by_a_change_as_a_new_one():
    rows = [
        create(0, b"ask", False, 100),
        create(1, b"bid", True, 101),
        change(11, b"ask", False, 100),  # where it was, and young now: the bid is the older
        create(40, b"end", False, 200),
    ]
    session, evicted = take_rows(rows, 9, 40)
    assert [(order.order_id, order.evicted_ns) for order in evicted] == [("ask", 10), ("bid", 20)]
    assert absolute(session)[-1, 3] == 100


def test_a_changed_order_keeps_its_age_at_its_price_only():
    kept = [create(0, b"ask", False, 100), change(8, b"ask", False, 100, 4)]
    moved = [create(0, b"ask", False, 102), change(8, b"ask", False, 100)]
    then = [create(4, b"bid", True, 99), change(9, b"bid", True, 100)]
    for rows, first in ((kept, "ask"), (moved, "ask")):
        evicted = take_rows(sorted([*rows, *then], key=lambda row: row[0]), 1, 10)[1]
        assert ids(evicted) == [first]
        assert evicted[0].placed_ns == (0 if rows is kept else 8)


def test_a_book_outgrows_its_tables_and_ids_their_width():
    """Thousands of orders and levels; ids of 1 to 40 bytes, longer ones as the tape goes on."""
    num = 6_000
    rows = [
        create(n, b"%d" % n + b"x" * (n // 200), n % 2 == 0, n + n % 2 * 9_000) for n in range(num)
    ]
    gone = [(num + n, *row[1:2], DELETED, True, 0, 0, True, True) for n, row in enumerate(rows[8:])]
    blocks = [
        order_events(part) for part in (rows[:100], rows[100:5_990], rows[5_990:], gone, rows[:1])
    ]
    blocks[-1] = blocks[-1]._replace(times_ns=np.array([2 * num], np.int64))
    (session,), counts = put_on_grid(blocks, GridOptions(step_ns=2 * num - 8, depth=9))
    assert (counts.deleted, counts.deletes_unknown, counts.creates_repeated) == (num - 8, 0, 1)
    assert absolute(session)[-1, 1:17:4].tolist() == [6, 4, 2, 0]
    assert absolute(session)[-1, 3:19:4].tolist() == [9_001 + n for n in (0, 2, 4, 6)]


def test_more_rows_than_the_buffer_holds_are_the_same_rows():
    rows = [create(0, b"b", True, 100), create(0, b"a", False, 101), create(9_000, b"c", True, 1)]
    (deep,), _ = put_on_grid([order_events(rows)], GridOptions(step_ns=10, depth=1_000))
    (flat,), _ = put_on_grid([order_events(rows)], GridOptions(step_ns=10, depth=1))
    assert len(deep) == len(flat) == 901
    np.testing.assert_array_equal(deep.values[:, :5], flat.values)
    np.testing.assert_array_equal(deep.age_ns, flat.age_ns)


def test_sizes_add_up_exactly_beyond_what_an_int64_of_billionths_holds():
    size = 2**62 + 1  # billionths; three of them are no int64
    rows = [create(0, b"a", False, 101, 7)]
    rows += [create(0, b"%d" % n, True, 100, size) for n in range(3)]
    rows += [(5, b"0", REDUCED, True, 0, size - 2, True, True)]
    rows += [(10, b"%d" % n, DELETED, True, 0, 0, True, True) for n in (1, 2)]
    rows += [(20, b"0", REDUCED, True, 0, 1, True, True), create(30, b"z", True, 1)]
    (session,), _ = put_on_grid([order_events(rows, scale=1)], GRID)
    whole = np.float32(3 * size / UNITS)
    assert session.values[0, 2] == whole
    assert session.values[1, 2] == np.float32(2 / UNITS)
    assert session.values[2:, 2].tolist() == [np.float32(1 / UNITS)] * 2


def test_sizes_of_levels_beyond_an_int64_are_kept_and_prices_refused():
    times = np.array([10, 10, 20], np.int64)
    sides = [True, False, True]
    events = LevelEvents(times, [False] * 3, sides, [5, 6, 4], [10**22 + 1, 7, 1])
    (session,), _ = put_on_grid([events], GRID)
    assert session.values[0, 2] == np.float32(10**13)
    assert session.values[0, 4] == np.float32(7e-9)
    with pytest.raises(TapeError) as raised:
        put_on_grid([events._replace(prices=[5, 10**20, 4])], GRID)
    assert str(raised.value) == (
        "events of a book: expected a price below 9,223,372,036, found 100,000,000,000. "
        "Leave the event out, or write the file in another unit."
    )
