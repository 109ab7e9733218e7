"""One commit by several ranks: who writes what, all at once, and the manifest last.

Covers: agreeing on each rank's part of a state, and the votes of a commit. Does not cover how
votes travel (`votes`), when to save, nor reading (`load`).

    every rank                                     rank 0 alone
                                                   makes the folder of the attempt
    vote: is it there? what is it called?
    writes, flushes and reads back its own file
    vote: is every part on the disk?
                                                   writes, flushes and renames as in `commit`
    vote: is it committed?

A rank that fails votes so: nothing is committed anywhere, every rank raises an error that names
it, and what was committed before is as it was. The folder has to be one that all ranks share.

Of a tensor that ranks hold parts of, each part is written once, whoever else holds it. The rest
is written by rank 0; another rank adds what differs from it, part by part (`RankEntry`). A state
without such tensors is a replica (lanes, DDP): there rank 0's model and optimiser stand for all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tapeline.checkpoint.commit import (
    Content,
    delete_unnamed,
    is_occupied,
    put_file,
    put_manifest,
    unused,
)
from tapeline.checkpoint.encoding import Layout
from tapeline.checkpoint.manifest import (
    About,
    FileEntry,
    Manifest,
    PieceEntry,
    RankEntry,
    SplitEntry,
)
from tapeline.checkpoint.save import disk_errors_told, prepare, sweep
from tapeline.checkpoint.sharded import Box, Share, owned, tiles
from tapeline.checkpoint.state import PARTS, State, tensor_bytes
from tapeline.checkpoint.tree import DTYPE_NAMES
from tapeline.checkpoint.votes import Ranks
from tapeline.errors import CheckpointError
from tapeline.files import aside, canonical_json, xxh3_json

_REPLICATED = ("model", "optimizer")  # the same on all ranks where no tensor is cut
_BY_RANK = PARTS - {"step"}


class Division:
    """Which part of a state each rank writes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._cuts: list[str] = []  # by rank, a hash of how it holds the tensors
        self._owned: set[str] = set()

    def part_of(self, state: State, refuse: Callable[[], None]) -> State:
        """What this rank writes of a state: a state of some tensors and some parts' values.

        Args:
            state: what this rank holds.
            refuse: raises where the save must not be.

        Raises:
            CheckpointError: on every rank: it is refused on one, the ranks are at different
                steps, or the parts they hold don't make up a tensor.
        """

        def mine() -> dict[str, Any]:
            refuse()
            digests = {part: _digest(state, part) for part in sorted(_BY_RANK)}
            return {"step": state.step, "cut": xxh3_json(_table(state)), "parts": digests}

        answers = self._ranks.loop.vote(mine)
        steps = [answer["step"] for answer in answers]
        if len(set(steps)) > 1:
            raise CheckpointError(
                "save",
                expected="the same step on every rank",
                found=f"steps {', '.join(map(str, steps))}",
                fix="Call save after the same step on every rank",
            )
        cuts = [answer["cut"] for answer in answers]
        if cuts != self._cuts:
            self._divide(state)
            self._cuts = cuts
        first, own = answers[0]["parts"], answers[self._ranks.rank]["parts"]
        parts = {part for part in _BY_RANK if own[part] != first[part]}
        if self._ranks.rank == 0:
            parts = set(PARTS)
        tensors = {
            name: tensor
            for name, tensor in state.tensors.items()
            if (name in self._owned if name in state.shares else name.split("/")[0] in parts)
        }
        shares = {name: state.shares[name] for name in tensors if name in state.shares}
        return State(tensors, {part: state.values[part] for part in sorted(parts)}, shares)

    def _divide(self, state: State) -> None:
        tables = [
            {name: _share(*fields) for name, fields in table.items()}
            for table in self._ranks.loop.gather(_table(state))
        ]
        held: dict[str, set[Share]] = {}
        for table in tables:
            for name, share in table.items():
                held.setdefault(name, set()).add(share)
        for name, shares in held.items():
            shapes = {share.shape for share in shares}
            boxes = [share.box for share in shares if share.box.num_elements]
            if len(shapes) > 1 or not tiles(min(shapes), boxes):
                raise CheckpointError(
                    name,
                    expected="parts on the ranks that make up the tensor",
                    found="; ".join(sorted(map(str, shares))),
                    fix="Give Ranks.joined the ranks that hold the model between them",
                )
        self._owned = owned(tables)[self._ranks.rank]


