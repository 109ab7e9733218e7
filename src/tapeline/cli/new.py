"""`tapeline new`: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import say


def new(
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the name.")],
) -> None:
    """Make a project with a configuration, a model, a test and the commands of its first run.

    Example: tapeline new midprice
    """
    from tapeline.project import create

    for path in create(folder):
        typer.echo(folder / path)
    say(f"next: cd {folder}, then the commands in README.md")
