"""`tapeline report`: a run as one page, or several side by side."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, progress_bar, say


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="The folder of a run, live or dead; of several: side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; default: report.html in the run's folder, of several "
            "comparison.html in the first one's."
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of one rank's accelerator.", min=0)
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write a run's page: time and money, attempts, loss, steps, what was noticed, the record.

    Of two runs or more: what changed from the first, where the time went, losses and results.

    Exit 0 if the page is whole, whatever it says of the run (`tapeline diagnose` judges); 1 if a
    part of the run couldn't be read and is left out; 2 if no page could be written.

    Example: tapeline report runs/reference --price-per-hour 2.5
    """
    from tapeline.report import print_table
    from tapeline.report.compare_page import ComparedRuns, compare_page, results_table
    from tapeline.report.page import write_page
    from tapeline.report.run_page import run_page
    from tapeline.report.run_times import account_table
    from tapeline.report.seen import SeenRun

    with progress_bar("Reading the run") as progress:
        seen = [SeenRun.read(run, price_per_hour, progress) for run in runs]
    compared = ComparedRuns.of(seen) if len(seen) > 1 else None
    path = out or runs[0] / ("comparison.html" if compared else "report.html")
    write_page(path, compare_page(compared) if compared else run_page(seen[0]))
    if as_json:
        print_json(compared.as_dict() if compared else seen[0].as_dict())
    elif compared:
        print_table(results_table(compared))
    elif seen[0].account is not None:
        print_table(account_table(seen[0].account))
    problems = [problem for one in seen for problem in one.problems]
    for problem in problems:
        say(f"left out: {problem}")
    say(str(path))
    if open_:
        webbrowser.open(path.resolve().as_uri())
    raise typer.Exit(1 if problems else 0)
