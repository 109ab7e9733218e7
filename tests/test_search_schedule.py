"""Who runs what next: rungs, promotions, budgets, leases, and what a search finds on a surface."""

from __future__ import annotations

import heapq
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.search.schedule import MOST_DEATHS, Job, Rules, Schedule

RUNGS = (1, 3, 9, 27)


def rules(**changes) -> Rules:
    known = {
        "rungs": RUNGS,
        "eta": 3,
        "min_peers": 3,
        "budget_steps": 1000,
        "most_trials": None,
        "picks": 0,
        "seeds": 2,
    }
    return Rules(**{**known, **changes})


def done(schedule: Schedule, lease: int, score: float) -> Job:
    job = schedule.assign(lease)
    assert job is not None
    schedule.end(lease, score)
    return job


def test_nobody_goes_on_before_there_are_enough_peers():
    schedule = Schedule(rules(min_peers=5))
    jobs = [done(schedule, lease, float(lease)) for lease in range(6)]
    assert jobs == [*(Job(trial, 0) for trial in range(5)), Job(0, 1)]


def test_the_best_third_goes_on_and_the_highest_rung_is_served_first():
    schedule = Schedule(rules())
    scores = [3.0, 1.0, 2.0, 5.0, 4.0, 0.5]
    for lease in range(3):
        done(schedule, lease, scores[lease])
    assert done(schedule, 3, 1.0) == Job(1, 1)
    assert schedule.next_job() == Job(3, 0)  # one in three has gone on


def test_one_that_comes_in_front_of_those_that_went_on_goes_on_too():
    schedule = Schedule(rules())
    for lease in range(3):
        done(schedule, lease, float(lease))
    assert done(schedule, 3, 0.0) == Job(0, 1)
    assert done(schedule, 4, -1.0) == Job(3, 0)
    assert schedule.next_job() == Job(3, 1)


def test_what_is_no_number_is_a_peer_behind_all_and_never_goes_on():
    schedule = Schedule(rules())
    for lease, score in enumerate([math.nan, math.nan, math.nan]):
        done(schedule, lease, score)
    assert schedule.next_job() == Job(3, 0)
    done(schedule, 3, 1e9)
    assert schedule.next_job() == Job(3, 1), "the worst number is before what is none"
    assert schedule.best(9) == [(3, 0, 1e9)]


def test_a_job_that_was_given_back_is_next_and_fails_after_too_many_deaths():
    schedule = Schedule(rules())
    schedule.assign(0)
    assert schedule.give_back(0, died=False) is None
    for lease in range(1, MOST_DEATHS):
        assert schedule.assign(lease) == Job(0, 0)
        assert schedule.give_back(lease, died=True) is None
    assert schedule.assign(MOST_DEATHS) == Job(0, 0)
    assert schedule.give_back(MOST_DEATHS, died=True) == Job(0, 0)
    assert math.isnan(schedule.scores[0][0])
    assert schedule.next_job() == Job(1, 0)
    assert schedule.spent_steps == 1, "a stretch is paid for once"


def test_a_search_in_which_all_fail_has_an_end():
    schedule = Schedule(rules(rungs=(27,), budget_steps=60))
    for lease in range(2):
        done(schedule, lease, math.nan)
    assert schedule.is_over


@pytest.mark.parametrize("budget", [27, 28, 30, 40, 100])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_however_small_the_budget_one_trial_is_run_to_the_end(budget, workers):
    schedule = Schedule(rules(budget_steps=budget))
    lease, running = 0, []
    while not schedule.is_over:
        while len(running) < workers and (job := schedule.assign(lease)):
            running.append((lease, job))
            lease += 1
        ended, job = running.pop(0)
        schedule.end(ended, float(-job.trial))
    assert schedule.scores[-1]
    assert schedule.spent_steps <= budget


def test_finals_come_last_each_pick_with_each_seed():
    schedule = Schedule(rules(rungs=(27,), budget_steps=81, picks=2))
    for lease, score in enumerate([2.0, 3.0, 1.0]):
        assert schedule.next_job().seed is None
        done(schedule, lease, score)
    wanted = [Job(trial, 0, seed) for trial in (2, 0) for seed in (0, 1)]
    assert [done(schedule, 10 + n, float(n)) for n in range(4)] == wanted
    assert schedule.is_over
    assert schedule.finals == {2: {0: 0.0, 1: 1.0}, 0: {0: 2.0, 1: 3.0}}
    assert schedule.spent_steps == 81


