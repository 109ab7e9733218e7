"""Where the time of a run went: its ranks over real time, and how long their steps took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import LogLocator, NullFormatter

from tapeline.ledger import Histogram, bin_edges_ns
from tapeline.report.style import COLOURS, SERIES, picture, plain

# The variable of the page that each bucket is drawn in.
HUES = {
    "useful": "series-3",
    "starved": "series-4",
    "checkpoint": "series-1",
    "lost": "series-2",
    "startup": "muted",
    "evaluation": "series-5",
    "other": "rule",
}
_NS_PER_MS = 1e6
_UNITS = ((3 * 86_400, 86_400, "days"), (3 * 3600, 3600, "h"), (300, 60, "min"), (0, 1, "s"))
_DOTS = (0, (1, 1))
_HALF = 0.36  # of a row's height
_LEAST_WIDTH, _NAMED_WIDTH = 0.03, 0.09  # of the picture, for a number and for a name beside it


@dataclass(slots=True)
class Row:
    """One rank over time; all times in seconds since the run's first attempt began.

    Attributes:
        pieces: begin, end, and the share of each bucket in between, adding up to 1.
        unnoticed: begin and end of the times after its end until somebody noticed.
        down: begin and end of the times after that in which it didn't run.
        stalls: begin and end of the steps that took far longer than others.
    """

    name: str
    pieces: list[tuple[float, float, Mapping[str, float]]] = field(default_factory=list)
    unnoticed: list[tuple[float, float]] = field(default_factory=list)
    down: list[tuple[float, float]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Mark:
    """A begin or an end of an attempt: when, which, and whether it was a kill."""

    at_s: float
    attempt: int
    killed: bool = False


def timeline_figure(rows: Sequence[Row], begins: Sequence[Mark], ends: Sequence[Mark]) -> Figure:
    """The ranks of a run over real time.

    Within a piece the order of its buckets isn't known: they are drawn on top of each other, so
    that a piece's area is its time.

    Args:
        rows: the ranks, from above.
        begins, ends: of its attempts, both in the same order.
    """
    with picture(1.7 + 0.52 * len(rows)) as (figure, axes):
        last_s = max((piece[1] for row in rows for piece in row.pieces), default=0.0)
        last_s = max([last_s, *(mark.at_s for mark in ends)]) or 1.0
        _, scale, unit = next(one for one in _UNITS if last_s >= one[0])
        _pieces(axes, rows, scale)
        _between(axes, rows, scale)
        _attempts(axes, begins, ends, scale, last_s)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.95)
        axes.set_xlim(-0.005 * last_s / scale, 1.005 * last_s / scale)
        axes.set_xlabel(f"time since the first attempt began ({unit})")
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        _legend(axes, rows, any(mark.killed for mark in ends))
    return figure


def _pieces(axes: Axes, rows: Sequence[Row], scale: float) -> None:
    corners: dict[str, list[tuple[float, float]]] = {bucket: [] for bucket in HUES}
    for place, row in enumerate(rows):
        for begin_s, end_s, shares in row.pieces:
            left, right, bottom = begin_s / scale, end_s / scale, place + _HALF
            for bucket in HUES:
                if share := shares.get(bucket, 0.0):
                    top = bottom - 2 * _HALF * share
                    corners[bucket] += [
                        (left, bottom),
                        (right, bottom),
                        (right, top),
                        (left, top),
                        (left, bottom),
                    ]
                    bottom = top
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    for bucket, points in corners.items():
        if points:  # one path for all: a page of many pieces stays small, and has no seams
            path = Path(np.array(points), np.tile(codes, len(points) // 5))
            hue = COLOURS[HUES[bucket]]
            axes.add_patch(PathPatch(path, facecolor=hue, linewidth=0, antialiased=False))


def _between(axes: Axes, rows: Sequence[Row], scale: float) -> None:
    for place, row in enumerate(rows):
        lost = [*((span, "-") for span in row.unnoticed), *((span, _DOTS) for span in row.down)]
        for (begin_s, end_s), style in lost:
            axes.plot(
                [begin_s / scale, end_s / scale],
                [place, place],
                color=SERIES[1],
                linewidth=2.5,
                linestyle=style,
                solid_capstyle="butt",
            )
        axes.plot(
            [at_s / scale for at_s in row.saves],
            [place - _HALF - 0.05] * len(row.saves),
            linestyle="",
            marker=7,  # a triangle that points down, its tip at the place
            markersize=5,
            color=SERIES[0],
            markeredgewidth=0,
        )
        for begin_s, end_s in row.stalls:
            axes.plot(
                [begin_s / scale, end_s / scale],
                [place + _HALF + 0.06] * 2,
                color=COLOURS["ink"],
                linewidth=2.5,
                solid_capstyle="butt",
            )


def _attempts(
    axes: Axes, begins: Sequence[Mark], ends: Sequence[Mark], scale: float, last_s: float
) -> None:
    """The number of each attempt that is wide enough; a cross where one was killed."""
    for begin, end in zip(begins, ends, strict=True):
        width = (end.at_s - begin.at_s) / last_s
        if width > _LEAST_WIDTH:
            named = begin is begins[0] and width > _NAMED_WIDTH
            axes.annotate(
                f"attempt {begin.attempt}" if named else f"{begin.attempt}",
                (begin.at_s / scale, -0.75),
                (3, 0),
                textcoords="offset points",
                fontsize=9,
                va="center",
            )
    killed = [mark.at_s / scale for mark in ends if mark.killed]
    for at in killed:
        axes.axvline(at, color=COLOURS["ink"], linewidth=0.9, linestyle=(0, (2, 2)))
    axes.plot(killed, [-0.75] * len(killed), "x", color=COLOURS["ink"], markersize=6)


def _legend(axes: Axes, rows: Sequence[Row], killed: bool) -> None:
    used = {bucket for row in rows for *_, shares in row.pieces for bucket in shares}
    keys: list[Patch | Line2D] = [
        Patch(color=COLOURS[hue], label=bucket) for bucket, hue in HUES.items() if bucket in used
    ]

    def line(
        label: str, *, hue: str = COLOURS["ink"], marker: object = None, dots: bool = False
    ) -> None:
        style = _DOTS if dots else "-" if marker is None else ""
        keys.append(
            Line2D([], [], color=hue, linewidth=2.5, linestyle=style, marker=marker, label=label)  # type: ignore[arg-type]  # dashes are a style too
        )

    if any(row.unnoticed for row in rows):
        line("end unnoticed", hue=SERIES[1])
    if any(row.down for row in rows):
        line("nobody ran", hue=SERIES[1], dots=True)
    if any(row.saves for row in rows):
        line("checkpoint", hue=SERIES[0], marker=7)
    if any(row.stalls for row in rows):
        line("stalled")
    if killed:
        line("killed", marker="x")
    axes.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=6,
        borderaxespad=0.2,
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.3,
    )


def step_times_figure(ranks: Mapping[str, tuple[Histogram, Histogram]]) -> Figure:
    """How long the steps of each rank took, as distributions over a logarithmic axis.

    Args:
        ranks: by name the times of whole steps and of the rank's own work; from above.
    """
    with picture(1.6 + 0.75 * len(ranks)) as (figure, axes):
        for place, (times, own) in enumerate(ranks.values()):
            edges, heights = _density(times)
            axes.fill_between(
                edges,
                place,
                place - heights,
                step="post",
                color=SERIES[0],
                alpha=0.45,
                linewidth=0,
                label=None if place else "whole step",
            )
            edges, heights = _density(own)
            axes.plot(
                edges,
                place - heights,
                drawstyle="steps-post",
                color=SERIES[1],
                linewidth=1.3,
                label=None if place else "the rank's own work",
            )
            for share, style, label in ((0.5, "-", "median"), (0.99, ":", "99 %")):
                at = times.quantile_ns(share) / _NS_PER_MS
                axes.plot(
                    [at, at],
                    [place, place - 0.85],
                    color=COLOURS["ink"],
                    linestyle=style,
                    linewidth=1.4,
                    label=None if place else f"{label} of whole steps",
                )
        _time_axis(axes)
        axes.set_yticks(range(len(ranks)), list(ranks))
        axes.set_ylim(len(ranks) - 0.85, -0.95)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of a step (ms)")
    return figure


def _time_axis(axes: Axes) -> None:
    """Logarithmic, wide enough for two numbers on it at least."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 3 * low:
        low, high = low / 1.4, high * 1.4
        axes.set_xlim(low, high)
    subs = (1, 1.5, 2, 3, 4, 5, 7) if high < 20 * low else (1, 2, 5) if high < 500 * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _density(histogram: Histogram) -> tuple[list[float], np.ndarray]:
    """Where each bin begins (ms) and its height, the highest 0.85; and where the last one ends."""
    numbers = range(min(histogram.counts), max(histogram.counts) + 1)
    edges = [bin_edges_ns(number)[0] / _NS_PER_MS for number in numbers]
    counts = np.array([histogram.counts.get(number, 0) for number in numbers], dtype=float)
    last = bin_edges_ns(numbers[-1])[1] / _NS_PER_MS
    return [*edges, last], np.append(counts, 0) * 0.85 / counts.max()
