"""`tapeline tutorial` and `tapeline demo`: the guided walks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json, say


def tutorial(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("tutorial"),
    as_json: Json = False,
) -> None:
    """Measure every promise of the small problem on the synthetic market, in about a minute.

    Example: tapeline tutorial --out tutorial
    """
    from tapeline.report import print_table
    from tapeline.tours import run_tutorial

    result = run_tutorial(out, say)
    if as_json:
        print_json(result.figures)
    else:
        print_table(result.table)
    say(f"figures: {', '.join(f'{stem}.svg' for stem in result.pictures)}")
    say(f"everything: {out / 'tutorial.json'}")
    if not _holds(result.figures):
        raise typer.Exit(1)


def _holds(figures: dict[str, dict[str, object]]) -> bool:
    return (
        figures["resume"]["bitwise_equal"] is True
        and figures["sizes"]["formats_identical"] is True
        and figures["instruments"]["windows_mixing"] == 0
    )


def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it makes.")] = Path("demo"),
    tape: Annotated[
        Path | None, typer.Option(help="Your own order-by-order CSV, plain or .gz.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a real tape to a trained model that is killed on the way and ends in the same bits.

    Example: tapeline demo --out demo
    """
    from tapeline.report import print_table
    from tapeline.tours import run_demo

    result = run_demo(out, tape, say)
    if as_json:
        print_json(result.figures)
    else:
        print_table(result.table)
    say(f"report: {result.page}")
    if not result.figures["bitwise_equal"]:
        raise typer.Exit(1)
