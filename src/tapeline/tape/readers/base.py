"""What a reader is.

Covers the contract between a format and `read`, and the head of a file by which formats tell each
other apart. Does not cover any format.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tapeline.errors import TapeError
from tapeline.tape.blocks import Block
from tapeline.tape.grid import GridOptions, Policy, check_share
from tapeline.tape.readers.text import Progress, Unreadable, open_stream
from tapeline.tape.report import Counts
from tapeline.tape.sessions import Sessions, UtcDays

HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a file, by which its format is recognised.

    Attributes:
        path: the file; its name is a hint and never more.
        raw: its first bytes as they are.
        text: its first bytes unpacked, if it is packed.
    """

    path: Path
    raw: bytes
    text: bytes

    @classmethod
    def of(cls, path: Path) -> Head:
        """The head of a file.

        Raises:
            TapeError: there is no such file, it is empty, or it can't be unpacked.
        """
        with open_stream(path) as (raw, stream):
            start = raw.read(HEAD_BYTES)
            raw.seek(0)
            text = stream.read(HEAD_BYTES)
        if not text:
            raise TapeError(
                path,
                expected="a market data file",
                found="one that holds nothing, unpacked" if start else "an empty file",
                fix="Fetch it again: it may be cut short" if start else "Give one with data",
            )
        return cls(path, start, bytes(text))

    @property
    def lines(self) -> list[str]:
        """The lines that the head holds whole, or what it holds of the first; without ends."""
        lines = self.text.decode("utf-8-sig", "replace").split("\n")
        whole = lines if len(self.text) < HEAD_BYTES or len(lines) == 1 else lines[:-1]
        return [line.rstrip("\r") for line in whole]

    @property
    def header(self) -> list[str]:
        """The fields of the first line, as a CSV has them; none if it can't be one."""
        try:
            return [name.strip() for name in next(csv.reader(self.lines[:1]), [])]
        except csv.Error:
            return []


@dataclass(slots=True)
class Source:
    """What a reader reads, and where it tells what it found.

    Attributes:
        paths: files that continue each other, in order; one or more.
        counts: where it counts `lines_read`, `lines_unreadable`, and by `counts.count` what else
            it leaves out. Rows, sessions, times and the book are counted for it.
        max_unreadable_share: largest share of lines that may be left out.
        progress: to be called with the bytes read and the bytes of the file.
        first_unreadable: number and text of the first line left out.
        max_lifted_share: largest share of events that may be out of the order of time.
    """

    paths: list[Path]
    counts: Counts
    max_unreadable_share: float = 0.001
    progress: Progress | None = None
    first_unreadable: str | None = None
    max_lifted_share: float = 0.01

    def __post_init__(self) -> None:
        check_share("max_unreadable_share", self.max_unreadable_share)
        check_share("max_lifted_share", self.max_lifted_share)

    def close(self, path: Path, unreadable: Unreadable, num_readable: int) -> None:
        """Account for the lines of one file.

        Raises:
            TapeError: more than `max_unreadable_share` of them could not be read.
        """
        num_lines = num_readable + unreadable.num
        self.counts.lines_read += num_lines
        self.counts.lines_unreadable += unreadable.num
        if self.first_unreadable is None:
            self.first_unreadable = unreadable.first
        unreadable.check(path, num_lines, self.max_unreadable_share)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Nothing to say about a file of this format."""


class Reader(ABC):
    """A format: from files to blocks of one kind, in the order of the files.

    It must not need more memory than a block. Times that step back are left as they are.

    Attributes:
        name: by which the format can be asked for.
        looks_for: what it recognises, said when no reader recognises a file.
        is_general: whether it takes what a more particular reader may recognise too.
        Options: a frozen dataclass of what the user may say about a file, each with a default.
        policy: for books that show no market, unless the user gives another.
        grid, sessions: likewise.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]
    is_general: ClassVar[bool] = False
    Options: ClassVar[type[Any]] = NoOptions
    policy: ClassVar[Policy] = Policy()
    grid: ClassVar[GridOptions] = GridOptions()
    sessions: ClassVar[Callable[[], Sessions]] = UtcDays

    def __init__(self, source: Source, options: Any) -> None:
        self.source = source
        self.options = options

    @classmethod
    @abstractmethod
    def recognises(cls, head: Head) -> bool:
        """Whether a file that begins like this is of the format."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """The data. Called once.

        Raises:
            TapeError: a file can't be read as what it claims to be.
        """

    @classmethod
    def tape_of(cls, path: Path) -> Path:
        """The file that stands for the tape a file belongs to; itself unless files come in pairs.

        Raises:
            TapeError: its partner is missing.
        """
        return path

    def detected(self) -> dict[str, str]:
        """What was found out, by the name of the option that pins it; complete after `blocks`."""
        return {}

    def instrument(self) -> str | None:
        """The instrument that the files name, known after the first block; None if they don't."""
        return None


def joined(names: Sequence[str], last: str = "or") -> str:
    """Names as a sentence has them."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
