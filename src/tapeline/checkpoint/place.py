"""Where durable copies lie: a folder of this or another machine, or a prefix behind an fsspec URL.

Covers: whole files by name: put, put once, read, list. Does not cover what they mean.

Credentials and endpoints of a URL come from the environment, as its fsspec backend documents (for
S3: `AWS_PROFILE`, `AWS_ENDPOINT_URL`, …; the packages are those of the `remote` extra).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from tapeline.errors import CheckpointError
from tapeline.files import aside, atomic_open, fsync_folder


class Place(ABC):
    """Files by name, with `/` between the parts."""

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Copy a file there, over what was there; a FileNotFoundError if `source` is gone."""

    @abstractmethod
    def put_once(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all; a FileExistsError if there is one of that name."""

    @abstractmethod
    def opened(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file to read; a FileNotFoundError if there is none."""

    @abstractmethod
    def sizes(self, below: str = "") -> dict[str, int]:
        """Name and bytes of every file, or of those whose name begins with `below` and a `/`."""

    def read(self, name: str) -> bytes:
        """All of a small file; a FileNotFoundError if there is none."""
        with self.opened(name) as stream:
            return stream.read()


class Folder(Place):
    """A folder; what is put there has reached the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def put(self, name: str, source: Path) -> None:
        """Copy aside and rename."""
        with self._told():
            self._make(name)
            with source.open("rb") as original, atomic_open(self._path / name) as copy:
                shutil.copyfileobj(original, copy, 1 << 20)

    def put_once(self, name: str, data: bytes) -> None:
        """Write aside and link: unlike a rename, that fails where something is."""
        with self._told():
            self._make(name)
            path = self._path / name
            written = aside(path)
            try:
                with written.open("xb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                path.hardlink_to(written)
            finally:
                written.unlink(missing_ok=True)
            fsync_folder(path.parent)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """A file to read."""
        with self._told(), (self._path / name).open("rb") as stream:
            yield stream

    def sizes(self, below: str = "") -> dict[str, int]:
        """Walk the folder."""
        with self._told():
            return {
                path.relative_to(self._path).as_posix(): path.stat().st_size
                for path in (self._path / below).rglob("*")
                if path.is_file()
            }

    def _make(self, name: str) -> None:
        folder = (self._path / name).parent
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for made in missing:
            fsync_folder(made.parent)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise _refused(self, error.strerror or str(error)) from error


class Objects(Place):
    """A prefix behind a URL: a put is whole or absent, and durable when it returns."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._fs, self._prefix = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                url,
                expected="a URL that fsspec can open, such as s3://bucket/prefix",
                found=str(error),
                fix="Correct it, or install `pip install 'tapeline[remote]'`",
            ) from None

    def __str__(self) -> str:
        return self._url

    def put(self, name: str, source: Path) -> None:
        """Upload a file, in parts where it is large."""
        with self._told():
            try:
                self._fs.put_file(str(source), self._path(name))
            except FileNotFoundError as error:
                if source.exists():
                    raise _refused(self, "no such bucket or container") from error
                raise

    def put_once(self, name: str, data: bytes) -> None:
        """Put on the condition that nothing is there, which the store checks."""
        with self._told():
            self._fs.pipe_file(self._path(name), data, mode="create")

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """An object to read, past any listing kept from before."""
        with self._told():
            self._fs.invalidate_cache()
            with self._fs.open(self._path(name), "rb") as stream:
                yield stream

    def sizes(self, below: str = "") -> dict[str, int]:
        """List the prefix, past any listing kept from before."""
        with self._told():
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.find(self._path(below).rstrip("/"), detail=True)
            start = len(self._prefix) + 1
            return {path[start:]: int(info["size"]) for path, info in found.items()}

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError, CheckpointError):
            raise
        except Exception as error:  # every backend has exceptions of its own
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _refused(self, f"{type(error).__name__}: {said}") from error


def place_at(root: str | Path) -> Place:
    """The place of a path or URL."""
    text = str(root)
    return Objects(text.rstrip("/")) if "://" in text else Folder(Path(text).absolute())


def _refused(place: Place, found: str) -> CheckpointError:
    return CheckpointError(
        place,
        expected="a place for durable copies that can be read and written",
        found=found,
        fix="Check the address, the room, the permissions and the network",
    )
