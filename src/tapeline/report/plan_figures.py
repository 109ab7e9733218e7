"""Figures of plans: how flat or steep an optimum is, and where time goes before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tapeline.plan.advice import Lever
from tapeline.report.style import COLOURS, SERIES, WIDTH_IN, caption, legend_above, log_x, styled

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
        log_x(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        legend_above(axes)
        caption(figure, note)
    return figure


def share_figure(cases: Mapping[str, Mapping[str, float]], note: str) -> Figure:
    """Where time goes: a bar of shares for each case, from its names of buckets.

    Args:
        cases: name to shares by bucket; the same buckets in each.
        note: the inputs and the model, in small text under the figure.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 1.8 + 0.5 * len(cases)))
        axes = figure.subplots()
        places = range(len(cases))
        left = [0.0] * len(cases)
        buckets = list(dict.fromkeys(bucket for shares in cases.values() for bucket in shares))
        hues = [SERIES[0], SERIES[3], SERIES[2], SERIES[1], *(COLOURS["muted"], COLOURS["rule"])]
        for number, bucket in enumerate(buckets):
            widths = [100 * shares.get(bucket, 0.0) for shares in cases.values()]
            hue = hues[number % len(hues)]
            axes.barh(places, widths, 0.62, left=left, color=hue, label=bucket)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(places, list(cases))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("share of wall time (%)")
        legend_above(axes)
        caption(figure, note)
    return figure


def lever_figure(cases: Mapping[str, Sequence[Lever]]) -> Figure:
    """What each lever would give at most: a bar for each whose effect is known, by case.

    Args:
        cases: where one starts from, to its levers, the most first.
    """
    known = {case: [one for one in levers if one.speedup] for case, levers in cases.items()}
    with styled():
        heights = [len(levers) + 1 for levers in known.values()]
        figure = Figure(figsize=(WIDTH_IN, 1.0 + 0.36 * sum(heights)))
        rows = figure.subplots(len(known), 1, sharex=True, squeeze=False, height_ratios=heights)
        for (case, levers), axes in zip(known.items(), rows[:, 0], strict=True):
            places = range(len(levers))
            values = [one.speedup or 0.0 for one in levers]
            axes.barh(places, values, 0.62, color=SERIES[0])
            axes.axvline(1, color=COLOURS["ink"], linewidth=1)
            for place, value in zip(places, values, strict=True):
                axes.annotate(
                    f"{value:.2f} ×",
                    (value, place),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                )
            axes.set_yticks(places, [one.name for one in levers])
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_title(case, loc="left", fontsize=10)
            axes.margins(x=0.12)
        rows[-1, 0].set_xlabel("times as fast, at most; 1 is the step as it is")
        caption(figure, "One lever at a time, the rest of the step as it is. Model: Amdahl 1967.")
    return figure
