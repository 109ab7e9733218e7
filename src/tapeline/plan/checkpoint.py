"""How often to save, by three ways of saving: one writer, shards, shards in the background.

Covers: interval, overhead and bill of each way, how flat the optimum is, where first order parts
from the exact model, jobs that share a file system, and the refusal of what can't be carried.
Does not cover tiers for several failure classes (`tiers`) nor measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapeline.plan.job import Bill, Job
from tapeline.plan.saving import (
    EFFICIENCY_FLOOR,
    FACTORS,
    S_PER_HOUR,
    Failures,
    Refused,
    Save,
    Shares,
    best_interval_s,
    check_carried,
    each_way,
    expected_efficiency,
    shares,
)
from tapeline.reliability import (
    Mtbf,
    daly_interval_s,
    effective_training_time,
    exact_interval_s,
    num_saves_before_end,
    young_interval_s,
)


@dataclass(frozen=True, slots=True)
class AtInterval:
    """What an interval comes to. `bill` is None where it is impossible or never ends."""

    factor: float
    interval_s: float
    overhead: float
    efficiency: float
    bill: Bill | None


@dataclass(frozen=True, slots=True)
class Intervals:
    """The best interval by three models, with the exact efficiency at each.

    First order (Young 1974), Daly 2006, and exact for exponential failures; seconds.
    """

    young_s: float
    daly_s: float
    exact_s: float
    young_efficiency: float
    daly_efficiency: float
    exact_efficiency: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of saving at its best interval.

    Attributes:
        blocking_s: C, with the slowdown of a background write.
        write_s: p, 0 for a write that blocks.
        interval_s: of first order, and no shorter than a background write.
        overhead: first order, `C/T + (T/2 + R)/M`.
        shares: its parts, and what a write in flight adds.
        intervals: the best interval by each model.
        bound_by_write: whether the write is longer than the interval would have been.
        num_saves: before the last one at the run's end; 0: save once.
        ettr: effective training time ratio, by the first-order model of arXiv 2410.21680.
        sensitivity: at a quarter to four times the interval.
    """

    name: str
    blocking_s: float
    write_s: float
    interval_s: float
    overhead: float
    shares: Shares
    bill: Bill | None
    intervals: Intervals
    bound_by_write: bool = False
    num_saves: int = 0
    ettr: float = 0.0
    sensitivity: tuple[AtInterval, ...] = ()


@dataclass(frozen=True, slots=True)
class Contention:
    """A way of saving for each of J jobs on one file system that a single write fills.

    Attributes:
        aligned_interval_s, aligned_overhead: all write at once, each for J times as long.
        staggered_interval_s, staggered_overhead: one after another, so that the cycle holds J
            writes. An overhead of 1 or more means that no work gets done.
    """

    name: str
    jobs: int
    aligned_interval_s: float
    aligned_overhead: float
    staggered_interval_s: float
    staggered_overhead: float


@dataclass(frozen=True, slots=True)
class MtbfRange:
    """What is not known about the MTBF, and what it does to the interval: low, middle, high."""

    mtbf_s: tuple[float, float, float]
    interval_s: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The strategies that can carry the job, those that can't, and the best of the first."""

    mtbf_s: float
    restart_s: float
    best: str
    strategies: tuple[Strategy, ...]
    refused: tuple[Refused, ...]
    contention: tuple[Contention, ...] = ()
    mtbf_range: MtbfRange | None = None


def plan_checkpoint(
    saves: Sequence[Save],
    failures: Failures,
    job: Job,
    *,
    jobs: int = 1,
    efficiency_floor: float = EFFICIENCY_FLOOR,
    mtbf: Mtbf | None = None,
) -> CheckpointPlan:
    """The best interval for each way of saving, and what it comes to.

    Args:
        jobs: that share the file system.
        efficiency_floor: see `check_feasible`.
        mtbf: what is known of the MTBF, where it was counted.

    Raises:
        TapelineError: no way can carry the job; says what would have to change for the last one.
    """

    def carried(save: Save) -> Strategy:
        check_carried(save, failures, efficiency_floor)
        return strategy(save, failures, job)

    strategies, refused = each_way(saves, carried)
    best = min(strategies, key=lambda one: one.overhead + one.shares.in_flight)
    ways = {save.name: save for save in saves}
    return CheckpointPlan(
        failures.mtbf_s,
        failures.restart_s,
        best.name,
        strategies,
        refused,
        tuple(contention(save, failures, jobs) for save in saves) if jobs > 1 else (),
        _range(ways[best.name], mtbf) if mtbf else None,
    )


def strategy(save: Save, failures: Failures, job: Job) -> Strategy:
    """One way of saving at its best interval, in first order."""
    interval_s = best_interval_s(save, failures.mtbf_s)
    parts = shares(save, failures, interval_s)
    return Strategy(
        save.name,
        save.blocking_s,
        save.in_flight_s,
        interval_s,
        parts.overhead,
        parts,
        job.bill(parts.goodput),
        _intervals(save, failures),
        bound_by_write=0 < interval_s <= save.in_flight_s,
        ettr=effective_training_time(
            interval_s,
            blocking_s=save.blocking_s,
            mtbf_s=failures.mtbf_s,
            restart_s=failures.restart_s + save.in_flight_s,
        ),
        num_saves=num_saves_before_end(interval_s, job.useful_hours * S_PER_HOUR),
        sensitivity=tuple(
            at_interval(save, failures, job, factor, factor * interval_s) for factor in FACTORS
        ),
    )


def at_interval(
    save: Save, failures: Failures, job: Job, factor: float, interval_s: float
) -> AtInterval:
    """What one interval comes to; without a bill if the write can't end before the next save."""
    parts = shares(save, failures, interval_s)
    possible = interval_s >= save.in_flight_s
    return AtInterval(
        factor,
        interval_s,
        parts.overhead + parts.in_flight,
        expected_efficiency(save, failures, interval_s),
        job.bill(parts.goodput) if possible else None,
    )


def contention(save: Save, failures: Failures, jobs: int) -> Contention:
    """J jobs on a file system that one write fills: all at once, or one after another."""
    together = save.shared_by(jobs)
    aligned_s = best_interval_s(together, failures.mtbf_s)
    # A cycle is T + C, and holds the writes of all jobs.
    others_s = (jobs - 1) * save.write_s if not save.background else jobs * save.write_s
    staggered_s = max(best_interval_s(save, failures.mtbf_s), others_s)
    aligned = shares(together, failures, aligned_s)
    staggered = shares(save, failures, staggered_s)
    return Contention(
        save.name,
        jobs,
        aligned_s,
        1.0 - aligned.goodput,
        staggered_s,
        1.0 - staggered.goodput,
    )


def _intervals(save: Save, failures: Failures) -> Intervals:
    about = {"blocking_s": save.blocking_s, "mtbf_s": failures.mtbf_s}
    found = [
        max(model(**about), save.in_flight_s)
        for model in (young_interval_s, daly_interval_s, exact_interval_s)
    ]
    return Intervals(*found, *(expected_efficiency(save, failures, one) for one in found))


def _range(save: Save, mtbf: Mtbf) -> MtbfRange:
    ends = (mtbf.low_s, mtbf.middle_s, mtbf.high_s)
    low, middle, high = (
        best_interval_s(save, end) if math.isfinite(end) else math.inf for end in ends
    )
    return MtbfRange(ends, (low, middle, high))
