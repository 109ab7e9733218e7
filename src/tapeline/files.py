"""Files that are whole or absent.

Covers: writing a file or a folder aside and renaming it into place, journals of JSON lines that
survive a torn last line, and hashing. Does not cover what the bytes mean.

The order in `atomic_write` (write, flush, fsync, rename, fsync of the folder) is the one that
survives a power cut: a rename may otherwise reach the disk before the bytes it names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from tapeline.errors import RunError

ASIDE = ".aside-"  # marks what is still being written; never a part of anything whole
_CHUNK_BYTES = 1 << 20


def fsync_path(path: Path) -> None:
    """Put a file's bytes on the disk, or a folder's names (new, renamed and deleted ones)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder such that a power cut can't lose it with what is put in it.

    Returns:
        What was missing of it and of those above it, the lowest first.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync_path(path.parent)
    return missing


def aside(path: Path) -> Path:
    """A fresh name beside `path`, marked as unfinished."""
    return path.with_name(f"{ASIDE}{path.name}.{uuid.uuid4().hex[:12]}")


def meant(path: str) -> str:
    """The path that a name made by `aside` stands for; another path as it is."""
    return re.sub(rf"{re.escape(ASIDE)}(.+?)\.[0-9a-f]{{12}}", r"\1", path)


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears at `path` only when the block ends without an error."""
    temporary = aside(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name(error, path)
        raise
    fsync_path(path.parent)


def _name(error: BaseException, path: Path) -> None:
    """Say what was written when an error arose: the system names no file of one that is open."""
    if isinstance(error, OSError) and error.errno and error.filename is None:
        error.filename = str(path)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, whole or not at all."""
    with atomic_open(path) as stream:
        stream.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `path` only when the block ends without an error.

    With `replace`, what was at `path` is moved aside first and deleted afterwards, so a crash
    between the two renames leaves it whole under a name that starts with `.aside-`.

    Raises:
        FileExistsError: `path` exists and is not empty, and `replace` is off.
    """
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not replace:
        raise FileExistsError(str(path))
    missing = [folder for folder in path.parents if not folder.exists()]
    temporary, old = aside(path), aside(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in sorted(temporary.rglob("*")):
            fsync_path(file)
        fsync_path(temporary)
        if occupied:
            path.rename(old)
        temporary.rename(path)
        for folder in [path, *missing]:
            fsync_path(folder.parent)
    except BaseException as error:
        _name(error, path)
        if old.exists():  # give back what was there
            if path.exists():
                path.rename(temporary)
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # one that is no longer empty belongs to someone else
            for folder in missing:
                folder.rmdir()
        raise
    if old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys and no spaces: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def xxh3_json(value: Any) -> str:
    """The xxh3-128 of `value` as canonical JSON, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value).encode())


def sha256_json(value: Any) -> str:
    """The sha256 of `value` as canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def finite_json(value: Any) -> Any:
    """A value as JSON can hold it: a number that isn't finite is None, and keys are text."""
    if isinstance(value, dict):
        return {str(key): finite_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def xxh3_file(path: Path) -> str:
    """The xxh3-128 of a file, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _cut_torn_tail(stream: IO[bytes]) -> None:
    """Cut what follows the last newline: the start of a line that a crash left behind."""
    size = stream.seek(0, os.SEEK_END)
    keep = size
    while keep > 0:
        start = max(0, keep - _CHUNK_BYTES)
        stream.seek(start)
        newline = stream.read(keep - start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < size:
        stream.truncate(keep)


class Journal:
    """An append-only file of JSON lines, one record a line.

    Opening cuts a torn last line before anything is appended: the next record would otherwise
    be joined to it and both be lost. Records reach the file at `flush`, the disk at `sync`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        fsync_path(path.parent)  # a synced record is lost if the name of its file is
        self._stream = path.open("r+b")
        _cut_torn_tail(self._stream)
        self._stream.seek(0, os.SEEK_END)

    def append(self, *records: dict[str, Any]) -> None:
        """Add records; they are buffered until `flush`, `sync` or `close`."""
        for record in records:
            self._stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Hand the buffered records to the operating system: they survive the process."""
        self._stream.flush()

    def sync(self) -> None:
        """Put the records on the disk: they survive the machine."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records of a journal; a torn last line is left out, a missing file is empty.

    Raises:
        RunError: a whole line is not JSON: no crash leaves that behind.
    """
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
            records.append(record)
        except ValueError:
            raise RunError(
                f"{path}, line {number}",
                expected="a record in JSON",
                found=repr(line[:40].decode(errors="replace")),
                fix="Restore the file from a copy, or delete that line",
            ) from None
    return records


def tail_records(path: Path, most_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The whole records in the last bytes of a journal: cheap, however long the journal is.

    A missing file is empty. A torn last line is left out, and so is what is no record.
    """
    try:
        with path.open("rb") as stream:
            start = stream.seek(max(0, stream.seek(0, os.SEEK_END) - most_bytes))
            lines = stream.read().split(b"\n")[1 if start else 0 : -1]
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
