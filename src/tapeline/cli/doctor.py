"""`tapeline doctor`: is this installation fit to train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import Json, print_json


def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs and stores will lie.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check packages, devices, threads, file system and clock; exit 1 if one is at fault.

    Example: tapeline doctor
    """
    from tapeline.doctor import examine
    from tapeline.report import Table, print_table

    checks = examine(folder)
    if as_json:
        print_json({"checks": [check.as_dict() for check in checks]})
    else:
        rows = [[check.part, check.status, check.found, check.fix or None] for check in checks]
        print_table(Table(["part", "status", "found", "what to do"], rows, "tapeline doctor"))
    if any(check.status == "fault" for check in checks):
        raise typer.Exit(1)
