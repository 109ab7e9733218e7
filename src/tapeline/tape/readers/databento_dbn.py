"""Databento Binary Encoding, versions 1 to 3, packed or not.

Bytes become arrays without a copy. The package `databento-dbn`, which needs the extra `markets`,
reads the metadata before them; its decoder makes an object of each record, which took 2 µs to make
and to read, where all the work on a record here takes 1.

Does not cover: what the records mean, and DBZ, the format before DBN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tapeline.errors import TapeError
from tapeline.tape.readers import text
from tapeline.tape.readers.base import Source, joined
from tapeline.tape.readers.databento_records import (
    HEADER,
    MBO,
    RecordFile,
    Records,
    Spelling,
    mbp,
)
from tapeline.tape.readers.text import Unreadable, open_stream
from tapeline.tape.readers.times import are_possible
from tapeline.tape.sessions import markets_module

DBN: Final = b"DBN"
_LAYOUTS: Final = {"mbo": (0xA0, MBO), "mbp-1": (1, mbp(1)), "mbp-10": (10, mbp(10))}


class DbnFile(RecordFile):
    """Databento Binary Encoding."""

    def __init__(self, path: Path, source: Source, spelling: Spelling) -> None:
        metadata = _metadata(path)
        schema: str | None = spelling.schema
        if metadata.schema is not None:
            schema = str(metadata.schema)
        if schema not in _LAYOUTS:
            raise TapeError(
                path,
                expected=f"records of schema {joined(list(_LAYOUTS))}",
                found=f"schema {schema}" if schema else "no word on the schema, as in a live file",
                fix="Request one of them from Databento" if schema else "Say which, with schema",
            )
        super().__init__(path, source, spelling, schema)
        self._ts_out = bool(metadata.ts_out)
        for name, intervals in metadata.mappings.items():
            for interval in intervals:
                if interval["symbol"].isdecimal():
                    self.symbols[int(interval["symbol"])] = name

    def records(self) -> Iterator[Records]:
        """The records of the file's schema; other kinds are counted and left out."""
        clock = self._spelling.clock
        unreadable, num_read, counts = Unreadable(), 0, self._source.counts
        for records, num_others in self._blocks():
            counts.count("records of other kinds, left out", num_others)
            times = records[clock]
            good = are_possible(times)
            if not good.all():
                first = int(np.argmin(good))
                words = f"{clock} {times[first]}"
                unreadable.add(num_read + first + 1, words, int(np.count_nonzero(~good)))
            num_read += len(records)
            yield records if good.all() else records[good]
        self._source.close(self._path, unreadable, num_read - unreadable.num)

    def _blocks(self) -> Iterator[tuple[Records, int]]:
        """Records of the schema, and how many others stood between them."""
        rtype, dtype = _LAYOUTS[self.schema]
        if self._ts_out:  # a time of eight bytes behind each record
            dtype = _with_itemsize(dtype, dtype.itemsize + 8)
        num_bytes = self._path.stat().st_size
        with open_stream(self._path) as (raw, stream):
            _metadata_bytes(stream)
            rest = b""
            while chunk := stream.read(text.BLOCK_BYTES):
                data = rest + chunk
                records = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
                fits = (records["length"] * 4 == dtype.itemsize) & (records["rtype"] == rtype)
                done, num_others = records.nbytes, 0
                if not fits.all():
                    starts, done = self._starts(data)
                    ours = [at for at in starts if data[at + 1] == rtype]
                    num_others = len(starts) - len(ours)
                    whole = b"".join(data[at : at + dtype.itemsize] for at in ours)
                    records = np.frombuffer(whole, dtype)
                rest = data[done:]
                yield records, num_others
                if self._source.progress is not None:
                    self._source.progress(raw.tell(), num_bytes)
        if rest:
            raise TapeError(
                self._path,
                expected="whole records up to the end",
                found=f"{len(rest)} bytes of a record of {rest[0] * 4}",
                fix="Fetch the file again: it may be cut short",
            )

    def _starts(self, data: bytes) -> tuple[list[int], int]:
        """Where each whole record begins, whatever its kind, and where the last of them ends."""
        starts, at = [], 0
        while at < len(data) and at + data[at] * 4 <= len(data):
            if data[at] * 4 < np.dtype(HEADER).itemsize:
                raise TapeError(
                    self._path,
                    expected="records of 16 bytes or more",
                    found=f"one of {data[at] * 4}",
                    fix="Fetch the file again: it is damaged",
                )
            starts.append(at)
            at += data[at] * 4
        return starts, at


def _metadata_bytes(stream: Any) -> bytes:
    """The head of a DBN file: its magic, version and length, and as much as it says."""
    start = bytes(stream.read(8))
    return start + bytes(stream.read(int.from_bytes(start[4:], "little")))


def _metadata(path: Path) -> Any:
    package = markets_module("databento_dbn", path)
    with open_stream(path) as (_, stream):
        head = _metadata_bytes(stream)
    try:
        return package.Metadata.decode(head)
    except package.DBNError as error:
        raise TapeError(
            path,
            expected="DBN of version 1, 2 or 3",
            found=f"version {head[3]}, of which databento-dbn says: {error}",
            fix="Fetch the file again if it is damaged, or update databento-dbn",
        ) from None


def _with_itemsize(dtype: np.dtype[Any], itemsize: int) -> np.dtype[Any]:
    """The same fields, and bytes that belong to none behind them."""
    assert dtype.fields is not None
    kinds, offsets = zip(*(field[:2] for field in dtype.fields.values()), strict=True)
    return np.dtype(
        {"names": list(dtype.fields), "formats": kinds, "offsets": offsets, "itemsize": itemsize}
    )
