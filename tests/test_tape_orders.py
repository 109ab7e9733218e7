"""The reader of order-by-order CSV: its rules, its refusals, and the real tape's facts."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, Policy, demo_tape, read_orders
from tapeline.tape.readers import text

HEADER = "id,timestamp,exchange_timestamp,price,volume,action,direction"
START_MS = 1_777_689_383_201  # 2026-05-02 02:36:23.201 UTC, as in the real tape
MIDNIGHT_MS = 1_777_766_400_000  # 2026-05-03


def line(order_id, at_ms, price, volume, action, side) -> str:
    at = START_MS + at_ms
    return f"{order_id},{at},{at - 80},{price},{volume},{action},{side}"


def snapshot(num_levels: int = 12) -> list[str]:
    """A full book: bids from 78318.0 down, asks from 78320.0 up."""
    return [
        line(f"{side}{i}", 0, f"{start + sign * i}.0", f"0.{i + 1}", "created", side)
        for side, sign, start in (("bid", -1, 78318), ("ask", 1, 78320))
        for i in range(num_levels)
    ]


def write(tmp_path: Path, lines: list[str], header: str = HEADER) -> Path:
    path = tmp_path / "orders.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return path


def read(path: Path, **options):
    return read_orders(path, instrument="BTC/USD", **options)


def mids(session) -> list[float]:
    return (session.values[:, 0] + session.origin).tolist()


def twin() -> list[str]:
    """A minute with every kind of dirt of the real tape, and two that it lacks."""
    return [
        *snapshot(),
        # Received before the snapshot was: one step back, and known from the snapshot's time on.
        line("early", -900, "78319.0", "0.5", "created", "bid"),
        line("never", -800, "78400.0", "0.1", "deleted", "ask"),
        line("early", -700, "78319.0", "0.0", "deleted", "bid"),
        # Without a price, without a size, far away.
        line("market", 100, "0.0", "10.0", "created", "bid"),
        line("market2", 100, "999999999.0", "5.0", "created", "bid"),
        line("nothing", 150, "78319.0", "0.0", "created", "bid"),
        line("stub", 200, "483980000.0", "6.405e-05", "created", "ask"),
        # A delete names another price than the create did.
        line("moved", 1_000, "78319.0", "0.2", "created", "bid"),
        line("moved", 1_200, "78321.0", "0.0", "deleted", "bid"),
        # Crosses for 400 ms, over one instant (02:36:25.000 is 1,799 ms from the start).
        line("hit", 1_700, "78325.0", "0.3", "created", "bid"),
        line("hit", 2_100, "78320.0", "0.1", "changed", "bid"),
        line("hit", 2_150, "78320.0", "0.0", "deleted", "bid"),
        # A stale ask: its delete is lost, and the bids come to it.
        line("stale", 3_000, "78319.0", "0.7", "created", "ask"),
        line("rise", 5_000, "78319.0", "0.4", "created", "bid"),
        line("rise", 9_000, "78319.0", "0.4", "deleted", "bid"),
        line("stale", 9_100, "78319.0", "0.7", "deleted", "ask"),
        # A delete before its create, and one whose create comes too late to be its own.
        line("swapped", 10_000, "78319.0", "0.4", "deleted", "bid"),
        line("reused", 10_100, "78319.0", "0.4", "deleted", "bid"),
        line("swapped", 10_200, "78319.0", "0.4", "created", "bid"),
        line("reused", 30_000, "78319.0", "0.4", "created", "bid"),
        line("unknown", 31_000, "78319.0", "0.6", "changed", "bid"),
        line("bid0", 32_000, "78317.0", "0.9", "created", "bid"),
        line("end", 60_000, "70000.0", "1.0", "created", "bid"),
    ]


def test_the_twin_of_the_real_tape(tmp_path):
    (session,), report = read(write(tmp_path, twin()))
    counts = report.counts
    assert (counts.created, counts.changed, counts.deleted) == (37, 2, 8)
    assert (counts.lines_read, counts.lines_unreadable) == (47, 0)
    assert (counts.times_stepped_back, counts.times_lifted) == (1, 3)
    assert (counts.deletes_unknown, counts.deletes_before_create) == (2, 1)
    assert (counts.changes_unknown, counts.creates_repeated) == (1, 1)
    assert (counts.orders_without_price, counts.orders_without_size) == (2, 1)
    assert [(o.order_id, o.side, o.price) for o in report.evicted] == [("stale", "ask", 78319.0)]
    assert report.evicted[0].placed_ns == (START_MS + 3_000) * 10**6
    # The cross began at 28.201; the first instant a second later is 29.500.
    assert report.evicted[0].evicted_ns == (START_MS + 6_299) * 10**6
    assert report.detected == {"time_unit": "ms", "tick": "1"}
    assert str(session.key) == "BTC/USD/2026-05-02"
    assert len(session) == counts.rows == 120
    assert session.times[0] == (START_MS + 299) * 10**6
    assert session.valid.all()
    assert counts.rows_held == 1 + 2
    mid = dict(zip((session.times // 10**6 - START_MS).tolist(), mids(session), strict=True))
    assert mid[299] == 78319.0
    assert mid[1_299] == 78319.0, "the deleted order is off the price it was placed at"
    assert mid[1_799] == 78319.0, "held from before the cross"
    assert mid[5_299] == 78318.5, "held from before the stale cross"
    assert mid[6_299] == 78319.5, "the stale ask is gone, the new bid stays"
    assert mid[10_299] == 78319.0, "the swapped pair had no effect"
    assert mid[30_299] == 78319.5, "a late create is an order like any other"
    best = dict(zip(session.columns, session.values[-1].tolist(), strict=True))
    assert best["bid_size_1"] == 1.0
    assert np.nanmax(session.values) < 100, "no price that stands for none reaches a row"


def test_a_price_that_stands_for_none_never_pads_a_thin_side(tmp_path):
    lines = [*snapshot(3), line("market", 0, "0.0", "10.0", "created", "bid")]
    lines.append(line("end", 900, "78310.0", "0.0", "created", "bid"))
    (session,), report = read(write(tmp_path, lines))
    columns = dict(zip(session.columns, session.values[0].tolist(), strict=True))
    assert [columns[f"bid_price_{i}"] for i in (1, 2, 3, 4, 10)] == [0, -1, -2, -2, -2]
    assert [columns[f"bid_size_{i}"] for i in (3, 4, 10)] == [np.float32(0.3), 0, 0]
    assert report.counts.rows_thin == len(session) == 2


def same(one, two) -> bool:
    return all(
        a.key == b.key
        and a.values.tobytes() == b.values.tobytes()
        and a.times.tobytes() == b.times.tobytes()
        and a.age_ns.tobytes() == b.age_ns.tobytes()
        and a.valid.tobytes() == b.valid.tobytes()
        and a.origin == b.origin
        for a, b in zip(one, two, strict=True)
    )


def test_gzip_small_blocks_and_other_column_orders_make_no_difference(tmp_path, monkeypatch):
    path = write(tmp_path, twin())
    expected, report = read(path)
    packed = tmp_path / "no-suffix"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert same(read(packed)[0], expected)

    names = HEADER.split(",")
    shuffled = [",".join(["x", *reversed(row.split(","))]) for row in twin()]
    other = write(tmp_path, shuffled, ",".join(["extra", *reversed(names)]))
    assert same(read(other)[0], expected)
    quoted = ['"' + row.replace(",", '","') + '"' for row in [HEADER, *twin()]]
    assert same(read(write(tmp_path, quoted[1:], quoted[0]))[0], expected)

    seen = []
    monkeypatch.setattr(text, "BLOCK_BYTES", 100)
    again, blocked = read(write(tmp_path, twin()), progress=lambda *done: seen.append(done))
    assert same(again, expected)
    assert blocked.counts == report.counts
    size = path.stat().st_size
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


@pytest.mark.parametrize(("unit", "scale"), [("s", -3), ("us", 3), ("ns", 6)])
def test_units_of_time_are_detected_by_magnitude(tmp_path, unit, scale):
    def scaled(ms: str) -> str:
        return ms[:scale] if scale < 0 else ms + "0" * scale

    lines = [*snapshot(), line("end", 5_000, "78310.0", "1.0", "created", "bid")]
    rows = [row.split(",") for row in lines]
    path = write(tmp_path, [",".join([r[0], scaled(r[1]), *r[2:]]) for r in rows])
    (session,), report = read(path)
    assert report.detected["time_unit"] == unit
    start_ns = START_MS * 10**6 if unit != "s" else START_MS // 1000 * 10**9
    assert report.first_ns == start_ns
    assert session.times[0] == -(-start_ns // 500_000_000) * 500_000_000
    assert read(path, time_unit=unit)[1] == report


def test_nanoseconds_and_ids_keep_every_digit(tmp_path):
    lines = [row.replace(str(START_MS), f"{START_MS}000001") for row in snapshot()]
    first, second = "9007199254740993", "9007199254740992"  # one and the same as floats
    last = START_MS + 600
    lines += [
        f"{first},{last}000001,0,78319.0,0.5,created,bid",
        f"{second},{last}000001,0,78319.0,0.25,created,bid",
        f"{first},{last}000003,0,78319.0,0.5,deleted,bid",
        f"end,{last + 500}000007,0,1.0,0.5,created,bid",
    ]
    (session,), report = read(write(tmp_path, lines))
    assert report.first_ns == START_MS * 10**6 + 1
    assert report.last_ns == (last + 500) * 10**6 + 7
    assert session.age_ns[-1] == int(session.times[-1]) - (last * 10**6 + 3)
    assert session.values[-1, 2] == 0.25


@pytest.mark.parametrize(("text_of_price", "tick"), [("78318.25", "0.01"), ("78318.50", "0.1")])
def test_the_tick_is_read_off_the_prices(tmp_path, text_of_price, tick):
    lines = [*snapshot(), line("x", 500, text_of_price, "1", "created", "bid")]
    assert read(write(tmp_path, lines))[1].detected["tick"] == tick


def test_a_pinned_tick_leaves_out_what_is_off_it(tmp_path):
    off = line("x", 400, "78318.25", "1", "created", "bid")
    lines = [*snapshot(), off, line("y", 500, "78318.5", "1", "created", "bid")]
    _, report = read(write(tmp_path, lines), tick=0.5, max_unreadable_share=0.1)
    assert report.detected["tick"] == "0.5"
    assert report.first_unreadable == (
        f"line 26: x,{START_MS + 400},78318.25,1,created,bid (the price is off the tick)"
    )


def test_a_price_that_stands_for_none_need_not_be_on_the_tick(tmp_path):
    market = line("market", 500, "999999999.0", "1", "created", "bid")
    even = [row for row in snapshot() if int(row.split(",")[3][:-2]) % 2 == 0]
    _, report = read(write(tmp_path, [*even, market]), tick=2, max_unreadable_share=0)
    assert report.counts.orders_without_price == 1


def test_two_orders_that_cross_for_exactly_the_limit_are_parted(tmp_path):
    lines = [
        *snapshot(),
        line("ask", 100, "78319.0", "1", "created", "ask"),
        line("bid", 799, "78319.0", "1", "created", "bid"),  # 02:36:24.000
        line("end", 2_000, "78310.0", "1", "created", "bid"),
    ]
    _, report = read(write(tmp_path, lines))
    assert [order.evicted_ns for order in report.evicted] == [(START_MS + 1_799) * 10**6]
    _, report = read(write(tmp_path, lines), policy=Policy("hold", "hold", stale_cross_s=1.001))
    assert [order.evicted_ns for order in report.evicted] == []


BAD_LINES = [
    "x,{t},0,78319.0,1,created",
    "x,{t},0,78319.0,1,created,bid,more",
    ",{t},0,78319.0,1,created,bid",
    "x,,0,78319.0,1,created,bid",
    "x,soon,0,78319.0,1,created,bid",
    "x,{t}.5000001,0,78319.0,1,created,bid",
    "x,4102444800000,0,78319.0,1,created,bid",
    "x,631151999999,0,78319.0,1,created,bid",
    "x,{t},0,,1,created,bid",
    "x,{t},0,nan,1,created,bid",
    "x,{t},0,78319.0123456789,1,created,bid",
    "x,{t},0,1.797e308,1,created,bid",
    "x,{t},0,78319.0,-1,created,bid",
    "x,{t},0,78319.0,,created,bid",
    "x,{t},0,78319.0,1,filled,bid",
    "x,{t},0,78319.0,1,created,buy",
    'x,{t},0,"78319.0,1,created,bid',
    "\udcff,{t},0,78319\udcff,1,created,bid",
]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_counted_named_and_without_effect(tmp_path, bad):
    bad = bad.format(t=START_MS + 400)
    end = line("end", 900, "78310.0", "1.0", "created", "bid")
    expected, _ = read(write(tmp_path, [*snapshot(), end]))
    path = tmp_path / "bad.csv"
    lines = [HEADER, *snapshot(), "", bad, "", end, "", ""]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    sessions, report = read(path, max_unreadable_share=0.04)
    assert same(sessions, expected)
    assert (report.counts.lines_read, report.counts.lines_unreadable) == (26, 1)
    assert report.first_unreadable is not None
    assert report.first_unreadable.startswith("line 27: ")
    with pytest.raises(TapeError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(
        f"{path}, line 27: expected at most 0.1000 % of the lines to be unreadable, "
        "found 1 of 26, the first being `"
    )
    assert message.endswith(
        "Repair the file, or raise max_unreadable_share (`--set max_unreadable_share=…`) if losing "
        "them is all right."
    )


def test_line_numbers_hold_across_blocks_and_kinds_of_dirt(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 300)
    end = line("end", 900, "78310.0", "1.0", "created", "bid")
    lines = [*snapshot(), "", *snapshot(), "short,line", *snapshot(), "a,b,c,d,e,f,g", "x", end]
    _, report = read(write(tmp_path, lines), max_unreadable_share=0.5)
    assert report.counts.lines_unreadable == 3
    assert report.first_unreadable == "line 51: short,line (the number of fields is 2 and not 7)"


def test_the_first_unreadable_line_is_the_first_in_the_file(tmp_path):
    # Misshapen lines are seen while a block is parsed, unreadable values after it.
    lines = [*snapshot(), "a,b,c,d,e,f,g", "x", line("end", 900, 78310, 1, "created", "bid")]
    _, report = read(write(tmp_path, lines), max_unreadable_share=0.1)
    assert report.counts.lines_unreadable == 2
    assert report.first_unreadable == (
        "line 26: a,b,d,e,f,g (the timestamp is no time from 1990 to 2100)"
    )


def refusal(path: Path, **options) -> str:
    with pytest.raises(TapeError) as error:
        read(path, **options)
    return str(error.value).replace(str(path), "FILE")


def test_files_that_are_no_tape_are_refused(tmp_path):
    path = tmp_path / "orders.csv"
    assert refusal(path) == "FILE: expected a file, found nothing there. Check the path."
    assert refusal(tmp_path) == ("FILE: expected a file, found a directory. Give the files in it.")
    path.write_bytes(b"")
    assert refusal(path) == (
        "FILE: expected a line of column names, found an empty file. Give a CSV file with a header."
    )
    path.write_bytes(b"\n1,2\n")
    assert "found an empty first line" in refusal(path)
    write(tmp_path, ["1,2,3"], "id,timestamp,price")
    assert refusal(path) == (
        "FILE, line 1: expected columns named id, timestamp, price, volume, action, direction, "
        "found no volume, action, direction among `id, timestamp, price`. "
        "Rename the columns, or use the reader of this format."
    )
    path.write_bytes(bytes(range(256)) * 9)
    assert refusal(path) == (
        "FILE: expected a line of column names, found bytes that aren't text: 00 01 02 03 04 05 06 "
        "07. Check what the file is."
    )
    write(tmp_path, [])
    assert refusal(path) == (
        "FILE: expected data for one valid row or more, found no record. Check that "
        "there is more to it than a header."
    )
    write(tmp_path, [line("x" * (1 << 21), 0, 1, 1, "created", "bid"), *snapshot()])
    assert refusal(path).startswith("FILE: expected lines of comma-separated fields, found ")


def test_a_gzip_cut_short_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    lines = [
        *snapshot(),
        *(line(i, i, rng.integers(9e4), 1, "created", "ask") for i in range(9999)),
    ]
    packed = gzip.compress(write(tmp_path, lines).read_bytes())
    path = tmp_path / "cut.csv.gz"
    for kept in (packed[: len(packed) // 2], packed[:-4], packed[:100]):
        path.write_bytes(kept)
        assert refusal(path) == (
            "FILE: expected a file that can be read to its end, found Truncated compressed "
            "stream. Fetch the file again: it may be cut short or damaged."
        )
    path.write_bytes(b"\x1f\x8b" + b"junk" * 99)
    assert "expected a file that can be read to its end, found zlib" in refusal(path)


def test_a_book_that_never_has_two_sides_is_refused(tmp_path):
    path = write(tmp_path, [*snapshot()[:12], line("y", 1_000, 78310, 1, "created", "bid")])
    assert "found 13 records, 0 events outside every session and 2 rows, none" in refusal(path)


def test_times_of_no_unit_are_refused(tmp_path):
    path = write(tmp_path, [re.sub(r"\d{13}", "34200", row) for row in snapshot()])
    assert refusal(path) == (
        "FILE, column timestamp: expected times from 1990 to 2100 in s, ms, us or ns since 1970, "
        "found 34200 in the middle of the first block. Check the column, or pin time_unit "
        "(`--set options.time_unit=ms`)."
    )


def test_arguments_are_checked(tmp_path):
    path = write(tmp_path, snapshot())
    assert refusal(path, time_unit="min") == (
        "time_unit: expected s, ms, us or ns, found 'min'. Give one."
    )
    for tick in ("cheap", 0, -1, "1e-10", float("nan"), float("inf")):
        assert refusal(path, tick=tick).startswith(
            f"tick: expected a price step above zero of nine decimals or fewer, found {tick!r}."
        )
    assert refusal(path, tock=1) == (
        "options of orders: expected time_unit, zone or tick, found tock. Write tick, the nearest."
    )


def test_a_tape_across_midnight_is_two_sessions(tmp_path):
    night = [row.replace(str(START_MS), str(MIDNIGHT_MS - 2_100)) for row in snapshot()]
    day = line("end", MIDNIGHT_MS - START_MS + 1_200, "78310.0", "1.0", "created", "bid")
    late = line("end2", MIDNIGHT_MS - START_MS + 3_000, "78310.0", "1.0", "created", "bid")
    sessions, report = read(write(tmp_path, [*night, day, late]))
    # The first day's only events are 2.1 s before midnight: no instant from one to the other.
    assert [str(session.key) for session in sessions] == ["BTC/USD/2026-05-03"]
    assert report.counts.sessions_without_rows == 1
    more = line("more", MIDNIGHT_MS - START_MS - 300, "78310.0", "1.0", "created", "bid")
    sessions, report = read(write(tmp_path, [*night, more, day, late]))
    assert [str(session.key) for session in sessions] == [
        "BTC/USD/2026-05-02",
        "BTC/USD/2026-05-03",
    ]
    since_midnight = [(s.times // 10**6 - MIDNIGHT_MS).tolist() for s in sessions]
    assert since_midnight == [[-2000, -1500, -1000, -500], [1500, 2000, 2500, 3000]]


@st.composite
def tapes(draw) -> list[str]:
    """Lines of a busy little book that crosses often and loses deletes."""
    lines, at_ms = [], 0
    for _ in range(draw(st.integers(1, 50))):
        at_ms += draw(st.sampled_from([-200, 0, 1, 100, 400, 900]))
        lines.append(
            line(
                draw(st.integers(0, 9)),
                at_ms,
                draw(st.integers(95, 105)),
                draw(st.integers(0, 2)),
                draw(st.sampled_from(["created", "created", "changed", "deleted"])),
                draw(st.sampled_from(["bid", "ask"])),
            )
        )
    return lines


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(tapes(), tapes())
def test_no_line_after_a_row_changes_it(tmp_path, known, future):
    """Also not through evictions, which are the reader's part of the grid."""
    anchor = [line(f"{s}far", -1_000, p, 1, "created", s) for s, p in (("bid", 1), ("ask", 999))]
    times = [int(row.split(",")[1]) for row in known]
    last = max(times) - START_MS
    now = line("now", last, 2, 1, "created", "bid")
    later = [re.sub(r"\d{13}", lambda m: str(int(m[0]) + last + 501), row) for row in future]
    one, two = (
        read(
            write(tmp_path, [*anchor, *known, now, *rest]),
            grid=GridOptions(depth=2),
            max_lifted_share=1,
        )[0][0]
        for rest in ([], later)
    )
    rows = len(one)
    assert one.times.tobytes() == two.times[:rows].tobytes()
    assert one.values.tobytes() == two.values[:rows].tobytes()
    assert one.age_ns.tobytes() == two.age_ns[:rows].tobytes()
    assert one.valid.tobytes() == two.valid[:rows].tobytes()
    assert one.origin == two.origin or not one.valid.any()


