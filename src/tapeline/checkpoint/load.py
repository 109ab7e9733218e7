"""From a committed folder to a state, with every byte checked before it is used.

Covers: checkpoints written by one process or by several ranks, read by any number of either: each
reads its own share, or all. Nothing here unpickles, so a file from elsewhere can be refused but
can't run anything.

What each rank has for itself (the generators, and whatever else differed from rank 0's when it
was saved) goes back to the rank of that number. On another number of ranks, generators that were
equal everywhere are so again, and otherwise a new rank keeps its own; buffers are rank 0's; a
sampler, a scheduler or an extra part that differed can't be restored, which `restore_state` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.assemble import CheckedFile, StoredTensor, assembled
from tapeline.checkpoint.commit import check_metadata, read_file, read_manifest
from tapeline.checkpoint.encoding import Header, body_start, decode
from tapeline.checkpoint.generators import capture_generators
from tapeline.checkpoint.manifest import Manifest, RankEntry
from tapeline.checkpoint.restore import restore_state
from tapeline.checkpoint.state import OF_RANKS, PARTS, RANK_PARTS, State
from tapeline.checkpoint.tree import Flattener, references
from tapeline.errors import CheckpointError
from tapeline.world import World

_ALONE = World()
_GENERATORS = "generators"


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


def load_state(
    path: str | Path,
    *,
    expect: Mapping[str, Any] | None = None,
    like: State | None = None,
    world: World = _ALONE,
) -> State:
    """The state in the folder `path`, on the CPU.

    Args:
        path: the folder of a checkpoint.
        expect: metadata that must stand in the manifest, e.g. `{"data_fingerprint": …}`.
        like: a state captured from the objects that this one is for. Where they hold parts of
            tensors, only these parts are read. Without it, all of every tensor is.
        world: which rank of how many this is.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or its metadata differs.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    check_metadata(folder, manifest, expect or {})
    if len(manifest.files) != 1 and not manifest.ranks:
        raise _not_ours(folder, f"{len(manifest.files)} data files")
    try:
        if manifest.ranks or world.size > 1 or (like and like.shares):
            state = _share(folder, manifest, like, world)
        else:
            state = _whole(folder, manifest)
    except CheckpointError:
        raise
    except (ValueError, KeyError) as error:
        raise _not_ours(folder, str(error)) from error
    if state.values.keys() != PARTS:
        raise _not_ours(folder, f"parts {sorted(state.values)}")
    if state.step != manifest.step:
        raise _not_ours(folder, f"step {state.step} beside {manifest.step} in the manifest")
    return state


def _whole(folder: Path, manifest: Manifest) -> State:
    """All of a file, whose tensors stay views of the one piece of memory it is read into."""
    ((name, entry),) = manifest.files.items()
    return decode(read_file(folder, name, entry))


def _share(folder: Path, manifest: Manifest, like: State | None, world: World) -> State:
    """What one rank needs of a commit."""
    files = {name: CheckedFile(folder / name, entry) for name, entry in manifest.files.items()}
    ranks = manifest.ranks or [RankEntry(file=next(iter(files)), parts=[])]
    values, stored = _stored(files, ranks[0], sorted(PARTS))
    if 0 < world.rank < len(ranks):
        same_world = len(ranks) == world.size
        parts = [p for p in ranks[world.rank].parts if same_world or p == _GENERATORS]
        own_values, own_stored = _stored(files, ranks[world.rank], parts)
        values, stored = {**values, **own_values}, {**stored, **own_stored}
    kept = _for_another_world(values, ranks, world) if len(ranks) != world.size else {}
    split = {name: StoredTensor.of_split(entry) for name, entry in manifest.split.items()}
    needed = {n: split.get(n) or stored[n] for n in references(values) if n not in kept}
    tensors, shares = assembled(needed, files, like.shares if like else {})
    return State({**tensors, **kept}, values, shares)


def _stored(
    files: Mapping[str, CheckedFile], rank: RankEntry, parts: list[str]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The values and the tensors that one rank wrote of some parts of its state."""
    if not parts or rank.file is None:
        return {}, {}
    file = files[rank.file]
    start = body_start(file.read(0, min(8, file.num_bytes)), file.num_bytes)
    header = Header.parse(file.read(8, start - 8), start, file.num_bytes)
    values = {part: header.values[part] for part in parts}
    tensors = {
        name: StoredTensor.whole(extent, rank.file)
        for name, extent in header.extents.items()
        if name.split("/")[0] in parts
    }
    return values, tensors


def _for_another_world(
    values: dict[str, Any], ranks: list[RankEntry], world: World
) -> dict[str, torch.Tensor]:
    """Put into `values` what a rank has of its own where it isn't the rank of the save.

    Returns:
        The tensors that it keeps.
    """
    differing = {part for rank in ranks[1:] for part in rank.parts}
    values |= {part: {OF_RANKS: len(ranks)} for part in RANK_PARTS if part in differing}
    kept = Flattener()
    if world.rank >= len(ranks) and (_GENERATORS in differing or len(ranks) == 1):
        values[_GENERATORS] = kept.flatten(capture_generators(), _GENERATORS)
    return kept.tensors


def _not_ours(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        expected="the content that tapeline writes",
        found=found,
        fix="Use a checkpoint that was saved by tapeline",
    )
