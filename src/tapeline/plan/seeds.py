"""What a few seeds can tell: intervals, the seeds a comparison needs, and the winner's curse.

Covers: Student's t without tables, the spread of a mean and of a next run, how many seeds tell a
difference, and how far the best of many noisy scores overstates itself. Assumes normal scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from tapeline.plan.stragglers import expected_normal_maximum
from tapeline.quantiles import student_quantile

TWO_SIDED = 0.975


def mean_half_width(sd: float, num_seeds: int) -> float:
    """Half of the 95 % interval of the mean of two or more seeds, `t s / sqrt(k)`."""
    return student_quantile(TWO_SIDED, num_seeds - 1) * sd / math.sqrt(num_seeds)


def next_half_width(sd: float, num_seeds: int) -> float:
    """Half of the 95 % interval of one more run, `t s sqrt(1 + 1/k)`."""
    return student_quantile(TWO_SIDED, num_seeds - 1) * sd * math.sqrt(1 + 1 / num_seeds)


def chance_next_inside(num_seeds: int) -> float:
    """The chance that one more run falls between the least and the most of k: `(k − 1)/(k + 1)`."""
    return (num_seeds - 1) / (num_seeds + 1)


def difference_half_width(sd: float, num_seeds: int) -> float:
    """Half of the 95 % interval of the difference of two means of k seeds each.

    Source: the two-sample t interval with equal variances, `t(2k − 2) s sqrt(2/k)`.
    """
    return student_quantile(TWO_SIDED, 2 * num_seeds - 2) * sd * math.sqrt(2 / num_seeds)


def seeds_needed(sd: float, difference: float) -> int:
    """The fewest seeds of each of two that tell a difference; at least two.

    Source: `difference_half_width` no wider than the difference.
    """

    def tells(num_seeds: int) -> bool:
        return difference_half_width(sd, num_seeds) <= difference

    most = 2
    while not tells(most):
        most *= 2
    return bisect_left(range(most), True, lo=2, key=tells)


@dataclass(frozen=True, slots=True)
class Curse:
    """The best of noisy scores: what it is worth, and by how much its score says more."""

    value: float
    overstated: float


def winners_curse(num: int, noise: float) -> Curse:
    """The pick of `num` scores that are a standard normal quality plus normal noise.

    Source: the expected quality is the share `1/(1 + s²)` of the expected score `m_n sqrt(1 + s²)`
        of the best.
    """
    best = max(0.0, expected_normal_maximum(num))
    spread = math.hypot(1.0, noise)
    return Curse(best / spread, noise**2 * best / spread)


@dataclass(frozen=True, slots=True)
class SeedsRow:
    """Half widths of 95 % intervals from so many seeds, and the chance to be in their range."""

    num_seeds: int
    mean: float
    next_run: float
    difference: float
    next_inside: float


@dataclass(frozen=True, slots=True)
class Final:
    """The comparison of the best two of a search on fresh seeds.

    Attributes:
        num_runs: random full runs whose best is picked.
        num_seeds: that each of the two needs for it.
        rows: what other numbers of seeds tell.
    """

    num_runs: int
    difference: float
    num_seeds: int
    curse: Curse
    rows: tuple[SeedsRow, ...]


def plan_final(num_runs: int, noise: float, difference: float) -> Final:
    """How many seeds the final needs, with the noise and the difference in one unit."""
    needed = seeds_needed(noise, difference)
    return Final(
        num_runs,
        difference,
        needed,
        winners_curse(num_runs, noise),
        tuple(
            SeedsRow(
                num,
                mean_half_width(noise, num),
                next_half_width(noise, num),
                difference_half_width(noise, num),
                chance_next_inside(num),
            )
            for num in sorted({2, 3, 5, 10, needed})
        ),
    )
