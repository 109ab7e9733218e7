"""What changed between two runs: over configuration, code, data, environment, hardware, lineage.

Ranked by how likely each difference is to matter, and with the step at which the loss curves part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapeline.runs.checkout import commits_differ, hunks_of, sections_of
from tapeline.runs.divergence import Divergence, diverge
from tapeline.runs.facts import (
    Change,
    config_changes,
    following,
    surrounding_changes,
    weight_of_file,
)
from tapeline.runs.folder import RunFolder
from tapeline.runs.history import read_metrics
from tapeline.signals import Series


@dataclass(frozen=True, slots=True)
class RunDiff:
    """How two runs differ.

    Attributes:
        changes: the heaviest first; see `Change`.
    """

    first: str
    second: str
    changes: tuple[Change, ...]
    divergence: Divergence


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is recorded of a run.

    Attributes:
        lives: of each life, the lines of `attempts.jsonl` and under `record` its own record.
    """

    record: Mapping[str, Any]
    lives: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, run: RunFolder) -> RunFacts:
        """Read them.

        Raises:
            RunError: the folder isn't that of a run, or its record is damaged.
        """
        lives = [{**life, "record": run.attempt_record(life["attempt"])} for life in run.attempts()]
        return cls(run.record(), lives)

    @property
    def identity(self) -> str:
        """What the run's checkpoints say they are of."""
        return f"{self.record['config'].get('name')}, begun {self.record.get('created')}"


def diff_runs(first: Path, second: Path, replicates: Sequence[Path] = ()) -> RunDiff:
    """Compare two runs.

    Args:
        replicates: runs that differ from the first in nothing but their seeds, for the seed band.

    Raises:
        RunError: a folder isn't that of a run.
    """
    a, b = (RunFacts.read(RunFolder(path)) for path in (first, second))
    divergence = diverge(loss_of(first), loss_of(second), [loss_of(path) for path in replicates])
    return RunDiff(str(first), str(second), tuple(changes_between(a, b)), divergence)


def loss_of(run: Path) -> Series:
    """The losses that a run journalled, each step once."""
    return read_metrics(RunFolder(run).metrics_path(0)).snapshot["loss"]


def changes_between(first: RunFacts, second: RunFacts) -> list[Change]:
    """All differences, the heaviest first."""
    before, after = first.record, second.record
    return following(
        [
            *config_changes(before, after),
            *code_changes(before, after),
            *surrounding_changes(before, after),
            *_world_changes(before, after),
            *_lineage_changes(first, second),
        ]
    )


def code_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Sources of the model, and in each checkout the files that differ."""
    changes = []
    first, second = before.get("sources", {}), after.get("sources", {})
    for name in sorted(first.keys() | second.keys()):
        one, two = first.get(name) or {}, second.get(name) or {}
        if one.get("sha256") != two.get("sha256"):
            a, b = one.get("file"), two.get("file")
            changes.append(Change("code", f"source of {name}", a, b, 91, "its content differs"))
    models = {str(source["file"]) for source in [*first.values(), *second.values()] if source}
    others = ({code["of"]: code for code in r.get("other_code", ())} for r in (before, after))
    one, two = ({"": r.get("code", {}), **o} for r, o in zip((before, after), others, strict=True))
    for name in sorted(one.keys() | two.keys()):
        prefix = f"{name}: " if name else ""
        changes += _checkout_changes(one.get(name, {}), two.get(name, {}), prefix, models)
    return changes


def _checkout_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str, models: set[str]
) -> list[Change]:
    changes = []
    states = before.get("state"), after.get("state")
    if states[0] != states[1] and not {*states} <= {"clean", "dirty"}:
        why = "what code ran isn't known of both"
        changes.append(Change("code", f"{prefix}state", *states, 60, why))
    commits = before.get("commit"), after.get("commit")
    files: dict[str, int] = {}
    if commits[0] != commits[1]:
        between = None
        if all(commits) and (folder := after.get("folder") or before.get("folder")):
            between = commits_differ(Path(folder), *map(str, commits))
        known = between is not None
        why = "" if known else "the commits aren't at hand, so their files can't be compared"
        changes.append(Change("code", f"{prefix}commit", *commits, 3 if known else 75, why))
        files |= between or {}
    patches = [sections_of(code.get("diff") or "") for code in (before, after)]
    dirty = [code.get("files", {}) for code in (before, after)]
    for path in dirty[0].keys() | dirty[1].keys():
        if _differs(dirty[0].get(path), dirty[1].get(path)):
            found = hunks_of([(path, p[path]) for p in patches if path in p])
            files[path] = max(files.get(path, 0), found.get(path, 1))
    for path, hunks in files.items():
        a, b = (_file_state(code.get(path), c) for code, c in zip(dirty, commits, strict=True))
        weight = 90 if any(m.endswith(f"/{path}") for m in models) else weight_of_file(path)
        plural = "s" if hunks > 1 else ""
        changes.append(Change("code", f"{prefix}{path}", a, b, weight, f"{hunks} hunk{plural}"))
    modules = [{m["path"]: m for m in code.get("submodules", ())} for code in (before, after)]
    for path in modules[0].keys() | modules[1].keys():
        m, n = (one.get(path) for one in modules)
        if m != n:
            told_m, told_n = (f"{x['commit'][:12]}, {x['state']}" if x else None for x in (m, n))
            changes.append(Change("code", f"{prefix}submodule {path}", told_m, told_n, 75))
    return changes


def _differs(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None) -> bool:
    if one is None or two is None:
        return True
    return (one["sha256"], one["bytes"]) != (two["sha256"], two["bytes"])


def _file_state(file: Mapping[str, Any] | None, commit: str | None) -> str:
    """A file's state in one run, short enough for a table."""
    if file is None:
        return f"as in {commit[:12]}" if commit else "not there"
    kind = {"??": "untracked", "D": "deleted"}.get(file["status"], "changed")
    return f"{kind}, {file['sha256'][:12]}" if file["sha256"] else kind


