"""Lines of a ledger as columns of integers: two million lines a second, in bounded memory.

Covers the spans; other records are passed over, but must be records. A compiled scanner takes the
lines as `Ledger` writes them; any other way to write the same JSON goes through the JSON module,
as do small files, for which compiling isn't worth it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.errors import LedgerError
from tapeline.ledger.phases import PHASES
from tapeline.session import Int64Array

_MARKS = ("overlap", "device", "writing", "partial", "inferred")
FIELDS = ("attempt", "step", "end", *_MARKS, *PHASES)
ATTEMPT, STEP, END, OVERLAP, DEVICE, WRITING, PARTIAL, INFERRED = range(8)
SPENT = slice(8, len(FIELDS))  # the phases
_COLUMN = {name: column for column, name in enumerate(FIELDS)}

_CHUNK_BYTES = 1 << 20  # its rows stay in the cache
_WORTH_COMPILING_BYTES = 1 << 24
_MOST_DIGITS = 18  # all of them fit in 63 bits
_LEFT = -1  # in the column of attempts: a line that the scanner left to the JSON module
_NEEDED = 0b111  # bits of the columns that every line has
_SLOTS = 64  # of the table of names; a power of two


def read_spans(path: Path, size: int) -> Iterator[Int64Array]:
    """The spans in the first `size` bytes of a ledger, as tables `[lines, FIELDS]`.

    Raises:
        LedgerError: a line that is no record of a ledger.
    """
    scan = _compiled_scan() if size >= _WORTH_COMPILING_BYTES else _leave_all
    rest, read = b"", 0
    with path.open("rb") as stream:
        while read < size and (chunk := stream.read(min(_CHUNK_BYTES, size - read))):
            read += len(chunk)
            whole, newline, chunk_rest = (rest + chunk).rpartition(b"\n")
            rest = chunk_rest
            if newline:
                yield _table(path, whole + newline, scan)


def _table(path: Path, lines: bytes, scan: Callable[..., None]) -> Int64Array:
    num = lines.count(b"\n")
    rows = np.zeros((num, len(FIELDS)), np.int64)
    offsets = np.zeros((num, 2), np.int64)
    scan(np.frombuffer(lines, np.uint8), rows, offsets)
    left = np.flatnonzero(rows[:, ATTEMPT] == _LEFT)
    for row in left:
        begin, end = offsets[row]
        rows[row] = _row(path, lines[begin:end])
    return rows[rows[:, ATTEMPT] != _LEFT] if len(left) else rows


def _row(path: Path, line: bytes) -> list[int]:
    row = [0] * len(FIELDS)
    try:
        record = json.loads(line)
        if "attempt" not in record:
            if not {"begin", "close", "steps"} & set(record):
                raise ValueError
            row[ATTEMPT] = _LEFT
            return row
        for name in {*FIELDS[:3], *(_COLUMN.keys() & record)}:
            value = record[name]
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise ValueError
            row[_COLUMN[name]] = value
    except (ValueError, TypeError, KeyError):
        raise LedgerError(
            path,
            expected="a record of a ledger in each line",
            found=repr(line[:60].decode(errors="replace")),
            fix="Restore the file from a copy, or delete that line",
        ) from None
    return row


def _leave_all(buffer: Any, rows: Int64Array, offsets: Int64Array) -> None:
    ends = np.flatnonzero(buffer == ord("\n"))
    rows[:, ATTEMPT] = _LEFT
    offsets[:, 1] = ends
    offsets[1:, 0] = ends[:-1] + 1


@functools.cache
def _compiled_scan() -> Callable[..., None]:
    import numba  # takes longer than reading a small ledger

    names = np.zeros(_SLOTS, np.uint64)
    columns = np.zeros(_SLOTS, np.int64)
    for name, column in _COLUMN.items():
        key = np.uint64(_key(name.encode()))
        slot = int(key) % _SLOTS
        while names[slot]:
            slot = (slot + 1) % _SLOTS
        names[slot], columns[slot] = key, column
    try:
        scan = numba.njit(cache=True, nogil=True)(_scan)
    except RuntimeError:  # no place for a cache
        scan = numba.njit(nogil=True)(_scan)
    return functools.partial(scan, names, columns)


def _key(name: bytes) -> int:
    key = 0
    for byte in name:
        key = (key * 257 + byte) % (1 << 64)
    return key


def _scan(names: Any, columns: Any, buffer: Any, rows: Any, offsets: Any) -> None:
    """Fill rows from lines of the form `{"name":digits,…}`; others are left, by their offsets."""
    at, row = 0, 0
    while at < len(buffer):
        begin, good, separator, seen = at, True, ord("{"), 0
        while good and buffer[at] == separator and buffer[at + 1] == ord('"'):
            separator = ord(",")
            at += 2
            key = np.uint64(0)
            while buffer[at] != ord('"') and buffer[at] != ord("\n"):
                key = key * np.uint64(257) + np.uint64(buffer[at])
                at += 1
            slot = np.int64(key % np.uint64(_SLOTS))
            while names[slot] != np.uint64(0) and names[slot] != key:
                slot = (slot + 1) % _SLOTS
            if names[slot] != key or buffer[at] != ord('"') or buffer[at + 1] != ord(":"):
                good = False
                break
            at += 2
            first, number = at, np.int64(0)
            while ord("0") <= buffer[at] <= ord("9"):
                number = number * 10 + np.int64(buffer[at] - ord("0"))
                at += 1
            good = 0 < at - first <= _MOST_DIGITS
            rows[row, columns[slot]] = number
            seen |= 1 << columns[slot]
        good = good and buffer[at] == ord("}") and buffer[at + 1] == ord("\n")
        while buffer[at] != ord("\n"):
            at += 1
        offsets[row, 0], offsets[row, 1] = begin, at
        if not good or seen & _NEEDED != _NEEDED:
            rows[row, 0] = _LEFT
        at += 1
        row += 1
