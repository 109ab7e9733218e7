"""From a committed folder to a state, with every byte checked before it is used.

Covers: checkpoints written by one process. Nothing here unpickles, so a file from elsewhere can
be refused but can't run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.commit import check_metadata, read_file, read_manifest
from tapeline.checkpoint.encoding import decode
from tapeline.checkpoint.state import PARTS, State, restore_state
from tapeline.errors import CheckpointError


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sampler: Any,
) -> int:
    """Put the checkpoint in the folder `path` into freshly built objects; continue bitwise.

    Also sets the states of all random generators.

    Returns:
        The number of optimiser steps completed.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or of another model, optimiser or
            set of parts. Nothing has been modified then.
    """
    state = load_state(path)
    restore_state(state, model, optimizer, sampler=sampler, give_up=True)
    return state.step


def load_state(path: str | Path, *, expect: Mapping[str, Any] | None = None) -> State:
    """The state in the folder `path`, on the CPU. Its tensors are views of one piece of memory.

    Args:
        path: the folder of a checkpoint.
        expect: metadata that must stand in the manifest, e.g. `{"data_fingerprint": …}`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or its metadata differs.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    check_metadata(folder, manifest, expect or {})
    if len(manifest.files) != 1:
        raise _not_ours(folder, f"{len(manifest.files)} data files")
    ((name, entry),) = manifest.files.items()
    data = read_file(folder, name, entry)
    try:
        state = decode(data)
    except ValueError as error:
        raise _not_ours(folder / name, str(error)) from error
    if state.values.keys() != PARTS:
        raise _not_ours(folder, f"parts {sorted(state.values)}")
    if state.step != manifest.step:
        raise _not_ours(folder, f"step {state.step} beside {manifest.step} in the manifest")
    return state


def _not_ours(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        expected="the content that tapeline writes",
        found=found,
        fix="Use a checkpoint that was saved by tapeline",
    )
