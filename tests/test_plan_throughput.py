"""Loaders and stragglers: the golden numbers, queues played out, and properties of any plan."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import FakeClock
from tapeline.ledger import Ledger
from tapeline.plan.job import Job
from tapeline.plan.stragglers import (
    Alike,
    expected_maximum,
    expected_normal_maximum,
    straggling,
)
from tapeline.plan.throughput import (
    NEAR,
    Loader,
    depth_needed,
    plan_throughput,
    prefetch_throughput,
)
from tapeline.runs import RunFolder

JOB = Job(336.0, 64, 2.5)


def plan_of(samples_per_s: float, *, overlapped: bool = True, workers: int = 8):
    return plan_throughput(JOB, 108.0, Loader(samples_per_s, workers, overlapped, 2))


def test_the_default_scenario():
    plan = plan_of(5000.0)
    assert plan.compute_samples_per_s == 6912
    assert plan.fed.utilisation == pytest.approx(0.723, abs=5e-4)
    assert plan.fed.bill.wall_hours == pytest.approx(336 * 6912 / 5000)
    assert plan.starved.wall_hours == pytest.approx(336 * 1912 / 5000)
    assert plan.starved.cost == pytest.approx(plan.starved.wall_hours * 64 * 2.5)
    assert plan.workers_needed == 12  # 11.06 of them


def test_a_loader_beyond_the_compute_buys_nothing_and_half_of_it_doubles_the_bill():
    by_capacity = {one.capacity: one for one in plan_of(5000.0).sweep}
    assert by_capacity[1.25].bill == by_capacity[2.0].bill == by_capacity[1.0].bill
    assert by_capacity[0.5].bill.cost == 2 * by_capacity[1.0].bill.cost
    assert by_capacity[0.5].cost_ratio == 2


def test_in_turn_utilisation_never_reaches_100_percent():
    plan = plan_of(5000.0, overlapped=False)
    assert plan.fed.utilisation == pytest.approx(5000 / 11912)
    assert all(one.utilisation < 1 for one in plan.sweep)
    assert plan.other_way == plan_of(5000.0).fed
    assert plan.workers_needed is None
    assert plan.queue is None


def test_a_perfect_loader_costs_nothing_and_needs_no_workers():
    plan = plan_of(0.0)
    assert (plan.fed.utilisation, plan.starved.wall_hours, plan.starved.cost) == (1.0, 0.0, 0.0)
    assert (plan.workers_needed, plan.queue) == (None, None)


def test_workers_that_are_exactly_enough_are_enough():
    assert plan_of(6912.0, workers=3).workers_needed == 3
    assert plan_of(6912.0 / 3, workers=1).workers_needed == 3
    assert plan_of(6911.0, workers=3).workers_needed == 4


@pytest.mark.parametrize(
    ("loader", "step", "prefetch", "expected"),
    [
        (1, 1, 0, 0.6667),
        (1, 1, 2, 0.8),
        (1, 1, 4, 0.8571),
        (1.5, 1, 2, 0.9242),
        (0.8, 1, 2, 0.7025),
    ],
)
def test_finite_prefetch(loader, step, prefetch, expected):
    found = prefetch_throughput(loader, step, prefetch)
    assert found == pytest.approx(expected, abs=5e-5)
    assert prefetch_throughput(step, loader, prefetch) == found


@pytest.mark.parametrize(("capacity", "prefetch"), [(1.0, 0), (1.5, 2), (0.8, 2)])
def test_finite_prefetch_is_what_a_played_out_queue_does(capacity, prefetch):
    """Batches in order: one is made once the place of the one `prefetch + 1` before it is free."""
    generator = np.random.default_rng(3)
    num = 100_000
    making = (generator.standard_exponential(num) / capacity).tolist()
    stepping = generator.standard_exponential(num).tolist()
    taken = [0.0] * num  # when the step takes a batch out of the queue
    handed = ended = 0.0  # by the loader, by the step
    for n in range(num):
        made = handed + making[n]
        free = taken[n - prefetch] if n >= prefetch and prefetch else 0.0
        if not prefetch:  # it is handed over, not put down
            free = ended
        handed = max(made, free)
        taken[n] = max(handed, ended)
        ended = taken[n] + stepping[n]
    assert num / ended == pytest.approx(prefetch_throughput(capacity, 1.0, prefetch), abs=0.01)


@pytest.mark.parametrize("capacity", [0.1, 0.72, 0.99, 1.0, 1.01, 3.0])
def test_the_depth_needed_is_the_first_that_is_near_the_limit(capacity):
    depth, limit = depth_needed(capacity), min(capacity, 1.0)
    assert prefetch_throughput(capacity, 1.0, depth) >= NEAR * limit * (1 - 1e-9)
    if depth:
        assert prefetch_throughput(capacity, 1.0, depth - 1) < NEAR * limit
    assert depth_needed(1.0) == 97


@pytest.mark.parametrize(
    ("num", "expected"),
    [
        (1, 0.0),
        (2, 0.5642),
        (4, 1.0294),
        (8, 1.4236),
        (16, 1.7660),
        (32, 2.0697),
        (64, 2.3437),
        (128, 2.5946),
        (256, 2.8269),
        (512, 3.0439),
        (1024, 3.2482),
        (16384, 3.9714),
    ],
)
def test_the_expected_maximum_of_normal_times(num, expected):
    assert expected_normal_maximum(num) == pytest.approx(expected, abs=6e-5)
    found = straggling(num, step_cv=0.1, slow_rank=1.0)
    assert found.random == pytest.approx(1 + 0.1 * expected, abs=1e-5)
    assert found.lost == pytest.approx(1 - 1 / (1 + 0.1 * expected), abs=1e-5)


def test_a_slow_rank_costs_the_same_at_any_number():
    for num in (1, 8, 16384):
        found = straggling(num, step_cv=0.0, slow_rank=1.5)
        assert (found.random, found.both) == (1.0, 1.5)
    near = straggling(64, step_cv=0.01, slow_rank=1.5)
    assert near.both == pytest.approx(1.5, abs=1e-4)


def test_random_variation_and_a_slow_rank_together_are_as_drawn():
    draws = np.random.default_rng(5).normal(1.0, 0.1, size=(200_000, 16))
    draws[:, 0] *= 1.2
    slowest = draws.max(axis=1)
    found = straggling(16, step_cv=0.1, slow_rank=1.2)
    error = slowest.std() / math.sqrt(len(slowest))
    assert abs(slowest.mean() - found.both) < 4 * error
    assert found.both > max(found.random, 1.2)


def test_the_maximum_of_constants_is_the_largest():
    assert expected_maximum([Alike(3, 1.0, 0.0), Alike(1, 2.0, 0.0)]) == 2.0


rates = st.floats(1e-6, 1e12)


@given(rates, rates, st.floats(1, 1e6), st.booleans(), st.integers(0, 100))
def test_any_plan_is_whole_and_a_faster_loader_never_costs_more(
    compute, loader, faster, overlapped, prefetch
):
    plans = [
        plan_throughput(JOB, compute, Loader(rate, 4, overlapped, prefetch))
        for rate in (loader, loader * faster, 0.0)
    ]
    for plan in plans:
        for fed in (plan.fed, plan.other_way, *plan.sweep):
            assert 0 < fed.utilisation <= 1
            assert fed.bill.cost == pytest.approx(fed.bill.wall_hours * 64 * 2.5)
            assert fed.bill.wall_hours == pytest.approx(336 * fed.cost_ratio)
        assert 0 <= plan.starved.wall_hours < math.inf
        shares = [one.utilisation for one in plan.queue.depths] if plan.queue else []
        assert all(0 <= share <= 1 for share in shares)
        assert shares == sorted(shares)
    slow, fast, perfect = (plan.fed.bill.cost for plan in plans)
    assert slow * (1 + 1e-12) >= fast
    assert fast * (1 + 1e-12) >= perfect


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(0, 1), st.floats(1, 1e6))
def test_any_straggling_is_whole_and_more_ranks_never_wait_less(num, more, cv, slow):
    few, many = (straggling(n, step_cv=cv, slow_rank=slow) for n in sorted((num, more)))
    assert 1 <= few.random <= many.random * (1 + 1e-9)
    assert few.both >= max(few.random, slow)
    assert 0 <= few.lost_random <= few.lost < 1
    assert few.both <= many.both * (1 + 1e-6)


@pytest.fixture
def printed(tapeline):
    """What the verb returns: exit code, standard output and error."""
    return functools.partial(tapeline, "plan", "throughput")


def test_the_verb_says_what_waiting_costs(printed):
    code, out, err = printed("--slow-rank", "1.3")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert (
        "they compute 72.34 % of the time, 128 h and 20,558 are paid for waiting. It must give "
        "6,912 samples a second" in text
    )
    assert "That takes 12 workers" in text
    assert "One rank 1.3 times slower costs 23.08 % by itself, at any number of ranks" in text


def test_the_verb_in_json_and_as_a_figure(tmp_path, printed):
    code, out, _ = printed(
        "--no-overlap", "--accelerators", "8", "--json", "--plot", str(tmp_path / "sweep")
    )
    assert code == 0
    found = json.loads(out)
    assert found["inputs"]["ranks"] == {"value": 8.0, "source": "default", "detail": ""}
    assert found["model"]["overlapped"] is False
    assert found["model"]["stragglers"][3]["num_ranks"] == 8
    assert (tmp_path / "sweep.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--loader-samples-per-second", "-1", "expected a number 0 or more and finite, found -1."),
        ("--step-cv", "2", "expected a number 0 or more, 1 at most, found 2."),
        ("--slow-rank", "0.5", "expected a number 1 or more, 1e+06 at most, found 0.5."),
        ("--ranks", "0", "expected a whole number above 0, 1e+09 at most, found 0."),
    ],
)
def test_a_number_out_of_range_is_refused(option, value, told, printed):
    code, out, err = printed(option, value)
    assert (code, out) == (2, "")
    assert err.startswith(f"tapeline: {option}: {told}")
    assert err.count("\n") == 1


@pytest.fixture
def run(tmp_path):
    """A run of one rank: batches of 100, 2 ms of data and 8 ms of compute a step."""
    clock = FakeClock(wall_ns=1_800_000_000_000_000_000)
    folder = RunFolder(tmp_path / "run", clock)
    folder.create({"format": "tapeline run", "version": 1, "config": {"training": {"batch": 100}}})
    with Ledger(folder.path, clock=clock) as ledger:
        for step in range(1, 51):
            ledger.switch("data")
            clock.advance(2_000_000)
            ledger.switch("compute")
            clock.advance(8_000_000)
            ledger.step_done(step)
    return folder.path


def test_a_run_gives_both_rates_and_its_utilisation_comes_out(run, printed):
    code, out, err = printed("--from-run", str(run), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["inputs"]["samples_per_second"] == {
        "value": pytest.approx(12_500),
        "source": "measured",
        "detail": f"{run}, a batch of 100 over 1 ranks, compute a mean over 50 steps in the ledger",
    }
    assert found["inputs"]["loader_samples_per_second"]["value"] == pytest.approx(10_000)
    assert found["inputs"]["accelerators"]["value"] == 1
    assert found["model"]["fed"]["utilisation"] == pytest.approx(0.8)
    assert found["model"]["other_way"] is None  # what it would give by itself wasn't measured


def test_a_runs_loader_is_not_taken_for_one_that_works_in_turn(run, printed):
    code, out, err = printed("--from-run", str(run), "--no-overlap")
    assert (code, out, err) == (
        2,
        "",
        "tapeline: --no-overlap: expected --loader-samples-per-second beside it, found the rate of "
        "a run whose loader worked alongside the compute. Give the loader's own rate.\n",
    )
    given = ("--loader-samples-per-second", "50000")
    code, out, _ = printed("--from-run", str(run), "--no-overlap", *given, "--json")
    assert code == 0
    assert json.loads(out)["model"]["fed"]["utilisation"] == pytest.approx(0.8)
