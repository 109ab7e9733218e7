"""`tapeline checkpoints`: what a run has saved, whether it is whole, what stays, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapeline.cli.output import DefaultVerb, Json, Set, print_json, say


class _ListByDefault(DefaultVerb):
    default = "list"


app = typer.Typer(
    cls=_ListByDefault,
    help="List, verify, tag, export and prune what a run has saved. Example: tapeline checkpoints "
    "runs/reference",
    no_args_is_help=True,
)
Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
Step = Annotated[int, typer.Argument(help="Steps done, as in the list.")]


@app.command("list")
def list_(run: Run, overrides: Set = None, as_json: Json = False) -> None:
    """Show each checkpoint, newest first; the local ones are read and verified for it.

    Exit 1 if the durable ones can't be reached.

    Example: tapeline checkpoints list runs/reference
    """
    from tapeline.attempt import KeptCheckpoints
    from tapeline.report import Table, format_bytes, print_table

    kept = KeptCheckpoints(run, overrides or [])
    rows, interval = kept.rows(), kept.interval()
    if as_json:
        told = [row.as_dict() for row in rows]
        found = {"run": str(run), "checkpoints": told, "interval": interval}
        print_json({**found, "unreachable": kept.unreachable})
        _tell(kept.unreachable)
        return
    if interval:
        low, high = interval["range_steps"]
        costs = {name: f"{seconds:.3g} s" for name, seconds in interval["costs"].items()}
        say(
            f"interval from step {interval['at_step']}: {interval['num_steps']} steps "
            f"({low} to {high or 'any'}), {interval['why']}; a save blocks {costs['blocking_s']} "
            f"and is written for {costs['write_s']}, a step takes {costs['step_s']}"
        )
    columns = ["step", "tier", "size", "saved", "verified", "val loss", "tags", "attempt", "note"]
    print_table(
        Table(
            columns,
            [
                [
                    row.step,
                    row.tier,
                    None if row.num_bytes is None else format_bytes(row.num_bytes),
                    row.created and row.created[:19],
                    {True: "yes", False: "no", None: None}[row.verified],
                    row.metric,
                    ", ".join(row.tags) or None,
                    row.attempt,
                    row.note or None,
                ]
                for row in rows
            ],
            f"{run}: {len(rows)} checkpoints",
        )
    )
    _tell(kept.unreachable)


@app.command()
def verify(run: Run, overrides: Set = None, as_json: Json = False) -> None:
    """Read every byte in both tiers and compare it with its hash; exit 2 if one differs.

    Exit 1 if the durable ones can't be reached.

    Example: tapeline checkpoints verify runs/reference
    """
    from tapeline.attempt import KeptCheckpoints
    from tapeline.errors import CheckpointError

    kept = KeptCheckpoints(run, overrides or [])
    rows = kept.rows(everything=True)
    damaged = [row for row in rows if not row.verified]
    if as_json:
        found = [{"place": row.place, "found": row.note} for row in damaged]
        told = {"run": str(run), "checkpoints": len(rows), "damaged": found}
        print_json({**told, "unreachable": kept.unreachable})
    if damaged:
        raise CheckpointError(
            run,
            expected="the bytes that were saved",
            found=f"{len(damaged)} of {len(rows)} checkpoints damaged, the newest: "
            f"{damaged[0].note.rstrip('.')}",
            fix="A resume passes over them; delete their folders to be rid of them",
        )
    say(f"{run}: {len(rows)} checkpoints verified")
    _tell(kept.unreachable)


@app.command()
def tag(
    run: Run,
    step: Step,
    name: Annotated[str, typer.Argument(help="Letters, digits, `.`, `_` and `-`.")],
    overrides: Set = None,
) -> None:
    """Give a checkpoint a name; it is never deleted from then on, and copied to the durable tier.

    Example: tapeline checkpoints tag runs/reference 200 paper
    """
    from tapeline.attempt import KeptCheckpoints

    tiers = KeptCheckpoints(run, overrides or []).tag(step, name)
    say(f"{run}: step {step} is tagged {name} ({', '.join(tiers)})")


@app.command()
def export(
    run: Run,
    step: Step,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    overrides: Set = None,
) -> None:
    """Write a checkpoint as plain safetensors and JSON, for use without tapeline.

    Example: tapeline checkpoints export runs/reference 200 --out exported
    """
    from tapeline.attempt import KeptCheckpoints

    folder = KeptCheckpoints(run, overrides or []).export(step, out)
    say(f"{folder}: model.safetensors, state.safetensors, state.json")


@app.command()
def prune(
    run: Run,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Delete local checkpoints that the run's rules don't keep; --set changes the rules for once.

    Example: tapeline checkpoints prune runs/reference --set checkpoint.keep=1 --dry-run
    """
    from tapeline.attempt import KeptCheckpoints

    plan = KeptCheckpoints(run, overrides or []).prune(dry_run=dry_run)
    go = [step for step, reasons in plan.items() if not reasons]
    if as_json:
        kept = {str(step): list(reasons) for step, reasons in plan.items() if reasons}
        print_json({"run": str(run), "dry_run": dry_run, "kept": kept, "deleted": go})
        return
    for step, reasons in plan.items():
        gone = "would go" if dry_run else "deleted"
        say(f"step {step}: {', '.join(reasons) or gone}")


def _tell(unreachable: str | None) -> None:
    """Say what was left out, and end with the exit code for it."""
    if unreachable:
        say(f"the durable copies are left out: {unreachable}")
        raise typer.Exit(1)
