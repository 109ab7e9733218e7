"""Binance recordings: twins of the real ones, the rules of their ids, and the samples' facts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance_tape import TapeConformance
from helpers_tape import absolute
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, detect, read_tape
from tapeline.tape.readers import binance
from tapeline.tape.readers.base import NoOptions, Source
from tapeline.tape.report import Counts

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "crypto"
T0_NS = 1_723_161_596_000_000_000  # four seconds before 2024-08-09 UTC
AHEAD_MS = 1_270  # the exchange's clock
STEP = GridOptions(100_000_000, depth=2)
EVERY = GridOptions(step_ns=None, depth=1)

Line = tuple[int, dict[str, Any]]  # milliseconds after T0, and the message


def wrapped(stream: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"stream": f"btcusdt@{stream}", "data": data}


def update(ms: int, first: int, last: int, bids=(), asks=(), **more) -> Line:
    sides = {"b": [list(level) for level in bids], "a": [list(level) for level in asks]}
    stamp = T0_NS // 10**6 + ms + AHEAD_MS
    head = {"e": "depthUpdate", "E": stamp, "s": "BTCUSDT", "U": first, "u": last}
    return ms, wrapped("depth@100ms", head | sides | more)


def snapshot(ms: int, last: int, bids=(), asks=()) -> Line:
    return ms, {"lastUpdateId": last, "bids": list(bids), "asks": list(asks)}


def quote(ms: int, bid: str, ask: str, bid_size="1.5", ask_size="2.0", symbol="BTCUSDT") -> Line:
    data = {"u": 1, "s": symbol, "b": bid, "B": bid_size, "a": ask, "A": ask_size}
    return ms, wrapped("bookTicker", data)


def trade(ms: int) -> Line:
    stamp = T0_NS // 10**6 + ms + AHEAD_MS - 20
    return ms, wrapped("trade", {"e": "trade", "E": stamp, "s": "BTCUSDT", "p": "1", "q": "1"})


def write(path: Path, lines: list[Line]) -> Path:
    text = "".join(f"{T0_NS + ms * 10**6} {json.dumps(message)}\n" for ms, message in lines)
    path.write_text(text)
    return path


LINES = [
    update(0, 101, 110, [("61830.17", "0.00000000"), ("61821", "9")]),
    update(100, 111, 115, [("61837.63", "7.5")], [("61838.04", "0.5")]),
    quote(130, "61837.63", "61837.64"),
    trade(140),
    update(200, 116, 125, [("61820.97", "2.0")], [("61837.64", "1.60520000")]),
    snapshot(
        290,
        118,
        [("61837.63000000", "3.78826000"), ("61820.97", "0.5"), ("61820.96", "0.5")],
        [("61837.64000000", "1.54698000"), ("61840.1", "1"), ("61841", "1")],
    ),
    update(400, 126, 130, [], [("61837.64", "0.0"), ("61840.1", "0.25")]),
    update(700, 131, 131, [("61839.99", "1")]),
    update(1_300, 132, 140, [("61839.99", "0")]),
    update(1_800, 141, 141, [], [("61839", "1")]),
    update(2_200, 142, 150, [("61838", "1")]),
    update(2_900, 151, 151, [("61838", "3")]),
    update(3_400, 152, 155, [("61838", "0")]),
    update(3_900, 156, 156, [("61838.5", "2")]),
]
NEXT_DAY = [
    update(4_002, 157, 160, [("61838.5", "1")]),
    update(4_500, 161, 170, [], [("61839", "5")]),
    update(5_100, 171, 171, [("61838.6", "1")]),
]
QUOTES = [
    quote(0, "61837.63", "61837.64"),
    quote(510, "61837.63", "61837.65", "0.5"),
    trade(600),
    quote(900, "0.00000000", "61837.65", "0.00000000"),
    quote(1_400, "61837.7", "61837.75"),
    quote(1_900, "61837.71", "61837.75"),
    quote(2_300, "61837.71", "61837.76"),
    quote(2_900, "61837.71", "61837.77"),
    quote(3_100, "61837.73", "61837.77"),
    quote(3_900, "61837.74", "61837.77"),
]


def read(paths, **arguments):
    tape = read_tape(paths, **{"grid": STEP, **arguments})
    return list(tape), tape.report.counts


def tops(session) -> dict[int, list[float]]:
    """Best bid and its size, best ask and its size, by milliseconds; marked rows are None."""
    values = absolute(session)[:, 1:5].round(3).tolist()
    return {
        (time - T0_NS) // 10**6: row if valid else None
        for time, row, valid in zip(session.times.tolist(), values, session.valid, strict=True)
    }


def refusal(paths, **arguments) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(paths, **arguments))
    return str(error.value)


class TestBinance(TapeConformance):
    reader = "binance"

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "feed", LINES)]


class TestBinanceTicker(TapeConformance):
    reader = "binance-ticker"
    grid = GridOptions(depth=1)

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "feed", QUOTES)]


def test_updates_received_before_the_snapshot_follow_it(tmp_path):
    (session,), counts = read(write(tmp_path / "feed", LINES))
    rows = tops(session)
    assert str(session.key) == "BTCUSDT/2024-08-08"
    assert min(rows) == 300, "nothing is known before the snapshot"
    assert rows[300] == [61837.63, 3.788, 61837.64, 1.605], "110 and 115 are older, 125 is not"
    assert absolute(session)[0, 5:7].tolist() == pytest.approx([61820.97, 2])
    assert rows[400] == [61837.63, 3.788, 61840.1, 0.25]
    assert rows[1300] == rows[400]
    assert rows[3900] == [61838.5, 2, 61839, 1]
    assert counts.lines_read == len(LINES)
    assert (counts.cleared, counts.levels_set) == (1, 17)
    assert counts.states_crossed == 0
    assert counts.other == {
        "best quotes, left out": 1,
        "trades, left out": 1,
        "updates older than the book, left out": 2,
        "messages stamped by the exchange after they were received, by 1.250 to 1.270 s: the "
        "clocks differ": len(LINES) - 2,
    }


def test_a_file_that_continues_another_is_read_with_it_and_refused_alone(tmp_path):
    first = write(tmp_path / "20240808", LINES)
    second = write(tmp_path / "20240809", NEXT_DAY)
    assert detect(second).name == "binance"
    assert refusal(second) == (
        f"{second}: expected a snapshot of the book (lastUpdateId, bids, asks) among its updates, "
        "found 3 updates from id 157 on, and no snapshot. Give the file before it first, which "
        "ends with id 156, and both as one tape (`--continues`)."
    )
    sessions, counts = read([first, second])
    assert [session.key.date for session in sessions] == ["2024-08-08", "2024-08-09"]
    assert "Put the files into the order of their times" in refusal([second, first])
    rows = tops(sessions[1])
    assert min(rows) == 4_100
    assert rows[4_100] == [61838.5, 1, 61839, 1]
    assert rows[4_500] == [61838.5, 1, 61839, 5]
    assert sessions[1].valid.all()
    assert counts.cleared == 1


def test_after_a_gap_the_book_is_unknown_until_a_snapshot(tmp_path):
    lost = [line for line in LINES if line[0] != 700]
    again = snapshot(2_500, 150, [("61830", "1")], [("61850", "1")])
    (session,), counts = read(write(tmp_path / "feed", [*lost[:-3], again, *lost[-3:]]))
    rows = tops(session)
    assert rows[1200] == [61837.63, 3.788, 61840.1, 0.25]
    assert [ms for ms, row in rows.items() if row is None] == list(range(1300, 2500, 100))
    assert rows[2500] == [61830, 1, 61850, 1]
    assert rows[3900] == [61838.5, 2, 61850, 1]
    assert counts.other["gaps in the ids of updates, after which the book is unknown"] == 1
    assert counts.other["updates older than the book, left out"] == 5


def test_without_a_later_snapshot_the_rest_is_counted(tmp_path):
    lost = [line for line in LINES if line[0] != 700]
    (session,), counts = read(write(tmp_path / "feed", lost))
    assert max(tops(session)) == 1300
    assert counts.other["updates that no snapshot follows, left out"] == 6


def test_a_snapshot_that_does_not_meet_the_updates_is_refused(tmp_path):
    path = write(tmp_path / "feed", [snapshot(10, 100, [("1", "1")], [("2", "1")]), *LINES[6:]])
    assert refusal(path) == (
        f"{path}: expected updates that continue a snapshot, found 8 updates from id 126 on, and a "
        "snapshot of id 100. Put the files into the order of their times; if they are, no file has "
        "what lies between, and the recording must begin before the snapshot is asked for."
    )


def test_a_snapshot_older_than_the_book_does_not_take_it_back(tmp_path):
    late = snapshot(3_000, 140, [("61830", "1")], [("61850", "1")])
    expected, _ = read(write(tmp_path / "feed", LINES))
    sessions, counts = read(write(tmp_path / "again", [*LINES[:-2], late, *LINES[-2:]]))
    assert sessions[0].values.tobytes() == expected[0].values.tobytes()
    assert counts.other["snapshots older than the book, left out"] == 1


def test_what_waits_for_a_snapshot_is_bounded(tmp_path, monkeypatch):
    early = [update(ms, 2 * ms + 1, 2 * ms + 2, [("50", "1")]) for ms in range(40)]
    late = snapshot(41, 75, [("60", "1")], [("70", "1")])
    more = [update(ms, 2 * ms - 3, 2 * ms - 2, [("51", "1")]) for ms in range(42, 900, 1)]
    path = write(tmp_path / "feed", [*early, late, *more])
    monkeypatch.setattr(binance, "MAX_WAITING", 20)
    _, counts = read(path)
    assert counts.other["updates given up while waiting for a snapshot"] == 30
    assert counts.levels_set == 2 + 3 + len(more), "75 is before the last three that waited"
    monkeypatch.setattr(binance, "MAX_WAITING", 4)
    assert "and a snapshot of id 75" in refusal(path), "needs one that was given up"


def test_futures_are_chained_by_the_id_before(tmp_path):
    """Ids of a future aren't consecutive: other contracts have those in between."""
    snap = snapshot(100, 1_007, [("10", "1")], [("11", "1")])
    lines = [
        update(50, 990, 1_000, [("9", "1")], pu=985),
        update(90, 1_004, 1_010, [("10", "2")], pu=1_000),
        snap,
        update(300, 1_033, 1_040, [("10", "3")], pu=1_010),
        update(600, 1_050, 1_055, [("10", "4")], pu=1_045),
        update(900, 1_060, 1_065, [("10", "5")], pu=1_055),
    ]
    partial = wrapped("depth5@100ms", lines[0][1]["data"])
    (session,), counts = read(write(tmp_path / "feed", [*lines, (950, partial)]))
    rows = tops(session)
    assert [rows[ms] for ms in (100, 300)] == [[10, 2, 11, 1], [10, 3, 11, 1]]
    assert rows[600] is None
    assert counts.other["gaps in the ids of updates, after which the book is unknown"] == 1
    assert counts.other["partial books, left out"] == 1