def test_the_report_prints_and_is_json(tmp_path):
    lines = [*twin(), "broken"]
    path = write(tmp_path, lines)
    _, report = read(path, max_unreadable_share=0.1)
    values = json.loads(json.dumps(report.as_dict()))
    assert values["rows_held"] == 3
    assert values["rows_marked"] == 0
    assert values["evicted"][0]["order_id"] == "stale"
    assert values["num_sessions"] == 1
    assert str(report).splitlines() == [
        f"{path} (orders, time_unit ms, tick 1): 48 records, 2026-05-02T02:36:23.201000000Z to "
        "2026-05-02T02:37:23.201000000Z",
        "BTC/USD: 1 session, 120 rows, 0 of them marked",
        "  37 orders created",
        "  2 orders changed",
        "  8 orders deleted",
        "  1 of 47 book states crossed",
        "  2 of 47 book states locked",
        "  12 of 47 book states one-sided or empty",
        "  3 rows of the book before it was crossed, locked or one-sided",
        "  1 line unreadable, left out",
        "  1 time stepped back",
        "  3 events taken as of a later time, already reached",
        "  2 deletes of an order never created, ignored",
        "  1 delete before the create, both ignored",
        "  1 change of an unknown order, taken as creates",
        "  1 create of a known order, taken as changes",
        "  2 creates without a real price, at no level",
        "  1 create of size zero, at no level",
        "  1 event after the last row of a session",
        "  evicted ask stale at 78,319.0, placed 2026-05-02T02:36:26.201000000Z, "
        "crossed until 2026-05-02T02:36:29.500000000Z",
        "  the first unreadable: line 49: broken (the number of fields is 1 and not 7)",
    ]


