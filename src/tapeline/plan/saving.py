"""Ways of saving and what each costs, in first order: the model under the plans that save.

Covers: what one save takes from the loop, the best interval, the shares of time at an interval.
Does not cover choosing between ways (`checkpoint`), nor measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Inputs, Quantity
from tapeline.reliability import (
    Mtbf,
    async_interval_s,
    check_feasible,
    efficiency,
    young_interval_s,
)

S_PER_HOUR, S_PER_MINUTE = 3600.0, 60.0
# Below half of the time useful, a job costs twice its price: refused unless told otherwise.
EFFICIENCY_FLOOR = 0.5
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of what a plan is tried at besides

MTBF_HOURS = Quantity("mtbf_hours", "Mean hours between failures that end the job", 6.0)
FAILURES = Quantity(
    "failures", "Failures that were counted, in place of an MTBF", positive=False, whole=True
)
EXPOSURE_HOURS = Quantity("exposure_hours", "Hours under which they were counted")
CHECKPOINT_SECONDS = Quantity(
    "checkpoint_seconds", "Seconds that one writer takes for a checkpoint", 180.0
)
RESTART_MINUTES = Quantity(
    "restart_minutes", "Minutes to detect a failure, start again and reload", 12.0, positive=False
)
SHARDS = Quantity("shards", "Writers that share a checkpoint", 8, whole=True)
ASYNC_FRACTION = Quantity(
    "async_fraction",
    "Share of the write that blocks the loop when the rest is in the background",
    0.1,
    positive=False,
    most=1.0,
)
WRITE_SLOWDOWN = Quantity(
    "write_slowdown",
    "Share by which steps are longer during a background write",
    0.0,
    positive=False,
)
JOBS = Quantity("jobs", "Jobs that save to the same file system", 1, whole=True, most=1e6)
FLOOR = Quantity(
    "efficiency_floor", "Least share of useful time worth paying for", EFFICIENCY_FLOOR, most=0.999
)

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class Save:
    """What one save costs.

    Attributes:
        name: of the way of saving.
        snapshot_s: the loop stands still before the write begins.
        write_s: the write itself.
        slowdown: share by which steps are longer during a background write.
        background: whether the loop goes on during the write.
    """

    name: str
    snapshot_s: float
    write_s: float
    slowdown: float = 0.0
    background: bool = False

    @property
    def blocking_s(self) -> float:
        """C: seconds of work that one save takes from the loop."""
        return self.snapshot_s + self.write_s * (self.slowdown if self.background else 1.0)

    @property
    def in_flight_s(self) -> float:
        """p: seconds during which a failure falls back to the save before."""
        return self.write_s if self.background else 0.0

    def shared_by(self, jobs: int) -> Save:
        """The same while `jobs` write at once, each at its share of the file system."""
        return Save(self.name, self.snapshot_s, jobs * self.write_s, self.slowdown, self.background)


@dataclass(frozen=True, slots=True)
class Failures:
    """How often the job fails and what a failure costs besides the lost work."""

    mtbf_s: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A way of saving that can't carry a job, and what would have to change."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of wall time, first order (Young 1974): `C/T + (T/2 + R)/M`, and `p/M`.

    Attributes:
        checkpoint: the loop stands still for saves.
        lost: work done again.
        restart: detection, start and reload.
        in_flight: more work lost, because a write wasn't finished.
    """

    checkpoint: float
    lost: float
    restart: float
    in_flight: float

    @property
    def overhead(self) -> float:
        """Young's first-order overhead."""
        return self.checkpoint + self.lost + self.restart

    @property
    def goodput(self) -> float:
        """What is left; 0 or less where no work is ever done."""
        return 1.0 - self.overhead - self.in_flight


