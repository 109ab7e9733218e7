"""What seeds tell: intervals from replicates, comparisons, and how many seeds would decide.

Pure functions of numbers. Values are taken as independent draws from one normal distribution,
which is what Student's intervals assume; a figure that isn't finite is a diverged run, is counted
and is in no interval.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from tapeline.errors import RunError
from tapeline.quantiles import student_quantile

CONFIDENCE, POWER = 0.95, 0.80
_MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True)
class Spread:
    """What k replicates of one configuration tell about a figure.

    Attributes:
        values: one of each run that didn't diverge.
        num_diverged: runs whose figure isn't finite.
        sd: their standard deviation, with k − 1 in the denominator.
        mean_half_width: t·sd/√k: the interval for the mean is mean ± that.
        next_half_width: t·sd·√(1 + 1/k): for the next run.
        confidence: of both.
    """

    values: tuple[float, ...]
    num_diverged: int
    mean: float
    sd: float
    mean_half_width: float
    next_half_width: float
    confidence: float

    @property
    def coverage(self) -> float:
        """The chance that the next run falls between the least and the greatest: (k−1)/(k+1)."""
        return (len(self.values) - 1) / (len(self.values) + 1)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        low, high = min(self.values), max(self.values)
        return {**asdict(self), "min": low, "max": high, "min_max_coverage": self.coverage}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two configurations differ by more than seed noise.

    Attributes:
        how: "paired" by seed, "unpaired" (Welch), or "one run" against replicates.
        difference: of the second to the first.
        seeds_to_decide: of each configuration, for a difference of this size to show with a
            chance of 80 %; None if more than 10,000, or none are needed.
    """

    how: Literal["paired", "unpaired", "one run"]
    difference: float
    half_width: float
    confidence: float
    seeds_to_decide: int | None

    @property
    def exceeds_noise(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.difference) > self.half_width

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {**asdict(self), "exceeds_noise": self.exceeds_noise}


def spread_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Spread:
    """The intervals of replicates.

    Raises:
        RunError: fewer than two are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        raise RunError(
            "replicates",
            expected="two runs or more with a finite figure",
            found=f"{len(finite)} of {len(values)}",
            fix="Train more seeds with `tapeline replicate`; one run tells nothing of its noise",
        )
    k = len(finite)
    mean, sd = float(np.mean(finite)), float(np.std(finite, ddof=1))
    t = student_quantile((1 + confidence) / 2, k - 1)
    return Spread(
        values=tuple(finite),
        num_diverged=len(values) - k,
        mean=mean,
        sd=sd,
        mean_half_width=t * sd / math.sqrt(k),
        next_half_width=t * sd * math.sqrt(1 + 1 / k),
        confidence=confidence,
    )


def compare(
    before: Mapping[int, float], after: Mapping[int, float], confidence: float = CONFIDENCE
) -> Comparison:
    """Whether `after` differs from `before`, each a figure by seed.

    Paired where two seeds or more are in both and finite: what a seed does to both alike then
    cancels. Else Welch's interval; a single run is held against the interval for the next run.

    Raises:
        RunError: neither has two runs.
    """
    first, second = _finite(before), _finite(after)
    common = sorted(first.keys() & second.keys())
    if len(common) >= 2:
        return _paired([second[seed] - first[seed] for seed in common], confidence)
    a, b = list(first.values()), list(second.values())
    if len(a) >= 2 and len(b) >= 2:
        return _welch(a, b, confidence)
    if not a or not b or max(len(a), len(b)) < 2:
        raise RunError(
            "comparison",
            expected="two seeds or more of one side, and a run of the other",
            found=f"{len(a)} and {len(b)} with a finite figure",
            fix="Train seeds with `tapeline replicate`; one run tells nothing of its noise",
        )
    many, one = (a, b) if len(a) > 1 else (b, a)
    spread = spread_of(many, confidence)
    difference = b[0] - spread.mean if one is b else spread.mean - a[0]
    return Comparison(
        "one run",
        difference,
        spread.next_half_width,
        confidence,
        _seeds(difference, math.sqrt(2) * spread.sd, spread.next_half_width, 2, confidence),
    )


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _paired(differences: Sequence[float], confidence: float) -> Comparison:
    spread = spread_of(differences, confidence)
    half = spread.mean_half_width
    seeds = _seeds(spread.mean, spread.sd, half, 1, confidence)
    return Comparison("paired", spread.mean, half, confidence, seeds)


def _welch(a: Sequence[float], b: Sequence[float], confidence: float) -> Comparison:
    """Welch 1947; degrees of freedom after Satterthwaite."""
    parts = [np.var(values, ddof=1) / len(values) for values in (a, b)]
    variance = float(sum(parts))
    difference = float(np.mean(b) - np.mean(a))
    if not variance:
        return Comparison("unpaired", difference, 0.0, confidence, None)
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True)
    )
    half = student_quantile((1 + confidence) / 2, float(freedom)) * math.sqrt(variance)
    sd = math.sqrt(float(np.var(a, ddof=1) + np.var(b, ddof=1)))
    return Comparison(
        "unpaired", difference, half, confidence, _seeds(difference, sd, half, 2, confidence)
    )


def _seeds(difference: float, sd: float, half: float, groups: int, confidence: float) -> int | None:
    """None where the seeds that were trained decide already."""
    if abs(difference) > half:
        return None
    return seeds_to_decide(difference, sd, groups=groups, confidence=confidence)


def seeds_to_decide(
    difference: float,
    sd: float,
    *,
    groups: int = 1,
    confidence: float = CONFIDENCE,
) -> int | None:
    """The least k with (t_confidence + t_power)·sd/√k ≤ |difference|; None above 10,000.

    Snedecor and Cochran, Statistical Methods, on sample sizes; t in place of the normal's
    quantiles, with groups·(k − 1) degrees of freedom.

    Args:
        sd: of the difference of two runs.
        groups: 1 if they are paired, 2 if not.
        confidence: of the interval that should leave out zero, which it does in 80 % of trials.
    """
    if not difference:
        return None

    def decides(k: int) -> bool:
        freedom = groups * (k - 1)
        t = student_quantile((1 + confidence) / 2, freedom) + student_quantile(POWER, freedom)
        return t * sd / math.sqrt(k) <= abs(difference)

    found = bisect_left(range(_MOST_SEEDS + 1), True, lo=2, key=decides)
    return found if found <= _MOST_SEEDS else None
