"""The page of the demo: its figures, drawn and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tapeline.budget import Budget
from tapeline.clock import SystemClock
from tapeline.report import Table, format_count, format_percent
from tapeline.report.figures import budget_figure, loss_figure, tape_figure
from tapeline.report.page import Page, Section
from tapeline.runs import RunFolder
from tapeline.store import Shards
from tapeline.words import percent


def demo_page(out: Path, figures: dict[str, Any], table: Table, budget: Budget) -> Page:
    """The page for what `run_demo` left in `out`."""
    tape = figures["tape"]
    run = RunFolder(out / "runs" / "killed", SystemClock())
    return Page(
        title=f"tapeline demo: {tape['instrument']}",
        summary=_summary(figures),
        headline=[
            ("same bits", "yes" if figures["bitwise_equal"] else "NO", "sha256 of all state"),
            ("windows", format_count(tape["windows"]), "none crosses a session"),
            (
                "data's share of a step",
                format_percent(budget.row("mmap gathered").data_share),
                "gathered, before prefetch",
            ),
            (
                "skill",
                percent(figures["validation"]["skill"], "+.1f"),
                "error removed, out of sample",
            ),
        ],
        sections=[
            _tape_section(Shards(out / "store"), tape),
            Section(
                "Where a step's time goes",
                "Reading the store, making a batch and computing a step, measured for each kind "
                "of store. Reading is spread over the steps of an epoch.",
                figure=budget_figure(budget),
                alt="Stacked bars of load, batch and compute time per step for each case.",
            ),
            _loss_section(run, RunFolder(out / "runs" / "uninterrupted", SystemClock()), figures),
            Section("The figures", "", table=table),
            Section("The run", "What was recorded before its first step.", table=_record(run)),
        ],
    )


def _summary(figures: dict[str, Any]) -> str:
    tape = figures["tape"]
    end = (
        "the same bits as a run that was never killed."
        if figures["bitwise_equal"]
        else "OTHER bits than a run that was never killed: that is a fault of tapeline."
    )
    return (
        f"A model was trained on {format_count(tape['rows'])} rows of {tape['instrument']}, "
        f"killed with SIGKILL after step {figures['killed']['after_step']}, and resumed from step "
        f"{figures['resumed_from_step']}. It ended in {end}"
    )


def _tape_section(shards: Shards, tape: dict[str, Any]) -> Section:
    session = shards.session(0)
    assert session.times is not None, "every tape has times"
    assert session.valid is not None, "and says which rows are valid"
    return Section(
        "The tape",
        _tape_text(tape),
        figure=tape_figure(session.times, session.origin + session.values[:, 0], session.valid),
        alt=f"Mid price of {session.key} over time, between {tape['mid_lowest']:,} and "
        f"{tape['mid_highest']:,}.",
    )


def _loss_section(run: RunFolder, whole: RunFolder, figures: dict[str, Any]) -> Section:
    return Section(
        "Loss",
        "The run that was killed and resumed, and the one that was not: the curves coincide. "
        "Validation is on the last fifth of the tape, which no training window touches; a "
        "positive skill means fewer squared errors than predicting no change.",
        figure=loss_figure(
            {
                "killed and resumed": list(run.losses().values()),
                "uninterrupted": list(whole.losses().values()),
            },
            marks=[
                (figures["killed"]["after_step"], "killed"),
                (figures["resumed_from_step"], "resumed"),
            ],
            validation={step: found["loss"] for step, found in run.validations().items()},
            predict_zero=figures["validation"]["mse_zero"],
        ),
        alt="Training loss by step with the kill and the resume marked.",
    )


def _tape_text(tape: dict[str, Any]) -> str:
    report = tape["report"]
    if report is None:
        return "A seeded synthetic market, since no data package is installed."
    return (
        f"`{Path(tape['source']).name}`: {report['lines_read']:,} lines, put on a grid of "
        f"{report['rows']:,} rows. Rows that fell on a moment when the book was crossed and show "
        f"the state before: {report['rows_held']:,}. Rows marked, which no window touches: "
        f"{report['rows_marked']:,}. Stale orders evicted: {len(report['evicted'])}."
    )


def _record(run: RunFolder) -> Table:
    record = run.record()
    code, machine = record["code"], record["machine"]
    lives = "; ".join(
        f"{life['attempt']}: from step {life['from_step']}, {life['how']}"
        for life in run.attempts()
    )
    return Table(
        columns=["what", "recorded"],
        rows=[
            ["attempts", lives],
            ["data", record["data"]["fingerprint"]],
            ["configuration", record["config_hash"]],
            ["code", f"{code['commit'] or 'no commit'} ({code['state']})"],
            ["torch", machine["versions"].get("torch", "unknown")],
            ["machine", f"{machine['processor']}, {machine['cores']} cores"],
        ],
        caption="run.json",
    )
