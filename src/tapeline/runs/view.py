"""A run as trackers see one: parameters, tags, metrics, artifacts. What exporters are fed from.

Reads plain files and sends nothing. Redacted once more: a record may be older than the rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.files import canonical_json
from tapeline.runs.diff import RunFacts
from tapeline.runs.folder import RECORD, RunFolder
from tapeline.runs.history import read_metrics
from tapeline.runs.secrecy import redacted
from tapeline.signals import Series


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of a run.

    Attributes:
        path: where it lies.
        name: relative to the run's folder.
        num_bytes: its size.
        xxh3_128: of its content, as the checkpoint's manifest has it; None for other files.
    """

    path: Path
    name: str
    num_bytes: int
    xxh3_128: str | None


@dataclass(frozen=True, slots=True)
class RunView:
    """What a tracker holds of a run.

    Attributes:
        name: of the run.
        identity: equal in all lives of the run, in no other run.
        params: every setting by its dotted key; lists as JSON, what is None left out.
        tags: what else tells it from others: code, data, versions, machine, contract, its end.
        metrics: by name, each step once.
        artifacts: the record, checkpoints and the report.
    """

    name: str
    identity: str
    params: Mapping[str, str | int | float | bool]
    tags: Mapping[str, str]
    metrics: Mapping[str, Series]
    artifacts: tuple[Artifact, ...]


def view_of(run: RunFolder) -> RunView:
    """Read a run, live or dead.

    Raises:
        RunError: the folder isn't that of a run, or its record is damaged.
    """
    facts = RunFacts.read(run)
    record: dict[str, Any] = redacted(facts.record)
    return RunView(
        name=record["config"]["name"],
        identity=facts.identity,
        params=dict(_params(record["config"], "")),
        tags={key: str(value) for key, value in _tags(record, facts).items() if value is not None},
        metrics=read_metrics(run.metrics_path(0)).snapshot.series,
        artifacts=tuple(_artifacts(run)),
    )


def _params(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _params(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", canonical_json(value)
        elif value is not None:
            yield f"{prefix}{key}", value


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
    for file in (run.path / RECORD, *sorted(run.path.glob("*.html"))):
        yield Artifact(file, file.name, file.stat().st_size, None)
    for manifest in sorted(run.checkpoints_path.glob("step-*/manifest.json")):
        try:
            files = json.loads(manifest.read_text())["files"]
        except (OSError, ValueError, KeyError):
            continue  # retention may delete it meanwhile; a damaged one is no artifact
        for name, about in sorted(files.items()):
            path = manifest.parent / name
            relative = path.relative_to(run.path).as_posix()
            yield Artifact(path, relative, about["bytes"], about["xxh3_128"])
