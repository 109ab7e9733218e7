"""`tapeline plan stop`: what should end a run early, decided before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, Plot, option, points, show
from tapeline.errors import TapelineError
from tapeline.plan import Inputs
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS, take_job
from tapeline.plan.stop import (
    BY_STEP,
    FALSE_STOPS,
    LOOKS,
    PATIENCE,
    STEPS,
    TARGET_LOSS,
    WINDOW,
    Look,
    Losses,
    Rules,
    StopPlan,
    plan_stop,
    trailing_mean,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table

References = Annotated[
    list[Path] | None,
    typer.Option(
        "--reference",
        metavar="RUN",
        help="A finished run of the same configuration with another seed; give three or more.",
    ),
]


def stop(
    reference: References = None,
    target_loss: Annotated[float | None, option(TARGET_LOSS)] = None,
    by_step: Annotated[int | None, option(BY_STEP)] = None,
    steps: Annotated[int | None, option(STEPS)] = None,
    looks: Annotated[int | None, option(LOOKS)] = None,
    window: Annotated[int | None, option(WINDOW)] = None,
    patience: Annotated[int | None, option(PATIENCE)] = None,
    false_stops: Annotated[float | None, option(FALSE_STOPS)] = None,
    useful_hours: Annotated[float | None, option(USEFUL_HOURS)] = None,
    accelerators: Annotated[int | None, option(ACCELERATORS)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Criteria to stop a run by: a loss to reach by a step, and a band from reference runs.

    Prints a section for the configuration. A loss that isn't a number ends a run without it.

    Example: tapeline plan stop --target-loss 0.053 --by-step 400 --steps 1000

    Example: tapeline plan stop --reference runs/seed-1 --reference runs/seed-2 --reference
    runs/seed-3
    """
    inputs = Inputs()
    _check_asked(reference, target_loss, by_step, plot)
    references = {str(run): _losses(run) for run in reference or ()}
    shortest = min((max(losses) for losses in references.values()), default=None)
    num_steps = inputs.count(replace(STEPS, default=shortest), steps)
    target = None
    if target_loss is not None and by_step is not None:
        loss = inputs.take(TARGET_LOSS, target_loss)
        target = Look(inputs.count(BY_STEP, by_step), loss)
    rules = Rules(
        inputs.count(LOOKS, looks),
        inputs.count(WINDOW, window),
        inputs.count(PATIENCE, patience),
        inputs.take(FALSE_STOPS, false_stops),
    )
    job = take_job(inputs, useful_hours, accelerators, price_per_hour)
    plan = plan_stop(references, num_steps, rules, target, job)
    section = plan.criteria.section()
    model = {**asdict(plan), "references": list(references), "section": section}
    notes = [*_notes(plan, rules, len(references)), "For the configuration:", section]
    show(
        Answer("stop", inputs, model, _tables(plan, list(references)), notes),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan, references),
    )


def _check_asked(
    reference: list[Path] | None, target_loss: float | None, by_step: int | None, plot: Path | None
) -> None:
    if not reference and target_loss is None and by_step is None:
        raise TapelineError(
            "--reference",
            expected="reference runs, or --target-loss and --by-step",
            found="neither",
            fix="Give three runs or more, or a loss to reach by a step",
        )
    if (target_loss is None) != (by_step is None):
        raise TapelineError(
            "--target-loss and --by-step",
            expected="both",
            found="one of them",
            fix="Give the other too",
        )
    if plot and not reference:
        raise TapelineError(
            "--plot",
            expected="references to draw",
            found="none",
            fix="Give --reference, or leave it out",
        )


def _losses(run: Path) -> Losses:
    from tapeline.clock import SystemClock
    from tapeline.runs import RunFolder

    folder = RunFolder(run, SystemClock())
    folder.record()  # says so if it is no run
    losses = folder.losses()
    if not losses:
        raise TapelineError(
            run,
            expected="a run with losses in its journal",
            found="none",
            fix="Give one that has done some steps",
        )
    return losses


def _tables(plan: StopPlan, references: list[str]) -> list[Table]:
    from tapeline.report import Table

    tables = []
    if plan.band:
        tables.append(
            Table(
                ["step", "mean", "sd", "stop above", "of the run left", "saved if stopped"],
                [
                    [
                        row.step,
                        f"{row.mean:.5g}",
                        f"{row.sd:.3g}",
                        f"{row.most:.5g}",
                        points(row.left),
                        row.saved,
                    ]
                    for row in plan.band
                ],
                f"Mean and sd measured over {plan.criteria.window} steps of {len(references)} runs "
                f"({', '.join(references)}); the bound is the upper end of Student's interval for "
                "one more run (model)",
            )
        )
    if plan.target:
        row = plan.target
        tables.append(
            Table(
                [
                    *("step", "stop above", "references that miss it", "of the run left"),
                    "saved if stopped",
                ],
                [
                    [
                        row.step,
                        f"{row.most:.5g}",
                        f"{row.num_missed} of {row.num_references}" if references else None,
                        points(row.left),
                        row.saved,
                    ]
                ],
                "The target, as given",
            )
        )
    return tables


def _notes(plan: StopPlan, rules: Rules, num_references: int) -> list[str]:
    notes = []
    if plan.band and plan.chance_outside is not None:
        notes.append(
            f"The band stops a run that is above it at {rules.patience} looks in a row; a run like "
            f"the {num_references} references is above it at one look with "
            f"{points(plan.chance_outside)}, and is stopped in {points(rules.false_stops)} of "
            "cases at most (model, normal losses). More references make it narrower."
        )
    if plan.target and plan.target.chance_missed is not None:
        notes.append(
            f"The target stops a run like the references with {points(plan.target.chance_missed)} "
            "(model, Student's t)."
        )
    elif plan.target:
        notes.append(
            "Without references nothing says how many good runs miss the target; add --reference."
        )
    return notes


def _figure(plan: StopPlan, references: Mapping[str, Losses]) -> Figure:
    from tapeline.report.plan_figures import Band, band_figure

    rows, window = plan.band, plan.criteria.window
    measured = [
        (row.step, mean)
        for row in rows
        for losses in references.values()
        if (mean := trailing_mean(losses, row.step, window)) is not None
    ]
    return band_figure(
        Band(
            [row.step for row in rows],
            [row.mean for row in rows],
            [row.mean for row in rows],
            [row.most for row in rows],
        ),
        measured,
        names=("mean of the references", "what a run may be above it", "references"),
        labels=("step", f"loss, mean of {window} steps"),
        logarithmic=False,
        note="Band: upper end of Student's interval for one more run (model); points are measured.",
    )
