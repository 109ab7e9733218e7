"""`tapeline plan compare`: what was planned beside what a run measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import Json, print_json, say
from tapeline.cli.plans.frame import Plot, points
from tapeline.errors import RunError, TapelineError
from tapeline.plan.goodput import BUCKETS, Compared, planned_by
from tapeline.plan.goodput import compare as compared

if TYPE_CHECKING:
    from tapeline.report import Table
    from tapeline.runs import RunFolder

_NS_PER_HOUR = 3.6e12


def compare(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    plan: Annotated[
        Path | None,
        typer.Option(
            help="What `plan goodput --json` printed; default: what the run itself planned with "
            "checkpoint.every = auto."
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Planned and measured shares of a finished run's time, beside each other.

    Example: tapeline plan compare runs/reference --plan plan.json
    """
    from tapeline.clock import SystemClock
    from tapeline.ledger import account_of
    from tapeline.runs import RunFolder

    folder = RunFolder(run, SystemClock())
    folder.record()
    account = account_of(run)
    if account.clock_faults:
        raise RunError(
            run,
            expected="an account of all its time",
            found=account.clock_faults[0],
            fix="Compare a run whose clocks weren't set back",
        )
    planned, source = _from_file(plan) if plan else _by_the_run(folder)
    hours = {name: ns / _NS_PER_HOUR for name, ns in account.job.buckets_ns.items()}
    rows = compared(planned, hours)
    if plot:
        from tapeline.report.figures import save_figure
        from tapeline.report.plan_figures import share_figure

        cases = {"planned": planned, "measured": {row.bucket: row.measured for row in rows}}
        save_figure(share_figure(cases, f"Planned: {source}. Measured: {run}."), plot)
        say(f"figure: {plot}.svg, {plot}.png")
    if as_json:
        buckets = [{**asdict(row), "difference": row.difference} for row in rows]
        print_json({"plan": "compare", "run": str(run), "planned_by": source, "buckets": buckets})
        return
    from tapeline.report import print_table

    print_table(_table(rows, run, source))


def _table(rows: list[Compared], run: Path, source: str) -> Table:
    from tapeline.report import Table

    return Table(
        ["time", "planned (model)", "measured", "difference", "measured hours"],
        [
            [
                row.bucket,
                None if row.planned is None else points(row.planned),
                points(row.measured),
                None if row.difference is None else f"{100 * row.difference:+.2f} points",
                row.hours,
            ]
            for row in rows
        ],
        f"Planned: {source}. Measured: the account of {run}",
    )


def _from_file(path: Path) -> tuple[dict[str, float], str]:
    """The case "after" of a goodput plan.

    Raises:
        TapelineError: the file holds none.
    """
    try:
        answer: dict[str, Any] = json.loads(path.read_text())
        found = {bucket: float(answer["model"]["after"]["shares"][bucket]) for bucket in BUCKETS}
    except (ValueError, KeyError, TypeError):
        raise TapelineError(
            path,
            expected="what `tapeline plan goodput --json` prints",
            found="something else",
            fix="Write it anew with that command",
        ) from None
    return found, f"{path}, after"


def _by_the_run(run: RunFolder) -> tuple[dict[str, float], str]:
    """Checkpoint and lost time as the run's last choice of an interval expected them.

    Raises:
        RunError: it made none.
    """
    decisions = run.intervals()
    if not decisions:
        raise RunError(
            run.path,
            expected="a plan",
            found="none: the run chose no interval itself (checkpoint.every isn't auto)",
            fix="Give --plan, a file of what `tapeline plan goodput --json` printed",
        )
    return planned_by(decisions[-1])
