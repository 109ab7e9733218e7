"""What two runs differ in, fact by fact, each with how likely it is to matter.

Covers configuration, data, environment, hardware and lineage; code is `code_changes`'s. Weights
are a judgement, from 0 (says nothing) to 100 (nothing else needs an explanation), not a measure.
What follows from another change keeps a weight of 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tapeline.config import RunConfig
from tapeline.errors import TapelineError
from tapeline.runs.secrecy import is_secret_file

Area = Literal["config", "code", "data", "environment", "hardware", "lineage"]
NOISE = 15  # what weighs no more doesn't explain a different result
CHANGES_BITS = 50  # what weighs as much, of what surrounds a run, changes its bits


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two runs.

    Attributes:
        what: its dotted name, or the file.
        before, after: of the first and the second run; None: there is none.
        weight: from 0 to 100, how likely it is to matter.
        why: in words, where the name doesn't say it.
    """

    area: Area
    what: str
    before: Any
    after: Any
    weight: int
    why: str = ""


_CONFIG_WEIGHTS = (
    (r"data\.target|windows\.", 92),
    (r"model\.|data\.augment", 90),
    (r"training\.(learning_rate|optimizer|batch)$", 89),
    (r"training\.(threads|device|lanes|strategy|tensor_parallel)", 66),
    (r"seed", 80),
    (r"", 87),
)
_DATA_WEIGHTS = (
    (r"data\.fingerprint", 98, "other rows"),
    (r"data\.training_fingerprint", 96, "other windows to train on: another split"),
    (r"data\.normaliser", 94, "inputs are scaled otherwise"),
    (r"data\.(made|derived|columns)", 93, "rows were made otherwise"),
    (r"data\.index_xxh3", 4, "another form of the same rows"),
    (r"data\.store", 2, ""),
    (r"data\.", 50, ""),
)
_ENVIRONMENT_WEIGHTS = (
    (r"environment\.packages\.torch$", 72, "kernels of another version"),
    (r"determinism\.", 68, "bits depend on it"),
    (r"environment\.packages\.(numpy|numba|tapeline)$", 65, ""),
    (r"environment\.packages\.(nvidia-.*|triton)$", 60, ""),
    (r"environment\.torch\.(git|cuda)", 58, "another build of torch"),
    (r"environment\.driver", 45, ""),
    (r"environment\.origins\.", 40, ""),
    (r"environment\.variables\.(CUBLAS_|CUDA_|CUDNN_|NVIDIA_|TORCH|PYTORCH_|PYTHONHASH)", 40, ""),
    (r"environment\.variables\.(OMP_|MKL_|OPENBLAS_|NUMBA_|KMP_|GOMP_|DNNL_|LD_PRELOAD)", 38, ""),
    (r"environment\.(python|blas|container|torch\.build)", 35, ""),
    (r"environment\.system\.libc", 18, ""),
    (r"environment\.packages\.", 12, "no kernel of a step is its"),
    (r"environment\.system\.(kernel|distribution)", 8, ""),
    (r"environment\.", 2, ""),
)
_HARDWARE_WEIGHTS = (
    (r"machine\.device", 55, "other kernels"),
    (r"environment\.torch\.devices", 54, "other kernels"),
    (r"machine\.processor", 50, "another instruction set may sum in another order"),
    (r"machine\.cores", 6, ""),
    (r"machine\.", 2, ""),
)
_DOCUMENTS = (".md", ".rst", ".txt", ".ipynb", ".png", ".svg", ".jsonl", ".csv", ".log")
_SETTINGS = (".toml", ".yaml", ".yml", ".json", ".cfg", ".ini")
# What differs because something else does: a pattern, and the patterns of what it follows from.
_FOLLOWS = (
    (r"data\.(?!fingerprint)", r"data\.fingerprint"),
    (r"data\.(training|validation)_|data\.normaliser", r"validation\.fraction|windows\."),
    (r"data\.(normaliser|.*windows)", r"data\.training_fingerprint"),
    (r"data\.normaliser", r"data\.normalise$"),
    (r"determinism\.(torch|cuda|cudnn)|environment\.torch\.", r"environment\.packages\.torch$"),
    (r"determinism\.threads|environment\.torch\.threads", r"training\.threads"),
    (r"determinism\.cpu_capability", r"machine\.processor"),
    (r"environment\.torch\.devices", r"machine\.device"),
)
_NEVER = re.compile(
    r"data\.audit|machine\.(load_1min|versions|python)|environment\.implementation"
    r"|determinism\.torch$|environment\.torch\.version"
)


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Settings that differ; those that decide no bit weigh next to nothing."""
    first, second = dict(flat(before["config"])), dict(flat(after["config"]))
    given = {*before.get("given", ()), *after.get("given", ())}
    knows_given = "given" in before and "given" in after
    changes = []
    for key in sorted(first.keys() | second.keys()):
        one, two = first.get(key), second.get(key)
        if one == two:
            continue
        weight = 2
        if _decides(before["config"], key, two):
            weight = next(w for pattern, w in _CONFIG_WEIGHTS if re.match(pattern, key))
        named = any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in given)
        default = knows_given and not named
        why = "neither run gave it: the default has changed" if default else ""
        changes.append(Change("config", key, one, two, weight, why))
    return changes


def surrounding_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Data, environment and hardware that differ; of parts that one record lacks, nothing."""
    changes: list[Change] = []
    for part in ("data", "environment", "machine", "determinism"):
        if not (before.get(part) and after.get(part)):
            continue
        first = dict(flat(before.get(part) or {}, part))
        second = dict(flat(after.get(part) or {}, part))
        changes += [
            _weighed(key, first.get(key), second.get(key))
            for key in sorted(first.keys() | second.keys())
            if first.get(key) != second.get(key) and not _NEVER.match(key)
        ]
    return changes


