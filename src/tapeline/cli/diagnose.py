"""`tapeline diagnose`: why a run is slow, stuck or dead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, print_json
from tapeline.words import percent

if TYPE_CHECKING:
    from tapeline.diagnosis import Diagnosis
    from tapeline.signals import Verdict


def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or dead.")],
    as_json: Json = False,
) -> None:
    """Say why a run is slow, stuck or dead: evidence, what would refute it, what to change.

    Exit 0 healthy, 1 a finding or too little seen to say.

    Example: tapeline diagnose runs/reference
    """
    from tapeline.diagnosis import diagnose as diagnose_run

    found = diagnose_run(run)
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    raise typer.Exit(0 if found.healthy else 1)


def _print(found: Diagnosis) -> None:
    if found.account:
        typer.echo(found.account.in_words())
    if found.outweighed:
        typer.echo(f"first of all: {found.outweighed}")
    for life in found.before:
        end = f"{life['how']}: {life['evidence']}" if "how" in life else "no end is told"
        typer.echo(f"attempt {life['attempt']}, {end}")
    lives = "goes on" if found.lives else "ended"
    typer.echo(f"attempt {found.attempt}, which {lives}, and was judged:")
    for verdict in found.verdicts:
        typer.echo("\n" + _title(verdict))
        for line in verdict.evidence:
            typer.echo(f"  seen      {line}")
        typer.echo(f"  refuted   by {verdict.refuted_by}")
        typer.echo(f"  change    {verdict.change}")
        if verdict.ceiling is not None:
            faster = f", {verdict.speedup:.2f} times as fast" if verdict.speedup else ""
            typer.echo(
                f"  returns   at most {percent(verdict.ceiling)} of the time of steps{faster}"
            )
    for finding in found.findings:
        typer.echo(
            f"\nwatcher {finding['watcher']}, from step {finding['step']}: {finding['seen']}"
        )
        typer.echo(f"  means     {finding['means']}")


def _title(verdict: Verdict) -> str:
    ranks = ", ".join(map(str, verdict.ranks))
    return f"{verdict.kind}: rank {ranks}" if ranks else verdict.kind
