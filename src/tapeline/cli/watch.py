"""`tapeline watch`: a run in the terminal, while it goes on."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, print_json

if TYPE_CHECKING:
    from tapeline.runs.live import LiveRun, LiveView

_EVERY_S = 1.0


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or dead.")],
    once: Annotated[
        bool, typer.Option("--once", help="Show one frame; so it is without a terminal, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Watch a run: its ranks and their heartbeats, loss, where the time goes, attempts, findings.

    Ends when the run ends. Exit 0 it runs or has finished; 1 it has stopped short, is stuck or
    dead, or can't be seen from here.

    Example: tapeline watch runs/reference
    """
    from tapeline.clock import SystemClock
    from tapeline.runs.live import LiveView

    view = LiveView(run, SystemClock())
    if as_json:
        seen = view.look()
        print_json(seen.as_dict())
    elif once or not sys.stdout.isatty():
        seen = view.look()
        _print(seen)
    else:
        seen = _watched(view)
    raise typer.Exit(0 if seen.healthy else 1)


def _print(seen: LiveRun) -> None:
    from rich.console import Console

    from tapeline.report.live_frame import frame

    console = Console(file=sys.stdout, highlight=False)
    console.print(frame(seen, console.width))


def _watched(view: LiveView) -> LiveRun:
    """Show frames until the run ends or Ctrl-C; the last thing seen."""
    import time

    from rich.live import Live

    from tapeline.report.live_frame import frame

    seen = view.look()
    with Live(auto_refresh=False) as screen, contextlib.suppress(KeyboardInterrupt):
        screen.update(frame(seen, screen.console.width), refresh=True)
        while not seen.ended:
            time.sleep(_EVERY_S)
            seen = view.look()
            screen.update(frame(seen, screen.console.width), refresh=True)
    return seen
