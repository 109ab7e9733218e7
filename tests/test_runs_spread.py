"""Intervals and comparisons of replicates against published values and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import RunError
from tapeline.quantiles import student_quantile
from tapeline.runs.divergence import diverge
from tapeline.runs.spread import compare, seeds_to_decide, spread_of
from tapeline.signals import Series


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (4, 2.776445), (9, 2.262157), (30, 2.042272), (1e6, 1.959966)],
)
def test_quantiles_of_t_are_the_published_ones(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [(0.8, 10, 0.879058), (0.995, 3, 5.840909), (0.5, 7, 0.0)],
)
def test_other_quantiles_too(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, abs=2e-6)


def test_a_quantile_between_whole_degrees_of_freedom():
    """The density, integrated another way."""
    freedom = 2.5
    t = np.linspace(0, student_quantile(0.975, freedom), 200_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(math.pi * freedom)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, t) == pytest.approx(0.475, abs=1e-8)


def test_the_intervals_of_three_seeds():
    """By hand: mean 2, sd 1, t(0.975; 2) = 4.3027."""
    spread = spread_of([1.0, 2.0, 3.0])
    assert (spread.mean, spread.sd) == (2.0, 1.0)
    assert spread.mean_half_width == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert spread.next_half_width == pytest.approx(4.302653 * math.sqrt(4 / 3), abs=1e-5)
    assert spread.coverage == 0.5
    assert spread.as_dict()["min_max_coverage"] == 0.5


def test_a_diverged_run_is_counted_and_in_no_interval():
    spread = spread_of([1.0, math.nan, 3.0, math.inf])
    assert (spread.values, spread.num_diverged) == ((1.0, 3.0), 2)
    with pytest.raises(RunError, match=r"two runs or more with a finite figure, found 1 of 2"):
        spread_of([1.0, math.nan])


def test_intervals_cover_what_they_say():
    """10,000 draws of five: each interval covers in 95 %, min to max covers the next in 4 of 6."""
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((10_000, 6))
    t = student_quantile(0.975, 4)
    mean, sd = draws[:, :5].mean(axis=1), draws[:, :5].std(axis=1, ddof=1)
    spread = spread_of(draws[0, :5].tolist())
    assert spread.mean_half_width == pytest.approx(t * sd[0] / math.sqrt(5))
    assert spread.next_half_width == pytest.approx(t * sd[0] * math.sqrt(1.2))
    assert np.mean(np.abs(mean) < t * sd / math.sqrt(5)) == pytest.approx(0.95, abs=0.01)
    following = np.abs(draws[:, 5] - mean) < t * sd * math.sqrt(1.2)
    assert np.mean(following) == pytest.approx(0.95, abs=0.01)
    inside = (draws[:, 5] > draws[:, :5].min(1)) & (draws[:, 5] < draws[:, :5].max(1))
    assert np.mean(inside) == pytest.approx(spread.coverage, abs=0.015)


def test_pairing_cancels_what_a_seed_does_to_both():
    seeds = {1: 5.0, 2: 9.0, 3: 1.0, 4: 7.0}
    better = {seed: value - 0.1 - 0.01 * (seed % 2) for seed, value in seeds.items()}
    paired = compare(seeds, better)
    assert (paired.how, paired.exceeds_noise, paired.seeds_to_decide) == ("paired", True, None)
    assert paired.difference == pytest.approx(-0.105)
    unpaired = compare(seeds, {seed + 9: value for seed, value in better.items()})
    assert (unpaired.how, unpaired.exceeds_noise) == ("unpaired", False)
    assert unpaired.seeds_to_decide is None  # more than 10,000


def test_welch_is_the_textbook_one():
    """Means 2 and 5, variances 1 and 4 of three each: sd² = 5/3, ν = 50/17."""
    found = compare({0: 1.0, 1: 2.0, 2: 3.0}, {5: 3.0, 6: 5.0, 7: 7.0})
    expected = student_quantile(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert found.difference == 3.0
    assert found.half_width == pytest.approx(expected)


def test_one_run_is_held_against_the_interval_for_the_next():
    band = {0: 1.0, 1: 2.0, 2: 3.0}
    half = spread_of([1.0, 2.0, 3.0]).next_half_width
    inside, outside = compare(band, {9: 2.0 + 0.9 * half}), compare(band, {9: 2.0 + 1.1 * half})
    assert (inside.how, inside.exceeds_noise, outside.exceeds_noise) == ("one run", False, True)
    assert compare({9: 2.0 + half}, band).difference == pytest.approx(-half)
    assert inside.seeds_to_decide is not None
    with pytest.raises(RunError, match=r"two seeds or more of one side, .* found 1 and 1 with"):
        compare({0: 1.0}, {1: 2.0})


def test_equal_values_without_spread():
    same = compare({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert (same.difference, same.exceeds_noise, same.seeds_to_decide) == (0.0, False, None)
    apart = compare({0: 1.0, 1: 1.0}, {2: 2.0, 3: 2.0})
    assert apart.exceeds_noise


@pytest.mark.parametrize(("groups", "sd", "k"), [(1, 1.0, 34), (2, math.sqrt(2), 64)])
def test_seeds_to_decide_are_those_of_the_tables(groups, sd, k):
    """Half a standard deviation, 5 %, 80 %: 34 pairs, 64 in each of two groups."""
    assert seeds_to_decide(0.5, sd, groups=groups) == k


def test_so_many_seeds_decide_in_four_of_five():
    rng = np.random.default_rng(1)
    k = seeds_to_decide(0.8, 1.0)
    draws = 0.8 + rng.standard_normal((4000, k))
    half = student_quantile(0.975, k - 1) * draws.std(axis=1, ddof=1) / math.sqrt(k)
    assert np.mean(draws.mean(axis=1) > half) == pytest.approx(0.8, abs=0.04)


def series(values, first=1) -> Series:
    values = np.asarray(values, float)
    return Series(np.arange(first, first + len(values)), values, np.ones(len(values), np.int64))


def curves(seed: int, num: int, steps: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 1 / np.sqrt(np.arange(1, steps + 1)) + 0.05 * rng.standard_normal((num, steps))


@given(seed=st.integers(0, 10_000), at=st.integers(10, 190), shift=st.sampled_from([-1.0, 1.0]))
def test_the_step_of_a_planted_divergence_is_found(seed, at, shift):
    """With bits that differ from the first step on, the band is left where it was planted."""
    table = curves(seed, 7, 200)
    changed = table[0] + 1e-6
    changed[at - 1 :] += shift
    found = diverge(series(table[0]), series(changed), [series(row) for row in table[2:]])
    assert (found.first_difference, found.leaves_band) == (1, at)
    assert found.num_replicates == 5


def test_other_seeds_stay_in_the_band():
    found = [
        diverge(series(table[0]), series(table[1]), [series(row) for row in table[2:]])
        for table in (curves(seed, 7, 200) for seed in range(100))
    ]
    assert sum(one.leaves_band is not None for one in found) <= 1


def test_without_replicates_only_the_first_difference_is_told():
    a = series([3.0, 2.0, 1.0])
    found = diverge(a, series([3.0, 2.0, 1.5]))
    assert (found.compared, found.first_difference, found.leaves_band) == (3, 3, None)
    assert found.num_replicates == 0
    same = diverge(a, a)
    assert (same.first_difference, same.band) == (None, None)


def test_a_loss_that_is_no_number_leaves_any_band():
    table = curves(0, 5, 50)
    broken = table[0].copy()
    broken[30:] = math.nan
    band = [series(row) for row in table[2:]]
    assert diverge(series(table[0]), series(broken), band).leaves_band == 31
    assert diverge(series(broken), series(broken), band).first_difference is None


def test_steps_that_one_lacks_are_not_compared():
    a, b = series([1.0, 2.0, 3.0]), series([2.0, 3.0, 4.0], first=2)
    found = diverge(a, b)
    assert (found.compared, found.first_difference) == (2, None)
    assert diverge(a, series([1.0], first=9)).compared == 0
