"""A run as trackers see one: parameters, tags, metrics, artifacts. What exporters are fed from.

Reads plain files and sends nothing. Redacted once more: a record may be older than the rules.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tapeline.errors import LedgerError
from tapeline.files import canonical_json, read_journal, xxh3_file
from tapeline.ledger import account_of, heartbeat_path, ledger_path, read_ledger
from tapeline.ledger.phases import NS_PER_S
from tapeline.runs.diff import RunFacts
from tapeline.runs.facts import flat
from tapeline.runs.folder import RECORD, RunFolder
from tapeline.runs.history import read_metrics
from tapeline.runs.secrecy import redacted
from tapeline.session import Int64Array
from tapeline.signals import Series


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a run.

    Attributes:
        name: relative to the run's folder.
        xxh3_128: of its content, as the checkpoint's manifest has it; None for other files.
    """

    path: Path
    name: str
    num_bytes: int
    xxh3_128: str | None

    @property
    def in_checkpoint(self) -> bool:
        """Whether it is a part of one: too large to go anywhere unasked."""
        return self.xxh3_128 is not None

    def as_dict(self) -> dict[str, Any]:
        """Its name, size and hash; of a file that no manifest names, the hash is taken now."""
        digest = self.xxh3_128 or xxh3_file(self.path)
        return {"name": self.name, "bytes": self.num_bytes, "xxh3_128": digest}


def run_id_of(run: RunFolder) -> str:
    """A short name of a run for the ids and tags of trackers: equal in all its lives.

    Raises:
        RunError: the folder isn't that of a run.
    """
    return xxhash.xxh3_64_hexdigest(RunFacts(run.record()).identity.encode())


@dataclass(frozen=True, slots=True)
class RunView:
    """What a tracker holds of a run.

    Attributes:
        identity: equal in all lives of the run, in no other run.
        params: every setting by its dotted key; lists as JSON, what is None left out.
        tags: what else tells it from others: code, data, versions, machine, contract, its end.
        metrics: by name, each step once; those of ranks after the first under `rank-N/`.
        artifacts: the record, lives, findings, pages and checkpoints.
        begins: for each life, the steps done when it began.
        summary: what the run came to so far: goodput, seconds by bucket, lives, findings.
        times: for each life, when steps were done; see `wall_ns`.
    """

    name: str
    identity: str
    params: Mapping[str, str | int | float | bool]
    tags: Mapping[str, str]
    metrics: Mapping[str, Series]
    artifacts: tuple[Artifact, ...]
    begins: Mapping[int, int] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[dict[str, Any], ...] = ()
    times: Mapping[int, tuple[Int64Array, Int64Array]] = field(default_factory=dict)

    def wall_ns(self, series: Series) -> Int64Array:
        """`[n]`, when the steps of a series were done, since 1970; 0 where no ledger tells.

        Between the lines of rank 0's ledger, about a second apart, steps are taken as even.
        """
        found = np.zeros(len(series), np.int64)
        for attempt in np.unique(series.attempts).tolist():
            if attempt in self.times:
                here = series.attempts == attempt
                steps, ends_ns = self.times[attempt]
                passed = np.interp(series.steps[here], steps, ends_ns - ends_ns[0])
                found[here] = ends_ns[0] + passed.astype(np.int64)
        return found

    def timed(self, series: Series) -> Iterator[tuple[int, float, int]]:
        """Each entry of a series: its step, its value, and when (see `wall_ns`)."""
        times_ns = self.wall_ns(series).tolist()
        return zip(series.steps.tolist(), series.values.tolist(), times_ns, strict=True)


