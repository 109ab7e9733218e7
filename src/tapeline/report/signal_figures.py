"""What a run learnt and what was measured on the way, over its steps, with what happened marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from tapeline.report.curves import curve, loss_axis, marked, step_axis, thinned
from tapeline.report.style import COLOURS, SERIES, WIDTH_IN, picture, plain, styled
from tapeline.signals import Series

_COLUMNS = 2
_OVER_NUMBERS = 1.06  # of the height of the axes: where a legend is clear of numbers above them
_NEAR = 0.04  # of the width: marks that share a label
_MOST_LINES = 4  # more ranks are a band and its middle


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened at which steps of a run.

    Attributes:
        resumed: steps that later attempts began after.
        saved: steps of the checkpoints that are kept.
        found: step and number of each finding.
    """

    resumed: Sequence[int] = ()
    saved: Sequence[int] = ()
    found: Sequence[tuple[int, int]] = ()


def learning_figure(
    loss: Series, given_up: Series | None, validation: Series | None, happened: Happened
) -> Figure:
    """The loss over the steps, each once, and what was done again behind it.

    Args:
        given_up: the losses of steps that a later attempt did again; None: there are none.
        validation: the losses out of sample; None: there are none.
    """
    over = _OVER_NUMBERS if happened.found else 1.0
    with picture(4.4, legend_at=over) as (figure, axes):
        if given_up is not None:
            _given_up(axes, given_up)
        curve(axes, loss.values, SERIES[0], "training", steps=loss.steps)
        shown = [loss.values]
        if validation is not None:
            shown.append(validation.values)
            axes.plot(
                validation.steps,
                validation.values,
                "o-",
                color=SERIES[2],
                markersize=5,
                label="validation",
            )
        loss_axis(axes, shown, "loss")
        step_axis(axes, [loss.values])
        _happened(axes, happened)
    return figure


def _given_up(axes: Axes, given_up: Series) -> None:
    """A line for each attempt whose steps were done again."""
    for number, attempt in enumerate(np.unique(given_up.attempts)):
        of_one = given_up[given_up.attempts == attempt]
        points = thinned(of_one.steps, of_one.values)
        axes.plot(
            points.steps,
            points.mean,
            color=SERIES[1],
            linewidth=2.5,
            alpha=0.55,
            label=None if number else "done again later",
        )


def _happened(axes: Axes, happened: Happened) -> None:
    across = axes.get_xaxis_transform()
    marked(axes, [(step, "resumed") for step in happened.resumed])
    if happened.saved:
        axes.plot(
            happened.saved,
            [0] * len(happened.saved),
            linestyle="",
            marker=6,  # a triangle that points up, its tip at the place
            markersize=6,
            color=SERIES[0],
            transform=across,
            clip_on=False,
            label="checkpoint kept",
        )
    first, last = axes.get_xlim()
    labels: list[tuple[int, list[int]]] = []
    for place, (step, number) in enumerate(sorted(happened.found)):
        label = None if place else "finding"
        axes.axvline(step, color=SERIES[4], linewidth=1.2, alpha=0.7, label=label)
        if labels and step - labels[-1][0] < _NEAR * (last - first):
            labels[-1][1].append(number)
        else:
            labels.append((step, [number]))
    for step, numbers in labels:
        axes.annotate(
            ", ".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]} …",
            (step, 1.005),
            xycoords=across,
            ha="center",
            va="bottom",
            fontsize=9,
            fontweight="bold",
        )


