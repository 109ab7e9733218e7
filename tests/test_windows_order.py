"""The order: a bijection for every size, the same for ever, and nothing to tell it from chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows.order import (
    Eras,
    Sequential,
    Shuffled,
    WithReplacement,
    mix,
    permute,
    position_of,
    window_at,
)

WORD = 2**64
SEEDS = st.integers(-(2**63), 2**64)


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def slow_mix(*words):
    state = 0x243F6A8885A308D3
    for word in words:
        state = splitmix(state ^ splitmix(word % WORD))
    return state


def slow_permute(position, num, seed, epoch):
    """The construction of the module's docstring in whole numbers without a size."""
    k = 1
    while 2**k < num:
        k += 1
    x = position
    while True:
        for r in range(16 if k <= 8 else 6):
            a, m = slow_mix(seed, epoch, 2 * r), slow_mix(seed, epoch, 2 * r + 1) | 1
            x = (x + a) * m % 2**k
            x ^= x >> (k + 1) // 2
        if x < num:
            return x


def whole(num, seed=0, epoch=0):
    return permute(np.arange(num), num, seed, epoch)


@given(st.data(), st.integers(1, 2**62), SEEDS, st.integers(0, 2**40))
def test_it_is_the_construction_that_the_docstring_gives(data, num, seed, epoch):
    positions = data.draw(st.lists(st.integers(0, num - 1), max_size=5))
    found = permute(np.array(positions, np.int64), num, seed, epoch)
    assert found.tolist() == [slow_permute(p, num, seed, epoch) for p in positions]


@given(st.integers(1, 300), SEEDS, st.integers(0, 1000))
def test_small_sizes_are_the_construction_too(num, seed, epoch):
    assert whole(num, seed, epoch).tolist() == [
        slow_permute(p, num, seed, epoch) for p in range(num)
    ]


def test_the_order_has_not_changed():
    # Runs of this version resume by these numbers: another order is another VERSION.
    assert whole(10).tolist() == [4, 3, 9, 0, 6, 8, 2, 7, 1, 5]
    assert permute(np.arange(6), 8888, 7, 3).tolist() == [6666, 3167, 5845, 4007, 7, 5502]
    assert permute(np.arange(3), 2**40 + 1, -1, 2).tolist() == [
        598354927725,
        744677118191,
        684964128981,
    ]
    assert mix(1, 2, 3) == 0xE234B8E7662009C0


@pytest.mark.parametrize("bits", range(14, 63, 2))
def test_large_sizes_stay_in_range_and_distinct(bits):
    rng = np.random.default_rng(bits)
    for num in (2**bits - 1, 2**bits, min(2**bits + 1, 2**62)):
        positions = np.unique(rng.integers(0, num, 2000))
        windows = permute(positions, num, 5, 6)
        assert windows.min() >= 0
        assert windows.max() < num
        assert len(np.unique(windows)) == len(positions)


def test_positions_can_be_asked_for_alone():
    together = whole(1000, 3, 4)
    alone = [int(permute(np.array([p]), 1000, 3, 4)[0]) for p in range(0, 1000, 37)]
    assert alone == together[::37].tolist()


def test_keys_are_mixed_not_added():
    orders = {
        (seed, epoch): tuple(whole(50, seed, epoch))
        for seed in range(-5, 15)
        for epoch in range(20)
    }
    assert len(set(orders.values())) == len(orders)
    assert len({mix(s, e) for s in range(100) for e in range(100)}) == 10_000
    assert len({mix(), mix(0), mix(0, 0), mix(0, 0, 0)}) == 4


def chi_square_z(counts, expected):
    """The statistic as standard deviations from its mean, after Wilson and Hilferty."""
    cells = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / cells) ** (1 / 3) - (1 - 2 / (9 * cells))) / np.sqrt(2 / (9 * cells))


KEYS = 6000
# The keys below are fixed, so this is no game of chance: 4 deviations is one in 30,000.
MOST_DEVIATIONS = 4.0


@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_every_permutation_of_a_few_is_equally_frequent(num):
    weights = num ** np.arange(num)
    codes = np.array([whole(num, seed=key, epoch=1) @ weights for key in range(KEYS)])
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == np.prod(np.arange(1, num + 1))
    assert abs(chi_square_z(counts, KEYS / len(counts))) < MOST_DEVIATIONS


