"""Splits: one instant for all sessions, no window on two sides, nothing forgotten in between."""

import itertools
from datetime import UTC, date, datetime, timedelta, timezone
from fractions import Fraction

import numpy as np
import pytest
from helpers_index import HORIZONS, MASKS, by_hand, grids, stored
from helpers_windows import arrays, listed, session, valid_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.session import Session, SessionKey
from tapeline.windows import RowPolicy, WindowIndex
from tapeline.windows.split import to_instant

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4))
SECOND = 10**9


def within(windows, reach, lows, highs):
    """The windows whose whole reach lies in rows lows[s] … highs[s] − 1."""
    return [(s, a) for s, a in windows if a >= lows[s] and a + reach <= highs[s]]


def rows_before(sessions, instant):
    return [sum(t < instant for t in times) for _, times in sessions]


def instant_of(sessions, num_rows):
    """The earliest instant with at least that many rows before it, looked for one by one."""
    together = sorted(itertools.chain(*(times.tolist() for _, times in sessions)))
    if num_rows == 0:
        return together[0]
    return together[num_rows - 1] + 1


def check_parts(index, wanted, **arguments):
    """A split gives the wanted windows, or names the first part that has none."""
    empty = [name for name, windows in wanted.items() if not windows]
    if not empty:
        parts = index.split(**arguments)
        assert {name: listed(part) for name, part in parts.items()} == wanted
        for part in parts.values():
            assert (part.T, part.horizons, part.stride) == (index.T, index.horizons, index.stride)
    else:
        with pytest.raises(WindowError, match=f"split, {empty[0]}: expected at least one window"):
            index.split(**arguments)


@settings(max_examples=60)
@given(MASKS, SHAPES, st.integers(1, 3), st.floats(0.01, 0.99), st.integers(0, 6))
def test_without_times_the_cut_is_one_row_in_store_order(
    new_store, masks, shape, stride, share, embargo
):
    reach = sum(shape)
    windows = by_hand([(mask, None) for mask in masks], shape[0], reach, stride)
    lengths = [len(mask) for mask in masks]
    cut = round(sum(lengths) * Fraction(repr(share)))
    offsets = [sum(lengths[:s]) for s in range(len(lengths))]
    rows, late = (
        [min(max(row - o, 0), n) for o, n in zip(offsets, lengths, strict=True)]
        for row in (cut, cut + embargo)
    )
    wanted = {
        "train": within(windows, reach, [0] * len(masks), rows),
        "validation": within(windows, reach, late, lengths),
    }
    store = new_store([session(n, len(mask), valid=mask) for n, mask in enumerate(masks)])
    check_parts(
        WindowIndex(store, *shape, stride),
        wanted,
        train=share,
        validation="rest",
        embargo_rows=embargo,
    )


@settings(max_examples=80)
@given(
    grids(),
    st.integers(1, 5),
    HORIZONS,
    st.integers(1, 3),
    st.sampled_from(["all", "any"]),
    st.tuples(st.floats(0.1, 0.5), st.floats(0.1, 0.5)),
    st.integers(0, 60),
)
def test_with_times_the_cuts_are_instants_for_all_sessions(
    new_store, sessions, T, horizons, stride, targets, shares, embargo
):
    reach = T + (max(horizons) if targets == "all" else min(horizons))
    windows = by_hand(sessions, T, reach, stride, max_gap_ns=10)
    lengths = [len(mask) for mask, _ in sessions]
    exact = [Fraction(repr(share)) for share in shares]
    cuts = [instant_of(sessions, round(sum(lengths) * s)) for s in itertools.accumulate(exact)]
    rows = [rows_before(sessions, cut) for cut in cuts]
    late = [rows_before(sessions, cut + embargo) for cut in cuts]
    wanted = {
        "train": within(windows, reach, [0] * len(sessions), rows[0]),
        "validation": within(windows, reach, late[0], rows[1]),
        "test": within(windows, reach, late[1], lengths),
    }
    index = WindowIndex(
        new_store(stored(sessions)),
        T,
        horizons,
        stride,
        targets=targets,
        policy=RowPolicy(max_gap_ns=10),
    )
    first, second = shares
    for ends in ((first, second, "rest"), (*cuts, "rest")):
        if ends[0] == ends[1] != first:
            continue  # given instants must differ
        parts = dict(zip(("train", "validation", "test"), ends, strict=True))
        check_parts(index, wanted, **parts, embargo_ns=embargo)


