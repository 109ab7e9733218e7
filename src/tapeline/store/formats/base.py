"""What a format is: a `Writer` that is given sessions in order, a `Reader` that gives them back.

Neither knows about the index's other contents; `write.py` and `shards.py` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tapeline.errors import StoreError
from tapeline.files import ASIDE
from tapeline.session import Float32Array, Session
from tapeline.store.layout import INDEX, FileEntry, SessionEntry, StoreIndex
from tapeline.store.place import Place

LITTLE: dict[str, str] = {"values": "<f4", "times": "<i8", "age_ns": "<i8"}
SESSION = "session-"  # how the file or folder of one session begins
DATA = "data/"  # where zarr keeps these folders


def arrays_of(session: Session) -> dict[str, npt.NDArray[Any]]:
    """The session's arrays by name, little-endian; those it doesn't have are left out."""
    arrays = {"values": session.values, "times": session.times, "age_ns": session.age_ns}
    return {
        name: array.astype(LITTLE[name], copy=False)
        for name, array in arrays.items()
        if array is not None
    }


def content_hash(array: npt.NDArray[Any]) -> str:
    """The xxh3-128 of an array's bytes in C order."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)


class Writer(ABC):
    """Writes sessions, one after the other, into a place that holds those of `index` already.

    `files` names every file of the store, those of `index` included, once `close` was called.
    """

    def __init__(self, place: Place, index: StoreIndex | None) -> None:
        self.place = place
        self.index = index
        self.files: dict[str, FileEntry] = {} if index is None else dict(index.files)
        if index is not None:
            self._clean(index)

    @abstractmethod
    def add(self, number: int, session: Session, entry: SessionEntry) -> None:
        """Write the next session; `number` counts from the store's first."""

    def close(self) -> None:  # noqa: B027 - nothing is left open where each session is a file
        """Finish writing."""

    def sync(self) -> None:
        """Make what was written survive the machine."""
        known = {} if self.index is None else self.index.files
        self.place.sync(name for name, file in self.files.items() if known.get(name) != file)

    def abandon(self, current: StoreIndex) -> None:
        """After an error: take back what the store's index, as it is now, doesn't list."""
        self._clean(current)

    def committed(self) -> None:  # noqa: B027 - most formats are done when the index is written
        """Clear away what only an unfinished append needs."""

    def _clean(self, index: StoreIndex) -> None:
        """Delete what an append that was killed left behind."""
        self.place.clean(index.files, (SESSION, DATA, ASIDE))


class Reader(ABC):
    """Reads back what the writer of the same format wrote.

    Raises:
        StoreError: a file that the index names is missing or of another size.
    """

    def __init__(self, place: Place, index: StoreIndex) -> None:
        self.place = place
        self.index = index
        sizes = place.sizes()
        for name, entry in index.files.items():
            found = sizes.get(name)
            if found != entry.bytes and not (found is not None and self._grown(entry, found)):
                raise StoreError(
                    f"{place}/{name}",
                    expected=f"{entry.bytes:,} bytes, as the store's index says",
                    found="no file" if found is None else f"{found:,} bytes",
                    fix="Copy the file again, or write the store again",
                )

    @abstractmethod
    def load(self, number: int, name: str) -> npt.NDArray[Any]:
        """One array of one session: "values" `[rows, columns]`, "times" or "age_ns" `[rows]`."""

    def matrix(self) -> Float32Array:
        """All values, float32 `[rows, columns]`, sessions one after the other; here in memory."""
        shape = (self.index.num_rows, len(self.index.columns))
        matrix: Float32Array = np.empty(shape, dtype=np.float32)
        for number, entry in enumerate(self.index.sessions):
            matrix[entry.offset : entry.offset + entry.rows] = self.load(number, "values")
        return matrix

    def session(self, number: int) -> Session:
        """One session as it was written, without reading the others."""
        return self.index.restore(number, lambda name: self.load(number, name))

    @property
    def bytes(self) -> int:
        """Bytes of all files, the index included."""
        files = sum(entry.bytes for entry in self.index.files.values())
        return files + self.place.sizes()[INDEX]

    def verify(self) -> list[str]:
        """Read every byte and compare it with the hashes in the index.

        Returns:
            One sentence for each file or session that differs; empty when all is well.
        """
        found: list[str] = []
        for name, file in self.index.files.items():
            if file.xxh3 and file.xxh3 != xxhash.xxh3_128_hexdigest(self.place.read([name])[0]):
                found.append(f"{self.place}/{name}: the bytes differ from those written")
        for number, entry in enumerate(self.index.sessions):
            for name, written in entry.xxh3.items():
                try:
                    content = content_hash(self.load(number, name))
                except StoreError as error:
                    found.append(str(error))
                    continue
                if content != written:
                    found.append(
                        f"{self.place}: session {entry.key}, {name}: the content differs from "
                        "what was written"
                    )
        return found

    def _grown(self, entry: FileEntry, found: int) -> bool:  # noqa: ARG002
        """Whether a file may be longer than the index says."""
        return False


def damaged(where: object, found: str) -> StoreError:
    """What to say of a file that isn't what the index lists."""
    return StoreError(
        where,
        expected="the rows and columns that the store's index lists",
        found=found,
        fix="Copy the file again, or write the store again",
    )
