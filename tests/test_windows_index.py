"""Which windows there are: none across a session, a marked row or a cut, and none forgotten."""

import itertools
import pickle
from datetime import date

import numpy as np
import pytest
from helpers_index import HORIZONS, MASKS, by_hand, check_refused, grids, stored
from helpers_windows import among, arrays, listed, session, valid_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.session import Session, SessionKey
from tapeline.windows import RowPolicy, WindowIndex, select
from tapeline.windows.rows import gap_rows

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4))
LENGTHS = among(st.integers(0, 25), st.integers(10, 25), 6)


def masked(masks):
    return [session(number, len(mask), valid=mask) for number, mask in enumerate(masks)]


@pytest.mark.parametrize(
    ("rows", "windows"), [(1140, 1111), (31, 2), (30, 1), (46_800, 46_771), (20 + 10 + 7, 8)]
)
def test_a_session_holds_its_rows_less_the_span_plus_one(rows, windows):
    index = WindowIndex.from_lengths([rows], T=20, horizons=10)
    assert index.num_windows == windows
    assert listed(index) == [(0, start) for start in range(windows)]


@pytest.mark.parametrize("rows", [0, 1, 29])
def test_a_shorter_session_holds_none(rows):
    index = WindowIndex.from_lengths([rows, 30, rows], T=20, horizons=10)
    assert listed(index) == [(1, 0)]


@given(LENGTHS, SHAPES)
def test_lengths_alone_give_every_window_that_fits(lengths, shape):
    wanted = valid_windows([[True] * rows for rows in lengths], *shape)
    assert listed(WindowIndex.from_lengths(lengths, *shape)) == wanted


@settings(max_examples=50)
@given(MASKS, SHAPES)
def test_a_store_gives_every_window_of_valid_rows_and_no_other(new_store, masks, shape):
    wanted = valid_windows(masks, *shape)
    assert listed(WindowIndex(new_store(masked(masks)), *shape)) == wanted


@settings(max_examples=50)
@given(MASKS, SHAPES, st.integers(1, 9), st.integers(1, 12))
def test_input_rows_are_those_that_windows_read_each_once(new_store, masks, shape, stride, most):
    T, _ = shape
    wanted = by_hand([(m, None) for m in masks], T, sum(shape), stride)
    store = new_store(masked(masks))
    index = WindowIndex(store, *shape, stride)
    rows = [
        (s, row)
        for s, part in index.input_rows(most)
        for row in np.arange(store.lengths[s])[part].tolist()
    ]
    assert rows == sorted({(s, start + i) for s, start in wanted for i in range(T)})
    assert index.num_input_rows == len(rows)


@given(LENGTHS, SHAPES, st.data())
def test_locate_finds_any_window_in_any_order(lengths, shape, data):
    wanted = valid_windows([[True] * rows for rows in lengths], *shape)
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


@pytest.mark.parametrize("name", ["T", "horizon", "stride"])
def test_lengths_of_windows_beyond_64_bits_are_refused(name):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths([100], **{"horizons" if name == "horizon" else name: 1 << 62})
    assert str(error.value) == (
        f"{name}: expected a whole number, below 4,611,686,018,427,387,904, "
        f"found 4611686018427387904. Choose another {name}."
    )


@pytest.mark.parametrize("name", ["T", "horizon", "stride"])
@pytest.mark.parametrize("value", [0, -3, 2.5, 20.0])
def test_lengths_of_windows_are_whole_numbers_from_1(name, value):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths([100], **{"horizons" if name == "horizon" else name: value})
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


# Belonging to a store, and identity


@settings(max_examples=50)
@given(MASKS, MASKS, SHAPES, st.booleans())
def test_check_within_accepts_exactly_the_indexes_whose_windows_are_there(
    new_store, masks, others, shape, covering
):
    if covering:  # two at random seldom hold each other's windows
        pairs = itertools.zip_longest(masks, others, fillvalue=())
        masks = [[a or b for a, b in itertools.zip_longest(*pair)] for pair in pairs]
    there = valid_windows(masks, *shape)
    asked = valid_windows(others, *shape)
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
        "some outside the session, on rows marked invalid or across a gap. Make the sampler from "
        "`WindowIndex(shards, T, horizon)` of this store."
    )


