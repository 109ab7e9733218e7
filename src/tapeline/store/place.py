"""Where a store's files lie: a folder of this machine, or a prefix behind an fsspec URL.

Covers: reading, listing, writing and deleting files by name, the commit of one file, and the lock
between writers. Does not cover what the files mean. Credentials and endpoints of a URL come from
the environment, as its fsspec backend documents (for S3: `AWS_ACCESS_KEY_ID`, `AWS_PROFILE`,
`AWS_ENDPOINT_URL`, …). A `file://` URL is the folder it names.

An object store can't rename, and has no locks. A store there is committed by the index object,
which is written last, and takes one writer at a time; a second one is found out at its commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tapeline.errors import StoreError
from tapeline.files import ASIDE, atomic_write, fsync_path, make_folder

Root = Path | str
_FILE: Final = "file://"


class Place(ABC):
    """A folder of files, named by their path in it with forward slashes."""

    @abstractmethod
    def read(self, names: list[str]) -> list[bytes]:
        """The bytes of each file; an OSError if one can't be read."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    @abstractmethod
    def sizes(self, below: str = "") -> dict[str, int]:
        """Name and bytes of every file, or of those in the folder `below`; empty without one."""

    @abstractmethod
    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files; a crash may leave a part of them."""

    @abstractmethod
    def sync(self, names: Iterable[str]) -> None:
        """Make files that were written survive the machine."""

    @abstractmethod
    def commit(self, name: str, data: bytes) -> None:
        """Write one file, whole or not at all, over whatever was there."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Delete files; those that are gone already don't matter."""

    @abstractmethod
    def clean(self, keep: Collection[str], prefixes: tuple[str, ...]) -> None:
        """Delete what a killed writer left: files of these prefixes that aren't in `keep`."""

    @abstractmethod
    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold off other writers, where the place can."""

    @abstractmethod
    def check_writable(self) -> None:
        """Refuse a place that can't be made or written to, before anything is read for it.

        Raises:
            StoreError: it says what is in the way.
        """

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder on this machine.

        Raises:
            StoreError: the place is behind a URL.
        """


