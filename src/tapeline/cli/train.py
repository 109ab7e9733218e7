"""`tapeline train` and `tapeline resume`: a run from its configuration, and on from its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import Json, Set, print_json, progress_bar, say
from tapeline.cli.supervise import Ranks, Warm, train_supervised
from tapeline.words import percent
from tapeline.world import World

if TYPE_CHECKING:
    from tapeline.run import RunResult


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see examples/reference.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/ and the run's name.")
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervise", help="Start it again when it dies or hangs.")
    ] = False,
    ranks: Ranks = "1",
    warm: Warm = False,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train a new run; under torchrun on all its ranks, and so with --supervise --ranks N.

    Example: tapeline train examples/reference.toml --set training.steps=500
    """
    if supervised:
        train_supervised(config, out, ranks, warm, overrides or [], as_json)
    if ranks != "1" or warm:
        raise typer.BadParameter("--ranks and --warm need --supervise, or start it with torchrun")
    from tapeline.config import RunConfig

    settings = RunConfig.load(config, overrides or [])

    from tapeline.ledger import process_began_ns
    from tapeline.run import start

    with _stop_told(), progress_bar("Training") as progress:
        result = start(
            settings,
            out or Path("runs") / settings.name,
            progress=progress,
            began_ns=process_began_ns(),
        )
    _print(result, as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was killed, from its newest checkpoint that verifies.

    Example: tapeline resume runs/reference
    """
    from tapeline.ledger import process_began_ns
    from tapeline.run import resume as resume_run

    with _stop_told(), progress_bar("Training") as progress:
        result = resume_run(run, overrides or [], progress=progress, began_ns=process_began_ns())
    _print(result, as_json)


@contextlib.contextmanager
def _stop_told() -> Iterator[None]:
    """Say why a run ended before its last step; the exit code stays."""
    from tapeline.attempt.ending import Stopped
    from tapeline.checkpoint.preempt import Preempted

    try:
        yield
    except Preempted as stop:
        say(f"tapeline: {stop}. Go on with `tapeline resume`.")
        raise
    except Stopped as stop:
        say(f"tapeline: stopped and saved: {stop}.")
        raise


def _print(result: RunResult, as_json: bool) -> None:
    if World.from_environment().rank:
        return
    for skipped in result.skipped:
        say(f"passed over {skipped.path}: {skipped.reason}")
    if as_json:
        print_json(result.as_dict())
        return
    begun = f" (this time from step {result.from_step:,})" if result.from_step else ""
    say(f"{result.folder}: {result.steps:,} steps done{begun}, state {result.state_sha256[:16]}")
    say(f"its bits: {result.contract}")
    figures = result.as_dict()
    say(f"loss, mean of the last 50 steps: {figures['loss_last_50']:.6g}")
    if validation := result.validation:
        from tapeline.report.baselines import in_words

        say(f"validation on {validation['windows']:,} windows: {_beside_simplest(validation)}")
        say(in_words(validation))
    if account := result.account():
        say(account.in_words())


def _beside_simplest(validation: Mapping[str, Any]) -> str:
    skill = f"skill {percent(validation['skill'], '+.1f')}"
    if "cross_entropy" in validation:
        ours, simplest = validation["cross_entropy"], validation["cross_entropy_frequencies"]
        return f"cross entropy {ours:.6g}, of the training frequencies {simplest:.6g}, {skill}"
    return f"{validation['mse']:.6g}, predicting no change: {validation['mse_zero']:.6g}, {skill}"
