"""Search budgets: the golden numbers, searches played out, and properties of any budget."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan.halving import hyperband, ladder, num_rungs
from tapeline.plan.search import (
    ASHA,
    BAYESIAN,
    GRID,
    HYPERBAND,
    RANDOM,
    RESTARTED,
    RESUMED,
    Budget,
    chance_of_best,
    draws_needed,
    grid_values,
    plan_search,
)
from tapeline.plan.search_cut import chance_best_survives
from tapeline.plan.search_noise import Noise
from tapeline.plan.search_play import play
from tapeline.plan.seeds import (
    chance_next_inside,
    difference_half_width,
    mean_half_width,
    next_half_width,
    seeds_needed,
    winners_curse,
)
from tapeline.quantiles import student_below, student_quantile

BUDGET = Budget(2048.0, 64.0, 2.0, 3, 4, 8, 8, 1)
PLAN = plan_search(BUDGET, 0.05)
WAYS = {one.name: one for one in PLAN.strategies}


def test_grid_and_random_complete_32_runs_and_differ_in_the_values_they_try():
    grid, draws = WAYS[GRID], WAYS[RANDOM]
    assert (grid.num_full, draws.num_full) == (32, 32)
    assert (grid.num_distinct, draws.num_distinct) == (2, 32)
    assert grid.num_configs == 16


def test_successive_halving_spends_a_quarter_on_each_of_four_rungs():
    one = WAYS[RESTARTED].ladders[0]
    assert PLAN.num_rungs == 4
    assert [rung.num_configs for rung in one.rungs] == [216, 72, 24, 8]
    hours = [rung.gpu_hours for rung in one.rungs]
    assert hours == pytest.approx([2.370, 7.111, 21.333, 64.0], abs=5e-4)
    assert [r.num_configs * r.gpu_hours for r in one.rungs] == pytest.approx([512] * 4)
    assert WAYS[RESTARTED].gpu_hours == pytest.approx(2048)
    assert WAYS[RESTARTED].wall_hours == pytest.approx(27 * 64 / 27 + 9 * 64 / 9 + 3 * 64 / 3 + 64)


@pytest.mark.parametrize(
    ("num", "least", "full", "eta", "restarted", "resumed"),
    [
        (81, 1, 81, 3, 405, 297),
        (243, 1, 81, 3, 1215, 891),
        (256, 1, 256, 4, 1280, 1024),
        (64, 1, 64, 2, 448, 256),
    ],
)
def test_totals_restarted_and_resumed(num, least, full, eta, restarted, resumed):
    one = ladder(num, num_rungs(least, full, eta), full, eta)
    assert (one.restarted, one.resumed) == (restarted, resumed)


@pytest.mark.parametrize("eta", [2, 3, 7, 10])
def test_rungs_are_counted_by_integer_powers(eta):
    assert math.floor(math.log(243, 3)) == 4  # what a logarithm makes of 3^5
    for power in range(16):
        assert num_rungs(1, eta**power, eta) == power + 1
        assert num_rungs(1, 0.999 * eta ** (power + 1), eta) == power + 1
    assert num_rungs(64 / 27, 64.0, 3) == 4


def test_hyperband_is_that_of_its_paper():
    """Table 1 of Li et al.: R = 81, eta = 3."""
    brackets = hyperband(5, 81.0, 3)
    found = [[(r.num_configs, r.gpu_hours) for r in one.rungs] for one in brackets]
    assert found[0] == [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)]
    assert found[1] == [(34, 3), (11, 9), (3, 27), (1, 81)]
    assert found[2] == [(15, 9), (5, 27), (1, 81)]
    assert found[3:] == [[(8, 27), (2, 81)], [(5, 81)]]
    assert [one.skipped for one in brackets] == [0, 1, 2, 3, 4]
    assert WAYS[HYPERBAND].num_full == 16


def test_a_bayesian_search_waits_for_each_run():
    assert WAYS[BAYESIAN].wall_hours == 64 + 24 * 64
    assert WAYS[RANDOM].wall_hours == 4 * 64


def test_a_search_that_resumes_tries_more_for_the_same_budget():
    assert WAYS[RESUMED].num_configs == 270
    assert WAYS[ASHA].num_configs == 288
    assert all(one.gpu_hours <= 2048 * (1 + 1e-9) for one in PLAN.strategies)


def test_the_chance_of_random_draws():
    assert [draws_needed(share, 0.95) for share in (0.05, 0.1, 0.01)] == [59, 29, 299]
    assert chance_of_best(59, 0.05) >= 0.95 > chance_of_best(58, 0.05)
    assert chance_of_best(32, 0.05) == pytest.approx(1 - 0.95**32)


@given(st.integers(1, 10**9), st.integers(1, 12))
def test_a_grid_is_the_largest_that_fits(num, dimensions):
    values = grid_values(num, dimensions)
    assert values**dimensions <= num < (values + 1) ** dimensions


@pytest.mark.parametrize(
    ("num", "eta", "noise", "expected"),
    [
        (81, 3, 0.5, 0.999),
        (81, 3, 1.0, 0.956),
        (81, 3, 2.0, 0.770),
        (64, 4, 0.5, 0.994),
        (64, 4, 1.0, 0.902),
        (64, 4, 2.0, 0.665),
    ],
)
def test_the_best_under_early_noise(num, eta, noise, expected):
    found = chance_best_survives(num, eta, noise)
    assert abs(found.chance - expected) < 3 * math.hypot(found.error, 0.003)  # both Monte Carlo


def test_student_quantiles():
    for num, expected in ((2, 12.706), (3, 4.303), (5, 2.776), (10, 2.262)):
        assert student_quantile(0.975, num - 1) == pytest.approx(expected, abs=5e-4)
        assert mean_half_width(2.0, num) == pytest.approx(expected * 2 / math.sqrt(num), rel=1e-3)
        assert next_half_width(2.0, num) == pytest.approx(
            expected * 2 * math.sqrt(1 + 1 / num), rel=1e-3
        )
    assert student_below(1.0, 1) == pytest.approx(0.75)
    assert student_below(-1.0, 1) == pytest.approx(0.25)
    assert student_quantile(0.975, 1001) == pytest.approx(student_quantile(0.975, 1000), abs=1e-5)


def test_student_below_is_as_drawn():
    draws = np.random.default_rng(2).standard_t(4, size=200_000)
    for t in (-1.5, 0.3, 2.0):
        assert student_below(t, 4) == pytest.approx((draws < t).mean(), abs=0.004)


def test_the_next_run_falls_outside_three_half_of_the_time():
    assert chance_next_inside(3) == 0.5
    draws = np.random.default_rng(4).standard_normal((100_000, 5))
    inside = (draws[:, 4] > draws[:, :4].min(axis=1)) & (draws[:, 4] < draws[:, :4].max(axis=1))
    assert inside.mean() == pytest.approx(chance_next_inside(4), abs=0.01)


def test_winners_curse():
    found = winners_curse(64, 1.0)
    assert (found.value, found.overstated) == pytest.approx((1.657, 1.657), abs=5e-4)
    quality = np.random.default_rng(6).standard_normal((40_000, 64))
    score = quality + 0.5 * np.random.default_rng(7).standard_normal(quality.shape)
    at = score.argmax(axis=1)[:, None]
    value = np.take_along_axis(quality, at, axis=1).mean()
    found = winners_curse(64, 0.5)
    assert found.value == pytest.approx(value, abs=0.01)
    assert found.overstated == pytest.approx(score.max(axis=1).mean() - value, abs=0.01)
    assert winners_curse(1, 2.0).value == pytest.approx(0, abs=1e-12)
    assert winners_curse(64, 0.0).overstated == 0


@given(st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_seeds_needed_are_the_fewest(noise, difference):
    needed = seeds_needed(noise, difference)
    assert difference_half_width(noise, needed) <= difference
    if needed > 2:
        assert difference_half_width(noise, needed - 1) > difference


def played(noise: Noise, budget: Budget = BUDGET, num: int = 150, minor: float = 0.1):
    plan = plan_search(budget, 0.05)
    done = []
    found = play(
        plan,
        budget,
        noise,
        minor_weight=minor,
        num_searches=num,
        progress=lambda part, parts: done.append((part, parts)),
    )
    assert done == [(part, len(found.found)) for part in range(len(found.found))]
    return found


def test_early_noise_costs_those_that_cut_and_no_one_else():
    loud = played(Noise(0.25, early=10.0))
    assert loud.worst == "early noise"
    assert loud.left_out == ()
    regret = {(one.name, one.noise): one for one in loud.found}
    for name in (RESTARTED, RESUMED, ASHA):
        quiet, noisy = regret[name, "no early noise"], regret[name, "early noise"]
        error = math.hypot(quiet.regret_error, noisy.regret_error)
        assert noisy.regret > quiet.regret + 2 * error
        assert 0 < quiet.regret_error < 0.05
    for name in (GRID, RANDOM, BAYESIAN):
        assert (name, None) in regret
    assert regret[BAYESIAN, None].regret < regret[RANDOM, None].regret


def test_slow_starters_that_are_most_are_told_as_such():
    found = played(Noise(0.0, slow_share=0.5, slow_by=50.0), num=100)
    assert found.worst == "slow starters"
    assert found.survivals == {}
    regret = {(one.name, one.noise): one.regret for one in found.found}
    assert regret[RESTARTED, "slow starters"] > regret[RESTARTED, "no early noise"]


def test_without_noise_a_score_says_what_it_is():
    found = played(Noise(0.0), num=60)
    assert all(one.overstated == 0 for one in found.found)
    assert all(one.regret > 0 for one in found.found)


def test_random_search_finds_the_best_share_as_often_as_its_draws_say():
    found = played(Noise(0.0), num=400, budget=Budget(2048.0, 64.0, 64.0, 3, 4, 8, 8, 1))
    one = next(one for one in found.found if one.name == RANDOM)
    assert abs(one.good - chance_of_best(32, 0.05)) < 4 * one.good_error


def test_where_one_setting_matters_a_grid_repeats_itself():
    found = {one.name: one for one in played(Noise(0.0), minor=0.0, num=400).found}
    cells = (1 / 48) / math.sqrt(7 / 180)  # the mean of the squared distance in a cell of a half
    assert abs(found[GRID].regret - cells) < 4 * found[GRID].regret_error
    assert found[RANDOM].regret < found[GRID].regret / 5


def test_the_same_numbers_every_time():
    assert played(Noise(0.25, 1.0), num=50) == played(Noise(0.25, 1.0), num=50)


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (
            Budget(32.0, 64.0, 2.0, 3, 4, 8, 8, 1),
            "--budget-gpu-hours 32, --run-gpu-hours 64: expected a budget of one full run or more, "
            "found 0.5 of one. Raise the budget, or make the runs shorter.",
        ),
        (
            Budget(2048.0, 64.0, 65.0, 3, 4, 8, 8, 1),
            "--least-gpu-hours 65: expected no more than a full run's 64, found more. Lower it, or "
            "raise --run-gpu-hours.",
        ),
        (
            Budget(1e9, 1.0, 1e-3, 3, 4, 8, 8, 1),
            "--budget-gpu-hours 1e+09, --run-gpu-hours 1: expected a search of 1e+09 "
            "configurations at most, found more. Lower the budget, or raise --run-gpu-hours or "
            "--least-gpu-hours.",
        ),
    ],
)
def test_an_impossible_budget_is_refused(budget, told):
    with pytest.raises(TapelineError) as error:
        plan_search(budget, 0.05)
    assert str(error.value) == told


def test_a_budget_beyond_simulation_is_still_planned():
    budget = Budget(5e5, 1.0, 0.1, 3, 30, 8, 8, 1)
    found = played(Noise(0.25, 1.0), budget=budget, num=50)
    assert found.left_out == (RANDOM, BAYESIAN, RESTARTED, RESUMED, HYPERBAND, ASHA)
    assert [one.name for one in found.found] == [GRID]  # of one point in 30 dimensions
    assert found.survivals == {}


def test_a_budget_that_cannot_be_simulated_at_all_is_refused():
    with pytest.raises(TapelineError) as error:
        played(Noise(0.25, 1.0), budget=Budget(5e5, 1.0, 0.1, 3, 1, 8, 8, 1), num=50)
    assert str(error.value) == (
        "--simulate 50: expected a search of few enough runs to play out, found 500,000 full "
        "runs. Simulate a smaller budget, or leave the simulation out."
    )


def test_a_way_that_is_too_dear_is_left_out():
    plan = plan_search(Budget(200.0, 64.0, 2.0, 3, 4, 8, 8, 1), 0.05)
    assert [one.name for one in plan.left_out] == [RESTARTED, HYPERBAND]
    assert plan.left_out[0].why == (
        "its smallest round takes 256 GPU-hours, more than the 200 there are"
    )


budgets = st.builds(
    lambda run, times, least, eta, dimensions, first, workers, per_run: Budget(
        run * times, run, run * least, eta, dimensions, first, workers, per_run
    ),
    st.floats(1e-3, 1e4),
    st.floats(1, 1000),
    st.floats(0.001, 1),
    st.integers(2, 8),
    st.integers(1, 20),
    st.integers(1, 50),
    st.integers(1, 100),
    st.integers(1, 64),
)


@given(budgets, st.floats(1e-6, 0.5))
def test_any_budget_is_kept(budget, best_share):
    plan = plan_search(budget, best_share)
    for one in plan.strategies:
        assert 1 <= one.num_distinct <= one.num_configs
        assert one.num_full >= 1
        assert 0 < one.gpu_hours <= budget.gpu_hours * (1 + 1e-9)
        least = one.gpu_hours / (budget.workers * budget.per_run)
        assert least * (1 - 1e-9) <= one.wall_hours < math.inf
        for rungs in (steps.rungs for steps in one.ladders):
            counts = [rung.num_configs for rung in rungs]
            assert counts == sorted(counts, reverse=True)
            assert counts[-1] >= 1
            assert rungs[-1].gpu_hours == budget.run_gpu_hours
            assert rungs[0].gpu_hours >= budget.least_gpu_hours * (1 - 1e-9)


@settings(max_examples=5)
@given(budgets, st.floats(0.001, 10), st.floats(0.001, 100), st.floats(0, 1))
def test_any_simulation_is_whole(budget, seed, early, slow):
    found = played(Noise(seed, early, slow, 2.0), budget=budget, num=50)
    for one in found.found:
        assert 0 <= one.regret < 100
        assert 0 <= one.regret_error < math.inf
        assert 0 <= one.good <= 1
        assert math.isfinite(one.overstated)


@pytest.fixture
def printed(tapeline):
    """What the verb returns: exit code, standard output and error."""
    return functools.partial(tapeline, "plan", "search")


def test_the_verb_says_what_a_budget_pays_for(printed):
    code, out, err = printed()
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "An even grid tries 2 values of each of 4 settings" in text
    assert "59 draws are needed for 95 %" in text
    assert "takes 4 fresh seeds each to tell a difference of 0.500: 512 GPU-hours" in text
    assert "simulated" not in text


def test_the_verb_simulates_when_given_a_noise(tmp_path, printed):
    code, out, err = printed("--early-noise", "2", "--slow-starters", "0", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["inputs"]["simulate"]["value"] == 200
    simulated = found["model"]["simulated"]["found"]
    assert {one["noise"] for one in simulated} == {None, "no early noise", "early noise"}
    assert found["notes"][0].startswith("Least cost per useful conclusion, early noise: ")
    plot = tmp_path / "regret"
    code, out, _ = printed("--simulate", "50", "--plot", str(plot))
    assert code == 0
    assert "Simulated, 50 searches each" in " ".join(out.split())
    assert plot.with_suffix(".svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--eta", "1", "expected a whole number 2 or more, 100 at most, found 1."),
        ("--best-share", "0", "expected a number above 0, 0.5 at most, found 0."),
        ("--simulate", "10", "expected a whole number 50 or more, 2000 at most, found 10."),
        ("--slow-starters", "2", "expected a number 0 or more, 1 at most, found 2."),
    ],
)
def test_a_number_out_of_range_is_refused(option, value, told, printed):
    code, out, err = printed(option, value)
    assert (code, out) == (2, "")
    assert err.startswith(f"tapeline: {option}: {told}")
