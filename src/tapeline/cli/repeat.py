"""`tapeline audit`, `rerun`, `replicate` and `compare`: can it be repeated, and is it the seed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tapeline.cli.output import Json, Set, print_json, progress_bar, say
from tapeline.words import percent

Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
Metric = Annotated[
    str | None,
    typer.Option(help="A figure of the runs; default: validation.loss, or loss if none."),
]


def audit(
    run: Run,
    verify: Annotated[
        bool, typer.Option(help="Compare the bytes of the data with their hashes.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show every obstacle to an exact re-run of a run, and the sentence that may be published.

    Exit 1 if it isn't bit-exact.

    Example: tapeline audit runs/reference
    """
    from tapeline.report import Table, print_table
    from tapeline.runs.audit import audit_run
    from tapeline.runs.spread import spread_of

    figures = _figures_of_seeds(run)
    spread = spread_of(figures) if len(figures) >= 2 else None
    found = audit_run(run, spread=spread, verify=verify)
    if as_json:
        print_json(asdict(found))
    else:
        rows = [[one.what, one.leaves, one.evidence, one.change] for one in found.obstacles]
        columns = ["obstacle", "leaves", "evidence", "what to change"]
        print_table(Table(columns, rows, f"{run}: {found.verdict}"))
        say("leave alone: " + "; ".join(found.leave_alone))
        say(found.sentence)
    if found.verdict != "bit-exact":
        raise typer.Exit(1)


def _figures_of_seeds(run: Path) -> list[float]:
    """The validation loss of a run and of those beside it that differ in their seed alone."""
    from tapeline.runs.index import indexed
    from tapeline.runs.replicas import siblings
    from tapeline.runs.summary import summary

    own = summary(run.absolute())
    with progress_bar("Reading runs") as progress:
        runs = indexed(run.absolute().parent, progress=progress).summaries
    family = [*([own] if own.get("how") == "finished" else []), *siblings(own, runs)]
    values = [one["validation"].get("loss") for one in family]
    return [float(value) for value in values if isinstance(value, int | float)]


def rerun(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="The new run's folder; default: beside it, with -rerun.")
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train a run again from its record, and compare the bits; exit 1 if they differ.

    The code is put back from its commit with `git worktree`, the data is checked by hash.

    Example: tapeline rerun runs/reference
    """
    from tapeline.repeat import rerun as rerun_run

    folder = run.absolute()
    place = out or folder.with_name(f"{folder.name}-rerun")
    found = rerun_run(run, place, overrides=overrides or [], say=say)
    if as_json:
        print_json(found.as_dict())
    else:
        for one in found.surroundings:
            say(f"otherwise than recorded: {one}")
        _tell_rerun(found)
    if not found.is_equal:
        raise typer.Exit(1)


def _tell_rerun(found: Any) -> None:
    if found.is_equal:
        say(
            f"{found.again}: the same bits in {found.steps_compared:,} losses and in the state "
            f"after step {found.state_step:,}"
        )
        return
    if found.first_difference is not None:
        say(f"losses: other bits from step {found.first_difference:,} on")
    if found.validations_differ:
        say(f"validation: other figures from step {found.validations_differ[0]:,} on")
    if found.state_step is None:
        say("there is no checkpoint of one step in both, so their states can't be compared")
    elif found.parts_differing:
        parts = ", ".join(found.parts_differing)
        say(f"state after step {found.state_step:,}: other bits in {parts}")


def replicate(
    config: Annotated[Path, typer.Argument(help="A TOML file; see examples/reference.toml.")],
    seeds: Annotated[int, typer.Option(help="How many, from the configuration's own on.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Their folder; default: runs/ and the name.")
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train a configuration with several seeds: the mean, and intervals for it and for a next run.

    Called again, finished seeds are kept and unfinished ones resumed.

    Example: tapeline replicate examples/reference.toml --seeds 3
    """
    from tapeline.config import RunConfig

    settings = RunConfig.load(config, overrides or [])

    from tapeline.repeat import replicate as replicate_config
    from tapeline.run import resume, start

    place = out or Path("runs") / f"{settings.name}-seeds"
    with progress_bar("Training") as bar:
        found = replicate_config(
            settings,
            place,
            num_seeds=seeds,
            start=lambda one, folder, tell: start(one, folder, progress=tell),
            resume=lambda folder, tell: resume(folder, progress=tell),
            progress=bar,
        )
    if as_json:
        print_json(found.as_dict())
        return
    from tapeline.report import Table, print_table

    rows: list[list[str | float]] = [[str(seed), value] for seed, value in found.by_seed.items()]
    print_table(Table(["seed", found.metric], rows, found.folder))
    say(found.sentence)


def compare(
    first: Annotated[Path, typer.Argument(help="A folder of replicates, or a run.")],
    second: Annotated[Path, typer.Argument(help="A folder of replicates, or a run.")],
    metric: Metric = None,
    as_json: Json = False,
) -> None:
    """Say whether two configurations differ by more than seed noise; exit 1 if not.

    Paired by seed where both have the same ones.

    Example: tapeline compare runs/small-seeds runs/large-seeds
    """
    from tapeline.runs.replicas import replicas_of
    from tapeline.runs.spread import compare as compare_figures

    one = replicas_of(first, metric)
    two = replicas_of(second, one.metric)
    for unfinished in (*one.unfinished, *two.unfinished):
        say(f"left out, not finished: {unfinished}")
    found = compare_figures(one.by_seed, two.by_seed)
    if as_json:
        sides = {"first": str(first), "second": str(second), "metric": one.metric}
        print_json({**sides, **found.as_dict()})
    else:
        say(
            f"{one.metric}: {second} differs from {first} by {found.difference:+.4g} ± "
            f"{found.half_width:.2g} ({percent(found.confidence)} interval, {found.how})"
        )
        if found.exceeds_noise:
            say("that is more than seeds do")
        elif found.seeds_to_decide:
            say(f"seeds do as much; {found.seeds_to_decide} of each would tell such a difference")
        else:
            say("seeds do as much, and no number of seeds within reason would decide it")
    if not found.exceeds_noise:
        raise typer.Exit(1)
