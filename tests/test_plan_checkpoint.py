"""Plans of saving: golden numbers, what is refused, and what holds for any valid input."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan import Inputs, Job, Measured, Quantity
from tapeline.plan.checkpoint import FACTORS, plan_checkpoint
from tapeline.plan.saving import Failures, Save, best_interval_s, shares, three_ways
from tapeline.plan.tiers import FailureClass, parse_class, plan_tiers
from tapeline.reliability import Mtbf

HOUR = 3600.0
JOB = Job(336.0, 64, 2.5)
DEFAULT = {"checkpoint_s": 180.0, "num_shards": 8, "async_fraction": 0.1, "slowdown": 0.0}
FAILING = Failures(6 * HOUR, 720.0)


def leaves(value) -> list:
    """All the numbers of a plan."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, float) else []


def test_the_three_ways_of_the_default_scenario():
    plan = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB)
    assert plan.best == "8 shards, asynchronous"
    for one, blocking, interval, overhead in zip(
        plan.strategies,
        (180, 22.5, 2.25),
        (2788.5, 985.9, 311.8),
        (0.162, 0.079, 0.048),
        strict=True,
    ):
        assert one.blocking_s == pytest.approx(blocking)
        assert one.interval_s == pytest.approx(interval, abs=0.05)
        assert one.overhead == pytest.approx(overhead, abs=5e-4)
        assert one.bill.wall_hours == pytest.approx(336 / (1 - one.overhead - one.shares.in_flight))
        assert one.bill.cost == pytest.approx(one.bill.wall_hours * 64 * 2.5)
    assert plan.strategies[2].shares.in_flight == pytest.approx(22.5 / 21600)


def test_an_optimum_is_flat_and_the_same_on_both_sides():
    one = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB).strategies[0]
    assert [row.factor for row in one.sensitivity] == list(FACTORS)
    quarter, half, best, twice, four = (row.overhead for row in one.sensitivity)
    assert half == pytest.approx(twice)
    assert quarter == pytest.approx(four)
    assert half - best == pytest.approx(0.03, abs=5e-3)
    restart = one.shares.restart
    assert (four - restart) / (best - restart) == pytest.approx((4 + 1 / 4) / 2)


def test_the_models_part_where_saves_are_dear():
    cheap, dear = (
        plan_checkpoint([Save("one", 0.0, c)], Failures(1440.0, 10.0), JOB, efficiency_floor=0.01)
        .strategies[0]
        .intervals
        for c in (5.0, 300.0)
    )
    assert (cheap.young_s, cheap.daly_s) == (
        pytest.approx(120, abs=0.01),
        pytest.approx(116.69, abs=0.01),
    )
    assert cheap.exact_efficiency == pytest.approx(0.9126, abs=5e-5)
    assert cheap.exact_efficiency - cheap.young_efficiency < 1e-4
    assert dear.exact_efficiency - dear.young_efficiency > 5e-3


def test_a_write_that_is_longer_than_the_interval_sets_it():
    slow = Save("slow", 1.0, 900.0, background=True)
    one = plan_checkpoint([slow], FAILING, JOB).strategies[0]
    assert one.bound_by_write
    assert one.interval_s == 900.0
    assert [row.bill is None for row in one.sensitivity] == [True, True, False, False, False]
    quick = Save("quick", 1.0, 30.0, background=True)
    assert not plan_checkpoint([quick], FAILING, JOB).strategies[0].bound_by_write


def test_a_run_that_is_shorter_than_the_interval_is_saved_once():
    short, long = (
        plan_checkpoint(three_ways(**DEFAULT), FAILING, Job(hours, 1, 1.0)).strategies[0]
        for hours in (0.5, 5.0)
    )
    assert short.num_saves == 0
    assert long.num_saves == 6  # 18,000 s hold six intervals of 2,788.5 s


def test_what_no_interval_carries_is_refused_with_what_would_have_to_change():
    with pytest.raises(TapelineError) as error:
        plan_checkpoint(three_ways(**DEFAULT), Failures(0.2 * HOUR, 720.0), JOB)
    assert str(error.value) == (
        "blocking 2.25 s, MTBF 720 s, restart 742.5 s: expected an overhead below 100 % and an "
        "efficiency of 50 % or more, found 111 % and 32.9 % at the best interval. This workload "
        "can't run on this infrastructure: raise the MTBF to about 1177 s, or lower the restart "
        "time to about 441.4 s."
    )


def test_one_way_can_be_refused_and_another_carry_the_job():
    plan = plan_checkpoint(three_ways(**DEFAULT), Failures(0.5 * HOUR, 720.0), JOB)
    assert [one.name for one in plan.refused] == ["one writer, synchronous"]
    assert "raise the MTBF to about" in plan.refused[0].why
    assert len(plan.strategies) == 2


