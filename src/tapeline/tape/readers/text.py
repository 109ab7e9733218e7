"""CSV files in blocks, and numbers in them without a float on the way.

Covers plain and packed files (told apart by content), a header matched by name, lines that can't
be read, and exact integers from decimal text. Does not cover what the columns mean.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array

Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes of the file

BLOCK_BYTES: Final = 1 << 20
_HEADER_BYTES: Final = 1 << 16
_SHOWN: Final = 80
_PACKED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(slots=True)
class Unreadable:
    """The lines that were left out: how many, and the first of them."""

    num: int = 0
    line: int = 0
    text: str = ""

    def add(self, line: int, text: str, num: int = 1) -> None:
        """Count `num` lines, given the number in the file and the text of the first of them."""
        if not self.num or line < self.line:
            self.line = line
            self.text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        self.num += num

    @property
    def first(self) -> str | None:
        """Where the first one is, and what it says."""
        return f"line {self.line}: {self.text}" if self.num else None

    def check(self, path: Path, num_lines: int, max_share: float) -> None:
        """Refuse a file of `num_lines` data lines if more than `max_share` was left out."""
        if self.num > max_share * num_lines:
            raise TapeError(
                f"{path}, line {self.line}",
                expected=f"at most {max_share:.4%} of the lines to be unreadable",
                found=f"{self.num:,} of {num_lines:,}, the first being `{self.text}`",
                fix="Repair the file, or raise max_unreadable_share if losing them is all right",
            )


@dataclass(slots=True)
class CsvBlocks:
    """A CSV file as record batches of byte strings, one block of the file at a time.

    Lines of another number of fields than the header are left out and counted in `unreadable`.

    Attributes:
        path: the file, plain or packed (gzip or zstd, told by content).
        columns: names of the columns wanted; others are skipped.
        progress: called after each block.
        header: names of all columns; None: the first line has them.
    """

    path: Path
    columns: tuple[str, ...]
    progress: Progress | None = None
    header: tuple[str, ...] | None = None
    unreadable: Unreadable = field(default_factory=Unreadable)
    _misshapen: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Each block's lines, after the number of lines in the blocks before it.

        Raises:
            TapeError: the file is missing, empty, cut short, not a CSV, or lacks a column.
        """
        with open_stream(self.path) as (raw, stream):
            num_bytes = self.path.stat().st_size
            num_lines = 0
            for batch in self._open(stream):
                yield num_lines, batch
                num_lines += len(batch)
                if self.progress is not None:
                    self.progress(raw.tell(), num_bytes)

    def leave_out(self, batch: pa.RecordBatch, num_before: int, rows: Int64Array) -> None:
        """Count rows of a block that the caller can't read; blank lines are not counted.

        Args:
            batch: the block.
            num_before: what came with it.
            rows: numbers within the block, rising.
        """
        bad = batch.take(rows)
        lengths = sum(np.asarray(pc.binary_length(column)) for column in bad.columns)
        written = np.flatnonzero(lengths)
        if not len(written):
            return
        # Counted from 1, after the header.
        line = num_before + int(rows[written[0]]) + (2 if self.header is None else 1)
        for misshapen in self._misshapen:
            line += misshapen <= line
        fields = [column[written[0]].as_py() for column in bad.columns]
        self.unreadable.add(line, b",".join(fields).decode("utf-8", "replace"), len(written))

    def _open(self, stream: Any) -> Any:
        names, is_quoted = list(self.header or ()), False
        if self.header is None:
            names, is_quoted = csv_header(self.path)
        if missing := [name for name in self.columns if name not in names]:
            shown = ", ".join(names)
            raise TapeError(
                f"{self.path}, line 1",
                expected=f"columns named {', '.join(self.columns)}",
                found=f"no {', '.join(missing)} among `{shown[:_SHOWN]}`",
                fix="Rename the columns, or use the reader of this format",
            )
        return pa_csv.open_csv(
            stream,
            read_options=pa_csv.ReadOptions(
                use_threads=False,  # line numbers are known only to the serial parser
                block_size=BLOCK_BYTES,
                column_names=names,
                skip_rows=self.header is None,
            ),
            parse_options=pa_csv.ParseOptions(
                # Elsewhere a lone quote is dirt, and would swallow every line to the next one.
                quote_char='"' if is_quoted else False,
                ignore_empty_lines=False,  # they would shift the line numbers
                invalid_row_handler=self._skip,
            ),
            convert_options=pa_csv.ConvertOptions(
                include_columns=list(self.columns),
                column_types=dict.fromkeys(self.columns, pa.binary()),
            ),
        )

    def _skip(self, row: Any) -> str:
        self._misshapen.append(row.number)
        self.unreadable.add(row.number, row.text)
        return "skip"


