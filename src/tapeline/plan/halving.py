"""Successive halving by integers: rungs, ladders, brackets and what they cost.

Covers: one ladder restarted or resumed, Hyperband's brackets. Does not cover choosing.

All powers are integer powers: `floor(log(243, 3))` is 4 in floating point and would drop a rung.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Rung:
    """So many configurations, each run up to so much."""

    num_configs: int
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs, each with the best of the one below; the last one is of full runs.

    Attributes:
        rungs: the cheapest first.
        skipped: rungs of the whole range under the first; 0 for the ladder that cuts the most.
    """

    rungs: tuple[Rung, ...]
    skipped: int = 0

    @property
    def restarted(self) -> float:
        """GPU-hours if each rung begins anew."""
        return sum(rung.num_configs * rung.gpu_hours for rung in self.rungs)

    @property
    def resumed(self) -> float:
        """GPU-hours if each rung goes on from the one below."""
        return sum(
            rung.num_configs * added for rung, added in zip(self.rungs, self.added, strict=True)
        )

    @property
    def added(self) -> tuple[float, ...]:
        """GPU-hours that each rung adds to a run of the one below."""
        hours = [0.0, *(rung.gpu_hours for rung in self.rungs)]
        return tuple(b - a for a, b in pairwise(hours))


def num_rungs(least: float, full: float, eta: int) -> int:
    """How many rungs lie between the shortest run that says anything and a full one.

    Source: Jamieson and Talwalkar 2016, arXiv 1502.07943: `1 + floor(log_eta(full / least))`.
    """
    rungs = 1
    while least * eta**rungs <= full * (1 + 1e-12):  # a third of 64, thrice, is less than 64
        rungs += 1
    return rungs


def ladder(num_first: int, rungs: int, full: float, eta: int, *, skipped: int = 0) -> Ladder:
    """A ladder that ends with full runs: `n // eta^i` configurations up to `full / eta^(s − i)`.

    Source: Jamieson and Talwalkar 2016, arXiv 1502.07943.
    """
    return Ladder(
        tuple(
            Rung(num_first // eta**number, full / eta ** (rungs - 1 - number))
            for number in range(rungs)
        ),
        skipped,
    )


def hyperband(rungs: int, full: float, eta: int) -> tuple[Ladder, ...]:
    """One round of Hyperband: a ladder from each rung, the most aggressive first.

    Source: Li et al. 2018, arXiv 1603.06560, algorithm 1: `ceil(S eta^s / (s + 1))` configurations
        with S rungs in all and s cuts.
    """
    return tuple(
        ladder(-(-rungs * eta**cuts // (cuts + 1)), cuts + 1, full, eta, skipped=rungs - 1 - cuts)
        for cuts in range(rungs - 1, -1, -1)
    )