def test_jobs_in_turn_lose_less_than_jobs_at_once():
    alone = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB)
    plan = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB, jobs=4)
    assert alone.contention == ()
    sync, _, background = plan.contention
    assert sync.aligned_interval_s == pytest.approx(2 * 2788.548, abs=0.01)  # four times the cost
    assert sync.staggered_overhead == pytest.approx(alone.strategies[0].overhead)
    assert background.aligned_overhead - background.staggered_overhead == pytest.approx(
        3 * 22.5 / 21600
    )


def test_so_many_jobs_that_their_writes_fill_the_cycle():
    contention = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB, jobs=100).contention
    assert contention[0].staggered_interval_s == 99 * 180.0
    assert contention[2].staggered_interval_s == 100 * 22.5


def test_a_counted_mtbf_gives_a_range():
    mtbf = Mtbf.observed(3, 18 * HOUR)
    plan = plan_checkpoint(three_ways(**DEFAULT), Failures(mtbf.middle_s, 720.0), JOB, mtbf=mtbf)
    low, middle, high = plan.mtbf_range.interval_s
    assert low < middle < high
    assert high == pytest.approx(311.77, abs=0.01)  # 18 h / 3
    assert plan.strategies[2].interval_s == middle
    none = plan_checkpoint(three_ways(**DEFAULT), FAILING, JOB, mtbf=Mtbf.observed(0, 90 * HOUR))
    assert none.mtbf_range.interval_s[2] == math.inf


seconds = st.floats(1e-3, 1e5)


@st.composite
def scenarios(draw):
    saves = three_ways(
        checkpoint_s=draw(seconds),
        num_shards=draw(st.integers(1, 4096)),
        async_fraction=draw(st.floats(0, 1)),
        slowdown=draw(st.floats(0, 2)),
    )
    # An MTBF long beside everything else, so that few are refused.
    whole = saves[0].write_s * 3 + draw(st.floats(0, 1e4))
    failures = Failures(whole * draw(st.floats(5, 1e6)), whole * draw(st.floats(0, 1)))
    job = Job(draw(st.floats(0.01, 1e5)), draw(st.integers(1, 10_000)), draw(st.floats(0, 100)))
    return saves, failures, job


@given(scenarios(), st.integers(1, 50))
def test_no_plan_holds_a_number_that_is_none_or_negative(scenario, jobs):
    plan = plan_checkpoint(*scenario, jobs=jobs, efficiency_floor=1e-6)
    numbers = leaves(asdict(plan))
    assert len(numbers) > 50
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    job = scenario[2]
    for one in plan.strategies:
        if one.bill:
            per_hour = job.num_accelerators * job.price_per_hour
            assert one.bill.cost == pytest.approx(one.bill.wall_hours * per_hour)
            assert one.bill.wall_hours >= job.useful_hours


@given(scenarios(), st.floats(0.01, 1))
def test_cheaper_checkpoints_never_raise_the_optimal_overhead(scenario, cheaper):
    saves, failures, _ = scenario
    for save in saves:
        less = Save(
            save.name,
            save.snapshot_s * cheaper,
            save.write_s * cheaper,
            save.slowdown,
            save.background,
        )
        before, after = (
            1 - shares(one, failures, best_interval_s(one, failures.mtbf_s)).goodput
            for one in (save, less)
        )
        assert after <= before * (1 + 1e-12)


CLASSES = [FailureClass("node", 72 * HOUR, 60.0), FailureClass("process", 6 * HOUR, 2.0)]


def test_two_tiers_against_one():
    plan = plan_tiers(CLASSES, 0.0, JOB, floor=0.5)
    assert [tier.ideal_s for tier in plan.tiers] == [
        pytest.approx(293.9, abs=0.05),
        pytest.approx(5483.4, abs=0.05),
    ]
    assert plan.ideal_overhead == pytest.approx(0.0348, abs=5e-5)
    assert plan.single_interval_s == pytest.approx(1546.8, abs=0.05)
    assert plan.single_overhead == pytest.approx(0.0776, abs=5e-5)
    local, durable = plan.tiers
    assert durable.every == 19
    assert durable.interval_s == 19 * local.interval_s
    assert plan.ideal_overhead <= plan.overhead < plan.ideal_overhead + 1e-5


def test_a_tier_that_would_be_due_more_often_than_a_cheaper_one_replaces_it():
    rare_first = [FailureClass("a", 72 * HOUR, 50.0), FailureClass("b", 6 * HOUR, 60.0)]
    plan = plan_tiers(rare_first, 0.0, JOB, floor=0.5)
    assert [tier.classes for tier in plan.tiers] == [("a", "b")]
    assert plan.tiers[0].interval_s == pytest.approx(plan.single_interval_s)
    assert plan.overhead == pytest.approx(plan.single_overhead)


classes_of = st.lists(st.tuples(st.floats(1e6, 1e9), st.floats(0.01, 1e3)), min_size=2, max_size=6)


