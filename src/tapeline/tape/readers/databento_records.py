"""Databento's records as arrays, whatever file they come from.

Covers their dtypes, and what a file of them must do. Does not cover how a file spells them:
`databento_dbn` and `databento_table` do.

The dtypes are the records of DBN as they stand in the file: `MboMsg`, `Mbp1Msg` and `Mbp10Msg` of
the crate `dbn` (github.com/databento/dbn, record.rs), which are the same in versions 1 to 3. Every
spelling gives arrays of them, so one record gives the same numbers however it is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapeError
from tapeline.tape.readers.base import Source, joined
from tapeline.tape.readers.times import TimeUnit

Records = npt.NDArray[Any]  # structured, of `MBO` or `mbp(levels)`
Schema = Literal["mbo", "mbp-1", "mbp-10"]
Clock = Literal["ts_recv", "ts_event"]
PriceFormat = Literal["decimal", "integer"]

UNDEFINED_PRICE: Final = 2**63 - 1
UNDEFINED_SIZE: Final = 2**32 - 1


HEADER: Final = [
    ("length", "u1"),  # in words of four bytes
    ("rtype", "u1"),
    ("publisher_id", "<u2"),
    ("instrument_id", "<u4"),
    ("ts_event", "<u8"),
]
_LEVEL: Final = [
    ("bid_px", "<i8"),
    ("ask_px", "<i8"),
    ("bid_sz", "<u4"),
    ("ask_sz", "<u4"),
    ("bid_ct", "<u4"),
    ("ask_ct", "<u4"),
]
MBO: Final = np.dtype(
    [
        *HEADER,
        ("order_id", "<u8"),
        ("price", "<i8"),
        ("size", "<u4"),
        ("flags", "u1"),
        ("channel_id", "u1"),
        ("action", "S1"),
        ("side", "S1"),
        ("ts_recv", "<u8"),
        ("ts_in_delta", "<i4"),
        ("sequence", "<u4"),
    ]
)


def mbp(levels: int) -> np.dtype[Any]:
    """The dtype of a record with the book after it."""
    return np.dtype(
        [
            *HEADER,
            ("price", "<i8"),
            ("size", "<u4"),
            ("action", "S1"),
            ("side", "S1"),
            ("flags", "u1"),
            ("depth", "u1"),
            ("ts_recv", "<u8"),
            ("ts_in_delta", "<i4"),
            ("sequence", "<u4"),
            ("levels", _LEVEL, (levels,)),
        ]
    )


class Spelling(NamedTuple):
    """What the user says about files, None where it is to be found out."""

    clock: Clock
    schema: Schema | None
    prices: PriceFormat | None
    time_unit: TimeUnit | None

    def check(self) -> None:
        """Refuse words that are none.

        Raises:
            TapeError: one isn't among those it may be.
        """
        kinds = (Clock, Schema, PriceFormat)
        for name, value, kind in zip(self._fields, self, kinds, strict=False):
            if value is not None and value not in get_args(kind):
                raise TapeError(
                    name, expected=joined(get_args(kind)), found=repr(value), fix="Give one of them"
                )


class RecordFile(ABC):
    """One file.

    Attributes:
        schema: the kind of its records.
        symbols: names of instruments by id, as far as they are known yet.
    """

    def __init__(self, path: Path, source: Source, spelling: Spelling, schema: str) -> None:
        self.schema = schema
        self.symbols: dict[int, str] = {}
        self._path = path
        self._source = source
        self._spelling = spelling

    @abstractmethod
    def records(self) -> Iterator[Records]:
        """The records with a time from 1990 to 2100, a block at a time; others are left out.

        Raises:
            TapeError: the file is damaged, or too many records were left out.
        """

    def detected(self) -> dict[str, str]:
        """What was found out, by the name of the option that pins it."""
        return {"schema": self.schema}