def test_a_search_in_which_all_failed_ends_without_finals():
    schedule = Schedule(rules(rungs=(27,), budget_steps=27, picks=2))
    done(schedule, 0, math.nan)
    assert schedule.is_over


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), max_size=80))
def test_whatever_happens_every_step_is_paid_for_once_and_nothing_is_given_out_twice(events):
    schedule = Schedule(rules(budget_steps=60))
    out: list[int] = []
    for lease, (kind, value) in enumerate(events):
        if kind <= 1 or not out:
            if schedule.assign(lease):
                out.append(lease)
        elif kind == 2:
            schedule.end(out.pop(0), math.nan if value == -5 else float(value))
        else:
            schedule.give_back(out.pop(0), died=value > 0)
        running = list(schedule.running.values())
        assert len(set(running)) == len(running)
        assert schedule.spent_steps <= 60
        made = {(trial, rung) for rung, found in enumerate(schedule.scores) for trial in found}
        assert not made & {(job.trial, job.rung) for job in running}
        paid = made | {(job.trial, job.rung) for job in [*running, *schedule._returned]}
        assert schedule.spent_steps == sum(schedule.added_steps(rung) for _, rung in paid)


class Surface:
    """A bowl in the unit square with its bottom anywhere; quality has standard deviation 1."""

    def __init__(self, seed: int, early_noise: float) -> None:
        self._draws = np.random.default_rng(seed)
        self._bottom = self._draws.random(4)
        self._weights = np.array([1.0, 0.1, 0.1, 0.1])
        self._noise = early_noise
        self._quality: list[float] = []
        many = self._of(self._draws.random((20_000, 4)))
        self._scale = float(many.std())
        self.good = float(np.quantile(many / self._scale, 0.05))

    def quality(self, trial: int) -> float:
        while trial >= len(self._quality):
            self._quality.append(float(self._of(self._draws.random(4))) / self._scale)
        return self._quality[trial]

    def score(self, trial: int, rung: int, top: int) -> float:
        left = self._noise * (1 - rung / top) if top else 0.0
        return self.quality(trial) + left * float(self._draws.standard_normal())

    def _of(self, x):
        return ((x - self._bottom) ** 2 * self._weights).sum(axis=-1)


def compute_until_found(surface: Surface, rungs: tuple[int, ...], workers: int) -> int:
    """Steps given out until a full run of one of the best 5 % has ended, with workers at once."""
    schedule = Schedule(rules(rungs=rungs, budget_steps=10**6))
    now, running, top = 0.0, [], len(rungs) - 1
    for lease in range(10**6):
        while len(running) == workers:
            now, before, job = heapq.heappop(running)
            if job.rung == top and surface.quality(job.trial) <= surface.good:
                return schedule.spent_steps
            schedule.end(before, surface.score(job.trial, job.rung, top))
        job = schedule.assign(lease)
        heapq.heappush(running, (now + schedule.added_steps(job.rung), lease, job))
    raise AssertionError


def share_of_random(early_noise: float, workers: int, num_seeds: int = 20) -> tuple[float, float]:
    """Steps of halving over those of random search, the ratio of means; its standard error."""
    pairs = [
        (
            compute_until_found(Surface(seed, early_noise), RUNGS, workers),
            compute_until_found(Surface(seed, 0.0), RUNGS[-1:], workers),
        )
        for seed in range(num_seeds)
    ]
    halved, full = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    ratio = halved / full
    strays = [one - ratio * other for one, other in pairs]  # the delta method
    return ratio, statistics.stdev(strays) / full / math.sqrt(num_seeds)


def test_halving_finds_one_of_the_best_for_a_third_of_random_s_compute():
    ratio, error = share_of_random(0.0, workers=1)
    assert ratio + 2 * error <= 1 / 3
    assert share_of_random(0.0, workers=4)[0] <= 1 / 3, "with what others run meanwhile"


def test_early_noise_takes_its_advantage():
    quiet, noisy, deaf = (share_of_random(noise, workers=4)[0] for noise in (0.0, 2.0, 4.0))
    assert quiet < noisy < deaf
