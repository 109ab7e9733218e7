"""Figures: the budget of a step, losses over steps, a session's mid price.

Covers: drawing what others measured, and writing it as SVG and PNG. Measures nothing.

The look is that of `style`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from tapeline.errors import TapeError
from tapeline.files import atomic_write
from tapeline.report.curves import curve, loss_axis, marked, step_axis
from tapeline.report.style import (
    COLOURS,
    SERIES,
    WIDTH_IN,
    legend_above,
    name_rows,
    picture,
    plain,
    styled,
)
from tapeline.report.tables import format_count, format_ms, format_percent
from tapeline.session import BoolArray, Int64Array

if TYPE_CHECKING:
    from tapeline.budget import Budget

_LOAD, _BATCH, _COMPUTE = COLOURS["series-2"], COLOURS["series-4"], COLOURS["series-1"]
_PNG_DPI = 160


def budget_figure(budget: Budget) -> Figure:
    """Where a step's time goes, in ms per step: a bar of load, batch and compute for each case."""
    rows = budget.rows
    size = (
        f"{format_count(budget.store_rows)} rows of {budget.columns} columns, batches of "
        f"{budget.batch} windows of {budget.T} rows, medians of {budget.repetitions} repetitions"
    )
    with picture(1.6 + 0.42 * len(rows), f"{size}\n{budget.machine}") as (figure, axes):
        places = np.arange(len(rows))
        left = np.zeros(len(rows))
        for name, hue, values in (
            ("load", _LOAD, [row.load_ms for row in rows]),
            ("batch", _BATCH, [row.batch_ms for row in rows]),
            ("compute", _COMPUTE, [row.compute_ms for row in rows]),
        ):
            axes.barh(places, values, 0.62, left=left, color=hue, label=name)
            left += values
        for place, total, row in zip(places, left, rows, strict=True):
            note = f"{format_ms(total)}, data {format_percent(row.data_share)}"
            axes.annotate(
                note, (total, place), (6, 0), textcoords="offset points", va="center", fontsize=9
            )
        name_rows(axes, [row.case for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.28 * max(left, default=1.0))  # room for the notes
        axes.set_xlabel("time per step (ms)")
    return figure


def precision_figure(float32: Sequence[float], bfloat16: Sequence[float]) -> Figure:
    """The same steps in two precisions: both losses, and bfloat16's minus float32's below.

    Args:
        float32, bfloat16: the loss of each step, equally many.
    """
    with styled():
        figure = Figure(figsize=(WIDTH_IN, 5.4))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
        for name, hue, losses in (
            ("float32", SERIES[0], np.asarray(float32)),
            ("bfloat16", SERIES[1], np.asarray(bfloat16)),
        ):
            curve(above, losses, hue, name, dashed=name == "bfloat16")
        loss_axis(above, [float32, bfloat16])
        below.axhline(0, color=COLOURS["muted"], linewidth=0.8)
        curve(below, np.subtract(bfloat16, float32), SERIES[2], "difference")
        below.set_ylabel("bfloat16 − float32\n(target units²)")
        step_axis(below, [float32])
        legend_above(above)
    return figure


def loss_figure(
    curves: Mapping[str, Sequence[float]],
    marks: Sequence[tuple[int, str]] = (),
    validation: Mapping[int, float] | None = None,
    predict_zero: float | None = None,
) -> Figure:
    """The loss over the steps of a run, or of runs that should be equal.

    Args:
        curves: name to the loss of each step, the first step being 1. Later curves are dashed, so
            that one hidden under another is still seen.
        marks: steps after which something happened, and what ("killed", "resumed").
        validation: step to the mean squared error out of sample.
        predict_zero: the out-of-sample error of predicting no change.
    """
    with picture(4.2) as (figure, axes):
        for number, (name, losses) in enumerate(curves.items()):
            hue = SERIES[number % len(SERIES)]
            curve(axes, np.asarray(losses), hue, name, dashed=number > 0)
        shown = [list(losses) for losses in curves.values()]
        if validation:
            steps = sorted(validation)
            errors = [validation[step] for step in steps]
            shown.append(errors)
            axes.plot(steps, errors, "o-", color=SERIES[2], markersize=6, label="validation")
        if predict_zero is not None:
            shown.append([predict_zero])
            axes.axhline(predict_zero, color=COLOURS["ink"], linestyle=":", label="predicting zero")
        loss_axis(axes, shown)
        step_axis(axes, curves.values())
        marked(axes, marks)
    return figure


def tape_figure(
    times_ns: Int64Array, mid: npt.NDArray[np.floating], valid: BoolArray, unit: str = "price units"
) -> Figure:
    """The mid price of a session over time; rows that no window may touch are marked.

    Args:
        times_ns: int64 `[rows]`, nanoseconds UTC.
        mid: `[rows]`, in `unit`, the origin added.
        valid: bool `[rows]`; False for a row that no window may touch.
        unit: what a price is in, such as "USD".

    Raises:
        TapeError: there are no rows.
    """
    if not len(times_ns):
        raise TapeError(
            "figure of a session",
            expected="at least one row",
            found="none",
            fix="Draw a session that has rows",
        )
    with picture(3.6) as (figure, axes):
        times = times_ns.astype("datetime64[ns]")
        axes.plot(times, mid, color=SERIES[0], linewidth=1.1, label="mid price")
        if not valid.all():
            axes.broken_barh(
                _runs(times, ~valid),  # type: ignore[arg-type]  # times are converted
                (0, 0.045),
                transform=axes.get_xaxis_transform(),
                color=SERIES[1],
                linewidth=0.8,  # one row of thousands is thinner than a dot
                label=f"rows that no window touches: {format_count(int((~valid).sum()))}",
            )
        start = str(times[0].astype("datetime64[s]")).replace("T", " ")
        axes.set_xlabel(f"time (UTC), from {start}")
        axes.xaxis.get_offset_text().set_visible(False)  # the label gives the date
        axes.set_ylabel(f"mid price ({unit})")
        axes.margins(y=0.1)  # keeps the price off the marks below it
        axes.yaxis.set_major_formatter(plain)
    return figure


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png, each whole or not at all, on white; returns both paths."""
    svg_path, png_path = (stem.with_name(stem.name + end) for end in (".svg", ".png"))
    atomic_write(svg_path, _render(figure, "svg"))
    atomic_write(png_path, _render(figure, "png"))
    return svg_path, png_path


def svg(figure: Figure, prefix: str) -> str:
    """The figure as an `<svg>` element for a page: no ground, colours from the page's variables.

    Args:
        prefix: goes before every id, which must be unique on the page.
    """
    text = _render(figure, "svg", transparent=True).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for name, hue in COLOURS.items():
        text = text.replace(hue, f"var(--{name}, {hue})")
    return text


def _render(figure: Figure, kind: str, *, transparent: bool = False) -> bytes:
    unsaid = ("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",)
    out = io.BytesIO()
    with styled():
        figure.savefig(
            out,
            format=kind,
            dpi=_PNG_DPI,
            transparent=transparent,
            metadata=dict.fromkeys(unsaid),
        )
    return out.getvalue()


def _runs(
    times: npt.NDArray[np.datetime64], chosen: BoolArray
) -> list[tuple[np.datetime64, np.timedelta64]]:
    """Start and width of each run of chosen rows; a row lasts until the next one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    ends = np.append(times[1:], times[-1])
    return [(times[start], ends[stop - 1] - times[start]) for start, stop in edges.reshape(-1, 2)]
