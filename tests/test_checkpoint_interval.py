"""The interval controller on simulated runs: where it settles, what it says, what it never does."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapeline.checkpoint.interval import FIRST_SAVE_S, Decision, IntervalController
from tapeline.errors import TapelineError
from tapeline.reliability import Mtbf, async_interval_s


@dataclass
class Machine:
    """A run with given costs and no clock: time is the sum of what happened."""

    step_s: float = 1.0
    blocking_s: float = 2.0
    write_s: float = 0.0
    slowdown: float = 0.0
    noise: random.Random | None = None
    time_s: float = 0.0
    saves: list[int] = field(default_factory=list)

    def live(self, controller: IntervalController, first: int, last: int, until_s=math.inf) -> bool:
        """Run the steps `first` to `last`; whether the end came before `until_s`."""
        ends_s = None
        for step in range(first + 1, last + 1):
            writing = ends_s is not None
            seconds = self.step_s * (1 + self.slowdown * writing) * self._jitter()
            self.time_s += seconds
            controller.step_done(seconds, writing=writing)
            if self.time_s > until_s:
                return False
            if ends_s is not None and self.time_s >= ends_s:
                controller.written(step, self.write_s)
                ends_s = None
            if controller.due(step):
                assert ends_s is None or step == last, "two writes in flight"
                blocking_s = self.blocking_s * self._jitter()
                self.time_s += blocking_s
                self.saves.append(step)
                if self.write_s:
                    ends_s = self.time_s + self.write_s
                controller.saved(step, blocking_s, writing=ends_s is not None)
        return True

    def best_steps(self, mtbf_s: float) -> float:
        return (
            async_interval_s(
                snapshot_s=self.blocking_s,
                write_s=self.write_s,
                slowdown=self.slowdown,
                mtbf_s=mtbf_s,
            )
            / self.step_s
        )

    def _jitter(self) -> float:
        return self.noise.uniform(0.95, 1.05) if self.noise else 1.0


def controller_of(log: list[Decision] | None = None, **changes) -> IntervalController:
    about = {"first_step": 0, "total_steps": 20_000, "job": "a", "mtbf_s": 10_000.0}
    taken = [] if log is None else log
    return IntervalController(**about | changes, log=taken.append)


def within(found: float, best: float) -> bool:
    return abs(found - best) <= max(1.0, 0.05 * best)


@settings(max_examples=500)
@given(
    step_s=st.floats(0.05, 20),
    blocking_s=st.floats(0.01, 60),
    write_s=st.just(0.0) | st.floats(0.1, 300),
    slowdown=st.floats(0, 0.5),
    mtbf_s=st.floats(600, 1e5),
)
@example(step_s=0.05, blocking_s=0.01171875, write_s=4.0, slowdown=0.0, mtbf_s=600.0)
def test_it_settles_at_the_analytic_optimum(step_s, blocking_s, write_s, slowdown, mtbf_s):
    machine = Machine(step_s, blocking_s, write_s, slowdown)
    total = math.ceil(FIRST_SAVE_S / step_s + 6 * machine.best_steps(mtbf_s) + write_s / step_s) + 9
    total = min(total, 5000)
    controller = controller_of(mtbf_s=mtbf_s, total_steps=total)
    machine.live(controller, 0, total)
    decision = controller.decision
    assert decision is not None
    if len(machine.saves) > 2:  # else no write may have ended before the run did
        assert within(decision.num_steps, machine.best_steps(mtbf_s))
        assert decision.num_steps * step_s >= write_s * (1 - 1e-12)
    assert machine.saves[-1] == total
    gaps = [b - a for a, b in zip(machine.saves, machine.saves[1:], strict=False)]
    assert all(gap <= decision.num_steps + 1 for gap in gaps[2:])


def test_noise_moves_it_by_less_than_a_twentieth():
    machine = Machine(0.5, 3.0, 30.0, 0.1, noise=random.Random(1))
    log: list[Decision] = []
    controller = controller_of(log)
    machine.live(controller, 0, 20_000)
    best = machine.best_steps(10_000.0)
    assert all(within(decision.num_steps, best) for decision in log[6:])


def test_it_learns_the_failure_rate_of_the_run():
    """Exponential failures, drawn evenly; each life continues from the last save."""
    machine, mtbf_s, total, num_lives = Machine(2.0, 1.0), 2_000.0, 10**9, 150
    lives_s = [-mtbf_s * math.log((i + 0.5) / num_lives) for i in range(num_lives)]
    random.Random(4).shuffle(lives_s)
    step, exposure_s = 0, 0.0
    for num_failures, life_s in enumerate(lives_s):
        controller = controller_of(
            first_step=step,
            total_steps=total,
            mtbf_s=None,
            num_failures=num_failures,
            exposure_s=exposure_s,
        )
        began_s = machine.time_s
        assert not machine.live(controller, step, total, began_s + life_s)
        exposure_s += machine.time_s - began_s
        step = machine.saves[-1] if machine.saves else 0
        if controller.decision:
            last = controller.decision
    assert within(last.num_steps, machine.best_steps(mtbf_s))
    low, high = last.range_steps
    assert high is not None
    assert low < machine.best_steps(mtbf_s)
    assert low <= last.num_steps <= high


def test_before_the_first_failure_the_interval_grows_and_has_no_upper_end():
    log: list[Decision] = []
    controller = controller_of(log, mtbf_s=None)
    Machine().live(controller, 0, 20_000)
    assert [d.num_steps for d in log] == sorted(d.num_steps for d in log)
    assert all(d.range_steps[1] is None and d.range_steps[0] <= d.num_steps for d in log)
    assert log[-1].num_steps > 3 * log[0].num_steps
    record = json.loads(json.dumps(log[-1].as_record(), allow_nan=False))
    assert record["mtbf"]["high_s"] is None
    assert record["range_steps"] == [log[-1].range_steps[0], None]


def test_a_record_holds_what_the_interval_came_from():
    log: list[Decision] = []
    Machine(1.0, 2.0, 50.0, 0.1).live(controller_of(log), 0, 3000)
    first, last = log[0], log[-1]
    assert (first.at_step, first.costs.blocking_s, first.costs.step_s) == (60, 2.0, 1.0)
    assert (first.costs.write_s, first.costs.slowdown) == (0.0, 0.0)
    assert first.num_steps == 200
    assert last.costs.write_s == 50.0
    assert last.costs.slowdown == pytest.approx(0.1)
    assert last.num_steps == 374  # sqrt(2 · 7 · 10,000)
    assert last.overhead == pytest.approx(7 / 374 + (187 + 50) / 10_000)
    assert last.mtbf == Mtbf.known(10_000.0)
    assert last.why == "the best interval for these costs and this MTBF"
    assert last.range_steps == (374, 374)


def test_only_changes_are_logged():
    log: list[Decision] = []
    controller = controller_of(log)
    Machine().live(controller, 0, 10_000)
    assert [d.num_steps for d in log] == [200]
    assert controller.decision is not log[0]


def test_a_run_shorter_than_the_interval_saves_once_at_its_end_and_says_so():
    log: list[Decision] = []
    machine = Machine(1.0, 2.0)
    machine.live(controller_of(log, total_steps=250), 0, 250)
    assert machine.saves == [60, 250]  # the first is how the cost came to be known
    assert [d.why for d in log] == [
        "the rest of the run is shorter than the best interval: saved once, at its end"
    ]
    assert (log[0].next_step, log[0].num_steps) == (250, 200)
    short = Machine(0.1, 2.0)
    short.live(controller_of(total_steps=500), 0, 500)
    assert short.saves == [500]


def test_a_step_longer_than_the_interval_is_saved_each_time():
    machine = Machine(500.0, 1.0)
    machine.live(controller_of(total_steps=20, mtbf_s=1000.0), 0, 20)
    assert machine.saves == list(range(1, 21))


def test_jobs_that_start_together_spread_and_stay_spread():
    seconds = []
    for number in range(40):
        machine = Machine()
        machine.live(controller_of(job=f"job {number}"), 0, 2_000)
        assert machine.saves[0] == 60
        gaps = [b - a for a, b in zip(machine.saves[1:-2], machine.saves[2:-1], strict=True)]
        assert set(gaps) == {200}
        seconds.append(machine.saves[1] - 60)
    assert all(0 < second <= 200 for second in seconds)
    for quarter in range(4):
        assert sum(50 * quarter < second <= 50 * (quarter + 1) for second in seconds) >= 4


def test_the_same_job_takes_the_same_steps():
    one, two = Machine(), Machine()
    one.live(controller_of(), 0, 3_000)
    two.live(controller_of(), 0, 3_000)
    assert one.saves == two.saves


def test_a_save_before_any_step_decides_nothing():
    log: list[Decision] = []
    controller = controller_of(log)
    controller.saved(0, 1.0)
    assert controller.decision is None
    assert log == []
    assert not controller.due(0)


def test_an_impossible_mtbf_is_refused():
    with pytest.raises(TapelineError) as error:
        controller_of(mtbf_s=0.0)
    assert str(error.value) == (
        "mtbf_s: expected a finite number above 0, found 0. Give a measured or a planned number."
    )
