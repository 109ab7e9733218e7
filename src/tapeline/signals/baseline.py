"""How far a value lies from those before it, in robust units."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

BASELINE = 50  # values; a spike inside it moves neither the median nor the MAD
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_LEAST_SIGMA = 0.01  # on the logarithm: a value that never moves must not make every move a spike
_AT_ONCE = 4096  # windows, so that a long series doesn't need all of them in memory


def scale(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The values to compare, and the least standard deviation to compare them by.

    Positive values are compared by their logarithm: losses and norms are skewed, and fall by
    orders of magnitude.
    """
    if len(values) and values.min() > 0:
        return np.log(values), _LEAST_SIGMA
    largest = float(np.median(np.abs(values))) if len(values) else 0.0
    return values, max(_LEAST_SIGMA * largest, np.finfo(np.float64).tiny)


def center(values: NDArray[np.float64], least_sigma: float) -> tuple[float, float]:
    """The median, and the standard deviation by the median absolute deviation."""
    median = float(np.median(values))
    return median, max(_SIGMA_PER_MAD * float(np.median(np.abs(values - median))), least_sigma)


def scores(
    values: NDArray[np.float64], start: int, least_sigma: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The scores of `values[start:]` and the medians that they are over.

    A score is the distance from the median of the `BASELINE` values before, in standard
    deviations estimated from their median absolute deviation.

    Args:
        values: finite `[n]`.
        start: at least `BASELINE`.
        least_sigma: a floor for the standard deviation.

    Source: Leys et al. 2013, doi 10.1016/j.jesp.2013.03.013.
    """
    assert start >= BASELINE, "there is a whole baseline before the first"
    found, medians = [], []
    for at in range(start, len(values), _AT_ONCE):
        judged = values[at : at + _AT_ONCE]
        before = sliding_window_view(values[at - BASELINE : at + len(judged) - 1], BASELINE)
        median = np.median(before, axis=1)
        mad = np.median(np.abs(before - median[:, None]), axis=1)
        found.append((judged - median) / np.maximum(_SIGMA_PER_MAD * mad, least_sigma))
        medians.append(median)
    none = np.empty(0)
    return np.concatenate([none, *found]), np.concatenate([none, *medians])


def medians(values: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """For each of `values[start:]` the median of the `BASELINE` values before."""
    assert start >= BASELINE, "there is a whole baseline before the first"
    before = sliding_window_view(values[start - BASELINE : -1], BASELINE)
    return np.concatenate(
        [np.median(before[at : at + _AT_ONCE], axis=1) for at in range(0, len(before), _AT_ONCE)]
    )


def median_error(sigma: float, n: int) -> float:
    """The standard error of the median of n normal values, `sigma sqrt(pi / 2n)`, for large n."""
    return sigma * math.sqrt(math.pi / 2 / n)


def noise(values: NDArray[np.float64]) -> float:
    """The standard deviation from one value to the next, whatever trend they follow."""
    if len(values) < 2:
        return 0.0
    steps = np.diff(values)
    return _SIGMA_PER_MAD * float(np.median(np.abs(steps - np.median(steps)))) / 2**0.5
