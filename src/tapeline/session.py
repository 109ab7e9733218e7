"""The session: one trading day, or a segment of it, of one instrument.

On the ground floor because the tape makes sessions and the store keeps them, and neither knows
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeline.errors import StoreError

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """What a session is of: an instrument, its trade date (ISO 8601), a segment of that date."""

    instrument: str
    date: str = ""
    segment: int = 0

    def __str__(self) -> str:
        parts = [self.instrument, self.date] if self.date else [self.instrument]
        return "/".join([*parts, str(self.segment)] if self.segment else parts)


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Rows of one instrument in time order, on a regular grid.

    Attributes:
        key: instrument, date, segment.
        values: float32 `[rows, columns]`; price columns are relative to `origin`.
        columns: a name for each column.
        times: int64 `[rows]`, nanoseconds UTC; None for plain arrays, which have none.
        age_ns: int64 `[rows]`, how long before the row's time the last update was; None if unknown.
        valid: bool `[rows]`; no window and no target may touch a row that is False. None: all are.
        origin: what was subtracted from every price column before the cast to float32, in price
            units. A float32 near 61,686 has a step of 0.0039; differences don't suffer from it.
        derived: names of columns that were computed from others, to the version of how.
        made: how rows came about, by the names of the options; one store has rows made alike.

    Raises:
        StoreError: shapes or dtypes that don't fit together, names that aren't distinct, times
            that step back.
    """

    key: SessionKey
    values: Float32Array
    columns: tuple[str, ...] = field(default=())
    times: Int64Array | None = None
    age_ns: Int64Array | None = None
    valid: BoolArray | None = None
    origin: float = 0.0
    derived: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = self.values
        if not isinstance(values, np.ndarray) or values.ndim != 2:
            raise StoreError(
                f"session {self.key}",
                expected="values of shape [rows, columns]",
                found=f"{type(values).__name__} of shape {list(np.shape(values))}",
                fix="Give a two-dimensional array, one row per instant",
            )
        if values.shape[1] == 0:
            raise StoreError(
                f"session {self.key}",
                expected="at least one column",
                found=f"shape {list(values.shape)}",
                fix="Give an array with a column for each quantity",
            )
        if values.dtype.kind not in "fiub":
            raise StoreError(
                f"session {self.key}",
                expected="numbers",
                found=f"dtype {values.dtype}",
                fix="Convert the values to numbers first",
            )
        # One layout for all: native float32, C order, whatever byte order or stride came in.
        with np.errstate(over="ignore"):  # what overflows becomes inf, which the store refuses
            object.__setattr__(self, "values", np.ascontiguousarray(values, dtype=np.float32))
        columns = tuple(self.columns) or tuple(f"c{i}" for i in range(values.shape[1]))
        object.__setattr__(self, "columns", columns)
        if len(columns) != values.shape[1] or len(set(columns)) != len(columns):
            raise StoreError(
                f"session {self.key}",
                expected=f"{values.shape[1]} distinct column names",
                found=f"{len(columns)} names, {len(set(columns))} distinct",
                fix="Give each column one name",
            )
        if not math.isfinite(self.origin):
            raise StoreError(
                f"session {self.key}, origin",
                expected="a finite price",
                found=str(self.origin),
                fix="Take the origin from a row whose price is known, or 0",
            )
        self._check_beside("times", np.int64)
        self._check_beside("age_ns", np.int64)
        self._check_beside("valid", np.bool_)
        # Compared, not subtracted: a difference of int64 can wrap.
        if self.times is not None and (back := self.times[1:] < self.times[:-1]).any():
            row = int(np.argmax(back)) + 1
            raise StoreError(
                f"session {self.key}, row {row}",
                expected="times that never step back",
                found=f"{self.times[row]} ns after {self.times[row - 1]} ns",
                fix="Sort the rows by time before making a session of them",
            )

    def _check_beside(self, name: str, dtype: type[np.generic]) -> None:
        beside = getattr(self, name)
        if beside is None:
            return
        beside = np.asarray(beside)
        native = beside.dtype.newbyteorder("=")
        if native != np.dtype(dtype) or beside.shape != (len(self.values),):
            raise StoreError(
                f"session {self.key}, {name}",
                expected=f"{np.dtype(dtype)} of shape [{len(self.values)}]",
                found=f"{beside.dtype} of shape {list(beside.shape)}",
                fix="Give one entry of that type per row",
            )
        object.__setattr__(self, name, np.ascontiguousarray(beside, dtype=native))

    def __len__(self) -> int:
        return len(self.values)


def as_session(value: Session | npt.ArrayLike, number: int) -> Session:
    """`value` itself if it is a session, else a plain 2-D array made into one.

    A plain array has no instrument, date or times: its key is `array-<number>`.

    Raises:
        StoreError: the array is not two-dimensional or not of numbers.
    """
    if isinstance(value, Session):
        return value
    key = SessionKey(f"array-{number}")
    try:
        array: Any = np.asarray(value)
    except ValueError:  # NumPy's word for rows of different lengths
        raise StoreError(
            f"session {key}",
            expected="values of shape [rows, columns]",
            found="rows of different lengths",
            fix="Give a two-dimensional array, one row per instant",
        ) from None
    return Session(key, array)
