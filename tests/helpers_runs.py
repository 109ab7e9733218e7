"""Run folders written by hand: a record, lives and losses, without any training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.files import Journal
from tapeline.runs import MetricsJournal, RunFolder
from tapeline.runs.record import given

COMMIT = "a" * 40
CONFIG = {"name": "r", "data": {"store": "/data/market"}, "training": {"steps": 40, "batch": 16}}
CODE: dict[str, Any] = {
    "state": "clean",
    "commit": COMMIT,
    "changed": 0,
    "untracked": 0,
    "problem": None,
    "folder": "/home/someone/project",
    "remote": None,
    "files": {},
    "diff": "",
    "left_out": {},
    "submodules": [],
}
ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "implementation": "CPython",
    "system": {"host": "a", "kernel": "Linux 6.1", "distribution": "Debian 12", "libc": "glibc 2"},
    "packages": {"numpy": "2.1.0", "rich": "14.0", "tapeline": "0.1.0", "torch": "2.13.0"},
    "origins": {},
    "torch": {"version": "2.13.0", "git": "g", "cuda": None, "build": ["GCC"], "threads": 1},
    "blas": "openblas 0.3",
    "driver": "550.54",
    "container": None,
    "variables": {},
    "command": ["tapeline", "train", "run.toml"],
}
MACHINE: dict[str, Any] = {
    "processor": "EPYC",
    "cores": 2,
    "memory_gib": 16.0,
    "device": "cpu",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0"},
    "load_1min": 0.5,
}
DETERMINISM: dict[str, Any] = {
    "deterministic_algorithms": True,
    "threads": 1,
    "torch": "2.13.0",
    "cpu_capability": "AVX512",
    "cuda": None,
    "cudnn": None,
}
CONTRACT = {
    "scope": "across world sizes",
    "text": "bit-exact across world sizes 1–4 on this platform and version",
    "condition": "this platform and version, with threads = 1",
}
DATA: dict[str, Any] = {
    "store": "/data/market/mmap",
    "fingerprint": "f1",
    "sessions": 3,
    "session_names": ["a 2026-01-01 0", "a 2026-01-02 0", "a 2026-01-03 0"],
    "rows": 900,
    "training_windows": 500,
    "validation_windows": 200,
    "training_fingerprint": "t1",
    "normaliser": {"mean": [0.0, 1.0], "std": [1.0, 2.0]},
}


def new_record(*overrides: str, name: str = "r", created: str = "2026-01-01") -> dict[str, Any]:
    """A record of a run on a clean checkout; change it before writing."""
    config = RunConfig.from_mapping({**CONFIG, "name": name}, "test", overrides)
    return copy.deepcopy(
        {
            "format": "tapeline run",
            "version": 1,
            "created": created,
            "config": config.resolved(),
            "config_hash": config.hash(),
            "given": given(config),
            "seeds": {"run": config.seed},
            "data": DATA,
            "sources": {"model.factory": {"file": "/m.py", "sha256": "s1", "package": True}},
            "code": CODE,
            "other_code": [],
            "environment": ENVIRONMENT,
            "machine": MACHINE,
            "contract": CONTRACT,
            "determinism": DETERMINISM,
            "world_size": 1,
        }
    )


def losses_of(seed: int, steps: int = 40) -> list[float]:
    noise = np.random.default_rng(seed).standard_normal(steps)
    return (1 / np.sqrt(np.arange(1, steps + 1)) + 0.01 * noise).tolist()


def write_run(
    folder: Path,
    record: dict[str, Any],
    *,
    losses: list[float] | None = None,
    mse: float = 0.5,
    how: str = "finished",
) -> Path:
    """A run of one life that did all its steps and validated at the end."""
    run = RunFolder(folder, FakeClock())
    run.create(record)
    losses = losses_of(record["config"]["seed"]) if losses is None else losses
    with Journal(run.attempts_path) as journal:
        journal.append({"attempt": 1, "started": "s", "world_size": 1, "from_step": 0})
        if how != "open":
            journal.append({"attempt": 1, "ended": "e", "how": how, "step": len(losses)})
    with MetricsJournal(run.metrics_path(0), 1) as metrics:
        metrics.losses(len(losses), losses)
        figures = {"loss": mse, "mse": mse, "mse_zero": 1.0, "skill": 1 - mse}
        metrics.validation(len(losses), figures)
    return folder


def write_life(folder: Path, number: int, content: dict[str, Any], *, from_step: int) -> None:
    """A later life of a run, with its record."""
    run = RunFolder(folder, FakeClock())
    with Journal(run.attempts_path) as journal:
        journal.append(
            {"attempt": number, "started": "s", "world_size": 1, "from_step": from_step},
            {"attempt": number, "ended": "e", "how": "finished", "step": 40},
        )
    run.attempt_path(number).parent.mkdir(exist_ok=True)
    run.attempt_path(number).write_text(json.dumps({"attempt": number, **content}))
