"""The commit protocol: a folder of data files is a commit once its manifest is there.

Covers: writing data files and then the manifest that names them with size and hash, replacing a
commit by a newer one in the same folder, and reading back with every byte checked. Does not
cover what the files hold, nor two writers in one folder at a time.

    write data files under names that nothing uses → fsync each → fsync the folder
    → write manifest.json aside → fsync → rename over the old one → fsync the folder
    → delete the data files that no manifest names any more

At each instant the folder holds the old commit whole or the new one whole.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, atomic_write, canonical_json, fsync_folder, xxh3_file

MANIFEST = "manifest.json"
_FORMAT: Final = "tapeline checkpoint"
_VERSION: Final = 1
_SELF_HASH = "manifest_xxh3_128"
# Also the only names that are ever deleted from a commit's folder, beside what is `.aside-`.
_DATA_NAME = re.compile(r"rank-\d+(\.\d+)?\.(safetensors|json)")
_USE_ANOTHER = "Use another checkpoint"


class FileEntry(BaseModel):
    """What a manifest says about one data file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    xxh3_128: str


class Manifest(BaseModel):
    """What a commit consists of and what it belongs to."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["tapeline checkpoint"] = _FORMAT
    version: Literal[1] = _VERSION
    step: Annotated[int, Field(ge=0)]
    created_ns: int
    files: dict[str, FileEntry]
    metadata: dict[str, Any]

    def render(self) -> str:
        """The text of `manifest.json`: the fields and a hash over them."""
        fields = self.model_dump()
        fields[_SELF_HASH] = _hash_of(fields)
        return _text_of(fields)

    @property
    def total_bytes(self) -> int:
        """Size of all data files."""
        return sum(entry.bytes for entry in self.files.values())


def write_commit(
    folder: Path,
    files: Mapping[str, Iterable[bytes | memoryview]],
    *,
    step: int,
    created_ns: int,
    metadata: Mapping[str, Any],
) -> Manifest:
    """Commit `files` (name to chunks) in an existing folder, in place of what it held.

    Names are `rank-<number>.<safetensors or json>`; where a file of that name exists already, a
    number is put into all of them, so that no committed byte is ever written to.

    Raises:
        OSError: the disk is full or fails. What was committed before is untouched.
    """
    taken = {file.name for file in folder.iterdir()}
    stored_names = _unused(list(files), taken)
    try:
        entries = {
            stored: _write_file(folder / stored, chunks)
            for stored, chunks in zip(stored_names, files.values(), strict=True)
        }
        fsync_folder(folder)
        manifest = Manifest(
            step=step, created_ns=created_ns, files=entries, metadata=dict(metadata)
        )
        atomic_write(folder / MANIFEST, manifest.render())
    finally:
        _delete_unnamed(folder)
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
    raw = _read(path, "a manifest", missing="none: the save was not finished")
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise _damaged(path, "JSON", f"what can't be parsed ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise _damaged(path, f'"format": "{_FORMAT}"', "something else")
    if fields.get("version") != _VERSION:
        raise CheckpointError(
            path,
            expected=f"version {_VERSION}",
            found=f"version {fields.get('version')}",
            fix="Read it with the release of tapeline that wrote it",
        )
    claimed = fields.pop(_SELF_HASH, None)
    try:
        actual = _hash_of(fields)
    except ValueError as error:  # a digit that became an `e` can make a number infinite
        raise _damaged(path, "finite numbers", f"what can't be written again ({error})") from error
    # The text is compared, hash and all: JSON leaves room for bytes that don't change the fields.
    if _text_of({**fields, _SELF_HASH: actual}).encode() != raw:
        raise _damaged(path, f"content with hash {claimed}", f"hash {actual} or stray bytes")
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"a valid {place}", first["msg"]) from error
    for name in manifest.files:
        if not _DATA_NAME.fullmatch(name):
            raise _damaged(path, "names of data files in this folder", repr(name))
    return manifest


def read_file(folder: Path, name: str, entry: FileEntry) -> bytes:
    """One data file of a commit, read once: the bytes that were checked are those returned.

    Raises:
        CheckpointError: the file is missing, cut short or changed.
    """
    path = folder / name
    data = _read(path, f"a file of {entry.bytes:,} bytes", missing="nothing")
    _check_file(path, entry, len(data), xxhash.xxh3_128_hexdigest(data))
    return data


def verify(folder: Path) -> Manifest:
    """Check every byte of a commit against its manifest, in bounded memory.

    Raises:
        CheckpointError: the first thing that is missing, cut short, changed or unreadable.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            digest = xxh3_file(path)
        except OSError as error:
            raise _unreadable(path, f"a file of {entry.bytes:,} bytes", error) from error
        _check_file(path, entry, size, digest)
    return manifest


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


def _unused(names: list[str], taken: set[str]) -> list[str]:
    for number in itertools.count(1):
        stored = [f"{n}.{number}.{s}" if number > 1 else f"{n}.{s}" for n, s in _split(names)]
        if taken.isdisjoint(stored):
            return stored
    raise AssertionError("unreachable: the count doesn't end")


def _split(names: list[str]) -> list[tuple[str, str]]:
    return [(Path(name).stem, Path(name).suffix[1:]) for name in names]


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


def _delete_unnamed(folder: Path) -> None:
    """Delete what the manifest now in place doesn't name; without a readable one, nothing."""
    try:
        named = read_manifest(folder).files
    except CheckpointError:
        return
    for file in folder.iterdir():
        left_over = _DATA_NAME.fullmatch(file.name) or file.name.startswith(ASIDE)
        if left_over and file.name not in named:
            file.unlink()


def _read(path: Path, expected: str, *, missing: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(path, expected=expected, found=missing, fix=_USE_ANOTHER) from error
    except OSError as error:
        raise _unreadable(path, expected, error) from error


def _check_file(path: Path, entry: FileEntry, size: int, digest: str) -> None:
    if size != entry.bytes:
        raise _damaged(path, f"{entry.bytes:,} bytes", f"{size:,}")
    if digest != entry.xxh3_128:
        raise _damaged(path, f"content with xxh3-128 {entry.xxh3_128}", digest)


def _unreadable(path: Path, expected: str, error: OSError) -> CheckpointError:
    found = "nothing" if isinstance(error, FileNotFoundError) else f"an error ({error.strerror})"
    return CheckpointError(path, expected=expected, found=found, fix=_USE_ANOTHER)


def _damaged(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        path, expected=expected, found=found, fix=f"It is damaged. {_USE_ANOTHER}"
    )


def _hash_of(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(fields).encode())


def _text_of(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True, allow_nan=False) + "\n"