def test_the_fingerprint_is_of_the_windows_and_changes_with_each_of_them(new_store):
    base = WindowIndex.from_lengths([40, 50], 5, 2)
    store = new_store(arrays(40, 50))
    assert base.fingerprint() == WindowIndex(store, 5, 2).fingerprint() == "75e7179855ed82a5"
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
        *WindowIndex(store, 5, 2).split(train=0.6, validation="rest").values(),
        WindowIndex(store, 5, 2, 2),
        WindowIndex(store, 5, (2, 1)),
        WindowIndex(store, 5, (1, 2)),
        WindowIndex(store, 5, (1, 2), targets="any"),
        WindowIndex(store, 5, 2, sessions=[1]),
    ]
    prints = {index.fingerprint() for index in [base, *different]}
    assert len(prints) == 1 + len(different)


# Subsets, several horizons, strides


@settings(max_examples=60)
@given(MASKS, SHAPES, st.integers(1, 5), st.data())
def test_any_subset_keeps_the_numbers_of_the_full_set(new_store, masks, shape, stride, data):
    chosen = data.draw(st.lists(st.integers(0, len(masks) - 1), min_size=1, unique=True))
    wanted = by_hand([(m, None) for m in masks], shape[0], sum(shape), stride, chosen=chosen)
    store = new_store(masked(masks))
    if not wanted:
        check_refused(lambda: WindowIndex(store, *shape, stride, sessions=chosen))
        return
    ways = [
        chosen,
        np.array(chosen),
        lambda key: key.instrument in {f"instrument-{n}" for n in chosen},
        select(store, instruments=[f"instrument-{n}" for n in chosen]),
    ]
    for sessions in ways:
        assert listed(WindowIndex(store, *shape, stride, sessions=sessions)) == wanted


@settings(max_examples=60)
@given(MASKS, st.integers(1, 6), HORIZONS, st.integers(1, 5), st.sampled_from(["all", "any"]))
def test_each_horizon_has_its_own_valid_range(new_store, masks, T, horizons, stride, targets):
    reach = T + (max(horizons) if targets == "all" else min(horizons))
    sessions = [(mask, None) for mask in masks]
    wanted = by_hand(sessions, T, reach, stride)
    index = WindowIndex(new_store(masked(masks)), T, horizons, stride, targets=targets)
    assert listed(index) == wanted
    assert (index.horizons, index.horizon, index.span) == (
        tuple(horizons),
        max(horizons),
        T + max(horizons),
    )
    found = index.missing(*(np.array(c) for c in zip(*wanted, strict=True)))
    assert found.shape == (len(wanted), len(horizons))
    for column, horizon in enumerate(horizons):
        there = set(by_hand(sessions, T, T + horizon))
        assert found[:, column].tolist() == [window not in there for window in wanted]


def test_windows_with_any_target_are_those_of_the_shortest_horizon():
    index = WindowIndex.from_lengths([20], 5, (1, 10), targets="any")
    assert index.num_windows == 15
    assert WindowIndex.from_lengths([20], 5, (1, 10)).num_windows == 6
    missing = index.missing(np.zeros(15, np.int64), np.arange(15))
    assert missing.tolist() == [[False, start > 5] for start in range(15)]


@pytest.mark.parametrize("horizons", [[], [3, 3], (1, 2, 1)])
def test_horizons_are_given_once_each(horizons):
    with pytest.raises(WindowError) as error:
        WindowIndex.from_lengths([100], 5, horizons)
    assert str(error.value) == (
        f"horizons: expected one or more, each once, found {list(horizons)}. "
        "Name each horizon once."
    )


def test_targets_are_all_or_any():
    with pytest.raises(WindowError, match="targets='some': expected one of all, any, found"):
        WindowIndex.from_lengths([100], 5, 2, targets="some")


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ([3], "sessions: expected numbers from 0 to 2, each once, found 3."),
        ([-1], "sessions: expected numbers from 0 to 2, each once, found -1."),
        ([0.5], "sessions: expected numbers from 0 to 2, each once, found 0.5."),
        ([1, 1], "sessions: expected numbers from 0 to 2, each once, found 1 twice."),
        ([], "sessions: expected at least one of the store's 3, found none."),
        (lambda key: False, "sessions: expected at least one of the store's 3, found none."),
    ],
)
def test_sessions_that_are_not_there_are_refused(new_store, sessions, message):
    with pytest.raises(WindowError) as error:
        WindowIndex(new_store(arrays(40, 40, 40)), 5, 2, sessions=sessions)
    assert str(error.value).startswith(message)


