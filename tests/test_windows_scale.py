"""Scaling: exact statistics of training rows only, the same bits wherever they are applied."""

import json
from fractions import Fraction

import numpy as np
import pytest
from helpers_windows import arrays, session
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.session import Session, SessionKey
from tapeline.windows import Normaliser, WindowIndex, scale

FLOATS = st.floats(-1e6, 1e6, width=32)


def fit(store, T=3, horizon=2):
    return Normaliser.fit(store, WindowIndex(store, T, horizon))


def same(a, b):
    return (
        a.mean.tobytes() == b.mean.tobytes()
        and a.std.tobytes() == b.std.tobytes()
        and a.num_rows == b.num_rows
    )


@settings(max_examples=40)
@given(st.lists(st.lists(FLOATS, min_size=5, max_size=20), min_size=1, max_size=3))
def test_statistics_are_those_of_exact_arithmetic(new_store, days):
    normaliser = fit(new_store([np.array(day)[:, None] for day in days]))
    rows = [Fraction(float(v)) for day in days for v in day[:-2]]  # no window reads the last two
    mean = sum(rows) / len(rows)
    variance = sum((v - mean) ** 2 for v in rows) / len(rows)
    size = float(max(map(abs, rows)))
    assert normaliser.num_rows == len(rows)
    assert normaliser.mean[0] == pytest.approx(float(mean), rel=1e-12, abs=1e-12 * size)
    assert normaliser.std[0] == pytest.approx(float(variance) ** 0.5, rel=1e-9, abs=1e-12 * size)
    assert (normaliser.std[0] == 0) == (len(set(rows)) == 1)


def test_rows_are_scaled_to_mean_0_and_deviation_1(new_store):
    days = [day * [1, 30, 1e-4] + [1000, -5, 0] for day in arrays(3000, 2000)]
    normaliser = fit(new_store(days))
    scaled = normaliser(np.concatenate([day[:-2] for day in days]).astype(np.float32))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(axis=0, dtype=np.float64), 0, atol=1e-4)
    np.testing.assert_allclose(scaled.std(axis=0, dtype=np.float64), 1, atol=1e-4)


def test_each_operation_is_rounded_to_float32(new_store):
    normaliser = fit(new_store(arrays(50)))
    x = arrays(7, seed=3)[0]
    mean, inverse = normaliser.mean.astype(np.float32), (1 / normaliser.std).astype(np.float32)
    wanted = [[(v - m) * i for v, m, i in zip(row, mean, inverse, strict=True)] for row in x]
    np.testing.assert_array_equal(normaliser(x), np.array(wanted, np.float32))
    np.testing.assert_array_equal(normaliser(x.reshape(1, -1)), normaliser(x).reshape(1, -1))


def test_only_training_rows_count(new_store):
    day = arrays(100)[0]
    changed = day.copy()
    store = new_store([day])
    training = WindowIndex(store, 5, 2).split(train=0.7)["train"]
    (read,) = training.input_rows(1000)
    assert read == (0, slice(0, 68))  # the last training window ends at row 67, its target at 69
    changed[68:] = 1e6
    other = new_store([changed])
    assert same(Normaliser.fit(store, training), Normaliser.fit(other, training))
    changed[67] = 1e6
    assert not same(Normaliser.fit(store, training), Normaliser.fit(new_store([changed]), training))


def test_marked_rows_do_not_count(new_store):
    day = session(0, 40, valid=np.arange(40) != 15)
    day.values[15] = np.nan
    normaliser = fit(new_store([day]))
    used = np.concatenate([day.values[:13], day.values[16:38]])
    assert normaliser.num_rows == len(used) == 35
    np.testing.assert_allclose(normaliser.mean, used.mean(axis=0, dtype=np.float64), rtol=1e-13)


def test_a_constant_column_becomes_0(new_store):
    day = arrays(5000)[0]
    day[:, 1] = np.float32(0.1)  # a sum of 0.1s over n isn't 0.1
    normaliser = fit(new_store([day]))
    assert normaliser.std[1] == 0
    assert normaliser.factors()[1][1] == 0
    assert (normaliser(day)[:, 1] == 0).all()
    elsewhere = day + np.float32(9)
    assert (normaliser(elsewhere)[:, 1] == 0).all()


def test_a_small_move_on_a_large_price_keeps_its_deviation(new_store):
    day = np.full((4000, 1), 61_686, np.float32)
    day[::2] += np.float32(2**-8)
    assert fit(new_store([day])).std[0] == pytest.approx(2**-9, rel=1e-6)


def test_huge_values_do_not_overflow(new_store):
    day = np.where(np.arange(60)[:, None] % 2, np.float32(1e38), np.float32(-1e38))
    normaliser = fit(new_store([day]))
    assert normaliser.std[0] == pytest.approx(1e38)
    np.testing.assert_allclose(np.abs(normaliser(day)), 1, rtol=1e-2)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(-3e38, 3e38, "-3e+38 to 3e+38"), (0, 1e-40, "0 to 9.99995e-41")],
)
def test_a_range_that_float32_cannot_scale_is_refused(new_store, low, high, found):
    day = np.zeros((60, 2), np.float32)
    day[:, 1] = np.where(np.arange(60) % 2, np.float32(low), np.float32(high))
    with pytest.raises(WindowError) as error:
        fit(new_store([day]))
    assert str(error.value) == (
        "column c1: expected values that differ by 0, or by what float32 can divide by, found "
        f"{found}. Give the column another unit, or leave it out."
    )


