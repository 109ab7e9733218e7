"""Which windows there are: none across a session, a marked row or a cut, and none forgotten."""

import itertools

import numpy as np
import pytest
from helpers_windows import arrays, listed, session, valid_windows
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import WindowIndex

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4))
MASKS = st.lists(st.lists(st.sampled_from([True, True, True, False]), max_size=25), min_size=1)
LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=6)


def masked(masks):
    return [session(number, len(mask), valid=mask) for number, mask in enumerate(masks)]


@pytest.mark.parametrize(
    ("rows", "windows"), [(1140, 1111), (31, 2), (30, 1), (46_800, 46_771), (20 + 10 + 7, 8)]
)
def test_a_session_holds_its_rows_less_the_span_plus_one(rows, windows):
    index = WindowIndex.from_lengths([rows], T=20, horizon=10)
    assert index.num_windows == windows
    assert listed(index) == [(0, start) for start in range(windows)]


@pytest.mark.parametrize("rows", [0, 1, 29])
def test_a_shorter_session_holds_none(rows):
    index = WindowIndex.from_lengths([rows, 30, rows], T=20, horizon=10)
    assert listed(index) == [(1, 0)]


@given(LENGTHS, SHAPES)
def test_lengths_alone_give_every_window_that_fits(lengths, shape):
    wanted = valid_windows([[True] * rows for rows in lengths], *shape)
    assume(wanted)
    assert listed(WindowIndex.from_lengths(lengths, *shape)) == wanted


@settings(max_examples=50)
@given(MASKS, SHAPES)
def test_a_store_gives_every_window_of_valid_rows_and_no_other(new_store, masks, shape):
    wanted = valid_windows(masks, *shape)
    assume(wanted)
    assert listed(WindowIndex(new_store(masked(masks)), *shape)) == wanted


@settings(max_examples=50)
@given(MASKS, SHAPES)
def test_input_ranges_are_the_rows_that_windows_read_each_once(new_store, masks, shape):
    T, _ = shape
    windows = valid_windows(masks, *shape)
    assume(windows)
    ranges = list(WindowIndex(new_store(masked(masks)), *shape).input_ranges())
    rows = [(s, row) for s, start, stop in ranges for row in range(start, stop)]
    assert rows == sorted({(s, start + i) for s, start in windows for i in range(T)})
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in itertools.pairwise(ranges))


@given(LENGTHS, SHAPES, st.data())
def test_locate_finds_any_window_in_any_order(lengths, shape, data):
    wanted = valid_windows([[True] * rows for rows in lengths], *shape)
    assume(wanted)
    index = WindowIndex.from_lengths(lengths, *shape)
    picked = data.draw(st.lists(st.integers(0, len(wanted) - 1)))
    sessions, starts = index.locate(np.array(picked, np.int64))
    assert sessions.dtype == starts.dtype == np.int64
    assert list(zip(sessions, starts, strict=True)) == [wanted[p] for p in picked]


@pytest.mark.parametrize("form", [tuple, np.array, lambda rows: np.array(rows, np.uint16)])
def test_lengths_may_be_any_sequence_of_whole_numbers(form):
    assert listed(WindowIndex.from_lengths(form([4, 2, 5]), 2, 1)) == [
        *[(0, 0), (0, 1)],
        *[(2, 0), (2, 1), (2, 2)],
    ]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([30.0, 40.0], "float64 of shape [2], [30.0, 40.0]"),
        ([40, -1], "int64 of shape [2], [40, -1]"),
        (40, "int64 of shape [], 40"),
        ([[40]], "int64 of shape [1, 1], [[40]]"),
        (["40"], "<U2 of shape [1], ['40']"),
        ([True], "bool of shape [1], [True]"),
    ],
)
def test_lengths_that_are_not_numbers_of_rows_are_refused(lengths, found):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths(lengths)
    assert str(error.value) == (
        "lengths: expected one non-negative whole number of rows per session, "
        f"found {found}. Pass `Shards.lengths`, or a list of whole numbers."
    )


