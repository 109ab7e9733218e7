"""The grid against a book rebuilt from nothing for every row, and its rules one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape.book import UNITS, Order, OrderBook
from tapeline.tape.grid import Grid, book_columns, utc_day
from tapeline.tape.report import Counts

DAY_NS = 86_400 * 10**9
STEP_NS = 10
MIDNIGHT_NS = 20_000 * DAY_NS

# time, order id, and the order or None for a delete
Event = tuple[int, bytes, tuple[bool, int, int] | None]


def put_on_grid(events: list[Event], *, depth=2, hold_ns=15, step_ns=STEP_NS):
    book, counts = OrderBook(), Counts()
    grid = Grid(book, "X", counts, step_ns=step_ns, depth=depth, hold_ns=hold_ns)
    for time_ns, order_id, order in events:
        grid.advance(time_ns)
        if order is None:
            book.remove(order_id)
            continue
        is_bid, price, size = order
        if book.would_cross(is_bid, price * UNITS):
            grid.hold()
        book.place(order_id, Order(is_bid, price * UNITS, size * UNITS, time_ns))
    return grid.finish(), counts


def events_near(start_ns: int):
    """Events around `start_ns`, in time order, several at one time among them."""
    order = st.tuples(st.booleans(), st.integers(90, 110), st.integers(1, 4))
    event = st.tuples(
        st.integers(start_ns - 60, start_ns + 60),
        st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]),
        order | st.none(),
    )
    return st.lists(event, min_size=1, max_size=40).map(lambda e: sorted(e, key=lambda x: x[0]))


def states(events: list[Event]) -> list[tuple[int, tuple]]:
    """The book after each event, as (time, (bids, asks))."""
    orders: dict[bytes, tuple[bool, int, int]] = {}
    result = []
    for time_ns, order_id, order in events:
        orders.pop(order_id, None)
        if order is not None:
            orders[order_id] = order
        sides = []
        for is_bid in (True, False):
            prices = {p for b, p, _ in orders.values() if b == is_bid}
            sides.append(
                [
                    (p, sum(s for b, q, s in orders.values() if (b, q) == (is_bid, p)))
                    for p in sorted(prices, reverse=is_bid)
                ]
            )
        result.append((time_ns, tuple(sides)))
    return result


def is_crossed(state: tuple) -> bool:
    bids, asks = state
    return bool(bids and asks and bids[0][0] >= asks[0][0])


def row_of(state: tuple, depth: int) -> list[float]:
    bids, asks = (side + [(side[-1][0], 0)] * depth for side in state)
    row = [(bids[0][0] + asks[0][0]) / 2]
    for (bid, bid_size), (ask, ask_size) in zip(bids[:depth], asks[:depth], strict=True):
        row += [bid, bid_size, ask, ask_size]
    return row


def absolute(session) -> np.ndarray:
    values = session.values.astype(np.float64)
    values[:, 0] += session.origin
    for number, name in enumerate(session.columns):
        if "price" in name:
            values[:, number] += session.origin
    return values


@given(events_near(MIDNIGHT_NS))
def test_every_row_is_the_book_rebuilt_from_the_events_until_then(events):
    sessions, counts = put_on_grid(events)
    history = states(events)
    expected_times = []
    for start_ns in (MIDNIGHT_NS - DAY_NS, MIDNIGHT_NS):
        times = [time_ns for time_ns, *_ in events if start_ns <= time_ns < start_ns + DAY_NS]
        first, last = (times[0], times[-1]) if times else (0, -1)
        expected_times += range(-(-first // STEP_NS) * STEP_NS, last + 1, STEP_NS)
    assert [t for session in sessions for t in session.times] == expected_times
    assert counts.rows == len(expected_times)
    for session in sessions:
        start_ns = int(session.times[0]) // DAY_NS * DAY_NS
        for row, t in enumerate(session.times):
            known = [(time_ns, state) for time_ns, state in history if time_ns <= t]
            time_ns, state = known[-1]
            if is_crossed(state):
                # The cross began with the first event after the last uncrossed state.
                began = max((i for i, (_, s) in enumerate(known) if not is_crossed(s)))
                time_ns, state = known[began + 1][0], known[began][1]
                if t - time_ns > 15 or time_ns < start_ns:
                    state = ([], [])
            if all(state):
                assert session.valid[row]
                assert absolute(session)[row].tolist() == row_of(state, 2)
            else:
                assert not session.valid[row]
                assert np.isnan(session.values[row]).all()
            assert session.age_ns[row] == t - time_ns


def rows_until(t: int, sessions) -> list[tuple]:
    return [
        (session.key, time_ns, session.origin * valid, values.tobytes(), valid, age)
        for session in sessions
        for time_ns, values, valid, age in zip(
            session.times, session.values, session.valid, session.age_ns, strict=True
        )
        if time_ns <= t
    ]


@given(events_near(MIDNIGHT_NS), events_near(MIDNIGHT_NS), st.integers(-60, 60))
def test_no_event_after_a_row_changes_it(events, others, offset):
    t = MIDNIGHT_NS + offset
    known = [event for event in events if event[0] <= t]
    # Rows end with the last event, so whether there is a row at t takes an event from t on.
    known.append((t, b"now", None))
    futures = [[e for e in future if e[0] > t] for future in (events, others)]
    (one, _), (two, _) = (put_on_grid([*known, *future]) for future in futures)
    assert rows_until(t, one) == rows_until(t, two)


@given(events_near(MIDNIGHT_NS))
def test_sessions_end_at_midnight(events):
    sessions, _ = put_on_grid(events)
    days = [np.unique(session.times // DAY_NS) for session in sessions]
    assert all(len(day) == 1 for day in days)
    assert all(a < b for (a,), (b,) in pairwise(days))
    dates = {MIDNIGHT_NS // DAY_NS - 1: "2024-10-03", MIDNIGHT_NS // DAY_NS: "2024-10-04"}
    assert [session.key.date for session in sessions] == [dates[day] for (day,) in days]


BOTH = [(0, b"bid", (True, 100, 1)), (0, b"ask", (False, 102, 2))]


def test_columns_of_ten_levels():
    columns = book_columns(10)
    assert len(columns) == 41
    assert columns[:6] == (
        "mid",
        "bid_price_1",
        "bid_size_1",
        "ask_price_1",
        "ask_size_1",
        "bid_price_2",
    )
    assert columns[-1] == "ask_size_10"


def test_missing_levels_repeat_the_last_price_with_size_zero():
    (session,), counts = put_on_grid([*BOTH, (10, b"x", None)])
    assert session.origin == 100
    assert session.values[0].tolist() == [1, 0, 1, 2, 2, 0, 0, 2, 0]
    assert counts.rows_thin == 2
    _, counts = put_on_grid([*BOTH, (0, b"bid2", (True, 99, 3))])
    assert counts.rows_thin == 1, "one side is enough"


def test_a_full_book_is_not_thin():
    deeper = [(0, b"bid2", (True, 99, 3)), (0, b"ask2", (False, 103, 4))]
    (session,), counts = put_on_grid([*BOTH, *deeper])
    assert session.values[0].tolist() == [1, 0, 1, 2, 2, -1, 3, 3, 4]
    assert counts.rows_thin == 0


def test_a_one_sided_book_has_no_mid():
    (session,), counts = put_on_grid([*BOTH, (5, b"ask", None), (10, b"x", None)])
    assert session.valid.tolist() == [True, False]
    assert np.isnan(session.values[1]).all()
    assert (counts.rows_one_sided, counts.rows_marked) == (1, 1)


def test_a_row_takes_the_state_before_a_cross_up_to_the_limit_and_not_beyond():
    crossed = [*BOTH, (5, b"hit", (True, 103, 9)), (40, b"hit", None)]
    (session,), counts = put_on_grid(crossed, hold_ns=15)
    assert session.times.tolist() == [0, 10, 20, 30, 40]
    assert session.valid.tolist() == [True, True, True, False, True]
    assert session.values[1].tolist() == session.values[0].tolist()
    assert session.age_ns.tolist() == [0, 5, 15, 25, 0]
    assert (counts.rows_held, counts.rows_crossed, counts.rows_marked) == (2, 1, 1)


def test_a_locked_book_counts_as_crossed():
    (session,), counts = put_on_grid([*BOTH, (5, b"hit", (True, 102, 9)), (10, b"x", None)])
    assert session.values[1, 0] == 1.0
    assert counts.rows_held == 1


def test_nothing_is_held_across_a_sessions_start():
    at = DAY_NS - 20
    before = [(at, order_id, order) for _, order_id, order in BOTH]
    crossed = [(DAY_NS - 2, b"hit", (True, 103, 9)), (DAY_NS + 1, b"deep", (True, 90, 9))]
    (one, two), counts = put_on_grid([*before, *crossed, (DAY_NS + 10, b"x", None)], hold_ns=1000)
    assert one.valid.tolist() == [True, True]
    assert two.times.tolist() == [DAY_NS + 10]
    assert two.valid.tolist() == [False]
    assert counts.rows_crossed == 1


def test_orders_rest_overnight_but_rows_start_with_the_first_event():
    early = [(DAY_NS - 20, order_id, order) for _, order_id, order in BOTH]
    (_, two), _ = put_on_grid([*early, (DAY_NS + 25, b"x", None), (DAY_NS + 40, b"x", None)])
    assert two.times.tolist() == [DAY_NS + 30, DAY_NS + 40]
    assert two.valid.all()
    assert two.age_ns.tolist() == [5, 0]


def test_a_session_that_holds_no_instant_is_counted():
    late = [(time_ns, b"x", None) for time_ns in (3, DAY_NS + 1, DAY_NS + 9)]
    events = [*BOTH, *late]
    sessions, counts = put_on_grid(events)
    assert [session.key.date for session in sessions] == ["1970-01-01"]
    assert (counts.sessions_without_rows, counts.events_after_last_row) == (1, 1 + 2)


def test_events_that_no_row_shows_are_counted_session_by_session():
    late = [(11, b"x", None), (12, b"x", None), (DAY_NS, b"x", None), (DAY_NS + 3, b"x", None)]
    sessions, counts = put_on_grid([*BOTH, (10, b"x", None), *late])
    assert [len(session) for session in sessions] == [2, 1]
    assert counts.events_after_last_row == 2 + 1


def test_an_event_at_an_instant_is_in_its_row():
    (session,), _ = put_on_grid([*BOTH, (10, b"bid", (True, 101, 7))])
    assert session.values[1, :3].tolist() == [1.5, 1, 7]


def test_half_ticks_survive_far_from_zero():
    units = 61_686_110_000_000  # 61,686.11
    book, counts = OrderBook(), Counts()
    grid = Grid(book, "X", counts, step_ns=1, depth=1, hold_ns=0)
    for time_ns in range(3):
        grid.advance(time_ns)
        book.place(b"bid", Order(True, units + time_ns * 10_000_000, UNITS, time_ns))
        book.place(b"ask", Order(False, units + 50_000_000, UNITS, time_ns))
    (session,) = grid.finish()
    assert session.origin == 61_686.11
    assert session.values[:, 0].tolist() == [np.float32(x) for x in (0.025, 0.03, 0.035)]


def test_a_day_of_utc():
    span = utc_day(MIDNIGHT_NS)
    assert (span.date, span.segment) == ("2024-10-04", 0)
    assert (span.start_ns, span.end_ns) == (MIDNIGHT_NS, MIDNIGHT_NS + DAY_NS)
    assert utc_day(MIDNIGHT_NS - 1).date == "2024-10-03"


@pytest.mark.parametrize(("name", "found"), [("step_ns", 0), ("depth", 0), ("step_ns", -5)])
def test_a_grid_of_nothing_is_refused(name, found):
    arguments = {"step_ns": 1, "depth": 1, name: found}
    with pytest.raises(TapeError, match=f"{name}: expected 1 or more, found {found}. Raise {name}"):
        Grid(OrderBook(), "X", Counts(), hold_ns=0, **arguments)