def test_select_by_instrument_and_date(new_store):
    keys = [(i, f"2024-01-0{d}") for d in (2, 3, 4) for i in ("A", "B")]
    store = new_store(
        [
            Session(SessionKey(*key), values)
            for key, values in zip(keys, arrays(*[9] * 6), strict=True)
        ]
    )
    assert select(store, instruments=["B"]) == [1, 3, 5]
    assert select(store, dates=["2024-01-02", date(2024, 1, 4)]) == [0, 1, 4, 5]
    assert select(store, instruments=["A"], dates=["2024-01-03"]) == [2]
    with pytest.raises(WindowError) as error:
        select(store, instruments=["A", "C"])
    assert str(error.value) == (
        "instrument C: expected one of the store's 2: A, B, found none of that name. "
        "Look at them with `tapeline store info`."
    )
    with pytest.raises(WindowError, match="date 2024-01-05: expected one of the store's 3"):
        select(store, dates=["2024-01-05"])


def test_select_of_no_session_is_refused(new_store):
    keys = [SessionKey("A", "2024-01-02"), SessionKey("B", "2024-01-03")]
    store = new_store(
        [Session(key, values) for key, values in zip(keys, arrays(9, 9), strict=True)]
    )
    with pytest.raises(WindowError, match="one of the instruments on one of the dates, found none"):
        select(store, instruments=["A"], dates=["2024-01-03"])


# Rows that may follow each other


@settings(max_examples=60)
@given(grids(), SHAPES, st.integers(1, 4), st.sampled_from([10, 19, 30]))
def test_no_window_crosses_a_gap(new_store, sessions, shape, stride, max_gap_ns):
    T, horizon = shape
    wanted = by_hand(sessions, T, T + horizon, stride, max_gap_ns)
    policy = RowPolicy(max_gap_ns=max_gap_ns)
    store = new_store(stored(sessions))
    assert listed(WindowIndex(store, T, horizon, stride, policy=policy)) == wanted


def steps(*differences, begin=0):
    return list(itertools.accumulate(differences, initial=begin))


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        ([], []),
        ([5], []),
        (steps(10, 10, 10), []),
        (steps(10, 20, 10, 10), [2]),
        (steps(30, 10, 10, 10), [1]),
        (steps(10, 10, 10, 10**12), [4]),
        (steps(10, 19, 10, 10), []),  # a clock that wavers has no row missing
        (steps(0, 0, 0, 7, 0, 0), []),  # events of one instant
        (steps(3, 14, 15, 92, 65, 35), []),  # event time
        (steps(10, 40), []),  # one step is no majority
        (steps(2**63, 1, 1, 1, 2**63 - 9, begin=-(2**63)), [1, 5]),  # differences that wrap
        (steps(2**63, 2**63 - 1, begin=-(2**63)), []),
    ],
)
def test_a_gap_is_where_a_grid_misses_a_row(times, gaps):
    assert gap_rows(np.array(times, np.int64), None).tolist() == gaps


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8).map(sorted), st.integers(0, 2**63))
def test_a_gap_of_given_length_is_exact(times, most):
    wanted = [row for row in range(1, len(times)) if times[row] - times[row - 1] > most]
    assert gap_rows(np.array(times, np.int64), most).tolist() == wanted


def test_a_lunch_break_ends_the_windows_before_it(new_store):
    morning = np.arange(50) * 10**9
    afternoon = morning[-1] + 3600 * 10**9 + np.arange(1, 41) * 10**9
    store = new_store([session(0, 90, times=[*morning, *afternoon])])
    index = WindowIndex(store, 5, 2)
    assert listed(index) == [(0, s) for s in [*range(44), *range(50, 84)]]
    across = RowPolicy(max_gap_ns=10**13)
    assert WindowIndex(store, 5, 2, policy=across).num_windows == 84


def test_rows_that_are_too_old_are_kept_off(new_store):
    ages = np.zeros(40, np.int64)
    ages[[10, 30, 31]] = 6
    day = session(0, 40, valid=np.arange(40) != 20)
    store = new_store([Session(day.key, day.values, age_ns=ages, valid=day.valid)])
    old = {10, 30, 31}
    for most, refused in ((5, {20} | old), (6, {20})):
        index = WindowIndex(store, 3, 2, policy=RowPolicy(max_age_ns=most))
        assert listed(index) == [(0, s) for s in range(36) if not refused & set(range(s, s + 5))]


