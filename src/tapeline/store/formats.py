"""The formats: how sessions become files and come back as one matrix.

Each format is a `Writer` that is given sessions in order and a `Reader` that gives back the same
bits. Neither knows about the index's other contents; `write.py` and `shards.py` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from tapeline.errors import StoreError
from tapeline.files import xxh3_file
from tapeline.session import Float32Array, Int64Array, Session
from tapeline.store.layout import FileEntry, StoreIndex

LITTLE: dict[str, str] = {"values": "<f4", "times": "<i8", "age_ns": "<i8"}
_CSV_TIME = "time_ns"
_CSV_AGE = "age_ns"


def parts(session: Session) -> dict[str, npt.NDArray[Any]]:
    """The session's arrays by name, little-endian; those it doesn't have are left out."""
    arrays = {"values": session.values, "times": session.times, "age_ns": session.age_ns}
    return {
        name: array.astype(LITTLE[name], copy=False)
        for name, array in arrays.items()
        if array is not None
    }


class Writer(ABC):
    """Writes sessions, one after the other, into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileEntry] = {}

    @abstractmethod
    def add(self, number: int, session: Session) -> None:
        """Write the next session."""

    def close(self) -> None:  # noqa: B027 - nothing is left open where each session is a file
        """Finish; afterwards `files` names every file."""

    def _enter(self, name: str, *, hashed: bool) -> None:
        path = self.folder / name
        digest = xxh3_file(path) if hashed else None
        self.files[name] = FileEntry(bytes=path.stat().st_size, xxh3=digest)


class Reader(ABC):
    """Reads back what the writer of the same format wrote."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder = folder
        self.index = index

    @abstractmethod
    def matrix(self) -> Float32Array:
        """All values, float32 `[rows, columns]`, sessions one after the other."""

    @abstractmethod
    def beside(self, number: int, name: str) -> Int64Array:
        """The int64 array `name` ("times" or "age_ns") of one session, `[rows]`."""

    def _empty(self) -> Float32Array:
        return np.empty((self.index.num_rows, len(self.index.columns)), dtype=np.float32)


class MappedWriter(Writer):
    """One raw little-endian file per array: `values.f32`, `times.i64`, `age_ns.i64`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._streams: dict[str, IO[bytes]] = {}

    def add(self, number: int, session: Session) -> None:  # noqa: ARG002
        """Append the session's bytes to each file."""
        for name, array in parts(session).items():
            if name not in self._streams:
                self._streams[name] = (self.folder / mapped_name(name)).open("wb")
            self._streams[name].write(np.ascontiguousarray(array).data)

    def close(self) -> None:
        """Close the files and note their sizes."""
        for name, stream in self._streams.items():
            stream.close()
            self._enter(mapped_name(name), hashed=False)