Changes = st.lists(st.tuples(st.integers(10, 19), st.integers(0, 2)), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(Changes, min_size=1, max_size=3), min_size=1, max_size=12),
    st.data(),
)
def test_the_book_is_the_exchange_s_or_unknown(updates, data):
    """Whatever is lost and whenever snapshots come, and from when."""
    truth: list[dict[int, int]] = [dict.fromkeys(range(10, 20), 1)]
    lines: list[tuple[str, int, int]] = []
    for changes in updates:
        first = len(truth)
        for change in changes:
            now = truth[-1] | dict(change)
            truth.append({price: size for price, size in now.items() if size})
        lines.append(("update", first, len(truth) - 1))
    is_lossless = data.draw(st.booleans())
    if not is_lossless:
        lines = [line for line in lines if data.draw(st.integers(0, 4))]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines)))
        newest = max([line[2] for line in lines[:at]], default=0)
        held = data.draw(st.integers(max(0, newest - 4), min(newest + 3, len(truth) - 1)))
        lines.insert(at, ("snapshot", held, held))

    book = binance._Book(Counts())
    shown: dict[tuple[bool, int], int] = {}
    known_id, has_snapshot = 0, False
    for time, (kind, first, last) in enumerate(lines, start=1):
        levels, before = truth[last], None
        if kind == "update":
            steps = [(truth[n - 1], truth[n]) for n in range(first, last + 1)]
            changed = {p for was, now in steps for p in was | now if was.get(p) != now.get(p)}
            levels, before = {price: truth[last].get(price, 0) for price in changed}, first - 1
        has_snapshot |= kind == "snapshot"
        as_levels = [(False, price < 15, price, size) for price, size in levels.items()]
        book.add(binance._Change(time, before, last, as_levels))
        known_id = max(known_id, last)
        for is_clear, is_bid, price, size in zip(*book.take()[1:], strict=True):
            if is_clear:
                shown.clear()
            elif size:
                shown[is_bid, price] = size
            else:
                shown.pop((is_bid, price), None)
        if book._id is None:
            assert not shown
            assert not (is_lossless and has_snapshot)
        else:
            assert book._id == known_id
            assert shown == {(price < 15, price): size for price, size in truth[known_id].items()}


