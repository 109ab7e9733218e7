"""The mmap format: one raw little-endian file per array, mapped instead of read.

An append writes behind the rows that the index lists. While it lasts, `append.json` lies in the
folder and names the index it started from: only beside that index may a file be longer than the
index says, and what is behind is never read. A longer file without the note, or with a note of
another index, is a foreign one; a shorter one is truncated; both are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tapeline.files import canonical_json
from tapeline.session import Float32Array, Session
from tapeline.store.formats.base import LITTLE, Reader, Writer, arrays_of
from tapeline.store.layout import FileEntry, SessionEntry, StoreIndex
from tapeline.store.place import Place

NOTE = "append.json"


class MappedWriter(Writer):
    """Writes `values.f32`, `times.i64` and `age_ns.i64`."""

    def __init__(self, place: Place, index: StoreIndex | None) -> None:
        self._streams: dict[str, IO[bytes]] = {}
        self._open = contextlib.ExitStack()
        super().__init__(place, index)
        if index is not None:
            place.commit(NOTE, canonical_json({"index": index.digest()}).encode())

    def add(self, number: int, session: Session, entry: SessionEntry) -> None:  # noqa: ARG002
        """Append the session's bytes to each file."""
        for name, array in arrays_of(session).items():
            if name not in self._streams:
                path = self.place.folder / mapped_name(name)
                self._streams[name] = self._open.enter_context(path.open("ab"))
            self._streams[name].write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        """Close the files and note their sizes."""
        self._open.close()  # all of them, even if one fails: what is buffered may not come later
        for name in self._streams:
            size = (self.place.folder / mapped_name(name)).stat().st_size
            self.files[mapped_name(name)] = FileEntry(bytes=size)

    def abandon(self, current: StoreIndex) -> None:
        """Cut the files back to what the index lists."""
        super().abandon(current)
        self.place.remove([NOTE])

    def committed(self) -> None:
        """The files are as long as the new index says: no note is needed."""
        self.place.remove([NOTE])

    def _clean(self, index: StoreIndex) -> None:
        for name, entry in index.files.items():
            path = self.place.folder / name
            if path.stat().st_size > entry.bytes:
                os.truncate(path, entry.bytes)
        super()._clean(index)


class MappedReader(Reader):
    """Maps the files, so that a store that is replaced or deleted can still be read."""

    def __init__(self, place: Place, index: StoreIndex) -> None:
        super().__init__(place, index)
        shapes = dict.fromkeys(index.beside, (index.num_rows,))
        self._maps = {
            name: _map(place.folder / mapped_name(name), LITTLE[name], shape)
            for name, shape in {"values": (index.num_rows, len(index.columns)), **shapes}.items()
        }

    def matrix(self) -> Float32Array:
        """The values, mapped read-only."""
        return self._maps["values"]

    def load(self, number: int, name: str) -> npt.NDArray[Any]:
        """A session's part of a mapped file."""
        entry = self.index.sessions[number]
        return self._maps[name][entry.offset : entry.offset + entry.rows]

    def _grown(self, entry: FileEntry, found: int) -> bool:
        if found < entry.bytes:
            return False
        try:
            note = json.loads(self.place.read([NOTE])[0])
        except (OSError, ValueError):
            return False
        return bool(note == {"index": self.index.digest()})


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if 0 in shape:  # an empty file can't be mapped
        return np.empty(shape, dtype=dtype)
    return np.memmap(path, dtype, mode="r", shape=shape)


def mapped_name(name: str) -> str:
    """The file of one array."""
    return f"{name}.{'f32' if name == 'values' else 'i64'}"