def test_without_the_data_package_there_is_no_demo_tape(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert demo_tape() is None


@pytest.mark.demo_tape
def test_the_facts_of_the_real_tape():
    path = demo_tape()
    if path is None:
        pytest.skip("the data package of the `demo` extra isn't installed")
    (session,), report = read(path)
    assert "ob_analytics" not in sys.modules, "its data file is read, its code never run"
    counts = report.counts
    assert (counts.created, counts.changed, counts.deleted) == (156_889, 266, 156_902)
    assert (counts.lines_read, counts.lines_unreadable) == (314_057, 0)
    assert (counts.times_stepped_back, counts.deletes_unknown) == (1, 13)
    assert (counts.deletes_before_create, counts.changes_unknown, counts.creates_repeated) == (
        0,
    ) * 3
    assert [(order.order_id, order.price) for order in report.evicted] == [
        ("2002347646152704", 78_333.0),
        ("2002347642003458", 78_374.0),
    ]
    assert report.detected == {"time_unit": "ms", "tick": "1"}
    assert str(session.key) == "BTC/USD/2026-05-02"
    assert session.values.shape == (3_595, 41)
    assert counts.rows - counts.rows_held - counts.rows_marked == 3_525
    assert (counts.rows_held, counts.rows_marked) == (69, 1)
    values = session.values[session.valid].astype(np.float64)
    assert (values[:, 0].min() + session.origin, values[:, 0].max() + session.origin) == (
        78_318.5,
        78_501.0,
    )
    assert round((values[:, 3] - values[:, 1]).mean(), 1) == 1.0
    assert np.abs(values).max() < 300, "no price that stands for none reaches a row"
    marked = np.convolve(~session.valid, np.ones(20 + 10), "valid")
    assert np.count_nonzero(marked == 0) == 3_536
