"""`tapeline quarantine`: places that a supervised run leaves out, shown and changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, print_json, say

if TYPE_CHECKING:
    from tapeline.supervise.quarantine import Quarantine

app = typer.Typer(
    help="Show and change the places that a supervised run leaves out. "
    "Example: tapeline quarantine list runs/reference",
    no_args_is_help=True,
)
Run = Annotated[Path, typer.Argument(help="The folder of a supervised run.")]
Place = Annotated[str, typer.Argument(help="host:slot, such as node7:0.")]


@app.command("list")
def list_(
    run: Run,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Print the hosts that are out, for sbatch --exclude.")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Print spec.affinity of a pod, as JSON.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show each place that has failed: whether it is out, until when, and why.

    Example: sbatch --exclude="$(tapeline quarantine list runs/reference --slurm)" job.sh
    """
    from tapeline.clock import SystemClock, utc
    from tapeline.report import Table, print_table
    from tapeline.supervise.quarantine import kubernetes_affinity, slurm_exclude

    kept, now_ns = _kept(run), SystemClock().wall_ns()
    if slurm:
        typer.echo(slurm_exclude(kept.out(now_ns)))
        return
    if kubernetes:
        print_json(kubernetes_affinity(kept.out(now_ns)))
        return
    rows = [
        {
            "place": name,
            "state": kept.state(place, now_ns),
            "until": f"{utc(place.until_ns)[:19]}Z" if place.until_ns else None,
            "failures": len(place.failed_ns),
            "reason": place.reason,
        }
        for name, place in kept.places().items()
    ]
    if as_json:
        print_json(rows)
    elif not rows:
        say("no place has failed")
    else:
        cells = [[str(row[key] or "") for key in row] for row in rows]
        print_table(Table(list(rows[0]), cells, str(run)))


@app.command()
def add(
    run: Run,
    place: Place,
    reason: Annotated[str, typer.Option(help="Why, for whoever reads the list.")],
    hours: Annotated[float, typer.Option(help="For how long.", min=0.01, max=87600)] = 4.0,
) -> None:
    """Leave a place out from the next attempt on.

    Example: tapeline quarantine add runs/reference node7:0 --reason "ECC errors" --hours 24
    """
    from tapeline.clock import SystemClock, utc

    kept, now_ns = _kept(run, hours), SystemClock().wall_ns()
    kept.put(place, reason, now_ns)
    say(f"{place} is left out until {utc(kept.places()[place].until_ns)}")


@app.command()
def remove(run: Run, place: Place) -> None:
    """Let a place be used again, and forget its failures.

    Example: tapeline quarantine remove runs/reference node7:0
    """
    _kept(run).forget(place)
    say(f"{place} may be used again")


def _kept(run: Path, hours: float | None = None) -> Quarantine:
    from tapeline.errors import RunError
    from tapeline.supervise.quarantine import FILE, Quarantine, Rule

    if not (run / FILE).parent.is_dir():
        raise RunError(
            run,
            expected="the folder of a run that was supervised",
            found="none",
            fix="Give the folder that `tapeline supervise` was given as --out",
        )
    rule = Rule() if hours is None else Rule(expiry_s=hours * 3600)
    return Quarantine(run / FILE, rule)
