"""Where durable copies lie: a folder of this or another machine, or a prefix behind an fsspec URL.

Covers: what copies need beyond a store's place: putting a file that is on this disk, putting once,
reading in pieces, and errors that speak of copies. Listing and deleting are the store's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tapeline.errors import CheckpointError, StoreError
from tapeline.files import aside, atomic_open, fsync_path, make_folder
from tapeline.store import place as store


class Place(ABC):
    """Files by name, with `/` between the parts."""

    def __init__(self, files: store.Place) -> None:
        self._files = files

    def __str__(self) -> str:
        return str(self._files)

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Copy a file there, over what was there; a FileNotFoundError if `source` is gone."""

    @abstractmethod
    def put_once(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all; a FileExistsError if there is one of that name."""

    @abstractmethod
    def opened(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file to read; a FileNotFoundError if there is none."""

    def read(self, name: str) -> bytes:
        """All of a small file; a FileNotFoundError if there is none."""
        with self.opened(name) as stream:
            return stream.read()

    def sizes(self, below: str = "") -> dict[str, int]:
        """Name and bytes of every file, or of those whose name begins with `below` and a `/`."""
        with self._told():
            return self._files.sizes(below)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; those that are gone already don't matter."""
        with self._told():
            self._files.remove(names)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError, CheckpointError):
            raise
        except StoreError as error:
            raise self._refused(error.found) from error
        except OSError as error:
            raise self._refused(error.strerror or store.said_by(error)) from error
        except Exception as error:  # every backend has exceptions of its own
            raise self._refused(store.said_by(error)) from error

    def _refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            self,
            expected="a place for durable copies that can be read and written",
            found=found,
            fix="Check the address, the room, the permissions and the network",
        )


class Folder(Place):
    """A folder; what is put there has reached the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(store.Folder(path))
        self._path = path

    def put(self, name: str, source: Path) -> None:
        """Copy aside and rename."""
        with self._told():
            make_folder((self._path / name).parent)
            with source.open("rb") as original, atomic_open(self._path / name) as copy:
                shutil.copyfileobj(original, copy, 1 << 20)

    def put_once(self, name: str, data: bytes) -> None:
        """Write aside and link: unlike a rename, that fails where something is."""
        with self._told():
            make_folder((self._path / name).parent)
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
            fsync_path(path.parent)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """A file to read."""
        with self._told(), (self._path / name).open("rb") as stream:
            yield stream


class Objects(Place):
    """A prefix behind a URL: a put is whole or absent, and durable when it returns."""

    def __init__(self, url: str) -> None:
        try:
            self._remote = store.Remote(url)
        except StoreError as error:
            raise CheckpointError(
                url,
                expected="a URL that fsspec can open, such as s3://bucket/prefix",
                found=error.found,
                fix='Correct it, or `pip install "tapeline[remote]"`',
            ) from None
        super().__init__(self._remote)

    def put(self, name: str, source: Path) -> None:
        """Upload a file, in parts where it is large."""
        with self._told():
            try:
                self._remote.fs.put_file(str(source), self._remote.path(name))
            except FileNotFoundError as error:
                if source.exists():
                    raise self._refused("no such bucket or container") from error
                raise

    def put_once(self, name: str, data: bytes) -> None:
        """Put on the condition that nothing is there, which the store checks."""
        with self._told():
            self._remote.fs.pipe_file(self._remote.path(name), data, mode="create")

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        """An object to read, past any listing kept from before."""
        with self._told():
            self._remote.fs.invalidate_cache()
            with self._remote.fs.open(self._remote.path(name), "rb") as stream:
                yield stream


def place_at(root: str | Path) -> Place:
    """The place of a path or URL."""
    text = str(root)
    return Objects(text.rstrip("/")) if store.is_url(text) else Folder(Path(text).absolute())
