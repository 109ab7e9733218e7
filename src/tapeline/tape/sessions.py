"""Where sessions begin and end.

Covers four rules: UTC days, gaps, explicit local times, and calendars by name. Each takes the times
of the events, in order and never stepping back, a block at a time, and cuts them into runs that
belong to one span or to none. Does not cover what a session's rows hold.

A span that is `whole` has rows for all its instants: it is known from elsewhere when the market is
open. In the others, rows run from the first event to the last.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol
from zoneinfo import ZoneInfo

import numpy as np

from tapeline.errors import TapeError
from tapeline.session import Int64Array

_SECOND_NS: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _SECOND_NS
_NEVER_NS: Final = 2**63 - 1
_SATURDAY: Final = 5


class Span(NamedTuple):
    """Where a session lies: `start_ns` ≤ time < `end_ns`. Instants count from its start."""

    date: str
    segment: int
    start_ns: int
    end_ns: int
    whole: bool = False


class Sessions(Protocol):
    """A rule that cuts a tape."""

    def cut(self, times_ns: Int64Array) -> Iterator[tuple[int, int, Span | None]]:
        """Runs `[start, stop)` of a block, all of it and in order; None outside every session.

        A span that goes on from the block before is equal to the one given then.
        """
        ...


class _Listed(ABC):
    """A rule whose spans are known beforehand, day by day."""

    @abstractmethod
    def spans(self, first: date, last: date) -> list[Span]:
        """The spans of the trade dates `first` to `last`, in order and without overlap."""

    def cut(self, times_ns: Int64Array) -> Iterator[tuple[int, int, Span | None]]:
        """Runs of a block, each of one span or of none."""
        if not len(times_ns):
            return
        # A trade date differs from the UTC date by a weekend at most.
        first, last = (utc_date(int(t)) for t in (times_ns[0], times_ns[-1]))
        spans = self.spans(first - timedelta(days=4), last + timedelta(days=4))
        spans = [s for s in spans if s.end_ns > times_ns[0] and s.start_ns <= times_ns[-1]]
        done = 0
        for span in spans:
            start, stop = np.searchsorted(times_ns, [span.start_ns, span.end_ns]).tolist()
            if done < start:
                yield done, start, None
            if start < stop:
                yield start, stop, span
            done = stop
        if done < len(times_ns):
            yield done, len(times_ns), None


class UtcDays(_Listed):
    """Sessions end at midnight UTC."""

    def spans(self, first: date, last: date) -> list[Span]:
        """A span for each day."""
        days = range((last - first).days + 1)
        start_ns = _midnight_ns(first)
        return [
            Span(
                (first + timedelta(days=day)).isoformat(),
                0,
                start_ns + day * _DAY_NS,
                start_ns + (day + 1) * _DAY_NS,
            )
            for day in days
        ]


class Gaps:
    """A session ends where nothing happens for `gap_s` seconds or more.

    Its date is the UTC date of its first event; its segment counts the sessions of that date.
    Instants count from midnight UTC.
    """

    def __init__(self, gap_s: float) -> None:
        if not 0 < gap_s < _NEVER_NS / _SECOND_NS:
            raise TapeError(
                "sessions by gap",
                expected="more than zero seconds",
                found=str(gap_s),
                fix="Give the length of the pause that ends a session",
            )
        self._gap_ns = round(gap_s * _SECOND_NS)
        self._last_ns = 0
        self._span: Span | None = None

    def cut(self, times_ns: Int64Array) -> Iterator[tuple[int, int, Span | None]]:
        """Runs of a block, each of one session."""
        if not len(times_ns):
            return
        steps = np.diff(times_ns, prepend=self._last_ns)
        starts = np.flatnonzero(steps >= self._gap_ns).tolist()
        self._last_ns = int(times_ns[-1])
        if self._span is None:
            starts = sorted({0, *starts})
        bounds = [*starts, len(times_ns)]
        if bounds[0] > 0:
            yield 0, bounds[0], self._span
        for start, stop in pairwise(bounds):
            self._span = self._after(self._span, int(times_ns[start]))
            yield start, stop, self._span

    @staticmethod
    def _after(span: Span | None, time_ns: int) -> Span:
        day = utc_date(time_ns)
        is_same = span is not None and span.date == day.isoformat()
        segment = span.segment + 1 if span is not None and is_same else 0
        return Span(day.isoformat(), segment, _midnight_ns(day), _NEVER_NS)


@dataclass(frozen=True)
class LocalHours(_Listed):
    """Sessions between explicit local times, every day that has data.

    Attributes:
        hours: one or several `HH:MM-HH:MM` (or `HH:MM:SS`) in order; the second time is not in it.
            One that isn't after the first is on the next day.
        zone: an IANA name such as `America/Chicago`; daylight saving is the zone's.
        night_from: local time; what opens at or after it belongs to the next day's trade date.
            If None, that is what ends on the next day.
        weekends: whether Saturday and Sunday are trade dates. If not, what would be theirs is
            Monday's.
    """

    hours: tuple[str, ...]
    zone: str
    night_from: str | None = None
    weekends: bool = True
    _parsed: list[tuple[time, time]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.hours:
            raise _bad_hours("none")
        parsed = [_hours(text) for text in self.hours]
        object.__setattr__(self, "_parsed", parsed)
        time_zone(self.zone)
        if self.night_from is not None:
            _clock(self.night_from)
        day = date(2024, 1, 10)  # any in the middle of a week
        spans = self.spans(day, day + timedelta(days=2))
        if any(a.end_ns > b.start_ns for a, b in pairwise(spans)):
            raise _bad_hours(f"{', '.join(self.hours)}, which overlap")

    def spans(self, first: date, last: date) -> list[Span]:
        """The spans of these trade dates, and of some around them."""
        zone = time_zone(self.zone)
        night_from = None if self.night_from is None else _clock(self.night_from)
        spans = []
        for number in range(-3, (last - first).days + 2):
            day = first + timedelta(days=number)
            for segment, (opens, closes) in enumerate(self._parsed):
                overnight = closes <= opens
                is_night = overnight if night_from is None else opens >= night_from
                trade_date = day + timedelta(days=is_night)
                if not self.weekends and trade_date.weekday() >= _SATURDAY:
                    trade_date += timedelta(days=7 - trade_date.weekday())
                start = datetime.combine(day, opens, zone)
                end = datetime.combine(day + timedelta(days=overnight), closes, zone)
                spans.append(
                    Span(trade_date.isoformat(), segment, _to_ns(start), _to_ns(end), True)
                )
        return sorted(spans, key=lambda span: span.start_ns)


@dataclass(frozen=True)
class Calendar(_Listed):
    """Sessions of a market, by any name that pandas-market-calendars or exchange-calendars knows.

    Half days, holidays and daylight saving are the calendar's. A break in the middle of the day
    makes two segments of one date. Needs the extra `markets`.

    Attributes:
        name: such as `XNYS`, `NYSE` or `CME_Equity`.
        pre: open with the pre-market, where the calendar has one.
        post: close with the post-market, where the calendar has one.
    """

    name: str
    pre: bool = False
    post: bool = False
    _years: dict[int, list[Span]] = field(default_factory=dict, repr=False, compare=False)
    _calendar: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_calendar", _find_calendar(self.name))
        for wanted, what in ((self.pre, "pre"), (self.post, "post")):
            if wanted and what not in self._calendar.regular_market_times:
                raise TapeError(
                    f"calendar {self.name}",
                    expected=f"a calendar with times of its {what}-market",
                    found="none for it",
                    fix=f"Switch {what} off, or use a calendar that has them, such as NYSE",
                )

    def spans(self, first: date, last: date) -> list[Span]:
        """The spans of these trade dates, and of the rest of their years."""
        years = range(first.year, last.year + 1)
        for year in years:
            if year not in self._years:
                self._years[year] = self._of_year(year)
        return [span for year in years for span in self._years[year]]

    def _of_year(self, year: int) -> list[Span]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the calendars use what pandas has deprecated
            schedule = self._calendar.schedule(
                f"{year}-01-01",
                f"{year}-12-31",
                start="pre" if self.pre else "market_open",
                end="post" if self.post else "market_close",
            )
        spans = []
        for day, *_ in schedule.itertuples(name=None):
            times = schedule.loc[day]
            bounds = [times.iloc[0], times.iloc[-1]]
            if "break_start" in times and times["break_start"] < times["break_end"]:
                bounds[1:1] = [times["break_start"], times["break_end"]]
            ns = [int(bound.value) for bound in bounds]
            spans += [
                Span(day.date().isoformat(), segment, start, end, True)
                for segment, (start, end) in enumerate(zip(ns[::2], ns[1::2], strict=True))
            ]
        return spans


def markets_module(name: str, where: object) -> Any:
    """A module of the extra `markets`, imported when it is needed.

    Raises:
        TapeError: it isn't installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TapeError(
            where,
            expected="the packages of the extra `markets`",
            found=f"no {error.name}",
            fix='Install them with `pip install "tapeline[markets]"`',
        ) from None


