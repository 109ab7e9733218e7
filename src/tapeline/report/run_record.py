"""The parts of a run's page on what it was made of: windows, settings, code, data, environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tapeline.ledger import Account
from tapeline.plan.goodput import compare, planned_by
from tapeline.report.page import Section
from tapeline.report.tables import Cell, Table, format_percent
from tapeline.runs import RunFolder

_NS_PER_HOUR = 3.6e12


def planned(run: RunFolder, account: Account | None) -> list[Section]:
    """What the run itself planned beside what it measured; nothing where it planned nothing."""
    decisions = run.intervals()
    if not decisions or account is None or not account.job.wall_ns or account.clock_faults:
        return []
    shares, source = planned_by(decisions[-1])
    hours = {bucket: ns / _NS_PER_HOUR for bucket, ns in account.job.buckets_ns.items()}
    rows: list[list[Cell]] = [
        [
            row.bucket,
            None if row.planned is None else format_percent(row.planned),
            format_percent(row.measured),
            None if row.difference is None else f"{100 * row.difference:+.2f} points",
        ]
        for row in compare(shares, hours)
    ]
    return [
        Section(
            "Planned against measured",
            "The run chose how often to save from what saves, steps and failures had cost so far. "
            "`tapeline plan compare` sets other plans beside it.",
            table=Table(["time", "planned", "measured", "difference"], rows, f"Planned: {source}"),
        )
    ]


def windows(record: Mapping[str, Any]) -> list[Section]:
    """The audit of the windows; nothing where there is none."""
    audit = {part: one for part, one in (record["data"].get("audit") or {}).items() if one}
    if not audit:
        return []
    reasons = [
        reason
        for reason in next(iter(audit.values()))["lost"]
        if any(one["lost"].get(reason) for one in audit.values())
    ]
    rows: list[list[Cell]] = [
        ["rows", *(one["rows"] for one in audit.values())],
        ["windows that start there", *(one["windows"] for one in audit.values())],
        *(
            [
                f"none: {reason.replace('_', ' ')}",
                *(one["lost"].get(reason) for one in audit.values()),
            ]
            for reason in reasons
        ),
    ]
    return [
        Section(
            "Windows",
            "Each row starts a window or is counted under the one reason why not, so the numbers "
            "below the first add up to it.",
            table=Table(["of the store's rows", *audit], rows, ""),
        )
    ]


def recorded(record: Mapping[str, Any]) -> list[Section]:
    """What was recorded before the first step."""
    settings = dict(_flat(record["config"]))
    given = [key for key in record.get("given", ()) if key in settings]
    return [
        Section(
            "Settings",
            "Those that a file or an override named; the others are defaults. The hash of all that "
            f"decide the run: {record['config_hash']}.",
            table=Table(["setting", "value"], [[key, settings[key]] for key in given], ""),
        ),
        Section(
            "All settings",
            "With the defaults.",
            table=Table(["setting", "value"], [[k, v] for k, v in settings.items()], ""),
            folded=True,
        ),
        Section("Code", "", table=Table(["what", "recorded"], list(_code(record)), "")),
        Section("Data", "", table=Table(["what", "recorded"], list(_data(record["data"])), "")),
        Section("Environment", "", table=Table(["what", "recorded"], list(_around(record)), "")),
        *_packages(record.get("environment") or {}),
    ]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _code(record: Mapping[str, Any]) -> Iterator[list[Cell]]:
    for code in (record.get("code") or {}, *record.get("other_code", ())):
        of = f"{code['of']}: " if "of" in code else ""
        yield [f"{of}commit", f"{code.get('commit') or 'none'} ({code.get('state')})"]
        if code.get("remote"):
            yield [f"{of}remote", code["remote"]]
        for path, file in (code.get("files") or {}).items():
            yield [f"{of}{path}", f"{file['status']} {(file['sha256'] or '')[:16]}"]
    for name, source in (record.get("sources") or {}).items():
        if source:
            yield [f"source of {name}", f"{source.get('file')} {(source.get('sha256') or '')[:16]}"]


def _data(data: Mapping[str, Any]) -> Iterator[list[Cell]]:
    for key in (
        "store",
        "fingerprint",
        "read_fingerprint",
        "training_fingerprint",
        "sessions",
        "rows",
        "training_windows",
        "validation_windows",
    ):
        if key in data:
            value = data[key]
            yield [key.replace("_", " "), f"{value:,}" if isinstance(value, int) else value]
    if columns := data.get("columns"):
        yield ["columns", f"{len(columns)}: {', '.join(columns)}"]


def _around(record: Mapping[str, Any]) -> Iterator[list[Cell]]:
    machine, environment = record["machine"], record.get("environment") or {}
    yield ["begun", record.get("created")]
    yield ["processor", f"{machine['processor']}, {machine['cores']} cores"]
    yield ["memory", f"{machine.get('memory_gib')} GiB"]
    yield ["device", machine.get("device")]
    yield ["contract", (record.get("contract") or {}).get("text")]
    for name, version in machine["versions"].items():
        yield [name, version]
    for key in ("python", "implementation", "blas", "driver"):
        yield [key, environment.get(key)]
    for group in ("system", "container"):
        for key, value in (environment.get(group) or {}).items():
            yield [f"{group}: {key}", value]
    if command := environment.get("command"):
        yield ["command", " ".join(command)]


def _packages(environment: Mapping[str, Any]) -> list[Section]:
    rows: list[list[Cell]] = [
        *([name, value] for name, value in (environment.get("variables") or {}).items()),
        *([name, value] for name, value in (environment.get("packages") or {}).items()),
    ]
    if not rows:
        return []
    table = Table(["variable or package", "value or version"], rows, "")
    return [Section("Variables and packages", "", table=table, folded=True)]
