"""From a state to a committed folder.

Covers: one process that writes all of a state, synchronously. Does not cover which folder, nor
how many are kept (`checkpointer`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.commit import is_foreign, write_commit
from tapeline.checkpoint.state import State, capture_state, tensor_bytes
from tapeline.checkpoint.tree import DTYPE_NAMES
from tapeline.clock import Clock, SystemClock
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, atomic_folder, canonical_json, fsync_folder

_ALIGNMENT_BYTES = 8


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
    clock: Clock | None = None,
) -> Path:
    """Commit a state to the folder `path`; see `save_checkpoint`.

    Args:
        path: a new or empty folder, or one that holds a checkpoint.
        state: it must not change meanwhile: its tensors are those of the live objects.
        metadata: what the checkpoint belongs to (run, config hash, code, data), as JSON.
        clock: where the time of the save is read.
    """
    folder = Path(path).absolute()
    files: dict[str, Iterator[bytes | memoryview]] = {
        "rank-0.safetensors": encode_safetensors(state.tensors),
        "rank-0.json": iter([canonical_json(state.values).encode()]),
    }
    about: dict[str, Any] = {
        "step": state.step,
        "created_ns": (clock or SystemClock()).wall_ns(),
        "metadata": metadata or {},
    }
    with disk_errors_told(folder):
        if folder.exists() and not folder.is_dir():
            raise _occupied(folder, "a file")
        if folder.is_dir() and any(folder.iterdir()):
            if is_foreign(folder):
                raise _occupied(folder, "a folder with other files")
            write_commit(folder, files, **about)
        else:
            _make_durably(folder.parent)
            with atomic_folder(folder) as fresh:
                write_commit(fresh, files, **about)
        _sweep(folder)
    return folder


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


def encode_safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in chunks, one per tensor, so that a large state is never held twice.

    The format: https://github.com/huggingface/safetensors#format. An eight-byte length, a JSON
    header padded to eight bytes, and the tensors, widest element first so that each is aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])


def _make_durably(folder: Path) -> None:
    """Make missing folders such that a power cut can't lose them with what is put in them."""
    if not folder.exists():
        _make_durably(folder.parent)
        folder.mkdir()
        fsync_folder(folder.parent)


def _sweep(folder: Path) -> None:
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