@pytest.mark.parametrize(
    "bad",
    [
        "not a line",
        f"{T0_NS} not json",
        f"{T0_NS} [1, 2]",
        f"{T0_NS} " + "[" * 100_000,
        f'{T0_NS // 10**9} {{"e": "trade"}}',
        f'{T0_NS} {{"data": 3}}',
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [("0.00", "1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [("1e3", "1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [("9300000000", "1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [("1.0000000001", "1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [("1", "-1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2, [(1.5, "1")])[1]),
        f"{T0_NS} " + json.dumps(update(0, 1, 2.5)[1]),
        f"{T0_NS} " + json.dumps({"lastUpdateId": 3, "bids": []}),
    ],
)
def test_a_line_that_cannot_be_read_is_left_out(tmp_path, bad):
    path = write(tmp_path / "feed", LINES)
    expected, _ = read(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], bad, "", *lines[6:]]))
    tape = read_tape(path, grid=STEP, max_unreadable_share=0.1)
    (session,) = tape
    assert session.values.tobytes() == expected[0].values.tobytes()
    assert tape.report.counts.lines_unreadable == 1
    assert tape.report.first_unreadable.startswith(f"line 7: {bad[:20]}")
    assert f"{path}, line 7: expected at most 0.1000 %" in refusal(path)


def test_several_symbols_are_refused(tmp_path):
    path = write(tmp_path / "feed", [*QUOTES, quote(4_000, "1", "2", symbol="ETHUSDT")])
    assert refusal(path) == (
        f"{path}: expected messages of one symbol, found BTCUSDT and ETHUSDT. Split the files by "
        "symbol, and read them one by one."
    )


def test_a_line_without_an_end_is_refused(tmp_path):
    path = tmp_path / "feed"
    path.write_bytes(gzip.compress(b"1723161596000000000 {" + b" " * (20 << 20)))
    assert f"{path}: expected lines of `<local ns> <json>`, found one of more than" in refusal(
        path, format="binance"
    )


def test_a_snapshot_longer_than_the_head_of_a_file_is_recognised(tmp_path):
    far = [(f"{price}", "1") for price in range(1, 5_000)]
    first = snapshot(0, 100, [*LINES[5][1]["bids"], *far], LINES[5][1]["asks"])
    path = write(tmp_path / "feed", [first, *LINES[:2]])
    assert path.read_text().index("\n") > 1 << 16
    assert detect(path).name == "binance"
    (session,), _ = read(path)
    assert session.valid.all()


def test_best_quotes_are_a_book_of_one_level(tmp_path):
    path = write(tmp_path / "feed", QUOTES)
    assert detect(path).name == "binance-ticker"
    tape = read_tape(path)
    (session,) = tape
    assert session.columns == ("mid", "bid_price_1", "bid_size_1", "ask_price_1", "ask_size_1")
    tape = read_tape(path, grid=EVERY)
    (session,) = tape
    assert session.valid.tolist() == [True, True, False, *[True] * 6]
    assert absolute(session)[1].tolist() == pytest.approx([61837.64, 61837.63, 0.5, 61837.65, 2])
    assert tape.report.counts.other["trades, left out"] == 1
    assert refusal(path, format="binance") == (
        f"{path}: expected updates of a book, found none. Read a recording of best quotes as "
        "format binance-ticker."
    )


def test_best_quotes_may_be_asked_for_in_a_recording_of_everything(tmp_path):
    tape = read_tape(write(tmp_path / "feed", LINES), format="binance-ticker", grid=EVERY)
    assert sum(map(len, tape)) == 1
    assert tape.report.counts.other["updates of the book, left out"] == len(LINES) - 3
    assert tape.report.counts.other["snapshots of the book, left out"] == 1


@pytest.fixture(scope="module")
def real() -> list[Path]:
    paths = sorted(SAMPLES.glob("binance_spot_btcusdt_raw_feed_*.gz"))
    if len(paths) != 2:
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    return paths


@pytest.mark.samples
def test_the_facts_of_the_real_recording(real):
    assert {detect(path).name for path in real} == {"binance"}
    (session,), counts = read(real[0], grid=GridOptions())
    assert str(session.key) == "BTCUSDT/2024-08-08"
    assert counts.lines_read == 41_249
    assert counts.lines_unreadable == counts.states_crossed == counts.states_locked == 0
    assert counts.cleared == 1
    assert session.valid.all()
    other = dict(counts.other)
    (clock,) = [what for what in other if "stamped" in what]
    assert "by 1.250 to 1.275 s" in clock
    assert other.pop(clock) == 3_451 + 9_757
    assert other == {
        "best quotes, left out": 28_040,
        "trades, left out": 9_757,
        "updates older than the book, left out": 2,
    }


@pytest.mark.samples
def test_the_mids_of_the_real_recording(real):
    source = Source(real[:1], Counts())
    book: list[dict[int, int]] = [{}, {}]
    mids = []
    for block in binance.BinanceReader(source, NoOptions()).blocks():
        for time, following, is_bid, price, size in zip(
            block.times_ns,
            np.append(block.times_ns, -1)[1:],
            block.are_bids,
            block.prices,
            block.sizes,
            strict=True,
        ):
            book[is_bid][price] = size
            if not size:
                del book[is_bid][price]
            if time != following:
                mids.append((max(book[True]) + min(book[False])) / 2e9)
    assert len(mids) == 1 + 3_451 - 3, "three updates came before the snapshot"
    assert min(mids) == pytest.approx(61_600.455)
    tape = read_tape(real[0], format="binance-ticker", grid=EVERY)
    (session,) = tape
    assert len(session) == 28_040
    quoted = absolute(session)[:, 0]
    assert quoted.min() == pytest.approx(61_589.11)
    assert quoted.max() == pytest.approx(max(mids)) == pytest.approx(61_860.795)
    assert session.times[-1] // 10**9 < 1_723_161_600


@pytest.mark.samples
def test_the_second_real_recording_continues_the_first(real):
    sessions, counts = read(real, grid=GridOptions())
    assert [session.key.date for session in sessions] == ["2024-08-08", "2024-08-09"]
    assert counts.lines_read == 41_249 + 58_325
    assert counts.cleared == 1
    assert counts.states_crossed == 0
    assert all(session.valid.all() for session in sessions)
    assert not any("gaps" in what for what in counts.other)
    assert "found 3,044 updates from id 50093421585 on, and no snapshot" in refusal(real[1])
    assert "which ends with id 50093421584" in refusal(real[1])
    times = np.concatenate([session.times for session in sessions])
    assert times[-1] // 10**9 == 1_723_161_904
