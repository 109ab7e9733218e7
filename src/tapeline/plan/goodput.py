"""All of it together: where the time of a job goes, before and after, in hours and money.

Covers: composing saving and loading into useful, starved, checkpoint and lost time, and a plan
beside what a finished run measured. Does not cover measuring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Quantity
from tapeline.plan.job import Bill, Job
from tapeline.plan.saving import Failures, Save, best_interval_s, check_carried, shares

BUCKETS = ("useful", "starved", "checkpoint", "lost")
_LEAST_EFFICIENCY = 1e-3  # a job a thousand times longer than its work is no plan
SAMPLES = Quantity("samples_per_second", "Samples that one accelerator computes in a second", 108.0)
LOADER = Quantity(
    "loader_samples_per_second",
    "Samples that the loader gives in a second, before; 0 for a perfect one",
    5000.0,
    positive=False,
)
TUNED_LOADER = Quantity(
    "tuned_loader_samples_per_second", "The same, after; 0 for a perfect one", 0.0, positive=False
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a job goes; the shares add up to 1.

    Attributes:
        shares: by `BUCKETS`; lost is work done again and restarts.
        hours: the same of the job's wall time.
        cost: the same of its bill.
    """

    name: str
    shares: Mapping[str, float]
    hours: Mapping[str, float]
    cost: Mapping[str, float]
    bill: Bill

    @property
    def goodput(self) -> float:
        """The useful share."""
        return self.shares["useful"]


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """A job before and after, and what the difference is worth."""

    before: Goodput
    after: Goodput
    saved_hours: float
    saved_cost: float
    overlapped_before: bool = True


def utilisation(
    *, compute_samples_per_s: float, loader_samples_per_s: float, overlapped: bool
) -> float:
    """Share of a step that computes: overlapped `min(1, loader/compute)`, else in turn.

    0 samples a second is a perfect loader.

    Source: a step takes `max(compute, data)` or `compute + data`.
    """
    if loader_samples_per_s == 0:
        return 1.0
    if overlapped:
        return min(1.0, loader_samples_per_s / compute_samples_per_s)
    return loader_samples_per_s / (loader_samples_per_s + compute_samples_per_s)


def compose(name: str, save: Save, failures: Failures, busy: float, job: Job) -> Goodput:
    """One case: saving at its best interval, and a share of the running time that computes.

    Args:
        busy: utilisation while it runs.

    Raises:
        TapelineError: it never ends, or can't be carried.

    Source: first order (Young 1974); what is not lost to saving and failing is divided by the
        utilisation.
    """
    check_carried(save, failures, _LEAST_EFFICIENCY)
    parts = shares(save, failures, best_interval_s(save, failures.mtbf_s))
    found = {
        "useful": parts.goodput * busy,
        "starved": parts.goodput * (1 - busy),
        "checkpoint": parts.checkpoint,
        "lost": parts.lost + parts.restart + parts.in_flight,
    }
    bill = job.bill(found["useful"])
    if bill is None or found["useful"] < _LEAST_EFFICIENCY:
        raise TapelineError(
            name,
            expected="a job that ends",
            found=f"{100 * max(0.0, found['useful']):.2g} % of its time useful",
            fix="Save more cheaply, raise the MTBF or the loader's rate",
        )
    return Goodput(
        name,
        found,
        {bucket: share * bill.wall_hours for bucket, share in found.items()},
        {bucket: share * bill.cost for bucket, share in found.items()},
        bill,
    )


def plan_goodput(before: Goodput, after: Goodput, *, overlapped_before: bool = True) -> GoodputPlan:
    """The two cases and their difference, which is negative where after is worse."""
    return GoodputPlan(
        before,
        after,
        before.bill.wall_hours - after.bill.wall_hours,
        before.bill.cost - after.bill.cost,
        overlapped_before,
    )


def planned_by(decision: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Checkpoint and lost time as a run's choice of an interval expected them, and its name.

    Args:
        decision: a line of the run's `intervals.jsonl`.
    """
    costs = decision["costs"]
    save = Save("run", costs["blocking_s"], costs["write_s"], costs["slowdown"], background=True)
    parts = shares(
        save,
        Failures(decision["mtbf"]["middle_s"], 0.0),
        decision["num_steps"] * costs["step_s"],
    )
    planned = {"checkpoint": parts.checkpoint, "lost": parts.lost + parts.in_flight}
    return planned, f"the interval chosen at step {decision['at_step']}, without restarts"


@dataclass(frozen=True, slots=True)
class Compared:
    """One bucket as planned and as measured, in shares of wall time.

    Attributes:
        planned: None where the plan says nothing of it.
        measured: by the run's account.
        hours: measured, of all ranks together.
    """

    bucket: str
    planned: float | None
    measured: float
    hours: float

    @property
    def difference(self) -> float | None:
        """Measured less planned."""
        return None if self.planned is None else self.measured - self.planned


def compare(planned: Mapping[str, float], measured_hours: Mapping[str, float]) -> list[Compared]:
    """A plan beside the account of a finished run.

    Args:
        planned: shares by bucket; a bucket that isn't there wasn't planned.
        measured_hours: by bucket, all of them.

    Raises:
        TapelineError: no time was measured.
    """
    wall = sum(measured_hours.values())
    if not wall > 0:
        raise TapelineError(
            "the account of the run",
            expected="some time",
            found="none",
            fix="Compare a run that has done a step",
        )
    return [
        Compared(bucket, planned.get(bucket), hours / wall, hours)
        for bucket, hours in measured_hours.items()
    ]
