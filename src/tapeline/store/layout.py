"""The index of a store: what `index.json` says, and how it is read and checked.

The index is written last and hashed over itself; a folder without one is not a store.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from tapeline.errors import StoreError
from tapeline.files import atomic_write, canonical_json
from tapeline.session import SessionKey

FORMATS = ("mmap", "npy", "csv")  # fastest first: the order in which `Shards(root)` looks
VERSION: Final = 1
INDEX = "index.json"


def check_format(fmt: str) -> None:
    """Refuse the name of a format that doesn't exist, with a `StoreError`."""
    if fmt not in FORMATS:
        raise StoreError(
            f"format {fmt!r}",
            expected=f"one of {', '.join(FORMATS)}",
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


class StoreIndex(_Frozen):
    """Everything about a store but its numbers."""

    format: Literal["tapeline store"] = "tapeline store"
    version: Literal[1] = VERSION
    fmt: Literal["mmap", "npy", "csv"]
    dtype: Literal["<f4"] = "<f4"
    columns: list[str]
    beside: list[str]
    sessions: list[SessionEntry]
    files: dict[str, FileEntry]

    @property
    def num_rows(self) -> int:
        """Rows of all sessions together."""
        return sum(entry.rows for entry in self.sessions)

    def fingerprint(self) -> str:
        """What the data is, whatever format it lies in: xxh3-128 over columns and sessions."""
        content = self.model_dump(mode="json", include={"columns", "sessions"})
        return xxhash.xxh3_128_hexdigest(canonical_json(content).encode())

    def save(self, folder: Path) -> None:
        """Write the index, with a hash over itself."""
        content = self.model_dump(mode="json")
        content["xxh3"] = xxhash.xxh3_128_hexdigest(canonical_json(content).encode())
        atomic_write(folder / INDEX, canonical_json(content))

    @classmethod
    def load(cls, folder: Path) -> StoreIndex:
        """Read and check the index of one format's folder.

        Raises:
            StoreError: it is missing, damaged, of another version, or of another format.
        """
        path = folder / INDEX
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(
                path,
                expected="the index of a store",
                found=error.strerror or str(error),
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
        if index.fmt != folder.name:
            raise StoreError(
                folder,
                expected=f"shards in {folder.name} format",
                found=f"those in {index.fmt} format",
                fix=f"Rename the folder to {index.fmt}",
            )
        return index

    @classmethod
    def _parse(cls, content: bytes) -> StoreIndex:
        values = json.loads(content)
        written = values.pop("xxh3")
        index = cls.model_validate(values)
        if written != xxhash.xxh3_128_hexdigest(canonical_json(values).encode()):
            raise ValueError("the hash of the index over itself differs")
        return index
