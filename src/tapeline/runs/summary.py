"""A run in one flat look: what is listed, filtered and sorted of it. Reads its plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tapeline.config import RunConfig
from tapeline.errors import TapelineError
from tapeline.ledger import account_of
from tapeline.runs.folder import RunFolder
from tapeline.runs.history import read_metrics
from tapeline.runs.metrics import without_nan

_LAST_STEPS = 50


def summary(path: Path) -> dict[str, Any]:
    """What a run was and came to, as JSON can hold it; a damaged one says so under `problem`.

    `how` is how its last life ended; "open" where no end is recorded: it runs, or was killed.
    `family` is equal for runs that differ in their seed alone. Figures that aren't finite are
    text ("nan", "inf"): they are there, and no number.
    """
    run = RunFolder(path)
    found: dict[str, Any] = {"path": str(path), "problem": None}
    try:
        record = run.record()
        found |= _of_record(record)
        found |= _of_lives(run)
        found |= _of_metrics(run)
        found["family"] = family(record)
    except TapelineError as error:
        found["problem"] = str(error)
    return found | _of_ledger(path)


def family(record: dict[str, Any]) -> str | None:
    """A hash of everything that decides a run but its seed; None for another version's record."""
    try:
        config = RunConfig.from_mapping(record["config"], "run.json")
    except TapelineError:
        return None
    data = record.get("data", {})
    same = config.model_copy(update={"seed": 0}).hash()
    return f"{same[:32]} {data.get('fingerprint')} {data.get('training_fingerprint')}"


def _of_record(record: dict[str, Any]) -> dict[str, Any]:
    config, code, data = record["config"], record.get("code", {}), record.get("data", {})
    machine, contract = record.get("machine", {}), record.get("contract", {})
    return {
        "name": config.get("name"),
        "created": record.get("created"),
        "seed": config.get("seed"),
        "steps": config.get("training", {}).get("steps"),
        "config": config,
        "config_hash": record.get("config_hash"),
        "commit": code.get("commit"),
        "code": code.get("state"),
        "data": {
            key: data.get(key)
            for key in ("store", "fingerprint", "rows", "sessions", "training_windows")
        },
        "torch": machine.get("versions", {}).get("torch"),
        "processor": machine.get("processor"),
        "device": machine.get("device"),
        "contract": contract.get("scope"),
    }


def _of_lives(run: RunFolder) -> dict[str, Any]:
    lives = run.attempts()
    last = lives[-1] if lives else {}
    return {
        "attempts": len(lives),
        "how": last.get("how", "open") if lives else "not begun",
        "ended": last.get("ended"),
        "host": last.get("host"),
        "world_size": last.get("world_size"),
    }


def _of_metrics(run: RunFolder) -> dict[str, Any]:
    snapshot = read_metrics(run.metrics_path(0)).snapshot
    loss = snapshot["loss"]
    validation, best = {}, None
    for name, series in snapshot.series.items():
        kind, _, key = name.partition("validation/")
        if not kind and len(series):
            validation[key] = without_nan(float(series.values[-1]))
            if key == "loss" and np.isfinite(series.values).any():
                best = float(np.nanmin(series.values))
    return {
        "step": int(loss.steps[-1]) if len(loss) else 0,
        "loss": without_nan(float(loss.values[-_LAST_STEPS:].mean())) if len(loss) else None,
        "validation": validation,
        "best_validation": best,
    }


def _of_ledger(path: Path) -> dict[str, Any]:
    if not (path / "ledger").is_dir():
        return {"goodput": None, "wall_s": None}
    try:
        account = account_of(path)
    except TapelineError:
        return {"goodput": None, "wall_s": None}
    return {"goodput": account.goodput, "wall_s": account.job.wall_ns / 1e9}
