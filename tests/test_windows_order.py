"""The order: a bijection for every size, the same for ever, and nothing to tell it from chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.windows.order import mix, permute

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


SIZES = sorted(
    {*range(1, 601), *range(601, 5000, 53), 5000}
    | {2**k + d for k in range(2, 14) for d in (-1, 0, 1)}
)


def test_it_is_a_bijection_at_every_size():
    for num in SIZES:
        seen = np.zeros(num, np.int64)
        np.add.at(seen, whole(num, seed=num, epoch=num % 5), 1)
        assert (seen == 1).all(), num


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
