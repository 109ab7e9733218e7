"""The model against the simplest predictors, on the same windows: a table, and a verdict in words.

Covers one evaluation as the metrics journal has it. What a predictor is, `training/objective`
says. Equal is not better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapeline.report.tables import Cell, Table
from tapeline.words import percent

_FIGURES = (
    ("mse", "mean squared error"),
    ("cross_entropy", "cross entropy"),
    ("accuracy", "accuracy"),
    ("balanced_accuracy", "balanced accuracy"),
)
_LESS_IS_BETTER = ("mse", "cross_entropy")
_BASELINES = {
    "_zero": "no change",
    "_frequencies": "the training frequencies",
    "_last_move": "the last move",
}


def against_baselines(validation: Mapping[str, Any]) -> Table:
    """A row for each horizon and predictor, a column for each figure."""
    horizons = validation["horizons"]
    figures = [one for one in _FIGURES if one[0] in horizons[0]]
    rows: list[list[Cell]] = []
    for one in horizons:
        for suffix, predictor in {"": "the model", **_BASELINES}.items():
            values = [one.get(f"{key}{suffix}") for key, _ in figures]
            if any(value is not None for value in values):
                told = zip(figures, values, strict=True)
                rows.append([one["horizon"], predictor, *(_told(key, v) for (key, _), v in told)])
    caption = f"on {validation['windows']:,} windows held out"
    return Table(["horizon", "predictor", *(name for _, name in figures)], rows, caption)


def in_words(validation: Mapping[str, Any]) -> str:
    """What the model is better than, and what it isn't, horizon by horizon."""
    return " ".join(map(_verdict, validation["horizons"]))


def about_last_moves(validation: Mapping[str, Any]) -> str:
    """What the last move is, and where it is shorter than the horizon."""
    cut = [one for one in validation["horizons"] if one["last_move_rows"] < one["horizon"]]
    text = "The last move is the change over as many rows as the horizon, up to the window's last."
    if cut:
        horizons = ", ".join(str(one["horizon"]) for one in cut)
        text += f" At {horizons} it is over {cut[0]['last_move_rows']}, all that a window holds."
    return text


def _told(key: str, value: float | None) -> Cell:
    if value is None:
        return None
    return percent(value, ".1f") if "accuracy" in key else f"{value:.4g}"


def _verdict(one: Mapping[str, Any]) -> str:
    parts = []
    for suffix, predictor in _BASELINES.items():
        compared = [(key, name) for key, name in _FIGURES if f"{key}{suffix}" in one]
        better = [name for key, name in compared if _is_better(one, key, suffix)]
        others = [name for _, name in compared if name not in better]
        if not compared:
            continue
        if better and others:
            parts.append(f"better than {predictor} in {_and(better)}, not in {_and(others)}")
        else:
            parts.append(f"{'better' if better else 'not better'} than {predictor}")
    return f"Horizon {one['horizon']}: {'; '.join(parts)}."


def _is_better(one: Mapping[str, Any], key: str, suffix: str) -> bool:
    ours, baseline = one[key], one[f"{key}{suffix}"]
    return bool(ours < baseline if key in _LESS_IS_BETTER else ours > baseline)


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
