"""Quantiles of the distributions that plans, comparisons and failure rates are told with.

Thin typed faces of SciPy's special functions, so that their argument orders are met in one place.
SciPy is imported when one is asked for: the command line's help needs none.
"""

from __future__ import annotations


def chi_square_quantile(probability: float, degrees: float) -> float:
    """The value that a chi-square variable stays below with a probability."""
    assert 0 < probability < 1, "a quantile of 0 or 1 is no number"
    assert degrees > 0, "a sum of no squares has no distribution"
    from scipy.special import chdtri

    return float(chdtri(degrees, 1 - probability))


def student_below(t: float, degrees: float) -> float:
    """The chance that a Student t variable stays below t."""
    from scipy.special import stdtr

    return float(stdtr(degrees, t))


def student_quantile(probability: float, degrees: float) -> float:
    """The value that a Student t variable stays below with a probability."""
    assert 0 < probability < 1, "a quantile of 0 or 1 is no number"
    assert degrees > 0, "no degree of freedom, no spread"
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
