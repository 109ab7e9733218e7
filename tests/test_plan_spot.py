"""Spot or on demand: where the two break even, by the notice and by the way of saving."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan.job import Job
from tapeline.plan.saving import Failures, Save, three_ways
from tapeline.plan.spot import FACTORS, Interruptions, plan_spot
from tapeline.reliability import efficiency, exact_interval_s

HOUR = 3600.0
JOB = Job(336.0, 64, 2.5)
FAILING = Failures(6 * HOUR, 720.0)
ONE, SHARDS, BACKGROUND = three_ways(
    checkpoint_s=180.0, num_shards=8, async_fraction=0.1, slowdown=0.0
)


def way(save: Save, mean_s: float, notice_s: float, price: float = 1.0, failures=FAILING):
    return plan_spot([save], failures, Interruptions(mean_s, notice_s), JOB, price).ways[0]


def test_without_a_notice_an_interruption_is_one_more_failure():
    found = way(ONE, 4 * HOUR, 0.0)
    assert not found.saves_in_notice
    mtbf_s = 1 / (1 / (6 * HOUR) + 1 / (4 * HOUR))
    best = exact_interval_s(blocking_s=180.0, mtbf_s=mtbf_s)
    expected = efficiency(best, blocking_s=180.0, mtbf_s=mtbf_s, restart_s=720.0)
    assert found.spot.interval_s == best
    assert found.spot.efficiency == pytest.approx(expected, rel=1e-12)
    assert found.spot.cost_per_useful_hour == pytest.approx(1.0 / expected)
    assert found.on_demand.efficiency == pytest.approx(0.8477, abs=1e-4)


def test_a_save_within_the_notice_costs_the_save_and_a_restart():
    found = way(SHARDS, 4 * HOUR, 22.5)
    assert found.saves_in_notice
    assert found.spot.interval_s == found.on_demand.interval_s
    kept = 4 * HOUR / (4 * HOUR + 22.5 + 720.0)
    assert found.spot.efficiency == pytest.approx(found.on_demand.efficiency * kept)
    assert found.break_even_discount == pytest.approx(1 - kept)
    assert not way(SHARDS, 4 * HOUR, 22.4).saves_in_notice


@pytest.mark.parametrize("save", [ONE, SHARDS, BACKGROUND], ids=lambda one: one.name)
def test_at_the_break_even_both_cost_the_same(save):
    found = way(save, 4 * HOUR, 120.0, price=2.0)
    at_mean = way(save, found.break_even_s, 120.0, price=2.0)
    cost = at_mean.on_demand.cost_per_useful_hour
    assert at_mean.spot.cost_per_useful_hour == pytest.approx(cost, rel=1e-6)
    at_price = way(save, 4 * HOUR, 120.0, price=2.5 * (1 - found.break_even_discount))
    assert at_price.spot.cost_per_useful_hour == pytest.approx(cost)


def test_spot_that_is_no_cheaper_by_the_hour_never_pays():
    found = way(SHARDS, 1000 * HOUR, 120.0, price=2.5)
    assert found.break_even_s is None
    assert not found.pays


def test_cheap_checkpoints_make_spot_pay_where_dear_ones_do_not():
    plan = plan_spot([ONE, BACKGROUND], FAILING, Interruptions(1800.0, 120.0), JOB, 1.6)
    assert [one.pays for one in plan.ways] == [False, True]
    assert plan.best == BACKGROUND.name
    assert plan.take_spot


def test_rarer_interruptions_are_shown_beside():
    found = way(ONE, 4 * HOUR, 120.0)
    assert [mean_s for mean_s, _ in found.sensitivity] == [4 * HOUR * f for f in FACTORS]
    costs = [offer.cost_per_useful_hour for _, offer in found.sensitivity]
    assert costs == sorted(costs, reverse=True)
    assert found.sensitivity[2][1] == found.spot


def test_where_no_work_gets_done_there_is_no_price():
    with pytest.raises(TapelineError) as error:
        way(ONE, 4 * HOUR, 0.0, failures=Failures(60.0, 720.0))
    assert str(error.value) == (
        "one writer, synchronous, on demand: expected a millionth or more of the time to be "
        "useful, found less at any interval. Give a longer time between failures or "
        "interruptions, or a shorter restart."
    )


@given(
    st.floats(60, 1e6),
    st.floats(0, 600),
    st.floats(0.01, 5),
    st.floats(0.05, 1),
    st.integers(1, 64),
)
def test_any_plan_is_whole_and_cheaper_saves_never_cost_more(mean_s, notice_s, price, less, num):
    restart_s = min(720.0, mean_s)
    failures = replace(FAILING, restart_s=restart_s)
    saves = three_ways(
        checkpoint_s=min(180.0, mean_s), num_shards=num, async_fraction=0.1, slowdown=0.1
    )
    plan = plan_spot(saves, failures, Interruptions(mean_s, notice_s), JOB, price)
    for one, save in zip(plan.ways, saves, strict=True):
        for offer in (one.on_demand, one.spot, *(offer for _, offer in one.sensitivity)):
            numbers = [v for v in asdict(offer).values() if isinstance(v, float)]
            assert all(math.isfinite(v) and v >= 0 for v in numbers)
            assert offer.bill.cost == pytest.approx(
                offer.bill.wall_hours * 64 * offer.price_per_hour
            )
            assert offer.bill.cost == pytest.approx(offer.cost_per_useful_hour * 336 * 64)
        assert one.spot.efficiency <= one.on_demand.efficiency
        assert (1 - one.break_even_discount) * 2.5 > price or not one.pays
        cheaper = replace(save, snapshot_s=save.snapshot_s * less, write_s=save.write_s * less)
        after = way(cheaper, mean_s, 0.0, price, failures).spot
        before = way(save, mean_s, 0.0, price, failures).spot
        assert after.cost_per_useful_hour <= before.cost_per_useful_hour * (1 + 1e-9)


def test_a_way_that_carries_nothing_is_left_out_of_the_others():
    hour_long = replace(ONE, write_s=100 * 6 * HOUR)
    plan = plan_spot([hour_long, BACKGROUND], FAILING, Interruptions(4 * HOUR, 120.0), JOB, 1.0)
    assert [one.name for one in plan.ways] == [BACKGROUND.name]
    assert plan.refused[0].name == ONE.name
    assert "expected a millionth or more of the time to be useful" in plan.refused[0].why
