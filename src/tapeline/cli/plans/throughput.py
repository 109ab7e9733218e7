"""`tapeline plan throughput`: how fast the loader must be, and what waiting costs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, bill_cells, option, points, show
from tapeline.cli.plans.from_run import check_overlapped, measured
from tapeline.plan import Inputs
from tapeline.plan.goodput import LOADER, SAMPLES
from tapeline.plan.job import ACCELERATORS, PRICE, USEFUL_HOURS, take_job
from tapeline.plan.stragglers import RANKS, SLOW_RANK, STEP_CV, Straggling, straggling
from tapeline.plan.throughput import (
    NEAR,
    PREFETCH,
    WORKERS,
    Fed,
    Loader,
    ThroughputPlan,
    plan_throughput,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table


def throughput(
    samples_per_second: Annotated[float | None, option(SAMPLES)] = None,
    loader_samples_per_second: Annotated[float | None, option(LOADER)] = None,
    overlap: Annotated[
        bool, typer.Option(help="Batches are made while the device computes.")
    ] = True,
    workers: Annotated[int | None, option(WORKERS)] = None,
    prefetch: Annotated[int | None, option(PREFETCH)] = None,
    ranks: Annotated[int | None, option(RANKS)] = None,
    step_cv: Annotated[float | None, option(STEP_CV)] = None,
    slow_rank: Annotated[float | None, option(SLOW_RANK)] = None,
    useful_hours: Annotated[float | None, option(USEFUL_HOURS)] = None,
    accelerators: Annotated[int | None, option(ACCELERATORS)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What a slow loader costs, what a faster one would buy, and what the slowest rank costs.

    Example: tapeline plan throughput --loader-samples-per-second 5000

    Example: tapeline plan throughput --ranks 512 --step-cv 0.1 --slow-rank 1.3
    """
    inputs = Inputs(measured(from_run))
    job = take_job(inputs, useful_hours, accelerators, price_per_hour)
    samples = inputs.take(SAMPLES, samples_per_second)
    loader = Loader(
        inputs.take(LOADER, loader_samples_per_second),
        inputs.count(WORKERS, workers),
        overlap,
        inputs.count(PREFETCH, prefetch),
        alone=inputs.values[LOADER.name].source != "measured",
    )
    check_overlapped(inputs, overlap)
    num_ranks = inputs.count(replace(RANKS, default=job.num_accelerators), ranks)
    cv, slow = inputs.take(STEP_CV, step_cv), inputs.take(SLOW_RANK, slow_rank)
    plan = plan_throughput(job, samples, loader)
    waits = [straggling(n, step_cv=cv, slow_rank=slow) for n in _counts(num_ranks)]
    here = next(one for one in waits if one.num_ranks == num_ranks)
    model = {**asdict(plan), "stragglers": [asdict(one) for one in waits]}
    notes = [*_notes(plan, loader), *_straggler_notes(here, cv, slow)]
    show(
        Answer("throughput", inputs, model, [*_tables(plan), _straggler_table(waits)], notes),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan, samples, job.num_accelerators),
    )


def _counts(num_ranks: int) -> list[int]:
    """Powers of two up to some beyond the given number, and that number."""
    return sorted({2**power for power in range((4 * num_ranks).bit_length())} | {num_ranks})


def _tables(plan: ThroughputPlan) -> list[Table]:
    from tapeline.report import Table

    way, other = ("overlapped", "in turn") if plan.overlapped else ("in turn", "overlapped")
    columns = ["loader over compute", "utilisation", "wall hours", "cost", "cost over the least"]
    model = "step = max(compute, data)" if plan.overlapped else "step = compute + data"
    tables = [
        Table(
            ["loader as it is", *columns],
            [
                [name, *_cells(fed)]
                for name, fed in ((way, plan.fed), (other, plan.other_way))
                if fed
            ],
            "Model: a step takes max(compute, data) overlapped, compute + data in turn",
        ),
        Table(
            columns,
            [_cells(one) for one in plan.sweep],
            f"Other loaders, {way} (model, {model})",
        ),
    ]
    if plan.queue:
        tables.append(
            Table(
                ["batches held ready", "utilisation"],
                [[one.prefetch, points(one.utilisation)] for one in plan.queue.depths],
                "A finite queue between loader and step (model, exponential times, M/M/1/K)",
            )
        )
    return tables