@settings(max_examples=40)
@given(grids(least_rows=18), HORIZONS, st.floats(0.3, 0.7))
def test_a_target_behind_the_cut_is_missing(new_store, sessions, horizons, share):
    index = WindowIndex(
        new_store(stored(sessions)), 2, horizons, targets="any", policy=RowPolicy(max_gap_ns=10)
    )
    try:
        parts = index.split(train=share, validation="rest")
    except WindowError as error:
        assert "expected at least one window" in str(error)
        return
    cut = instant_of(sessions, round(sum(len(m) for m, _ in sessions) * Fraction(repr(share))))
    rows = rows_before(sessions, cut)
    there = {h: set(by_hand(sessions, 2, 2 + h, max_gap_ns=10)) for h in horizons}
    for part, stops in (
        (parts["train"], rows),
        (parts["validation"], [len(mask) for mask, _ in sessions]),
    ):
        windows = np.arange(part.num_windows)
        found = part.missing(*part.locate(windows))
        for (s, start), missing in zip(listed(part), found, strict=True):
            for horizon, is_missing in zip(horizons, missing, strict=True):
                known = (s, start) in there[horizon] and start + 2 + horizon <= stops[s]
                assert is_missing != known


def test_sessions_that_overlap_in_time_are_cut_at_the_same_instant(new_store):
    start = 1_700_000_000 * SECOND
    days = [start + np.arange(100) * SECOND, start + 40 * SECOND + np.arange(100) * SECOND]
    store = new_store([session(n, 100, times=t) for n, t in enumerate(days)])
    parts = WindowIndex(store, 5, 2).split(train=0.75, validation="rest")
    # 150 rows lie before second 95: 95 of the first session and 55 of the second
    assert listed(parts["train"]) == [(0, s) for s in range(89)] + [(1, s) for s in range(49)]
    assert listed(parts["validation"]) == [(1, s) for s in range(55, 94)]


def test_the_purge_covers_first_input_row_to_last_target_row(new_store):
    index = WindowIndex(new_store(arrays(100)), 5, (2, 1, 9))
    parts = index.split(train=0.5, validation="rest")
    assert listed(parts["train"])[-1] == (0, 50 - 5 - 9)
    assert listed(parts["validation"])[0] == (0, 50)
    lost = index.num_windows - sum(part.num_windows for part in parts.values())
    assert lost == 5 + 9 - 1


def test_an_embargo_counts_from_the_end_of_the_part_before(new_store):
    times = np.arange(100) * SECOND
    store = new_store(
        [session(0, 100, times=times), session(1, 30, times=times[:30] + 61 * SECOND)]
    )
    parts = WindowIndex(store, 5, 2).split(
        train=45 * SECOND, validation="rest", embargo_ns=20 * SECOND
    )
    assert listed(parts["train"])[-1] == (0, 38)
    # session 1 begins in the embargo and loses 4 rows, not 20
    assert listed(parts["validation"]) == [(0, s) for s in range(65, 94)] + [
        (1, s) for s in range(4, 24)
    ]


def test_shares_are_of_the_sessions_chosen(new_store):
    keys = [SessionKey("A", f"2024-01-0{d}") for d in range(1, 5)]
    hour = 3600 * SECOND
    store = new_store(
        [
            Session(key, values, times=day * 24 * hour + np.arange(50))
            for day, (key, values) in enumerate(zip(keys, arrays(50, 50, 50, 50), strict=True))
        ]
    )
    parts = WindowIndex(store, 5, 2, sessions=[1, 3]).split(train=0.5, validation="rest")
    assert {name: set(part.sessions) for name, part in parts.items()} == {
        "train": {1},
        "validation": {3},
    }