@pytest.mark.parametrize("name", ["T", "horizon"])
@pytest.mark.parametrize("value", [0, -3, 2.5, 20.0])
def test_lengths_of_windows_are_whole_numbers_from_1(name, value):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths([100], **{name: value})
    assert str(error.value) == (
        f"{name}: expected a whole number, 1 or more, found {value}. Choose another {name}."
    )


TOO_LONG = (
    "windows of 20 rows with a target 10 later: expected a session with at least 30 valid rows in "
    "sequence, found {}. Shorten T or horizon, or give longer sessions."
)


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([29, 7, 0], "29 in the longest of 3"),
        ([0], "0 in the longest of 1"),
        ([], "0 in the longest of 0"),
    ],
)
def test_windows_longer_than_every_session_are_refused(lengths, found):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths(lengths)
    assert str(error.value) == TOO_LONG.format(found)


def test_sessions_without_a_valid_row_are_counted_in_the_refusal(new_store):
    store = new_store(masked([[False] * 40, [True] * 25 + [False] + [True] * 20]))
    with pytest.raises(WindowError) as error:
        WindowIndex(store)
    assert str(error.value) == TOO_LONG.format("25 in the longest of 2")


# Splits


def by_hand(index, cut_rows):
    """The windows wholly before and wholly after the cut row of their session."""
    windows = listed(index)
    return (
        [(s, a) for s, a in windows if a + index.span <= cut_rows[s]],
        [(s, a) for s, a in windows if a >= cut_rows[s]],
    )


def check_split(index, store, fraction, cut_rows):
    before, after = by_hand(index, cut_rows)
    if before and after:
        sides = index.split(store, fraction)
        assert [listed(side) for side in sides] == [before, after]
        assert [(side.T, side.horizon) for side in sides] == [(index.T, index.horizon)] * 2
    else:
        with pytest.raises(WindowError, match=r"at least one (training|validation) window"):
            index.split(store, fraction)


@settings(max_examples=50)
@given(MASKS, SHAPES, st.floats(0.01, 0.99))
def test_a_split_without_times_cuts_at_one_row_in_store_order(new_store, masks, shape, fraction):
    assume(valid_windows(masks, *shape))
    store = new_store(masked(masks))
    wanted = sum(map(len, masks)) - round(sum(map(len, masks)) * fraction)
    cut_rows = [
        min(max(wanted - int(o), 0), len(m)) for o, m in zip(store.offsets, masks, strict=False)
    ]
    check_split(WindowIndex(store, *shape), store, fraction, cut_rows)


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(-50, 50), max_size=25).map(sorted), min_size=1, max_size=4),
    SHAPES,
    st.floats(0.01, 0.99),
)
def test_a_split_with_times_is_one_instant_for_all_sessions(new_store, times, shape, fraction):
    assume(valid_windows([[True] * len(t) for t in times], *shape))
    store = new_store([session(n, len(t), times=t) for n, t in enumerate(times)])
    together = sorted(itertools.chain(*times))
    wanted = len(together) - round(len(together) * fraction)
    # the earliest instant with at least `wanted` rows before it
    instant = next(
        i for i in range(together[0], together[-1] + 2) if sum(t < i for t in together) >= wanted
    )
    cut_rows = [sum(t < instant for t in session_times) for session_times in times]
    check_split(WindowIndex(store, *shape), store, fraction, cut_rows)


def test_sessions_that_overlap_in_time_are_cut_at_the_same_instant(new_store):
    second = 10**9
    start = 1_700_000_000 * second
    days = [start + np.arange(100) * second, start + 40 * second + np.arange(100) * second]
    store = new_store([session(n, 100, times=t) for n, t in enumerate(days)])
    training, validation = WindowIndex(store, 5, 2).split(store, 0.25)
    # 150 rows lie before second 95: 95 of the first session and 55 of the second
    assert listed(training) == [(0, s) for s in range(89)] + [(1, s) for s in range(49)]
    assert listed(validation) == [(1, s) for s in range(55, 94)]


