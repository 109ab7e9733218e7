"""The checkpoints of one run: a folder of `step-<number>` folders.

Covers: saving in the loop or behind it with the last few kept, finding the newest one that
verifies, and an account of what was skipped and why. Does not cover two processes that save into
one folder at a time.

A small state is written while the loop waits: that costs less than any detour. A larger one is
copied while the loop waits, then written, flushed, committed, read back and followed by the
deletion of older ones in a thread.

The highest step decides which is newest, never a modification time or the order of names.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tapeline.checkpoint.background import Background
from tapeline.checkpoint.commit import Manifest, Source, check_metadata, read_manifest, verify
from tapeline.checkpoint.direct import LARGE_BYTES
from tapeline.checkpoint.encoding import Layout, encode
from tapeline.checkpoint.load import load_state
from tapeline.checkpoint.retain import steps_to_delete
from tapeline.checkpoint.save import commit_source, disk_errors_told
from tapeline.checkpoint.snapshot import Image, Snapshot
from tapeline.checkpoint.state import State
from tapeline.checkpoint.stats import Counters, SaveStats
from tapeline.clock import Clock, SystemClock
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, aside

_STEP_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(rf"{re.escape(ASIDE)}step-(\d{{8,}})\.")


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

    Use it in a `with` statement, or call `close`: a write in flight is finished and its failure
    raised. An interpreter that ends finishes it too, but there is nobody left to tell.

    Args:
        folder: made at the first save.
        keep: how many verified checkpoints stay.
        metadata: what they belong to, stored in each manifest: run, config hash, code, data
            fingerprint.
        clock: where the times of the saves are read.
        when_busy: what a save does that finds one in flight, "wait" or "skip".
        background_from_bytes: states of this size or more are written in the background.

    Raises:
        CheckpointError: `keep` is below 1, or `when_busy` is neither.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        metadata: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        background_from_bytes: int = LARGE_BYTES,
    ) -> None:
        if keep < 1:
            raise CheckpointError(
                "keep", expected="at least 1", found=str(keep), fix="Keep one checkpoint or more"
            )
        if when_busy not in ("wait", "skip"):
            raise CheckpointError(
                "when_busy",
                expected='"wait" or "skip"',
                found=repr(when_busy),
                fix="Choose one of the two",
            )
        self.folder = Path(folder)
        self._keep = keep
        self._metadata = dict(metadata or {})
        self._clock = clock or SystemClock()
        self._when_busy = when_busy
        self._background_from_bytes = background_from_bytes
        self._verified: set[int] = set()
        self._snapshot = Snapshot()
        self._write = Background("checkpoint write")
        self._deletion = Background("checkpoint deletion")
        self._counters = Counters()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:  # must not hide what ended the block
            error.add_note(f"A checkpoint could not be written either: {failure}")

    def save(self, state: State) -> Path | None:
        """Commit a state as `step-<number>`, then delete what is no longer to be kept.

        Returns once the state is committed, or, from `background_from_bytes` on, once it is
        copied: it may then change. Where the copy doesn't fit into memory, a warning says so and
        the save is done before it returns. A repeated step, as after a resume, replaces the older
        commit in one instant. Nothing is deleted before the new one was read back and verified.

        Returns:
            The folder; None for a save that was skipped.

        Raises:
            CheckpointError: the save before failed in the background; or a later step that
                verifies is here already, the disk is full or fails, or what was written doesn't
                read back. Earlier checkpoints stay.
        """
        with self._blocked():
            self.check()
            if self._write.busy:
                if self._when_busy == "skip":
                    self._counters.add(skips=1)
                    return None
                self._counters.add(waits=1)
            self._finish()
            self._write.raise_failure()
            self._refuse_going_back(state.step)
            layout = Layout.of(state)
            if layout.num_bytes < self._background_from_bytes or not self._has_room(layout):
                leftovers = self._commit(state.step, encode(state, layout))
                if leftovers:  # freeing blocks can take longer than the save
                    self._deletion.start(lambda: _delete(leftovers))
            else:
                image = self._snapshot.take(state, layout)
                step, started_ns = state.step, self._clock.monotonic_ns()

                def write() -> None:
                    try:
                        _delete(self._commit(step, image))
                        self._counters.add(background_saves=1)
                    finally:
                        self._counters.add(background_s=self._seconds_since(started_ns))

                self._write.start(write)
        return self._path(state.step)

    def check(self) -> None:
        """Raise the failure of a save in the background, once; to be called between two steps.

        Raises:
            CheckpointError: it failed. The checkpoints before it stay, and saving can go on.
        """
        if not self._write.busy:
            self._write.raise_failure()

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            CheckpointError: as in `check`.
        """
        with self._blocked():
            self._finish()
            self._write.raise_failure()

    def close(self) -> None:
        """Finish what is in flight and give back the memory for copies.

        Raises:
            CheckpointError: as in `check`.
        """
        try:
            self.wait()
        finally:
            self._snapshot.release()

    def stats(self) -> SaveStats:
        """What the saves came to so far."""
        return self._counters.stats()

    def newest(self) -> Newest:
        """The newest checkpoint whose every byte verifies, and the newer ones passed over."""
        self._finish()
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
        self._finish()
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
        self._finish()
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

    def _refuse_going_back(self, step: int) -> None:
        later = [other for other in self._steps() if other > step and self._verifies(other)]
        if later:
            raise CheckpointError(
                self._path(step),
                expected="a step beyond every checkpoint of the run",
                found=f"step {max(later)} here already",
                fix="Resume from the newest checkpoint, or save into another folder",
            )

    def _has_room(self, layout: Layout) -> bool:
        lacking = self._snapshot.lacks_bytes(layout)
        if lacking:
            warnings.warn(
                f"{self.folder}: a copy of the state takes {layout.num_bytes:,} bytes, "
                f"{lacking:,} more than may be taken; the loop waits for this save.",
                RuntimeWarning,
                stacklevel=3,
            )
        return not lacking

    def _commit(self, step: int, source: Source) -> list[Path]:
        """Write, commit and verify one checkpoint; returns the folders that can be deleted now."""
        self._verified.discard(step)
        manifest = commit_source(
            self._path(step),
            source,
            step=step,
            created_ns=self._clock.wall_ns(),
            metadata=self._metadata,
        )
        self._counters.add(saves=1, bytes_written=manifest.total_bytes)
        if isinstance(source, Image):
            self._check(step)  # it went past the cache, so this asks the disk
        self._verified.add(step)
        with disk_errors_told(self._path(step)):
            return self._retire()

    def _retire(self) -> list[Path]:
        """Rename what is no longer to be kept; returns that and what dead saves left behind.

        Renamed first: a deletion that is cut short must not look like a damaged checkpoint. What
        belongs to a later step than the newest commit may still be in flight.
        """
        steps = self._steps()
        verified = [step for step in steps if self._verifies(step)]
        others = [step for step in steps if step not in verified]
        for step in steps_to_delete(verified, others, keep=self._keep):
            self._path(step).rename(aside(self._path(step)))
            self._verified.discard(step)
        matches = [(path, _LEFTOVER.match(path.name)) for path in self.folder.iterdir()]
        return [path for path, match in matches if match and int(match[1]) <= steps[0]]

    def _finish(self) -> None:
        self._write.wait()
        self._deletion.wait()

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        started_ns = self._clock.monotonic_ns()
        try:
            yield
        finally:
            self._counters.add(blocked_s=self._seconds_since(started_ns))

    def _seconds_since(self, started_ns: int) -> float:
        return (self._clock.monotonic_ns() - started_ns) / 1e9


def _delete(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
