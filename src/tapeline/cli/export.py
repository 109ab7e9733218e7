"""`tapeline export`: a run to a tracker or to Prometheus, from its journals."""

from __future__ import annotations

import contextlib
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import Json, print_json, progress_bar, say

if TYPE_CHECKING:
    from tapeline.export.tracking import Tracker


class Target(StrEnum):
    """Where a run is exported to."""

    PROMETHEUS = "prometheus"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


_OPTIONS = {
    Target.PROMETHEUS: {"host", "port", "textfile"},
    Target.TENSORBOARD: {"out"},
    Target.MLFLOW: {"uri", "experiment"},
    Target.WANDB: {"out", "experiment"},
}
# What a tracker's library would do beside what it is told to; who wants it sets the variable.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "WANDB_ERROR_REPORTING": "false",
}


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
    out: Annotated[
        Path | None,
        typer.Option(help="TensorBoard: the run's own folder. W&B: the folder of all runs."),
    ] = None,
    uri: Annotated[
        str | None, typer.Option(help="MLflow: the server.", envvar="MLFLOW_TRACKING_URI")
    ] = None,
    experiment: Annotated[
        str, typer.Option(help="MLflow: the experiment. W&B: the project.")
    ] = "tapeline",
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

    To export again changes nothing that is there. Prometheus is served until Ctrl-C, or with
    --follow until the run has ended and that was seen; W&B is written for `wandb sync`, offline.

    Example: tapeline export runs/reference --to tensorboard --out tensorboard/reference
    """
    _check_given(context, to, textfile)
    if to is Target.PROMETHEUS:
        result = _to_prometheus(run, textfile, (host, port), follow, interval_s)
    else:
        os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
        tracker = _tracker(run, to, out, uri, experiment)
        result = _to_tracker(run, tracker, interval_s if follow else None)
    if as_json:
        print_json({"run": str(run), "to": to.value, **result})


def _check_given(context: typer.Context, to: Target, textfile: Path | None) -> None:
    """An option that would do nothing is told, not passed over."""
    idle = set().union(*_OPTIONS.values()) - _OPTIONS[to]
    for name in sorted(idle | ({"host", "port"} if textfile else set())):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            beside = to.value if name in idle else f"{to.value} --textfile"
            raise typer.BadParameter(f"--{name} does nothing with --to {beside}")


def _to_prometheus(
    run: Path, textfile: Path | None, address: tuple[str, int], follow: bool, interval_s: float
) -> dict[str, Any]:
    from tapeline.clock import SystemClock
    from tapeline.export import needed

    with needed("prometheus", "prometheus_client", "metrics"):
        from tapeline.export.prometheus import RunCollector, Served

    collector = RunCollector(run, SystemClock())
    if textfile is not None:
        with contextlib.suppress(KeyboardInterrupt):  # how a sidecar is ended
            collector.write(textfile)
            while follow and not collector.seen.ended:
                time.sleep(interval_s)
                collector.write(textfile)
        say(f"wrote {textfile}")
    else:
        with (
            contextlib.closing(Served(collector, *address)) as served,
            contextlib.suppress(KeyboardInterrupt),
        ):
            say(f"serving {served.url} until {'the run ends' if follow else 'Ctrl-C'}")
            while not follow or not collector.look().ended:
                time.sleep(interval_s)
            served.wait_for_end_seen()
    seen = collector.seen
    return {"state": seen.state, "step": seen.step, "attempts": len(seen.lives)}


def _tracker(run: Path, to: Target, out: Path | None, uri: str | None, experiment: str) -> Tracker:
    """The tracker that is asked for."""
    from tapeline.clock import SystemClock
    from tapeline.export import needed
    from tapeline.runs import RunFolder
    from tapeline.runs.view import run_id_of

    run_id = run_id_of(RunFolder(run, SystemClock()))
    if to is Target.MLFLOW:
        if uri is None:
            raise typer.BadParameter("--to mlflow needs --uri or MLFLOW_TRACKING_URI")
        with needed("mlflow", "mlflow", "trackers"):
            from tapeline.export.mlflow import MlflowServer
        return MlflowServer(uri, experiment, run_id)
    if out is None:
        raise typer.BadParameter(f"--to {to.value} needs --out, a folder")
    if to is Target.TENSORBOARD:
        with needed("tensorboard", "tensorboard", "trackers"):
            from tapeline.export.tensorboard import TensorBoard
        return TensorBoard(out, run_id)
    with needed("wandb", "wandb", "trackers"):
        from tapeline.export.wandb import WandbOffline
    return WandbOffline(out, experiment, run_id)


def _to_tracker(run: Path, tracker: Tracker, follow_every_s: float | None) -> dict[str, Any]:
    from tapeline.clock import SystemClock
    from tapeline.export.tracking import send

    with progress_bar("Exporting") as progress:
        done = send(
            run,
            tracker,
            SystemClock(),
            follow_every_s=follow_every_s,
            progress=progress,
            say=lambda text: say(f"tapeline: {text}"),
        )
    seen = done.seen
    say(f"{tracker.where}: {done.num_values:,} values of a run at step {seen.step:,}, {seen.state}")
    counted = {"where": tracker.where, "values": done.num_values}
    return {**counted, "state": seen.state, "step": seen.step, "attempts": len(seen.lives)}
