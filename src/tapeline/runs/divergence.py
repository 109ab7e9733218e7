"""Where two loss curves part: the first step that differs at all, and the first outside the noise.

Pure functions of series. The band is what seeds do: a difference between two runs that other seeds
would make as well is no finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from tapeline.quantiles import student_quantile
from tapeline.runs.spread import CONFIDENCE
from tapeline.signals import Series

# Steps outside in a row until it counts: one in twenty is outside by chance.
IN_A_ROW = 5
# The spread at a step is taken over its neighbours too: of k runs alone it would be mostly noise.
_NEIGHBOURS = 25


@dataclass(frozen=True, slots=True)
class Divergence:
    """How two loss curves part.

    Attributes:
        compared: steps that both have.
        first_difference: the first of them at which the losses aren't the same bits; None: never.
        leaves_band: the first step of those from which on the difference stays outside the band
            for five steps in a row, or one of the losses isn't finite; None: never, or no band.
        num_replicates: runs that the band was made from; 0: there is no band.
        band: at that step, or at the last one compared: half the width.
    """

    compared: int
    first_difference: int | None
    leaves_band: int | None
    num_replicates: int
    band: float | None


def diverge(first: Series, second: Series, replicates: Sequence[Series] = ()) -> Divergence:
    """Compare two loss curves.

    Args:
        replicates: of runs that differ in nothing but their seeds; two or more make a band.
    """
    steps, at, of = np.intersect1d(first.steps, second.steps, return_indices=True)
    a, b = first.values[at], second.values[of]
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    found = int(steps[differs.argmax()]) if differs.any() else None
    band = seed_band(steps, replicates) if len(replicates) >= 2 else None
    if band is None or not len(steps):
        return Divergence(len(steps), found, None, 0, None)
    leaves = _leaves(a, b, band)
    width = float(band[-1 if leaves is None else leaves])
    return Divergence(
        compared=len(steps),
        first_difference=found,
        leaves_band=None if leaves is None else int(steps[leaves]),
        num_replicates=len(replicates),
        band=width if math.isfinite(width) else None,
    )


def _leaves(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], band: npt.NDArray[np.float64]
) -> int | None:
    with np.errstate(invalid="ignore"):
        outside = np.abs(a - b) > band
    broken = np.isfinite(a) != np.isfinite(b)
    in_a_row = np.convolve(outside, np.ones(IN_A_ROW, np.int64))[IN_A_ROW - 1 :] == IN_A_ROW
    found = np.flatnonzero(in_a_row | broken)
    return int(found[0]) if len(found) else None


def seed_band(
    steps: npt.NDArray[np.int64], replicates: Sequence[Series]
) -> npt.NDArray[np.float64] | None:
    """t·sd·√2 at each step: how far apart two runs are with other seeds; infinite if unknown.

    Args:
        replicates: two or more.

    Returns:
        `[steps]`, in the unit of the loss; None where they have no step in common.
    """
    common = reduce(np.intersect1d, (one.steps for one in replicates), steps)
    if not len(common):
        return None
    table = np.stack([one.values[np.searchsorted(one.steps, common)] for one in replicates])
    variance = np.where(np.isfinite(table).all(axis=0), table.var(axis=0, ddof=1), np.nan)
    known = np.isfinite(variance)
    window = np.ones(2 * _NEIGHBOURS + 1)
    total = np.convolve(np.where(known, variance, 0.0), window)[_NEIGHBOURS : -_NEIGHBOURS or None]
    count = np.convolve(known.astype(float), window)[_NEIGHBOURS : -_NEIGHBOURS or None]
    pooled = np.divide(total, count, out=np.full(len(common), np.inf), where=count > 0)
    t = student_quantile((1 + CONFIDENCE) / 2, len(replicates) - 1)
    band = np.full(len(steps), np.inf)
    band[np.searchsorted(steps, common)] = t * np.sqrt(2 * pooled)
    return band
