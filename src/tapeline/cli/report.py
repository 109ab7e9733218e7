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

    The folder of a `Ledger` in a loop of your own has a page too: time and money, attempts, steps.

    Example: tapeline report runs/reference --price-per-hour 2.5
    """
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = out or runs[0] / name
    if len(runs) == 1 and not (runs[0] / "run.json").exists() and (runs[0] / "ledger").is_dir():
        _ledger(runs[0], path, price_per_hour, as_json)
        problems = []
    else:
        problems = _runs(runs, path, price_per_hour, as_json)
    for problem in problems:
        say(f"left out: {problem}")
    say(str(path))
    if open_:
        webbrowser.open(path.resolve().as_uri())
    raise typer.Exit(1 if problems else 0)


def _runs(runs: list[Path], path: Path, price_per_hour: float | None, as_json: bool) -> list[str]:
    """Write the page of a run or of several; returns what couldn't be read."""
    from tapeline.report import print_table
    from tapeline.report.compare_page import ComparedRuns, compare_page, results_table
    from tapeline.report.page import write_page
    from tapeline.report.run_page import run_page
    from tapeline.report.run_times import account_table
    from tapeline.report.seen import SeenRun

    with progress_bar("Reading the run") as progress:
        seen = [SeenRun.read(run, price_per_hour, progress) for run in runs]
    compared = ComparedRuns.of(seen) if len(seen) > 1 else None
    write_page(path, compare_page(compared) if compared else run_page(seen[0]))
    if as_json:
        print_json(compared.as_dict() if compared else seen[0].as_dict())
    elif compared:
        print_table(results_table(compared))
    elif seen[0].account is not None:
        print_table(account_table(seen[0].account))
    return [problem for one in seen for problem in one.problems]


def _ledger(folder: Path, path: Path, price_per_hour: float | None, as_json: bool) -> None:
    """Write the page of a loop of one's own."""
    from tapeline.ledger import account_of, read_ledgers
    from tapeline.report import print_table
    from tapeline.report.ledger_page import ledger_page
    from tapeline.report.page import write_page
    from tapeline.report.run_times import account_table

    account = account_of(folder, price_per_hour=price_per_hour)
    write_page(path, ledger_page(folder, read_ledgers(folder), account))
    if as_json:
        print_json({"run": str(folder), "account": account.as_dict()})
    else:
        print_table(account_table(account))