def test_many_chunks_are_one_chunk(new_store, monkeypatch):
    store = new_store(arrays(1000, 700))
    whole = fit(store)
    for rows in (1, 7, 999):
        monkeypatch.setattr(scale, "_CHUNK_ROWS", rows)
        parts = fit(store)
        assert parts.num_rows == whole.num_rows
        np.testing.assert_allclose(parts.mean, whole.mean, rtol=0, atol=1e-15)
        np.testing.assert_allclose(parts.std, whole.std, rtol=1e-14)


@pytest.mark.parametrize("stride", [2, 5, 9])
def test_rows_between_the_windows_of_a_long_stride_do_not_count(new_store, stride, monkeypatch):
    store = new_store(arrays(100, 60))
    index = WindowIndex(store, 5, 2, stride)
    monkeypatch.setattr(scale, "_CHUNK_ROWS", 7)
    starts = [(s, a) for s, rows in enumerate((100, 60)) for a in range(0, rows - 6, stride)]
    used = sorted({(s, a + i) for s, a in starts for i in range(5)})
    rows = np.array([store.values(s)[row] for s, row in used], np.float64)
    normaliser = Normaliser.fit(store, index)
    assert normaliser.num_rows == len(used)
    np.testing.assert_allclose(normaliser.mean, rows.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(normaliser.std, rows.std(axis=0), rtol=1e-12)


def book(rows, **columns):
    """A session of a book's first level and one more column, which is no price of it."""
    rng = np.random.default_rng(1)
    mid = np.cumsum(rng.choice([-0.5, 0, 0.5], rows)) + 7
    values = {
        "bid_size_1": rng.exponential(3, rows),
        "bid_price_1": mid - 0.5,
        "mid": mid,
        "ask_price_1": mid + rng.choice([0.5, 1.5], rows),
        "ask_size_1": rng.exponential(5, rows),
        "ask_price_imbalance": rng.normal(0, 40, rows),
    } | columns
    return Session(SessionKey("book"), np.stack(list(values.values()), axis=1), tuple(values))


def test_the_prices_of_a_book_share_the_statistics_of_mid(new_store):
    store = new_store([book(500)])
    index = WindowIndex(store, 3, 2)
    each, block = (Normaliser.fit(store, index, per) for per in ("column", "price"))
    prices, mid, others = [1, 2, 3], 2, [0, 4, 5]
    assert (block.mean[prices] == each.mean[mid]).all()
    assert (block.std[prices] == each.std[mid]).all()
    assert (block.mean[others] == each.mean[others]).all()
    assert (block.std[others] == each.std[others]).all()
    assert block.num_rows == each.num_rows
    assert same(block, Normaliser.from_dict(json.loads(json.dumps(block.as_dict()))))
    # distances between prices survive: the ask stays above the bid by its spread
    scaled, values = block(store.values(0)), store.values(0)
    np.testing.assert_allclose(
        (scaled[:, 3] - scaled[:, 1]) * block.std[mid], values[:, 3] - values[:, 1], rtol=1e-5
    )


def test_prices_around_a_mid_that_stands_still_become_0(new_store):
    store = new_store([book(60, mid=np.full(60, 7.0))])
    scaled = Normaliser.fit(store, WindowIndex(store, 3, 2), "price")(store.values(0))
    assert (scaled[:, [1, 2, 3]] == 0).all()
    assert scaled[:, 0].std() > 0


def test_prices_too_far_from_mid_are_refused(new_store):
    far = np.where(np.arange(60) % 2, 1e20, -1e20)
    near = np.where(np.arange(60) % 2, 1e-20, -1e-20)
    store = new_store([book(60, mid=near, ask_price_1=far, bid_price_1=near)])
    index = WindowIndex(store, 3, 2)
    assert Normaliser.fit(store, index).num_rows == 58
    with pytest.raises(WindowError, match=r"column bid_price_1: .* found -1e\+20 to 1e\+20"):
        Normaliser.fit(store, index, "price")


def test_prices_need_a_mid(new_store):
    store = new_store(arrays(60))
    with pytest.raises(WindowError) as error:
        Normaliser.fit(store, WindowIndex(store, 3, 2), "price")
    assert str(error.value) == (
        "normaliser per price: expected a column `mid`, found 3 columns without it. "
        "Scale per column, or name the columns as `tapeline ingest` does."
    )
    with pytest.raises(WindowError, match="per 'row': expected one of column, price, found"):
        Normaliser.fit(store, WindowIndex(store, 3, 2), "row")


def test_every_format_gives_the_same_statistics(new_store):
    days = arrays(100, 50)
    first, *others = (fit(new_store(days, fmt)) for fmt in ("mmap", "npy", "csv"))
    assert all(same(first, other) for other in others)


def test_json_gives_back_the_same_bits(new_store):
    normaliser = fit(new_store(arrays(100)))
    again = Normaliser.from_dict(json.loads(json.dumps(normaliser.as_dict())))
    assert same(normaliser, again)
    x = arrays(9, seed=5)[0]
    assert normaliser(x).tobytes() == again(x).tobytes()


def test_batches_of_other_columns_are_refused(new_store):
    with pytest.raises(WindowError) as error:
        fit(new_store(arrays(100)))(np.zeros((2, 20), np.float32))
    assert str(error.value) == (
        "normaliser: expected rows of 3 columns, found a last axis of 20. "
        "Scale batches of the store that the normaliser was fitted on."
    )


def test_windows_of_another_store_are_refused(new_store):
    index = WindowIndex.from_lengths([200], 3, 2)
    with pytest.raises(WindowError, match="windows of session 0: expected 5 valid rows"):
        Normaliser.fit(new_store(arrays(100)), index)
