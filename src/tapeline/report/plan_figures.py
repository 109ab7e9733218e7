"""Figures of plans: how steep an optimum is, where time goes, what is expected and how surely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from tapeline.plan.advice import Lever
from tapeline.report.style import (
    COLOURS,
    SERIES,
    WIDTH_IN,
    caption,
    log_x,
    name_rows,
    picture,
    plain,
    styled,
)

Curve = tuple[Sequence[float], Sequence[float]]
Estimates = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Band:
    """A curve with a band about it, over the same places."""

    x: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


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
        note: the inputs and the model, in small text below.
    """
    with picture(4.4, note) as (figure, axes):
        for number, (name, (x, y)) in enumerate(curves.items()):
            hue = SERIES[number % len(SERIES)]
            axes.plot(x, y, color=hue, label=name)
            if name in marks:
                axes.plot(*marks[name], "o", color=hue, markersize=6)
        log_x(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure


def share_figure(cases: Mapping[str, Mapping[str, float]], note: str) -> Figure:
    """Where time goes: a bar of shares for each case, from its names of buckets.

    Args:
        cases: name to shares by bucket; the same buckets in each.
        note: the inputs and the model, in small text below.
    """
    with picture(1.8 + 0.5 * len(cases), note) as (figure, axes):
        places = range(len(cases))
        left = [0.0] * len(cases)
        buckets = list(dict.fromkeys(bucket for shares in cases.values() for bucket in shares))
        hues = [SERIES[0], SERIES[3], SERIES[2], SERIES[1], *(COLOURS["muted"], COLOURS["rule"])]
        for number, bucket in enumerate(buckets):
            widths = [100 * shares.get(bucket, 0.0) for shares in cases.values()]
            hue = hues[number % len(hues)]
            axes.barh(places, widths, 0.62, left=left, color=hue, label=bucket)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        name_rows(axes, list(cases))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("share of wall time (%)")
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
            name_rows(axes, [one.name for one in levers])
            axes.set_title(case, loc="left", fontsize=10)
            axes.margins(x=0.12)
        rows[-1, 0].set_xlabel("times as fast, at most; 1 is the step as it is")
        caption(figure, "One lever at a time, the rest of the step as it is. Model: Amdahl 1967.")
    return figure


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
        note: the inputs and the model, in small text below.
    """
    with picture(4.4, note) as (figure, axes):
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
    return figure


def estimate_figure(groups: Mapping[str, Estimates], *, x_label: str, note: str) -> Figure:
    """A row for each name, a point with two standard errors for each group that has it.

    Args:
        groups: group to name to (mean, standard error).
        x_label: with its unit.
        note: the inputs and the model, in small text below.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    with picture(1.6 + 0.45 * len(names), note) as (figure, axes):
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
        name_rows(axes, names)
        axes.set_xlim(left=0)
        axes.set_xlabel(x_label)
    return figure
