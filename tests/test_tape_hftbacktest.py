"""Event arrays of hftbacktest: a twin of the real one, and its facts."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance
from helpers_tape import absolute
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, detect, read_tape
from tapeline.tape.readers import hftbacktest
from tapeline.tape.readers.base import Source
from tapeline.tape.report import Counts

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "crypto"
T0_NS = 1_723_161_601_000_000_000
STEP = GridOptions(100_000_000, depth=2)
EVENT = np.dtype(
    [
        ("ev", "<u8"),
        ("exch_ts", "<i8"),
        ("local_ts", "<i8"),
        ("px", "<f8"),
        ("qty", "<f8"),
        ("order_id", "<u8"),
        ("ival", "<i8"),
        ("fval", "<f8"),
    ]
)
EXCH, LOCAL, BID, ASK = 1 << 31, 1 << 30, 1 << 29, 1 << 28
BOTH = EXCH | LOCAL
UPDATE, TRADE, CLEAR, SNAPSHOT = 1, 2, 3, 4

EVENTS = [
    (0, UPDATE | BID, 2682.0, 5),  # before the snapshot
    (100, CLEAR | BID, 2681.9, 0),
    (100, SNAPSHOT | BID, 26827 * 0.1, 1331),  # 2682.7000000000003
    (100, SNAPSHOT | BID, 2681.9, 10),
    (100, CLEAR | ASK, 2686.04, 0),
    (100, SNAPSHOT | ASK, 2682.8, 7),
    (100, SNAPSHOT | ASK, 2686.04, 26150),
    (300, UPDATE | BID, 2682.7, 0),
    (300, UPDATE | BID, 2682.01, 1991),
    (800, TRADE | ASK, 2682.01, 3),
    (1_300, UPDATE | ASK, 2682.5, 0.25),
    (1_700, UPDATE | ASK, 2682.5, 0),
    (2_200, UPDATE | BID, 2682.02, 4),
    (2_800, UPDATE | BID, 2682.02, 5),
    (3_300, CLEAR | ASK, 2683.0, 0),  # 2682.8 alone
    (3_900, 103, 2682.0, 1),
    (4_000, UPDATE | BID, 2682.02, 6),
]


def array(events, sides: int = BOTH) -> np.ndarray:
    rows = [
        (flags if flags & BOTH else flags | sides, 0, (T0_NS + ms * 10**6) if ms >= 0 else 0, *rest)
        for ms, flags, *rest in events
    ]
    return np.array([(*row, 0, 0, 0.0) for row in rows], EVENT)


def write(path: Path, events, **names) -> Path:
    np.savez_compressed(path, **(names or {"data": array(events)}))
    return path


def read(paths, **arguments):
    tape = read_tape(paths, **{"grid": STEP, **arguments})
    (session,) = tape
    values = absolute(session)[:, 1:5].round(3).tolist()
    times = [(time - T0_NS) // 10**6 for time in session.times.tolist()]
    return dict(zip(times, values, strict=True)), session, tape.report


def refusal(paths, **arguments) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(paths, **arguments))
    return str(error.value)


class TestHftbacktest(TapeConformance):
    reader = "hftbacktest"
    is_text = False

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "x.npz", EVENTS)]


def test_a_snapshot_and_what_follows_it(tmp_path):
    rows, session, report = read(write(tmp_path / "ethusd.npz", EVENTS))
    assert str(session.key) == "ethusd/2024-08-09"
    assert min(rows) == 100, "nothing is known before the snapshot"
    assert rows[100] == [2682.7, 1331, 2682.8, 7]
    assert session.origin == 2682.7, "the float's noise is gone"
    assert rows[300] == [2682.01, 1991, 2682.8, 7]
    assert rows[1300] == [2682.01, 1991, 2682.5, 0.25]
    assert rows[2200] == [2682.02, 4, 2682.8, 7]
    assert rows[3300] == [2682.02, 5, 2686.04, 26150], "cleared up to 2683"
    counts = report.counts
    assert (counts.lines_read, counts.levels_set) == (len(EVENTS), 12)
    assert counts.other == {
        "updates before a snapshot, left out": 1,
        "trades, left out": 1,
        "other events, left out": 1,
    }


def test_a_clear_takes_off_a_side_or_both(tmp_path):
    """Without a price the whole side; without a side both, whatever the price."""
    start = [event for event in EVENTS if event[0] <= 100]
    for clear, rows_after in [
        ((200, CLEAR | BID, np.nan, 0), [2600, 1, 2682.8, 7]),
        ((200, CLEAR, 1.0, 0), [2600, 1, 2700, 1]),
        ((200, CLEAR | BID, 2682.0, 0), [2681.9, 10, 2682.8, 7]),
    ]:
        after = [(200, SNAPSHOT | BID, 2600, 1), (200, SNAPSHOT | ASK, 2700, 1)]
        path = write(tmp_path / "x.npz", [*start, clear, *after, (400, UPDATE | BID, 2600, 1)])
        rows, *_ = read(path)
        assert rows[200] == rows_after


def test_an_event_that_was_overtaken_is_taken_once_when_received(tmp_path):
    """It stands twice: in the exchange's order, and in the order of receipt."""
    late = [
        (2_000, UPDATE | BID | EXCH, 2682.3, 9),
        (1_700, UPDATE | BID | BOTH, 2682.2, 8),
        (2_000, UPDATE | BID | LOCAL, 2682.3, 9),
    ]
    rows, _, report = read(write(tmp_path / "x.npz", [*EVENTS[:9], *late]))
    assert rows[1700][:2] == [2682.2, 8]
    assert rows[2000][:2] == [2682.3, 9]
    assert report.counts.times_stepped_back == 0
    assert report.counts.other["events of the exchange's side alone, left out"] == 1


