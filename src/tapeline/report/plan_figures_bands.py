"""Figures of plans with a band: what is expected, how surely, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from tapeline.report.style import (
    COLOURS,
    SERIES,
    WIDTH_IN,
    caption,
    legend_above,
    log_x,
    plain,
    styled,
)


@dataclass(frozen=True, slots=True)
class Band:
    """A curve with a band about it, over the same places."""

    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band_figure(
    band: Band,
    points: Sequence[tuple[float, float]],
    *,
    names: tuple[str, str, str],
    labels: tuple[str, str],
    logarithmic: bool,
    note: str,
) -> Figure:
    """A curve, its band and points.

    Args:
        band: the curve; nothing is drawn above `high` or below `low` where these are equal.
        points: what was measured.
        names: of curve, band and points.
        labels: of the two axes, with units.
        logarithmic: whether the first is.
        note: the inputs and the model, in small text under the figure.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 4.4))
        axes = figure.subplots()
        axes.plot(band.x, band.middle, color=SERIES[0], label=names[0])
        axes.fill_between(
            band.x, band.low, band.high, color=SERIES[0], alpha=0.2, linewidth=0, label=names[1]
        )
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            "o",
            color=COLOURS["ink"],
            markersize=4,
            label=names[2],
        )
        axes.xaxis.set_major_formatter(plain)
        if logarithmic:
            log_x(axes)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        legend_above(axes)
        caption(figure, note)
    return figure
