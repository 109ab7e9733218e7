"""`tapeline plan checkpoint`: how often to save, and by which way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.checkpoint_text import (
    confirmed_table,
    strategy_notes,
    strategy_tables,
    tier_notes,
    tier_tables,
)
from tapeline.cli.plans.frame import Answer, FromRun, Plot, option, show
from tapeline.cli.plans.from_run import measured
from tapeline.errors import TapelineError
from tapeline.plan import Inputs, Job
from tapeline.plan.checkpoint import CheckpointPlan, plan_checkpoint
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS, take_job
from tapeline.plan.playback import FAILURE_SHAPE, MACHINES, SIMULATE, Playback
from tapeline.plan.saving import (
    ASYNC_FRACTION,
    CHECKPOINT_SECONDS,
    EXPOSURE_HOURS,
    FAILURES,
    FLOOR,
    JOBS,
    MTBF_HOURS,
    RESTART_MINUTES,
    S_PER_HOUR,
    S_PER_MINUTE,
    SHARDS,
    WRITE_SLOWDOWN,
    Failures,
    Save,
    shares,
    take_mtbf,
    take_saves,
)
from tapeline.plan.tiers import FailureClass, parse_class, plan_tiers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        metavar="NAME:MTBF_HOURS:COST_SECONDS",
        help="Failures of one kind and the checkpoint that survives them; give two or more, in "
        "place of an MTBF and a checkpoint.",
    ),
]


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
    classes: Classes = None,
    simulate: Annotated[int | None, option(SIMULATE)] = None,
    failure_shape: Annotated[float | None, option(FAILURE_SHAPE)] = None,
    machines: Annotated[int | None, option(MACHINES)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """How often to save: one writer, shards, or shards in the background; or tiers.

    Example: tapeline plan checkpoint --mtbf-hours 6 --checkpoint-seconds 180 --plot interval

    Example: tapeline plan checkpoint --class process:6:2 --class node:72:60
    """
    inputs = Inputs(measured(from_run))
    job = take_job(inputs, useful_hours, accelerators, price_per_hour)
    floor = inputs.take(FLOOR, efficiency_floor)
    playback = _playback(inputs, simulate, failure_shape, machines)
    if classes:
        single = (mtbf_hours, failures, exposure_hours, checkpoint_seconds, shards)
        _check_alone(*single, async_fraction, write_slowdown, jobs, plot)
        restart_s = inputs.take(RESTART_MINUTES, restart_minutes) * S_PER_MINUTE
        kinds = [parse_class(text) for text in classes]
        show(_tiers(inputs, kinds, restart_s, job, floor, playback), as_json=as_json)
        return
    mtbf = take_mtbf(inputs, mtbf_hours, failures, exposure_hours)
    saves = take_saves(inputs, checkpoint_seconds, shards, async_fraction, write_slowdown)
    failing = Failures(mtbf.middle_s, inputs.take(RESTART_MINUTES, restart_minutes) * S_PER_MINUTE)
    num_jobs = inputs.count(JOBS, jobs)
    plan = plan_checkpoint(saves, failing, job, jobs=num_jobs, efficiency_floor=floor, mtbf=mtbf)
    show(
        _strategies(inputs, plan, saves, failing, playback),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan, saves, failing),
    )


def _playback(
    inputs: Inputs, failures: int | None, shape: float | None, machines: int | None
) -> Playback | None:
    num_failures = inputs.count(SIMULATE, failures)
    if not num_failures:
        for quantity, given in ((FAILURE_SHAPE, shape), (MACHINES, machines)):
            if given is not None:
                raise TapelineError(
                    quantity.option,
                    expected=f"{SIMULATE.option} beside it",
                    found=f"{given:g} alone",
                    fix="Say how many failures to simulate, or leave it out",
                )
        return None
    return Playback(
        num_failures, inputs.take(FAILURE_SHAPE, shape), inputs.count(MACHINES, machines)
    )


def _check_alone(*others: object) -> None:
    if any(other is not None for other in others):
        raise TapelineError(
            "--class",
            expected="failure classes in place of one MTBF and one checkpoint",
            found="an option that belongs to those",
            fix="Leave out --mtbf-hours, --failures, --exposure-hours, --checkpoint-seconds, "
            "--shards, --async-fraction, --write-slowdown, --jobs and --plot",
        )


def _strategies(
    inputs: Inputs,
    plan: CheckpointPlan,
    saves: Sequence[Save],
    failures: Failures,
    playback: Playback | None,
) -> Answer:
    tables, model = strategy_tables(plan), asdict(plan)
    if playback:
        from tapeline.plan.confirm import confirm_strategies

        found = confirm_strategies(plan, saves, failures, playback)
        tables.append(confirmed_table(found))
        model["simulated"] = [asdict(one) for one in found]
    return Answer("checkpoint", inputs, model, tables, strategy_notes(plan))


def _tiers(
    inputs: Inputs,
    classes: Sequence[FailureClass],
    restart_s: float,
    job: Job,
    floor: float,
    playback: Playback | None,
) -> Answer:
    plan = plan_tiers(classes, restart_s, job, floor=floor)
    tables = tier_tables(plan, classes)
    model = {"classes": [asdict(one) for one in classes], **asdict(plan)}
    if playback:
        from tapeline.plan.confirm import confirm_tiers

        found = confirm_tiers(plan, classes, restart_s, playback)
        tables.append(confirmed_table(found))
        model["simulated"] = [asdict(one) for one in found]
    return Answer("checkpoint", inputs, model, tables, tier_notes(plan))


def _figure(plan: CheckpointPlan, saves: Sequence[Save], failures: Failures) -> Figure:
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
    hours, minutes = failures.mtbf_s / S_PER_HOUR, failures.restart_s / S_PER_MINUTE
    return sweep_figure(
        curves,
        marks,
        x_label="work between two saves (s)",
        y_label="time lost (%)",
        note=f"Model, first order (Young 1974). MTBF {hours:.3g} h, restart {minutes:.3g} min. "
        "Points: the best interval.",
    )
