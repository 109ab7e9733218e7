"""The grid against rows worked out one by one, for each kind of block, and its rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers_tape import (
    absolute,
    expected_row,
    levels_block,
    order_events,
    orders_block,
    put_on_grid,
    states_block,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape.blocks import CLEARED, REDUCED, LevelEvents, TableRows
from tapeline.tape.grid import GridOptions, Policy, book_columns
from tapeline.tape.sessions import LocalHours

DAY_NS = 86_400 * 10**9
STEP_NS = 10
MIDNIGHT_NS = 20_000 * DAY_NS  # 2024-10-04
GRID = GridOptions(STEP_NS, depth=2)
HOUR = LocalHours(("00:00:00-00:00:01", "00:00:02-00:00:03"), "UTC")

ANSWERS = st.sampled_from(["keep", "drop", "hold", "nan"])
POLICIES = st.builds(
    Policy, crossed=ANSWERS, locked=ANSWERS, one_sided=ANSWERS, hold_s=st.just(15e-9)
)
GRIDS = st.builds(
    GridOptions,
    st.sampled_from([1, 7, STEP_NS]),
    depth=st.integers(1, 4),
    max_age_s=st.sampled_from([None, 25e-9]),
)


def sides(prices):
    return st.dictionaries(st.sampled_from(prices), st.integers(1, 4), max_size=3)


@st.composite
def tapes(draw, start_ns=MIDNIGHT_NS):
    """States in time order, several at one time among them, on both sides of a midnight."""
    times = sorted(draw(st.lists(st.integers(-60, 60), min_size=1, max_size=25)))
    return [
        (
            start_ns + time,
            sorted(draw(sides(range(95, 103))).items(), reverse=True),
            sorted(draw(sides(range(99, 107))).items()),
        )
        for time in times
    ]


def last_of_each_time(states):
    return [list(group)[-1] for _, group in itertools.groupby(states, key=lambda state: state[0])]


def check(sessions, states, policy, grid):
    """Every row, and that there are as many as there must be."""
    step_ns = grid.step_ns
    expected_times = []
    for start_ns in (MIDNIGHT_NS - DAY_NS, MIDNIGHT_NS):
        mine = [state for state in states if start_ns <= state[0] < start_ns + DAY_NS]
        if mine:
            first = start_ns - (start_ns - mine[0][0]) // step_ns * step_ns
            expected_times += range(first, mine[-1][0] + 1, step_ns)
    assert [int(t) for session in sessions for t in session.times] == expected_times
    for session in sessions:
        start_ns = int(session.times[0]) // DAY_NS * DAY_NS
        numbers = absolute(session)
        for row, t in enumerate(session.times.tolist()):
            known = [state for state in states if start_ns <= state[0] <= t]
            valid, age, values = expected_row(known, t, policy, grid)
            assert session.valid[row] == valid
            assert session.age_ns[row] == age
            np.testing.assert_array_equal(numbers[row], values)


@settings(max_examples=60)
@given(tapes(), POLICIES, GRIDS)
def test_rows_of_whole_books(states, policy, grid):
    sessions, counts = put_on_grid([states_block(states)], grid, policy)
    check(sessions, states, policy, grid)
    assert counts.states == len(states)
    assert counts.rows == sum(map(len, sessions))
    assert counts.rows_marked == sum(int((~session.valid).sum()) for session in sessions)


@settings(max_examples=60)
@given(tapes(), POLICIES, GRIDS)
def test_rows_of_level_updates(states, policy, grid):
    # What an update doesn't change isn't told, so each state carries something that differs.
    states = last_of_each_time(states)
    states = [(t, bids, [*asks, (1_000 + i, 1)]) for i, (t, bids, asks) in enumerate(states)]
    deep = GridOptions(grid.step_ns, depth=4, max_age_s=grid.max_age_s)
    sessions, _ = put_on_grid([levels_block(states)], deep, policy)
    check(sessions, states, policy, deep)


EVENTS = st.lists(
    st.tuples(
        st.integers(MIDNIGHT_NS - 60, MIDNIGHT_NS + 60),
        st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]),
        st.tuples(st.booleans(), st.integers(90, 110), st.integers(1, 4)) | st.none(),
    ),
    min_size=1,
    max_size=40,
).map(lambda events: sorted(events, key=lambda event: event[0]))


def states_of(events):
    """The book after each event; a delete before its create takes the create with it."""
    orders, early, found = {}, {}, []
    for time_ns, order_id, order in events:
        if order is None:
            if orders.pop(order_id, None) is None:
                early[order_id] = time_ns
        elif order_id not in early or early.pop(order_id) < time_ns - 10**10:
            orders[order_id] = order
        book = []
        for is_bid in (True, False):
            prices = {price for side, price, _ in orders.values() if side == is_bid}
            book.append(
                [
                    (p, sum(s for b, q, s in orders.values() if (b, q) == (is_bid, p)))
                    for p in sorted(prices, reverse=is_bid)
                ]
            )
        found.append((time_ns, *book))
    return found


@settings(max_examples=60)
@given(EVENTS, POLICIES, GRIDS)
def test_rows_of_orders(events, policy, grid):
    sessions, counts = put_on_grid([orders_block(events)], grid, policy)
    check(sessions, states_of(events), policy, grid)
    assert counts.states == len(events)


KINDS = [states_block, levels_block]
OPTIONS = st.builds(
    GridOptions,
    st.just(STEP_NS),
    depth=st.just(2),
    max_age_s=st.sampled_from([None, 25e-9]),
    age_column=st.booleans(),
)


def bits(sessions, until_ns=2**63 - 1):
    return [
        (
            session.key,
            session.times[row],
            session.values[row].tobytes(),
            session.age_ns[row],
            session.valid[row],
            np.isfinite(session.values[row, :-1]).any() and session.origin,
        )
        for session in sessions
        for row in range(len(session))
        if session.times[row] <= until_ns
    ]


@settings(max_examples=60)
@given(tapes(), POLICIES, OPTIONS, st.sampled_from(KINDS), st.data())
def test_blocks_cut_anywhere_give_the_same_rows(states, policy, grid, kind, data):
    block = kind(states)
    num = len(block.times_ns)
    cuts = sorted(data.draw(st.lists(st.integers(0, num), max_size=6)))
    parts = [block.take(slice(a, b)) for a, b in itertools.pairwise([0, *cuts, num])]
    expected, one = put_on_grid([block], grid, policy)
    sessions, counts = put_on_grid(parts, grid, policy)
    assert bits(sessions) == bits(expected)
    assert counts == one


@given(
    tapes(), tapes(), POLICIES, OPTIONS, st.sampled_from(KINDS), st.integers(-60, 60), st.booleans()
)
@settings(max_examples=60)
def test_nothing_later_changes_a_row(states, others, policy, grid, kind, offset, is_whole):
    t, rule = MIDNIGHT_NS + offset, None
    known = [*(state for state in states if state[0] <= t), (t, *BOTH[1:])]
    # Rows end with the last event, so whether there is a row at t takes an event after it.
    futures = [
        [*known, *(s for s in tape if s[0] > t), (t + 900, *END[1:])] for tape in (states, others)
    ]
    if is_whole:  # a session of ten instants, from midnight on
        grid, rule = replace(grid, step_ns=10**8, max_age_s=None), HOUR
        futures = [[(slowed(time), *book) for time, *book in tape] for tape in futures]
        t = slowed(t)
    one, two = (put_on_grid([kind(tape)], grid, policy, rule)[0] for tape in futures)
    assert bits(one, t) == bits(two, t)


def slowed(time_ns):
    return MIDNIGHT_NS + (time_ns - MIDNIGHT_NS) * 10**7


BOTH = (0, [(100, 1)], [(102, 2)])
END = (40, [(100, 1)], [(103, 1)])


def test_columns_of_ten_levels():
    columns = book_columns(10)
    assert len(columns) == 41
    assert columns[:5] == ("mid", "bid_price_1", "bid_size_1", "ask_price_1", "ask_size_1")
    assert columns[-1] == "ask_size_10"


@pytest.mark.parametrize("kind", KINDS)
def test_missing_levels_repeat_the_last_price_with_size_zero(kind):
    deeper = (10, [(100, 1), (99, 3)], [(102, 2), (103, 4)])
    (session,), counts = put_on_grid([kind([BOTH, deeper])], GRID)
    assert session.origin == 100
    assert session.values.tolist() == [[1, 0, 1, 2, 2, 0, 0, 2, 0], [1, 0, 1, 2, 2, -1, 3, 3, 4]]
    assert counts.rows_thin == 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_to_a_cross(kind):
    tape = [BOTH, (5, [(103, 9), (100, 1)], [(102, 2)]), END]

    def rows(answer):
        policy = Policy(answer, hold_s=15e-9)
        (session,), counts = put_on_grid([kind(tape)], GRID, policy)
        return session.valid.tolist(), absolute(session)[:, 0].tolist(), counts

    valid, mids, counts = rows("keep")
    assert valid == [True] * 5
    assert mids == [101, 102.5, 102.5, 102.5, 101.5]
    assert (counts.rows_held, counts.rows_crossed, counts.states_crossed) == (0, 0, 1)
    valid, mids, counts = rows("drop")
    assert mids == [101, 101, 101, 101, 101.5]
    assert (counts.rows_held, counts.rows_crossed) == (3, 0)
    valid, mids, counts = rows("hold")
    assert valid == [True, True, True, False, True]
    assert (counts.rows_held, counts.rows_crossed, counts.rows_marked) == (2, 1, 1)
    valid, mids, counts = rows("nan")
    assert valid == [True, False, False, False, True]
    assert (counts.rows_held, counts.rows_crossed) == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_one_sided_book_shows_its_side_and_is_marked(kind):
    (session,), counts = put_on_grid(
        [kind([BOTH, (5, [(99, 3)], []), END])], GRID, Policy(one_sided="keep")
    )
    row = absolute(session)[1]
    assert np.isnan(row[[0, 3, 4, 7, 8]]).all()
    assert row[[1, 2, 5, 6]].tolist() == [99, 3, 99, 0]
    assert session.valid.tolist() == [True, False, False, False, True]
    assert (counts.rows_one_sided, counts.states_one_sided) == (3, 1 + (kind is levels_block) * 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_calendar_session_has_a_row_for_each_instant(kind):
    grid = GridOptions(100_000_000, depth=1, max_age_s=0.3, age_column=True)
    first = MIDNIGHT_NS + 250_000_000
    tape = [
        (MIDNIGHT_NS - 5, [(90, 1)], [(91, 1)]),
        (first, [(100, 1)], [(102, 2)]),
        (MIDNIGHT_NS + 2_000_000_000, [(101, 1)], [(103, 2)]),
        (MIDNIGHT_NS + 3_000_000_000, [(101, 1)], [(104, 2)]),
    ]
    (one, two), counts = put_on_grid([kind(tape)], grid, sessions=HOUR)
    assert (one.times - MIDNIGHT_NS).tolist() == list(range(0, 10**9, 10**8))
    assert one.valid.tolist() == [False] * 3 + [True] * 3 + [False] * 4
    assert one.age_ns[:4].tolist() == [-1, -1, -1, 50_000_000]
    assert one.columns[-1] == "age_s"
    assert one.values[3, -1] == np.float32(0.05)
    assert two.valid.tolist() == [True] * 4 + [False] * 6
    assert (counts.rows_before_first, counts.rows_stale, counts.rows_after_last) == (3, 10, 0)
    assert counts.outside == len(kind(tape[:1]).times_ns) + len(kind(tape).times_ns) - len(
        kind(tape[:3]).times_ns
    )
    assert counts.outside_first_ns == MIDNIGHT_NS - 5
    assert counts.outside_last_ns == MIDNIGHT_NS + 3_000_000_000


def test_after_the_end_of_the_tape_nothing_is_known():
    grid = GridOptions(100_000_000, depth=1)
    tape = [(MIDNIGHT_NS, [(100, 1)], [(102, 2)]), (MIDNIGHT_NS + 2 * 10**8, [(1, 1)], [(2, 2)])]
    (session,), counts = put_on_grid([states_block(tape)], grid, sessions=HOUR)
    assert session.valid.tolist() == [True] * 3 + [False] * 7
    assert counts.rows_after_last == 7


def test_without_a_step_each_state_is_a_row():
    tape = [BOTH, BOTH, (5, [(103, 9)], [(102, 2)]), END]
    (session,), _ = put_on_grid([states_block(tape)], GridOptions(None, depth=1))
    assert session.times.tolist() == [0, 0, 5, 40]
    assert session.valid.tolist() == [True, True, False, True]
    (session,), _ = put_on_grid([states_block(tape)], GridOptions(None, depth=1), Policy("drop"))
    assert session.times.tolist() == [0, 0, 40]
    message = "step_ns: expected a step, for a book rebuilt from events, found none"
    with pytest.raises(TapeError, match=message):
        put_on_grid([levels_block(tape)], GridOptions(None))


def test_a_tables_missing_cell_marks_its_rows_and_no_others():
    times = np.array([0, 10, 20], np.int64)
    values = np.array([[50.0, 1.0], [np.nan, 2.0], [51.0, 3.0]])
    block = TableRows(times, values, ("price", "volume"), (True, False))
    (session,), counts = put_on_grid([block], GridOptions(STEP_NS))
    assert session.valid.tolist() == [True, False, True]
    assert session.origin == 50
    np.testing.assert_array_equal(session.values, [[0, 1], [np.nan, 2], [1, 3]])
    assert (counts.rows_missing, counts.states) == (1, 0)


def test_times_that_step_back_are_lifted_and_counted():
    tape = [(20, [(100, 1)], [(102, 1)]), (5, [(101, 1)], [(102, 1)]), (30, [(99, 1)], [(102, 1)])]
    for blocks in ([states_block(tape)], [states_block([state]) for state in tape]):
        (session,), counts = put_on_grid(blocks, GRID)
        assert session.times.tolist() == [20, 30]
        assert absolute(session)[:, 0].tolist() == [101.5, 100.5]
        assert (counts.times_stepped_back, counts.times_lifted) == (1, 1)


def test_a_cleared_book_is_unknown_until_levels_follow():
    block = levels_block([BOTH, (60, [(99, 1)], [(102, 2)])])
    gap = LevelEvents(np.array([15], np.int64), [True], [True], [0], [0])
    for answer in ("drop", "nan"):
        blocks = [block.take(slice(0, 2)), gap, block.take(slice(2, 9))]
        (session,), counts = put_on_grid(blocks, GRID, Policy(one_sided=answer))
        assert session.valid.tolist() == [True, True, *[False] * 4, True]
        assert counts.cleared == 1


def test_orders_are_reduced_and_cleared():
    placed = orders_block([(0, b"b", (True, 100, 5)), (0, b"a", (False, 102, 5))])
    then = order_events(
        [
            (5, b"b", REDUCED, True, 0, 2, True, True),
            (15, b"b", REDUCED, True, 0, 3, True, True),
            (25, b"?", REDUCED, True, 0, 1, True, True),
            (35, b"", CLEARED, True, 0, 0, True, True),
        ]
    )
    end = orders_block([(40, b"c", (True, 100, 5)), (40, b"d", (False, 101, 5))])
    (session,), counts = put_on_grid([placed, then, end], GRID, Policy(one_sided="keep"))
    assert session.values[:2, 2].tolist() == [5, 3]
    assert np.isnan(session.values[2, :3]).all()
    assert absolute(session)[-1, :4].tolist() == [100.5, 100, 5, 101]
    assert (counts.reduced, counts.cleared, counts.deletes_unknown) == (3, 1, 1)


def test_orders_rest_overnight_but_rows_start_with_the_first_event():
    early = [(DAY_NS - 20, b"b", (True, 100, 1)), (DAY_NS - 20, b"a", (False, 102, 2))]
    late = [(DAY_NS + 25, b"x", (True, 90, 1)), (DAY_NS + 40, b"x", None)]
    (_, two), _ = put_on_grid([orders_block([*early, *late])], GRID)
    assert two.times.tolist() == [DAY_NS + 30, DAY_NS + 40]
    assert two.valid.all()
    assert two.age_ns.tolist() == [5, 0]


def test_nothing_is_held_across_a_sessions_start():
    early = [(DAY_NS - 20, b"b", (True, 100, 1)), (DAY_NS - 20, b"a", (False, 102, 2))]
    late = [(DAY_NS + 1, b"hit", (True, 103, 9)), (DAY_NS + 10, b"x", (True, 1, 1))]
    (_, two), counts = put_on_grid([orders_block([*early, *late])], GRID, Policy("drop"))
    assert two.valid.tolist() == [False]
    assert two.age_ns.tolist() == [9]
    assert counts.rows_crossed == 1


def test_events_that_no_row_shows_and_sessions_without_rows_are_counted():
    far = [(time, b"x", (True, 1, 1)) for time in (11, 12, DAY_NS + 1, DAY_NS + 9)]
    events = [(0, b"b", (True, 100, 1)), (0, b"a", (False, 102, 2)), *far]
    sessions, counts = put_on_grid([orders_block(events)], GRID)
    assert [session.key.date for session in sessions] == ["1970-01-01"]
    assert (counts.sessions_without_rows, counts.events_after_last_row) == (1, 2 + 2)


def test_half_ticks_survive_far_from_zero():
    units = 61_686_110_000_000  # 61,686.11
    block = states_block([(time, [(0, 1)], [(0, 1)]) for time in range(3)], 1)
    for row in range(3):
        block.prices[row, 0] = units + row * 10_000_000, units + 50_000_000
    (session,), _ = put_on_grid([block], GridOptions(1, depth=1))
    assert session.origin == 61_686.11
    assert session.values[:, 0].tolist() == [np.float32(x) for x in (0.025, 0.03, 0.035)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridOptions(0), "step_ns: expected 1 or more, found 0. Raise step_ns"),
        (lambda: GridOptions(depth=0), "depth: expected 1 or more, found 0. Raise depth"),
        (
            lambda: GridOptions(max_age_s=-1),
            "max_age_s: expected seconds, zero or more, found -1. Correct max_age_s",
        ),
        (
            lambda: Policy(hold_s=float("nan")),
            "hold_s: expected seconds, zero or more, found nan. Correct hold_s",
        ),
        (
            lambda: Policy(stale_cross_s=-1.0),
            "stale_cross_s: expected seconds, zero or more, found -1.0. Correct stale_cross_s",
        ),
        (
            lambda: Policy(locked="mend"),
            "policy, locked: expected keep, drop, hold or nan, found 'mend'. Give one of them",
        ),
    ],
)
def test_options_of_nothing_are_refused(make, message):
    with pytest.raises(TapeError) as error:
        make()
    assert str(error.value) == f"{message}."
