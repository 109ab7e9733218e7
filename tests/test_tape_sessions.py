"""Where sessions begin and end: each rule on real dates, and any tape cut anywhere."""

from __future__ import annotations

import importlib
from datetime import UTC, date, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape.sessions import Calendar, Gaps, LocalHours, UtcDays

HOUR_NS = 3_600 * 10**9
NIGHT = LocalHours(("17:00-16:00",), "America/Chicago")


def ns(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 10**9


def shown(rule, day: str) -> list[tuple[str, int, str, str]]:
    """The spans of one trade date."""
    at = date.fromisoformat(day)
    return [
        (span.date, span.segment, *(_utc(time) for time in (span.start_ns, span.end_ns)))
        for span in rule.spans(at, at)
        if span.date == day
    ]


def _utc(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%m-%d %H:%M")


def runs(rule, times) -> list[tuple[int, int, str | None]]:
    cut = rule.cut(np.array(times, np.int64))
    return [(start, stop, span and f"{span.date}/{span.segment}") for start, stop, span in cut]


def test_a_day_of_utc():
    assert shown(UtcDays(), "2024-02-29") == [("2024-02-29", 0, "02-29 00:00", "03-01 00:00")]
    midnight = ns("2024-02-29")
    assert runs(UtcDays(), [midnight - 1, midnight, midnight + 24 * HOUR_NS]) == [
        (0, 1, "2024-02-28/0"),
        (1, 2, "2024-02-29/0"),
        (2, 3, "2024-03-01/0"),
    ]


def test_a_gap_of_the_limit_cuts_and_a_shorter_one_does_not():
    start = ns("2013-09-02T12:00")
    times = [start, start + HOUR_NS - 1, start + 2 * HOUR_NS - 1, start + 13 * HOUR_NS]
    rule = Gaps(3_600)
    assert runs(rule, times) == [
        (0, 2, "2013-09-02/0"),
        (2, 3, "2013-09-02/1"),
        (3, 4, "2013-09-03/0"),
    ]
    assert runs(rule, [times[-1] + 1]) == [(0, 1, "2013-09-03/0")], "it goes on"


@pytest.mark.parametrize("gap_s", [0, -1, float("nan"), float("inf")])
def test_a_gap_of_nothing_is_refused(gap_s):
    with pytest.raises(TapeError, match=f"expected more than zero seconds, found {gap_s}"):
        Gaps(gap_s)


def test_a_night_session_belongs_to_the_next_trade_date():
    assert shown(NIGHT, "2024-01-09") == [("2024-01-09", 0, "01-08 23:00", "01-09 22:00")]
    assert shown(NIGHT, "2024-01-08") == [("2024-01-08", 0, "01-07 23:00", "01-08 22:00")]


def test_daylight_saving_moves_utc_and_not_the_local_time():
    assert shown(NIGHT, "2024-03-08") == [("2024-03-08", 0, "03-07 23:00", "03-08 22:00")]
    # The Sunday on which clocks go forward, and the one on which they go back.
    assert shown(NIGHT, "2024-03-11") == [("2024-03-11", 0, "03-10 22:00", "03-11 21:00")]
    assert shown(NIGHT, "2024-03-10") == [("2024-03-10", 0, "03-09 23:00", "03-10 21:00")]
    assert shown(NIGHT, "2024-11-03") == [("2024-11-03", 0, "11-02 22:00", "11-03 22:00")]


def test_several_sessions_a_day_with_a_night_before_the_weekend():
    rule = LocalHours(
        ("09:00-11:30", "13:30-15:00", "21:00-23:00"),
        "Asia/Shanghai",
        night_from="18:00",
        weekends=False,
    )
    friday = [s for s in rule.spans(date(2024, 1, 5), date(2024, 1, 5)) if s.segment == 2]
    assert {s.date for s in friday if _utc(s.start_ns) == "01-05 13:00"} == {"2024-01-08"}
    assert shown(rule, "2024-01-05")[:2] == [
        ("2024-01-05", 2, "01-04 13:00", "01-04 15:00"),
        ("2024-01-05", 0, "01-05 01:00", "01-05 03:30"),
    ]


def test_what_is_between_hours_is_in_no_session():
    times = [ns("2024-01-09T21:59:59"), ns("2024-01-09T22:00"), ns("2024-01-09T23:00")]
    assert runs(NIGHT, times) == [
        (0, 1, "2024-01-09/0"),
        (1, 2, None),
        (2, 3, "2024-01-10/0"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), "UTC"), "session hours: expected local times such as .*, found none"),
        ((("9-10",), "UTC"), "session hours: .* found '9'. Give the opening and the closing"),
        ((("09:00",), "UTC"), "session hours: .* found '09:00'"),
        ((("09:00-10:00:00.5",), "UTC"), "session hours: .* found '10:00:00.5'"),
        ((("09:00-12:00", "11:00-13:00"), "UTC"), "found .* which overlap"),
        ((("09:00-10:00",), "Mars/Olympus"), "zone: expected the name of a time zone"),
        ((("09:00-10:00",), "UTC", "late"), "session hours: .* found 'late'"),
    ],
)
def test_hours_that_are_none_are_refused(arguments, message):
    with pytest.raises(TapeError, match=message):
        LocalHours(*arguments)