def _world_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    sizes = before.get("world_size"), after.get("world_size")
    if sizes[0] == sizes[1]:
        return []
    scopes = {r.get("contract", {}).get("scope") for r in (before, after)}
    exact = scopes == {"across world sizes"}
    why = "the contract holds across world sizes" if exact else "other ranks, other bits"
    return [Change("hardware", "ranks", *sizes, 5 if exact else 52, why)]


def _lineage_changes(first: RunFacts, second: RunFacts) -> list[Change]:
    same_run = first.record.get("config_hash") == second.record.get("config_hash")
    changes = []
    numbers = len(first.lives), len(second.lives)
    if numbers[0] != numbers[1]:
        changes.append(Change("lineage", "lives", *numbers, 3))
    for number, facts in enumerate((first, second)):
        for life in facts.lives:
            changes += _life_changes(facts, life, "second" if number else "first")
    origins = [
        {life["from_step"]: _origin(life) for life in facts.lives if life.get("from_step")}
        for facts in (first, second)
    ]
    for step in sorted(origins[0].keys() & origins[1].keys()):
        a, b = (origin[step].get("files") or {} for origin in origins)
        if a and a != b and a.keys() == b.keys():  # other files are the same state of other ranks
            why = "resumed from another state" if same_run else "follows from the configuration"
            m, n = (" ".join(sorted(files.values()))[:32] for files in (a, b))
            what, weight = f"state at step {step}", 93 if same_run else 1
            changes.append(Change("lineage", what, m, n, weight, why))
    return changes


def _life_changes(facts: RunFacts, life: Mapping[str, Any], which: str) -> list[Change]:
    """What a later life of a run was begun with that the run wasn't."""
    origin, record = _origin(life), life.get("record") or {}
    name = f"life {life['attempt']} of the {which}"
    changes = []
    if origin.get("run") not in (None, facts.identity):
        why = "it began from a checkpoint of another run"
        changes.append(Change("lineage", name, facts.identity, origin["run"], 95, why))
    if (origin.get("contract") or {}).get("scope") == "statistical":
        why = "the contract had been given up before it"
        changes.append(Change("lineage", name, None, origin["contract"].get("text"), 60, why))
    if record and life["attempt"] > 1:
        own = [*surrounding_changes(*_common(facts.record, record))]
        if "code" in record:
            own += code_changes(*_common(facts.record, record))
        changes += [replace(one, area="lineage", what=f"{name}: {one.what}") for one in own]
    return changes


def _common(
    run: Mapping[str, Any], life: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The parts that both records have."""
    keys = run.keys() & life.keys()
    return {key: run[key] for key in keys}, {key: life[key] for key in keys}


def _origin(life: Mapping[str, Any]) -> Mapping[str, Any]:
    return (life.get("record") or {}).get("origin") or {}
