"""The commit protocol: a folder of data files is a commit once its manifest is there.

Covers: writing data files and the manifest that names them with size and hash, as a new folder
or in place of the commit that a folder holds, and reading back with every byte checked. Does not
cover what the files hold, nor two writers in one folder at a time that don't agree (`joint`).

    a new folder                               in place of a commit
    make a folder aside                        choose data names that nothing uses
    write data and manifest.json into it       write data, and the manifest aside
    flush these and the folder                 flush these and the folder
    rename the folder to its name              rename the manifest over the old one
    flush the folder above                     flush the folder
                                               delete the data that no manifest names any more

At each instant the name leads to the old commit whole or to the new one whole. Why each flush
(fsync) is there: of a file, because a rename may reach the disk before the bytes of what it
names; of the folder, because a flushed file may still lack its name there; of the folder above
(or again), because the rename itself may be lost, and the caller goes on to delete older
checkpoints. Four flushes in all, and none twice: for a small state they are most of the time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import torch
from pydantic import ValidationError

from tapeline.checkpoint.direct import HASHED_BYTES, Hashes, hash_file, read_hashed, write_hashed
from tapeline.checkpoint.manifest import (
    FORMAT,
    SELF_HASH,
    VERSION,
    About,
    FileEntry,
    Manifest,
    text_of,
)
from tapeline.checkpoint.snapshot import Image
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, aside, fsync_path, xxh3_json

MANIFEST = "manifest.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})")  # how the folder of a step's checkpoint is called
# Also the only names that are ever deleted from a commit's folder, beside what is `.aside-`.
_DATA_NAME = re.compile(r"rank-\d+(\.\d+)?\.safetensors")
_USE_ANOTHER = "Use another checkpoint"

Content: TypeAlias = Iterable[bytes | memoryview] | Image  # the content of a data file
T = TypeVar("T")


def write_commit(folder: Path, files: Mapping[str, Content], about: About) -> Manifest:
    """Commit `files` (name to content) as `folder`, in place of what it held.

    Names are `rank-<number>.safetensors`; where a file of that name exists already, a number is
    put into all of them, so that no committed byte is ever written to. The folder above exists.

    Raises:
        OSError: the disk is full or fails. What was committed before is untouched.
    """
    if is_occupied(folder):
        return _replace(folder, files, about)
    fresh = aside(folder)
    try:
        fresh.mkdir()
        manifest = _write_all(fresh, files, MANIFEST, about)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    fsync_path(folder.parent)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a commit, itself checked byte by byte; the data files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged, of another version, or names a file
            outside the folder.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(
            folder,
            expected="a checkpoint folder",
            found="a file" if folder.exists() else "nothing",
            fix="Give the folder of a checkpoint",
        )
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            path,
            expected="a manifest",
            found="none: the save was not finished",
            fix=_USE_ANOTHER,
        ) from error
    except OSError as error:
        raise unreadable(path, "a manifest", error) from error
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise damaged(path, "JSON", f"what can't be parsed ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise damaged(path, f'"format": "{FORMAT}"', "something else")
    if fields.get("version") != VERSION:
        raise CheckpointError(
            path,
            expected=f"version {VERSION}",
            found=f"version {fields.get('version')}",
            fix="Read it with the release of tapeline that wrote it",
        )
    claimed = fields.pop(SELF_HASH, None)
    try:
        actual = xxh3_json(fields)
    except ValueError as error:  # a digit that became an `e` can make a number infinite
        raise damaged(path, "finite numbers", f"what can't be written again ({error})") from error
    # The text is compared, hash and all: JSON leaves room for bytes that don't change the fields.
    if text_of({**fields, SELF_HASH: actual}).encode() != raw:
        raise damaged(path, f"content with hash {claimed}", f"hash {actual} or stray bytes")
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(path, f"a valid {place}", first["msg"]) from error
    for name in manifest.files:
        if not _DATA_NAME.fullmatch(name):
            raise damaged(path, "names of data files in this folder", repr(name))
    return manifest


def read_file(folder: Path, name: str, entry: FileEntry) -> torch.Tensor:
    """One data file of a commit, uint8 [bytes], read once: what was checked is what is returned.

    Raises:
        CheckpointError: the file is missing, cut short or changed.
    """
    return _checked(folder / name, entry, read_hashed)


def verify(folder: Path) -> Manifest:
    """Check every byte of a commit against its manifest, in bounded memory.

    Raises:
        CheckpointError: the first thing that is missing, cut short, changed or unreadable.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        check_file(folder / name, entry)
    return manifest


def check_file(path: Path, entry: FileEntry) -> None:
    """Check every byte of a data file, in bounded memory.

    Raises:
        CheckpointError: it is missing, cut short, changed or unreadable.
    """
    _checked(path, entry, lambda path, size: (None, hash_file(path, size)))