@given(classes_of, st.floats(0, 100))
def test_tiers_never_lose_more_than_one_interval(numbers, restart_s):
    classes = [FailureClass(str(i), m, c) for i, (m, c) in enumerate(numbers)]
    plan = plan_tiers(classes, restart_s, JOB, floor=0.5)
    assert plan.ideal_overhead <= plan.overhead * (1 + 1e-9)
    assert plan.ideal_overhead <= plan.single_overhead * (1 + 1e-9)
    assert plan.overhead <= plan.ideal_overhead * 1.07  # rounding costs (√2 + 1/√2)/2 at most
    everies = [tier.every for tier in plan.tiers]
    assert everies[0] == 1
    assert all(b % a == 0 for a, b in itertools.pairwise(everies))


def test_tiers_that_leave_too_little_are_refused():
    with pytest.raises(TapelineError) as error:
        plan_tiers([parse_class("a:0.1:2"), parse_class("b:2:60")], 720.0, JOB, floor=0.5)
    assert str(error.value) == (
        "--class: expected intervals that leave 50 % of the time useful, found 233 % lost at the "
        "best ones. All failures would have to be 5.27 times rarer, or checkpoints and restarts "
        "that much cheaper."
    )
    rarer = [
        FailureClass(one.name, one.mtbf_s * 5.28, one.save_s)
        for one in (parse_class("a:0.1:2"), parse_class("b:2:60"))
    ]
    found = plan_tiers(rarer, 720.0, JOB, floor=0.5)
    assert found.overhead + found.restart == pytest.approx(0.5, abs=2e-3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node:6", "expected NAME:MTBF_HOURS:COST_SECONDS, found 2 parts"),
        ("node:six:60", "expected NAME:MTBF_HOURS:COST_SECONDS, found no numbers after the name"),
        ("node:-6:60", "expected a number above 0 and finite, found -6"),
        ("node:6:nan", "expected a number above 0 and finite, found nan"),
    ],
)
def test_a_class_that_is_none_is_refused(text, told):
    with pytest.raises(TapelineError) as error:
        parse_class(text)
    assert str(error.value).startswith(f"--class {text}: {told}. ")


def test_one_class_or_one_name_twice_is_refused():
    for classes in (CLASSES[:1], [CLASSES[0], CLASSES[0]]):
        with pytest.raises(
            TapelineError, match="--class: expected 2 to 8 classes of different names"
        ):
            plan_tiers(classes, 0.0, JOB, floor=0.5)


SPEED = Quantity("speed_kmh", "How fast", 50.0)
COUNT = Quantity("wheels", "Wheels", positive=False, whole=True, most=18)
FREE = Quantity("free_share", "Free share", 0.1, positive=False, most=1)


def test_a_number_is_taken_as_given_else_as_measured_else_by_default():
    measured = Measured("runs/a", {"speed_kmh": (70.0, "by radar")}, {"wheels": "none was seen"})
    inputs = Inputs(measured)
    assert inputs.take(SPEED, 60.0) == 60.0
    assert inputs.values["speed_kmh"].source == "given"
    assert inputs.take(SPEED) == 70.0
    assert inputs.values["speed_kmh"].as_dict() == {
        "value": 70.0,
        "source": "measured",
        "detail": "runs/a, by radar",
    }
    assert Inputs().take(SPEED) == 50.0
    printed = Measured("a car", {"speed_kmh": (90.0, "its sheet")}, source="printed")
    both = Inputs(None, printed, measured)
    assert both.take(SPEED) == 90.0
    assert both.values["speed_kmh"].source == "printed"
    assert both.knows(SPEED)
    assert not both.knows(COUNT)
    with pytest.raises(TapelineError) as error:
        inputs.take(COUNT)
    assert str(error.value) == (
        "--wheels: expected a number, found none (runs/a: none was seen). Give it: wheels."
    )


@pytest.mark.parametrize(
    ("quantity", "number", "told"),
    [
        (SPEED, 0.0, "--speed-kmh: expected a number above 0 and finite, found 0"),
        (SPEED, math.inf, "--speed-kmh: expected a number above 0 and finite, found inf"),
        (SPEED, 1e20, "--speed-kmh: expected a number above 0, 1e+18 at most, found 1e+20"),
        (SPEED, 1e-20, "--speed-kmh: expected a number 1e-12 or more and finite, found 1e-20"),
        (
            FREE,
            1e-20,
            "--free-share: expected a number 0, or 1e-12 or more, 1 at most, found 1e-20",
        ),
        (FREE, 1.0000001, "--free-share: expected a number 0 or more, 1 at most, found 1.0000001"),
        (COUNT, 1.5, "--wheels: expected a whole number 0 or more, 18 at most, found 1.5"),
        (COUNT, 19, "--wheels: expected a whole number 0 or more, 18 at most, found 19"),
    ],
)
def test_a_number_out_of_range_is_refused(quantity, number, told):
    with pytest.raises(TapelineError) as error:
        Inputs().take(quantity, number)
    assert str(error.value).startswith(f"{told}. Correct it: ")


def test_a_measured_number_out_of_range_names_the_run():
    inputs = Inputs(Measured("runs/a", {"speed_kmh": (-1.0, "by radar")}))
    with pytest.raises(
        TapelineError, match=r"^runs/a, by radar: speed_kmh: expected a number above"
    ):
        inputs.take(SPEED)
