"""What all verbs share: talk on standard error, data on standard output, progress."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from tapeline.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, such as training.steps=500; may be repeated."),
]


class DefaultVerb(TyperGroup):
    """A group whose `default` verb may be left out: `checkpoints RUN` is `checkpoints list RUN`."""

    default: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the verb in where a path stands in its place; a misspelt verb is none."""
        first = args[0] if args else "-"
        is_path = Path(first).exists() or not difflib.get_close_matches(first, self.commands)
        if first not in self.commands and not first.startswith("-") and is_path:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def say(message: str) -> None:
    """Tell the person something, on standard error."""
    typer.echo(message, err=True)


def whole_numbers(text: str, option: str, example: str) -> list[int]:
    """What a list such as 1,2,4 says.

    Raises:
        ConfigError: it isn't one of whole numbers from 1.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ConfigError(
            option,
            expected="whole numbers from 1, with commas between",
            found=repr(text),
            fix=f"Write, for example, {option} {example}",
        )
    return found


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that draws a bar; silent where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
