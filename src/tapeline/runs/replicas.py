"""The figures of replicates, read from their folders: by seed, of one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.runs.choosing import look_up
from tapeline.runs.folder import RECORD
from tapeline.runs.summary import summary

VALIDATION, LOSS = "validation.loss", "loss"


@dataclass(frozen=True, slots=True)
class Replicas:
    """One figure of runs that differ in their seed alone.

    Attributes:
        metric: its key in a run's summary.
        by_seed: of each finished run; nan or infinite where it diverged.
        unfinished: folders of runs that aren't.
    """

    metric: str
    by_seed: dict[int, float]
    unfinished: tuple[str, ...]


def replicas_of(place: Path, metric: str | None = None) -> Replicas:
    """Read a folder of replicates, or a single run.

    Args:
        place: the folder of a run, or one whose subfolders are runs.
        metric: a key of their summaries; by default the validation loss, without a validation split
            the mean loss of the last 50 steps.

    Raises:
        RunError: there is no run, they differ in more than their seeds, two have one seed, or a
            finished one lacks the figure.
    """
    folders = [place] if (place / RECORD).exists() else sorted(place.glob(f"*/{RECORD}"))
    runs = [summary(f.parent if f.name == RECORD else f) for f in folders]
    if not runs:
        raise RunError(
            place,
            expected="a run, or a folder of runs",
            found="none",
            fix="Give the folder that `tapeline train` or `tapeline replicate` made",
        )
    _check_one_family(place, runs)
    finished = [run for run in runs if run["how"] == "finished"]
    has_validation = any(run["validation"] for run in finished)
    metric = metric or (VALIDATION if has_validation else LOSS)
    by_seed: dict[int, float] = {}
    for run in finished:
        value = look_up(run, metric)
        try:
            by_seed[run["seed"]] = float(value)
        except (TypeError, ValueError):
            raise RunError(
                run["path"],
                expected=f"a figure {metric}",
                found=repr(value),
                fix="Choose a figure that `tapeline runs show` names",
            ) from None
    unfinished = tuple(run["path"] for run in runs if run["how"] != "finished")
    return Replicas(metric, by_seed, unfinished)


def siblings(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished runs that differ from one in their seed alone, each seed once; it isn't one itself.

    Args:
        run: the summary of the one.
        runs: summaries of all there are.
    """
    found = {
        other["seed"]: other
        for other in runs
        if run.get("family") is not None
        and other.get("family") == run["family"]
        and other.get("how") == "finished"
        and other["seed"] != run["seed"]
    }
    return list(found.values())


def _check_one_family(place: Path, runs: list[dict[str, Any]]) -> None:
    for run in runs:
        if run["problem"]:
            raise RunError(
                run["path"],
                expected="a whole run",
                found=run["problem"].rstrip(".").rpartition(". ")[0],  # without its advice
                fix="Restore it, or move it elsewhere",
            )
        if run["family"] is None or run["family"] != runs[0]["family"]:
            raise RunError(
                place,
                expected="runs that differ in their seeds alone",
                found=f"others: {Path(runs[0]['path']).name} and {Path(run['path']).name}",
                fix="See how with `tapeline runs diff`, and keep each configuration in a folder",
            )
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise RunError(
            place,
            expected="one run for each seed",
            found=f"seeds {', '.join(map(str, sorted(seeds)))}",
            fix="Move the runs that repeat a seed elsewhere",
        )
