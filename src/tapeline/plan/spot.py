"""Spot machines or on demand: what a useful hour costs on each, and where the two break even.

Covers: interruptions with and without a notice that is long enough to save, by each way of
saving, and the discount and the rate at which spot stops paying. Does not cover waiting for
machines that can't be had, nor prices that move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Quantity
from tapeline.plan.job import Bill, Job
from tapeline.plan.saving import (
    FACTORS,
    Failures,
    Refused,
    Save,
    each_way,
    expected_efficiency,
)
from tapeline.reliability import exact_interval_s

SPOT_PRICE = Quantity("spot_price_per_hour", "Price of one spot accelerator for an hour", 1.0)
INTERRUPTION_HOURS = Quantity(
    "interruption_hours", "Mean hours between interruptions of the whole job on spot", 4.0
)
NOTICE_SECONDS = Quantity(
    "notice_seconds", "Seconds from the notice of an interruption to its end", 120.0, positive=False
)
_LEAST_EFFICIENCY = 1e-6  # money over less is no plan


@dataclass(frozen=True, slots=True)
class Interruptions:
    """How often spot machines are taken away, and how long before that they say so."""

    mean_s: float
    notice_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of machine with one way of saving.

    Attributes:
        price_per_hour: of one accelerator.
        interval_s: the best one, exact for exponential failures.
        efficiency: share of paid time that is useful.
        cost_per_useful_hour: price over efficiency.
    """

    price_per_hour: float
    interval_s: float
    efficiency: float
    cost_per_useful_hour: float
    bill: Bill | None


@dataclass(frozen=True, slots=True)
class SpotWay:
    """Both kinds of machine with one way of saving.

    Attributes:
        saves_in_notice: whether a whole save fits the notice, so that no work is lost.
        break_even_discount: below this share off the price, spot costs more.
        break_even_s: with interruptions more often than this on average, spot costs more; None
            if it does however rare they are.
        sensitivity: (mean seconds between interruptions, offer) for rarer and more frequent ones.
    """

    name: str
    saves_in_notice: bool
    on_demand: Offer
    spot: Offer
    break_even_discount: float
    break_even_s: float | None
    sensitivity: tuple[tuple[float, Offer], ...]

    @property
    def pays(self) -> bool:
        """Whether a useful hour is cheaper on spot."""
        return self.spot.cost_per_useful_hour < self.on_demand.cost_per_useful_hour


@dataclass(frozen=True, slots=True)
class SpotPlan:
    """Each way of saving on both kinds, the cheapest of all, and ways that can't carry the job."""

    ways: tuple[SpotWay, ...]
    best: str
    take_spot: bool
    refused: tuple[Refused, ...] = ()


def plan_spot(
    saves: Sequence[Save],
    failures: Failures,
    interruptions: Interruptions,
    job: Job,
    spot_price_per_hour: float,
) -> SpotPlan:
    """What a useful hour costs on spot and on demand.

    Args:
        failures: of the hardware, on both kinds; restarts are as long after an interruption.
        interruptions: on spot, besides.
        job: its price is the one on demand.
        spot_price_per_hour: of one accelerator.

    Raises:
        TapelineError: with no way of saving does useful work get done on both kinds.

    Source: price over efficiency. Where a save fits the notice, an interruption costs that save
        and a restart; where not, it is one more failure of the exponential model (Daly 2006).
    """
    ways, refused = each_way(
        saves, lambda save: _way(save, failures, interruptions, job, spot_price_per_hour)
    )
    best = min(
        ways, key=lambda way: min(way.on_demand.cost_per_useful_hour, way.spot.cost_per_useful_hour)
    )
    return SpotPlan(ways, best.name, best.pays, refused)


def _way(
    save: Save, failures: Failures, interruptions: Interruptions, job: Job, spot_price: float
) -> SpotWay:
    cheap = replace(job, price_per_hour=spot_price)
    on_demand = _offer(save, failures, None, job)
    spot = _offer(save, failures, interruptions, cheap)

    def costs_less(mean_s: float) -> bool:
        rarer = replace(interruptions, mean_s=mean_s)
        return spot_price * on_demand.efficiency < job.price_per_hour * _efficiency(
            save, failures, rarer
        )

    return SpotWay(
        save.name,
        _saves_in(save, interruptions),
        on_demand,
        spot,
        1 - spot.efficiency / on_demand.efficiency,
        _edge_s(costs_less) if spot_price < job.price_per_hour else None,
        tuple(
            (mean_s, _offer(save, failures, replace(interruptions, mean_s=mean_s), cheap))
            for mean_s in (interruptions.mean_s * factor for factor in FACTORS)
            if _efficiency(save, failures, replace(interruptions, mean_s=mean_s))
            > _LEAST_EFFICIENCY
        ),
    )


def _offer(save: Save, failures: Failures, interruptions: Interruptions | None, job: Job) -> Offer:
    efficiency = _efficiency(save, failures, interruptions)
    if efficiency < _LEAST_EFFICIENCY:
        raise TapelineError(
            f"{save.name}, {'spot' if interruptions else 'on demand'}",
            expected="a millionth or more of the time to be useful",
            found="less at any interval",
            fix="Give a longer time between failures or interruptions, or a shorter restart",
        )
    return Offer(
        job.price_per_hour,
        _interval_s(save, _failing(save, failures, interruptions)),
        efficiency,
        job.price_per_hour / efficiency,
        job.bill(efficiency),
    )


def _efficiency(save: Save, failures: Failures, interruptions: Interruptions | None) -> float:
    failing = _failing(save, failures, interruptions)
    efficiency = expected_efficiency(save, failing, _interval_s(save, failing))
    if interruptions and _saves_in(save, interruptions):
        pause_s = save.snapshot_s + save.write_s + failures.restart_s
        efficiency *= interruptions.mean_s / (interruptions.mean_s + pause_s)
    return efficiency


def _failing(save: Save, failures: Failures, interruptions: Interruptions | None) -> Failures:
    """Failures that lose work: those of the hardware, and interruptions that come too suddenly."""
    if interruptions is None or _saves_in(save, interruptions):
        return failures
    return replace(failures, mtbf_s=1 / (1 / failures.mtbf_s + 1 / interruptions.mean_s))


def _saves_in(save: Save, interruptions: Interruptions) -> bool:
    return save.snapshot_s + save.write_s <= interruptions.notice_s


def _interval_s(save: Save, failures: Failures) -> float:
    best_s = exact_interval_s(blocking_s=save.blocking_s, mtbf_s=failures.mtbf_s)
    return max(best_s, save.in_flight_s)


def _edge_s(costs_less: Callable[[float], bool]) -> float:
    """The mean time from which on spot costs less, by bisection over its logarithm."""
    low, high = -40.0, 80.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if costs_less(math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)