def following(changes: list[Change]) -> list[Change]:
    """The changes, with what follows from another one marked as such; the heaviest first."""
    found = []
    for change in changes:
        cause = next(
            (
                other.what
                for child, parent in _FOLLOWS
                if re.match(child, change.what)
                for other in changes
                if other is not change and re.match(parent, other.what) and other.weight > NOISE
            ),
            None,
        )
        if cause:
            change = replace(change, weight=1, why=f"follows from {cause}")
        found.append(change)
    return sorted(found, key=lambda one: (-one.weight, one.area, one.what))


def weight_of_file(path: str) -> int:
    """How likely a change of a file is to matter, by its name."""
    parts = path.lower().split("/")
    if parts[-1].endswith(_DOCUMENTS) or {"docs", "tests", "test"} & {*parts[:-1]}:
        return 4
    if parts[-1].startswith("test_") or "." not in parts[-1]:
        return 4
    return 30 if parts[-1].endswith(_SETTINGS) else 75


def lost_code(code: Mapping[str, Any]) -> dict[str, str]:
    """What a checkout's record lacks of its code, with the reasons; documents and keys are none."""
    return {
        path: why
        for path, why in code.get("left_out", {}).items()
        if weight_of_file(path) > NOISE and not is_secret_file(path.rpartition("/")[2])
    }


def _weighed(key: str, before: Any, after: Any) -> Change:
    tables: tuple[tuple[Area, tuple[tuple[str, int, str], ...]], ...] = (
        ("hardware", _HARDWARE_WEIGHTS),
        ("data", _DATA_WEIGHTS),
        ("environment", _ENVIRONMENT_WEIGHTS),
    )
    area, weight, why = next(
        (area, weight, why)
        for area, table in tables
        for pattern, weight, why in table
        if re.match(pattern, key)
    )
    return Change(area, key, before, after, weight, why)


def _decides(config: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a setting belongs to the run's identity: asked of the configuration itself."""
    try:
        changed: Any = RunConfig.from_mapping(dict(config), "before").model_dump(mode="json")
        before = RunConfig.from_mapping(changed, "before").hash()
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        section[name] = value
        return RunConfig.from_mapping(changed, "after").hash() != before
    except (TapelineError, KeyError, TypeError):
        return True  # it can't be changed alone, or this version doesn't know it


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; lists count as values, arrays of numbers too."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value