def three_ways(
    *, checkpoint_s: float, num_shards: int, async_fraction: float, slowdown: float
) -> tuple[Save, Save, Save]:
    """One writer, shards, and shards in the background, from the time of one writer.

    Shards divide the write evenly, which holds while the file system is not the limit; then the
    time of a shard's write should be given instead. In the background the loop stands still for
    `async_fraction` of it, the snapshot.
    """
    shard_s = checkpoint_s / num_shards
    shards = f"{num_shards} shards" if num_shards > 1 else "1 shard"
    return (
        Save("one writer, synchronous", 0.0, checkpoint_s),
        Save(f"{shards}, synchronous", 0.0, shard_s),
        Save(f"{shards}, asynchronous", async_fraction * shard_s, shard_s, slowdown, True),
    )


def best_interval_s(save: Save, mtbf_s: float) -> float:
    """Of first order, `max(p, sqrt(2 C M))`: one background write is in flight at a time."""
    if save.background:
        return async_interval_s(
            snapshot_s=save.snapshot_s,
            write_s=save.write_s,
            slowdown=save.slowdown,
            mtbf_s=mtbf_s,
        )
    return young_interval_s(blocking_s=save.blocking_s, mtbf_s=mtbf_s)


def shares(save: Save, failures: Failures, interval_s: float) -> Shares:
    """The parts of the overhead at an interval."""
    return Shares(
        save.blocking_s / interval_s,
        interval_s / 2 / failures.mtbf_s,
        failures.restart_s / failures.mtbf_s,
        save.in_flight_s / failures.mtbf_s,
    )


def expected_efficiency(save: Save, failures: Failures, interval_s: float) -> float:
    """Exact under exponential failures; a write in flight counts as a longer restart."""
    return efficiency(
        interval_s,
        blocking_s=save.blocking_s,
        mtbf_s=failures.mtbf_s,
        restart_s=failures.restart_s + save.in_flight_s,
    )


def each_way(
    saves: Sequence[Save], plan: Callable[[Save], Plan]
) -> tuple[tuple[Plan, ...], tuple[Refused, ...]]:
    """What each way of saving comes to, and the ways that can't carry the job.

    Raises:
        TapelineError: none can; says what would have to change for the last one.
    """
    found: list[Plan] = []
    refused: list[Refused] = []
    for save in saves:
        try:
            found.append(plan(save))
        except TapelineError as error:
            if save is saves[-1] and not found:
                raise
            refused.append(Refused(save.name, str(error)))
    return tuple(found), tuple(refused)


def check_carried(save: Save, failures: Failures, floor: float) -> None:
    """Raise a `TapelineError` if no interval can carry the job; says what would have to change."""
    check_feasible(
        blocking_s=save.blocking_s,
        mtbf_s=failures.mtbf_s,
        restart_s=failures.restart_s + save.in_flight_s,
        floor=floor,
    )


def take_saves(
    inputs: Inputs,
    checkpoint_seconds: float | None,
    num_shards: int | None,
    async_fraction: float | None,
    slowdown: float | None,
) -> tuple[Save, Save, Save]:
    """The three ways of saving that are given, measured or the default."""
    return three_ways(
        checkpoint_s=inputs.take(CHECKPOINT_SECONDS, checkpoint_seconds),
        num_shards=inputs.count(SHARDS, num_shards),
        async_fraction=inputs.take(ASYNC_FRACTION, async_fraction),
        slowdown=inputs.take(WRITE_SLOWDOWN, slowdown),
    )


def take_mtbf(
    inputs: Inputs, hours: float | None, failures: int | None, exposure_hours: float | None
) -> Mtbf:
    """As stated; else from failures that were counted, here or by the run; else the default."""
    counted = failures is not None or exposure_hours is not None or inputs.knows(FAILURES)
    if hours is None and counted:
        num_failures = inputs.count(FAILURES, failures)
        return Mtbf.observed(num_failures, inputs.take(EXPOSURE_HOURS, exposure_hours) * S_PER_HOUR)
    return Mtbf.known(inputs.take(MTBF_HOURS, hours) * S_PER_HOUR)