def utc_date(time_ns: int) -> date:
    """The UTC date of a time."""
    return datetime.fromtimestamp(time_ns // _SECOND_NS, UTC).date()


def time_zone(name: str) -> ZoneInfo:
    """The zone of an IANA name.

    Raises:
        TapeError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise TapeError(
            "zone",
            expected="the name of a time zone",
            found=repr(name),
            fix="Give one such as America/New_York or UTC",
        ) from None


def _midnight_ns(day: date) -> int:
    return _to_ns(datetime.combine(day, time(0), UTC))


def _to_ns(moment: datetime) -> int:
    return int(moment.timestamp()) * _SECOND_NS


def _hours(text: str) -> tuple[time, time]:
    opens, dash, closes = text.replace("–", "-").partition("-")
    if not dash:
        raise _bad_hours(repr(text))
    return _clock(opens), _clock(closes)


def _clock(text: str) -> time:
    try:
        parsed = time.fromisoformat(text.strip())
    except ValueError:
        raise _bad_hours(repr(text)) from None
    if parsed.microsecond or parsed.tzinfo:
        raise _bad_hours(repr(text))
    return parsed


def _bad_hours(found: str) -> TapeError:
    return TapeError(
        "session hours",
        expected="local times such as 09:30-16:00, apart from each other",
        found=found,
        fix="Give the opening and the closing time of each session of a day",
    )


def _find_calendar(name: str) -> Any:
    calendars = markets_module("pandas_market_calendars", f"calendar {name}")
    try:
        return calendars.get_calendar(name)
    except (RuntimeError, KeyError, ValueError):
        raise TapeError(
            f"calendar {name}",
            expected="a name that pandas-market-calendars or exchange-calendars knows",
            found="one that neither does",
            fix="Give one such as XNYS, NYSE, CME_Equity or XLON, or explicit hours with a zone",
        ) from None
