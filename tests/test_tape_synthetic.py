"""The synthetic market: a function of its arguments, a book that could be real, and learnable."""

import hashlib
from datetime import date, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.session import Session, SessionKey
from tapeline.tape.synthetic import book_columns, synthetic_session, synthetic_sessions

SEEDS = st.integers(0, 2**64)
T, HORIZON = 20, 10


def ticks(prices):
    """Prices as whole ticks, after proving that they are the nearest float32 to whole ticks."""
    whole = np.rint(prices.astype(np.float64) * 100).astype(np.int64)
    np.testing.assert_array_equal(prices, whole.astype(np.float32) / np.float32(100))
    return whole


def sides(session, kind):
    """Both sides of the book by kind, `price` or `size`: bid and ask `[rows, level]`."""
    where = [[c.startswith(f"{side}_{kind}_") for c in session.columns] for side in ("bid", "ask")]
    return tuple(session.values[:, columns] for columns in where)


def imbalance(session):
    bid, ask = (sizes.sum(axis=1, dtype=np.float64) for sizes in sides(session, "size"))
    return (bid - ask) / (bid + ask)


def examples(sessions):
    """Imbalance of a window's last row and the window's target, for every window."""
    inputs, targets = [], []
    for session in sessions:
        mid = session.values[:, 0].astype(np.float64)
        targets.append(mid[T + HORIZON - 1 :] - mid[T - 1 : -HORIZON])
        inputs.append(imbalance(session)[T - 1 : -HORIZON])
    inputs = np.concatenate(inputs)
    return np.stack([inputs, np.ones_like(inputs)], axis=1), np.concatenate(targets)


def digest(session):
    parts = (
        session.values.astype("<f4"),
        session.times.astype("<i8"),
        session.age_ns.astype("<i8"),
    )
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def same(one: Session, other: Session) -> bool:
    return (one.key, one.origin, digest(one)) == (other.key, other.origin, digest(other))


# What comes out.


def test_default_market_is_eight_ten_minute_sessions_of_41_columns():
    sessions = synthetic_sessions()
    assert [s.values.shape for s in sessions] == [(1_140, 41)] * 8
    assert {s.values.dtype for s in sessions} == {np.dtype(np.float32)}
    expected = ["mid"]
    for level in range(1, 11):
        expected += [f"bid_price_{level}", f"bid_size_{level}"]
        expected += [f"ask_price_{level}", f"ask_size_{level}"]
    assert {s.columns for s in sessions} == {tuple(expected)} == {book_columns(10)}


def test_sessions_lie_on_consecutive_business_days_half_a_minute_after_the_open():
    sessions = synthetic_sessions(12, rows=3)
    days = [date(2024, 1, 1) + timedelta(days=d) for d in range(16)]
    business = [day for day in days if day.weekday() < 5]
    assert [s.key for s in sessions] == [SessionKey("SYN", d.isoformat()) for d in business]
    for session, day in zip(sessions, business, strict=True):
        opens = np.datetime64(f"{day}T14:30:30", "ns").astype(np.int64)
        np.testing.assert_array_equal(session.times, opens + np.arange(3) * 500_000_000)


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    number=st.integers(0, 14_999),
    rows=st.integers(0, 2_200),
    depth=st.integers(1, 25),
    instrument=st.sampled_from(["SYN", "SYN2", "ÄÖ/1", ""]),
)
def test_every_row_is_an_uncrossed_book_of_positive_sizes(seed, number, rows, depth, instrument):
    session = synthetic_session(number, seed, rows=rows, instrument=instrument, depth=depth)
    assert session.values.shape == (rows, 1 + 4 * depth)
    bid, ask = (ticks(prices) for prices in sides(session, "price"))
    assert np.all(bid[:, 0] < ask[:, 0])
    assert np.all(np.diff(bid, axis=1) <= -1) and np.all(np.diff(ask, axis=1) >= 1)
    halves = bid[:, 0] + ask[:, 0]
    mid = halves.astype(np.float32) / np.float32(200)
    np.testing.assert_array_equal(session.values[:, 0], mid)
    assert np.all(session.origin + sides(session, "price")[0] > 0)
    for sizes in sides(session, "size"):
        assert np.all(sizes >= 1) and np.all(sizes == np.rint(sizes))
    assert session.age_ns.dtype == np.int64
    assert np.all((session.age_ns >= 0) & (session.age_ns < 500_000_000))


