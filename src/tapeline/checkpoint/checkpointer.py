"""The checkpoints of one run: a folder of `step-<number>` folders.

Covers: saving with the last few kept, finding the newest one that verifies, and an account of
what was skipped and why. Does not cover two processes that save into one folder at a time.

The highest step decides which is newest, never a modification time or the order of names.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.checkpoint.commit import Manifest, check_metadata, read_manifest, verify
from tapeline.checkpoint.load import load_state
from tapeline.checkpoint.retain import steps_to_delete
from tapeline.checkpoint.save import disk_errors_told, save_state
from tapeline.checkpoint.state import State
from tapeline.clock import Clock, SystemClock
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, aside

_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was not used."""

    path: Path
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


class Checkpointer:
    """Saves and finds the checkpoints of one run.

    Args:
        folder: made at the first save.
        keep: how many verified checkpoints stay.
        metadata: what they belong to, stored in each manifest: run, config hash, code, data
            fingerprint.
        clock: where the times of the saves are read.

    Raises:
        CheckpointError: `keep` is below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        metadata: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(
                "keep", expected="at least 1", found=str(keep), fix="Keep one checkpoint or more"
            )
        self.folder = Path(folder)
        self._keep = keep
        self._metadata = dict(metadata or {})
        self._clock = clock or SystemClock()
        self._verified: set[int] = set()

    def save(self, state: State) -> Path:
        """Commit a state as `step-<number>`, then delete what is no longer to be kept.

        A repeated step, as after a resume, replaces the older commit in one instant. Nothing is
        deleted before the new checkpoint has been read back and verified.

        Raises:
            CheckpointError: a later step that verifies is here already, the disk is full or
                fails, or what was written doesn't read back. Earlier checkpoints stay.
        """
        path = self.folder / f"step-{state.step:08d}"
        later = [step for step in self._steps() if step > state.step and self._verifies(step)]
        if later:
            raise CheckpointError(
                path,
                expected="a step beyond every checkpoint of the run",
                found=f"step {max(later)} here already",
                fix="Resume from the newest checkpoint, or save into another folder",
            )
        self._verified.discard(state.step)
        save_state(path, state, metadata=self._metadata, clock=self._clock)
        self._check(state.step)
        with disk_errors_told(path):
            self._clean_up()
        return path

    def newest(self) -> Newest:
        """The newest checkpoint whose every byte verifies, and the newer ones passed over."""
        skipped = []
        for step in self._steps():
            try:
                self._check(step)
            except CheckpointError as error:
                skipped.append(Skipped(self._path(step), str(error)))
            else:
                return Newest(self._path(step), tuple(skipped))
        return Newest(None, tuple(skipped))

    def load(self, *, expect: Mapping[str, Any] | None = None) -> Loaded:
        """The state of the newest checkpoint that verifies; damaged newer ones are passed over.

        Args:
            expect: metadata that its manifest must hold. A difference is not passed over: an
                older checkpoint of the folder would hide that the newest is of another run.

        Raises:
            CheckpointError: there is none, none verifies, or the metadata differs.
        """
        skipped = []
        for step in self._steps():
            path = self._path(step)
            try:
                manifest = self._manifest(step)
                state = load_state(path)
            except CheckpointError as error:
                skipped.append(Skipped(path, str(error)))
                continue
            check_metadata(path, manifest, expect or {})
            self._verified.add(step)
            return Loaded(state, path, tuple(skipped))
        raise CheckpointError(
            self.folder,
            expected="a checkpoint that verifies",
            found=f"{len(skipped)} that don't, the newest: {skipped[0].reason}"
            if skipped
            else "no checkpoint",
            fix="Start the run from its beginning in another folder",
        )

    def entries(self) -> list[Entry]:
        """The committed checkpoints, newest first; those without a readable manifest are left out.

        Nothing but the manifests is read: `newest` verifies.
        """
        found = []
        for step in self._steps():
            try:
                manifest = self._manifest(step)
            except CheckpointError:
                continue
            found.append(
                Entry(
                    step,
                    self._path(step),
                    manifest.total_bytes,
                    manifest.created_ns,
                    manifest.metadata,
                )
            )
        return found

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """Steps that have a folder, the highest first, whatever is in it."""
        if not self.folder.is_dir():
            return []
        matches = [_STEP_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        steps = {int(match[1]) for match in matches if match}
        return sorted((step for step in steps if self._path(step).is_dir()), reverse=True)

    def _manifest(self, step: int) -> Manifest:
        manifest = read_manifest(self._path(step))
        if manifest.step != step:
            raise CheckpointError(
                self._path(step),
                expected=f"step {step}, as the folder's name says",
                found=f"step {manifest.step} in the manifest",
                fix="Rename the folder to its own step",
            )
        return manifest

    def _check(self, step: int) -> None:
        self._manifest(step)
        verify(self._path(step))
        self._verified.add(step)

    def _verifies(self, step: int) -> bool:
        if step not in self._verified:
            try:
                self._check(step)
            except CheckpointError:
                return False
        return True

    def _clean_up(self) -> None:
        """Delete older checkpoints by retention, and what dead saves and deletions left behind."""
        steps = self._steps()
        verified = [step for step in steps if self._verifies(step)]
        others = [step for step in steps if step not in verified]
        for step in steps_to_delete(verified, others, keep=self._keep):
            # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
            self._path(step).rename(aside(self._path(step)))
            self._verified.discard(step)
        for leftover in self.folder.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