def test_parts_need_not_reach_the_end(new_store):
    parts = WindowIndex(new_store(arrays(100)), 5, 2).split(train=0.4, validation=0.3)
    assert {name: (listed(p)[0][1], listed(p)[-1][1]) for name, p in parts.items()} == {
        "train": (0, 33),
        "validation": (40, 63),
    }


@pytest.mark.parametrize("shares", [(0.7, 0.2, 0.1), (0.1, 0.2, 0.7), (0.3, 1 - 0.3, None)])
def test_shares_may_add_up_to_1(new_store, shares):
    ends = dict(zip(("train", "validation", "test"), shares, strict=True))
    parts = WindowIndex(new_store(arrays(1000)), 5, 2).split(**ends)
    assert listed(list(parts.values())[-1])[-1] == (0, 993)


NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)
NOON_NS = 1_709_294_400 * SECOND


@pytest.mark.parametrize(
    ("value", "ns"),
    [
        (NOON, NOON_NS),
        (NOON.replace(tzinfo=None), NOON_NS),
        (NOON.astimezone(timezone(timedelta(hours=-5))), NOON_NS),
        (NOON + timedelta(microseconds=1), NOON_NS + 1000),
        (datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), -1000),
        ("2024-03-01T12:00", NOON_NS),
        ("2024-03-01 07:00:00-05:00", NOON_NS),
        ("2024-03-01T12:00:00.000001Z", NOON_NS + 1000),
        ("2024-03-01", NOON_NS - 12 * 3600 * SECOND),
        (date(2024, 3, 1), NOON_NS - 12 * 3600 * SECOND),
        (NOON_NS + 1, NOON_NS + 1),
        (np.int64(NOON_NS), NOON_NS),
    ],
)
def test_an_instant_in_any_form_is_whole_nanoseconds(value, ns):
    assert to_instant("train", value) == ns


@pytest.mark.parametrize("value", ["soon", "2024-13-01", True, None, 2**63, b"2024-03-01"])
def test_what_is_no_instant_is_refused(value):
    with pytest.raises(WindowError) as error:
        to_instant("train", value)
    assert str(error.value) == (
        "train: expected an instant: nanoseconds UTC, a datetime, a date, or ISO 8601, "
        f"found {value}. Write it as 2024-03-01 or 2024-03-01T09:30:00-05:00."
    )


def timed(new_store):
    times = NOON_NS + np.arange(100) * SECOND
    return WindowIndex(new_store([session(0, 100, times=times)]), 5, 2)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({"train": 0.0}, "train: expected a share of the rows, as a number between 0 and 1, found"),
        ({"train": 1.0}, "train: expected a share of the rows, as a number between 0 and 1, found"),
        ({"train": float("nan")}, "train: expected a share of the rows, as a number between 0 and"),
        (
            {"train": 0.8, "validation": 0.3},
            "validation: expected shares that add up to 1 or less, found 1.1.",
        ),
        (
            {"train": 0.8, "validation": "2024-03-01"},
            "validation: expected a share of the rows for each part, or for each an instant, "
            "found 2024-03-01 after 0.8. Give all parts' ends in the same way.",
        ),
        (
            {"train": "2024-03-01T12:01", "validation": 0.3},
            "validation: expected a share of the rows for each part, or for each an instant, "
            "found 0.3 after 2024-03-01T12:01.",
        ),
        (
            {"train": "2024-03-01T12:01", "validation": "2024-03-01T12:01Z"},
            "validation: expected an end later than that of the part before, "
            "found 2024-03-01T12:01Z.",
        ),
        (
            {"train": "rest", "validation": 0.3},
            "train: expected the last part, if it takes the rest, found parts behind it.",
        ),
        (
            {"train": "2024-03-02", "validation": "rest"},
            "split, validation: expected at least one window of 7 rows, its target included, "
            "found none in 0 rows. Move the cut, shorten the windows or the embargo, or give more",
        ),
        (
            {"train": 0.5, "validation": "rest", "embargo_ns": 60 * SECOND},
            "split, validation: expected at least one window of 7 rows, its target included, "
            "found none in 0 rows.",
        ),
        (
            {"train": 0.5, "embargo_rows": 5},
            "embargo_rows: expected a store without times, found rows with times, of which each "
            "session has its own. Give embargo_ns instead.",
        ),
        ({"train": 0.5, "embargo_ns": -1}, "embargo_ns: expected a whole number, 0 or more"),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(new_store, ends, message):
    with pytest.raises(WindowError) as error:
        timed(new_store).split(**ends)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            {"train": "2024-03-01"},
            "train: expected a share of the rows, since these have no times, found 2024-03-01.",
        ),
        (
            {"train": 0.5, "embargo_ns": 5},
            "embargo_ns: expected a store with times, found rows without. Give embargo_rows",
        ),
    ],
)
def test_instants_need_times(new_store, ends, message):
    for index in (WindowIndex(new_store(arrays(100))), WindowIndex.from_lengths([100])):
        with pytest.raises(WindowError) as error:
            index.split(**ends)
        assert str(error.value).startswith(message)


