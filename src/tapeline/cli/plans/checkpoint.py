"""`tapeline plan checkpoint`: how often to save, and by which way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, bill_cells, option, show
from tapeline.cli.plans.from_run import measured
from tapeline.plan import Inputs, Job
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS
from tapeline.plan.saving import (
    ASYNC_FRACTION,
    CHECKPOINT_SECONDS,
    EXPOSURE_HOURS,
    FAILURES,
    FLOOR,
    JOBS,
    MTBF_HOURS,
    RESTART_MINUTES,
    SHARDS,
    WRITE_SLOWDOWN,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.plan.checkpoint import CheckpointPlan
    from tapeline.plan.saving import Failures, Save
    from tapeline.reliability import Mtbf
    from tapeline.report import Table

_S_PER_HOUR, _S_PER_MINUTE = 3600.0, 60.0


def checkpoint(
    mtbf_hours: Annotated[float | None, option(MTBF_HOURS)] = None,
    failures: Annotated[int | None, option(FAILURES)] = None,
    exposure_hours: Annotated[float | None, option(EXPOSURE_HOURS)] = None,
    checkpoint_seconds: Annotated[float | None, option(CHECKPOINT_SECONDS)] = None,
    restart_minutes: Annotated[float | None, option(RESTART_MINUTES)] = None,
    shards: Annotated[int | None, option(SHARDS)] = None,
    async_fraction: Annotated[float | None, option(ASYNC_FRACTION)] = None,
    write_slowdown: Annotated[float | None, option(WRITE_SLOWDOWN)] = None,
    jobs: Annotated[int | None, option(JOBS)] = None,
    useful_hours: Annotated[float | None, option(USEFUL_HOURS)] = None,
    accelerators: Annotated[int | None, option(ACCELERATORS)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    efficiency_floor: Annotated[float | None, option(FLOOR)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """How often to save: one writer, shards, or shards in the background.

    Example: tapeline plan checkpoint --mtbf-hours 6 --checkpoint-seconds 180 --plot interval
    """
    from tapeline.plan.checkpoint import plan_checkpoint
    from tapeline.plan.saving import Failures, three_ways

    inputs = Inputs(measured(from_run))
    mtbf = _mtbf(inputs, mtbf_hours, failures, exposure_hours)
    saves = three_ways(
        checkpoint_s=inputs.take(CHECKPOINT_SECONDS, checkpoint_seconds),
        num_shards=inputs.count(SHARDS, shards),
        async_fraction=inputs.take(ASYNC_FRACTION, async_fraction),
        slowdown=inputs.take(WRITE_SLOWDOWN, write_slowdown),
    )
    failing = Failures(mtbf.middle_s, inputs.take(RESTART_MINUTES, restart_minutes) * _S_PER_MINUTE)
    job = Job(
        inputs.take(USEFUL_HOURS, useful_hours),
        inputs.count(ACCELERATORS, accelerators),
        inputs.take(PRICE, price_per_hour),
    )
    plan = plan_checkpoint(
        saves,
        failing,
        job,
        jobs=inputs.count(JOBS, jobs),
        efficiency_floor=inputs.take(FLOOR, efficiency_floor),
        mtbf=mtbf,
    )
    show(
        Answer("checkpoint", inputs, plan, _tables(plan), _notes(plan)),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan, saves, failing),
    )


def _mtbf(
    inputs: Inputs, hours: float | None, failures: int | None, exposure: float | None
) -> Mtbf:
    """As stated; else from failures that were counted, here or by the run; else the default."""
    from tapeline.reliability import Mtbf

    counted = inputs.measured and "failures" in inputs.measured.numbers
    if hours is None and (failures is not None or exposure is not None or counted):
        num_failures = inputs.count(FAILURES, failures)
        return Mtbf.observed(num_failures, inputs.take(EXPOSURE_HOURS, exposure) * _S_PER_HOUR)
    return Mtbf.known(inputs.take(MTBF_HOURS, hours) * _S_PER_HOUR)


def _tables(plan: CheckpointPlan) -> list[Table]:
    from tapeline.report import Table, format_percent

    ways = plan.strategies
    tables = [
        Table(
            [
                *("strategy", "loop blocked s", "interval s", "checkpoint", "lost", "restart"),
                *("overhead", "write in flight", "wall hours", "cost"),
            ],
            [
                [
                    one.name,
                    one.blocking_s,
                    one.interval_s,
                    format_percent(one.shares.checkpoint),
                    format_percent(one.shares.lost),
                    format_percent(one.shares.restart),
                    format_percent(one.overhead),
                    format_percent(one.shares.in_flight),
                    *bill_cells(one.bill),
                ]
                for one in ways
            ],
            "Model, first order (Young 1974): overhead C/T + (T/2 + R)/M, and p/M for a write in "
            "flight",
        ),
        Table(
            [
                *("strategy", "first order s", "Daly s", "exact s"),
                *("efficiency at first order", "at Daly", "at exact"),
            ],
            [
                [
                    one.name,
                    one.intervals.young_s,
                    one.intervals.daly_s,
                    one.intervals.exact_s,
                    _points(one.intervals.young_efficiency),
                    _points(one.intervals.daly_efficiency),
                    _points(one.intervals.exact_efficiency),
                ]
                for one in ways
            ],
            "Three models of the best interval (Young 1974, Daly 2006, exact for exponential "
            "failures)",
        ),
        Table(
            ["strategy", "interval", "s", "time lost", "wall hours", "cost"],
            [
                [
                    one.name,
                    f"×{row.factor:g}",
                    row.interval_s,
                    format_percent(row.overhead),
                    *bill_cells(row.bill),
                ]
                for one in ways
                for row in one.sensitivity
            ],
            "How flat the optimum is (model, first order)",
        ),
    ]
    if plan.contention:
        tables.append(_contention_table(plan))
    return tables


def _contention_table(plan: CheckpointPlan) -> Table:
    from tapeline.report import Table, format_percent

    return Table(
        ["strategy", "all at once s", "time lost", "one after another s", "time lost "],
        [
            [
                one.name,
                one.aligned_interval_s,
                format_percent(one.aligned_overhead),
                one.staggered_interval_s,
                format_percent(one.staggered_overhead),
            ]
            for one in plan.contention
        ],
        f"{plan.contention[0].jobs} jobs on a file system that one write fills: the best interval "
        "of each (model, first order)",
    )


def _points(share: float) -> str:
    return f"{100 * share:.2f} %"


def _notes(plan: CheckpointPlan) -> list[str]:
    from tapeline.report import format_number, format_percent

    best = next(one for one in plan.strategies if one.name == plan.best)
    lost = format_percent(best.overhead + best.shares.in_flight)
    notes = [
        f"{best.name}: save every {format_number(best.interval_s)} s of work; the model expects "
        f"{lost} of the time to be lost."
    ]
    for one in plan.strategies:
        if one.num_saves == 0:
            notes.append(
                f"{one.name}: the best interval is longer than the run: checkpoint once, at its "
                "end."
            )
        if one.bound_by_write:
            notes.append(
                f"{one.name}: the background write takes {format_number(one.write_s)} s and must "
                "end before the next save, so it sets the interval; a faster write would help."
            )
    notes += [f"{one.name} can't carry this job. {one.why}" for one in plan.refused]
    if plan.mtbf_range and plan.mtbf_range.mtbf_s[0] < plan.mtbf_range.mtbf_s[2]:
        low, _, high = (
            "any" if end == float("inf") else f"{format_number(end)} s"
            for end in plan.mtbf_range.interval_s
        )
        hours = plan.mtbf_range.mtbf_s[0] / _S_PER_HOUR
        notes.append(
            f"The MTBF was counted: with 95 % confidence it is above {format_number(hours)} h. "
            f"Over its range the interval is {low} to {high}."
        )
    return notes


def _figure(plan: CheckpointPlan, saves: tuple[Save, ...], failures: Failures) -> Figure:
    from tapeline.plan.saving import shares
    from tapeline.report.plan_figures import sweep_figure

    ways = {one.name: one for one in plan.strategies}
    curves, marks = {}, {}
    for save in saves:
        if save.name not in ways:
            continue
        best = ways[save.name]
        x = [best.interval_s * 2 ** (step / 8) for step in range(-24, 25)]
        x = [interval for interval in x if interval >= save.in_flight_s]
        y = [100 * (1 - shares(save, failures, interval).goodput) for interval in x]
        curves[save.name] = (x, y)
        marks[save.name] = (best.interval_s, 100 * (1 - best.shares.goodput))
    hours, minutes = failures.mtbf_s / _S_PER_HOUR, failures.restart_s / _S_PER_MINUTE
    return sweep_figure(
        curves,
        marks,
        x_label="work between two saves (s)",
        y_label="time lost (%)",
        note=f"Model, first order (Young 1974). MTBF {hours:.3g} h, restart {minutes:.3g} min. "
        "Points: the best interval.",
    )