def _cells(fed: Fed) -> list[str | float | None]:
    capacity = "perfect" if fed.capacity is None else points(fed.capacity)
    return [capacity, points(fed.utilisation), *bill_cells(fed.bill), f"{fed.cost_ratio:.2f} ×"]


def _straggler_table(waits: list[Straggling]) -> Table:
    from tapeline.report import Table

    return Table(
        ["ranks", "step, random", "lost", "step, with the slow rank", "lost in all"],
        [
            [
                one.num_ranks,
                f"{one.random:.4f}",
                points(one.lost_random),
                f"{one.both:.4f}",
                points(one.lost),
            ]
            for one in waits
        ],
        "Waiting for the slowest rank, by itself, in step times of one (model, expected maximum of "
        "independent normal times, each rank's the same at any number)",
    )


def _notes(plan: ThroughputPlan, loader: Loader) -> list[str]:
    from tapeline.report import format_number

    fed = plan.fed
    if fed.capacity is None:
        return ["A perfect loader: the accelerators compute all the time."]
    starved = (
        f"{format_number(plan.starved.wall_hours)} h and {format_number(plan.starved.cost)} are "
        "paid for waiting"
    )
    if not plan.overlapped:
        assert plan.other_way is not None, "in turn the loader's own rate is known"
        return [
            f"In turn, the accelerators compute {points(fed.utilisation)} of the time: {starved}. "
            f"Overlapped it would be {points(plan.other_way.utilisation)}; in turn no loader "
            "brings it to 100 %."
        ]
    if fed.capacity >= 1:
        notes = [
            f"The loader keeps up ({points(fed.capacity)} of the compute); a faster one buys "
            "nothing."
        ]
    else:
        notes = [
            f"The loader starves the accelerators: they compute {points(fed.utilisation)} of the "
            f"time, {starved}. It must give {format_number(plan.compute_samples_per_s)} samples a "
            f"second, and nothing is bought beyond."
        ]
    if plan.workers_needed is not None:
        notes.append(
            f"That takes {plan.workers_needed} workers where {loader.num_workers} make the rate "
            "now, if their rates add up."
        )
    if plan.queue:
        notes.append(
            f"{plan.queue.needed} batches held ready reach {100 * NEAR:g} % of what any number "
            "would (exponential times)."
        )
    return notes


def _straggler_notes(here: Straggling, step_cv: float, slow_rank: float) -> list[str]:
    notes = []
    if here.num_ranks > 1:
        notes.append(
            f"On {here.num_ranks} ranks, random variation of {points(step_cv)} a rank costs "
            f"{points(here.lost_random)} of throughput, more with more ranks."
        )
    if slow_rank > 1:
        notes.append(
            f"One rank {slow_rank:g} times slower costs {points(1 - 1 / slow_rank)} by itself, at "
            f"any number of ranks; both together {points(here.lost)}."
        )
    return notes


def _figure(plan: ThroughputPlan, samples: float, num_accelerators: int) -> Figure:
    from tapeline.plan.goodput import utilisation
    from tapeline.report.plan_figures import sweep_figure

    capacities = [2 ** (step / 8) for step in range(-16, 17)]
    curves = {
        name: (
            [100 * one for one in capacities],
            [
                1
                / utilisation(
                    compute_samples_per_s=1.0, loader_samples_per_s=one, overlapped=overlapped
                )
                for one in capacities
            ],
        )
        for name, overlapped in (("overlapped", True), ("in turn", False))
    }
    fed, way = plan.fed, "overlapped" if plan.overlapped else "in turn"
    marks = {way: (100 * fed.capacity, fed.cost_ratio)} if fed.capacity else {}
    return sweep_figure(
        curves,
        marks,
        x_label="loader's rate over the compute's (%)",
        y_label="cost over the least",
        note="Model: a step takes max(compute, data) overlapped, compute + data in turn. "
        f"{num_accelerators} accelerators of {samples:g} samples a second. Point: the loader as "
        "it is.",
    )
