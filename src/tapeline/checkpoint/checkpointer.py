"""The checkpoints of one run: a folder of `step-<number>` folders.

Covers: saving in the loop or behind it with the last few kept, finding the newest one that
verifies, and an account of what was skipped and why. Does not cover processes that save into one
folder at a time without agreeing (`ranks`).

A small state is written while the loop waits: that costs less than any detour. A larger one is
copied while the loop waits, then written, flushed, committed, read back and followed by the
deletion of older ones in a thread.

The highest step decides which is newest, never a modification time or the order of names.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tapeline.checkpoint.background import Background
from tapeline.checkpoint.commit import Content
from tapeline.checkpoint.direct import LARGE_BYTES
from tapeline.checkpoint.drain import Drain
from tapeline.checkpoint.encoding import Layout, encode
from tapeline.checkpoint.joint import Division, commit_together
from tapeline.checkpoint.manifest import About, Manifest
from tapeline.checkpoint.retain import Retention
from tapeline.checkpoint.save import commit_source, disk_errors_told, metadata_of
from tapeline.checkpoint.shelf import Entry, Loaded, Newest, Shelf
from tapeline.checkpoint.snapshot import Image, Snapshot
from tapeline.checkpoint.state import State
from tapeline.checkpoint.stats import Counters, SaveStats
from tapeline.checkpoint.votes import Ranks
from tapeline.clock import Clock, SystemClock
from tapeline.errors import CheckpointError


class Checkpointer:
    """Saves and finds the checkpoints of one run.

    Use it in a `with` statement, or call `close`: a write in flight is finished and its failure
    raised. An interpreter that ends finishes it too, but there is nobody left to tell.

    Args:
        folder: made at the first save.
        keep: how many verified checkpoints stay, or the rule for them. "Best" compares the
            `metric` in their metadata.
        metadata: what they belong to, stored in each manifest: run, config hash, code, data
            fingerprint.
        clock: where the times of the saves are read.
        when_busy: what a save does that finds one in flight, "wait" or "skip".
        background_from_bytes: states of this size or more are written in the background.
        drain: where saves that ask for it are copied on to; what waits there is not deleted.
        ranks: those that save together, each what it holds, into a folder that all share. Every
            rank then calls `save`, `check`, `wait`, `load` and `close` at the same places, and
            they succeed or raise on all alike.

    Raises:
        CheckpointError: `keep` is below 1, or `when_busy` is neither.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | Retention = 3,
        metadata: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        background_from_bytes: int = LARGE_BYTES,
        drain: Drain | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if isinstance(keep, int) and keep < 1:
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
        self._shelf = Shelf(self.folder)
        self._retention = Retention(last=keep) if isinstance(keep, int) else keep
        self._metadata = dict(metadata or {})
        self._clock = clock or SystemClock()
        self._when_busy = when_busy
        self._background_from_bytes = background_from_bytes
        self._drain = drain
        self._ranks = ranks or Ranks.alone()
        self._division = Division(self._ranks)
        self._in_flight = False  # agreed by the ranks, while each thread ends at its own time
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

    @property
    def busy(self) -> bool:
        """Whether a save is being written in the background; equal on all ranks."""
        return self._in_flight if self._ranks.size > 1 else self._write.busy

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        return self._shelf.path(step)

    def resumed_from(self, step: int) -> None:
        """Note that the run goes on from here: later checkpoints were passed over.

        They no longer stand in the way of saves, and none is kept for their sake.
        """
        self._shelf.give_up_beyond(step)

    def save(
        self,
        state: State,
        *,
        metadata: Mapping[str, Any] | None = None,
        durable: bool = False,
    ) -> Path | None:
        """Commit a state as `step-<number>`, then delete what is no longer to be kept.

        Returns once the state is committed, or, from `background_from_bytes` on, once it is
        copied: it may then change. Where the copy doesn't fit into memory, a warning says so and
        the save is done before it returns. A repeated step, as after a resume, replaces the older
        commit in one instant. Nothing is deleted before the new one was read back and verified.

        Args:
            state: what to save.
            metadata: of this save, beside what all have. A `metric` that isn't finite is none.
            durable: hand it to the drain once it is committed.

        Returns:
            The folder; None for a save that was skipped.

        Raises:
            CheckpointError: the save before failed in the background; or a later step that
                verifies is here already, the disk is full or fails, or what was written doesn't
                read back. Earlier checkpoints stay.
        """
        with self._blocked():
            self.check()
            if self.busy:
                if self._when_busy == "skip":
                    self._counters.add(skips=1)
                    return None
                self._counters.add(waits=1)
            self._finish()
            self._in_flight = False
            self._write.raise_failure()
            part = self._part_of(state)
            layout = Layout.of(part)
            told = metadata_of({**self._metadata, **(metadata or {})})
            about = About(state.step, self._clock.wall_ns(), told)

            def commit(source: Content) -> list[Path]:
                return self._commit(part, layout, source, about, durable)

            if self._goes_behind(layout):
                self._write_behind(part, layout, commit)
            else:
                leftovers = commit(encode(part, layout))
                if leftovers:  # freeing blocks can take longer than the save
                    self._deletion.start(lambda: _delete(leftovers))
        return self._shelf.path(state.step)

    def check(self) -> None:
        """Raise the failure of a save in the background, once; to be called between two steps.

        Among ranks it takes a vote while one is in flight, so that all raise after the same step.

        Raises:
            CheckpointError: it failed. The checkpoints before it stay, and saving can go on.
        """
        if self._in_flight:
            self._in_flight = any(self._ranks.loop.gather(self._write.busy))
        if not self.busy:
            self._write.raise_failure()

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            CheckpointError: as in `check`.
        """
        with self._blocked():
            self._finish()
            self._in_flight = False
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
        return self._shelf.newest()

    def load(self, *, expect: Mapping[str, Any] | None = None, like: State | None = None) -> Loaded:
        """The state of the newest checkpoint that verifies; damaged newer ones are passed over.

        All ranks take the same one: the newest of which every rank can read what it needs.

        Args:
            expect: metadata that its manifest must hold. A difference is not passed over: an
                older checkpoint of the folder would hide that the newest is of another run.
            like: a state captured from the objects that this one is for. Where they hold parts
                of tensors, only these parts are read, whatever the number of ranks was that
                saved. Without it, each rank reads all.

        Raises:
            CheckpointError: there is none, none verifies, or the metadata differs.
        """
        self._finish()
        self._in_flight = False
        return self._shelf.load(expect or {}, like=like, ranks=self._ranks)

    def entries(self) -> list[Entry]:
        """The committed checkpoints, newest first; those without a readable manifest are left out.

        Nothing but the manifests is read: `newest` verifies.
        """
        self._finish()
        return self._shelf.entries()

    def _part_of(self, state: State) -> State:
        """What this process writes of a state."""

        def refuse_going_back() -> None:
            if self._ranks.rank == 0:
                self._refuse_going_back(state.step)

        if self._ranks.size > 1:
            return self._division.part_of(state, refuse_going_back)
        refuse_going_back()
        return state

    def _refuse_going_back(self, step: int) -> None:
        shelf = self._shelf
        later = [other for other in shelf.steps() if other > step and shelf.verifies(other)]
        if later:
            raise CheckpointError(
                shelf.path(step),
                expected="a step beyond every checkpoint of the run",
                found=f"step {max(later)} here already",
                fix="Resume from the newest checkpoint, or save into another folder",
            )

    def _goes_behind(self, layout: Layout) -> bool:
        """Whether the save is written in the background, on all ranks alike."""
        gather = self._ranks.loop.gather
        large = any(gather(layout.num_bytes >= self._background_from_bytes))
        return large and all(gather(self._has_room(layout)))

    def _write_behind(
        self, part: State, layout: Layout, commit: Callable[[Content], list[Path]]
    ) -> None:
        images: list[Image] = []
        self._ranks.loop.vote(lambda: images.append(self._snapshot.take(part, layout)))
        started_ns = self._clock.monotonic_ns()

        def write() -> None:
            try:
                _delete(commit(images.pop()))
                self._counters.add(background_saves=1)
            finally:
                self._counters.add(background_s=self._seconds_since(started_ns))

        self._in_flight = self._ranks.size > 1
        self._write.start(write)

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

    def _commit(
        self, part: State, layout: Layout, source: Content, about: About, durable: bool
    ) -> list[Path]:
        """Write, commit and verify one checkpoint; returns the folders that can be deleted now."""
        shelf, path = self._shelf, self._shelf.path(about.step)
        shelf.doubt(about.step)
        leftovers: list[Path] = []

        def settle(manifest: Manifest) -> None:
            shelf.trust(manifest)
            if self._drain and durable:
                self._drain.submit(path)
            with disk_errors_told(path):
                in_use = self._drain.pending if self._drain else ()
                leftovers.extend(shelf.retire(self._retention, in_use))

        if self._ranks.size > 1:
            written = commit_together(self._ranks, path, part, layout, source, about, settle)
            self._counters.add(saves=1, bytes_written=written)
            return leftovers
        manifest = commit_source(path, source, about)
        self._counters.add(saves=1, bytes_written=manifest.total_bytes)
        if isinstance(source, Image):
            shelf.verify(about.step)  # it went past the cache, so this asks the disk
        settle(manifest)
        return leftovers

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
