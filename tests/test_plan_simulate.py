"""Failures played out: the models of saving hold within their standard errors.

The seeds are fixed, so what passes here passes again; the bounds are those of chance, three
standard errors, and of the model where it is only of first order.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tapeline.plan.job import Job
from tapeline.plan.simulate import Schedule, failure_times_s, simulate
from tapeline.plan.tiers import FailureClass, plan_tiers
from tapeline.reliability import efficiency, exact_interval_s

HOUR = 3600.0
DALY = [(5, 1440, 10), (5, 360, 10), (5, 15, 10), (1, 60, 0), (30, 60, 0), (60, 30, 0)]
WEIBULL = {"shape": 0.7, "num_machines": 16_384}


def played(schedule: Schedule, mtbf: float, restart: float, num: int = 8000, seed=1, **lives):
    times = failure_times_s(mtbf, num * mtbf, np.random.default_rng(seed), **lives)
    return simulate(schedule, [times], restart)


@pytest.mark.parametrize("lives", [{}, WEIBULL], ids=["exponential", "Weibull 0.7"])
@pytest.mark.parametrize(("c", "m", "r"), DALY)
def test_daly_efficiencies(c, m, r, lives):
    """Published cases, at the optimum, twice and half of it; in minutes."""
    best = exact_interval_s(blocking_s=c, mtbf_s=m)
    for seed, factor in enumerate((1, 2, 0.5)):
        found = played(Schedule(best * factor, (c,)), m, r, seed=seed, **lives)
        expected = efficiency(best * factor, blocking_s=c, mtbf_s=m, restart_s=r)
        assert abs(found.mean - expected) < 3 * found.standard_error
        assert found.standard_error < 0.007


def test_daly_efficiencies_deviate_as_chance_does():
    """Too large standard errors would hide a wrong model; too small ones are seen above."""
    deviations = []
    for number, (c, m, r) in enumerate(DALY * 6):
        best = exact_interval_s(blocking_s=c, mtbf_s=m)
        found = played(Schedule(best, (c,)), m, r, num=3000, seed=100 + number)
        expected = efficiency(best, blocking_s=c, mtbf_s=m, restart_s=r)
        deviations.append((found.mean - expected) / found.standard_error)
    assert 0.7 < np.sqrt(np.mean(np.square(deviations))) < 1.4
    assert abs(np.mean(deviations)) < 3 / math.sqrt(len(deviations))


def test_failures_of_one_machine_that_come_in_groups_follow_their_renewal_sum():
    """`T/M sum P(life > R + k (T + C))`: what a save adds if the life outlasts it."""
    c, m, r, interval = 5.0, 360.0, 10.0, 56.7
    found = played(Schedule(interval, (c,)), m, r, num=20000, shape=0.7)
    scale = m / math.gamma(1 + 1 / 0.7)
    outlasts = np.exp(-(((r + np.arange(1, 5000) * (interval + c)) / scale) ** 0.7))
    expected = interval / m * outlasts.sum()
    assert abs(found.mean - expected) < 3 * found.standard_error
    exponential = efficiency(interval, blocking_s=c, mtbf_s=m, restart_s=r)
    assert expected > exponential + 0.005  # groups lose less: the long lives are longer


def test_a_write_in_flight_falls_back_to_the_save_before():
    interval, p, m = 300.0, 200.0, 6 * HOUR
    found = played(Schedule(interval, (10.0,), in_flight_s=p), m, 720.0, num=20000)
    expected = efficiency(interval, blocking_s=10.0, mtbf_s=m, restart_s=720.0 + p)
    assert abs(found.mean - expected) < 3 * found.standard_error
    without = efficiency(interval, blocking_s=10.0, mtbf_s=m, restart_s=720.0)
    assert without - found.mean > 10 * found.standard_error


def test_the_optimum_of_two_classes():
    classes = [FailureClass("process", 6 * HOUR, 2.0), FailureClass("node", 72 * HOUR, 60.0)]
    plan = plan_tiers(classes, 0.0, Job(336, 64, 2.5), floor=0.5)
    first_s, every = plan.tiers[0].interval_s, plan.tiers[1].every

    def lost(interval_s: float, n: int) -> tuple[float, float]:
        generator = np.random.default_rng(7)  # the same failures for all
        horizon_s = 10_000 * 6 * HOUR
        times = [failure_times_s(one.mtbf_s, horizon_s, generator) for one in classes]
        found = simulate(Schedule(interval_s, (2.0, 60.0), (1, n)), times, 0.0)
        return 1 - found.mean, found.standard_error

    best, error = lost(first_s, every)
    assert abs(best - plan.overhead) < 3 * error + plan.overhead**2 / 2  # first order
    for interval_s, n in (
        (first_s * 2, every),
        (first_s / 2, every),
        (first_s, every * 2),
        (first_s, every // 2),
    ):
        assert lost(interval_s, n)[0] > best + 3 * error


def test_lives_have_the_mean_they_should():
    for lives in ({}, {"shape": 0.7}, {"shape": 0.7, "num_machines": 500}, {"shape": 2.0}):
        times = failure_times_s(50.0, 50.0 * 20_000, np.random.default_rng(3), **lives)
        assert len(times) == pytest.approx(20_000, rel=0.05)
        assert (np.diff(times) >= 0).all()
        assert times[-1] < 50.0 * 20_000


def test_saves_are_counted_by_hand():
    schedule = Schedule(10.0, (1.0, 4.0), (1, 3))
    assert [schedule.wall_s(n) for n in range(5)] == [0, 11, 22, 36, 47]
    assert [schedule.num_saves_within(s) for s in (0, 10.9, 11, 35.9, 36, 47)] == [0, 0, 1, 2, 3, 4]
    # Saved at 11, 22 and 36 after each start; a failure after 40 keeps three of them.
    times = np.arange(1, 51) * 1000.0 - 960.0
    kept = simulate(schedule, [times], 960.0)
    assert kept.mean == pytest.approx(50 * 3 * 10 / times[-1])
    assert kept.standard_error < 1e-3
    # Four seconds earlier the third is not done; the dear tier then holds none of the two.
    times = np.arange(1, 51) * 1000.0 - 965.0
    assert simulate(schedule, [times], 965.0).mean == pytest.approx(
        50 * 2 * 10 / times[-1], rel=0.05
    )
    assert simulate(schedule, [np.zeros(0), times], 965.0).mean == 0.0