# Walk-forward


@settings(max_examples=60)
@given(
    grids(),
    SHAPES,
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0, 0, 25]),
)
def test_each_fold_validates_on_what_comes_next(
    new_store, sessions, shape, folds, train_parts, embargo
):
    T, reach = shape[0], sum(shape)
    windows = by_hand(sessions, T, reach, max_gap_ns=10)
    index = WindowIndex(new_store(stored(sessions)), *shape, policy=RowPolicy(max_gap_ns=10))
    lengths = [len(mask) for mask, _ in sessions]
    least = train_parts or 1
    parts = folds + least
    cuts = [instant_of(sessions, round(Fraction(sum(lengths) * p, parts))) for p in range(1, parts)]
    edges = [[0] * len(lengths), *(rows_before(sessions, cut) for cut in cuts), lengths]
    late = [[0] * len(lengths), *(rows_before(sessions, cut + embargo) for cut in cuts)]
    wanted = [
        {
            "train": within(windows, reach, edges[fold if train_parts else 0], edges[fold + least]),
            "validation": within(windows, reach, late[fold + least], edges[fold + least + 1]),
        }
        for fold in range(folds)
    ]
    if all(part for fold in wanted for part in fold.values()):
        found = index.walk_forward(folds, train_parts=train_parts, embargo_ns=embargo)
        assert [{n: listed(p) for n, p in fold.items()} for fold in found] == wanted
    else:
        with pytest.raises(WindowError, match=r"split, (train|validation), fold \d: expected"):
            index.walk_forward(folds, train_parts=train_parts, embargo_ns=embargo)


def test_walk_forward_expands_or_rolls():
    index = WindowIndex.from_lengths([100], 5, 2)

    def ends(folds):
        return [[(listed(p)[0][1], listed(p)[-1][1]) for p in fold.values()] for fold in folds]

    assert ends(index.walk_forward(3)) == [
        [(0, 18), (25, 43)],
        [(0, 43), (50, 68)],
        [(0, 68), (75, 93)],
    ]
    assert ends(index.walk_forward(3, train_parts=2, embargo_rows=3)) == [
        [(0, 33), (43, 53)],
        [(20, 53), (63, 73)],
        [(40, 73), (83, 93)],
    ]


@pytest.mark.parametrize(("name", "value"), [("folds", 0), ("train_parts", 0), ("folds", 1.5)])
def test_folds_are_whole_numbers(name, value):
    with pytest.raises(WindowError, match=f"{name}: expected a whole number, 1 or more"):
        WindowIndex.from_lengths([100], 5, 2).walk_forward(**{"folds": 2, name: value})


def test_a_cut_through_many_instruments_is_found_by_bisection(new_store):
    rng = np.random.default_rng(0)
    times = [np.sort(rng.integers(0, 10**12, 50)) for _ in range(300)]
    store = new_store([session(n, 50, times=t, columns=1) for n, t in enumerate(times)])
    train, validation = WindowIndex(store, 3, 2).split(train=0.6, validation="rest").values()
    cut = np.sort(np.concatenate(times))[300 * 30 - 1] + 1
    rows = [int((t < cut).sum()) for t in times]
    windows = valid_windows([[True] * 50] * 300, 3, 2)
    assert listed(train) == within(windows, 5, [0] * 300, rows)
    assert listed(validation) == within(windows, 5, rows, [50] * 300)
