"""CSV files in blocks, and numbers in them without a float on the way.

Covers plain and packed files (told apart by content), files that aren't text, a header matched by
name, lines that can't be read, and exact integers from decimal text. Does not cover what the
columns mean.
"""

from __future__ import annotations

import contextlib
import csv
import sys
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
from tapeline.words import percent

Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes of the file

BLOCK_BYTES: Final = 1 << 20
_HEADER_BYTES: Final = 1 << 16
_SHOWN: Final = 80
_BLANKS: Final = b" \t"
_FOREIGN: Final = (  # how files begin that people take for a CSV, and what to do with them
    (b"PK\x03\x04", "a zip archive", "Unpack it"),
    (b"BZh", "a file packed by bzip2", "Unpack it, or pack it with gzip or zstd"),
    (b"\xfd7zXZ", "a file packed by xz", "Unpack it, or pack it with gzip or zstd"),
    (b"\xff\xfe", "text in UTF-16", "Convert it with `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "text in UTF-16", "Convert it with `iconv -f UTF-16 -t UTF-8`"),
)
_PACKED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(slots=True)
class Unreadable:
    """The lines that were left out: how many, and the first of them."""

    num: int = 0
    line: int = 0
    text: str = ""
    why: str = ""

    def add(self, line: int, text: str, num: int = 1, why: str = "") -> None:
        """Count `num` lines, given the first one's number in the file, text, and what is wrong."""
        if not self.num or line < self.line:
            self.line, self.text, self.why = line, printable(text), why
        self.num += num

    @property
    def first(self) -> str | None:
        """Where the first one is, and what it says."""
        why = f" ({self.why})" if self.why else ""
        return f"line {self.line}: {self.text}{why}" if self.num else None

    def check(self, path: Path, num_lines: int, max_share: float) -> None:
        """Refuse a file of `num_lines` data lines if more than `max_share` was left out."""
        if self.num > max_share * num_lines:
            why = f", where {self.why}" if self.why else ""
            raise TapeError(
                f"{path}, line {self.line}",
                expected=f"at most {percent(max_share, '.4f')} of the lines to be unreadable",
                found=f"{self.num:,} of {num_lines:,}, the first being `{self.text}`{why}",
                fix="Repair the file, or raise max_unreadable_share (`--set "
                "max_unreadable_share=…`) if losing them is all right",
            )


@dataclass(slots=True)
class CsvBlocks:
    """A CSV file as record batches of byte strings, one block of the file at a time.

    Lines of another number of fields than the header are left out and counted in `unreadable`.
    Blanks around a field aren't part of it.

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
            for batch in _told_once(self._open(stream)):
                yield num_lines, _stripped(batch)
                num_lines += len(batch)
                if self.progress is not None:
                    self.progress(raw.tell(), num_bytes)

    def leave_out(
        self,
        batch: pa.RecordBatch,
        num_before: int,
        rows: Int64Array,
        why: Callable[[int], str] | None = None,
    ) -> None:
        """Count rows of a block that the caller can't read; blank lines are not counted.

        Args:
            batch: the block.
            num_before: what came with it.
            rows: numbers within the block, rising.
            why: gives what is wrong with one of them.
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
        text = b",".join(fields).decode("utf-8", "replace")
        reason = why(int(rows[written[0]])) if why else ""
        self.unreadable.add(line, text, len(written), reason)

    def _open(self, stream: Any) -> Iterator[pa.RecordBatch]:
        names, is_quoted = list(self.header or ()), False
        if self.header is None:
            start = _start_of(self.path)
            names, is_quoted = _header_in(start, self.path)
            self._check(names)
            if b"\n" not in start and len(start) < _HEADER_BYTES:
                return  # nothing but the header, and pyarrow wants its end
        yield from pa_csv.open_csv(
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

    def _check(self, names: list[str]) -> None:
        if missing := [name for name in self.columns if name not in names]:
            raise TapeError(
                f"{self.path}, line 1",
                expected=f"columns named {', '.join(self.columns)}",
                found=f"no {', '.join(missing)} among `{printable(', '.join(names))}`",
                fix="Rename the columns, or use the reader of this format",
            )
        if twice := next((name for name in self.columns if names.count(name) > 1), None):
            raise TapeError(
                f"{self.path}, line 1",
                expected=f"one column named {printable(twice)}",
                found=f"{names.count(twice)}",
                fix="Rename the one that isn't meant",
            )

    def _skip(self, row: Any) -> str:
        self._misshapen.append(row.number)
        found = f"the number of fields is {row.actual_columns:,} and not {row.expected_columns:,}"
        self.unreadable.add(row.number, row.text, why=found)
        return "skip"


def csv_header(path: Path) -> tuple[list[str], bool]:
    """The names in a CSV file's first line, and whether it has quotes.

    Raises:
        TapeError: the file is missing, empty, no text in UTF-8, or begins with an empty line.
    """
    return _header_in(_start_of(path), path)


def _start_of(path: Path) -> bytes:
    with open_stream(path) as (_, stream):
        return bytes(stream.read(_HEADER_BYTES))


def _header_in(start: bytes, path: Path) -> tuple[list[str], bool]:
    refuse_foreign(start, path)
    header = start.partition(b"\n")[0].decode("utf-8-sig", "replace").rstrip("\r")
    try:
        names = [name.strip() for name in next(csv.reader([header]), [])]
    except csv.Error:
        names = [header[:_SHOWN]]  # no column is called that
    if any(byte < 32 and byte not in b"\t\r" for byte in start.partition(b"\n")[0]):
        raise TapeError(
            path,
            expected="a line of column names",
            found=f"bytes that aren't text: {start[:8].hex(' ')}",
            fix="Check what the file is",
        )
    if not names:
        raise TapeError(
            path,
            expected="a line of column names",
            found="an empty first line" if start else "an empty file",
            fix="Give a CSV file with a header",
        )
    return names, '"' in header


def refuse_foreign(start: bytes, path: Path) -> None:
    """Refuse a file of text that begins as no such file does.

    Raises:
        TapeError: it says what the file is, and what to do.
    """
    found, fix = next(
        ((what, do) for magic, what, do in _FOREIGN if start.startswith(magic)), ("", "")
    )
    first, newline, _ = start.partition(b"\n")
    if not found and b"\r" in first.rstrip(b"\r") and not newline:
        found = "lines that end in a carriage return alone"
        fix = "Convert their ends with `tr '\\r' '\\n'`"
    if found:
        raise TapeError(path, expected="lines of text in UTF-8", found=found, fix=fix)


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
    except IsADirectoryError:
        raise TapeError(
            path, expected="a file", found="a directory", fix="Give the files in it"
        ) from None
    except PermissionError:
        raise TapeError(
            path,
            expected="a file that may be read",
            found="no permission to",
            fix="Change its permissions, or read it as another user",
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
    kind = pa.decimal128(38, decimals)
    parsed = halved(column, lambda part: part.cast(pa.string()).cast(kind), kind)
    readable = np.asarray(parsed.is_valid())
    # A decimal128 is a little-endian two's complement integer of 16 bytes.
    words = np.frombuffer(parsed.buffers()[1], "<i8").reshape(-1, 2)[parsed.offset :][: len(parsed)]
    low, high = words.T
    if np.array_equal(high, low >> 63):
        return low, readable
    return (high.astype(object) << 64) + low.astype(np.uint64).astype(object), readable


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
    return printable(reason.splitlines()[0], 160) if reason else type(error).__name__


def printable(text: str, num: int = _SHOWN) -> str:
    """At most `num` characters of a file's text, with no control characters among them."""
    shown = text if len(text) <= num else f"{text[: num - 1]}…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def _stripped(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without blanks around its fields; the same one if there is no blank in it."""
    columns = [_stripped_column(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _stripped_column(column: pa.Array) -> pa.Array:
    if not any(pc.any(pc.match_substring(column, bytes([b]))).as_py() for b in _BLANKS):
        return column
    return pa.array([field.strip(_BLANKS) for field in column.to_pylist()], column.type)


def _told_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; an error in them is raised and not printed as well.

    A misshapen line that isn't UTF-8 can't be handed to `CsvBlocks._skip`. pyarrow then prints a
    traceback, and raises what `open_stream` tells.
    """
    while True:
        with _no_print_of_bad_text():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@contextlib.contextmanager
def _no_print_of_bad_text() -> Iterator[None]:
    hook = sys.unraisablehook

    def quiet(args: sys.UnraisableHookArgs) -> None:
        if not isinstance(args.exc_value, UnicodeDecodeError):
            hook(args)

    sys.unraisablehook = quiet
    try:
        yield
    finally:
        sys.unraisablehook = hook
