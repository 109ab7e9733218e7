"""Figures of plans: how flat or steep an optimum is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tapeline.report.style import SERIES, WIDTH_IN, caption, legend_above, plain, styled

Curve = tuple[Sequence[float], Sequence[float]]


def sweep_figure(
    curves: Mapping[str, Curve],
    marks: Mapping[str, tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    note: str,
) -> Figure:
    """Curves over a logarithmic axis, each with its chosen point.

    Args:
        curves: name to x and y values; y in percent.
        marks: name of a curve to the point that was chosen.
        x_label, y_label: with their units.
        note: the inputs and the model, in small text under the figure.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 4.4))
        axes = figure.subplots()
        for number, (name, (x, y)) in enumerate(curves.items()):
            hue = SERIES[number % len(SERIES)]
            axes.plot(x, y, color=hue, label=name)
            if name in marks:
                axes.plot(*marks[name], "o", color=hue, markersize=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(plain)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        legend_above(axes)
        caption(figure, note)
    return figure