@pytest.fixture
def markets():
    return pytest.importorskip(
        "pandas_market_calendars", reason="the extra `markets` isn't installed"
    )


def test_half_days_and_holidays_of_new_york(markets):
    rule = Calendar("XNYS")
    assert shown(rule, "2024-11-28") == [], "Thanksgiving"
    assert shown(rule, "2024-11-29") == [("2024-11-29", 0, "11-29 14:30", "11-29 18:00")]
    (span,) = [s for s in rule.spans(date(2024, 3, 8), date(2024, 3, 8)) if s.date == "2024-03-08"]
    assert (span.end_ns - span.start_ns) // 500_000_000 == 46_800
    assert shown(rule, "2024-03-08") == [("2024-03-08", 0, "03-08 14:30", "03-08 21:00")]
    assert shown(rule, "2024-03-11") == [("2024-03-11", 0, "03-11 13:30", "03-11 20:00")]


def test_before_and_after_hours_can_be_switched_on(markets):
    assert shown(Calendar("NYSE", pre=True), "2024-11-29") == [
        ("2024-11-29", 0, "11-29 09:00", "11-29 18:00")
    ]
    assert shown(Calendar("NYSE", post=True), "2024-11-29") == [
        ("2024-11-29", 0, "11-29 14:30", "11-29 22:00")
    ]
    with pytest.raises(TapeError) as error:
        Calendar("XNYS", pre=True)
    assert str(error.value) == (
        "calendar XNYS: expected a calendar with times of its pre-market, found none for it. "
        "Switch pre off, or use a calendar that has them, such as NYSE."
    )


def test_the_early_halt_of_labor_day(markets):
    rule = Calendar("CMES")
    assert shown(rule, "2013-09-02") == [("2013-09-02", 0, "09-01 22:00", "09-02 17:00")]
    assert shown(rule, "2013-09-03") == [("2013-09-03", 0, "09-02 22:00", "09-03 22:00")]
    assert shown(Calendar("CME_Equity"), "2013-09-02") == shown(rule, "2013-09-02")
    times = [ns("2013-09-02T15:29:59"), ns("2013-09-02T17:00"), ns("2013-09-02T22:00")]
    assert runs(rule, times) == [
        (0, 1, "2013-09-02/0"),
        (1, 2, None),
        (2, 3, "2013-09-03/0"),
    ]


def test_a_break_makes_two_segments(markets):
    assert shown(Calendar("XHKG"), "2013-09-02") == [
        ("2013-09-02", 0, "09-02 01:30", "09-02 04:00"),
        ("2013-09-02", 1, "09-02 05:00", "09-02 08:00"),
    ]


def test_an_unknown_calendar_is_refused(markets):
    with pytest.raises(TapeError, match=r"calendar NOPE: .* found one that neither does"):
        Calendar("NOPE")


def test_without_the_packages_the_extra_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TapeError) as error:
        Calendar("XNYS")
    assert str(error.value) == (
        "calendar XNYS: expected the packages of the extra `markets`, found no "
        'pandas_market_calendars. Install them with `pip install "tapeline[markets]"`.'
    )


RULES = [
    UtcDays,
    lambda: Gaps(5_000),
    lambda: NIGHT,
    lambda: LocalHours(("09:00-11:30", "13:30-15:00"), "Europe/London"),
]


@given(
    st.sampled_from(RULES),
    st.lists(st.integers(0, 40 * HOUR_NS), max_size=30),
    st.integers(1, 30),
)
def test_blocks_of_any_size_are_cut_alike(rule, offsets, size):
    times = np.sort(np.array(offsets, np.int64)) + ns("2024-03-30")  # clocks go forward in London
    whole = [(i, span) for a, b, span in rule().cut(times) for i in range(a, b)]
    assert [i for i, _ in whole] == list(range(len(times))), "each event once, in order"
    one, parts = rule(), []
    for start in range(0, len(times), size):
        for a, b, span in one.cut(times[start : start + size]):
            parts += [(start + i, span) for i in range(a, b)]
    assert parts == whole
    assert all(s is None or s.start_ns <= times[i] < s.end_ns for i, s in whole)
