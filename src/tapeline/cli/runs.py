"""`tapeline runs`: what runs there are, what one was, what changed between two, the good ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import Json, print_json, progress_bar, say

if TYPE_CHECKING:
    from tapeline.runs.diff import RunDiff

app = typer.Typer(
    help="List, show and compare runs, and find the last good one. Example: tapeline runs list",
    no_args_is_help=True,
)
Run = Annotated[Path, typer.Argument(help="The folder of a run.")]
Root = Annotated[Path, typer.Option("--root", help="The folder of all runs.")]
Limit = Annotated[int, typer.Option(help="The most that are shown.", min=1)]
_COLUMNS = (
    "name",
    "how",
    "step",
    "loss",
    "validation.loss",
    "validation.skill",
    "goodput",
    "created",
)
_SHORT = 40


@app.command("list")
def list_(
    root: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"),
    where: Annotated[
        list[str] | None,
        typer.Option(help="A condition, such as training.batch>=256 or how=finished."),
    ] = None,
    sort: Annotated[str, typer.Option(help="A key; with - before it, the largest first.")] = (
        "-created"
    ),
    show: Annotated[
        list[str] | None, typer.Option(help="A further column: any key of the runs.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show the runs below a folder, with what became of them.

    Example: tapeline runs list --where training.batch=256 --sort validation.loss
    """
    from tapeline.runs.choosing import check_keys, chosen

    runs = _indexed(root)
    check_keys(runs, show or ())
    found = chosen(runs, where or (), sort)
    _print_runs(found, limit, (*_COLUMNS, *(show or ())), f"{root}", as_json)


@app.command()
def show(run: Run, as_json: Json = False) -> None:
    """Show what a run was and what it came to: everything that is recorded.

    Example: tapeline runs show runs/reference
    """
    from tapeline.clock import SystemClock
    from tapeline.report import Table, print_table
    from tapeline.report.baselines import against_baselines, in_words
    from tapeline.runs import RunFolder
    from tapeline.runs.summary import summary

    folder = RunFolder(run, SystemClock())
    record, came_to = folder.record(), summary(run)
    evaluation = next(reversed(folder.validations().values()), {})
    if as_json:
        lives = [
            {**life, "record": folder.attempt_record(life["attempt"])} for life in folder.attempts()
        ]
        found = {"record": record, "lives": lives, "summary": came_to, "evaluation": evaluation}
        print_json(found)
        return
    rows = [[key, _short(value)] for key, value in came_to.items() if not isinstance(value, dict)]
    rows += [[f"validation.{key}", _short(value)] for key, value in came_to["validation"].items()]
    given = record.get("given", ())
    rows += [[key, f"{_short(_value(record['config'], key))} (given)"] for key in given]
    code, environment = record.get("code", {}), record.get("environment", {})
    rows += [["code", f"{code.get('state')} at {code.get('commit')}"]]
    rows += [[f"code: {path}", about["status"]] for path, about in code.get("files", {}).items()]
    for key in ("python", "blas", "driver", "container"):
        rows.append([key, _short(environment.get(key))])
    print_table(Table(["what", "found"], rows, str(run)))
    if "horizons" in evaluation:
        print_table(against_baselines(evaluation))
        say(in_words(evaluation))


@app.command()
def diff(
    first: Run,
    second: Run,
    seeds: Annotated[
        Path | None,
        typer.Option(
            help="Folder of replicates of the first run, for the seed band; default: beside it."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show what hardly matters.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what changed between two runs, ranked by how likely it is to matter.

    And the first step at which their losses differ, and leave the band of other seeds.

    Example: tapeline runs diff runs/good runs/bad
    """
    from tapeline.runs.diff import diff_runs
    from tapeline.runs.replicas import siblings
    from tapeline.runs.summary import summary

    one = summary(first.absolute())
    others = siblings(one, _indexed(seeds or first.absolute().parent))
    replicates = [Path(run["path"]) for run in others if Path(run["path"]) != second.absolute()]
    found = diff_runs(first, second, replicates)
    if as_json:
        print_json(asdict(found))
    else:
        _print_diff(found, everything)


@app.command()
def find(
    like: Run,
    good: Annotated[
        bool, typer.Option("--good", help="Only finished runs that met the target.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="What good means; default: validation.skill>0.")
    ] = None,
    same: Annotated[
        list[str] | None, typer.Option(help="A further key that must have the same value.")
    ] = None,
    root: Root = Path("runs"),
    limit: Limit = 10,
    as_json: Json = False,
) -> None:
    """Find runs like one, the last first: of one model factory, target, objective and windows.

    Exit 1 if there is none.

    Example: tapeline runs find runs/bad --good
    """
    from tapeline.runs.choosing import GOOD, like_it
    from tapeline.runs.summary import summary

    wanted = target or (GOOD if good else None)
    found = like_it(summary(like.absolute()), _indexed(root), wanted, same or ())
    _print_runs(found, limit, _COLUMNS, f"like {like}", as_json)
    if not found:
        say(f"no run like {like}" + (f" with {wanted}" if wanted else ""))
        raise typer.Exit(1)
    say(f"compare: tapeline runs diff {found[0]['path']} {like}")


def _indexed(root: Path) -> list[dict[str, Any]]:
    from tapeline.runs.index import indexed

    with progress_bar("Reading runs") as progress:
        return indexed(root, progress=progress).summaries


def _print_runs(
    runs: list[dict[str, Any]], limit: int, columns: tuple[str, ...], caption: str, as_json: bool
) -> None:
    from tapeline.report import Table, print_table
    from tapeline.runs.choosing import look_up

    if as_json:
        print_json(runs[:limit])
        return
    rows = [[_cell(look_up(run, key)) for key in columns] for run in runs[:limit]]
    more = f", {limit} shown" if len(runs) > limit else ""
    plural = "" if len(runs) == 1 else "s"
    print_table(Table(columns, rows, f"{caption}: {len(runs)} run{plural}{more}"))
    for run in runs[:limit]:
        if run["problem"]:
            say(f"damaged: {run['problem']}")


def _print_diff(found: RunDiff, everything: bool) -> None:
    from tapeline.report import Table, print_table
    from tapeline.runs.facts import NOISE

    shown = [one for one in found.changes if everything or one.weight > NOISE]
    rows = [
        [one.weight, one.area, one.what, _short(one.before), _short(one.after), one.why]
        for one in shown
    ]
    left = len(found.changes) - len(shown)
    columns = ["weight", "area", "what", "first", "second", "why"]
    print_table(Table(columns, rows, f"{found.first} → {found.second}"))
    if left:
        say(f"{left} that hardly matter left out: --all shows them")
    parting = found.divergence
    if not parting.compared:
        say("losses: no step that both have")
    elif parting.first_difference is None:
        say(f"losses: the same bits in all {parting.compared:,} steps")
    else:
        say(f"losses: other bits from step {parting.first_difference:,} on")
        if not parting.num_replicates:
            say("whether that is more than another seed does isn't known: see tapeline replicate")
        elif parting.leaves_band is None:
            say(f"they stay in the band of {parting.num_replicates} other seeds")
        else:
            band = f"the band of {parting.num_replicates} other seeds"
            say(f"they leave {band} at step {parting.leaves_band:,}")


def _value(config: dict[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _cell(value: Any) -> str | int | float | None:
    return value if isinstance(value, str | int | float | None) else _short(value)


def _short(value: Any) -> str | None:
    if value is None:
        return None
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
