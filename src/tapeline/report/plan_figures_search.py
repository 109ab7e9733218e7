"""Figures of search plans: estimates with their error, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from tapeline.report.style import SERIES, WIDTH_IN, caption, legend_above, styled

Estimates = Mapping[str, tuple[float, float]]


def estimate_figure(groups: Mapping[str, Estimates], *, x_label: str, note: str) -> Figure:
    """A row for each name, a point with two standard errors for each group that has it.

    Args:
        groups: group to name to (mean, standard error).
        x_label: with its unit.
        note: the inputs and the model, in small text under the figure.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 1.6 + 0.45 * len(names)))
        axes = figure.subplots()
        for number, (group, found) in enumerate(groups.items()):
            shift = 0.16 * (number - (len(groups) - 1) / 2)
            axes.errorbar(
                [mean for mean, _ in found.values()],
                [names.index(name) + shift for name in found],
                xerr=[2 * error for _, error in found.values()],
                fmt="o",
                markersize=5,
                color=SERIES[number % len(SERIES)],
                label=group,
            )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        axes.set_xlabel(x_label)
        legend_above(axes)
        caption(figure, note)
    return figure
