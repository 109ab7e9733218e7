"""Databento's market by order: a twin of the real sample, its rules one by one, and its facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance, assert_same
from helpers_databento import (
    BAD_BOOK,
    LAST,
    SNAPSHOT,
    T0,
    TOB,
    order,
    write_csv,
    write_dbn,
    write_parquet,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape import Calendar, GridOptions, LocalHours, Policy, read_tape
from tapeline.tape.blocks import CLEARED
from tapeline.tape.readers import databento_mbo, text
from tapeline.tape.readers.base import Source
from tapeline.tape.readers.databento import DatabentoOptions, DatabentoReader
from tapeline.tape.report import Counts

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "databento"
MS = 10**6
DAY = 86_400 * 10**9
GRID = GridOptions(100 * MS, depth=2)
MIDNIGHT = -9 * 3_600 * 10**9 - 88 * 10**9  # of the day, from `T0` on; a snapshot's stamp


def buy(recv: int, number: int, price: float, size: int = 1, **fields) -> np.ndarray:
    return order(recv, "A", number, **{"side": "B", "price": price, "size": size, **fields})


def sell(recv: int, number: int, price: float, size: int = 1, **fields) -> np.ndarray:
    return order(recv, "A", number, **{"side": "A", "price": price, "size": size, **fields})


def snapshot(recv: int, orders: list[np.ndarray], **fields) -> list[np.ndarray]:
    """Records of a snapshot, stamped as Databento does: at midnight, of the day before."""
    for record in orders:
        record["ts_recv"], record["ts_event"] = T0 + recv, T0 + recv - DAY // 2
        record["flags"] = SNAPSHOT
    return orders


# A snapshot without a clear, a book that opens crossed, trades in pieces, and a clear.
ORDERS = np.concatenate(
    [
        *snapshot(
            MIDNIGHT, [buy(0, 1, 10.0, 5), buy(0, 2, 9.5, 5), sell(0, 3, 11.0, 5), sell(0, 4, 12)]
        ),
        buy(20 * MS, 5, 11.5),
        order(150 * MS, "C", 5, size=1),
        sell(230 * MS, 6, 10.9, 4),
        order(310 * MS, "T", side="B", price=10.9, size=1, flags=0),
        order(320 * MS, "F", 6, side="A", price=10.9, size=1, flags=0),
        order(350 * MS, "C", 6, side="A", price=10.9, size=1),
        order(430 * MS, "M", 2, side="B", price=10.1, size=7),
        order(520 * MS, "C", 2, side="B", price=10.1, size=3, flags=0),
        buy(520 * MS, 7, 10.2),
        order(640 * MS, "N"),
        order(730 * MS, "R", flags=8),
        buy(730 * MS, 8, 10.0, flags=0),
        sell(760 * MS, 9, 11.0),
        *(buy(800 * MS + n * 60 * MS, 20 + n, 10.1 + n / 100) for n in range(30)),
    ]
)


class TestMbo(TapeConformance):
    reader = "databento"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        return [write_dbn(folder / "xyz.dbn.zst", ORDERS, schema="mbo")]


class TestMboCsv(TapeConformance):
    reader = "databento"

    def write(self, folder: Path) -> list[Path]:
        return [write_csv(folder / "xyz.csv", ORDERS, index=True, reverse=True)]


def rows_of(path: Path, **given):
    tape = read_tape(path, **{"grid": GRID, **given})
    (session,) = tape
    return session, tape.report


def written(folder: Path, *records: np.ndarray) -> Path:
    return write_dbn(folder / "xyz.dbn", np.concatenate(records), schema="mbo", packed=False)


def best(session) -> list[tuple[int, float, float, float, float] | None]:
    """Milliseconds after `T0`, then best bid, its size, best ask, its size; None for a blank."""
    found = []
    for time, valid, row in zip(session.times, session.valid, session.values, strict=True):
        at = int(time - T0) // MS
        bid, size, ask, other = row[1:5].astype(float)
        prices = [round(price + session.origin, 4) for price in (bid, ask)]
        found.append((at, prices[0], size, prices[1], other) if valid else None)
    return found


def test_the_book_at_each_row(tmp_path):
    for path in (
        written(tmp_path, ORDERS),
        write_csv(tmp_path / "x.csv", ORDERS),
        write_csv(tmp_path / "raw.csv", ORDERS, pretty=False),
        write_parquet(tmp_path / "x.parquet", ORDERS),
    ):
        session, report = rows_of(path)
        assert best(session)[:9] == [
            None,  # at 100 ms: the order of 20 ms crosses
            (200, 10.0, 5, 11.0, 5),
            (300, 10.0, 5, 10.9, 4),
            (400, 10.0, 5, 10.9, 3),
            (500, 10.1, 7, 10.9, 3),
            (600, 10.2, 1, 10.9, 3),
            (700, 10.2, 1, 10.9, 3),
            (800, 10.1, 1, 11.0, 1),
            (900, 10.11, 1, 11.0, 1),
        ]
        assert report.first_ns == T0 + 20 * MS, "a snapshot is no trading"
        counts = report.counts
        assert counts.lines_read == len(ORDERS)
        assert counts.states == len(ORDERS) - 4 - 2 - 1 - 1 - 1  # in events, and without action
        assert (counts.states_crossed, counts.states_one_sided) == (1, 1)
        assert (counts.cleared, counts.changed, counts.reduced) == (2, 1, 3)
        assert counts.deletes_unknown == counts.changes_unknown == 0
        assert counts.other == {
            "records of a snapshot, part of the event after it": 4,
            "trades, which don't change the book": 1,
            "fills, which don't change the book": 1,
            "records without an action, which don't change the book": 1,
        }


def test_nothing_within_an_event_is_shown_or_held(tmp_path):
    path = written(
        tmp_path,
        buy(0, 1, 10),
        sell(0, 2, 11),
        order(50 * MS, "C", 1, side="B", size=1, flags=0),  # one-sided at 100, were it shown
        buy(120 * MS, 3, 10.5, flags=0),  # a good book, never there
        buy(130 * MS, 4, 11),  # and locked at the event's end
        buy(250 * MS, 5, 9, flags=0),  # an event without its end
    )
    session, report = rows_of(path, policy=Policy(locked="drop"))
    assert best(session) == [(0, 10, 1, 11, 1), (100, 10, 1, 11, 1)]
    assert (report.counts.states, report.counts.states_locked) == (3, 1)
    assert report.counts.other == {"records of an event without its end, left out": 1}
    path = written(
        tmp_path,
        buy(0, 1, 10),
        sell(0, 2, 11),
        order(50 * MS, "C", 1, side="B", size=1, flags=0),
        buy(120 * MS, 3, 10.5, flags=0),
        buy(130 * MS, 4, 11),
        buy(250 * MS, 5, 9),
    )
    session, _ = rows_of(path, policy=Policy(locked="drop"))
    assert best(session) == [(0, 10, 1, 11, 1), (100, 10, 1, 11, 1), (200, 10, 1, 11, 1)]


def test_the_book_before_an_event_is_held_also_if_only_its_end_spoils_it(tmp_path):
    path = written(
        tmp_path,
        *(buy(0, n, 10 - n / 10) for n in range(3)),
        *(sell(0, 10 + n, 11 + n / 10) for n in range(3)),
        buy(50 * MS, 20, 10.5, flags=0),
        buy(60 * MS, 21, 11),
        buy(150 * MS, 22, 9),
    )
    session, report = rows_of(path, policy=Policy(locked="drop"))
    assert best(session) == [(0, 10, 1, 11, 1), (100, 10, 1, 11, 1)]
    assert session.age_ns.tolist() == [0, 40 * MS]
    assert report.counts.states_locked == 2


def test_an_event_is_known_at_its_end(tmp_path):
    records = [buy(0, 1, 10), sell(0, 2, 11), buy(90 * MS, 3, 10.5, flags=0), buy(210 * MS, 4, 9)]
    session, _ = rows_of(written(tmp_path, *records, buy(310 * MS, 5, 9)))
    assert [row[1] for row in best(session)] == [10, 10, 10, 10.5]
    records[3]["ts_event"] = T0 + 95 * MS
    session, report = rows_of(
        written(tmp_path, *records, buy(310 * MS, 5, 9)), options={"clock": "ts_event"}
    )
    assert [row[1] for row in best(session)] == [10, 10.5, 10.5, 10.5]
    assert report.detected["clock"] == "ts_event"


def test_a_snapshot_replaces_the_book(tmp_path):
    first = [buy(0, 1, 10), buy(0, 2, 9), sell(0, 3, 11)]
    again = [buy(0, 2, 9), sell(0, 4, 12)]
    clear = order(0, "R")
    for records in (again, [clear, *again]):
        path = written(tmp_path, *first, *snapshot(150 * MS, records), buy(220 * MS, 5, 8))
        session, report = rows_of(path)
        assert best(session) == [(0, 10, 1, 11, 1), (100, 10, 1, 11, 1), (200, 10, 1, 11, 1)]
        later = [buy(190 * MS, 5, 8), buy(250 * MS, 6, 8)]
        path = written(tmp_path, *first, *snapshot(150 * MS, records), *later)
        session, report = rows_of(path)
        assert best(session)[2] == (200, 9, 1, 12, 1)
        assert report.counts.cleared == 1
        assert report.counts.creates_repeated == 0


def test_after_a_gap_the_book_is_unknown_until_a_snapshot(tmp_path):
    records = [
        buy(0, 1, 10),
        sell(0, 2, 11),
        buy(150 * MS, 3, 10.5, flags=LAST | BAD_BOOK),
        sell(160 * MS, 4, 10.9),
        buy(250 * MS, 5, 10.4),
        *snapshot(260 * MS, [buy(0, 1, 10.2), sell(0, 2, 11)]),
        buy(340 * MS, 6, 9),
        buy(420 * MS, 7, 9),
    ]
    path = written(tmp_path, *records)
    expected, report = rows_of(path)
    assert best(expected) == [
        (0, 10, 1, 11, 1),
        (100, 10, 1, 11, 1),
        None,
        None,
        (400, 10.2, 1, 11, 1),
    ]
    assert report.counts.other == {
        "gaps in the channel, after which the book is unknown": 1,
        "records of an unknown book, left out": 3,
        "records of a snapshot, part of the event after it": 2,
    }
    later = [*records[-2:], sell(430 * MS, 8, 12), sell(520 * MS, 9, 12)]
    path = written(tmp_path, *records[:5], order(300 * MS, "R"), *later)
    session, _ = rows_of(path)
    assert best(session)[2:] == [None, None, None, (500, 9, 2, 12, 1)]


def test_bytes_may_be_cut_anywhere(tmp_path, monkeypatch):
    gap = buy(2_700 * MS, 90, 10.5, flags=LAST | BAD_BOOK)
    path = written(tmp_path, ORDERS, gap, buy(2_800 * MS, 91, 9), buy(2_900 * MS, 92, 9))
    expected, report = rows_of(path)
    for size in (1, 55, 56, 57, 300):
        monkeypatch.setattr(text, "BLOCK_BYTES", size)
        session, other = rows_of(path)
        assert_same([session], [expected])
        assert other == report


def test_a_top_of_book_is_the_whole_of_its_side(tmp_path):
    path = written(
        tmp_path,
        buy(0, 0, 10, 2, flags=LAST | TOB),
        sell(0, 0, 11, 3, flags=LAST | TOB),
        buy(150 * MS, 0, 9, 4, flags=LAST | TOB),
        order(250 * MS, "A", side="A", flags=LAST | TOB),  # none is left
        buy(350 * MS, 0, 9, 5, flags=LAST | TOB),
    )
    session, report = rows_of(path)
    assert best(session) == [
        (0, 10, 2, 11, 3),
        (100, 10, 2, 11, 3),
        (200, 9, 4, 11, 3),
        None,
    ]
    assert report.counts.rows_one_sided == 1


def test_what_cannot_be_followed_is_counted(tmp_path):
    path = written(
        tmp_path,
        buy(0, 1, 10),
        sell(0, 2, 11),
        order(10 * MS, "X", 3, side="B", price=10.5, size=1),
        order(10 * MS, "A", 4, side="N", price=10.5, size=1),
        order(10 * MS, "A", 5, side="B", price=10.5, size=2**32 - 1),
        order(20 * MS, "C", 6, side="B", size=1),
        order(30 * MS, "M", 7, side="B", price=9, size=1),
        order(40 * MS, "C", 7, side="B", size=9),
        buy(150 * MS, 8, 9),
    )
    session, report = rows_of(path)
    assert best(session)[1] == (100, 10, 1, 11, 1)
    assert (report.counts.deletes_unknown, report.counts.changes_unknown) == (1, 1)
    assert report.counts.other == {"records of unknown action, side or size, left out": 3}


def test_events_must_end(tmp_path, monkeypatch):
    monkeypatch.setattr(databento_mbo, "_MAX_EVENT", 3)
    path = written(tmp_path, *(buy(n * MS, n, 10, flags=0) for n in range(4)))
    with pytest.raises(TapeError) as error:
        list(read_tape(path))
    assert str(error.value) == (
        f"{path}: expected events that end with a record flagged F_LAST, found 3 records without "
        "one. Give a file with the flags that Databento writes."
    )
    path = written(tmp_path, *snapshot(0, [buy(0, n, 10) for n in range(9)]), buy(1, 10, 10))
    with pytest.raises(TapeError, match="none of them valid"):
        list(read_tape(path))


@st.composite
def flows(draw) -> list[np.ndarray]:
    """Adds, partial cancels, changes and clears, in events of one to three records."""
    records, recv, num_left = [], 0, 0
    for number in range(draw(st.integers(1, 30))):
        recv += draw(st.sampled_from([0, 1, 40, 130])) * MS
        action = draw(st.sampled_from("AAAAMCCTR"))
        is_bid = draw(st.booleans())
        price = draw(st.integers(5, 14)) + (0 if is_bid else 5)
        of = number if action == "A" else draw(st.integers(0, number))
        num_left = draw(st.integers(0, 2)) if not num_left else num_left - 1
        records.append(
            order(recv, action, of, side="B" if is_bid else "A", price=price,
                  size=draw(st.integers(1, 4)), flags=0 if num_left else LAST)
        )  # fmt: skip
    return records


def replayed(records: list[np.ndarray]) -> list[tuple[int, list, list]]:
    """Time, bids and asks after each event, worked out the slow way."""
    orders: dict[int, tuple[bool, int, int]] = {}
    states = []
    for record in np.concatenate(records):
        number, size = int(record["order_id"]), int(record["size"])
        if record["action"] in (b"A", b"M"):
            orders[number] = (record["side"] == b"B", int(record["price"]), size)
        elif record["action"] == b"C" and number in orders:
            is_bid, price, left = orders.pop(number)
            if left > size:
                orders[number] = (is_bid, price, left - size)
        elif record["action"] == b"R":
            orders.clear()
        if record["flags"] & LAST or record["action"] == b"R":
            sides: list[dict[int, int]] = [{}, {}]
            for is_bid, price, left in orders.values():
                side = sides[0 if is_bid else 1]
                side[price] = side.get(price, 0) + left
            states.append((int(record["ts_recv"]), sorted(sides[0].items(), reverse=True),
                           sorted(sides[1].items())))  # fmt: skip
    return states


@given(flows(), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_any_flow_gives_the_books_that_were_there(tmp_path_factory, records, block_bytes):
    path = write_csv(tmp_path_factory.mktemp("flow") / "x.csv", np.concatenate(records))
    states = replayed(records)
    tape = read_tape(path, grid=GridOptions(50 * MS, depth=2, max_age_s=None))
    try:
        sessions = list(tape)
    except TapeError as error:
        assert "none of them valid" in str(error)
        sessions = []
    rows = {}
    for session in sessions:
        assert session.origin
        for time, valid, row in zip(session.times, session.valid, session.values, strict=True):
            are_prices = np.array(["size" not in name for name in session.columns])
            shown = row.astype(float) + session.origin * are_prices
            rows[int(time)] = shown if valid else None
    for time, row in rows.items():
        known = [state for state in states if state[0] <= time][-1]
        bids, asks = known[1], known[2]
        is_good = bool(bids and asks) and bids[0][0] < asks[0][0]
        assert (row is not None) == is_good
        if row is not None:
            for column, levels in ((1, bids), (3, asks)):
                padded = [*levels[:2], (levels[-1][0], 0)][:2]
                prices, sizes = row[[column, column + 4]], row[[column + 1, column + 5]]
                assert prices.tolist() == [price / 1e9 for price, _ in padded]
                assert sizes.tolist() == [size for _, size in padded]


def sample() -> Path:
    pytest.importorskip("databento_dbn", reason="the extra `markets` isn't installed")
    if not SAMPLES.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    return SAMPLES / "GLBX.MDP3.ESH4.mbo.20231225.dbn.zst"


@pytest.mark.samples
def test_the_facts_of_esh4():
    tape = read_tape(sample())
    (session,) = tape
    report, counts = tape.report, tape.report.counts
    assert report.instrument == "ESH4"
    assert counts.lines_read == 68_792
    assert counts.other == {
        "records of a snapshot, part of the event after it": 8_725,
        "trades, which don't change the book": 2_973,
        "fills, which don't change the book": 6_371,
    }
    assert report.first_ns == 1_703_541_600_181_198_464, "22:00 and not a day earlier"
    assert session.key.date == "2023-12-25"
    assert (counts.states, counts.states_crossed, counts.states_locked) == (47_022, 891, 0)
    assert counts.deletes_unknown == counts.changes_unknown == counts.creates_repeated == 0
    marked = session.times[~session.valid]
    opens_ns = 1_703_545_200 * 10**9
    assert marked.max() == opens_ns


@pytest.mark.samples
def test_the_crossed_states_of_esh4_end_with_the_opening():
    path = sample()
    reader = DatabentoReader(Source([path], Counts()), DatabentoOptions())
    orders: dict[int, tuple[bool, int, int]] = {}
    best_prices: list[dict[int, int]] = [{}, {}]
    crossed_ns = []

    def take(number: int) -> None:
        is_bid, price, size = orders.pop(number)
        side = best_prices[not is_bid]
        side[price] -= size
        if not side[price]:
            del side[price]

    for block in reader.blocks():
        for time_ns, number, action, is_bid, price, (size, _), _, is_last in zip(
            *(column.tolist() for column in block), strict=True
        ):
            if action == CLEARED:
                orders.clear()
                best_prices = [{}, {}]
                continue
            old = orders.get(number)
            left = (old[0], old[1], old[2] - size) if action > 1 else (is_bid, price, size)
            if old is not None:
                take(number)
            if left[2]:
                orders[number] = left
                side = best_prices[not left[0]]
                side[left[1]] = side.get(left[1], 0) + left[2]
            # Far from the market nothing crosses: only then are the sides looked at.
            if is_last and time_ns < 1_703_545_201 * 10**9:
                bids, asks = best_prices
                if bids and asks and max(bids) >= min(asks):
                    crossed_ns.append(time_ns)
    assert len(crossed_ns) == 891
    assert crossed_ns[0] == 1_703_543_995_222_483_197, "22:39:55"
    assert crossed_ns[-1] == 1_703_545_200_000_068_972, "23:00:00.000069"


@pytest.mark.samples
@pytest.mark.parametrize("rule", ["hours", "calendar"])
def test_the_session_of_esh4_is_of_the_next_trade_date(rule):
    sessions = LocalHours(("17:00-16:00",), "America/Chicago", weekends=False)
    if rule == "calendar":
        pytest.importorskip("pandas_market_calendars", reason="`markets` isn't installed")
        sessions = Calendar("CME_Equity")
    tape = read_tape(sample(), sessions=sessions)
    (session,) = tape
    assert session.key.date == "2023-12-26"
    assert session.times[0] == 1_703_545_200 * 10**9
    counts = tape.report.counts
    assert counts.outside_first_ns == 1_703_541_600_181_198_464
    assert counts.outside_last_ns is not None
    assert counts.outside_last_ns < session.times[0]
    assert (counts.rows_crossed, counts.rows_before_first) == (0, 1)
    assert session.valid[1:7_199].all()
