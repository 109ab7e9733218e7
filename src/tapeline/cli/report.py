"""`tapeline report`: a run as one page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, say


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or dead.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run's folder.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of one rank's accelerator.", min=0)
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write a run's page: time and money, attempts, loss, steps, what was noticed, the record.

    Example: tapeline report runs/reference --price-per-hour 2.5
    """
    from tapeline.report import print_table, write_page
    from tapeline.report.run_page import SeenRun, account_table, run_page

    seen = SeenRun.read(run, price_per_hour)
    path = out or run / "report.html"
    write_page(path, run_page(seen))
    if as_json:
        print_json(seen.as_dict())
    else:
        print_table(account_table(seen.account))
    say(str(path))
    if open_:
        webbrowser.open(path.resolve().as_uri())
