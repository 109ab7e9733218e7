"""The folder of a run's checkpoints: which are there, which verify, which go.

Covers: reading a folder of `step-<number>` folders, tags, and making room by a retention rule.
Does not cover saving (`checkpointer`), nor which one a run resumes from (`resume`).

The highest step is the newest, never a modification time or the order of names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tapeline.checkpoint.commit import (
    STEP_FOLDER,
    check_metadata,
    read_manifest,
    step_folder,
    verify,
)
from tapeline.checkpoint.load import load_state
from tapeline.checkpoint.manifest import METRIC, Manifest
from tapeline.checkpoint.place import place_at
from tapeline.checkpoint.retain import Held, Retention, to_delete
from tapeline.checkpoint.state import State
from tapeline.checkpoint.tags import Tags
from tapeline.checkpoint.votes import Ranks
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, aside, xxh3_json
from tapeline.world import World

_LEFTOVER = re.compile(rf"{re.escape(ASIDE)}{STEP_FOLDER.pattern}\.")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was not used."""

    path: Path | str
    reason: str


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that verifies, if any, and the newer ones that don't."""

    path: Path | None
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Loaded:
    """The state of the newest checkpoint that verifies, and the newer ones that don't."""

    state: State
    path: Path
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint as its manifest describes it; its data has not been read."""

    step: int
    path: Path
    num_bytes: int
    created_ns: int
    metadata: Mapping[str, Any]


class Shelf:
    """The checkpoints in one folder. What was once verified is not read again.

    Args:
        folder: need not be there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tags = Tags(place_at(folder))
        self._verified: dict[int, Manifest] = {}
        self._given_up: set[int] = set()
        self._lock = threading.Lock()  # a save in the background looks at them too

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        return self.folder / step_folder(step)

    def steps(self) -> list[int]:
        """Steps that have a folder, the highest first, whatever is in it."""
        if not self.folder.is_dir():
            return []
        matches = [STEP_FOLDER.fullmatch(path.name) for path in self.folder.iterdir()]
        steps = {int(match[1]) for match in matches if match}
        return sorted((step for step in steps if self.path(step).is_dir()), reverse=True)

    def manifest(self, step: int) -> Manifest:
        """What a checkpoint says of itself.

        Raises:
            CheckpointError: it can't be read, or is of another step.
        """
        manifest = read_manifest(self.path(step))
        if manifest.step != step:
            raise CheckpointError(
                self.path(step),
                expected=f"step {step}, as the folder's name says",
                found=f"step {manifest.step} in the manifest",
                fix="Rename the folder to its own step",
            )
        return manifest

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint and check it.

        Raises:
            CheckpointError: the first thing that is wrong.
        """
        manifest = self.manifest(step)
        verify(self.path(step))
        with self._lock:
            self._verified[step] = manifest

    def trust(self, manifest: Manifest) -> None:
        """Take a checkpoint as verified, and no longer as given up: it was just written."""
        with self._lock:
            self._verified[manifest.step] = manifest
            self._given_up.discard(manifest.step)

    def doubt(self, step: int) -> None:
        """Take a checkpoint as unread: it is about to be replaced."""
        with self._lock:
            self._verified.pop(step, None)

    def give_up_beyond(self, step: int) -> None:
        """Let the later checkpoints count as damaged ones do: the run goes on from `step`.

        They don't stand in the way of saves, and push nothing out.
        """
        with self._lock:
            self._given_up = {other for other in self.steps() if other > step}

    def verifies(self, step: int) -> bool:
        """Whether a checkpoint was not given up and every byte of it is right."""
        if step in self._given_up:
            return False
        if step not in self._verified:
            try:
                self.verify(step)
            except CheckpointError:
                return False
        return True

    def newest(self) -> Newest:
        """The newest checkpoint whose every byte verifies, and the newer ones passed over."""
        skipped = []
        for step in self.steps():
            try:
                self.verify(step)
            except CheckpointError as error:
                skipped.append(Skipped(self.path(step), str(error)))
            else:
                return Newest(self.path(step), tuple(skipped))
        return Newest(None, tuple(skipped))

    def load_step(
        self, step: int, *, like: State | None = None, ranks: Ranks | None = None
    ) -> State:
        """The state of one checkpoint, every byte of it checked; `like` as in `load_state`.

        Each rank reads for itself: whether all could is for the caller to agree.

        Raises:
            CheckpointError: it is damaged.
        """
        manifest = self.manifest(step)
        world = World(ranks.rank, ranks.size) if ranks else World()
        state = load_state(self.path(step), like=like, world=world)
        if not manifest.ranks and world.size == 1 and not state.shares:  # all of it was read
            with self._lock:
                self._verified[step] = manifest
        return state

    def load(
        self, expect: Mapping[str, Any], *, like: State | None = None, ranks: Ranks | None = None
    ) -> Loaded:
        """The state of the newest checkpoint that every rank can read; newer ones passed over.

        Raises:
            CheckpointError: there is none, none verifies, or the metadata differs from `expect`.
        """
        ranks = ranks or Ranks.alone()
        seen = ranks.loop.gather(self.steps())
        skipped: list[Skipped] = []
        for step in sorted(set().union(*seen), reverse=True):
            path = self.path(step)
            found: list[tuple[State, Manifest]] = []
            poll = ranks.loop.poll(partial(self._read, step, like, ranks, found))
            if poll.failure:
                skipped.append(Skipped(path, str(poll.failure)))
            elif len(set(poll.answers)) > 1:
                skipped.append(Skipped(path, f"{path}: the ranks see different checkpoints."))
            else:
                ((state, manifest),) = found
                ranks.loop.vote(partial(check_metadata, path, manifest, expect))
                return Loaded(state, path, tuple(skipped))
        raise nothing_usable(self.folder, skipped)

    def _read(
        self,
        step: int,
        like: State | None,
        ranks: Ranks,
        found: list[tuple[State, Manifest]],
    ) -> str:
        """Read a checkpoint into `found`; returns what must be equal on all ranks."""
        manifest = self.manifest(step)
        found.append((self.load_step(step, like=like, ranks=ranks), manifest))
        return xxh3_json(manifest.model_dump())

    def entries(self) -> list[Entry]:
        """The committed checkpoints, newest first; those without a readable manifest left out."""
        found = []
        for step in self.steps():
            try:
                manifest = self.manifest(step)
            except CheckpointError:
                continue
            found.append(
                Entry(
                    step,
                    self.path(step),
                    manifest.total_bytes,
                    manifest.created_ns,
                    manifest.metadata,
                )
            )
        return found

    def tag(self, step: int, tag: str) -> None:
        """Give a checkpoint a name; it stays for ever from then on.

        Raises:
            CheckpointError: there is none of that step, the tag is no plain name, or is another
                one's.
        """
        self._tags.check(tag)
        self.manifest(step)
        self._tags.add(tag, {"step": step})
        self.manifest(step)  # a run may have deleted it between the two

    def tags(self) -> dict[str, int]:
        """Every tag with its step."""
        return self._tags.steps()

    def held(self) -> list[Held]:
        """What a retention rule weighs: every checkpoint is verified for it."""
        tags = self.tags()
        found = []
        for step in self.steps():
            verified = self.verifies(step)
            names = frozenset(tag for tag, tagged in tags.items() if tagged == step)
            metric = self._verified[step].metadata.get(METRIC) if verified else None
            found.append(Held(step, verified=verified, metric=metric, tags=names))
        return found

    def retire(self, retention: Retention, in_use: Collection[Path] = ()) -> list[Path]:
        """Rename what is no longer to be kept; returns that and what dead saves left behind.

        Renamed first: a deletion that is cut short must not look like a damaged checkpoint. What
        belongs to a later step than the newest one may still be in flight.
        """
        held = self.held()
        for step in to_delete(held, retention):
            if self.path(step) not in in_use:
                self.path(step).rename(aside(self.path(step)))
                self.doubt(step)
        newest = max(one.step for one in held)
        matches = [(path, _LEFTOVER.match(path.name)) for path in self.folder.iterdir()]
        return [path for path, match in matches if match and int(match[1]) <= newest]


def nothing_usable(folder: Path, skipped: Collection[Skipped]) -> CheckpointError:
    """The error for checkpoints of which none can be used, the newest first."""
    newest = next(iter(skipped), None)
    return CheckpointError(
        folder,
        expected="a checkpoint that verifies",
        found=f"{len(skipped)} that don't, the newest: {newest.reason}"
        if newest
        else "no checkpoint",
        fix="Start the run from its beginning in another folder",
    )
