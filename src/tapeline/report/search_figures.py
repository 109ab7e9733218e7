"""Figures of searches: what was found when, how trials fared on rungs, and which settings do best.

A trial's figure is the one at the furthest rung that it came to; those that diverged are counted,
not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tapeline.report.style import COLOURS, SERIES, picture, plain

Curves = Mapping[int, Mapping[int, float]]
_MAP = "viridis_r"


def history_figure(
    curves: Curves, rungs: Sequence[int], metric: str, direction: str, note: str
) -> Figure:
    """A dot for each trial at the furthest rung it came to, and the best full run so far.

    Args:
        curves: by trial, its metric by step.
        rungs: their steps; the last one is of full runs.
        direction: "minimize" or "maximize".
        note: in small text under the figure.
    """
    with picture(4.0, _with_diverged(note, curves)) as (figure, axes):
        for number, step in enumerate(rungs):
            dots = {t: c[step] for t, c in curves.items() if max(c) == step and _is_finite(c)}
            hue = SERIES[number % len(SERIES)]
            label = "full run" if step == rungs[-1] else f"left at step {step:,}"
            axes.plot(list(dots), list(dots.values()), "o", color=hue, markersize=4, label=label)
        better = max if direction == "maximize" else min
        full = {t: c[rungs[-1]] for t, c in sorted(curves.items()) if rungs[-1] in c}
        full = {trial: value for trial, value in full.items() if math.isfinite(value)}
        if full:
            so_far = [better(list(full.values())[: n + 1]) for n in range(len(full))]
            trials = [*full, max(curves)]
            axes.step(
                trials,
                [*so_far, so_far[-1]],
                where="post",
                color=COLOURS["ink"],
                linewidth=1,
                label="best full run",
            )
        axes.set_xlabel("trial")
        axes.set_ylabel(metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(plain)
    return figure


def rungs_figure(curves: Curves, metric: str, best: int | None, note: str) -> Figure:
    """A line for each trial over the rungs it came to; the best one strong.

    Args:
        curves: by trial, its metric by step.
        best: the trial that was picked; None for none.
        note: in small text under the figure.
    """
    with picture(4.0, _with_diverged(note, curves)) as (figure, axes):
        for trial, curve in curves.items():
            steps = sorted(step for step, value in curve.items() if math.isfinite(value))
            chosen = trial == best
            axes.plot(
                steps,
                [curve[step] for step in steps],
                "o-",
                color=SERIES[1] if chosen else SERIES[0],
                alpha=1.0 if chosen else 0.35,
                linewidth=1.8 if chosen else 0.9,
                markersize=4 if chosen else 3,
                zorder=3 if chosen else 2,
                label=f"trial {trial}, picked" if chosen else None,
            )
        axes.set_xscale("log")
        ticks = sorted({step for curve in curves.values() for step in curve})
        axes.set_xticks(ticks)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(plain)
        axes.yaxis.set_major_formatter(plain)
        axes.set_xlabel("step of the rung")
        axes.set_ylabel(metric)
    return figure


def parallel_figure(ranked: Sequence[Mapping[str, float | str]], note: str) -> Figure:
    """Parallel coordinates: an axis for each setting, a line for each trial, coloured by its rank.

    Args:
        ranked: the settings of each trial, the best first.
        note: in small text under the figure.
    """
    keys = sorted({key for one in ranked for key in one})
    with picture(4.4, note) as (figure, axes):
        axes.grid(visible=False)
        scales = [_Scale([one[key] for one in ranked]) for key in keys]
        shades = ScalarMappable(Normalize(1, max(2, len(ranked))), _MAP)
        hues = shades.to_rgba(np.arange(1, len(ranked) + 1))
        for number, values in reversed(list(enumerate(ranked))):  # the best last, on top
            axes.plot(
                range(len(keys)),
                [scale.height(values[key]) for key, scale in zip(keys, scales, strict=True)],
                "o-",
                color=hues[number],
                linewidth=0.9 if number else 1.8,
                markersize=3,
            )
        for place, scale in enumerate(scales):
            axes.axvline(place, color=COLOURS["rule"], linewidth=1, zorder=0)
            for height, text in scale.ticks():
                axes.annotate(text, (place, height), (5, 0), textcoords="offset points", fontsize=8)
        axes.set_xticks(range(len(keys)), keys)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlim(-0.1, len(keys) - 0.7)
        bar = figure.colorbar(shades, ax=axes, label="rank: the furthest, then the best")
        bar.ax.invert_yaxis()
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


class _Scale:
    """One axis: numbers from 0 to 1, by logarithm where they span decades; or a place for each."""

    def __init__(self, values: Sequence[float | str]) -> None:
        self._places: dict[float | str, float] = {}
        kinds = sorted(set(values), key=str)
        numbers = all(type(one) in (int, float) for one in kinds)
        if not numbers or len(kinds) == 1:
            share = max(1, len(kinds) - 1)
            self._places = {one: place / share for place, one in enumerate(kinds)}
            return
        found = [float(one) for one in kinds]
        self._log = min(found) > 0 and max(found) / min(found) > 30
        self._low, self._high = self._of(min(found)), self._of(max(found))

    def height(self, value: float | str) -> float:
        """Where a value stands."""
        if self._places:
            return self._places[value]
        return (self._of(float(value)) - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        """(height, text): every choice, or five numbers."""
        if self._places:
            return [(height, str(value)) for value, height in self._places.items()]
        found = []
        for part in range(5):
            value = self._low + part / 4 * (self._high - self._low)
            found.append((part / 4, f"{math.exp(value) if self._log else value:.3g}"))
        return found

    def _of(self, value: float) -> float:
        return math.log(value) if self._log else value


def _is_finite(curve: Mapping[int, float]) -> bool:
    return math.isfinite(curve[max(curve)])


def _with_diverged(note: str, curves: Curves) -> str:
    number = sum(not _is_finite(curve) for curve in curves.values())
    return f"{note}; {number} diverged or failed" if number else note