def view_of(run: RunFolder) -> RunView:
    """Read a run, live or dead.

    Raises:
        RunError: the folder isn't that of a run, or its record is damaged.
    """
    facts = RunFacts.read(run)
    record: dict[str, Any] = redacted(facts.record)
    findings = tuple(read_journal(run.findings_path))
    return RunView(
        name=record["config"]["name"],
        identity=facts.identity,
        params={
            key: canonical_json(value) if isinstance(value, list) else value
            for key, value in flat(record["config"])
            if value is not None
        },
        tags={key: str(value) for key, value in _tags(record, facts).items() if value is not None},
        metrics=_metrics(run),
        artifacts=tuple(_artifacts(run)),
        begins={life["attempt"]: life["from_step"] for life in facts.lives if "from_step" in life},
        summary=dict(_summary(run, facts, findings)),
        findings=findings,
        times=_times(run),
    )


def _metrics(run: RunFolder) -> dict[str, Series]:
    found = dict(read_metrics(run.metrics_path(0)).snapshot.series)
    for path in sorted((run.path / "metrics").glob("rank-*.jsonl")):
        if path != run.metrics_path(0):
            series = read_metrics(path).snapshot.series
            found |= {f"{path.stem}/{name}": one for name, one in series.items()}
    return found


def _summary(run: RunFolder, facts: RunFacts, findings: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    yield "attempts", len(facts.lives)
    yield "findings", len(findings)
    with contextlib.suppress(LedgerError):  # what isn't known is left out
        account = account_of(run.path)
        for name in ("goodput", "ettr"):
            if (ratio := getattr(account, name)) is not None:
                yield name, ratio
        for bucket, spent_ns in account.job.buckets_ns.items():
            yield f"{bucket}_s", spent_ns / NS_PER_S
        yield "kept_steps", account.job.kept_steps
        yield "redone_steps", account.job.redone_steps


def _times(run: RunFolder) -> dict[int, tuple[Int64Array, Int64Array]]:
    """For each life, steps done and the wall clock then, by rank 0's ledger."""
    path = ledger_path(run.path, 0)
    if not path.exists():
        return {}
    ledger = read_ledger(path, heartbeat_path(run.path, 0))
    found: dict[int, tuple[Int64Array, Int64Array]] = {
        begin.attempt: (np.array([begin.from_step]), np.array([begin.wall_ns]))
        for begin in ledger.begins
    }
    for spans in ledger.spans():
        steps, ends_ns = found[spans.attempt]
        own_ns = spans.ends_ns + ends_ns[0]
        found[spans.attempt] = (
            np.concatenate((steps, spans.steps)),
            np.concatenate((ends_ns, own_ns)),
        )
    return found


def _tags(record: Mapping[str, Any], facts: RunFacts) -> dict[str, Any]:
    code, data = record.get("code", {}), record.get("data", {})
    machine, environment = record.get("machine", {}), record.get("environment", {})
    lives = facts.lives
    return {
        "created": record.get("created"),
        "config_hash": record.get("config_hash"),
        "commit": code.get("commit"),
        "code": code.get("state"),
        "remote": code.get("remote"),
        "data": data.get("fingerprint"),
        "training_data": data.get("training_fingerprint"),
        "contract": (record.get("contract") or {}).get("text"),
        "torch": machine.get("versions", {}).get("torch"),
        "python": machine.get("python"),
        "processor": machine.get("processor"),
        "device": machine.get("device"),
        "driver": environment.get("driver"),
        "container": (environment.get("container") or {}).get("digest"),
        "ranks": record.get("world_size"),
        "lives": len(lives),
        "end": lives[-1].get("how", "open") if lives else "not begun",
    }


def _artifacts(run: RunFolder) -> Iterator[Artifact]:
    journals = (path for path in (run.attempts_path, run.findings_path) if path.exists())
    for file in (run.path / RECORD, *journals, *sorted(run.path.glob("*.html"))):
        yield Artifact(file, file.name, file.stat().st_size, None)
    for manifest in sorted(run.checkpoints_path.glob("step-*/manifest.json")):
        try:
            files = json.loads(manifest.read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # retention may delete it meanwhile; a damaged one is no artifact
        for name, about in sorted(files.items()):
            path = manifest.parent / name
            relative = path.relative_to(run.path).as_posix()
            yield Artifact(path, relative, about["bytes"], about["xxh3_128"])