def signals_figure(
    signals: Mapping[str, Sequence[tuple[str, Series]]], resumed: Sequence[int]
) -> Figure:
    """Small pictures of what was measured, one beside the other over the same steps.

    Args:
        signals: by title, with its unit, the series of each rank and its name.
        resumed: steps that later attempts began after.
    """
    with styled():
        num_rows = -(-len(signals) // _COLUMNS)
        figure = Figure(figsize=(WIDTH_IN, 0.5 + 1.9 * num_rows))
        grid = figure.subplots(num_rows, _COLUMNS, sharex=True, squeeze=False).flatten().tolist()
        for axes, (title, ranks) in zip(grid, signals.items(), strict=False):
            axes.set_title(title, loc="left", fontsize=10)
            if len(ranks) > _MOST_LINES:
                _band(axes, [series for _, series in ranks])
            else:
                for number, (_, series) in enumerate(ranks):
                    points = thinned(series.steps, series.values, most=400)
                    few = "." if len(points.steps) < 3 else None  # a line of one point is nothing
                    axes.plot(
                        points.steps, points.mean, color=SERIES[number], linewidth=1.3, marker=few
                    )
            for step in resumed:
                axes.axvline(step, color=COLOURS["ink"], linewidth=0.8, linestyle=(0, (2, 2)))
            _value_axis(axes, np.concatenate([series.values for _, series in ranks]))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(plain)
            axes.tick_params(labelbottom=True)
        for axes in grid[len(signals) :]:
            axes.set_visible(False)
        _legend(figure, signals)
        figure.supxlabel("step", fontsize=10)
    return figure


def _value_axis(axes: Axes, values: npt.NDArray[np.float64]) -> None:
    """From zero where that doesn't flatten the curve; logarithmic where one value would."""
    low, high = values.min(), values.max()
    if low > 0 and high > 20 * np.median(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if 0 <= low < 0.6 * high or low == high > 0:
            axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(plain)


def _band(axes: Axes, ranks: Sequence[Series]) -> None:
    """The least, middle and greatest over ranks at the steps that all have."""
    steps = reduce(np.intersect1d, (one.steps for one in ranks))
    if not len(steps):
        return
    table = np.stack([one.values[np.searchsorted(one.steps, steps)] for one in ranks])
    low, middle, high = (
        thinned(steps, values, most=400)
        for values in (table.min(axis=0), np.median(table, axis=0), table.max(axis=0))
    )
    axes.fill_between(low.steps, low.low, high.high, color=SERIES[0], alpha=0.25, linewidth=0)
    axes.plot(middle.steps, middle.mean, color=SERIES[0], linewidth=1.3)


def _legend(figure: Figure, signals: Mapping[str, Sequence[tuple[str, Series]]]) -> None:
    names = max((tuple(name for name, _ in ranks) for ranks in signals.values()), key=len)
    if len(names) == 1:
        return
    if len(names) > _MOST_LINES:
        told = f"line: the middle of {len(names)} ranks; band: the least and the greatest"
        figure.suptitle(told, x=0.01, ha="left", fontsize=9)
        return
    lines = [Line2D([], [], color=SERIES[number], label=name) for number, name in enumerate(names)]
    figure.legend(handles=lines, loc="outside upper left", ncols=len(names), frameon=False)


def losses_figure(
    runs: Mapping[str, Series], seed_band: npt.NDArray[np.float64] | None = None
) -> Figure:
    """The losses of several runs in one picture.

    Args:
        runs: by name; the first is the one that others are held against.
        seed_band: how far apart other seeds are at each step of the first; None: not known.
    """
    with picture(4.4) as (figure, axes):
        if seed_band is not None:
            name, first = next(iter(runs.items()))
            middle, band = (
                thinned(first.steps, values, most=60) for values in (first.values, seed_band)
            )
            axes.fill_between(
                middle.steps,
                middle.mean - band.mean,
                middle.mean + band.mean,
                color=COLOURS["muted"],
                alpha=0.25,
                linewidth=0,
                label=f"seed band of {name}",
            )
        for number, (name, loss) in enumerate(runs.items()):
            hue = SERIES[number % len(SERIES)]
            curve(axes, loss.values, hue, name, steps=loss.steps, dashed=number > 0)
        losses = [loss.values for loss in runs.values()]
        loss_axis(axes, losses)
        step_axis(axes, losses)
    return figure
