"""Tables with a time column: what is detected, what must be said, and the samples' facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conformance_tape import TapeConformance, assert_same

from tapeline.errors import TapeError
from tapeline.tape import (
    Calendar,
    Gaps,
    GridOptions,
    LocalHours,
    Policy,
    UtcDays,
    detect,
    read_tape,
)

SAMPLES = Path(__file__).parents[2] / "shared" / "samples"
START_S = 1_572_964_200  # 2019-11-05 14:30 UTC, 09:30 in New York

BARS = [
    "2019-11-05 09:30:00,3080.8,3080.49,3081.47,3080.3,2209795",
    "2019-11-05 09:31:00,3080.33,3079.36,3080.33,3079.15,1739410",
    "2019-11-05 09:32:00,3079.43,3079.68,3080.46,3079.43,",
    "2019-11-05 09:33:00,3079.43,3079.69,3080.46,3079.43,896995",
    "2019-11-05 09:35:00,3079.5,3079.7,3080.5,3079.4,896996",
]
BAR_NAMES = "Date,Open,Close,High,Low,Volume"
NEW_YORK = {"zone": "America/New_York"}


def write(folder: Path, lines: list[str], header: str = BAR_NAMES) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return path


def read(path: Path, **options):
    share = options.pop("max_unreadable_share", 0.001)
    tape = read_tape(path, options=options, max_unreadable_share=share, format="table")
    return list(tape), tape.report


def refusal(path: Path, **options) -> str:
    with pytest.raises(TapeError) as error:
        read(path, **options)
    return str(error.value).replace(str(path), "FILE")


def ticks() -> list[str]:
    """Ticks of about two a second, with a blank cell and one time without a fraction."""
    rng = np.random.default_rng(0)
    lines, at = [], 0
    for number in range(24):
        at += int(rng.integers(1, 9)) * 100_000
        text = str(np.datetime64(START_S * 10**6 + at, "us")).replace("T", " ")
        text = text.removesuffix(".000000")
        bid = "" if number == 9 else f"{86.655 + rng.integers(9) / 1000:.3f}"
        lines.append(f"{text}+00:00,{bid},{86.728:.3f}")
    return lines


class TestTicks(TapeConformance):
    reader = "table"

    def write(self, folder: Path) -> list[Path]:
        return [write(folder, ticks(), "timestamp,bid,ask")]


class TestParquet(TapeConformance):
    reader = "table"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        rows = [line.split(",") for line in ticks()]
        times = [np.datetime64(row[0].removesuffix("+00:00")) for row in rows]
        table = {
            "time": pa.array(np.array(times, "M8[us]")).cast(pa.timestamp("us", "UTC")),
            "bid": pa.array([float(row[1]) if row[1] else None for row in rows]),
            "size": pa.array(range(len(rows)), pa.int32()),
        }
        pq.write_table(pa.table(table), folder / "ticks.parquet", row_group_size=5)
        return [folder / "ticks.parquet"]


def test_a_bar_is_known_at_its_end(tmp_path):
    (session,), report = read(write(tmp_path, BARS), stamp="open", **NEW_YORK)
    assert report.detected == {
        "time": "Date",
        "time_format": "iso",
        "columns": "Open,Close,High,Low,Volume",
        "prices": "Open,Close,High,Low",
        "interval_s": "60",
    }
    assert (session.times // 10**9 - START_S).tolist() == [60, 120, 180, 240, 360]
    assert session.columns == ("Open", "Close", "High", "Low", "Volume")
    assert session.origin == 3080.8
    assert session.values[0].tolist() == pytest.approx([0, -0.31, 0.67, -0.5, 2_209_795], abs=1e-6)
    assert session.valid.tolist() == [True, True, False, True, True]
    assert report.counts.rows_missing == 1
    assert report.counts.other == {
        "bars missing inside a session, the rows around them being neighbours: `step_s` gives "
        "each a row": 1
    }
    (closed,), report = read(write(tmp_path, BARS), stamp="close", **NEW_YORK)
    assert (closed.times // 10**9 - START_S).tolist() == [0, 60, 120, 180, 300]
    assert report.detected["interval_s"] == "60"
    (pinned,), _ = read(write(tmp_path, BARS), stamp="open", interval_s=30.5, **NEW_YORK)
    assert (pinned.times // 10**8 - START_S * 10).tolist() == [305, 905, 1505, 2105, 3305]


def test_what_was_detected_can_be_pinned(tmp_path):
    path = write(tmp_path, BARS)
    sessions, report = read(path, stamp="open", **NEW_YORK)
    found = {**report.detected, "interval_s": float(report.detected["interval_s"])}
    for name in ("columns", "prices"):
        found[name] = found[name].split(",")
    again, second = read(path, stamp="open", **NEW_YORK, **found)
    assert_same(again, sessions)
    assert second == report


def test_columns_and_prices_may_be_chosen(tmp_path):
    options = {"columns": ["Volume", "Close"], "prices": [], "stamp": "close"}
    (session,), _ = read(write(tmp_path, BARS), **options, **NEW_YORK)
    assert session.columns == ("Volume", "Close")
    assert session.origin == 0
    assert session.values[0].tolist() == [2_209_795, np.float32(3080.49)]


LAYOUTS = [
    ({"zone": "America/New_York"}, "2019-11-05 09:30:00", "iso"),
    ({}, "2019-11-05T14:30:00Z", "iso"),
    ({}, "2019-11-05 15:30+01:00", "iso"),
    ({"zone": "UTC"}, "20191105 14:30:00", "%Y%m%d %H:%M:%S"),
    ({"zone": "UTC"}, "5.11.2019 14:30", "%d.%m.%Y %H:%M"),
    ({"zone": "UTC", "time_format": "%m/%d/%Y %H:%M"}, "11/5/2019 14:30", "%m/%d/%Y %H:%M"),
    ({"zone": "UTC", "time_format": "%d/%m/%Y %H:%M"}, "5/11/2019 14:30", "%d/%m/%Y %H:%M"),
    ({"zone": "UTC"}, "11/25/2019 14:30", "%m/%d/%Y %H:%M"),
]


@pytest.mark.parametrize(("options", "text", "layout"), LAYOUTS)
def test_layouts_of_time(tmp_path, options, text, layout):
    (session,), report = read(write(tmp_path, [f"{text},1"], "time,price"), **options)
    days = 20 if "25" in text else 0
    assert session.times.tolist() == [(START_S + days * 86_400) * 10**9]
    assert report.detected["time_format"] == layout


@pytest.mark.parametrize(
    ("text", "unit", "fraction_ns"),
    [
        (f"{START_S}", "s", 0),
        (f"{START_S}.123456789", "s", 123_456_789),
        (f"{START_S}123", "ms", 123_000_000),
        (f"{START_S}123.5", "ms", 123_500_000),
        (f"{START_S}123456", "us", 123_456_000),
        (f"{START_S}123456789", "ns", 123_456_789),
    ],
)
def test_units_of_time(tmp_path, text, unit, fraction_ns):
    path = write(tmp_path, [f"{text},1"], "time,price")
    (session,), report = read(path)
    assert session.times.tolist() == [START_S * 10**9 + fraction_ns]
    assert report.detected["time_unit"] == unit
    assert read(path, time_unit=unit)[1] == report


def test_fractions_of_any_width_in_one_file(tmp_path):
    texts = ["", *("." + "123456789"[:digits] for digits in range(1, 10))]
    lines = [f"2019-11-05 14:30:{second:02d}{text}Z,1" for second, text in enumerate(texts)]
    (session,), _ = read(write(tmp_path, lines, "time,price"))
    expected = [int("123456789"[:digits].ljust(9, "0")) for digits in range(10)]
    assert (session.times - START_S * 10**9 - np.arange(10) * 10**9).tolist() == expected


CLOSING = [
    f"2019-11-05 {clock},{price},{price},{price},{price},7"
    for clock, price in (("09:29", 1), ("09:30", 2), ("15:58", 3), ("15:59", 4), ("16:00", 5))
]


@pytest.mark.parametrize("sessions", ["hours", "utc"])
@pytest.mark.parametrize("step_ns", [None, 60 * 10**9])
def test_the_bar_that_closes_a_session_is_its_last_however_it_is_stamped(
    tmp_path, step_ns, sessions
):
    """A bar belongs to the session that it opens in, and is known at its end."""
    found = []
    for stamp, shift in (("open", 0), ("close", 1)):
        lines = []
        for line in CLOSING:
            clock, rest = line[11:16], line[16:]
            minutes = int(clock[:2]) * 60 + int(clock[3:]) + shift
            lines.append(f"2019-11-05 {minutes // 60:02}:{minutes % 60:02}:00{rest}")
        hours = LocalHours(("09:30-16:00",), "America/New_York")
        tape = read_tape(
            write(tmp_path, lines),
            format="table",
            sessions=hours if sessions == "hours" else UtcDays(),
            grid=GridOptions(step_ns=step_ns, max_age_s=60),
            options={"stamp": stamp, "interval_s": 60, **NEW_YORK},
        )
        (session,) = tape
        found.append((session, tape.report.counts))
    (session, counts), (closed, _) = found
    assert_same([session], [closed])
    known = (session.times // 10**9 - START_S)[session.valid].tolist()
    opens = session.values[session.valid, 0] + session.origin
    if sessions == "hours":
        assert (counts.outside, counts.events_after_last_row) == (2, 0)
        assert session.times[-1] // 10**9 - START_S == 390 * 60
        assert (known[0], known[-1], opens[0], opens[-1]) == (60, 390 * 60, 2, 4)
        assert len(session) == (3 if step_ns is None else 390)
    else:
        assert counts.outside == 0
        assert (known[0], known[-1], opens[0], opens[-1]) == (0, 391 * 60, 1, 5)


def test_a_bar_that_ends_after_its_session_has_a_row_of_its_own_and_none_on_a_grid(tmp_path):
    lines = [
        f"2019-11-05 {hour}:30:00,{hour},{hour},{hour},{hour},7" for hour in ("13", "14", "15")
    ]
    for step_ns, last_s, num_lost in ((None, 16.5, 0), (1800 * 10**9, 16, 1)):
        tape = read_tape(
            write(tmp_path, lines),
            format="table",
            sessions=LocalHours(("13:30-16:00",), "America/New_York"),
            grid=GridOptions(step_ns=step_ns, max_age_s=None),
            options={"stamp": "open", **NEW_YORK},
        )
        (session,) = tape
        assert (session.times[-1] // 10**9 - START_S) / 3600 + 9.5 == last_s
        assert (tape.report.counts.outside, tape.report.counts.events_after_last_row) == (
            0,
            num_lost,
        )
        assert session.made["bar_s"] == "3600"


@pytest.mark.parametrize("block_rows", [2, 1000])
def test_bars_that_share_a_time_or_lack_are_counted(tmp_path, monkeypatch, block_rows):
    monkeypatch.setattr("tapeline.tape.readers.text.BLOCK_BYTES", 64 * block_rows)
    minutes = (0, 1, 1, 1, 2, 5, 6, 8)
    lines = [f"2019-11-0{day} 09:3{at}:00,1,1,1,1,7" for day in (5, 6) for at in minutes]
    path = write(tmp_path, lines)
    rows, report = read(path, stamp="open", **NEW_YORK)
    assert [len(session) for session in rows] == [8, 8]
    assert str(report).splitlines()[2:] == [
        "  4 bars of the same time as the one before, each a row of its own",
        "  6 bars missing inside a session, the rows around them being neighbours: `step_s` gives "
        "each a row",
    ]
    grid = GridOptions(step_ns=60 * 10**9)
    tape = read_tape(path, format="table", grid=grid, options={"stamp": "open", **NEW_YORK})
    assert [len(session) for session in tape] == [9, 9]
    assert list(tape.report.counts.other.items()) == [
        ("bars of the same time as the one before, which they replace", 4),
        (
            "bars missing inside a session, the one before shown as long as `max_age_s` lets it",
            6,
        ),
    ]


def test_prices_written_as_text_are_refused(tmp_path):
    path = write(tmp_path, [line.replace(",3080", ",$3080") for line in BARS])
    assert refusal(path, stamp="open", **NEW_YORK) == (
        "FILE, column High: expected numbers in a bar's prices, found `$3080.33`. Write plain "
        "numbers, or name the columns to take, with columns (`--set "
        '\'options.columns=["a", "b"]\'`).'
    )
    (session,), _ = read(path, stamp="open", columns=["Volume"], **NEW_YORK)
    assert len(session) == 5


def test_the_day_of_a_daily_bar_is_the_one_it_opens_on(tmp_path):
    lines = [f"2019-11-0{day},1,1,1,1,7" for day in (4, 5, 6)]
    sessions, _ = read(write(tmp_path, lines), stamp="open", zone="UTC")
    assert [session.key.date for session in sessions] == ["2019-11-04", "2019-11-05", "2019-11-06"]


def dst_lines(num: int) -> list[str]:
    texts = ["2024-03-10 02:30", "2024-03-10 03:00", "2024-11-03 01:30"]
    later = [f"2024-11-04 {n // 60:02}:{n % 60:02}" for n in range(num)]
    return [f"{text},1" for text in [*texts, *later]]


def test_an_hour_that_is_repeated_or_skipped_is_counted(tmp_path):
    path = write(tmp_path, dst_lines(200), "time,price")
    sessions, report = read(path, zone="America/Chicago")
    texts = [str(np.datetime64(int(t), "ns"))[:16] for s in sessions for t in s.times]
    assert texts[:3] == ["2024-03-10T08:00", "2024-03-10T08:00", "2024-11-03T06:30"]
    assert (report.counts.times_skipped, report.counts.times_repeated) == (1, 1)
    for words in (
        "1 time in an hour skipped by daylight saving, taken as the first moment after it",
        "1 time in an hour repeated by daylight saving, taken as the earlier of the two",
    ):
        assert words in str(report)


def test_too_many_unclear_local_times_are_refused_unless_allowed(tmp_path):
    path = write(tmp_path, dst_lines(10), "time,price")
    assert refusal(path, zone="America/Chicago") == (
        "FILE: expected at most 1.0000 % of the local times in an hour that daylight saving skips "
        "or repeats, found 1 in one skipped and 1 in one repeated, of 13. Check the zone, or write "
        "the times in UTC or with their offset; or raise max_unclear_share (`--set "
        "max_unclear_share=…`) if the first moment after and the earlier of the two will do."
    )
    options = {"zone": "America/Chicago"}
    tape = read_tape(path, options=options, policy=Policy(max_unclear_share=0.2), format="table")
    assert len(list(tape)) == 3


BAD = ["soon,1", "1989-12-31,1", "2100-01-01,1", "1800-01-01,1", ",1", "2019-11-05,many", "x,1,2"]


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_cannot_be_read_is_left_out_and_counted(tmp_path, bad):
    good = [f"2019-11-05 14:3{minute}:00,{minute}" for minute in range(4)]
    path = write(tmp_path, [*good[:2], bad, *good[2:]], "time,price")
    (session,), report = read(path, zone="UTC", max_unreadable_share=0.2)
    assert session.values[:, 0].tolist() == [0, 1, 2, 3]
    assert (report.counts.lines_read, report.counts.lines_unreadable) == (5, 1)
    why = " (the number of fields is 3 and not 2)" if bad == "x,1,2" else ""
    assert report.first_unreadable == f"line 4: {bad}{why}"
    assert refusal(path, zone="UTC").startswith(
        "FILE, line 4: expected at most 0.1000 % of the lines to be unreadable, found 1 of 5"
    )


def test_what_must_be_said_is_asked_for(tmp_path):
    path = write(tmp_path, BARS)
    assert refusal(path, stamp="open") == (
        "FILE, column Date: expected times with a zone, found `2019-11-05 09:30:00`, which has "
        "none. Say which it is, with zone (`--set "
        "options.zone=America/New_York`)."
    )
    assert refusal(path, **NEW_YORK) == (
        "FILE: expected bars whose stamp is known to be their open or their close, found open, "
        "high, low and close, and no word on the stamp. Give stamp as open or close (`--set "
        "options.stamp=close`): a bar is known at its end."
    )
    assert (
        "expected two bars or more, to tell their length, found 1. Give interval_s (`"
        in refusal(write(tmp_path, BARS[:1]), stamp="open", **NEW_YORK)
    )
    path = write(tmp_path, ["11/5/2019 9:30,1", "12/5/2019 9:30,1"], "time,price")
    assert refusal(path, zone="UTC") == (
        "FILE, column time: expected times of one layout, found `11/5/2019 9:30`, which fits "
        "%m/%d/%Y %H:%M and %d/%m/%Y %H:%M. Pin time_format (`--set "
        "'options.time_format=%m/%d/%Y %H:%M'`)."
    )
    path = write(tmp_path, ["noon,1"], "time,price")
    assert "found `noon`, which fits none that is known" in refusal(path, zone="UTC")


def test_columns_must_exist_and_hold_numbers(tmp_path):
    path = write(tmp_path, ["a,b"], "when,price")
    assert "expected a time column, such as ts_recv, local_timestamp" in refusal(path)
    assert "FILE: expected a column named then, found when, price" in refusal(path, time="then")
    assert "expected a column named no, " in refusal(path, time="when", columns=["no"])
    path = write(tmp_path, [f"{START_S},b"], "time,venue")
    assert refusal(path) == (
        "FILE: expected columns of numbers beside the time, found none among venue. Name them, "
        'with columns (`--set \'options.columns=["a", "b"]\'`).'
    )
    assert refusal(path, stamp="middle") == (
        "stamp: expected open or close, found 'middle'. Give one."
    )


def test_times_of_floats_are_refused(tmp_path):
    path = tmp_path / "floats.parquet"
    pq.write_table(pa.table({"time": [1.5e9], "price": [1.0]}), path)
    assert refusal(path) == (
        "FILE, column time: expected times as integers, text or timestamps, found double, which "
        "has lost digits. Write the times as whole numbers."
    )


def samples(name: str) -> Path:
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    return path


@pytest.mark.samples
def test_the_same_bars_in_two_spellings():
    iso = samples("equities/SP500_1min_20191105_08_iso.csv")
    naive = samples("equities/SP500_1min_20191105_08_naive_ET.csv")
    one, _ = read(iso, stamp="close", **NEW_YORK)
    two, _ = read(naive, stamp="close", time_format="%m/%d/%Y %H:%M", **NEW_YORK)
    assert [len(session) for session in one] == [391, 391, 391, 390]
    for mine, theirs in zip(one, two, strict=True):
        assert mine.times.tolist() == theirs.times.tolist()
        np.testing.assert_array_equal(mine.values[:, :4], theirs.values[:, :4])


@pytest.mark.samples
def test_the_early_halt_is_two_sessions_on_one_date():
    path = samples("futures/ES_ticks_labor_day_early_halt_20130902.csv.gz")
    tape = read_tape(path, options={"zone": "America/Chicago"}, sessions=Gaps(3_600))
    one, two = tape
    assert (one.key.date, one.key.segment) == ("2013-09-02", 0)
    assert (two.key.date, two.key.segment) == ("2013-09-02", 1)
    assert len(one) + len(two) == tape.report.counts.lines_read == 24_000
    assert str(np.datetime64(int(one.times[-1]), "ns")) == "2013-09-02T15:29:59.246000000"
    assert str(np.datetime64(int(two.times[0]), "ns")) == "2013-09-02T22:00:00.026000000"


@pytest.mark.samples
def test_the_early_halt_by_calendar():
    pytest.importorskip("pandas_market_calendars", reason="the extra `markets` isn't installed")
    path = samples("futures/ES_ticks_labor_day_early_halt_20130902.csv.gz")
    tape = read_tape(
        path,
        options={"zone": "America/Chicago"},
        sessions=Calendar("CMES"),
        grid=GridOptions(60 * 10**9, max_age_s=None),
    )
    one, two = tape
    assert (one.key.date, len(one)) == ("2013-09-02", 19 * 60)
    assert (two.key.date, len(two)) == ("2013-09-03", 24 * 60)
    assert tape.report.counts.outside == 0


@pytest.mark.samples
def test_stamps_of_mixed_widths():
    path = samples("fx/truefx_usdjpy_ticks_mixed_timestamp_widths.csv")
    assert detect(path).name == "table"
    (session,), report = read(path)
    assert len(session) == 1_000
    assert np.count_nonzero(session.times % 10**9 == 0) == 1
    assert report.detected["time_format"] == "iso"
    assert (report.counts.lines_unreadable, report.counts.times_stepped_back) == (0, 0)
