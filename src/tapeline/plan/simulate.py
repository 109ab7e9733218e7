"""Failures played out one by one: what the models of saving are checked against.

Covers: failures of one or several classes, exponential or Weibull, of one machine or of many, and
a job that works, saves to tiers, fails, falls back and starts again. Does not cover a choice.

Nothing here uses a formula of `reliability`: it only keeps the books of the events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_NUM_BATCHES = 50


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over simulated failures, with its standard error."""

    mean: float
    standard_error: float
    num_failures: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a job saves, and what each save costs it.

    Attributes:
        interval_s: work between two saves.
        save_s: seconds that a save of each tier blocks, the cheapest tier first.
        every: each so many saves is one of the tier; the first is 1, each divides the next.
        in_flight_s: after a save, the one before is the newest for so long.
    """

    interval_s: float
    save_s: tuple[float, ...]
    every: tuple[int, ...] = (1,)
    in_flight_s: float = 0.0

    def wall_s(self, num_saves: int) -> float:
        """Seconds from the start to the end of save `num_saves`, without failures."""
        extra = (b - a for a, b in zip((0.0, *self.save_s), self.save_s, strict=False))
        saving = sum(cost * (num_saves // n) for cost, n in zip(extra, self.every, strict=True))
        return num_saves * self.interval_s + saving

    def num_saves_within(self, wall_s: float) -> int:
        """The inverse of `wall_s`: how many saves are done by then."""
        low = int(wall_s / (self.interval_s + self.save_s[-1]))
        high = int(wall_s / (self.interval_s + self.save_s[0])) + 1
        return bisect_right(range(high + 1), wall_s, lo=low + 1, key=self.wall_s) - 1


def failure_times_s(
    mtbf_s: float,
    horizon_s: float,
    generator: np.random.Generator,
    *,
    shape: float = 1.0,
    num_machines: int = 1,
) -> Floats:
    """When a job fails, in order, up to `horizon_s`.

    Args:
        mtbf_s: of the job; a machine's is `num_machines` times longer.
        horizon_s: after it nothing is played out.
        shape: of the Weibull distribution of a machine's life; 1 is exponential, below 1 failures
            come in groups.
        num_machines: that run when the job begins, new ones taking the place of failed ones.

    Source: Weibull lives of mean 1 are `G / gamma(1 + 1/shape)` with `G^shape` exponential; what is
        left of the life of a machine that has run for ever is a uniform share of a length-biased
        life (Cox 1962, "Renewal Theory"), whose `G^shape` is gamma of `1 + 1/shape`.
    """
    machine_s = mtbf_s * num_machines
    horizon = horizon_s / machine_s
    scale = 1 / math.gamma(1 + 1 / shape)
    biased = generator.gamma(1 + 1 / shape, size=num_machines) ** (1 / shape)
    ends = generator.random(num_machines) * biased * scale
    found = [ends]
    while (ends < horizon).any():
        ends = ends + scale * generator.standard_exponential(num_machines) ** (1 / shape)
        found.append(ends)
    times = np.sort(np.concatenate(found))
    times_s: Floats = times[times < horizon] * machine_s
    return times_s


def simulate(schedule: Schedule, failures: Sequence[Floats], restart_s: float) -> Estimate:
    """The share of time that ends up as work that is kept.

    Args:
        failures: times of each class, 50 or more in all; one of class i leaves tiers i and above.
        restart_s: after each failure; one during a restart begins it anew.
    """
    times = np.concatenate(failures)
    assert len(times) >= _NUM_BATCHES, "too few failures for a standard error"
    classes = np.repeat(np.arange(len(failures)), [len(one) for one in failures])
    order = np.argsort(times)
    gaps = np.diff(times[order], prepend=0.0)
    kept = 0
    progress = np.empty(len(times), dtype=np.int64)
    for number, (gap, lost) in enumerate(zip(gaps.tolist(), classes[order].tolist(), strict=True)):
        begin, left = kept, gap - restart_s if number else gap
        if left > 0:
            in_cycle = begin % schedule.every[-1]  # saves repeat after one of the last tier
            end_s = schedule.wall_s(in_cycle) + left
            done = schedule.num_saves_within(end_s)
            if done > in_cycle and end_s - schedule.wall_s(done) < schedule.in_flight_s:
                done -= 1
            kept += done - in_cycle
        if lost:
            kept -= kept % schedule.every[lost]
        progress[number] = kept - begin
    return _ratio(progress.astype(np.float64) * schedule.interval_s, gaps)


def _ratio(work_s: Floats, wall_s: Floats) -> Estimate:
    """Sum over sum, with the error of a ratio over batches of neighbours, which depend less."""
    usable = len(work_s) - len(work_s) % _NUM_BATCHES
    batches = (_NUM_BATCHES, usable // _NUM_BATCHES)
    work = work_s[:usable].reshape(batches).sum(axis=1)
    wall = wall_s[:usable].reshape(batches).sum(axis=1)
    mean = work.sum() / wall.sum()
    residual = work - mean * wall
    error = math.sqrt(float((residual**2).sum()) / (_NUM_BATCHES - 1) / _NUM_BATCHES)
    return Estimate(float(mean), error / float(wall.mean()), usable)
