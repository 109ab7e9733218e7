"""Figures: equal bytes, sound SVG, and what each must show."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tapeline.budget import Budget, BudgetRow
from tapeline.errors import TapeError
from tapeline.ledger import Histogram
from tapeline.machine import Machine
from tapeline.report.curves import thinned
from tapeline.report.figures import (
    budget_figure,
    loss_figure,
    precision_figure,
    save_figure,
    svg,
    tape_figure,
)
from tapeline.report.signal_figures import (
    Happened,
    learning_figure,
    losses_figure,
    signals_figure,
)
from tapeline.report.time_figures import Mark, Row, step_times_figure, timeline_figure
from tapeline.signals import Series

MACHINE = Machine("Processor X", 2, 8.0, "cpu", "3.11.0", {"torch": "2.10.0"}, 0.5)
BUDGET = Budget(
    rows=(
        BudgetRow("csv looped", 0.5, 0.5, 1.0, 1.2, 20.0),
        BudgetRow("mmap gathered", 0.01, 0.04, 1.0, 1.2, 0.4),
    ),
    store_rows=9_120,
    columns=41,
    batch=256,
    T=20,
    steps_per_epoch=35,
    repetitions=50,
    machine=MACHINE,
)
LOSSES = (0.05 + np.exp(-np.arange(120) / 10) + 0.01 * np.sin(np.arange(120))).tolist()
TIMES_NS = 1_777_600_000_000_000_000 + np.arange(600) * 500_000_000
MID = 78_400 + np.cumsum(np.sin(np.arange(600)))
VALID = ~np.isin(np.arange(600), [5, 6, 7, 300, 599])


def _tape() -> Figure:
    return tape_figure(TIMES_NS, MID, VALID, "USD")


def _series(values, attempt=1):
    steps = np.arange(1, len(values) + 1)
    return Series(steps, np.asarray(values, float), np.full(len(steps), attempt))


def _learning() -> Figure:
    happened = Happened((20, 60), (100,), ((30, 1), (30, 2), (90, 3)))
    return learning_figure(_series(LOSSES), _series(LOSSES)[20:40], None, happened)


def _timeline() -> Figure:
    pieces = [(0.0, 4.0, {"startup": 1.0}), (4.0, 10.0, {"useful": 0.7, "lost": 0.3})]
    row = Row("rank 0", pieces, [(10.0, 11.0)], [(11.0, 12.0)], [6.0], [(7.0, 9.0)])
    return timeline_figure([row, row], [Mark(0.0, 1)], [Mark(10.0, 1, killed=True)])


def _step_times() -> Figure:
    times = Histogram.of([10**7 + k * 10**5 for k in range(50)])
    return step_times_figure({"rank 0": (times, times)})


MAKERS = {
    "learning": _learning,
    "timeline": _timeline,
    "step times": _step_times,
    "signals": lambda: signals_figure({"$a$": [("rank 0", _series(LOSSES))] * 5}, [50]),
    "losses": lambda: losses_figure({"a": _series(LOSSES), "b": _series(LOSSES)}, np.ones(120)),
    "budget": lambda: budget_figure(BUDGET),
    "precision": lambda: precision_figure(LOSSES, [loss * 1.01 for loss in LOSSES]),
    "loss": lambda: loss_figure({"a": LOSSES}, [(50, "killed")], {60: 0.2, 120: 0.1}, 0.3),
    "tape": _tape,
}


def _texts(figure: Figure) -> str:
    found = figure.findobj(matplotlib.text.Text)
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in found + figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("name", MAKERS)
def test_equal_input_gives_equal_bytes_whatever_the_users_style(name, tmp_path):
    first = save_figure(MAKERS[name](), tmp_path / "first")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "x"}):
        second = save_figure(MAKERS[name](), tmp_path / "second")
    assert first == (tmp_path / "first.svg", tmp_path / "first.png")
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert first[1].read_bytes().startswith(b"\x89PNG\r\n")
    ET.fromstring(first[0].read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{stem}{end}" for stem in ("first", "second") for end in (".png", ".svg")
    ]


def test_a_stem_with_dots_keeps_them(tmp_path):
    paths = save_figure(_tape(), tmp_path / "btc.2026-05")
    assert [path.name for path in paths] == ["btc.2026-05.svg", "btc.2026-05.png"]


@pytest.mark.parametrize("name", MAKERS)
def test_an_embedded_figure_is_sound_and_follows_the_page(name):
    text = svg(MAKERS[name](), "figure-3")
    root = ET.fromstring(text)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(element.startswith("figure-3-") for element in ids)
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert references
    assert set(references) <= set(ids)
    assert set(re.findall(r'\bhref="(.)', text)) <= {"#"}
    outside = re.sub(r"var\(--[a-z0-9-]+, #[0-9a-f]{6}\)", "", text)
    assert not re.findall(r"#[0-9a-f]{6}\b", outside), "a colour that ignores the page's scheme"
    assert "<!--" not in text


def test_figures_leave_no_global_state():
    before = dict(matplotlib.rcParams)
    svg(_tape(), "a")
    assert dict(matplotlib.rcParams) == before


def test_a_figure_is_drawn_without_pyplot():
    program = """
