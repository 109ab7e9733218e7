"""`tapeline bench`: the time budget of a step on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.advise import budget_advice, print_advice
from tapeline.cli.output import Json, print_json, progress_bar, say

if TYPE_CHECKING:
    from tapeline.budget import Budget


def bench(
    store: Annotated[
        Path | None, typer.Argument(help="A store; default: the synthetic market.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=3, help="Of each figure.")] = 100,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Project to a store of this many rows.")
    ] = None,
    advice: Annotated[
        bool,
        typer.Option("--advice", help="Before buying an accelerator: what each lever would give."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write the figure to PLOT.svg and .png; of advice to PLOT-advice."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure load, batch and compute per step for csv, npy and mmap.

    A store is left as it is. What is measured are copies in the folder for temporary files
    (TMPDIR), which take up to five times its bytes and are deleted afterwards.

    A year of half-second rows of one instrument is about 11.7 million.

    Example: tapeline bench --rows 11700000 --plot budget
    """
    from tapeline.budget import all_formats, measure_budget
    from tapeline.report.figures import budget_figure, save_figure
    from tapeline.report.plan_figures import lever_figure
    from tapeline.store import write_shards
    from tapeline.tape import synthetic_sessions

    with tempfile.TemporaryDirectory() as scratch, progress_bar("Measuring") as progress:
        root = Path(scratch)
        if store is None:
            write_shards(synthetic_sessions(), root, "mmap")
            all_formats(root)
        else:
            say(f"copying {store} to {root} in csv, npy and mmap, to measure there")
            all_formats(store, root)
        budget = measure_budget(root, repetitions=repetitions, progress=progress)
    inputs, levers = budget_advice(budget) if advice else (None, {})
    if plot:
        save_figure(budget_figure(budget), plot)
        say(f"figure: {plot}.svg, {plot}.png")
    if plot and levers:
        aside = plot.with_name(f"{plot.name}-advice")
        save_figure(lever_figure(levers), aside)
        say(f"figure: {aside}.svg, {aside}.png")
    if as_json:
        told = {case: [asdict(one) for one in of_case] for case, of_case in levers.items()}
        projection = budget.project(rows) if rows else None
        print_json({**budget.as_dict(), "projection": projection, "advice": told or None})
        return
    _print(budget, rows)
    if inputs:
        print_advice(inputs, levers)


def _print(budget: Budget, rows: int | None) -> None:
    from tapeline.report import Table, format_bytes, format_number, format_percent, print_table

    size = f"{budget.store_rows:,} rows of {budget.columns} columns"
    print_table(
        Table(
            columns=["case", "load ms", "batch ms", "compute ms", "data's share"],
            rows=[
                [
                    row.case,
                    row.load_ms,
                    row.batch_ms,
                    row.compute_ms,
                    format_percent(row.data_share),
                ]
                for row in budget.rows
            ],
            caption=f"Time per step, {size}, medians of {budget.repetitions}. {budget.machine}",
        )
    )
    for name, ratio in budget.ratios().items():
        say(f"{name}: {format_number(ratio)}")
    if rows:
        print_table(
            Table(
                columns=["case", "file", "memory", "load s", "batch s", "compute s", "epoch s"],
                rows=[
                    [
                        row["case"],
                        format_bytes(row["bytes"]),
                        format_bytes(row["memory_bytes"]),
                        row["load_s"],
                        row["batch_s"],
                        row["compute_s"],
                        row["epoch_s"],
                    ]
                    for row in budget.project(rows)
                ],
                caption=f"An epoch over {rows:,} rows, projected from the rates above",
            )
        )
