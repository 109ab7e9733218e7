"""What it costs to wait for the slowest of many ranks.

Covers: the expected maximum of independent normal step times, and one rank that is always slower,
kept apart from random variation: the one grows with the number of ranks, the other does not. Does
not cover finding the slow rank on a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapeline.plan.inputs import Quantity

RANKS = Quantity(
    "ranks", "Ranks that wait for each other; default: the accelerators", most=1e9, whole=True
)
STEP_CV = Quantity(
    "step_cv",
    "Standard deviation of one rank's step time over its mean, the same on every rank",
    0.05,
    positive=False,
    most=1.0,
)
SLOW_RANK = Quantity(
    "slow_rank", "How many times slower one rank always is; 1 for none", 1.0, least=1.0, most=1e6
)
_REACH = 9.0  # standard deviations below which a normal variable does not count
_POINTS = 4000


@dataclass(frozen=True, slots=True)
class Alike:
    """So many ranks whose step times are independent and normal with one mean and spread."""

    num: int
    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Straggling:
    """Steps on so many ranks, in step times of an ordinary rank.

    Attributes:
        num_ranks: that wait for each other.
        random: the expected step if none is always slower.
        both: with the one that is.
        lost_random, lost: shares of throughput that waiting costs.
    """

    num_ranks: int
    random: float
    both: float
    lost_random: float
    lost: float


def expected_maximum(groups: Sequence[Alike]) -> float:
    """The mean of the largest of independent normal variables.

    Source: `E max = h − ∫ F` up to h, where F, the product of the distribution functions, is 1;
        the trapezoid rule, whose error vanishes for an integrand that is flat at both ends.
    """
    low = max(one.mean - _REACH * one.sd for one in groups)
    high = max(one.mean + (_REACH + 1) * one.sd for one in groups)
    if not high > low:
        return low
    width = (high - low) / _POINTS
    places = (low + width * number for number in range(1, _POINTS))
    inside = math.fsum(math.exp(sum(_log_below(one, x) for one in groups)) for x in places)
    return high - width * (inside + 0.5)  # half of F at `high`; at `low` it is nothing


def expected_normal_maximum(num: int) -> float:
    """The mean of the largest of `num` standard normal variables, m_n."""
    return expected_maximum([Alike(num, 0.0, 1.0)])


def straggling(num_ranks: int, *, step_cv: float, slow_rank: float) -> Straggling:
    """A step that ends with its slowest rank.

    Args:
        num_ranks: alike but for one.
        step_cv: of a rank's step time, whose mean is 1.
        slow_rank: the mean of that one; its spread grows with it.

    Source: the expected maximum, `1 + step_cv m_n` without a slow rank.
    """
    alike = 1 + step_cv * max(0.0, expected_normal_maximum(num_ranks))  # m_1 is 0
    one = Alike(1, slow_rank, step_cv * slow_rank)
    others = [Alike(num_ranks - 1, 1.0, step_cv)] if num_ranks > 1 else []
    both = max(alike, slow_rank, expected_maximum([one, *others]))
    return Straggling(num_ranks, alike, both, 1 - 1 / alike, 1 - 1 / both)


def _log_below(group: Alike, x: float) -> float:
    """The logarithm of the chance that all of a group stay below x."""
    if group.sd == 0:
        return 0.0 if x >= group.mean else -math.inf
    z = (x - group.mean) / group.sd / math.sqrt(2)
    if z < 0:
        below = math.erfc(-z) / 2
        return group.num * math.log(below) if below else -math.inf
    return group.num * math.log1p(-math.erfc(z) / 2)