import sys
from tapeline.report.figures import loss_figure, svg
svg(loss_figure({"a": [2.0, 1.0]}), "a")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_the_budget_shows_shares_units_and_the_machine():
    text = _texts(budget_figure(BUDGET))
    for expected in (
        "csv looped",
        "2.00 ms, data 50 %",
        "1.05 ms, data 4.8 %",
        "time per step (ms)",
        "9,120 rows of 41 columns",
        "medians of 50 repetitions",
        "Processor X, 2 cores",
    ):
        assert expected in text


def test_a_long_machine_name_is_wrapped_not_cut():
    machine = Machine("Processor " + "long " * 50, 2, 8.0, "cpu", "3.11.0", {}, 0.5)
    figure = budget_figure(replace(BUDGET, machine=machine))
    figure.draw_without_rendering()
    assert max(map(len, figure.get_supxlabel().splitlines())) <= 130


def test_marks_at_one_step_share_a_label_and_a_dollar_is_a_dollar():
    marks = [(80, "checkpoint"), (80, "resumed"), (100, "killed")]
    text = _texts(loss_figure({"$x$ and $y": LOSSES}, marks, {60: 0.2}, 0.3))
    for expected in (
        "checkpoint, resumed at 80",
        "killed at 100",
        "$x$ and $y",
        "validation",
        "predicting zero",
        "mean of the last 6",
        "target units²",
    ):
        assert expected in text


def test_a_loss_that_is_zero_infinite_or_missing_is_drawn():
    for losses in ([], [0.0, 1.0], [1.0, float("nan"), float("inf"), 2.0], [float("nan")] * 3):
        ET.fromstring(svg(loss_figure({"run": losses}), "a"))


def test_one_not_a_number_spoils_only_the_means_that_hold_it():
    losses = [*LOSSES[:40], float("nan"), *LOSSES[41:]]
    axes = loss_figure({"run": losses}).axes[0]
    means = axes.lines[1].get_ydata()
    assert np.isnan(means).sum() == 6
    assert np.isfinite(means[-1])


def test_the_difference_is_bfloat16_minus_float32():
    figure = precision_figure([1.0, 2.0], [1.5, 1.0])
    assert figure.axes[1].lines[1].get_ydata().tolist() == [0.5, -1.0]


def test_the_tape_marks_each_run_of_rows_that_no_window_touches():
    figure = _tape()
    bars = figure.axes[0].collections[0]
    days = (TIMES_NS - TIMES_NS[0]) / 86_400e9
    shown = [path.get_extents().intervalx for path in bars.get_paths()]
    starts = np.array([interval[0] for interval in shown])
    assert starts - starts[0] == pytest.approx(days[[5, 300, 599]] - days[5], abs=1e-9)
    assert shown[0][1] - shown[0][0] == pytest.approx(3 * 0.5 / 86_400, rel=1e-3)
    text = _texts(figure)
    assert "rows that no window touches: 5" in text
    assert "mid price (USD)" in text
    assert "time (UTC), from 2026-05-01 01:46:40" in text
    assert not tape_figure(TIMES_NS, MID, np.ones(600, bool)).axes[0].collections


def test_a_session_without_rows_is_refused():
    with pytest.raises(TapeError) as caught:
        tape_figure(TIMES_NS[:0], MID[:0], VALID[:0])
    assert str(caught.value) == (
        "figure of a session: expected at least one row, found none. Draw a session that has rows."
    )


def test_a_long_curve_is_thinned_and_nothing_narrow_disappears():
    values = np.ones(100_000)
    values[77_777], values[5], values[50_000:50_200] = 9.0, np.nan, np.nan
    points = thinned(np.arange(1, 100_001), values, most=1000)
    assert len(points.steps) == 1000
    assert points.steps[-1] == 100_000
    assert np.nanmax(points.high) == 9.0
    assert np.isnan(points.mean).sum() == 2
    assert np.nanmin(points.low) == np.nanmin(points.mean) == 1.0


def test_many_resumes_are_told_in_the_legend_and_findings_of_a_step_together():
    figure = learning_figure(
        _series(LOSSES), None, None, Happened(range(10, 90, 10), (), ((5, 1), (5, 2)))
    )
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["training", "resumed", "finding"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1, 2"]


def test_a_timeline_draws_each_piece_as_its_shares_of_time():
    axes = _timeline().axes[0]
    heights = {}
    for patch in axes.patches:
        box = patch.get_path().get_extents()
        heights[patch.get_facecolor()] = (box.x0, box.x1)
    assert sorted(heights.values()) == [(0.0, 4.0), (4.0, 10.0), (4.0, 10.0)]
    assert "killed" in [text.get_text() for text in axes.get_legend().get_texts()]
