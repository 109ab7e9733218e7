"""How fast the loader must be: what a slow one costs, and what a faster one would not buy.

Covers: utilisation overlapped and in turn, a sweep of the loader's capacity, the cost of
starvation, the workers needed, and how many batches to hold ready. Waiting for the slowest rank is
`stragglers`. Does not cover what makes a loader slow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from tapeline.plan.goodput import utilisation
from tapeline.plan.inputs import Quantity
from tapeline.plan.job import Bill, Job

WORKERS = Quantity(
    "workers", "Loader workers that together give the loader's rate", 8, most=1e6, whole=True
)
PREFETCH = Quantity(
    "prefetch",
    "Batches held ready between loader and step",
    2,
    positive=False,
    most=1e6,
    whole=True,
)
FACTORS = (0.25, 0.5, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
DEPTHS = (0, 1, 2, 4, 8, 16, 32)
NEAR = 0.99  # of the throughput of endless prefetch
_MOST_WORKERS = 1e9


@dataclass(frozen=True, slots=True)
class Loader:
    """What makes the batches.

    Attributes:
        samples_per_s: of all workers together; 0 is a perfect loader.
        overlapped: whether batches are made while the device computes.
        prefetch: batches held ready.
        alone: whether the rate is the loader's own, not one seen alongside the compute.
    """

    samples_per_s: float
    num_workers: int
    overlapped: bool
    prefetch: int
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Fed:
    """The job with a loader of some capacity.

    Attributes:
        capacity: the loader's rate over that of the compute; None for a perfect one.
        utilisation: share of a step that computes.
        cost_ratio: the bill over that with a perfect loader.
    """

    capacity: float | None
    utilisation: float
    bill: Bill
    cost_ratio: float


@dataclass(frozen=True, slots=True)
class Depth:
    """Batches held ready, and the utilisation if both sides' times are exponential."""

    prefetch: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class Queue:
    """What holding batches ready does.

    Attributes:
        depths: some numbers of them, the given one among them.
        needed: batches that bring the utilisation within a hundredth of its limit.
    """

    depths: tuple[Depth, ...]
    needed: int


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """What the loader costs the job.

    Attributes:
        compute_samples_per_s: of all accelerators.
        overlapped: as the loader was given.
        fed: with the loader as it is.
        other_way: the same loader in turn if it is overlapped, and the other way round; None if
            its own rate isn't known.
        starved: what is paid beyond the bill with a perfect loader.
        workers_needed: for a loader as fast as the compute, if rate grows with workers; None if no
            number of them is enough (in turn), or none is needed (a perfect loader).
        sweep: other capacities, slowest first.
        queue: by batches held ready; None in turn, and for a perfect loader.
    """

    compute_samples_per_s: float
    overlapped: bool
    fed: Fed
    other_way: Fed | None
    starved: Bill
    workers_needed: int | None
    sweep: tuple[Fed, ...]
    queue: Queue | None


def plan_throughput(job: Job, samples_per_s: float, loader: Loader) -> ThroughputPlan:
    """What a loader costs a job.

    Args:
        job: its useful hours are those with a perfect loader.
        samples_per_s: computed by one accelerator.
        loader: of all accelerators together.
    """
    compute = job.num_accelerators * samples_per_s
    fed = _fed(job, compute, loader.samples_per_s, loader.overlapped)
    perfect = _fed(job, compute, 0.0, overlapped=True).bill
    capacity = fed.capacity
    return ThroughputPlan(
        compute,
        loader.overlapped,
        fed,
        _fed(job, compute, loader.samples_per_s, not loader.overlapped) if loader.alone else None,
        Bill(fed.bill.wall_hours - perfect.wall_hours, fed.bill.cost - perfect.cost),
        _workers_needed(loader, capacity) if capacity and loader.overlapped else None,
        tuple(_fed(job, compute, factor * compute, loader.overlapped) for factor in FACTORS),
        _queue(capacity, loader.prefetch) if capacity and loader.overlapped else None,
    )


def prefetch_throughput(loader_rate: float, step_rate: float, prefetch: int) -> float:
    """Batches a second through a loader, `prefetch` places and a step, times exponential.

    `m1 m2 (m1^(B+2) − m2^(B+2)) / (m1^(B+3) − m2^(B+3))`; `m (B+2)/(B+3)` at equal rates.

    Source: the queue M/M/1/K with K = B + 2: B places, and one batch in work on each side.
    """
    apart = abs(math.log(loader_rate) - math.log(step_rate))
    less = min(loader_rate, step_rate)
    if apart < 1e-9:
        return less * (prefetch + 2) / (prefetch + 3)
    return less * math.expm1(-(prefetch + 2) * apart) / math.expm1(-(prefetch + 3) * apart)


def depth_needed(capacity: float) -> int:
    """The fewest batches held ready that reach `NEAR` of what endless prefetch gives.

    97 at equal rates; fewer the further these are apart.
    """
    limit = NEAR * min(capacity, 1.0)
    return bisect_left(
        range(97), limit * (1 - 1e-12), key=lambda depth: prefetch_throughput(capacity, 1.0, depth)
    )


def _queue(capacity: float, prefetch: int) -> Queue:
    depths = sorted({*DEPTHS, prefetch})
    return Queue(
        tuple(
            Depth(depth, min(1.0, prefetch_throughput(capacity, 1.0, depth))) for depth in depths
        ),
        depth_needed(capacity),
    )


def _fed(job: Job, compute: float, loader: float, overlapped: bool) -> Fed:
    busy = utilisation(
        compute_samples_per_s=compute, loader_samples_per_s=loader, overlapped=overlapped
    )
    bill = job.bill(busy)
    assert bill is not None, "some of a step always computes"
    return Fed(loader / compute if loader else None, busy, bill, 1 / busy)


def _workers_needed(loader: Loader, capacity: float) -> int | None:
    needed = loader.num_workers / capacity
    return math.ceil(needed - 1e-9 * needed) if needed < _MOST_WORKERS else None