@pytest.mark.parametrize("num", [6, 8, 9, 17, 33, 100])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_first_windows_and_their_differences_are_even(num, vary):
    last = num - 1
    firsts = np.array(
        [
            permute(np.array([0, 1, last]), num, **{"seed": 11, "epoch": 11} | {vary: key})
            for key in range(KEYS // 2)
        ]
    )
    for column in range(3):
        counts = np.bincount(firsts[:, column], minlength=num)
        assert abs(chi_square_z(counts, len(firsts) / num)) < MOST_DEVIATIONS, column
    for a, b in ((0, 1), (0, 2), (1, 2)):
        steps = (firsts[:, b] - firsts[:, a]) % num
        counts = np.bincount(steps, minlength=num)[1:]
        assert abs(chi_square_z(counts, len(firsts) / (num - 1))) < MOST_DEVIATIONS, (a, b)


def test_neighbours_in_a_large_order_are_unrelated():
    num = 46_771
    order = whole(num, 1, 0)
    ranks = np.corrcoef(order[:-1], order[1:])[0, 1], np.corrcoef(order, np.arange(num))[0, 1]
    assert np.abs(ranks).max() < 4 / np.sqrt(num)
    counts = np.bincount(((order[1:] - order[:-1]) % num) * 50 // num, minlength=50)
    assert abs(chi_square_z(counts, (num - 1) / 50)) < MOST_DEVIATIONS
    # how many windows of the first epoch's first half are in the second epoch's first half too
    both = len(np.intersect1d(order[: num // 2], whole(num, 1, 1)[: num // 2]))
    assert abs(both - num / 4) < 4 * np.sqrt(num / 16)


def test_every_size_up_to_5000_is_a_bijection():
    for num in range(1, 5001):
        windows = Shuffled(num % 7).windows(num, num % 5, 0, num)
        assert windows.min() == 0, num
        assert (np.bincount(windows, minlength=num) == 1).all(), num


@pytest.mark.parametrize("bits", range(1, 41))
def test_the_inverse_finds_every_position_again(bits):
    rng = np.random.default_rng(bits)
    for num in {max(1, 2**bits - 1), 2**bits, 2**bits + 1}:
        positions = np.unique(np.append(rng.integers(0, num, 100), [0, num - 1]))
        windows = permute(positions, num, 5, 6)
        assert ((windows >= 0) & (windows < num)).all()
        assert [position_of(w, num, 5, 6) for w in windows.tolist()] == positions.tolist()
        assert window_at(int(positions[-1]), num, 5, 6) == windows[-1]


ORDERS = [Shuffled, WithReplacement, lambda seed: Sequential(), lambda seed: Eras(seed, 37)]


@pytest.mark.parametrize("order", ORDERS)
@given(st.data(), st.integers(1, 2**40), SEEDS, st.integers(0, 1000))
def test_numpy_and_kernel_draw_the_same_whichever_part_is_asked_for(order, data, num, seed, epoch):
    ours = order(seed)
    start = data.draw(st.integers(0, num))
    stop = min(num, start + data.draw(st.integers(0, 200)))
    windows = ours.windows(num, epoch, start, stop)
    assert windows.dtype == np.int64
    np.testing.assert_array_equal(windows, ours.windows(num, epoch, start, stop, compiled=False))
    cut = data.draw(st.integers(start, stop))
    parts = [ours.windows(num, epoch, start, cut), ours.windows(num, epoch, cut, stop)]
    np.testing.assert_array_equal(windows, np.concatenate(parts))


def test_the_other_orders_have_not_changed_either():
    assert WithReplacement(7).windows(8888, 3, 0, 6).tolist() == REPLACED
    assert Eras(7, 1000).windows(8888, 3, 990, 996).tolist() == [
        1799, 1613, 1761, 1491, 1602, 1830,
    ]  # fmt: skip
    assert Sequential().windows(8888, 3, 2, 5).tolist() == [2, 3, 4]


REPLACED = [2528, 4818, 771, 5860, 8876, 4596]


def test_names_tell_orders_apart():
    orders = [Shuffled(1), WithReplacement(1), Sequential(), Eras(1, 8), Eras(1, 9)]
    names = ["shuffled1", "replacement1", "sequential", "eras1/8", "eras1/9"]
    assert [order.name for order in orders] == names
    assert Shuffled(1) == Shuffled(1) != Shuffled(2)


@given(st.integers(1, 400), st.integers(1, 450), SEEDS, st.integers(0, 50))
def test_eras_are_whole_and_each_window_comes_once(num, size, seed, epoch):
    windows = Eras(seed, size).windows(num, epoch, 0, num)
    assert sorted(windows.tolist()) == list(range(num))
    eras = windows // size
    runs = 1 + np.count_nonzero(np.diff(eras))
    assert runs == len(np.unique(eras)) == -(-num // size)


def test_eras_and_what_is_in_them_change_with_seed_and_epoch():
    keys = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    orders = [Eras(s, 50).windows(1000, e, 0, 1000) for s, e in keys]
    assert len({tuple(o) for o in orders}) == len(keys)
    assert len({tuple(o[::50] // 50) for o in orders}) == len(keys)
    assert len({tuple(o[o < 50]) for o in orders}) == len(keys)
    first = orders[0]
    inside = {tuple(first[first // 50 == era] % 50) for era in range(20)}
    assert len(inside) == 20  # no era is shuffled as another is


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_an_era_holds_a_whole_number_of_windows(size):
    with pytest.raises(WindowError) as error:
        Eras(0, size)
    assert str(error.value) == (
        f"window_of_windows: expected a whole number, 1 or more, found {size}. "
        "Choose another window_of_windows."
    )


@pytest.mark.parametrize("num", [1, 2, 3, 100, 129])
def test_draws_with_replacement_are_even_and_independent(num):
    drawn = np.concatenate(
        [
            WithReplacement(s).windows(num, e, 0, num)
            for s in range(50)
            for e in range(4000 // num + 1)
        ]
    )
    counts = np.bincount(drawn, minlength=num)
    if num == 1:
        assert len(counts) == 1
        return
    assert abs(chi_square_z(counts, len(drawn) / num)) < MOST_DEVIATIONS
    steps = np.bincount((drawn[1:] - drawn[:-1]) % num, minlength=num)
    assert abs(chi_square_z(steps, (len(drawn) - 1) / num)) < MOST_DEVIATIONS