def test_a_cut_inside_a_session_drops_the_windows_that_cross_it(new_store):
    store = new_store(arrays(100))
    index = WindowIndex(store, 5, 2)
    training, validation = index.split(store, 0.5)
    assert listed(training) == [(0, s) for s in range(44)]
    assert listed(validation) == [(0, s) for s in range(50, 94)]
    assert index.num_windows - training.num_windows - validation.num_windows == 5 + 2 - 1


@pytest.mark.parametrize(("fraction", "side"), [(0.05, "validation"), (0.95, "training")])
def test_a_split_that_leaves_a_side_empty_is_refused(new_store, fraction, side):
    store = new_store(arrays(100))
    with pytest.raises(WindowError) as error:
        WindowIndex(store, 5, 2).split(store, fraction)
    assert str(error.value) == (
        f"split at {1 - fraction:g} of the rows: expected at least one {side} window of 7 rows, "
        "found none. Move the cut, shorten the windows, or give more data."
    )


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 20, float("nan")])
def test_a_fraction_lies_between_0_and_1(new_store, fraction):
    store = new_store(arrays(40))
    with pytest.raises(WindowError) as error:
        WindowIndex(store, 5, 2).split(store, fraction)
    assert str(error.value) == (
        "validation fraction: expected a number between 0 and 1, "
        f"found {fraction}. Take 0.2 for the last fifth."
    )


# Belonging to a store, and identity


@settings(max_examples=50)
@given(MASKS, MASKS, SHAPES)
def test_check_within_accepts_exactly_the_indexes_whose_windows_are_there(
    new_store, masks, others, shape
):
    there = valid_windows(masks, *shape)
    asked = valid_windows(others, *shape)
    assume(there and asked)
    store, index = new_store(masked(masks)), WindowIndex(new_store(masked(others)), *shape)
    if set(asked) <= set(there):
        index.check_within(store)
    else:
        with pytest.raises(WindowError, match="Make the sampler from `WindowIndex"):
            index.check_within(store)


@pytest.mark.parametrize("lengths", [[40, 31], [41, 30], [40, 30, 7], [40, 30]])
def test_one_window_too_many_is_noticed(new_store, lengths):
    index = WindowIndex.from_lengths(lengths, 5, 2)
    store = new_store(arrays(40, 30))
    if lengths == [40, 30]:
        index.check_within(store)
    else:
        with pytest.raises(WindowError, match="expected 7 valid rows of the store for each"):
            index.check_within(store)


def test_lengths_alone_do_not_get_windows_onto_marked_rows(new_store):
    store = new_store(masked([[True] * 20, [True] * 8 + [False] + [True] * 11]))
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths(store.lengths, 5, 2).check_within(store)
    assert str(error.value) == (
        "windows of session 1: expected 7 valid rows of the store for each, found starts 0 to 13, "
        "some outside the session or on rows marked invalid. Make the sampler from "
        "`WindowIndex(shards, T, horizon)` of this store."
    )


def test_the_fingerprint_is_of_the_windows_and_changes_with_each_of_them(new_store):
    base = WindowIndex.from_lengths([40, 50], 5, 2)
    store = new_store(arrays(40, 50))
    assert base.fingerprint() == WindowIndex(store, 5, 2).fingerprint() == "712c61d487211617"
    marked = new_store(masked([[True] * 40, [True] * 49 + [False]]))
    different = [
        WindowIndex.from_lengths([40, 51], 5, 2),
        WindowIndex.from_lengths([50, 40], 5, 2),
        WindowIndex.from_lengths([40, 50, 7], 5, 2),
        WindowIndex.from_lengths([40, 0, 50], 5, 2),
        WindowIndex.from_lengths([40, 50], 4, 2),
        WindowIndex.from_lengths([40, 50], 5, 3),
        WindowIndex.from_lengths([40, 50], 4, 3),
        WindowIndex(marked, 5, 2),
        *WindowIndex(store, 5, 2).split(store, 0.4),
    ]
    prints = {index.fingerprint() for index in [base, *different]}
    assert len(prints) == 1 + len(different)
