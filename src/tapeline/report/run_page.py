"""The page of a run: where its time and money went, what it learnt, what was noticed, what it was.

Covers: reading the files of a run folder, live or dead, through the rooms that wrote them, and
laying out one `Page`. Measures nothing itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.clock import SystemClock
from tapeline.diagnosis import Diagnosis, diagnose
from tapeline.ledger import BUCKETS, Account, Histogram, RankLedger, account_of, read_ledgers
from tapeline.report.figures import loss_figure
from tapeline.report.page import Page, Section
from tapeline.report.tables import Cell, Table, format_percent
from tapeline.report.time_figures import attempts_figure, goodput_figure
from tapeline.runs import RunFolder

_NS_PER_S, _NS_PER_MS = 1e9, 1e6


@dataclass(frozen=True, slots=True)
class SeenRun:
    """What the files of a run tell, read once.

    Attributes:
        run: its folder.
        account: where the time of all its lives went.
        diagnosis: verdicts and findings.
        ledgers: of its ranks.
        record: what it was made of.
    """

    run: RunFolder
    account: Account
    diagnosis: Diagnosis
    ledgers: list[RankLedger]
    record: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, price_per_hour: float | None = None) -> SeenRun:
        """Read a run, live or dead.

        Args:
            folder: of the run.
            price_per_hour: of one rank's accelerator; None leaves money out.

        Raises:
            RunError: `folder` is no run.
            LedgerError: its ledgers are missing or don't add up.
        """
        run = RunFolder(folder, SystemClock())
        return cls(
            run=run,
            record=run.record(),
            account=account_of(folder, price_per_hour=price_per_hour),
            diagnosis=diagnose(folder),
            ledgers=read_ledgers(folder),
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures of the page as JSON can hold them."""
        return {
            "run": str(self.run.path),
            "account": self.account.as_dict(),
            "diagnosis": self.diagnosis.as_dict(),
            "attempts": self.run.attempts(),
            "record": self.record,
        }


def run_page(seen: SeenRun) -> Page:
    """The page of a run."""
    run, account = seen.run, seen.account
    sections = [_time(account), _attempts(account, run)]
    if run.losses():
        sections.append(_loss(run))
    sections += [
        _steps(seen.ledgers),
        _diagnosis(seen.diagnosis),
        *_windows(seen.record),
        _record(seen.record),
    ]
    return Page(
        title=f"run {seen.record['config'].get('name', run.path.name)}",
        summary=_summary(account, seen.diagnosis),
        headline=_headline(account, run),
        sections=sections,
    )


def account_table(account: Account) -> Table:
    """The buckets of a job: seconds, share, and money where a price is known."""
    cost = account.cost()
    whole = account.job.wall_ns or 1
    columns = ["bucket", "seconds, all ranks", "share", *(["money"] if cost else [])]
    rows: list[list[Cell]] = []
    for bucket in BUCKETS:
        spent = account.job.buckets_ns[bucket]
        row: list[Cell] = [bucket, round(spent / _NS_PER_S, 3), format_percent(spent / whole)]
        rows.append([*row, round(cost[bucket], 4)] if cost else row)
    return Table(columns, rows, "adds up to the nanosecond")


def _summary(account: Account, found: Diagnosis) -> str:
    wall_s = account.job.wall_ns / _NS_PER_S
    goodput = "unknown" if account.goodput is None else format_percent(account.goodput)
    verdicts = ", ".join(verdict.kind for verdict in found.verdicts)
    faults = " ".join((*account.clock_faults, *account.notes))
    text = (
        f"Over its ranks ({len(account.ranks)}) and attempts the run took {wall_s:,.1f} seconds, "
        f"of which {goodput} were useful. Diagnosis: {verdicts}."
    )
    return f"{text}\n\n{faults}" if faults else text


def _headline(account: Account, run: RunFolder) -> list[tuple[str, str, str]]:
    def share(value: float | None) -> str:
        return "unknown" if value is None else format_percent(value)

    lives = run.attempts()
    headline = [
        ("goodput", share(account.goodput), "useful time over all time"),
        ("ETTR", share(account.ettr), "neither lost nor startup"),
        ("attempts", str(len(lives)), f"the last: {lives[-1].get('how', 'lives or was killed')}"),
    ]
    cost = account.cost()
    if cost:
        useful = cost["useful"]
        headline.append(("money", f"{sum(cost.values()):,.4g}", f"{useful:,.4g} of it useful"))
    return headline


