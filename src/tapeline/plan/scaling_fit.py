"""A saturating power law fitted to proxies, with bands from a bootstrap.

Covers: the fit, its bands at other sizes, the error at the largest proxy when it is left out, and
what a full run is expected to gain for its cost. Does not cover a law in model and data apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapelineError
from tapeline.plan.scaling import Proxy, check_proxies
from tapeline.plan.seeds import TWO_SIDED
from tapeline.quantiles import student_quantile

Floats = npt.NDArray[np.float64]
NUM_SAMPLES = 2000
_SEED = 0
_POWERS = np.geomspace(0.02, 3.0, 600)
_PARAMETERS = 3
_ENDLESS = 10**9  # degrees of freedom of a normal quantile
_BAND = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Fit:
    """`loss = floor + above × (hours / largest)^(−power)`.

    Attributes:
        floor: what no compute goes below.
        above: of the largest proxy over the floor.
        largest_gpu_hours: of the largest proxy that was fitted.
        residual: standard deviation of a proxy about the curve.
    """

    floor: float
    above: float
    power: float
    largest_gpu_hours: float
    residual: float

    def loss(self, gpu_hours: float) -> float:
        """Of a run of so many hours, on the curve."""
        decline: float = (gpu_hours / self.largest_gpu_hours) ** -self.power
        return self.floor + self.above * decline


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The largest size predicted from the others.

    Attributes:
        ratio: of it to the largest of the others.
        actual: mean of the proxies there.
    """

    ratio: float
    predicted: float
    actual: float

    @property
    def error(self) -> float:
        """Actual less predicted."""
        return self.actual - self.predicted


@dataclass(frozen=True, slots=True)
class Reach:
    """A run of some size.

    Attributes:
        loss: on the curve.
        low, high: the 95 % band of one such run.
        gain: the curve at the largest proxy less here.
        gain_low, gain_high: the 95 % band of that, for one run here.
    """

    gpu_hours: float
    loss: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    cost: float


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """What a full run is expected to reach.

    Attributes:
        left_out: the test of it that the proxies allow.
        reaches: sizes from the largest proxy to the full run, which is the last.
        gain_is_told: whether the band of the full run's gain lies above 0, and the gain above the
            error of the size left out.
    """

    fit: Fit
    left_out: LeftOut
    reaches: tuple[Reach, ...]
    gain_is_told: bool

    @property
    def full(self) -> Reach:
        """The full run."""
        return self.reaches[-1]


def plan_scaling(
    proxies: Sequence[Proxy], full_gpu_hours: float, *, max_ratio: float, price_per_hour: float
) -> ScalingPlan:
    """What a full run would gain over the largest proxy, and for how much.

    Args:
        proxies: of five sizes or more.
        max_ratio: beyond the largest proxy, nothing is said.
        price_per_hour: of one GPU.

    Raises:
        TapelineError: too few proxies, too far beyond them, or losses that don't fall.

    Source: least squares over a grid of powers, each with its best floor and factor; bands by
        resampling residuals, widened by `sqrt(n / (n − 3))` (Davison and Hinkley 1997, ch. 6) and
        by Student's t over the normal quantile: of few residuals the spread is badly known.
    """
    check_proxies(proxies, full_gpu_hours, max_ratio)
    hours = np.array([one.gpu_hours for one in proxies])
    losses = np.array([one.loss for one in proxies])
    fit = fit_law(hours, losses)
    on_curve = np.array([fit.loss(one) for one in hours])
    degrees = len(hours) - _PARAMETERS
    few = student_quantile(TWO_SIDED, degrees) / student_quantile(TWO_SIDED, _ENDLESS)
    residuals = (losses - on_curve) * math.sqrt(len(hours) / degrees) * few
    residuals -= residuals.mean()
    generator = np.random.default_rng(_SEED)
    drawn = on_curve + generator.choice(residuals, (NUM_SAMPLES, len(hours)))
    stray = generator.choice(residuals, NUM_SAMPLES)
    samples = _fit_many(hours / fit.largest_gpu_hours, drawn)
    reaches = tuple(
        _reach(fit, samples, stray, size, price_per_hour)
        for size in _sizes(fit.largest_gpu_hours, full_gpu_hours)
    )
    left_out = _leave_largest_out(hours, losses)
    full = reaches[-1]
    told = full.gain_low > 0 and full.gain > abs(left_out.error)
    return ScalingPlan(fit, left_out, reaches, told)


def fit_law(hours: Floats, losses: Floats) -> Fit:
    """The law of least squares.

    Raises:
        TapelineError: the losses don't fall with compute.
    """
    largest = float(hours.max())
    floor, above, power = (float(part[0]) for part in _fit_many(hours / largest, losses[None]))
    if above <= 0:
        raise TapelineError(
            "--proxy",
            expected="losses that fall with compute",
            found="none that do",
            fix="Look at the proxies first: a law would only hide that larger ones are no better",
        )
    fit = Fit(floor, above, power, largest, 0.0)
    squares = sum((loss - fit.loss(at)) ** 2 for at, loss in zip(hours, losses, strict=True))
    spread = math.sqrt(squares / max(1, len(hours) - _PARAMETERS))
    return Fit(floor, above, power, largest, spread)


def _fit_many(sizes: Floats, losses: Floats) -> tuple[Floats, Floats, Floats]:
    """Floor, factor and power of each row of losses [sample, proxy]; a factor is never negative.

    For each power the factor is a slope, so that the best power explains the most variance.
    """
    terms = sizes[None] ** -_POWERS[:, None]  # [power, proxy]
    centred = terms - terms.mean(axis=1, keepdims=True)
    slopes = np.maximum(losses @ centred.T, 0.0)  # times the variance of the terms
    variance = (centred**2).sum(axis=1)
    best = (slopes**2 / variance).argmax(axis=1)
    above = slopes[np.arange(len(losses)), best] / variance[best]
    floor: Floats = losses.mean(axis=1) - above * terms.mean(axis=1)[best]
    return floor, above, _POWERS[best]


def _reach(
    fit: Fit, samples: tuple[Floats, Floats, Floats], stray: Floats, hours: float, price: float
) -> Reach:
    floor, above, power = samples
    reached = floor + above * (hours / fit.largest_gpu_hours) ** -power + stray
    low, high = np.percentile(reached, _BAND)
    gain_low, gain_high = np.percentile(floor + above - reached, _BAND)
    loss = fit.loss(hours)
    return Reach(
        hours,
        loss,
        float(min(low, loss)),
        float(max(high, loss)),
        fit.floor + fit.above - loss,
        float(gain_low),
        float(gain_high),
        hours * price,
    )


def _sizes(largest: float, full: float) -> list[float]:
    sizes = [largest]
    while sizes[-1] * 2 < full * (1 - 1e-9):
        sizes.append(sizes[-1] * 2)
    return [*sizes, full] if full > largest else sizes


def _leave_largest_out(hours: Floats, losses: Floats) -> LeftOut:
    largest = hours.max()
    others = hours < largest
    fit = fit_law(hours[others], losses[others])
    return LeftOut(
        float(largest / fit.largest_gpu_hours),
        fit.loss(float(largest)),
        float(losses[~others].mean()),
    )
