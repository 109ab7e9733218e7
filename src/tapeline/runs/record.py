"""The record of a run and of each of its lives: configuration, code, data, environment, machine.

Taken before the first step, after every override. A secret is never in it: see `secrecy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tapeline.clock import Clock, utc
from tapeline.config import ModelConfig, RunConfig
from tapeline.machine import Machine
from tapeline.runs.checkout import code_elsewhere, code_record, source_of
from tapeline.runs.environment import editable_folders, environment
from tapeline.runs.secrecy import redacted

# What can differ from one life of a run to the next.
SURROUNDINGS = ("code", "other_code", "environment", "machine")


def record(config: RunConfig, data: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """What `run.json` says.

    Args:
        config: after every override.
        data: what the run reads: fingerprint, windows, split, normaliser.
        clock: for the time of the record.
    """
    return {
        "format": "tapeline run",
        "version": 1,
        "created": utc(clock.wall_ns()),
        "config": redacted(config.resolved()),
        "config_hash": config.hash(),
        "given": given(config),
        "seeds": {"run": config.seed},
        "data": redacted(data),
        "sources": _sources(config),
        **surroundings(config.model.folder),
    }


def surroundings(model_folder: str | None = None) -> dict[str, Any]:
    """What can differ from one life of a run to the next, under the names of `SURROUNDINGS`.

    Args:
        model_folder: where the model's module lies, if not in the working folder.
    """
    found = environment()
    code = code_record(Path.cwd())
    folders = {"model": Path(model_folder)} if model_folder else {}
    folders |= editable_folders(found["origins"])
    if "tapeline" in folders:
        folders["tapeline"] = Path(__file__).parent  # a path before the install's may hide it
    return {
        "code": code,
        "other_code": code_elsewhere(folders, code),
        "environment": found,
        "machine": Machine.here().as_dict(),
    }


def given(config: RunConfig) -> list[str]:
    """The settings that a file or an override named; all others are defaults."""
    return sorted(_given(config, ""))


def _given(section: BaseModel, prefix: str) -> list[str]:
    found = []
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found += _given(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def _sources(config: RunConfig) -> dict[str, Any]:
    """The source files of what the configuration names as `module:callable`."""
    model: ModelConfig = config.model
    folder = Path(model.folder) if model.folder else None
    references = {"model.factory": model.factory}
    references |= {
        f"data.augment[{number}]": one.name
        for number, one in enumerate(config.data.augment)
        if ":" in one.name
    }
    return {key: source_of(value, folder) for key, value in references.items()}