def _time(account: Account) -> Section:
    return Section(
        "Where the time went",
        "Every nanosecond of every rank is in one bucket. Lost is what failures cost: steps done "
        "again, time until an end was noticed, time nobody ran, and later starts.",
        table=account_table(account),
        figure=goodput_figure(account.job.buckets_ns),
        alt="One bar: "
        + ", ".join(
            f"{bucket} {spent / (account.job.wall_ns or 1):.1%}"
            for bucket, spent in account.job.buckets_ns.items()
        ),
    )


def _attempts(account: Account, run: RunFolder) -> Section:
    rows: list[list[Cell]] = [
        [
            life["attempt"],
            life["from_step"],
            life.get("step"),
            life.get("world_size"),
            life.get("how", "lives or was killed"),
            life.get("evidence"),
        ]
        for life in run.attempts()
    ]
    return Section(
        "Attempts",
        "Each life of each rank. Within a life the buckets are drawn one after the other, not in "
        "the order in which they came.",
        table=Table(["attempt", "from step", "to step", "ranks", "ended", "evidence"], rows, ""),
        figure=attempts_figure(account.ranks),
        alt=f"Bars of {len(account.ranks)} ranks over time, one for each of their lives.",
    )


def _loss(run: RunFolder) -> Section:
    resumed = [life["from_step"] for life in run.attempts() if life["from_step"]]
    validations = run.validations()
    return Section(
        "Loss",
        "Each step once: of those that were done again, the last.",
        figure=loss_figure(
            {"training": list(run.losses().values())},
            marks=[(step, "resumed") for step in resumed],
            validation={step: found["mse"] for step, found in validations.items()},
        ),
        alt="Training loss by step, with validations and resumes marked.",
    )


def _steps(ledgers: list[RankLedger]) -> Section:
    rows: list[list[Cell]] = []
    for ledger in ledgers:
        times, own, longest = Histogram(), Histogram(), (0, 0)
        for part in ledger.step_times():
            times.add(part.times.counts)
            own.add(part.own.counts)
            longest = max(longest, (part.longest_ns, part.longest_step))
        if times.total:
            quantiles = [times.quantile_ns(q) / _NS_PER_MS for q in (0.5, 0.95, 0.99)]
            rows.append(
                [
                    ledger.rank,
                    *(round(value, 3) for value in quantiles),
                    round(own.quantile_ns(0.5) / _NS_PER_MS, 3),
                    round(longest[0] / _NS_PER_MS, 3),
                    longest[1],
                ]
            )
    return Section(
        "Steps",
        "How long steps took on each rank, without checkpoints and evaluations; the rank's own "
        "work is data, transfer and compute, without waiting for others.",
        table=Table(
            ["rank", "median ms", "95 % ms", "99 % ms", "own median ms", "longest ms", "at step"],
            rows,
            "",
        ),
    )


def _diagnosis(found: Diagnosis) -> Section:
    rows: list[list[Cell]] = [
        [
            verdict.kind,
            "; ".join(verdict.evidence),
            verdict.change,
            None if verdict.ceiling is None else format_percent(verdict.ceiling),
        ]
        for verdict in found.verdicts
    ]
    rows += [
        [f"watcher {one['watcher']}", f"step {one['step']}: {one['seen']}", one["means"], None]
        for one in found.findings
    ]
    return Section(
        "What was noticed",
        "Verdicts of the triage and findings of the watchers.",
        table=Table(["what", "seen", "what to do, what it means", "returns at most"], rows, ""),
    )


def _windows(record: dict[str, Any]) -> list[Section]:
    audit = record["data"].get("audit")
    if not audit:
        return []
    rows: list[list[Cell]] = [
        [
            part,
            counted["rows"],
            counted["windows"],
            ", ".join(
                f"{reason.replace('_', ' ')} {count:,}"
                for reason, count in counted["lost"].items()
                if count
            ),
        ]
        for part, counted in audit.items()
    ]
    return [
        Section(
            "Windows",
            "Each row starts a window or is counted under the reason why not.",
            table=Table(["part", "rows", "windows", "rows that start none"], rows, ""),
        )
    ]


def _record(record: dict[str, Any]) -> Section:
    code, machine = record["code"], record["machine"]
    rows: list[list[Cell]] = [
        ["configuration", record["config_hash"]],
        ["code", f"{code['commit'] or 'no commit'} ({code['state']})"],
        ["data", record["data"]["fingerprint"]],
        ["machine", f"{machine['processor']}, {machine['cores']} cores"],
        *[[name, version] for name, version in machine["versions"].items()],
    ]
    rows += [
        [f"{section}.{key}" if isinstance(value, dict) else section, json.dumps(one)]
        for section, value in record["config"].items()
        for key, one in (value.items() if isinstance(value, dict) else [("", value)])
    ]
    return Section(
        "The run",
        "What was recorded before its first step.",
        table=Table(["what", "recorded"], rows, "run.json"),
    )
