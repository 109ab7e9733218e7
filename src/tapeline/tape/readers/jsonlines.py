"""Recordings of a websocket: lines of `<local ns> <json>`, plain or packed, a block at a time.

Covers the lines, the ones that can't be read, and decimal text in them. Does not cover what a
message means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from tapeline.errors import TapeError
from tapeline.tape.book import UNITS
from tapeline.tape.readers.base import Head, Source, joined
from tapeline.tape.readers.text import BLOCK_BYTES, Unreadable, open_stream
from tapeline.tape.readers.times import YEAR_1990_S, YEAR_2100_S

_LINE: Final = re.compile(rb"\d{18,19} \{")
_MAX_LINE_BYTES: Final = 1 << 24  # a snapshot of 5,000 levels has 2^18
_DECIMALS: Final = 9
Parsed = TypeVar("Parsed")


def looks_recorded(head: Head) -> bool:
    """Whether a file begins with a line of this kind."""
    return _LINE.match(head.text) is not None


def recorded(
    source: Source, path: Path, parse: Callable[[int, dict[str, Any]], Parsed | None]
) -> Iterator[list[Parsed]]:
    """What `parse` makes of each message, given its time and its JSON, for each block of the file.

    A message of which it makes None is read and not needed. A line is left out, and counted, if it
    isn't of this kind, is of another time than 1990 to 2100, or if `parse` raises a `KeyError`,
    `TypeError` or `ValueError`.

    Raises:
        TapeError: the file is missing or damaged, a line has no end, or too many are left out.
    """
    unreadable, num_lines, num_readable = Unreadable(), 0, 0
    for lines in _blocks_of_lines(source, path):
        found = []
        for number, line in enumerate(lines, start=num_lines + 1):
            if not line or line.isspace():
                continue
            try:
                item = parse(*_split(line))
            except (KeyError, TypeError, ValueError, RecursionError):
                unreadable.add(number, line[:100].decode("utf-8", "replace"))
                continue
            num_readable += 1
            if item is not None:
                found.append(item)
        num_lines += len(lines)
        yield found
    source.close(path, unreadable, num_readable)


def units_of(text: str) -> int:
    """Decimal text, zero or more, in billionths and exactly.

    Raises:
        TypeError: it isn't text.
        ValueError: it is no such number, or has more than nine decimals.
    """
    if not isinstance(text, str):
        raise TypeError(text)
    whole, _, fraction = text.partition(".")
    digits = whole + fraction.ljust(_DECIMALS, "0")
    if len(fraction) > _DECIMALS:
        digits = whole + fraction[:_DECIMALS]
        if fraction[_DECIMALS:].strip("0"):
            raise ValueError(text)
    if not digits.isdecimal():
        raise ValueError(text)
    return int(digits)


def price_of(text: str) -> int:
    """A price above zero in billionths, as `units_of`; a `ValueError` if it doesn't fit int64."""
    units = units_of(text)
    if not 0 < units < 2**63:
        raise ValueError(text)
    return units


def size_of(text: str) -> float:
    """A size in units, zero or more; a `ValueError` if it is no such number."""
    return units_of(text) / UNITS


def refuse_several(source: Source, what: str, names: list[str]) -> None:
    """Refuse a recording of several instruments.

    Raises:
        TapeError: there is more than one name.
    """
    if len(names) > 1:
        raise TapeError(
            source.paths[0],
            expected=f"messages of one {what}",
            found=joined(sorted(names), "and"),
            fix=f"Split the files by {what}, and read them one by one",
        )


def _split(line: bytes) -> tuple[int, dict[str, Any]]:
    time, _, text = line.partition(b" ")
    if not time.isdigit():
        raise ValueError(time)
    time_ns, message = int(time), json.loads(text)
    if not YEAR_1990_S <= time_ns // 10**9 < YEAR_2100_S or not isinstance(message, dict):
        raise ValueError(time)
    return time_ns, message


def _blocks_of_lines(source: Source, path: Path) -> Iterator[list[bytes]]:
    with open_stream(path) as (raw, stream):
        num_bytes = path.stat().st_size
        rest = b""
        while block := stream.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise TapeError(
                    path,
                    expected="lines of `<local ns> <json>`",
                    found=f"one of more than {_MAX_LINE_BYTES:,} bytes",
                    fix="Check that the file is a recording, and pin format if it is another",
                )
            yield lines
            if source.progress is not None:
                source.progress(raw.tell(), num_bytes)
        yield [rest]
