"""What a few seeds can tell: intervals, the seeds a comparison needs, and the winner's curse.

Covers: Student's t without tables, the spread of a mean and of a next run, how many seeds tell a
difference, and how far the best of many noisy scores overstates itself. Assumes normal scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from tapeline.plan.stragglers import expected_normal_maximum

TWO_SIDED = 0.975
_MANY = 1000  # degrees of freedom from which two terms of the expansion are exact to 1e-6


def student_below(t: float, degrees: int) -> float:
    """The chance that a Student t variable stays below t.

    Source: Abramowitz and Stegun 26.7.3 and 26.7.4, finite sums for whole degrees.
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for number in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= square * (number + 1) / (number + 2)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return 0.5 + math.copysign(inside, t) / 2


def student_quantile(probability: float, degrees: int) -> float:
    """The value that a Student t variable stays below with a probability of a half or more.

    Source: `student_below` by bisection; beyond a thousand degrees Abramowitz and Stegun 26.7.5.
    """
    assert 0.5 <= probability < 1, "asked for the upper half"
    if degrees > _MANY:
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * degrees)
    low, high = 0.0, 1.0
    while student_below(high, degrees) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if student_below(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


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
    low, high = 2, 2
    while difference_half_width(sd, high) > difference:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if difference_half_width(sd, middle) <= difference:
            high = middle
        else:
            low = middle + 1
    return high


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
        difference: that should be told.
        num_seeds: that each of the two needs for it.
        curse: of the pick.
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
