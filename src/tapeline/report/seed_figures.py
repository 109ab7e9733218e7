"""Figures of runs that were trained with several seeds: what a seed does, and what else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tapeline.report.style import COLOURS, SERIES, picture, plain


def seed_band_figure(
    steps: Sequence[int],
    curves: Mapping[str, Sequence[Sequence[float]]],
    band: Sequence[tuple[float, float]],
    note: str,
) -> Figure:
    """Validation errors over steps: each seed faint, the mean strong, the seed band behind.

    Args:
        curves: by name one curve a seed; the first one is the band's.
        band: lower and upper end at each step.
        note: in small text under the figure.
    """
    with picture(4.2, note) as (figure, axes):
        low, high = np.array(band).T
        first = next(iter(curves))
        axes.fill_between(
            steps,
            low,
            high,
            color=SERIES[0],
            alpha=0.13,
            linewidth=0,
            label=f"seed band of {first}",
        )
        for number, (name, seeds) in enumerate(curves.items()):
            hue = SERIES[number % len(SERIES)]
            for curve in seeds:
                axes.plot(steps, curve, color=hue, linewidth=0.8, alpha=0.4)
            mean = np.mean(np.array(seeds), axis=0)
            dashed = (0, (4, 2.5)) if number else "-"
            axes.plot(steps, mean, color=hue, linestyle=dashed, label=f"{name}, mean of seeds")
        axes.set_xlabel("step")
        axes.set_ylabel("validation loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(plain)
    return figure


def batch_figure(
    base: tuple[int, Sequence[float]],
    efforts: Mapping[str, Mapping[int, Sequence[float]]],
    note: str,
) -> Figure:
    """Validation errors over the batch: each seed a dot, a line through the means.

    Args:
        base: the batch that others are held against, and the error of each of its seeds.
        efforts: by name the errors of larger batches, a list for each.
        note: in small text under the figure.
    """
    with picture(4.2, note) as (figure, axes):
        axes.axhline(
            float(np.mean(base[1])),
            color=COLOURS["muted"],
            linewidth=1,
            linestyle=":",
            label=f"mean of batch {base[0]:,}",
        )
        axes.plot([base[0]] * len(base[1]), base[1], "o", color=COLOURS["ink"], markersize=4)
        for number, (name, larger) in enumerate(efforts.items()):
            hue = SERIES[number % len(SERIES)]
            errors = {base[0]: base[1], **larger}
            means = [float(np.mean(values)) for values in errors.values()]
            axes.plot(list(errors), means, color=hue, label=name)
            for batch, values in larger.items():
                axes.plot([batch] * len(values), values, "o", color=hue, markersize=4, alpha=0.7)
        axes.set_xscale("log", base=2)
        axes.set_xticks([base[0], *next(iter(efforts.values()))])
        axes.xaxis.set_major_formatter(plain)
        axes.set_xlabel("batch")
        axes.set_ylabel("lowest validation loss")
        axes.yaxis.set_major_formatter(plain)
    return figure
