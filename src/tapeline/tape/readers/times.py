"""Times in text, integers and columns of dates, as nanoseconds UTC and without a float on the way.

Covers times since 1970 in s, ms, us or ns with up to nine decimals, ISO 8601 with fractions of 0 to
9 digits (mixed as they come) and with or without a zone, and other layouts by a pattern. What is
detected in the first block holds for all, and can be pinned. Does not cover what a time means.

In the hour that daylight saving repeats, a local time without a zone is taken as the earlier of
the two; one in the hour that is skipped, as the first moment after it. Both are counted.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.readers.text import exact_integers, halved
from tapeline.tape.report import Counts
from tapeline.tape.sessions import time_zone

TimeUnit = Literal["s", "ms", "us", "ns"]

YEAR_1990_S: Final = 631_152_000
YEAR_2100_S: Final = 4_102_444_800
_NS: Final[dict[str, int]] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DECIMALS: Final[dict[str, int]] = {"s": 9, "ms": 6, "us": 3, "ns": 0}
_PATTERNS: Final = tuple(
    f"{day} {clock}"
    for clock in ("%H:%M:%S", "%H:%M")
    for day in ("%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%Y%m%d", "%d.%m.%Y")
)
ISO: Final = "iso"
_UNITS: Final = get_args(TimeUnit)


class Times:
    """Parses the columns of times of one file.

    Args:
        where: the file and column, for errors.
        unit: of numbers; detected by magnitude if None.
        zone: of times that don't say theirs; such times are refused without it.
        pattern: `iso`, or what strptime takes; detected if None.
        counts: where to count the local times that daylight saving skips or repeats.
    """

    def __init__(
        self,
        where: str,
        unit: TimeUnit | None = None,
        zone: str | None = None,
        pattern: str | None = None,
        counts: Counts | None = None,
    ) -> None:
        if unit is not None and unit not in _UNITS:
            raise TapeError(
                "time_unit", expected="s, ms, us or ns", found=repr(unit), fix="Give one"
            )
        if zone is not None:
            time_zone(zone)
        self._where = where
        self._zone = zone
        self._counts = counts
        self.unit: str | None = unit
        self.pattern = pattern
        self._is_number: bool | None = True if unit else False if pattern else None

    def detected(self) -> dict[str, str]:
        """What was found out, by the name of the option that pins it."""
        if self._is_number:
            return {"time_unit": self.unit or ""}
        return {} if self.pattern is None else {"time_format": self.pattern}

    def parse(self, column: pa.Array) -> tuple[Int64Array, BoolArray]:
        """Nanoseconds UTC of each time, and which of them are times from 1990 to 2100.

        Args:
            column: bytes, text, integers or timestamps.

        Raises:
            TapeError: the unit, layout or zone can't be told from the column, or it is of floats.
        """
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            return self._in_range(*self._from_stamps(column))
        if pa.types.is_floating(column.type):
            raise TapeError(
                self._where,
                expected="times as integers, text or timestamps",
                found=f"{column.type}, which has lost digits",
                fix="Write the times as whole numbers",
            )
        column = column.cast(pa.string())
        if self._is_number is None:
            written = column.filter(pc.greater(pc.utf8_length(column), 0))
            first = str(written[0]).strip() if len(written) else "0"
            # Eight digits are a day, and fourteen a day with its time.
            digits = first.replace(".", "", 1).lstrip("-").isdigit()
            self._is_number = digits and len(first) not in (8, 14)
        return self._from_numbers(column) if self._is_number else self._from_text(column)

    def _from_numbers(self, column: pa.Array) -> tuple[Int64Array, BoolArray]:
        if self.unit is None:
            whole, readable = exact_integers(pc.replace_substring_regex(column, r"\..*$", ""), 0)
            if not readable.any():
                return np.zeros(len(column), np.int64), readable
            middle = int(np.sort(whole[readable])[readable.sum() // 2])
            self.unit = self._detect(middle)
        times, readable = exact_integers(column, _DECIMALS[self.unit])
        return self._in_range(times, readable)

    def _detect(self, time: int) -> str:
        for unit, ns in _NS.items():
            if YEAR_1990_S <= time * ns // 10**9 < YEAR_2100_S:
                return unit
        raise TapeError(
            self._where,
            expected="times from 1990 to 2100 in s, ms, us or ns since 1970",
            found=f"{time} in the middle of the first block",
            fix="Check the column, or pin time_unit (`--set options.time_unit=ms`)",
        )

    def _in_range(
        self, times: npt.NDArray[Any], readable: BoolArray
    ) -> tuple[Int64Array, BoolArray]:
        in_range = readable & are_possible(times)
        return np.where(in_range, times, 0).astype(np.int64), in_range

    def _from_text(self, column: pa.Array) -> tuple[Int64Array, BoolArray]:
        column = pc.utf8_trim_whitespace(column)
        if self.pattern is None:
            self.pattern = self._pattern_of(column)
        return self._in_range(*self._from_stamps(_stamps(column, self.pattern)))

    def _pattern_of(self, column: pa.Array) -> str:
        """The layout that most of the first block has; two that fit equally are no answer."""
        fits = {p: int(_stamps(column, p).is_valid().sum().as_py() or 0) for p in (ISO, *_PATTERNS)}
        best = max(fits.values())
        found = [pattern for pattern, number in fits.items() if number == best]
        if best and len(found) == 1:
            return found[0]
        example = next((text for text in column.to_pylist() if text), "nothing")
        fitting = " and ".join(found) if best else "none that is known"
        raise TapeError(
            self._where,
            expected="times of one layout",
            found=f"`{example}`, which fits {fitting}",
            fix="Pin time_format (`--set 'options.time_format=%m/%d/%Y %H:%M'`)",
        )

    def _from_stamps(self, stamps: pa.Array) -> tuple[Int64Array, BoolArray]:
        kind = stamps.type
        if pa.types.is_date(kind) or kind.tz is None:
            if self._zone is None:
                raise TapeError(
                    self._where,
                    expected="times with a zone",
                    found=f"`{next((s for s in stamps if s.is_valid), 'none')}`, which has none",
                    fix="Say which it is, with zone (`--set options.zone=America/New_York`)",
                )
            stamps = self._from_local(_as_ns(stamps, pa.timestamp("ns")), self._zone)
        else:
            stamps = _as_ns(stamps, pa.timestamp("ns", "UTC"))
        readable = np.asarray(stamps.is_valid())
        return np.asarray(stamps.cast(pa.int64()).fill_null(0)), readable

    def _from_local(self, stamps: pa.Array, zone: str) -> pa.Array:
        taken = pc.assume_timezone(stamps, zone, ambiguous="earliest", nonexistent="latest")
        if self._counts is not None:
            other = pc.assume_timezone(stamps, zone, ambiguous="latest", nonexistent="earliest")
            self._counts.times_repeated += pc.sum(pc.less(taken, other)).as_py() or 0
            self._counts.times_skipped += pc.sum(pc.greater(taken, other)).as_py() or 0
        return taken


def are_possible(times_ns: npt.NDArray[Any]) -> BoolArray:
    """Which times lie in 1990 to 2100: the others are dirt."""
    in_range = (times_ns >= YEAR_1990_S * 10**9) & (times_ns < YEAR_2100_S * 10**9)
    return in_range.astype(bool)


def _as_ns(stamps: pa.Array, kind: pa.DataType) -> pa.Array:
    """Beyond 2262 there are no nanoseconds: such a time is none."""
    return halved(stamps, lambda part: part.cast(kind), kind)


def _stamps(column: pa.Array, pattern: str) -> pa.Array:
    """Text as timestamps, null where it isn't one of this layout."""
    if pattern != ISO:
        return pc.strptime(column, format=pattern, unit="s", error_is_null=True)
    # If one has a zone, one without is unreadable: it can't be told apart from another zone's.
    has_zone = pc.match_substring_regex(column, r"\d:\d{2}[^-+Z]*(Z|[+-]\d{2}(:?\d{2})?)$")
    kind = pa.timestamp("ns", "UTC") if pc.any(has_zone).as_py() else pa.timestamp("ns")
    return halved(column, lambda part: part.cast(kind), kind)
