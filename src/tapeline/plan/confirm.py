"""A plan's intervals tried on simulated failures: how well the model holds, also for grouped ones.

Covers: the simulated share of useful time beside the expected one, for ways of saving and for
tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapeline.plan.checkpoint import CheckpointPlan
from tapeline.plan.playback import Playback
from tapeline.plan.saving import Failures, Save
from tapeline.plan.simulate import Estimate, Floats, Schedule, failure_times_s, simulate
from tapeline.plan.tiers import FailureClass, TierPlan

_SEED = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The share of useful time by the model, and by simulation with its standard error."""

    name: str
    model: float
    simulated: Estimate


def confirm_strategies(
    plan: CheckpointPlan, saves: Sequence[Save], failures: Failures, playback: Playback
) -> list[Confirmed]:
    """Each way at its first-order interval; the model is exact for exponential failures."""
    costs = {save.name: save for save in saves}
    return [
        Confirmed(
            one.name,
            one.intervals.young_efficiency,
            simulate(
                Schedule(
                    one.interval_s,
                    (costs[one.name].blocking_s,),
                    in_flight_s=costs[one.name].in_flight_s,
                ),
                _failures([failures.mtbf_s], playback),
                failures.restart_s,
            ),
        )
        for one in plan.strategies
    ]


def confirm_tiers(
    plan: TierPlan, classes: Sequence[FailureClass], restart_s: float, playback: Playback
) -> list[Confirmed]:
    """The tiers as planned, and one interval for all; the model is first order."""
    mtbf_s = {one.name: one.mtbf_s for one in classes}
    of_tier = [1 / sum(1 / mtbf_s[name] for name in tier.classes) for tier in plan.tiers]
    costs = tuple(tier.save_s for tier in plan.tiers)
    tiers = Schedule(plan.tiers[0].interval_s, costs, tuple(tier.every for tier in plan.tiers))
    single = Schedule(plan.single_interval_s, (costs[-1],))
    together = 1 / sum(1 / one for one in of_tier)
    return [
        Confirmed(name, 1 - overhead - plan.restart, simulate(schedule, times, restart_s))
        for name, overhead, schedule, times in (
            (f"{len(costs)} tiers", plan.overhead, tiers, _failures(of_tier, playback)),
            (
                "one interval for all",
                plan.single_overhead,
                single,
                _failures([together], playback),
            ),
        )
    ]


def _failures(mtbf_s: Sequence[float], playback: Playback) -> list[Floats]:
    generator = np.random.default_rng(_SEED)
    horizon_s = playback.num_failures / sum(1 / one for one in mtbf_s)
    return [
        failure_times_s(
            one,
            horizon_s,
            generator,
            shape=playback.shape,
            num_machines=playback.num_machines,
        )
        for one in mtbf_s
    ]
