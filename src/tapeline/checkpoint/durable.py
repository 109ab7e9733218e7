"""The durable tier: copies of committed checkpoints that outlive the machine.

Covers: copying a commit to a path or an object store, verifying it there, fetching it back, tags,
and deleting copies by a rule. Does not cover which checkpoints to copy, nor copying behind the
loop (`drain`).

    <root>/step-00001000/<the files of the commit>   put first
    <root>/step-00001000/durable.json                the marker: put last, and only once
    <root>/tags/<tag>.json                           a name for a copy, put only once

Without its marker there is no copy: an object store can't rename, so a copy that was cut short is
recognised by what it lacks. The marker holds the sha256 of every file and the commit's metadata
(configuration, code, data). A copy is never overwritten: where a crash made a run save a step
again, the same content is no news and other content is an error.

Copies stay for ever, unless a rule says how many do. Then too the newest, the best and the tagged
stay, and nothing goes before the newest was read back. The marker goes first, so that a deletion
that is cut short leaves no damaged copy behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from tapeline.checkpoint.commit import MANIFEST, STEP_FOLDER, read_manifest, step_folder, verify
from tapeline.checkpoint.manifest import METRIC
from tapeline.checkpoint.place import place_at
from tapeline.checkpoint.retain import Held, Retention, to_delete
from tapeline.checkpoint.tags import Tags
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, atomic_folder, sha256_json

MARKER = "durable.json"
_FORMAT: Final = "tapeline durable copy"
_SELF_HASH = "marker_sha256"
_CHUNK_BYTES = 1 << 20


class FileCopy(BaseModel):
    """What a marker says about one file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Marker(BaseModel):
    """What a durable copy consists of and what it belongs to."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["tapeline durable copy"] = _FORMAT
    version: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    files: dict[str, FileCopy]
    metadata: dict[str, Any]

    @property
    def content_sha256(self) -> str:
        """Over the data alone: a state saved again has another manifest, of another time."""
        hashes = sorted(file.sha256 for name, file in self.files.items() if name != MANIFEST)
        return sha256_json(hashes)

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    def render(self) -> bytes:
        """The text of `durable.json`: the fields and a hash over them."""
        fields = self.model_dump()
        fields[_SELF_HASH] = sha256_json(fields)
        return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


class DurableTier:
    """Copies of the checkpoints of one run.

    Args:
        root: a path, or a URL that fsspec knows, such as `s3://bucket/runs/name`.
        keep: the rule for the copies that stay; None: all of them.

    Raises:
        CheckpointError: nothing can open such a URL. Every method: the place can't be reached,
            read or written.
    """

    def __init__(self, root: str | Path, keep: Retention | None = None) -> None:
        self._place = place_at(root)
        self._tags = Tags(self._place)
        self._keep = keep
        self._damaged: set[int] = set()
        self._copied: set[int] = set()
        self._first = math.inf

    def resumed_from(self, step: int) -> None:
        """Note that the run goes on from here: later copies that are there were passed over.

        They push nothing out, until their steps are done and copied again.
        """
        self._first = step
        self._copied.clear()

    def copy(self, folder: Path) -> Marker:
        """Copy a committed checkpoint; a copy that is there already, of equal content, stays.

        That the files arrived is seen by their sizes; `verify` reads them back.

        Raises:
            CheckpointError: the checkpoint is damaged or goes meanwhile, a file didn't arrive
                whole, or the copy that is there has other content (both hashes are told).
        """
        marker = self._put(_describe(folder), folder)
        self._copied.add(marker.step)
        return marker

    def marker(self, step: int) -> Marker:
        """What the copy of a step consists of; its files have not been read.

        Raises:
            CheckpointError: there is no copy of the step, or its marker is damaged.
        """
        marker = self._marker(step)
        if marker is None:
            raise CheckpointError(
                f"{self._place}/{step_folder(step)}/{MARKER}",
                expected="a marker",
                found="none: the step was not copied, or not to its end",
                fix="Use another step",
            )
        return marker

    def place(self, step: int) -> str:
        """Where the copy of a step lies, or would."""
        return f"{self._place}/{step_folder(step)}"

    def steps(self) -> list[int]:
        """The steps that have a marker, the highest first."""
        return _marked(self._place.sizes())

    def verify(self, step: int) -> Marker:
        """Read every byte of a copy and check it.

        Raises:
            CheckpointError: the first thing that is missing, cut short or changed.
        """
        marker = self.marker(step)
        for name in marker.files:
            for _ in self._checked(marker, name):
                pass
        return marker

    def fetch(self, step: int, folder: Path) -> Path:
        """Bring a copy back as the committed checkpoint it was, checked by both hashes.

        Args:
            step: which.
            folder: new or empty; appears only when all of it is there.

        Raises:
            CheckpointError: the copy is damaged; `folder` is occupied, or its disk fails.
        """
        marker = self.marker(step)
        try:
            with atomic_folder(folder) as fresh:
                for name in marker.files:
                    with (fresh / name).open("xb") as stream:
                        stream.writelines(self._checked(marker, name))
                verify(fresh)
        except OSError as error:
            raise CheckpointError(
                folder,
                expected="a new or empty folder, and room in it",
                found=error.strerror or "other files",
                fix="Choose another folder",
            ) from error
        return folder

    def tag(self, step: int, tag: str) -> None:
        """Give a copy a name for ever.

        Raises:
            CheckpointError: there is no copy of the step, the tag is no plain name, or it is of
                another copy.
        """
        self._tags.check(tag)
        self._tags.add(tag, {"step": step, "content_sha256": self.marker(step).content_sha256})
        self.marker(step)  # a run may have deleted it between the two

    def tags(self) -> dict[str, int]:
        """Every tag with the step of its copy."""
        return self._tags.steps()

    def held(self) -> list[Held]:
        """What a retention rule weighs; markers are read, and no other byte."""
        tags = self.tags()
        found = []
        for step in self.steps():
            names = frozenset(tag for tag, tagged in tags.items() if tagged == step)
            try:
                metric = self.marker(step).metadata.get(METRIC)
            except CheckpointError:
                found.append(Held(step, verified=False, tags=names))
                continue
            counts = step <= self._first or step in self._copied
            found.append(Held(step, counts and step not in self._damaged, metric, names))
        return found

    def retire(self) -> list[int]:
        """Delete the copies that the rule doesn't keep; returns their steps.

        Raises:
            CheckpointError: the newest copy doesn't read back as it was; nothing was deleted, and
                from then on it doesn't count.
        """
        if self._keep is None:
            return []
        held = self.held()
        steps = to_delete(held, self._keep)
        if steps:
            newest = max(one.step for one in held if one.verified)
            try:
                self.verify(newest)
            except CheckpointError:
                self._damaged.add(newest)
                raise
        for step in steps:
            name = step_folder(step)
            self._place.remove([f"{name}/{MARKER}"])
            self._place.remove(self._place.sizes(name))
        return steps

    def sweep(self, local: Path) -> None:
        """Delete what copies and deletions that were cut short have left behind.

        That is what has no marker, is older than the newest copy and not in flight: a copy in
        flight, of whatever process, is of a checkpoint that is still in `local`.
        """
        here = {path.name for path in local.iterdir()}
        names = list(self._place.sizes())
        steps = _marked(self._place.sizes())  # later: what was completed meanwhile counts

        def is_stray(name: str) -> bool:
            folder, _, file = name.rpartition("/")
            match = STEP_FOLDER.fullmatch(folder)
            if not match or folder in here or int(match[1]) >= max(steps, default=0):
                return False
            return int(match[1]) not in steps or file.startswith(ASIDE)

        self._place.remove([name for name in names if is_stray(name)])

    def _put(self, marker: Marker, folder: Path) -> Marker:
        name = step_folder(marker.step)
        if (there := self._existing(marker)) is not None:
            return there
        for file in marker.files:
            try:
                self._place.put(f"{name}/{file}", folder / file)
            except FileNotFoundError:
                raise CheckpointError(
                    folder / file,
                    expected="a checkpoint that stays while it is copied",
                    found="nothing: it was deleted meanwhile",
                    fix="Keep checkpoints from being deleted before they are copied",
                ) from None
        arrived = self._place.sizes(name)
        for file, entry in marker.files.items():
            if arrived.get(f"{name}/{file}") != entry.bytes:
                raise CheckpointError(
                    f"{self._place}/{name}/{file}",
                    expected=f"{entry.bytes:,} bytes",
                    found=f"{arrived.get(f'{name}/{file}', 0):,} after the copy",
                    fix="Copy it again",
                )
        try:
            self._place.put_once(f"{name}/{MARKER}", marker.render())
        except FileExistsError:  # somebody copied at the same time
            there = self._existing(marker)
            assert there is not None, "what was just there is the newest or not old"
            return there
        return marker

    def _marker(self, step: int) -> Marker | None:
        """The marker of a step, itself checked byte by byte; None if there is none."""
        name = f"{step_folder(step)}/{MARKER}"
        try:
            raw = self._place.read(name)
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(raw)
            fields.pop(_SELF_HASH)
            marker = Marker.model_validate(fields)
            intact = marker.render() == raw and marker.step == step
        except (ValueError, KeyError, AttributeError, TypeError):
            intact = False
        if not intact:
            raise CheckpointError(
                f"{self._place}/{name}",
                expected=f"the marker of step {step} as it was written",
                found="other bytes",
                fix="It is damaged. Use another step",
            )
        return marker

    def _existing(self, marker: Marker) -> Marker | None:
        there = self._marker(marker.step)
        if there is None:
            return None
        if there.content_sha256 != marker.content_sha256:
            raise CheckpointError(
                f"{self._place}/{step_folder(marker.step)}",
                expected=f"content with sha256 {marker.content_sha256}, or no copy of the step",
                found=there.content_sha256,
                fix="Copy to another root: a durable copy is never overwritten",
            )
        return there

    def _checked(self, marker: Marker, file: str) -> Iterator[bytes]:
        """The bytes of a file of a copy; raises at its end if they are not what was copied."""
        name = f"{step_folder(marker.step)}/{file}"
        entry = marker.files[file]
        digest = hashlib.sha256()
        size = 0
        try:
            with self._place.opened(name) as stream:
                for chunk in _chunks(stream):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
        except FileNotFoundError:
            size = -1
        if (size, digest.hexdigest()) != (entry.bytes, entry.sha256):
            found = f"{size:,} bytes with {digest.hexdigest()}" if size >= 0 else "nothing"
            raise CheckpointError(
                f"{self._place}/{name}",
                expected=f"{entry.bytes:,} bytes with sha256 {entry.sha256}",
                found=found,
                fix="It is damaged. Use another step",
            )


def _describe(folder: Path) -> Marker:
    """The marker of a commit; each data file is read once and checked against its manifest."""
    manifest = read_manifest(folder)
    files = {}
    for name in (*manifest.files, MANIFEST):
        sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_128(), 0
        with contextlib.suppress(FileNotFoundError), (folder / name).open("rb") as stream:
            for chunk in _chunks(stream):
                sha256.update(chunk)
                xxh3.update(chunk)
                size += len(chunk)
        entry = manifest.files.get(name)
        if entry is not None and (size, xxh3.hexdigest()) != (entry.bytes, entry.xxh3_128):
            raise CheckpointError(
                folder / name,
                expected=f"{entry.bytes:,} bytes with xxh3-128 {entry.xxh3_128}",
                found=f"{size:,} with {xxh3.hexdigest()}",
                fix="It is damaged, and was not copied. Copy another checkpoint",
            )
        files[name] = FileCopy(bytes=size, sha256=sha256.hexdigest())
    return Marker(step=manifest.step, files=files, metadata=manifest.metadata)


def _marked(names: Iterable[str]) -> list[int]:
    """The steps that have a marker among these files, the highest first."""
    split = [name.split("/") for name in names]
    matches = [STEP_FOLDER.fullmatch(name[0]) for name in split if name[1:] == [MARKER]]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk
