"""`tapeline prove`: whether a configuration's bits outlast kills and changes of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, Set, print_json, progress_bar, say, whole_numbers

if TYPE_CHECKING:
    from tapeline.prove import Certificate

_SHOWN = ("parameters", "optimiser", "loader", "generators", "losses", "validation")


def prove(
    config: Annotated[Path, typer.Argument(help="A TOML file, as for `tapeline train`.")],
    kills: Annotated[int, typer.Option(min=1, help="How many SIGKILLs.")] = 3,
    ranks: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, such as 1,2,3,4; default: 1 to 4, as lanes allow."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for both runs; default: proofs/ and the run's name.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the moments of the kills.")] = 0,
    every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints; default: 4 in a life.")
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train once without a stop and once under real SIGKILLs on changing ranks; compare the bits.

    Prints a certificate. Exit 1 if they part, with where and why.

    Example: tapeline prove examples/reference.toml --kills 3 --ranks 1,2,3,4
    """
    from tapeline.config import RunConfig

    settings = RunConfig.load(config, overrides or [])
    most = min(4, settings.training.lanes)
    chosen = whole_numbers(ranks, "--ranks", "1,2,3,4") if ranks else range(1, most + 1)

    from tapeline.prove import Trial
    from tapeline.prove import prove as prove_run

    trial = Trial(config, tuple(overrides or ()), kills, tuple(chosen), seed, every)
    with progress_bar("Proving") as progress:
        found = prove_run(trial, out or Path("proofs") / settings.name, say, progress)
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.holds:
        raise typer.Exit(1)


def _print(found: Certificate) -> None:
    from tapeline.report import Table, print_table

    subject = found.subject
    print_table(
        Table(
            columns=["life", "ranks", "threads around", "from step", "how", "after step"],
            rows=[
                [
                    "uninterrupted",
                    subject["ranks"],
                    subject["threads"],
                    0,
                    "finished",
                    subject["steps"],
                ],
                *(
                    [
                        str(number),
                        life.ranks,
                        life.threads,
                        life.from_step,
                        life.how,
                        life.after_step,
                    ]
                    for number, life in enumerate(found.lives, 1)
                ),
            ],
            caption=f"{subject['name']}, configuration {subject['config_hash'][:16]}, data "
            f"{subject['data_fingerprint'][:16]}",
        )
    )
    print_table(
        Table(
            columns=["after the last step", "sha256, uninterrupted", "killed"],
            rows=[
                [name, one, "the same" if one == other else other]
                for name, (one, other) in found.hashes.items()
                if name in _SHOWN
            ],
        )
    )
    say(found.sentence())
    for cause in found.causes:
        may = "" if cause.shown else "perhaps "
        say(f"cause: {may}{cause.kind}: {cause.where}: {cause.evidence}. {cause.fix}.")
    if not (found.holds or found.causes):
        say("no cause was found in three steps on one rank: look for what depends on the rank")
    settings = found.platform["determinism"]
    machine = found.platform["machine"]
    say(
        f"on {machine['processor']}, {settings['cpu_capability']}, torch {settings['torch']}, "
        f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''} of torch"
    )
    if cost := found.determinism_cost:
        say(
            "no operation refused to be deterministic; a step that is takes "
            f"{cost['ratio']:.2f} × one that isn't ({cost['deterministic_ms']:.3g} ms against "
            f"{cost['free_ms']:.3g})"
        )
