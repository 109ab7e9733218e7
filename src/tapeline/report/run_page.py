"""The page of a run: where its time and money went, what it learnt, what was noticed, what it was.

Covers laying out what `SeenRun` read. Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapeline.diagnosis import Diagnosis
from tapeline.ledger import Account
from tapeline.ledger.phases import NS_PER_S
from tapeline.report.baselines import about_last_moves, against_baselines, in_words
from tapeline.report.page import Page, Section
from tapeline.report.run_record import planned, recorded, windows
from tapeline.report.run_times import attempts, step_parts, step_times, where_the_time_went
from tapeline.report.seen import SeenRun
from tapeline.report.signal_figures import Happened, learning_figure, signals_figure
from tapeline.report.tables import Cell, Table, format_count, format_number, format_percent
from tapeline.runs import Metrics
from tapeline.signals import Series

# By the name in a snapshot: the title with its unit, and how many of it the unit is.
_SIGNALS = {
    "grad_norm": ("gradient norm", 1.0),
    "learning_rate": ("learning rate", 1.0),
    "samples_per_s": ("windows per second, each rank", 1.0),
    "step_s": ("time of a step (ms)", 1e-3),
    "collective_wait_s": ("time of a step in collectives (ms)", 1e-3),
    "rss_bytes": ("memory of the process (MB)", 1e6),
    "device_bytes": ("memory of the device (MB)", 1e6),
    "utilisation": ("utilisation (%)", 1e-2),
}


def run_page(seen: SeenRun) -> Page:
    """The page of a run."""
    sections: list[Section] = []
    if seen.account is not None:
        sections.append(where_the_time_went(seen.account))
    sections.append(attempts(seen))
    if seen.metrics:
        happened = _happened(seen)
        sections += [*_loss(seen.metrics[0], happened), *_against_baselines(seen)]
        sections += _signals(seen.metrics, happened)
    if seen.account is not None:
        sections += step_parts(seen.account)
    sections += [
        *step_times(seen.ledgers),
        *_noticed(seen),
        *planned(seen.run, seen.account),
        *windows(seen.record),
        *recorded(seen.record),
    ]
    return Page(
        title=f"run {seen.name}",
        summary=_summary(seen),
        headline=_headline(seen),
        sections=sections,
        verdict="" if seen.diagnosis is None else _verdict(seen.diagnosis),
    )


def _summary(seen: SeenRun) -> str:
    ranks = seen.lives[-1].get("world_size") if seen.lives else None
    on = "" if ranks is None else f" on {ranks} rank{'s' if ranks > 1 else ''}"
    took = ""
    if seen.account is not None:
        took = f" {_duration(seen.account.job.wall_ns / NS_PER_S)} of rank time."
    text = f"`{seen.run.path}`, begun {_moment(seen.record.get('created'))}{on}.{took}"
    return "\n\n".join([text, *seen.problems])


def _moment(created: str | None) -> str:
    return "unknown" if created is None else f"{created[:19].replace('T', ' ')} UTC"


def _duration(seconds: float) -> str:
    for least, unit_s, unit in ((172_800, 86_400, "days"), (7200, 3600, "hours"), (120, 60, "min")):
        if seconds >= least:
            return f"{format_number(seconds / unit_s)} {unit}"
    return f"{format_number(seconds)} s"


def _verdict(found: Diagnosis) -> str:
    """The most pressing verdict in a sentence, with what it rests on and what could be won."""
    first = found.verdicts[0]
    ranks = f", rank {', '.join(map(str, first.ranks))}" if first.ranks else ""
    evidence = f": {first.evidence[0].rstrip('.')}" if first.evidence else ""
    text = f"{first.kind[0].upper()}{first.kind[1:]}{ranks}{evidence}."
    if found.outweighed:
        text = f"{found.outweighed}. Of the steps of attempt {found.attempt}: {text}"
    if first.kind != "healthy":
        text += f" {first.change[0].upper()}{first.change[1:].rstrip('.')}"
        if first.ceiling is not None:
            text += f"; it returns at most {format_percent(first.ceiling)} of the time of steps"
        text += "."
    return text


def _headline(seen: SeenRun) -> list[tuple[str, str, str]]:
    headline = _of_account(seen.account) if seen.account is not None else []
    steps, lives = seen.record["config"]["training"]["steps"], seen.lives
    headline += [
        ("steps", format_count(seen.summary["step"]), f"of {format_count(steps)}"),
        ("attempts", str(len(lives)), f"the last: {seen.how(lives[-1])}" if lives else "none yet"),
    ]
    if seen.summary["best_validation"] is not None:
        best = format_number(seen.summary["best_validation"])
        headline.append(("validation loss", best, "the lowest"))
    elif isinstance(seen.summary["loss"], float):
        headline.append(("loss", format_number(seen.summary["loss"]), "mean of the last steps"))
    if seen.findings:
        headline.append(("findings", str(len(seen.findings)), "of the watchers"))
    return headline


def _of_account(account: Account) -> list[tuple[str, str, str]]:
    cost = account.cost()
    told = [("goodput", format_percent(account.goodput), "useful time over all time")]
    if cost:
        useful = format_number(cost["useful"])
        told.append(("money", format_number(sum(cost.values())), f"{useful} of it useful"))
    return [*told, ("ETTR", format_percent(account.ettr), "neither lost nor startup")]


def _happened(seen: SeenRun) -> Happened:
    return Happened(
        seen.metrics[0].snapshot.resumes,
        seen.checkpoints,
        [(found["step"], number) for number, found in enumerate(seen.findings, start=1)],
    )


def _loss(metrics: Metrics, happened: Happened) -> list[Section]:
    loss = metrics.snapshot["loss"]
    if not len(loss):
        return []
    validation = metrics.snapshot.series.get("validation/loss")
    given_up = metrics.given_up.get("loss")
    text = "Each step once, as the last attempt that did it found it."
    if given_up is not None:
        text += f" {format_count(len(given_up))} steps were done again."
    if happened.found:
        text += " Numbers are those of the findings below."
    if metrics.thinned:
        text += f" Up to step {metrics.thinned['up_to_step']:,} a part of the records was left out."
    if num := int((~np.isfinite(loss.values)).sum()):
        text += f" {format_count(num)} losses are not finite and leave gaps."
    return [
        Section(
            "Loss",
            text,
            figure=learning_figure(loss, given_up, validation, happened),
            alt=f"Training loss over {len(loss):,} steps, the last {_told(loss)}"
            + (f"; validation, the last {_told(validation)}" if validation is not None else "")
            + (f"; resumed after steps {_listed(happened.resumed)}" if happened.resumed else "")
            + ".",
        )
    ]


def _against_baselines(seen: SeenRun) -> list[Section]:
    """The last evaluation beside the simplest predictors; nothing without validation."""
    step, found = next(reversed(seen.run.validations().items()), (0, {}))
    if "horizons" not in found:
        return []
    text = (
        f"After step {format_count(step)}. {in_words(found)} {about_last_moves(found)} Windows "
        "overlap: a small difference may be chance, which `tapeline replicate` shows."
    )
    return [Section("Against simple predictors", text, table=against_baselines(found))]


def _told(series: Series) -> str:
    return format_number(float(series.values[-1]))


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(format_count, steps[:8])) + (" and more" if len(steps) > 8 else "")


def _signals(metrics: list[Metrics], happened: Happened) -> list[Section]:
    signals: dict[str, list[tuple[str, Series]]] = {}
    for name, (title, unit) in _SIGNALS.items():
        ranks = []
        for rank, one in enumerate(metrics):
            series = one.snapshot[name].finite()
            if series.values.any():  # of one rank, all waits in collectives are zero
                scaled = Series(series.steps, series.values / unit, series.attempts)
                ranks.append((f"rank {rank}", scaled))
        if ranks:
            signals[title] = ranks if name not in ("grad_norm", "learning_rate") else ranks[:1]
    if not signals:
        return []
    return [
        Section(
            "Signals",
            "What was measured at each step or logging interval. Dashed: resumed.",
            figure=signals_figure(signals, happened.resumed),
            alt="Small pictures over the steps: "
            + "; ".join(f"{title}, the last {_told(one[0][1])}" for title, one in signals.items()),
        )
    ]


def _noticed(seen: SeenRun) -> list[Section]:
    sections = []
    if seen.diagnosis is not None:
        rows: list[list[Cell]] = [
            [
                verdict.kind,
                ", ".join(map(str, verdict.ranks)) or None,
                "; ".join(verdict.evidence),
                verdict.change,
                verdict.refuted_by,
                None if verdict.ceiling is None else format_percent(verdict.ceiling),
            ]
            for verdict in seen.diagnosis.verdicts
        ]
        columns = ["verdict", "ranks", "seen", "change", "refuted by", "returns at most"]
        text = (
            f"What the evidence of attempt {seen.diagnosis.attempt} says, the most pressing first."
        )
        sections.append(Section("Diagnosis", text, table=Table(columns, rows, "")))
    if seen.findings:
        rows = [
            [number, one["watcher"], one["severity"], one["step"], one["seen"], one["means"]]
            for number, one in enumerate(seen.findings, start=1)
        ]
        columns = ["no.", "watcher", "severity", "step", "seen", "what it usually means"]
        sections.append(
            Section("Findings", "Of the watchers, in all attempts.", table=Table(columns, rows, ""))
        )
    return sections
