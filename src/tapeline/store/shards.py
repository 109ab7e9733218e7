"""Reading a store: one matrix of all rows, or session by session without reading the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeline.errors import StoreError
from tapeline.session import BoolArray, Float32Array, Int64Array, Session, SessionKey
from tapeline.store.cache import cached_reader
from tapeline.store.formats import READERS, Reader
from tapeline.store.intake import some
from tapeline.store.layout import EVERY_FORMAT, INDEX, StoreIndex, check_format
from tapeline.store.place import Place, Root, folder_of, is_remote, place_of
from tapeline.store.recover import put_back


class Shards:
    """The sessions of a store, opened for reading.

    Sizes of all files are checked here; contents by `verify`, and of zarr shards here too. An open
    store keeps no file handle of its own beyond the mapping, is safe to use from several threads,
    and goes on showing the sessions it was opened with when others are appended.

    Args:
        root: the store's folder, or a URL that fsspec knows (`s3://bucket/prefix`), where zarr
            shards lie; credentials and endpoint come from the environment.
        fmt: "mmap", "npy", "zarr" or "csv"; by default the fastest that is there. "mmap" maps the
            file, the others read every row into memory, unless there is a cache.
        cache: a folder of this machine. The sessions are decoded into a memory-mapped file there,
            each compared with its hash before it counts; only what is missing is fetched, so that
            a later open decodes nothing. Processes may share it.
        cache_bytes: the most that the cache folder may hold, in bytes. A store that is larger is
            refused before anything is fetched; for one that fits, whole other stores are deleted
            from the cache, the longest unused first. By default the bound is the free disk.

    Attributes:
        mm: float32 `[rows, columns]`, all sessions one after the other, read-only.
        lengths: int64 `[sessions]`, rows of each.
        offsets: int64 `[sessions + 1]`, session s is rows `offsets[s]` to `offsets[s + 1]` of `mm`.
        columns: the names of the columns.
        fingerprint: what the data is; equal for the same sessions in any format.
        folder: where the shards of this format lie: a path, or a URL.

    Raises:
        StoreError: there is no such store, its index is damaged, a file's size disagrees, an
            object is damaged or can't be fetched, or the cache is too small.
    """

    def __init__(
        self,
        root: Root,
        fmt: str | None = None,
        *,
        cache: Path | str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.root: Root = root if is_remote(root) else folder_of(root)
        source = open_reader(self.root, fmt)
        self.index = source.index
        self.fmt: str = self.index.fmt
        self.folder: Root = str(source.place) if is_remote(root) else source.place.folder
        self._source = source
        self._cache = (cache, cache_bytes)
        self._reader: Reader = (
            source if cache is None else cached_reader(source, Path(cache), cache_bytes)
        )
        self.mm: Float32Array = self._reader.matrix()
        self.mm.flags.writeable = False
        self._rows = self.mm.view(np.ndarray)  # slicing a memmap takes 1 µs more than a plain array
        self.lengths: Int64Array = np.array([e.rows for e in self.index.sessions], np.int64)
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.columns: tuple[str, ...] = tuple(self.index.columns)
        self.fingerprint: str = self.index.fingerprint()

    def __reduce__(self) -> tuple[object, ...]:
        # Another process opens the store itself: a pickled mapping would copy every row.
        return _reopen, (self.root, self.fmt, *self._cache)

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self.index.sessions)

    @property
    def keys(self) -> list[SessionKey]:
        """The key of each session."""
        return [entry.key for entry in self.index.sessions]

    @property
    def bytes(self) -> int:
        """Bytes of all files, the index included."""
        return self._source.bytes

    def column(self, name: str) -> int:
        """The position of a column.

        Raises:
            StoreError: there is none of that name; the nearest is named.
        """
        if name not in self.columns:
            nearest = difflib.get_close_matches(str(name), self.columns, n=1)
            raise StoreError(
                self.folder,
                expected=f"one of its {len(self.columns)} columns ({some(self.columns)})",
                found=f"`{name}`",
                fix=(
                    f"Write `{nearest[0]}`, the nearest"
                    if nearest
                    else "Name one of the store's columns; `columns` lists them"
                ),
            )
        return self.columns.index(name)

    def values(self, number: int) -> Float32Array:
        """The rows of one session, float32 `[rows, columns]`, without a copy."""
        return self._rows[self.offsets[number] : self.offsets[number + 1]]

    def valid(self, number: int) -> BoolArray:
        """Which rows of one session windows may touch, bool `[rows]`."""
        return self.index.sessions[number].valid()

    def times(self, number: int) -> Int64Array | None:
        """The times of one session, int64 ns UTC `[rows]`; None where the store has none."""
        return self._beside(number, "times")

    def age_ns(self, number: int) -> Int64Array | None:
        """How old each row's last update was, int64 ns `[rows]`; None where it isn't known."""
        return self._beside(number, "age_ns")

    def session(self, number: int) -> Session:
        """One session as it was written."""
        return self.index.restore(number, lambda name: self._part(number, name))

    def sessions(self) -> Iterator[Session]:
        """All sessions in order."""
        return (self.session(number) for number in range(len(self)))

    def verify(self) -> list[str]:
        """Read every byte and compare it with the hashes in the index.

        With a cache it is the cache that is read, which is what a run trains from.

        Returns:
            One sentence for each file or session that differs; empty when all is well.
        """
        return self._reader.verify()

    def _part(self, number: int, name: str) -> npt.NDArray[Any]:
        return self.values(number) if name == "values" else self._reader.load(number, name)

    def _beside(self, number: int, name: str) -> Int64Array | None:
        if name not in self.index.beside:
            return None
        return self._reader.load(number, name)


def _reopen(root: Root, fmt: str, cache: Path | str | None, cache_bytes: int | None) -> Shards:
    return Shards(root, fmt, cache=cache, cache_bytes=cache_bytes)


def open_reader(root: Root, fmt: str | None = None) -> Reader:
    """A reader of one format of a store, by default the fastest that is there.

    Raises:
        StoreError: there is no such store, its index is damaged, or a file's size disagrees.
    """
    place, fmt = _find(root, fmt)
    index = StoreIndex.load(place, fmt)
    while True:
        try:
            return READERS[fmt](place, index)
        except StoreError:
            # An append or a replacement may have ended between the index and the files.
            again = StoreIndex.load(place, fmt)
            if again == index:
                raise
            index = again


def stream_sessions(root: Root, fmt: str | None = None) -> Iterator[Session]:
    """All sessions of a store in order, one in memory at a time, whatever the store's size.

    Raises:
        StoreError: as `Shards` does; of a damaged session, when its turn comes.
    """
    reader = open_reader(root, fmt)
    return (reader.session(number) for number in range(len(reader.index.sessions)))


def _find(root: Root, fmt: str | None) -> tuple[Place, str]:
    """The place of the wanted format, or of the fastest one there is."""
    if fmt is not None:
        check_format(fmt)
    places = {
        name: place_of(root, name) for name in (("zarr",) if is_remote(root) else EVERY_FORMAT)
    }
    for place in places.values():
        put_back(place)
    here = [name for name, place in places.items() if place.has(INDEX)]
    wanted = tuple(places) if fmt is None else (fmt,)
    for name in here:
        if name in wanted:
            return places[name], name
    raise StoreError(
        root,
        expected=f"a store in {' or '.join(wanted)} format",
        found=f"one in {', '.join(here)}" if here else "no store",
        fix=(
            f"Convert it with `tapeline store convert {root} --to {fmt}`"
            if here
            else "Make one with `tapeline ingest` or `write_shards`"
        ),
    )
