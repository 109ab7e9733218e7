"""The look that all figures share: colours, the style they are drawn under, legend and caption.

Covers: what is the same in every figure. Draws no data.

Figures are matplotlib `Figure` objects without pyplot, drawn under a style of our own, so neither
a `matplotlib` configuration nor another figure changes them. Equal input gives equal bytes. The
hues are those of Okabe and Ito (2008), which stay apart for colour-blind readers.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Each colour is a variable of the page, so that a figure inside one follows light and dark.
COLOURS = {
    "ink": "#1f2328",
    "muted": "#646b73",
    "rule": "#d9dce0",
    "series-1": "#0072b2",
    "series-2": "#d55e00",
    "series-3": "#009e73",
    "series-4": "#e69f00",
    "series-5": "#cc79a7",
}
SERIES = [hue for name, hue in COLOURS.items() if name.startswith("series")]
WIDTH_IN = 9.0
_LINE_CHARACTERS = 110  # of ordinary text that fit side by side
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["muted"],
    "axes.grid": True,
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "axes.xmargin": 0.01,
    "date.converter": "concise",
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",  # a page must not depend on the reader's fonts
    "svg.hashsalt": "tapeline",
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw under the style of the house; what was set before is put back."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def legend_above(axes: Axes, height: float = 1.0) -> None:
    """A legend over the axes, in as many columns as fit; none without labels.

    Args:
        height: where it begins, as a share of theirs.
    """
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        fitting = _LINE_CHARACTERS // (max(map(len, labels)) + 8)  # 8: the key and the gap
        ncols = max(1, min(4, fitting))
        axes.legend(loc="lower left", bbox_to_anchor=(0, height), ncols=ncols, borderaxespad=0.2)


@contextlib.contextmanager
def picture(
    height_in: float, note: str = "", *, legend_at: float = 1.0
) -> Iterator[tuple[Figure, Axes]]:
    """Axes to draw on under the style; then a legend over them and small text under them.

    Args:
        legend_at: where the legend begins, as a share of the axes' height.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, height_in))
        axes = figure.subplots()
        yield figure, axes
        legend_above(axes, legend_at)
        if note:
            caption(figure, note)


def plain(value: float, _place: float) -> str:
    """A tick's number without exponent or offset."""
    return f"{value:,.10g}"


def log_x(axes: Axes) -> None:
    """A logarithmic x axis under what was drawn; its numbers without exponents."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(NullFormatter())


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names beside rows, the first on top, without lines between them."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def caption(figure: Figure, text: str) -> None:
    """Small text under the figure, wrapped."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 130)]
    figure.supxlabel(
        "\n".join(lines), fontsize=8, color=COLOURS["muted"], x=0.01, ha="left", linespacing=1.5
    )