def check_metadata(folder: Path, manifest: Manifest, expect: Mapping[str, Any]) -> None:
    """Refuse a commit whose metadata differs from `expect` in one of the keys given there.

    Raises:
        CheckpointError: both sides of the first difference.
    """
    for key, value in expect.items():
        found = manifest.metadata.get(key)
        if found != value:
            raise CheckpointError(
                f"{folder}, {key}",
                expected=repr(value),
                found=repr(found) if key in manifest.metadata else "none recorded",
                fix="Resume what this checkpoint was made with, or start a run in another folder",
            )


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds something that neither is a commit nor was left behind by one."""
    try:
        read_manifest(folder)
    except CheckpointError:
        names = [file.name for file in folder.iterdir()]
        ours = [n for n in names if n == MANIFEST or n.startswith(ASIDE) or _DATA_NAME.fullmatch(n)]
        return len(ours) < len(names)
    return False


def step_folder(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def is_occupied(folder: Path) -> bool:
    """Whether a commit to `folder` takes the place of something."""
    return folder.is_dir() and any(folder.iterdir())


def unused(folder: Path, names: list[str]) -> list[str]:
    """Names for data files in place of `names`, none of which the folder uses."""
    taken = {file.name for file in folder.iterdir()}
    for number in itertools.count(1):
        stored = [f"{n}.{number}.{s}" if number > 1 else f"{n}.{s}" for n, s in _split(names)]
        if taken.isdisjoint(stored):
            return stored
    raise AssertionError("unreachable: the count doesn't end")


def delete_unnamed(folder: Path) -> None:
    """Delete what the manifest now in place doesn't name; without a readable one, nothing."""
    try:
        named = read_manifest(folder).files
    except CheckpointError:
        return
    for file in folder.iterdir():
        left_over = _DATA_NAME.fullmatch(file.name) or file.name.startswith(ASIDE)
        if left_over and file.name not in named:
            file.unlink()


def put_file(folder: Path, name: str, source: Content) -> FileEntry:
    """Write one data file of a commit by several, and put it and its name on the disk.

    Raises:
        OSError: the disk is full or fails.
        CheckpointError: what was written past the cache doesn't read back.
    """
    path = folder / name
    with path.open("xb") as stream:
        entry = _write_file(stream, source)
        os.fsync(stream.fileno())
    fsync_path(folder)
    if isinstance(source, Image):
        check_file(path, entry)
    return entry


def put_manifest(attempt: Path, folder: Path, manifest: Manifest) -> None:
    """Commit as `folder` what lies in `attempt`: that folder itself, or one to be renamed to it.

    Raises:
        OSError: the disk is full or fails.
    """
    written = aside(folder / MANIFEST) if attempt == folder else attempt / MANIFEST
    with written.open("xb") as stream:
        stream.write(manifest.render().encode())
        stream.flush()
        os.fsync(stream.fileno())
    fsync_path(attempt)
    if attempt == folder:
        written.replace(folder / MANIFEST)
        fsync_path(folder)
        delete_unnamed(folder)
    else:
        attempt.rename(folder)
        fsync_path(folder.parent)


def _replace(folder: Path, files: Mapping[str, Content], about: About) -> Manifest:
    stored = dict(zip(unused(folder, list(files)), files.values(), strict=True))
    written = aside(folder / MANIFEST)
    try:
        manifest = _write_all(folder, stored, written.name, about)
        written.replace(folder / MANIFEST)
        fsync_path(folder)
    finally:
        delete_unnamed(folder)
    return manifest


def _write_all(
    folder: Path, files: Mapping[str, Content], manifest_name: str, about: About
) -> Manifest:
    """Write data files and a manifest, and put all of them and their names on the disk."""
    entries = {}
    # The descriptors that were written to stay open: an error in writing back is told to these.
    with contextlib.ExitStack() as opened:
        streams = []
        for name, source in files.items():
            streams.append(opened.enter_context((folder / name).open("xb")))
            entries[name] = _write_file(streams[-1], source)
        manifest = Manifest(**about._asdict(), files=entries)
        streams.append(opened.enter_context((folder / manifest_name).open("xb")))
        streams[-1].write(manifest.render().encode())
        streams[-1].flush()
        names = os.open(folder, os.O_RDONLY)
        opened.callback(os.close, names)
        for descriptor in (*(stream.fileno() for stream in streams), names):
            os.fsync(descriptor)
    return manifest


def _write_file(stream: IO[bytes], source: Content) -> FileEntry:
    if isinstance(source, Image):
        source.wait()
        hashes = write_hashed(stream.fileno(), source.memory, source.num_bytes)
    else:
        hashes = Hashes()
        for chunk in source:
            stream.write(chunk)
            hashes.update(chunk)
        stream.flush()
    blocks = hashes.blocks()
    return FileEntry(
        bytes=hashes.num_bytes,
        xxh3_128=hashes.whole,
        block_bytes=HASHED_BYTES if blocks else 0,
        blocks_xxh3_128=blocks,
    )


def _split(names: list[str]) -> list[tuple[str, str]]:
    return [(Path(name).stem, Path(name).suffix[1:]) for name in names]


def _checked(path: Path, entry: FileEntry, read: Callable[[Path, int], tuple[T, str]]) -> T:
    expected = f"a file of {entry.bytes:,} bytes"
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise damaged(path, f"{entry.bytes:,} bytes", f"{size:,}")
        content, digest = read(path, size)
    except OSError as error:
        raise unreadable(path, expected, error) from error
    if digest != entry.xxh3_128:
        raise damaged(path, f"content with xxh3-128 {entry.xxh3_128}", digest)
    return content


def unreadable(path: Path, expected: str, error: OSError) -> CheckpointError:
    """The error for what the operating system doesn't give."""
    found = "nothing" if isinstance(error, FileNotFoundError) else f"an error ({error.strerror})"
    return CheckpointError(path, expected=expected, found=found, fix=_USE_ANOTHER)


def damaged(path: Path, expected: str, found: str) -> CheckpointError:
    """The error for what is not as it was written."""
    return CheckpointError(
        path, expected=expected, found=found, fix=f"It is damaged. {_USE_ANOTHER}"
    )
