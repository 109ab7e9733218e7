"""The csv format: one `.csv` file per session, to look at. Enough digits to give back the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from tapeline.errors import StoreError
from tapeline.files import xxh3_file
from tapeline.session import Session
from tapeline.store.formats.base import SESSION, Reader, Writer, damaged
from tapeline.store.layout import FileEntry, SessionEntry

_CSV_TIME = "time_ns"
_CSV_AGE = "age_ns"


class CsvWriter(Writer):
    """Writes time, columns, age."""

    def add(self, number: int, session: Session, entry: SessionEntry) -> None:  # noqa: ARG002
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
        path = self.place.folder / csv_name(number)
        pa_csv.write_csv(table, path)
        self.files[path.name] = FileEntry(bytes=path.stat().st_size, xxh3=xxh3_file(path))


class CsvReader(Reader):
    """Parses the files."""

    def load(self, number: int, name: str) -> npt.NDArray[Any]:
        """The columns of one file that make the array."""
        if name != "values":
            column = {"times": _CSV_TIME, "age_ns": _CSV_AGE}[name]
            beside: npt.NDArray[Any] = self._table(number, [column]).column(0).to_numpy()
            return beside
        table = self._table(number, self.index.columns)
        block = np.empty(table.shape, dtype=np.float32)
        for i, column in enumerate(table.columns):
            block[:, i] = column.to_numpy()
        return block

    def _table(self, number: int, columns: list[str]) -> Any:
        path = self.place.folder / csv_name(number)
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
            raise damaged(path, str(error).splitlines()[0]) from None
        if table.num_rows != self.index.sessions[number].rows:
            raise damaged(path, f"{table.num_rows} rows")
        return table


def csv_name(number: int) -> str:
    """The file of one session."""
    return f"{SESSION}{number:05d}.csv"
