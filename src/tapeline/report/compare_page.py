"""The page of several runs side by side: what changed, where the time went, what they came to.

Covers laying out what `SeenRun` and `runs.diff` found. The first run is the one that others are
held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeline.ledger import BUCKETS
from tapeline.ledger.phases import NS_PER_S
from tapeline.report.page import Page, Section
from tapeline.report.run_times import bucket_bars
from tapeline.report.seen import SeenRun
from tapeline.report.signal_figures import losses_figure
from tapeline.report.tables import Cell, Table, format_percent
from tapeline.runs.diff import RunDiff, diff_runs, loss_of
from tapeline.runs.divergence import seed_band
from tapeline.runs.facts import NOISE
from tapeline.runs.index import indexed
from tapeline.runs.replicas import siblings

_SHORT = 60
_MOST_CHANGES = 25


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Some runs and how each differs from the first.

    Attributes:
        runs: by a name of its own each.
        diffs: of the others to the first, in their order.
        band: how far apart other seeds of the first are at each of its steps; None: not known.
    """

    runs: Mapping[str, SeenRun]
    diffs: tuple[RunDiff, ...]
    band: npt.NDArray[np.float64] | None
    num_seeds: int

    @classmethod
    def of(cls, seen: list[SeenRun]) -> ComparedRuns:
        """Compare runs; seeds of the first are looked for beside it.

        Args:
            seen: two or more.
        """
        first, others = seen[0].run.path.absolute(), [one.run.path.absolute() for one in seen[1:]]
        of_family = siblings(
            {**seen[0].summary, "path": str(first)}, indexed(first.parent).summaries
        )
        replicates = [Path(run["path"]) for run in of_family if Path(run["path"]) not in others]
        diffs = tuple(diff_runs(seen[0].run.path, one.run.path, replicates) for one in seen[1:])
        losses = [loss_of(path) for path in replicates]
        steps = loss_of(first).steps
        band = seed_band(steps, losses) if len(losses) > 1 else None
        return cls(_named(seen), diffs, band, len(losses))

    def as_dict(self) -> dict[str, Any]:
        """The figures of the page as JSON can hold them."""
        return {
            "runs": {name: one.as_dict() for name, one in self.runs.items()},
            "diffs": [asdict(one) for one in self.diffs],
        }


def compare_page(compared: ComparedRuns) -> Page:
    """The page of several runs."""
    names = list(compared.runs)
    accounts = {name: one.account for name, one in compared.runs.items() if one.account is not None}
    sections = [Section("What they came to", "", table=results_table(compared))]
    if accounts:
        sections.append(
            Section(
                "Where the time went",
                "Every nanosecond of every rank is in one bucket; each bar is the whole time of "
                "its run.",
                bars=bucket_bars(accounts),
            )
        )
    return Page(
        title=" against ".join([names[0], ", ".join(names[1:])]),
        summary="The first run is the one that the others are held against.",
        sections=[
            *sections,
            *_losses(compared),
            *(_changes(names[0], *one) for one in zip(names[1:], compared.diffs, strict=True)),
        ],
    )


def results_table(compared: ComparedRuns) -> Table:
    """What each run came to, a column a run."""
    runs = list(compared.runs.values())
    rows: list[list[Cell]] = [["ended", *(one.summary["how"] for one in runs)]]
    keys = ("seed", "step", "attempts", "loss", "best_validation", "goodput", "wall_s")
    titles = ("seed", "steps", "attempts", "loss, mean of the last steps",
              "validation loss, the lowest", "goodput", "rank time s")  # fmt: skip
    for key, title in zip(keys, titles, strict=True):
        values = [one.summary[key] for one in runs]
        if key == "goodput":
            values = [None if value is None else format_percent(value) for value in values]
        rows.append([title, *values])
    measured = dict.fromkeys(key for one in runs for key in one.summary["validation"])
    rows += [
        [f"validation {key}, the last", *(one.summary["validation"].get(key) for one in runs)]
        for key in measured
    ]
    rows += [[f"{bucket} s", *(_seconds(one, bucket) for one in runs)] for bucket in BUCKETS]
    costs = [one.account.cost() if one.account else None for one in runs]
    if any(costs):
        rows.append(["money", *(sum(cost.values()) if cost else None for cost in costs)])
    return Table(["", *compared.runs], rows, "")


def _seconds(seen: SeenRun, bucket: str) -> float | None:
    return None if seen.account is None else seen.account.job.buckets_ns[bucket] / NS_PER_S


def _losses(compared: ComparedRuns) -> list[Section]:
    runs = {name: loss_of(one.run.path) for name, one in compared.runs.items()}
    if not any(map(len, runs.values())):
        return []
    told = [
        f"{name}: {_parting(one)}" for name, one in zip(list(runs)[1:], compared.diffs, strict=True)
    ]
    seeds = (
        f"The band is what {compared.num_seeds} other seeds of the first run do, about its mean."
        if compared.band is not None
        else "How far apart other seeds would be isn't known: see `tapeline replicate`."
    )
    return [
        Section(
            "Losses",
            f"Each step once, as the last attempt that did it found it. {seeds}\n\n"
            + ". ".join(told)
            + ".",
            figure=losses_figure(runs, compared.band),
            alt="Training losses by step: "
            + ", ".join(f"{name} over {len(loss):,} steps" for name, loss in runs.items()),
        )
    ]


def _parting(diff: RunDiff) -> str:
    parting = diff.divergence
    if not parting.compared:
        return "no step that both have"
    if parting.first_difference is None:
        return f"the same bits in all {parting.compared:,} steps"
    text = f"other bits from step {parting.first_difference:,} on"
    if parting.num_replicates:
        leaves = parting.leaves_band
        where = "stays in the seed band" if leaves is None else f"leaves it at step {leaves:,}"
        text += f", {where}"
    return text


def _changes(first: str, name: str, diff: RunDiff) -> Section:
    shown = [one for one in diff.changes if one.weight > NOISE]
    rows: list[list[Cell]] = [
        [one.weight, one.area, one.what, _short(one.before), _short(one.after), one.why]
        for one in shown[:_MOST_CHANGES]
    ]
    left = len(diff.changes) - len(shown)
    text = "The heaviest first; a weight is a judgement of how likely a change is to matter."
    if not shown:
        text = "Nothing that would explain another result."
    if (more := len(shown) - len(rows)) > 0:
        text += f" {more} that weigh less are left out: `tapeline runs diff` shows all."
    if left:
        text += f" {left} that hardly matter are left out."
    columns = ["weight", "area", "what", first, name, "why"]
    return Section(f"What changed: {name}", text, table=Table(columns, rows, "") if rows else None)


def _short(value: Any) -> str | None:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if value is None:
        return None
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _named(seen: list[SeenRun]) -> dict[str, SeenRun]:
    """By the name of its folder, or by its whole path where that isn't unique."""
    short = [one.run.path.absolute().name for one in seen]
    long = [str(one.run.path) for one in seen]
    names = short if len(set(short)) == len(short) else long
    return {
        name if names.index(name) == number else f"{name} ({number + 1})": one
        for number, (name, one) in enumerate(zip(names, seen, strict=True))
    }
