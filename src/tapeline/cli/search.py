"""`tapeline search`: the settings of a configuration that do best, for a budget of steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import DefaultVerb, Json, Set, print_json, progress_bar, say
from tapeline.errors import RunError

if TYPE_CHECKING:
    from tapeline.search.folder import SearchFolder
    from tapeline.search.result import Result, Spent

_MOST_ROWS = 20


class _RunByDefault(DefaultVerb):
    default = "run"


app = typer.Typer(
    cls=_RunByDefault,
    help="Search settings by grid, random, Bayesian or asynchronous halving, each trial a run. "
    "`tapeline search run --help` has its options. "
    "Example: tapeline search examples/search.toml --budget 20000 --workers 2",
    no_args_is_help=True,
)
Storage = Annotated[
    str | None,
    typer.Option(help="Database of the journal, such as postgresql+psycopg://host/name."),
]


@app.command()
def run(
    space: Annotated[Path, typer.Argument(help="A TOML file; see examples/search.toml.")],
    budget: Annotated[int | None, typer.Option(min=1, help="Steps in all, finals aside.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Of this machine.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Its folder; default: searches/ and its name.")
    ] = None,
    storage: Storage = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Search, or go on with a search; the same command on another machine joins it.

    Exit 1 if no trial came to a figure.

    Example: tapeline search run examples/search.toml --budget 20000 --workers 4
    """
    from tapeline.search.conduct import conduct
    from tapeline.search.folder import SearchFolder
    from tapeline.search.space import SearchConfig
    from tapeline.store import open_reader

    settings = [f"budget_steps={budget}"] if budget else []
    config = SearchConfig.load(space, [*settings, *(overrides or [])])
    open_reader(config.base_config().data.store)  # without a store each trial would fail by itself
    search = SearchFolder.begin(out or Path("searches") / config.name, config, storage)
    _tell_plan(search)
    try:
        with progress_bar("Searching") as progress:
            conduct(search, workers or config.workers, say, progress)
    except KeyboardInterrupt:
        say("stopped, and what runs was saved: give the same command again to go on")
        raise typer.Exit(130) from None
    _tell(search, as_json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a search.")],
    verify: Annotated[
        bool, typer.Option(help="Replay the journal and compare what workers did with it.")
    ] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show what a search came to, or how far it is; draws history, rungs and parallel coordinates.

    Exit 1 if no trial has a figure, or if a replay decides otherwise.

    Example: tapeline search show searches/search
    """
    from tapeline.search.folder import SearchFolder
    from tapeline.search.replay import departures

    search = SearchFolder.open(folder, storage)
    if verify:
        entries = [entry for _, entry in search.journal().new_entries()]
        found = departures(search.config, search.rules, entries)
        if found:
            raise RunError(
                folder,
                expected="workers that did what the journal decides",
                found=f"{len(found)} that didn't, the first: {found[0]}",
                fix="See whether workers ran different versions of Optuna or of tapeline",
            )
        say(f"{len(entries):,} entries: every decision is that of their replay")
    _tell(search, as_json)


def _tell_plan(search: SearchFolder) -> None:
    rules = search.rules
    rungs = ", ".join(f"{step:,}" for step in rules.rungs)
    say(f"{search.path}: {rules.budget_steps:,} steps of trials; rungs at {rungs} steps")
    if rules.picks:
        steps = rules.picks * rules.seeds * rules.rungs[-1]
        say(f"finals besides: {rules.picks} × {rules.seeds} fresh seeds, {steps:,} steps")


def _tell(search: SearchFolder, as_json: bool) -> None:
    from tapeline.search.result import result_of

    with progress_bar("Reading runs") as progress:
        result = result_of(search, progress)
    figures = _draw(search.path, result)
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)
    for path in figures:
        say(f"figure: {path}")
    if result.is_over and not result.has_a_figure:
        say("no trial came to a figure")
        raise typer.Exit(1)


def _draw(folder: Path, result: Result) -> list[Path]:
    from tapeline.report.figures import save_figure
    from tapeline.report.search_figures import (
        history_figure,
        parallel_figure,
        rungs_figure,
    )

    curves = {one.number: one.results for one in result.trials if one.results}
    if not curves:
        return []
    rungs, (metric, direction) = result.rest["rungs"], result.metric
    best = result.finals[0].trial if result.finals else None
    note = f"{len(result.trials)} trials, {result.rest['budget_spent_steps']:,} steps"
    ranked = [one.values for one in result.ranked() if one.values and one.state != "failed"]
    drawn = {
        "history": history_figure(curves, rungs, metric, direction, note),
        "rungs": rungs_figure(curves, metric, best, note),
        "parallel": parallel_figure(ranked, note),
    }
    for name, figure in drawn.items():
        save_figure(figure, folder / name)
    return [folder / f"{name}.svg" for name in drawn]


def _print(result: Result) -> None:
    from tapeline.report import Table, print_table

    metric, _ = result.metric
    keys = sorted({key for one in result.trials for key in one.values or {}})
    rows = [
        [
            one.number,
            *((one.values or {}).get(key) for key in keys),
            one.value,
            one.state,
            one.reason,
        ]
        for one in result.ranked()[:_MOST_ROWS]
    ]
    caption = f"{result.folder}: {len(result.trials)} trials, the furthest and best first"
    print_table(Table(["trial", *keys, metric, "came to", "because"], rows, caption))
    if len(result.trials) > _MOST_ROWS:
        say(f"{len(result.trials) - _MOST_ROWS} more are in --json")
    _say_spent(result)
    for final in result.finals:
        if final.spread:
            s = final.spread
            say(
                f"trial {final.trial}, found at {final.found:.6g}: {s.mean:.6g} ± "
                f"{s.mean_half_width:.2g} on {len(s.values)} fresh seeds"
            )
        elif result.is_over:
            say(f"trial {final.trial}, found at {final.found:.6g}: fewer than 2 seeds got there")
    if over := result.overstated():
        say(
            f"the search's figure flatters its pick by {over[0]:+.3g}; {over[1]:.3g} is what the "
            "best of so many is expected to"
        )
    if not result.is_over:
        say("it isn't over: give the same command again to go on")


def _say_spent(result: Result) -> None:
    trials, finals = result.spent
    rest = result.rest
    pairs = zip(rest["rungs"], rest["reached"], strict=True)
    reached = ", ".join(f"{num} to {step:,}" for step, num in pairs)
    say(f"trials that came to a rung: {reached} steps")
    if plan := result.planned:
        say(
            f"planned: {plan.num_configs} trials, {plan.num_full} full runs, "
            f"{plan.gpu_hours:,.0f} steps; measured: {len(result.trials)} trials, "
            f"{rest['reached'][-1]} full runs, {rest['budget_spent_steps']:,} steps"
        )
    else:
        say("planned: the budget holds no whole ladder, so nothing can be said beforehand")
    died, stopped = (rest["given_back"][kind] for kind in ("died", "stopped"))
    say(
        f"{_spent(trials)} for trials, {_spent(finals)} for finals; jobs given back: {died} by "
        f"the dead, {stopped} by the stopped"
    )


def _spent(spent: Spent) -> str:
    return (
        f"{spent.kept_steps:,} steps kept ({spent.kept_s:,.0f} s) and {spent.redone_steps:,} lost "
        f"({spent.lost_s:,.0f} s, with starting again)"
    )