def test_zero_rows_are_a_session_too():
    session = synthetic_session(0, rows=0)
    assert session.values.shape == (0, 41)
    assert len(session.times) == len(session.age_ns) == 0
    assert session.origin == synthetic_session(0).origin
    assert synthetic_sessions(0) == []


# A function of the arguments.


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, num=st.integers(1, 6), more=st.integers(1, 6), rows=st.integers(0, 300))
def test_a_session_is_the_same_whatever_else_is_made(seed, num, more, rows):
    few = synthetic_sessions(num, seed, rows=rows)
    many = synthetic_sessions(num + more, seed, rows=rows)
    assert len(few) == num
    assert all(same(one, other) for one, other in zip(few, many, strict=False))
    assert same(few[-1], synthetic_session(num - 1, seed, rows=rows))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, rows=st.integers(0, 2_500), more=st.integers(0, 2_500), depth=st.integers(1, 12))
def test_a_longer_session_begins_with_the_rows_of_a_shorter_one(seed, rows, more, depth):
    short = synthetic_session(0, seed, rows=rows, depth=depth)
    long = synthetic_session(0, seed, rows=rows + more, depth=depth)
    assert short.origin == long.origin
    for name in ("values", "times", "age_ns"):
        np.testing.assert_array_equal(getattr(short, name), getattr(long, name)[:rows])


def test_another_seed_session_or_instrument_is_another_market():
    mids = {
        synthetic_session(number, seed, rows=50, instrument=instrument).values[:, 0].tobytes()
        for number in range(6)
        for seed in (-1, 0, 1, 2, 3, 2**64)
        for instrument in ("SYN", "SYN2", "0/SYN")
    }
    assert len(mids) == 6 * 6 * 3


def test_depth_shows_more_of_the_same_market():
    shallow, deep = (synthetic_session(0, rows=200, depth=depth) for depth in (1, 10))
    for column in ("mid", "bid_price_1", "ask_price_1"):
        one, other = (s.values[:, s.columns.index(column)] for s in (shallow, deep))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("instrument", "origin", "expected"),
    [
        ("SYN", 100.36, "acb4d2276aea38f2dec161bf9d17a77020f2bfc4a3e04004fb36b54db84078df"),
        ("SYN2", 999.5, "f74405aee9450e2d94a4cee833445cb8c7efb0b86aa4f867aa281dc10a9b6765"),
    ],
)
def test_the_market_has_not_changed(instrument, origin, expected):
    """Integers and correctly rounded divisions only, so every machine gives these bits."""
    session = synthetic_session(3, 7, rows=1_140, instrument=instrument)
    assert session.origin == origin
    assert digest(session) == expected


def test_instruments_are_told_apart_by_price_and_by_lot():
    """Any single row says which instrument it is of, so a window that mixes two shows."""
    lots, levels = {}, {}
    for name in ("SYN", "SYN2"):
        sessions = synthetic_sessions(4, instrument=name)
        sizes = np.concatenate([np.hstack(sides(s, "size")) for s in sessions])
        lots[name] = np.unique(np.gcd.reduce(sizes.astype(np.int64), axis=1)).tolist()
        mids = np.concatenate([s.origin + s.values[:, 0] for s in sessions])
        levels[name] = (mids.min(), mids.max())
    assert lots == {"SYN": [1], "SYN2": [6]}
    assert 97.4 < levels["SYN"][0] < levels["SYN"][1] < 102.6
    assert 997.4 < levels["SYN2"][0] < levels["SYN2"][1] < 1_002.6


