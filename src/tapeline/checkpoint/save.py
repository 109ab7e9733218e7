"""From a state to a committed folder.

Covers: one process that writes all of a state, before it returns. Does not cover which folder,
how many are kept, nor doing it in the background (`checkpointer`).
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.commit import Content, is_foreign, write_commit
from tapeline.checkpoint.encoding import Layout, encode
from tapeline.checkpoint.manifest import METRIC, About, Manifest
from tapeline.checkpoint.state import State, capture_state
from tapeline.clock import SystemClock
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, canonical_json, make_folder


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sampler: Any,
    step: int,
) -> Path:
    """Save a training run between two steps into the folder `path`.

    Saving to the same path again replaces the older checkpoint; at each instant one of the two
    can be loaded. The states of all random generators are saved too.

    Args:
        path: a new or empty folder, or one that holds a checkpoint.
        model: parameters and buffers are saved.
        optimizer: or None.
        sampler: anything with `state()` and `set_state()`, or None.
        step: optimiser steps completed.

    Raises:
        CheckpointError: a part can't be saved, the folder holds something else, or the disk is
            full or fails; an older checkpoint at `path` stays as it was.
    """
    return save_state(path, capture_state(model, optimizer, step=step, sampler=sampler))


def save_state(
    path: str | Path,
    state: State,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Commit a state to the folder `path`; see `save_checkpoint`.

    Args:
        path: a new or empty folder, or one that holds a checkpoint.
        state: it must not change meanwhile: its tensors are those of the live objects.
        metadata: what the checkpoint belongs to (run, config hash, code, data), as JSON.
    """
    about = About(state.step, SystemClock().wall_ns(), metadata_of(metadata or {}))
    commit_source(path, encode(state, Layout.of(state)), about)
    return Path(path).absolute()


def metadata_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest holds of `given`: a metric that isn't finite is none, so it is never best.

    Raises:
        CheckpointError: JSON can't hold it.
    """
    metric = given.get(METRIC)
    if isinstance(metric, float) and not math.isfinite(metric):
        given = {**given, METRIC: None}
    try:
        canonical_json(given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "metadata",
            expected="what JSON can hold",
            found=str(error),
            fix="Leave it out, or turn it into finite numbers and text",
        ) from None
    return dict(given)


def commit_source(path: str | Path, source: Content, about: About) -> Manifest:
    """Commit the bytes of a state's file to the folder `path`; see `save_checkpoint`."""
    folder = Path(path).absolute()
    with disk_errors_told(folder):
        prepare(folder)
        manifest = write_commit(folder, {"rank-0.safetensors": source}, about)
        sweep(folder)
    return manifest


def prepare(folder: Path) -> None:
    """See that a checkpoint can be committed as `folder`, and that there is a folder above it.

    Raises:
        CheckpointError: something else is there.
        OSError: the disk is full or fails.
    """
    if folder.exists() and not folder.is_dir():
        raise _occupied(folder, "a file")
    if not folder.is_dir():
        make_folder(folder.parent)
    elif is_foreign(folder):
        raise _occupied(folder, "a folder with other files")


@contextlib.contextmanager
def disk_errors_told(folder: Path) -> Iterator[None]:
    """Raise what the operating system refuses as a `CheckpointError` about `folder`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            folder,
            expected="room and permission to write a checkpoint",
            found=error.strerror or str(error),
            fix="Make room or choose another folder; earlier checkpoints are as they were",
        ) from error


def sweep(folder: Path) -> None:
    """Delete what saves to this path left beside it when they died."""
    for leftover in folder.parent.iterdir():
        if leftover.name.startswith(f"{ASIDE}{folder.name}."):
            shutil.rmtree(leftover, ignore_errors=True)


def _occupied(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        folder,
        expected="a new folder, an empty one, or one that holds a checkpoint",
        found=found,
        fix="Choose another path",
    )