def commit_together(
    ranks: Ranks,
    path: Path,
    part: State,
    layout: Layout,
    source: Content,
    about: About,
    settle: Callable[[Manifest], None],
) -> int:
    """Commit as `path` what every rank has of a state; all ranks call it at once.

    Args:
        ranks: who takes part.
        path: in a folder that all ranks share.
        part: from `Division.part_of`.
        layout: of its file.
        source: the bytes of that.
        about: the save; rank 0's counts.
        settle: called on rank 0 after the commit; what it raises is told to all.

    Returns:
        How many bytes this rank wrote.

    Raises:
        CheckpointError: a rank failed, which is named, or was lost.
    """
    path = path.absolute()
    at_head = ranks.rank == 0
    attempt_name, *names = ranks.behind.vote(lambda: _begin(path, ranks.size) if at_head else [])[0]
    attempt = path.with_name(attempt_name)

    def write() -> dict[str, Any]:
        if not part.values and not part.tensors:
            return {"file": None, "bytes": 0}
        with disk_errors_told(path):
            entry = put_file(attempt, names[ranks.rank], source)
        return {
            "file": names[ranks.rank],
            "bytes": entry.bytes,
            "entry": entry.model_dump(),
            "parts": sorted(part.values),
            "pieces": _pieces(part, layout),
        }

    def commit() -> None:
        manifest = _manifest(written, about)
        with disk_errors_told(path):
            _check_arrived(attempt, manifest)
            put_manifest(attempt, path, manifest)
            sweep(path)
        settle(manifest)

    try:
        written = ranks.behind.vote(write)
        ranks.behind.vote(lambda: commit() if at_head else None)
    except BaseException:
        if at_head:
            _abandon(attempt, path)
        raise
    return int(written[ranks.rank]["bytes"])


def _begin(path: Path, num_ranks: int) -> list[str]:
    """Make the folder of an attempt; its name, and that of each rank's file in it."""
    names = [f"rank-{rank}.safetensors" for rank in range(num_ranks)]
    with disk_errors_told(path):
        prepare(path)
        if is_occupied(path):
            return [path.name, *unused(path, names)]
        fresh = aside(path)
        fresh.mkdir()
        return [fresh.name, *names]


def _abandon(attempt: Path, path: Path) -> None:
    if attempt != path:
        shutil.rmtree(attempt, ignore_errors=True)
    else:
        delete_unnamed(path)


def _check_arrived(attempt: Path, manifest: Manifest) -> None:
    """See that what the others wrote is here."""
    for name, entry in manifest.files.items():
        size = (attempt / name).stat().st_size if (attempt / name).exists() else None
        if size != entry.bytes:
            raise CheckpointError(
                attempt / name,
                expected=f"a file of {entry.bytes:,} bytes, as its rank wrote it",
                found="nothing" if size is None else f"{size:,} bytes",
                fix="Save into a folder that all ranks share",
            )


def _manifest(written: list[dict[str, Any]], about: About) -> Manifest:
    split: dict[str, dict[str, Any]] = {}
    for one in written:
        for name, (dtype, shape, piece) in one.get("pieces", {}).items():
            entry = split.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            if all(piece["sizes"]):
                entry["pieces"].append(PieceEntry(file=one["file"], **piece))
    return Manifest(
        **about._asdict(),
        files={o["file"]: FileEntry(**o["entry"]) for o in written if o["file"]},
        ranks=[RankEntry(file=one["file"], parts=one.get("parts", [])) for one in written],
        split={name: SplitEntry(**fields) for name, fields in split.items()},
    )


def _pieces(part: State, layout: Layout) -> dict[str, list[Any]]:
    return {
        name: [
            DTYPE_NAMES[part.tensors[name].dtype],
            list(share.shape),
            {
                "start": layout.starts[name],
                "offsets": list(share.box.offsets),
                "sizes": list(share.box.sizes),
            },
        ]
        for name, share in part.shares.items()
    }


def _table(state: State) -> dict[str, list[list[int]]]:
    return {
        name: [list(share.shape), list(share.box.offsets), list(share.box.sizes)]
        for name, share in state.shares.items()
    }


def _share(shape: list[int], offsets: list[int], sizes: list[int]) -> Share:
    return Share(tuple(shape), Box(tuple(offsets), tuple(sizes)))


def _digest(state: State, part: str) -> str:
    """A hash of what a rank holds whole of a part; "" where that can't differ."""
    if part in _REPLICATED and not state.shares:
        return ""
    digest = xxhash.xxh3_128(canonical_json(state.values[part]).encode())
    for name in sorted(state.tensors):
        if name.split("/")[0] == part and name not in state.shares:
            tensor = state.tensors[name]
            digest.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
