"""`tapeline plan goodput`: where the time of a job goes, before and after tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, option, points, show
from tapeline.cli.plans.from_run import check_overlapped, measured
from tapeline.plan import Inputs
from tapeline.plan.goodput import (
    BUCKETS,
    LOADER,
    SAMPLES,
    TUNED_LOADER,
    Goodput,
    GoodputPlan,
    compose,
    plan_goodput,
    utilisation,
)
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS, take_job
from tapeline.plan.saving import (
    ASYNC_FRACTION,
    CHECKPOINT_SECONDS,
    MTBF_HOURS,
    RESTART_MINUTES,
    S_PER_MINUTE,
    SHARDS,
    WRITE_SLOWDOWN,
    Failures,
    take_mtbf,
    take_saves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table


def goodput(
    samples_per_second: Annotated[float | None, option(SAMPLES)] = None,
    loader_samples_per_second: Annotated[float | None, option(LOADER)] = None,
    tuned_loader_samples_per_second: Annotated[float | None, option(TUNED_LOADER)] = None,
    overlap: Annotated[
        bool, typer.Option(help="Before, batches are made while the device computes.")
    ] = True,
    mtbf_hours: Annotated[float | None, option(MTBF_HOURS)] = None,
    checkpoint_seconds: Annotated[float | None, option(CHECKPOINT_SECONDS)] = None,
    restart_minutes: Annotated[float | None, option(RESTART_MINUTES)] = None,
    shards: Annotated[int | None, option(SHARDS)] = None,
    async_fraction: Annotated[float | None, option(ASYNC_FRACTION)] = None,
    write_slowdown: Annotated[float | None, option(WRITE_SLOWDOWN)] = None,
    useful_hours: Annotated[float | None, option(USEFUL_HOURS)] = None,
    accelerators: Annotated[int | None, option(ACCELERATORS)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Useful, starved, checkpoint and lost time: one writer before, shards in background after.

    `plan compare RUN --plan FILE` takes what this prints with --json.

    Example: tapeline plan goodput --loader-samples-per-second 5000
    """
    inputs = Inputs(measured(from_run))
    job = take_job(inputs, useful_hours, accelerators, price_per_hour)
    failures = Failures(
        take_mtbf(inputs, mtbf_hours, None, None).middle_s,
        inputs.take(RESTART_MINUTES, restart_minutes) * S_PER_MINUTE,
    )
    one, _, background = take_saves(
        inputs, checkpoint_seconds, shards, async_fraction, write_slowdown
    )
    compute = job.num_accelerators * inputs.take(SAMPLES, samples_per_second)
    busy = utilisation(
        compute_samples_per_s=compute,
        loader_samples_per_s=inputs.take(LOADER, loader_samples_per_second),
        overlapped=overlap,
    )
    check_overlapped(inputs, overlap)
    tuned = utilisation(
        compute_samples_per_s=compute,
        loader_samples_per_s=inputs.take(TUNED_LOADER, tuned_loader_samples_per_second),
        overlapped=True,
    )
    plan = plan_goodput(
        compose("before", one, failures, busy, job),
        compose("after", background, failures, tuned, job),
        overlapped_before=overlap,
    )
    show(
        Answer("goodput", inputs, plan, [_table(plan)], _notes(plan, one.name, background.name)),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan),
    )


def _table(plan: GoodputPlan) -> Table:
    from tapeline.report import Table

    def cells(case: Goodput, bucket: str) -> list[str | float]:
        return [points(case.shares[bucket]), case.hours[bucket], case.cost[bucket]]

    cases = (plan.before, plan.after)
    return Table(
        ["time", *(f"{case.name}{unit}" for case in cases for unit in ("", " h", " cost"))],
        [
            *(
                [bucket, *(cell for case in cases for cell in cells(case, bucket))]
                for bucket in BUCKETS
            ),
            [
                "wall",
                *(
                    cell
                    for case in cases
                    for cell in ("100 %", case.bill.wall_hours, case.bill.cost)
                ),
            ],
        ],
        "Where the time of the job goes (model, first order, Young 1974; an overlapped step takes "
        "the longer of compute and data)",
    )


def _notes(plan: GoodputPlan, before: str, after: str) -> list[str]:
    from tapeline.report import format_number, format_percent

    turns = "alongside" if plan.overlapped_before else "in turn with"
    less = "less" if plan.saved_hours >= 0 else "more"
    return [
        f"{before}, the loader as it is, {turns} the compute: goodput "
        f"{format_percent(plan.before.goodput)}, "
        f"{format_number(plan.before.bill.wall_hours)} h, {format_number(plan.before.bill.cost)}.",
        f"{after}, the tuned loader: goodput {format_percent(plan.after.goodput)}, "
        f"{format_number(plan.after.bill.wall_hours)} h, {format_number(plan.after.bill.cost)}: "
        f"{format_number(abs(plan.saved_hours))} h and {format_number(abs(plan.saved_cost))} "
        f"{less}.",
    ]


def _figure(plan: GoodputPlan) -> Figure:
    from tapeline.report.plan_figures import share_figure

    return share_figure(
        {case.name: case.shares for case in (plan.before, plan.after)},
        "Model, first order (Young 1974); a step takes the longer of compute and data.",
    )