class Folder(Place):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return self._path

    def read(self, names: list[str]) -> list[bytes]:
        """Read one after the other."""
        return [(self._path / name).read_bytes() for name in names]

    def has(self, name: str) -> bool:
        """Ask the file system."""
        return (self._path / name).is_file()

    def sizes(self, below: str = "") -> dict[str, int]:
        """Walk the folder; what another process deletes meanwhile isn't there.

        Raises:
            OSError: something of it can't be read: to leave that out would be to call it empty.
        """

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        found: dict[str, int] = {}
        for folder, _, names in os.walk(self._path / below, onerror=refuse):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(self._path).as_posix()] = path.stat().st_size
        return found

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write one after the other, with the folders above."""
        for name, data in files.items():
            path = self._path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def sync(self, names: Iterable[str]) -> None:
        """Sync each file, then each folder on the way to it."""
        paths = [self._path / name for name in names]
        for path in paths:
            fsync_path(path)
        on_the_way = {above for path in paths for above in path.parents}
        for above in sorted(on_the_way, reverse=True):
            if above == self._path or self._path in above.parents:
                fsync_path(above)

    def commit(self, name: str, data: bytes) -> None:
        """Write aside and rename."""
        self._path.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path / name, data)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files and the folders that are empty then."""
        for name in names:
            path = self._path / name
            path.unlink(missing_ok=True)
            for above in path.parents:
                if above == self._path:
                    break
                with contextlib.suppress(OSError):
                    above.rmdir()

    def clean(self, keep: Collection[str], prefixes: tuple[str, ...]) -> None:
        """The lock is held: whoever wrote these is gone."""
        leftovers = [name for name in self.sizes() if name not in keep]
        self.remove(name for name in leftovers if name.startswith(prefixes))

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the folder above, which stays when this one is replaced."""
        return locked(self._path.parent)

    def check_writable(self) -> None:
        """Look at the nearest folder above that is there."""
        there = next(path for path in (self._path, *self._path.parents) if path.exists())
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return
        raise StoreError(
            self._path,
            expected="a folder that can be made and written to",
            found=f"no permission to write to {there}" if there.is_dir() else f"a file, {there}",
            fix="Choose another folder, or change its permissions",
        )

    def leftovers(self) -> list[Path]:
        """What killed writers of this folder left aside, if the lock is held."""
        return sorted(self._path.parent.glob(f"{ASIDE}{glob.escape(self._path.name)}.*"))


class Remote(Place):
    """A prefix behind an fsspec URL. Whatever a backend raises becomes a `StoreError`."""

    def __init__(self, url: str) -> None:
        self._url = url
        fsspec = import_extra("fsspec")
        try:
            self.fs, self.prefix = fsspec.url_to_fs(url)
        except ImportError as error:
            raise _missing_extra(str(error)) from None
        except ValueError as error:
            raise StoreError(
                url,
                expected="a URL that fsspec knows, such as s3://bucket/prefix",
                found=str(error),
                fix="Correct the URL, or install the package of its protocol",
            ) from None

    def __str__(self) -> str:
        return self._url

    @property
    def folder(self) -> Path:
        """None: only what is written object by object can lie here."""
        raise StoreError(
            self._url,
            expected="a folder on this machine for this format",
            found="a URL",
            fix="Use the zarr format there",
        )

    def read(self, names: list[str]) -> list[bytes]:
        """Read all at once."""
        with self._told("objects that can be read"):
            found = self.fs.cat_ranges(self._paths(names), None, None, on_error="return")
            for one in found:
                if isinstance(one, Exception):
                    raise one
            return [bytes(one) for one in found]

    def has(self, name: str) -> bool:
        """Ask the backend."""
        with self._told("objects that can be listed"):
            self.fs.invalidate_cache()
            try:  # not `isfile`, which says no when the server is gone
                return bool(self.fs.info(self.path(name))["type"] == "file")
            except FileNotFoundError:
                return False

    def sizes(self, below: str = "") -> dict[str, int]:
        """List the prefix, past any listing kept from before."""
        with self._told("objects that can be listed"):
            self.fs.invalidate_cache()
            try:
                found: dict[str, Any] = self.fs.find(self.path(below).rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            start = len(self.prefix) + 1
            return {path[start:]: int(info["size"]) for path, info in found.items()}

    def write(self, files: Mapping[str, bytes]) -> None:
        """Put all at once."""
        with self._told("a place that can be written to"):
            self.fs.pipe(dict(zip(self._paths(files), files.values(), strict=True)))

    def sync(self, names: Iterable[str]) -> None:
        """An object that is put is durable."""

    def commit(self, name: str, data: bytes) -> None:
        """Put the object: whole or not at all, says the object store."""
        self.write({name: data})

    def remove(self, names: Iterable[str]) -> None:
        """Delete all at once."""
        paths = self._paths(names)
        if not paths:
            return
        with self._told("objects that can be deleted"), contextlib.suppress(FileNotFoundError):
            self.fs.rm(paths)

    def clean(self, keep: Collection[str], prefixes: tuple[str, ...]) -> None:
        """Nothing: without a lock these may be of another writer, who is about to commit."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """No lock: an object store has none."""
        return contextlib.nullcontext()

    def check_writable(self) -> None:
        """Only writing tells."""

    def path(self, name: str) -> str:
        """What the backend calls a file."""
        return f"{self.prefix}/{name}"

    def _paths(self, names: Iterable[str]) -> list[str]:
        return [self.path(name) for name in names]

    @contextlib.contextmanager
    def _told(self, expected: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # every backend has exceptions of its own
            raise StoreError(
                self._url,
                expected=expected,
                found=said_by(error),
                fix="Check the address, the credentials and the network, then start again",
            ) from error


def said_by(error: Exception) -> str:
    """An error of a backend in one line."""
    said = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {said.splitlines()[0]}"


def is_url(root: Root) -> bool:
    """Whether a store's root is a URL rather than a path."""
    return isinstance(root, str) and "://" in root


def is_remote(root: Root) -> bool:
    """Whether a store's root is a URL of anything but this machine's files."""
    return is_url(root) and not str(root).startswith(_FILE)


def folder_of(root: Root) -> Path:
    """The folder that a path or a `file://` URL names."""
    if str(root).startswith(_FILE):
        return Path(url2pathname(urlsplit(str(root)).path))
    return Path(root)


def place_of(root: Root, name: str) -> Place:
    """The place `name` under a store's root."""
    if is_remote(root):
        return Remote(f"{str(root).rstrip('/')}/{name}")
    return Folder(folder_of(root) / name)


def import_extra(module: str) -> Any:
    """A module of the `remote` extra, imported when it is used.

    Raises:
        StoreError: it isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing_extra(str(error)) from None


def _missing_extra(said: str) -> StoreError:
    return StoreError(
        "zarr shards and stores behind a URL",
        expected="the packages of the `remote` extra",
        found=said,
        fix='Install them with `pip install "tapeline[remote]"`',
    )


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the one lock of a folder, made if need be.

    A folder that was made, also one above, is deleted again if it is left empty.

    The lock is the kernel's, on the folder itself: it goes with the process, however that ends.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is off.
    """
    while True:
        made = make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # While this process waited, the folder may have been deleted and made anew.
            if not folder.exists() or not os.path.samestat(folder.stat(), os.fstat(descriptor)):
                continue
            yield
            return
        finally:
            with contextlib.suppress(OSError):
                for path in made:
                    path.rmdir()
            os.close(descriptor)
