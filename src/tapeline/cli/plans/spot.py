"""`tapeline plan spot`: machines that may be taken away, or those that may not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, bill_cells, option, points, show
from tapeline.cli.plans.from_run import measured
from tapeline.plan import Inputs
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS, take_job
from tapeline.plan.saving import (
    ASYNC_FRACTION,
    CHECKPOINT_SECONDS,
    MTBF_HOURS,
    RESTART_MINUTES,
    S_PER_HOUR,
    S_PER_MINUTE,
    SHARDS,
    WRITE_SLOWDOWN,
    Failures,
    take_mtbf,
    take_saves,
)
from tapeline.plan.spot import (
    INTERRUPTION_HOURS,
    NOTICE_SECONDS,
    SPOT_PRICE,
    Interruptions,
    SpotPlan,
    SpotWay,
    plan_spot,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table


def spot(
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    spot_price_per_hour: Annotated[float | None, option(SPOT_PRICE)] = None,
    interruption_hours: Annotated[float | None, option(INTERRUPTION_HOURS)] = None,
    notice_seconds: Annotated[float | None, option(NOTICE_SECONDS)] = None,
    mtbf_hours: Annotated[float | None, option(MTBF_HOURS)] = None,
    checkpoint_seconds: Annotated[float | None, option(CHECKPOINT_SECONDS)] = None,
    restart_minutes: Annotated[float | None, option(RESTART_MINUTES)] = None,
    shards: Annotated[int | None, option(SHARDS)] = None,
    async_fraction: Annotated[float | None, option(ASYNC_FRACTION)] = None,
    write_slowdown: Annotated[float | None, option(WRITE_SLOWDOWN)] = None,
    useful_hours: Annotated[float | None, option(USEFUL_HOURS)] = None,
    accelerators: Annotated[int | None, option(ACCELERATORS)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What a useful hour costs on spot and on demand, and where the two break even.

    Example: tapeline plan spot --spot-price-per-hour 1 --interruption-hours 4
    """
    inputs = Inputs(measured(from_run))
    job = take_job(inputs, useful_hours, accelerators, price_per_hour)
    spot_price = inputs.take(SPOT_PRICE, spot_price_per_hour)
    interruptions = Interruptions(
        inputs.take(INTERRUPTION_HOURS, interruption_hours) * S_PER_HOUR,
        inputs.take(NOTICE_SECONDS, notice_seconds),
    )
    failures = Failures(
        take_mtbf(inputs, mtbf_hours, None, None).middle_s,
        inputs.take(RESTART_MINUTES, restart_minutes) * S_PER_MINUTE,
    )
    saves = take_saves(inputs, checkpoint_seconds, shards, async_fraction, write_slowdown)
    plan = plan_spot(saves, failures, interruptions, job, spot_price)
    notes = [_decision(plan), *(f"Left out: {one.why}" for one in plan.refused)]
    show(
        Answer("spot", inputs, plan, _tables(plan), notes),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan),
    )


def _tables(plan: SpotPlan) -> list[Table]:
    from tapeline.report import Table

    return [
        Table(
            [
                *("strategy", "machines", "save fits notice", "interval s", "useful"),
                *("per useful hour", "wall hours", "cost"),
            ],
            [
                [
                    way.name,
                    kind,
                    fits,
                    offer.interval_s,
                    points(offer.efficiency),
                    offer.cost_per_useful_hour,
                    *bill_cells(offer.bill),
                ]
                for way in plan.ways
                for kind, fits, offer in (
                    ("on demand", None, way.on_demand),
                    ("spot", "yes" if way.saves_in_notice else "no", way.spot),
                )
            ],
            "Model, exact for exponential failures (Daly 2006); money is the price of one "
            "accelerator over the useful share",
        ),
        Table(
            ["strategy", "break-even discount", "break-even hours between interruptions"],
            [
                [way.name, points(way.break_even_discount), _hours(way.break_even_s)]
                for way in plan.ways
            ],
            "Where spot and on demand cost the same for the same way of saving (model)",
        ),
        Table(
            ["strategy", "hours between interruptions", "useful", "per useful hour", "cost"],
            [
                [
                    way.name,
                    _hours(mean_s),
                    points(offer.efficiency),
                    offer.cost_per_useful_hour,
                    bill_cells(offer.bill)[1],
                ]
                for way in plan.ways
                for mean_s, offer in way.sensitivity
            ],
            "Spot with other interruptions (model)",
        ),
    ]


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / S_PER_HOUR


def _decision(plan: SpotPlan) -> str:
    from tapeline.report import format_number

    way = next(one for one in plan.ways if one.name == plan.best)
    spot_cost, cost = (format_number(one.cost_per_useful_hour) for one in (way.spot, way.on_demand))
    beside = f"{spot_cost} a useful hour against {cost} on demand, {way.name}"
    if way.break_even_s is None:
        return f"Stay on demand: spot is no cheaper by the hour ({beside})."
    price = format_number(way.on_demand.price_per_hour * (1 - way.break_even_discount))
    hours = format_number(way.break_even_s / S_PER_HOUR)
    limits = (
        f"interruptions are {hours} h or more apart on average, or its price stays below {price}"
    )
    if plan.take_spot:
        return f"Take spot ({beside}). It pays while {limits}."
    return f"Stay on demand ({beside}). Spot would pay once {limits}."


def _figure(plan: SpotPlan) -> Figure:
    from tapeline.report.plan_figures import sweep_figure

    curves = {}
    for way in plan.ways:
        hours = [mean_s / S_PER_HOUR for mean_s, _ in way.sensitivity]
        costs = [offer.cost_per_useful_hour for _, offer in way.sensitivity]
        curves[way.name] = (hours, costs)
    best: SpotWay = next(one for one in plan.ways if one.name == plan.best)
    on_demand = best.on_demand.cost_per_useful_hour
    curves["on demand"] = (curves[best.name][0], [on_demand] * len(best.sensitivity))
    return sweep_figure(
        curves,
        {},
        x_label="mean time between interruptions (h)",
        y_label="cost of a useful accelerator-hour",
        note=f"Model, exact for exponential failures (Daly 2006). Spot at "
        f"{best.spot.price_per_hour:g} an hour, on demand at {best.on_demand.price_per_hour:g}.",
    )