def test_a_snapshot_in_a_file_of_its_own_goes_first(tmp_path):
    """Its events have no time: they are known from the first event that has one."""
    snapshot = [(-1, flags, *rest) for _, flags, *rest in EVENTS if flags & 0xFF == SNAPSHOT]
    later = [event for event in EVENTS if event[0] > 100]
    first, second = write(tmp_path / "1.npz", snapshot), write(tmp_path / "2.npz", later)
    rows, *_ = read([first, second])
    expected, *_ = read(write(tmp_path / "whole.npz", EVENTS))
    assert rows == {ms: row for ms, row in expected.items() if ms >= 300}
    assert refusal(first) == (
        f"{first}: expected updates after the snapshot, found a snapshot alone, which has no time. "
        "Give the file that continues it too, and both as one tape (`--continues`)."
    )
    assert refusal(second) == (
        f"{second}: expected a snapshot of the book before its updates, found 10 events, none of a "
        "snapshot. Give the snapshot's file first, and both as one tape (`--continues`), or set "
        "from_empty if a book without the levels that don't change is all right."
    )
    other = write(tmp_path / "3.npz", [(-1, SNAPSHOT | BID, 1.5, 1), (-1, SNAPSHOT | ASK, 1.6, 1)])
    third = write(tmp_path / "4.npz", [(5_000, UPDATE | BID, 1.4, 1)])
    again, *_ = read([first, second, other, third])
    assert again[5000] == [1.5, 1, 1.6, 1], "it is the whole book"


def test_a_book_may_grow_from_nothing_if_asked_to(tmp_path):
    path = write(tmp_path / "x.npz", [EVENTS[0], (200, UPDATE | ASK, 2683.0, 1), *EVENTS[-1:]])
    rows, session, _ = read(path, options={"from_empty": True})
    assert min(rows) == 0
    assert not session.valid[0]
    assert rows[4000] == [2682.02, 6, 2683, 1]


@pytest.mark.parametrize(
    "bad",
    [
        (3_400, UPDATE | BID, np.nan, 1),
        (3_400, UPDATE | BID, 0.0, 1),
        (3_400, UPDATE | BID, 1.797e308, 1),
        (3_400, UPDATE | BID, 2682.0, -1),
        (3_400, UPDATE | BID, 2682.0, np.inf),
        (3_400, UPDATE, 2682.0, 1),
        (3_400, UPDATE | BID | ASK, 2682.0, 1),
        (-1, UPDATE | BID, 2682.0, 1),
        (3 * 10**12, UPDATE | BID, 2682.0, 1),
    ],
)
def test_an_event_that_cannot_be_read_is_left_out(tmp_path, bad):
    path = write(tmp_path / "x.npz", [*EVENTS[:9], bad, *EVENTS[9:]])
    rows, _, report = read(path, max_unreadable_share=0.1)
    assert rows == read(write(tmp_path / "good.npz", EVENTS))[0]
    assert report.counts.lines_unreadable == 1
    assert report.first_unreadable.startswith("line 10: (")
    assert f"{path}, line 10: expected at most 0.1000 % of the lines" in refusal(path)