def test_marked_rows_can_be_refused(new_store):
    store = new_store(masked([[True] * 40, [True] * 30 + [False] * 3 + [True] * 10]))
    refuse = RowPolicy(nan="error")
    with pytest.raises(WindowError) as error:
        WindowIndex(store, 5, 2, policy=refuse)
    assert str(error.value) == (
        "session instrument-1: expected no row marked invalid, found 3 of 43 rows, the first row "
        '30. Leave the session out, or take nan="skip-window".'
    )
    assert WindowIndex(store, 5, 2, sessions=[0], policy=refuse).num_windows == 34


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_gap_ns": 5}, "max_gap_ns: expected a store that holds times, found one of values."),
        ({"max_age_ns": 5}, "max_age_ns: expected a store that holds age_ns, found one of values."),
    ],
)
def test_limits_need_what_they_limit(new_store, limit, message):
    with pytest.raises(WindowError) as error:
        WindowIndex(new_store(arrays(40)), 5, 2, policy=RowPolicy(**limit))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nan": "mask"}, "nan='mask': expected one of skip-window, error, found another name."),
        ({"max_gap_ns": -1}, "max_gap_ns: expected a whole number, 0 or more, found -1."),
        ({"max_age_ns": 1.5}, "max_age_ns: expected a whole number, 0 or more, found 1.5."),
    ],
)
def test_a_policy_that_is_none_is_refused(wrong, message):
    with pytest.raises(WindowError) as error:
        RowPolicy(**wrong)
    assert str(error.value).startswith(message)


def test_lengths_alone_do_not_get_windows_across_a_gap(new_store):
    store = new_store([session(0, 40, times=[*range(20), *range(50, 70)])])
    with pytest.raises(WindowError, match=r"found starts 0 to 33, some outside .* or across a gap"):
        WindowIndex.from_lengths([40], 5, 2).check_within(store)
    WindowIndex(store, 5, 2).check_within(new_store([session(0, 40)]))


@pytest.mark.parametrize("sessions", [[2], [0, 1]])
def test_check_within_looks_at_every_session_and_target(new_store, sessions):
    long, short = new_store(arrays(40, 40, 40)), new_store(arrays(40, 38))
    index = WindowIndex(long, 5, (1, 9), 3, sessions=sessions, targets="any")
    index.check_within(long)
    index.check_within(new_store(arrays(40, 40, 40)))
    # the last start, 33, and its target fit 38 rows; the longer horizon's targets don't
    with pytest.raises(WindowError, match=f"windows of session {max(sessions)}"):
        index.check_within(short)


def test_memory_grows_with_sessions_and_not_with_rows():
    few = WindowIndex.from_lengths([100] * 10_000, 20, (1, 5, 10), 3)
    many = WindowIndex.from_lengths([10**9] * 10_000, 20, (1, 5, 10), 3)
    assert many.num_windows == 10_000 * 333_333_324
    assert few.sessions.nbytes == many.sessions.nbytes == 80_000
    assert len(pickle.dumps(many)) < 12_000 * 8 * (5 + 11)
    last = many.num_windows - 1
    assert many.locate(np.array([0, last]))[1].tolist() == [0, 333_333_323 * 3]


def test_an_index_of_a_store_is_pickled_by_the_stores_place(new_store):
    index = WindowIndex(new_store(arrays(4000, 4000)), 5, 2)
    content = pickle.dumps(index)
    assert len(content) < 8_000
    again = pickle.loads(content)
    assert again.fingerprint() == index.fingerprint()
    assert again.audit().as_dict() == index.audit().as_dict()


def test_ten_thousand_sessions_and_any_subset_of_them(new_store):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 10_000)
    store = new_store([session(n, rows, columns=1) for n, rows in enumerate(lengths)])
    chosen = rng.choice(10_000, 5_000, replace=False)
    index = WindowIndex(store, 8, (2, 4), 3, sessions=chosen)
    counts = np.maximum(lengths[np.sort(chosen)] - 11, 0)
    assert index.num_windows == (-(-counts // 3)).sum()
    assert set(index.sessions) == set(chosen[lengths[chosen] >= 12])
