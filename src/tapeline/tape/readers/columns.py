"""A table in a file, CSV or Parquet alike: the names of its columns, and its rows in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tapeline.session import Int64Array
from tapeline.tape.readers.text import CsvBlocks, Progress, Unreadable, csv_header, open_stream

PARQUET: Final = b"PAR1"  # how such a file begins
# Each block, and what to tell the rows of it that are left out.
TableBlocks = Iterator[tuple[pa.RecordBatch, Callable[[Int64Array], None]]]


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its first bytes."""
    with open_stream(path) as (raw, _):
        return raw.read(len(PARQUET)) == PARQUET


def column_names(path: Path) -> list[str]:
    """The columns of a CSV or Parquet file."""
    if not is_parquet(path):
        return csv_header(path)[0]
    with open_stream(path):
        return list(pq.read_schema(path).names)


def csv_blocks(
    path: Path, columns: Sequence[str], unreadable: Unreadable, progress: Progress | None
) -> TableBlocks:
    """Blocks of these columns of a CSV file."""
    lines = CsvBlocks(path, tuple(columns), progress, unreadable=unreadable)
    for num_before, batch in lines:
        yield batch, functools.partial(lines.leave_out, batch, num_before)


def parquet_blocks(
    path: Path, columns: Sequence[str] | None, unreadable: Unreadable, num_rows: int
) -> TableBlocks:
    """Blocks of `num_rows` of these columns of a Parquet file, None for all."""
    num_before = 0

    def leave_out(batch: pa.RecordBatch, num_before: int, rows: Int64Array) -> None:
        if len(rows):
            words = ",".join(str(column[int(rows[0])]) for column in batch.columns)
            unreadable.add(num_before + int(rows[0]) + 1, words, len(rows))

    with open_stream(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(num_rows, columns=columns and list(columns)):
            yield batch, functools.partial(leave_out, batch, num_before)
            num_before += len(batch)