def test_orders_are_refused(tmp_path):
    path = write(tmp_path / "x.npz", [*EVENTS, (4_100, 10 | BID, 2682.0, 1)])
    assert refusal(path) == (
        f"{path}: expected events of price levels, found one of kind 10, of a single order. "
        "Convert the market's data to levels, or read them in their own format."
    )


def test_other_arrays_are_refused_and_nothing_is_unpickled(tmp_path):
    path = write(tmp_path / "x.npz", None, data=np.zeros((3, 6)))
    assert refusal(path) == (
        f"{path}: expected an array of events with the fields ev, exch_ts, local_ts, px and qty, "
        "found float64 of shape [3, 6]. Convert the data with hftbacktest 2."
    )

    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    with pytest.raises(pytest.fail.Exception):
        pickle.loads(pickle.dumps(Trap()))
    write(path, None, data=np.array([Trap()], object))
    assert "found object of shape [1]" in refusal(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = write(tmp_path / "x.npz", EVENTS)
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[:90] + b"\0" * 20 + whole[110:]):
        path.write_bytes(damaged)
        assert f"{path}: expected npz that can be read to its end" in refusal(path)
    np.savez(path, data=array(EVENTS)[:2])
    short = path.read_bytes().replace(b"'shape': (2,)", b"'shape': (3,)")
    path.write_bytes(short)
    assert f"{path}: expected npz that can be read to its end" in refusal(path)


@given(st.integers(1, 9_200_000), st.integers(0, 9), st.integers(1, 9))
def test_prices_are_the_decimal_numbers_they_stand_for(ticks, decimals, tick):
    """Also where they are a number of ticks times a tick, with the noise of that."""
    units = ticks * tick * 10 ** (9 - decimals)
    written = float(f"{units // 10**9}.{units % 10**9:09d}")
    times_tick = ticks * float(f"{tick}e-{decimals}")
    found, fits = hftbacktest._billionths(np.array([written, times_tick]))
    assert fits.all()
    assert found.tolist() == [units, units]


@pytest.mark.samples
def test_the_facts_of_the_real_array():
    path = SAMPLES / "converted_hftbacktest_binance_cm_ethusd_perp_20240809.npz"
    if not path.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    assert detect(path).name == "hftbacktest"
    events = np.load(path, allow_pickle=False)["data"]
    assert len(events.dtype) == 8
    assert np.count_nonzero(events["qty"] == 0) == 16_244
    local, exchange = (events[events["ev"] >> bit & 1 == 1] for bit in (30, 31))
    assert all(a <= b for a, b in pairwise(local["local_ts"]))
    assert all(a <= b for a, b in pairwise(exchange["exch_ts"]))
    assert (np.diff(local["exch_ts"]) < 0).any(), "so bit 30 is the local side's"

    source = Source([path], Counts())
    options = hftbacktest.HftbacktestOptions(from_empty=True)
    blocks = list(hftbacktest.HftbacktestReader(source, options).blocks())
    assert source.counts.lines_read == 44_175
    assert source.counts.other == {
        "events of the exchange's side alone, left out": 18,
        "trades, left out": 348,
    }
    sizes = [size for block in blocks for size in block.sizes]
    assert len(sizes) == 44_175 - 18 - 348
    assert sizes.count(0) == 16_244 - 8, "eight deletes stand twice"
    cents = [price % 10_000_000 for block in blocks for price in block.prices]
    assert not any(cents), "every price is on the tick of a cent"

    assert "found 44,175 events, none of a snapshot" in refusal(path)
    rows, session, report = read(path, options={"from_empty": True}, grid=GridOptions())
    assert len(rows) == 127
    assert report.counts.states_crossed == report.counts.times_stepped_back == 0
    mids = absolute(session)[session.valid, 0]
    assert 2_676 < mids.min() < mids.max() < 2_685
