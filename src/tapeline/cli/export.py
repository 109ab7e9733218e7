"""`tapeline export`: a run to a tracker or to Prometheus, from its journals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tapeline.cli.output import Json, print_json, say


class Target(StrEnum):
    """Where a run is exported to."""

    PROMETHEUS = "prometheus"


def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or dead.")],
    to: Annotated[Target, typer.Option("--to", help="What it is exported to.")],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the run ends, or Ctrl-C.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option(help="Between two looks at a run that is followed.", min=0.1)
    ] = 5.0,
    textfile: Annotated[
        Path | None,
        typer.Option(help="Prometheus: write this file, ending with .prom, instead of serving."),
    ] = None,
    host: Annotated[str, typer.Option(help="Prometheus: where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Prometheus: where to listen; 0 is any free one.")
    ] = 9965,
    as_json: Json = False,
) -> None:
    """Export a run from its files, so that the training never waits for a tracker.

    Prometheus is served until Ctrl-C, or with --follow until the run has ended and that was seen.

    Example: tapeline export runs/reference --to prometheus --textfile reference.prom
    """
    _check_given(context, textfile)
    result = _to_prometheus(run, textfile, (host, port), follow, interval_s)
    if as_json:
        print_json({"run": str(run), "to": to.value, **result})


def _check_given(context: typer.Context, textfile: Path | None) -> None:
    """An option that would do nothing is told, not passed over."""
    for name in ("host", "port") if textfile else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name} goes with a server, not with --textfile")


def _to_prometheus(
    run: Path, textfile: Path | None, address: tuple[str, int], follow: bool, interval_s: float
) -> dict[str, Any]:
    from tapeline.clock import SystemClock
    from tapeline.export import needed

    with needed("prometheus", "prometheus_client", "metrics"):
        from tapeline.export.prometheus import RunCollector, Served
    import time

    collector = RunCollector(run, SystemClock())
    if textfile is not None:
        with _until_told():
            collector.write(textfile)
            while follow and not collector.seen.ended:
                time.sleep(interval_s)
                collector.write(textfile)
        say(f"wrote {textfile}")
    else:
        with contextlib.closing(Served(collector, *address)) as served, _until_told():
            say(f"serving {served.url} until {'the run ends' if follow else 'Ctrl-C'}")
            while not follow or not collector.look().ended:
                time.sleep(interval_s)
            served.wait_for_end_seen()
    seen = collector.seen
    return {"state": seen.state, "step": seen.step, "attempts": len(seen.lives)}


@contextlib.contextmanager
def _until_told() -> Iterator[None]:
    """Ctrl-C is how a sidecar is ended."""
    with contextlib.suppress(KeyboardInterrupt):
        yield
