"""Curves over steps: noise and trend apart, axes, marks, and as many points as a picture shows.

Covers what figures of losses and of other signals share. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from tapeline.report.style import COLOURS, plain
from tapeline.report.tables import format_count

Floats = npt.NDArray[np.float64]
_MOST_POINTS = 1500  # about two a dot of the widest figure; a page of a long run stays small
_MOST_LABELS = 4
_STRONG = 20  # a strong curve is the mean over one part in so many


@dataclass(frozen=True, slots=True)
class Thinned:
    """A curve in at most so many points, each of a stretch of steps.

    Attributes:
        steps: the last of each stretch.
        low, mean, high: of the finite values in it; nan where there is none.
        width: steps in a stretch.
    """

    steps: npt.NDArray[np.int64]
    low: Floats
    mean: Floats
    high: Floats
    width: int


def thinned(steps: npt.NDArray[np.int64], values: Floats, most: int = _MOST_POINTS) -> Thinned:
    """Join neighbours until there are few enough points: nothing narrow disappears.

    Args:
        steps, values: `[n]`.
        most: points that are left.
    """
    width = max(1, -(-len(steps) // most))
    starts = np.arange(0, len(steps), width)
    if not len(starts):
        return Thinned(steps, values, values, values, 1)
    known = np.where(np.isfinite(values), values, np.nan)
    counts = np.add.reduceat(np.isfinite(known).astype(float), starts)
    total = np.add.reduceat(np.nan_to_num(known), starts)
    return Thinned(
        steps[np.minimum(starts + width, len(steps)) - 1],
        np.fmin.reduceat(known, starts),
        np.divide(total, counts, out=np.full(len(starts), np.nan), where=counts > 0),
        np.fmax.reduceat(known, starts),
        width,
    )


def curve(
    axes: Axes,
    losses: Floats,
    hue: str,
    name: str,
    *,
    steps: npt.NDArray[np.int64] | None = None,
    dashed: bool = False,
) -> None:
    """A noisy curve: its values faint, the mean of the steps just before strong.

    Args:
        losses: `[n]`.
        steps: `[n]`; without them the first is 1.
        dashed: so that one hidden under another is still seen.
    """
    points = thinned(np.arange(1, len(losses) + 1) if steps is None else steps, losses)
    if points.width > 1:
        axes.fill_between(points.steps, points.low, points.high, color=hue, alpha=0.25, linewidth=0)
    else:
        axes.plot(points.steps, points.mean, color=hue, linewidth=0.8, alpha=0.3)
    style = (0, (4, 2.5)) if dashed else "-"
    width = max(1, len(losses) // _STRONG // points.width)
    if len(points.mean):
        means = np.lib.stride_tricks.sliding_window_view(points.mean, width).mean(axis=1)
        axes.plot(points.steps[width - 1 :], means, color=hue, linestyle=style, label=name)


def loss_axis(
    axes: Axes,
    shown: Sequence[Sequence[float] | Floats],
    label: str = "mean squared error\n(target units²)",
) -> None:
    """The axis of losses, logarithmic where they span much."""
    values = np.concatenate([np.zeros(0), *(np.asarray(part, dtype=float) for part in shown)])
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes.set_yscale("log")
        few = finite.max() < 500 * finite.min()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(plain)
    axes.set_ylabel(label)


def step_axis(axes: Axes, curves: Iterable[Sequence[float] | Floats]) -> None:
    """The axis of steps; it says what the faint and the strong curves are."""
    lengths = [len(losses) for losses in curves]
    widths = {max(1, length // _STRONG) for length in lengths}
    means = ", ".join(format_count(width) for width in sorted(widths) if width > 1)
    faint = "the range" if max(lengths) > _MOST_POINTS else "each"
    axes.set_xlabel(f"step (faint: {faint}; strong: mean of the last {means})" if means else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(plain)


def marked(axes: Axes, marks: Sequence[tuple[int, str]]) -> None:
    """A line at each marked step; what happens at one step shares one line and label.

    More than a few are told in the legend instead: their labels would lie over each other.
    """
    at_step: dict[int, list[str]] = {}
    for step, what in marks:
        at_step.setdefault(step, []).append(what)
    first, last = axes.get_xlim()
    following = [*sorted(at_step)[1:], np.inf]
    labelled = len(at_step) <= _MOST_LABELS
    if at_step and labelled:
        axes.margins(y=0.14)  # room for the labels above the curves
    for number, (step, happened) in enumerate(sorted(at_step.items())):
        told = None if labelled or number else " or ".join(sorted({what for _, what in marks}))
        axes.axvline(step, color=COLOURS["ink"], linewidth=1, linestyle=(0, (2, 2)), label=told)
        if not labelled:
            continue
        place = (step - first) / (last - first)
        crowded = following[number] - step < 0.3 * (last - first)
        left = place > 0.7 or (place > 0.3 and crowded)
        axes.annotate(
            f"{', '.join(happened)} at {format_count(step)}",
            (step, 1),
            (-4 if left else 4, -4 - 13 * (number % 3)),  # neighbours don't share a line
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            va="top",
            ha="right" if left else "left",
            fontsize=9,
        )