class MappedReader(Reader):
    """Maps the files instead of reading them."""

    def matrix(self) -> Float32Array:
        """The values, mapped read-only."""
        return self._map("values", (self.index.num_rows, len(self.index.columns)))

    def beside(self, number: int, name: str) -> Int64Array:
        """A session's part of a mapped file."""
        entry = self.index.sessions[number]
        whole = self._map(name, (self.index.num_rows,))
        return whole[entry.offset : entry.offset + entry.rows]

    def _map(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if 0 in shape:  # an empty file can't be mapped
            return np.empty(shape, dtype=LITTLE[name])
        return np.memmap(self.folder / mapped_name(name), LITTLE[name], mode="r", shape=shape)


class NpyWriter(Writer):
    """One `.npy` file per session and array."""

    def add(self, number: int, session: Session) -> None:
        """Write the session's arrays."""
        for name, array in parts(session).items():
            np.save(self.folder / npy_name(number, name), array, allow_pickle=False)
            self._enter(npy_name(number, name), hashed=True)


class NpyReader(Reader):
    """Reads the files of all sessions into one matrix."""

    def matrix(self) -> Float32Array:
        """All values, in memory."""
        matrix = self._empty()
        for number, entry in enumerate(self.index.sessions):
            matrix[entry.offset : entry.offset + entry.rows] = self._load(number, "values")
        return matrix

    def beside(self, number: int, name: str) -> Int64Array:
        """One file."""
        return self._load(number, name)

    def _load(self, number: int, name: str) -> npt.NDArray[Any]:
        path = self.folder / npy_name(number, name)
        rows = self.index.sessions[number].rows
        shape = (rows, len(self.index.columns)) if name == "values" else (rows,)
        try:
            array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        except Exception:  # NumPy's parser of headers lets through whatever Python's own raises
            raise _damaged(path, "bytes that aren't a NumPy array") from None
        if array.shape != shape or array.dtype != LITTLE[name]:
            raise _damaged(path, f"{array.dtype} of shape {list(array.shape)}")
        return array


class CsvWriter(Writer):
    """One `.csv` file per session: time, columns, age. Enough digits to give back the bits."""

    def add(self, number: int, session: Session) -> None:
        """Write the session as one table."""
        taken = {_CSV_TIME, _CSV_AGE} & set(session.columns)
        if taken:
            raise StoreError(
                f"session {session.key}",
                expected=f"columns other than {_CSV_TIME} and {_CSV_AGE}, which CSV needs itself",
                found=f"a column named {taken.pop()}",
                fix="Rename the column, or use the mmap or npy format",
            )
        columns: dict[str, npt.NDArray[Any]] = {}
        if session.times is not None:
            columns[_CSV_TIME] = session.times
        columns |= {name: session.values[:, i] for i, name in enumerate(session.columns)}
        if session.age_ns is not None:
            columns[_CSV_AGE] = session.age_ns
        # from_pandas=False keeps NaN a number instead of making it a missing value
        table = pa.table({k: pa.array(v, from_pandas=False) for k, v in columns.items()})
        pa_csv.write_csv(table, self.folder / csv_name(number))
        self._enter(csv_name(number), hashed=True)


class CsvReader(Reader):
    """Parses the files of all sessions into one matrix."""

    def matrix(self) -> Float32Array:
        """All values, in memory."""
        matrix = self._empty()
        for number, entry in enumerate(self.index.sessions):
            table = self._table(number, self.index.columns)
            block = matrix[entry.offset : entry.offset + entry.rows]
            for i, column in enumerate(table.columns):
                block[:, i] = column.to_numpy()
        return matrix

    def beside(self, number: int, name: str) -> Int64Array:
        """One column of one file."""
        column = {"times": _CSV_TIME, "age_ns": _CSV_AGE}[name]
        values: Int64Array = self._table(number, [column]).column(0).to_numpy()
        return values

    def _table(self, number: int, columns: list[str]) -> Any:
        path = self.folder / csv_name(number)
        types = {name: pa.float32() for name in self.index.columns}
        types |= {_CSV_TIME: pa.int64(), _CSV_AGE: pa.int64()}
        try:
            table = pa_csv.read_csv(
                path,
                read_options=pa_csv.ReadOptions(use_threads=False),
                convert_options=pa_csv.ConvertOptions(
                    column_types=types, include_columns=columns, null_values=[]
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise _damaged(path, str(error).splitlines()[0]) from None
        if table.num_rows != self.index.sessions[number].rows:
            raise _damaged(path, f"{table.num_rows} rows")
        return table


def mapped_name(name: str) -> str:
    """The file of one array in the mmap format."""
    return f"{name}.{'f32' if name == 'values' else 'i64'}"


def npy_name(number: int, name: str) -> str:
    """The file of one array of one session in the npy format."""
    return f"session-{number:05d}.{name}.npy"


def csv_name(number: int) -> str:
    """The file of one session in the csv format."""
    return f"session-{number:05d}.csv"


def _damaged(path: Path, found: str) -> StoreError:
    return StoreError(
        path,
        expected="the rows and columns that the store's index lists",
        found=found,
        fix="Copy the file again, or write the store again",
    )


WRITERS: dict[str, type[Writer]] = {"mmap": MappedWriter, "npy": NpyWriter, "csv": CsvWriter}
READERS: dict[str, type[Reader]] = {"mmap": MappedReader, "npy": NpyReader, "csv": CsvReader}
