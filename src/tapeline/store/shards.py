"""Reading a store: one matrix of all rows, and what belongs to each session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tapeline.errors import StoreError
from tapeline.files import xxh3_file
from tapeline.session import BoolArray, Float32Array, Int64Array, Session, SessionKey
from tapeline.store.formats import READERS
from tapeline.store.layout import FORMATS, INDEX, StoreIndex, check_format
from tapeline.store.write import content_hash


class Shards:
    """The sessions of a store, opened for reading.

    Sizes of all files are checked here; contents by `verify`. An open store keeps no file handle
    of its own beyond the mapping, and is safe to use from several threads.

    Args:
        root: the store's folder.
        fmt: "mmap", "npy" or "csv"; by default the fastest that is there. "mmap" maps the file,
            the other two read every row into memory.

    Attributes:
        mm: float32 `[rows, columns]`, all sessions one after the other, read-only.
        lengths: int64 `[sessions]`, rows of each.
        offsets: int64 `[sessions + 1]`, session s is rows `offsets[s]` to `offsets[s + 1]` of `mm`.
        columns: the names of the columns.
        fingerprint: what the data is; equal for the same sessions in any format.

    Raises:
        StoreError: there is no such store, its index is damaged, or a file's size disagrees.
    """

    def __init__(self, root: Path | str, fmt: str | None = None) -> None:
        self.root = Path(root)
        self.folder = _find(self.root, fmt)
        self.index = StoreIndex.load(self.folder)
        self.fmt: str = self.index.fmt
        self._check_sizes()
        self._reader = READERS[self.fmt](self.folder, self.index)
        self.mm: Float32Array = self._reader.matrix()
        self.mm.flags.writeable = False
        self.lengths: Int64Array = np.array([e.rows for e in self.index.sessions], np.int64)
        self.offsets: Int64Array = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.columns: tuple[str, ...] = tuple(self.index.columns)
        self.fingerprint: str = self.index.fingerprint()

    def __reduce__(self) -> tuple[type[Shards], tuple[Path, str]]:
        # Another process opens the store itself: a pickled mapping would copy every row.
        return Shards, (self.root, self.fmt)

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
        files = sum(entry.bytes for entry in self.index.files.values())
        return files + (self.folder / INDEX).stat().st_size

    def column(self, name: str) -> int:
        """The position of a column.

        Raises:
            StoreError: there is none of that name.
        """
        if name not in self.columns:
            raise StoreError(
                self.folder,
                expected=f"a column of {', '.join(self.columns)}",
                found=f"`{name}`",
                fix="Name one of the store's columns",
            )
        return self.columns.index(name)

    def values(self, number: int) -> Float32Array:
        """The rows of one session, float32 `[rows, columns]`, without a copy."""
        return self.mm[self.offsets[number] : self.offsets[number + 1]]

    def valid(self, number: int) -> BoolArray:
        """Which rows of one session windows may touch, bool `[rows]`."""
        mask = np.ones(int(self.lengths[number]), np.bool_)
        for start, stop in self.index.sessions[number].invalid:
            mask[start:stop] = False
        return mask

    def times(self, number: int) -> Int64Array | None:
        """The times of one session, int64 ns UTC `[rows]`; None where the store has none."""
        return self._beside(number, "times")

    def age_ns(self, number: int) -> Int64Array | None:
        """How old each row's last update was, int64 ns `[rows]`; None where it isn't known."""
        return self._beside(number, "age_ns")

    def session(self, number: int) -> Session:
        """One session as it was written."""
        entry = self.index.sessions[number]
        return Session(
            entry.key,
            self.values(number),
            self.columns,
            self.times(number),
            self.age_ns(number),
            self.valid(number),
            entry.origin,
        )

    def sessions(self) -> Iterator[Session]:
        """All sessions in order."""
        return (self.session(number) for number in range(len(self)))

    def verify(self) -> list[str]:
        """Read every byte and compare it with the hashes in the index.

        Returns:
            One sentence for each file or session that differs; empty when all is well.
        """
        found: list[str] = []
        for name, file in self.index.files.items():
            if file.xxh3 is not None and xxh3_file(self.folder / name) != file.xxh3:
                found.append(f"{self.folder / name}: the bytes differ from those written")
        for number, entry in enumerate(self.index.sessions):
            for name, written in entry.xxh3.items():
                try:
                    part = (
                        self.values(number)
                        if name == "values"
                        else self._reader.beside(number, name)
                    )
                except StoreError as error:
                    found.append(str(error))
                    continue
                if content_hash(part) != written:
                    found.append(
                        f"{self.folder}: session {entry.key}, {name}: the content differs from "
                        "what was written"
                    )
        return found

    def _beside(self, number: int, name: str) -> Int64Array | None:
        if name not in self.index.beside:
            return None
        return self._reader.beside(number, name)

    def _check_sizes(self) -> None:
        for name, entry in self.index.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != entry.bytes:
                raise StoreError(
                    path,
                    expected=f"{entry.bytes:,} bytes, as the store's index says",
                    found="no file" if found is None else f"{found:,} bytes",
                    fix="Copy the file again, or write the store again",
                )


def _find(root: Path, fmt: str | None) -> Path:
    """The folder of the wanted format, or of the fastest one there is."""
    if fmt is not None:
        check_format(fmt)
    here = [name for name in FORMATS if (root / name / INDEX).is_file()]
    wanted = FORMATS if fmt is None else (fmt,)
    for name in here:
        if name in wanted:
            return root / name
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