# A plausible market, with something to learn.


def test_spreads_are_narrow_and_books_have_gaps():
    session = synthetic_session(0, rows=20_000)
    bid, ask = (ticks(prices) for prices in sides(session, "price"))
    shares = np.bincount(ask[:, 0] - bid[:, 0], minlength=4) / len(session)
    assert shares[1] > 0.5 and shares[2] > 0.2 and 0.01 < shares[3] < 0.1
    assert shares[1:4].sum() == pytest.approx(1.0)
    gaps = np.bincount(np.diff(ask, axis=1).ravel(), minlength=4) / (9 * len(session))
    assert gaps[1] > 0.8 and gaps[2] > 0.1 and gaps[3] > 0.02
    assert gaps[1:4].sum() == pytest.approx(1.0)


def test_volatility_comes_in_regimes_that_the_book_shows():
    session = synthetic_session(0, rows=20_000)
    moves = np.abs(np.diff(session.values[:, 0].astype(np.float64)))
    blocks = moves[: len(moves) // 20 * 20].reshape(-1, 20).mean(axis=1)
    assert np.corrcoef(blocks[:-1], blocks[1:])[0, 1] > 0.3
    total = np.hstack(sides(session, "size")).sum(axis=1)[1:]
    thin, thick = (total < np.quantile(total, 0.2)), (total > np.quantile(total, 0.8))
    assert moves[thin].mean() > 1.5 * moves[thick].mean()


@pytest.mark.parametrize("seed", range(5))
def test_imbalance_predicts_the_target_out_of_sample(seed):
    sessions = synthetic_sessions(8, seed)
    inputs, targets = examples(sessions[:6])
    assert 0.18 < targets.std() < 0.34
    weights = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    for held_out in (sessions[6:], synthetic_sessions(4, seed + 1_000)):
        inputs, targets = examples(held_out)
        error = np.mean((targets - inputs @ weights) ** 2)
        assert error < 0.95 * np.mean(targets**2)
        assert error > 0.3 * np.mean(targets**2), "too easy to be a market"


def test_prices_turn_round_at_the_band_and_imbalance_with_them():
    session = synthetic_session(0, rows=46_800)
    mid = session.origin + session.values[:, 0].astype(np.float64)
    assert 97.42 < mid.min() < 97.5 and 102.5 < mid.max() < 102.58
    moves, leans = np.diff(mid), imbalance(session)[:-1]
    for block in np.array_split(np.arange(len(moves)), 100):
        assert np.corrcoef(moves[block], leans[block])[0, 1] > 0.2


# Bad arguments.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: synthetic_sessions(-1),
            "synthetic market, num: expected a whole number from 0 to 15,000, found -1. "
            "Give num in that range.",
        ),
        (
            lambda: synthetic_session(15_000),
            "synthetic market, number: expected a whole number from 0 to 14,999, found 15000. "
            "Give number in that range.",
        ),
        (
            lambda: synthetic_sessions(1, rows=-1),
            "synthetic market, rows: expected a whole number from 0 to 172,740, found -1. "
            "Give rows in that range.",
        ),
        (
            lambda: synthetic_session(0, rows=10.5),
            "synthetic market, rows: expected a whole number from 0 to 172,740, found 10.5. "
            "Give rows in that range.",
        ),
        (
            lambda: synthetic_session(0, depth=0),
            "synthetic market, depth: expected a whole number from 1 to 1,000, found 0. "
            "Give depth in that range.",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(TapeError) as caught:
        make()
    assert str(caught.value) == message


def test_the_longest_and_the_deepest_are_legal():
    deep = synthetic_session(14_999, rows=100, depth=1_000)
    assert np.all(deep.origin + sides(deep, "price")[0].astype(np.float64) > 0)
    first, second = (synthetic_session(number, rows=172_740, depth=1) for number in (0, 1))
    assert first.times[-1] < second.times[0]
