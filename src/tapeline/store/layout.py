"""The index of a store: what `index.json` says, and how it is read and checked.

The index is written last and hashed over itself; a folder without one is not a store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapeline.errors import StoreError
from tapeline.files import canonical_json, xxh3_json
from tapeline.session import BoolArray, Session, SessionKey
from tapeline.store.place import Place

EVERY_FORMAT = ("mmap", "npy", "zarr", "csv")  # the order in which `Shards(root)` looks
FORMATS = ("mmap", "npy", "csv")  # those that need no extra
VERSION: Final = 1
INDEX = "index.json"


def check_format(fmt: str) -> None:
    """Refuse the name of a format that doesn't exist, with a `StoreError`."""
    if fmt not in EVERY_FORMAT:
        raise StoreError(
            f"format {fmt!r}",
            expected=f"one of {', '.join(EVERY_FORMAT)}",
            found="another name",
            fix="Choose mmap for training",
        )


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Frozen):
    """One file of a store. `xxh3` is None where sessions share a file and are hashed singly."""

    bytes: int
    xxh3: str | None = None


class SessionEntry(_Frozen):
    """One session: its key, its rows `[offset, offset + rows)` of the whole, and its content.

    `xxh3` maps "values", "times" and "age_ns" to the xxh3-128 of their little-endian bytes.
    `invalid` lists the row ranges `[start, stop)` that no window or target may touch.
    """

    instrument: str
    date: str
    segment: int
    rows: int
    offset: int
    origin: float
    xxh3: dict[str, str]
    invalid: list[tuple[int, int]]

    @property
    def key(self) -> SessionKey:
        """The session's key."""
        return SessionKey(self.instrument, self.date, self.segment)

    def valid(self) -> BoolArray:
        """Which rows windows may touch, bool `[rows]`."""
        mask = np.ones(self.rows, np.bool_)
        for start, stop in self.invalid:
            mask[start:stop] = False
        return mask

    def digest(self, columns: list[str]) -> str:
        """The xxh3-128 of all that the session is, wherever in a store it lies."""
        content = self.model_dump(mode="json", exclude={"offset"})
        return xxh3_json([columns, content])


class StoreIndex(_Frozen):
    """Everything about a store but its numbers."""

    format: Literal["tapeline store"] = "tapeline store"
    version: Literal[1] = VERSION
    fmt: Literal["mmap", "npy", "zarr", "csv"]
    dtype: Literal["<f4"] = "<f4"
    columns: list[str]
    beside: list[str]
    derived: dict[str, str] = Field(default_factory=dict)  # column to the version of how
    made: dict[str, str] = Field(default_factory=dict)  # how rows came about, by option
    sessions: list[SessionEntry]
    files: dict[str, FileEntry]

    @property
    def num_rows(self) -> int:
        """Rows of all sessions together."""
        return sum(entry.rows for entry in self.sessions)

    def raw_bytes(self, number: int) -> int:
        """Bytes of one session's arrays, uncompressed."""
        return self.sessions[number].rows * (4 * len(self.columns) + 8 * len(self.beside))

    def fingerprint(self) -> str:
        """What the data is, whatever format it lies in: xxh3-128 over columns and sessions."""
        return self._fingerprint(self.sessions)

    def fingerprint_of(self, keys: Collection[str]) -> str:
        """The fingerprint of a store that holds only those of its sessions that have these keys."""
        kept = [entry for entry in self.sessions if str(entry.key) in keys]
        offsets = accumulate((entry.rows for entry in kept), initial=0)
        moved = zip(kept, offsets, strict=False)
        return self._fingerprint([e.model_copy(update={"offset": at}) for e, at in moved])

    def _fingerprint(self, sessions: list[SessionEntry]) -> str:
        told = self.model_copy(update={"sessions": sessions})
        content = told.model_dump(mode="json", include={"columns", "sessions"})
        return xxh3_json(content)

    def digest(self) -> str:
        """The hash of the index over itself."""
        return xxh3_json(self.model_dump(mode="json"))

    def restore(self, number: int, load: Callable[[str], npt.NDArray[Any]]) -> Session:
        """One session as it was written; `load` gives its arrays by name."""
        entry = self.sessions[number]
        return Session(
            entry.key,
            load("values"),
            tuple(self.columns),
            load("times") if "times" in self.beside else None,
            load("age_ns") if "age_ns" in self.beside else None,
            entry.valid(),
            entry.origin,
            self.derived,
            self.made,
        )

    def save(self, place: Place) -> None:
        """Write the index, with a hash over itself: the commit of a store."""
        content = {**self.model_dump(mode="json"), "xxh3": self.digest()}
        place.commit(INDEX, canonical_json(content).encode())

    @classmethod
    def load(cls, place: Place, fmt: str) -> StoreIndex:
        """Read and check the index of one format's place.

        Raises:
            StoreError: it is missing, damaged, of another version, or of another format.
        """
        path = f"{place}/{INDEX}"
        try:
            content = place.read([INDEX])[0]
        except OSError as error:
            raise StoreError(
                path,
                expected="the index of a store",
                found=error.strerror or "no file",
                fix="Write the store again with `tapeline ingest` or `write_shards`",
            ) from None
        try:
            index = cls._parse(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            version = isinstance(error, ValidationError) and error.errors()[0]["loc"] == (
                "version",
            )
            raise StoreError(
                path,
                expected=f"an unchanged index of version {VERSION}",
                found="another version" if version else "damaged bytes",
                fix="Write the store again with this version of tapeline",
            ) from None
        if index.fmt != fmt:
            raise StoreError(
                place,
                expected=f"shards in {fmt} format",
                found=f"those in {index.fmt} format",
                fix=f"Rename the folder to {index.fmt}",
            )
        return index

    @classmethod
    def _parse(cls, content: bytes) -> StoreIndex:
        values = json.loads(content)
        written = values.pop("xxh3")
        index = cls.model_validate(values)
        if written != xxh3_json(values):
            raise ValueError("the hash of the index over itself differs")
        return index