def csv_header(path: Path) -> tuple[list[str], bool]:
    """The names in a CSV file's first line, and whether it has quotes.

    Raises:
        TapeError: the file is missing, empty, or begins with an empty line.
    """
    with open_stream(path) as (_, stream):
        start = bytes(stream.read(_HEADER_BYTES))
    header = start.partition(b"\n")[0]
    try:
        names = next(csv.reader([header.decode("utf-8-sig", "replace").rstrip("\r")]), [])
    except csv.Error:
        names = [header[:_SHOWN].decode("ascii", "replace")]  # no column is called that
    if not names:
        raise TapeError(
            path,
            expected="a line of column names",
            found="an empty first line" if start else "an empty file",
            fix="Give a CSV file with a header",
        )
    return names, b'"' in header


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """A file as it is, and its content unpacked; what goes wrong in the block is told of it.

    Raises:
        TapeError: the file is missing, cut short, damaged, or not what the block takes it for.
    """
    try:
        with path.open("rb") as raw:
            yield raw, _decompressed(raw)
    except FileNotFoundError:
        raise TapeError(
            path, expected="a file", found="nothing there", fix="Check the path"
        ) from None
    except pa.ArrowInvalid as error:
        raise TapeError(
            path,
            expected="lines of comma-separated fields",
            found=_first_line(error),
            fix="Check that the file is a CSV",
        ) from None
    except OSError as error:
        raise TapeError(
            path,
            expected="a file that can be read to its end",
            found=_first_line(error),
            fix="Fetch the file again: it may be cut short or damaged",
        ) from None


def exact_integers(column: pa.Array, decimals: int) -> tuple[npt.NDArray[Any], BoolArray]:
    """Decimal text times 10^`decimals`, exactly, and which of it is such a number.

    The numbers are int64, or Python integers in an object array where one doesn't fit. They mean
    nothing where the text is no number or has more decimals.
    """
    parsed = _decimals(column, pa.decimal128(38, decimals))
    readable = np.asarray(parsed.is_valid())
    # A decimal128 is a little-endian two's complement integer of 16 bytes.
    words = np.frombuffer(parsed.buffers()[1], "<i8").reshape(-1, 2)[parsed.offset :][: len(parsed)]
    low, high = words.T
    if np.array_equal(high, low >> 63):
        return low, readable
    return (high.astype(object) << 64) + low.astype(np.uint64).astype(object), readable


def _decimals(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return halved(column, lambda part: part.cast(pa.string()).cast(kind), kind)


def halved(column: pa.Array, cast: Callable[[pa.Array], pa.Array], kind: pa.DataType) -> pa.Array:
    """Cast by halves: one bad value costs a few casts and not the block, and becomes null."""
    try:
        return cast(column)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
        middle = len(column) // 2
        return pa.concat_arrays(
            [halved(column[:middle], cast, kind), halved(column[middle:], cast, kind)]
        )


def _decompressed(raw: IO[bytes]) -> Any:
    """The content of a freshly opened file."""
    magic = raw.read(4)
    raw.seek(0)
    stream = pa.PythonFile(raw, mode="r")
    for start, codec in _PACKED.items():
        if magic.startswith(start):
            return pa.CompressedInputStream(stream, codec)
    return stream


def _first_line(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return reason.splitlines()[0] if reason else type(error).__name__
