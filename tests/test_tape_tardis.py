"""Tardis's books and updates: twins of the real samples, and the samples' facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance
from helpers_tape import absolute

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, detect, read_tape

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "tardis"
T0_US = 1_598_918_403_000_000  # 2020-09-01 00:00:03 UTC
EVERY = GridOptions(step_ns=None, depth=2)
STEP = GridOptions(100_000_000, depth=2)
BOOK = (
    "exchange,symbol,timestamp,local_timestamp,asks[0].price,asks[0].amount,bids[0].price,"
    "bids[0].amount,asks[1].price,asks[1].amount,bids[1].price,bids[1].amount"
)
UPDATES = "exchange,symbol,timestamp,local_timestamp,is_snapshot,side,price,amount"
STATES = [
    (0, "11657.08,1.714,11657.07,10.896,11657.54,5.4,11656.97,0.2"),
    (480_000, "11657.08,1.476,11657.07,1e-7,11657.54,5.4,11656.97,0.2"),
    (480_000, "11657.08,1.5,11657.07,10.896,,,11656.97,0.2"),
    (900_000, "11657.08,1.5,,,11657.54,5.4,,"),
    (1_300_000, "11657.09,1.5,11657.08,3,11657.54,0,11656.97,0.2"),
    (1_900_000, "11657.1,1.5,11657.08,3,11657.54,2,11656.97,0.2"),
    (2_700_000, "11657.1,1.5,11657.08,4,11657.54,2,11656.97,0.2"),
    (3_200_000, "11657.1,2.5,11657.08,4,11657.54,2,11656.97,0.2"),
    (3_900_000, "11657.1,2.5,11657.09,4,11657.54,2,11656.97,0.2"),
]
CHANGES = [
    (0, "false,bid,11650,1"),  # before the first snapshot
    (100_000, "true,bid,11657.07,10.896"),
    (100_000, "true,ask,11657.08,1.714"),
    (100_000, "true,ask,11657.54,5.4"),
    (600_000, "false,bid,11657.07,0"),
    (600_000, "false,bid,11656.97,0.2"),
    (1_200_000, "false,ask,11657.08,2.000"),
    (1_700_000, "false,bid,11657.01,0.25"),
    (2_300_000, "true,bid,11660,1"),  # the connection was new
    (2_300_000, "true,ask,11661.5,2"),
    (2_900_000, "false,ask,11661,0.0000001"),
    (3_400_000, "false,bid,11660,3"),
    (4_100_000, "false,bid,11660.5,3"),
]


def write(path: Path, header: str, lines, lag_us: int = 7, symbol: str = "BTCUSDT") -> Path:
    rows = [
        f"binance-futures,{symbol},{T0_US + time_us},{T0_US + time_us + lag_us},{rest}"
        for time_us, rest in lines
    ]
    path.write_text("\n".join([header, *rows, ""]))
    return path


def reordered(path: Path) -> Path:
    """The same file with its columns the other way round."""
    lines = [line.split(",")[::-1] for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join(line) for line in [*lines, []]))
    return path


def refusal(paths, **arguments) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(paths, format="tardis", **arguments))
    return str(error.value)


class TestSnapshots(TapeConformance):
    reader = "tardis"

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "book_snapshot_2.csv", BOOK, STATES)]


class TestUpdates(TapeConformance):
    reader = "tardis"

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "incremental_book_L2.csv", UPDATES, CHANGES)]


@pytest.mark.parametrize("change", [lambda path: path, reordered])
def test_each_row_is_a_state_whatever_the_order_of_columns(tmp_path, change):
    tape = read_tape(change(write(tmp_path / "x.csv", BOOK, STATES)), grid=EVERY)
    (session,) = tape
    assert str(session.key) == "BTCUSDT/2020-09-01"
    since_us = [(time - T0_US * 1000) / 1000 for time in session.times.tolist()]
    assert since_us == [time_us + 7 for time_us, _ in STATES]
    assert session.valid.tolist() == [True] * 3 + [False] + [True] * 5
    assert session.origin == 11657.07
    values = absolute(session)
    assert values[0].tolist() == pytest.approx(
        [11657.075, 11657.07, 10.896, 11657.08, 1.714, 11656.97, 0.2, 11657.54, 5.4]
    )
    assert values[1, 2] == pytest.approx(1e-7)
    assert values[2, -2:].tolist() == pytest.approx([11657.08, 0]), "blank: the last price again"
    assert values[4, -2:].tolist() == pytest.approx([11657.09, 0]), "no amount: no level"
    counts = tape.report.counts
    assert (counts.lines_read, counts.states_one_sided, counts.rows_thin) == (9, 1, 2)
    assert tape.report.detected == {"clock": "local_timestamp", "time_unit": "us"}


def test_the_exchange_s_clock_is_an_option(tmp_path):
    path = write(tmp_path / "x.csv", BOOK, STATES)
    tape = read_tape(path, grid=EVERY, options={"clock": "timestamp"})
    (session,) = tape
    assert session.times[0] == T0_US * 1000
    assert refusal(path, options={"clock": "now"}) == (
        "clock: expected local_timestamp or timestamp, found 'now'. Give one of them."
    )


def test_updates_follow_a_snapshot(tmp_path):
    tape = read_tape(write(tmp_path / "x.csv", UPDATES, CHANGES, lag_us=0), grid=STEP)
    (session,) = tape
    shown = absolute(session)[:, [1, 2, 3, 4]].astype(float).round(4)
    by_ms = {
        (time - T0_US * 1000) // 10**6: row.tolist()
        for time, row in zip(session.times.tolist(), shown, strict=True)
    }
    assert by_ms[100] == [11657.07, 10.896, 11657.08, 1.714]
    assert by_ms[500] == by_ms[100]
    assert by_ms[600] == [11656.97, 0.2, 11657.08, 1.714], "both sides of one message at once"
    assert by_ms[1200] == [11656.97, 0.2, 11657.08, 2]
    assert by_ms[2300] == [11660, 1, 11661.5, 2], "the new snapshot alone"
    assert by_ms[2900] == [11660, 1, 11661, 0]
    assert min(by_ms) == 100, "nothing is known before the first snapshot"
    counts = tape.report.counts
    assert (counts.lines_read, counts.cleared, counts.levels_set) == (13, 2, 12)
    assert counts.states_crossed == counts.times_stepped_back == 0
    assert counts.other == {"updates before a snapshot, left out": 1}


def test_updates_without_a_snapshot_are_refused_and_continue_one(tmp_path):
    first = write(tmp_path / "1.csv", UPDATES, CHANGES[1:4])
    second = write(tmp_path / "2.csv", UPDATES, CHANGES[4:8])
    assert refusal(second) == (
        f"{second}: expected a snapshot of the book before its updates, found 4 rows, none with "
        "is_snapshot true. Give the file before it first, and both as one tape (`--continues`)."
    )
    tape = read_tape([first, second], grid=STEP)
    assert len(list(tape)) == 1
    assert tape.report.counts.levels_set == 7
    assert tape.report.counts.cleared == 1


@pytest.mark.parametrize(
    "bad",
    [
        "false,mid,11657,1",
        "maybe,bid,11657,1",
        "false,bid,,1",
        "false,bid,0,1",
        "false,bid,11657.0000000001,1",
        "false,bid,11657,",
        "false,bid,11657,-1",
        "false,bid,11657,nan",
    ],
)
def test_a_row_that_cannot_be_read_is_left_out(tmp_path, bad):
    path = write(tmp_path / "x.csv", UPDATES, [*CHANGES, (4_100_000, bad)])
    tape = read_tape(path, grid=STEP, max_unreadable_share=0.1)
    list(tape)
    assert tape.report.counts.lines_unreadable == 1
    assert tape.report.first_unreadable.startswith("line 15: ")
    assert "line 15: expected at most 0.1000 % of the lines to be unreadable" in refusal(path)


def test_several_symbols_or_layouts_are_refused(tmp_path):
    one = write(tmp_path / "1.csv", UPDATES, CHANGES)
    two = write(tmp_path / "2.csv", UPDATES, CHANGES, symbol="ETHUSDT")
    assert refusal([one, two]) == (
        f"{one}: expected rows of one symbol, found BTCUSDT and ETHUSDT. Split the files by "
        "symbol, and read them one by one."
    )
    book = write(tmp_path / "3.csv", BOOK, STATES)
    assert refusal([book, one]) == (
        f"{one}: expected books of 2 levels, as 3.csv has, found updates. Read files of different "
        "layouts one by one."
    )


@pytest.mark.samples
@pytest.mark.parametrize("num_levels", [5, 25])
def test_the_facts_of_the_real_books(num_levels):
    path = SAMPLES / f"binance-futures_book_snapshot_{num_levels}_BTCUSDT.csv"
    if not path.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    assert detect(path).name == "tardis"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert lines[0][4] == "asks[0].price"
    tape = read_tape(path, grid=GridOptions(step_ns=None, depth=num_levels))
    (session,) = tape
    assert len(session) == tape.report.counts.lines_read == 10
    assert tape.report.detected["time_unit"] == "us"
    assert session.times.tolist() == [int(line[3]) * 1000 for line in lines[1:]]
    assert session.valid.all()
    expected = np.array([line[4:] for line in lines[1:]], float).reshape(10, -1, 2, 2)[:, :, ::-1]
    np.testing.assert_allclose(absolute(session)[:, 1:], expected.reshape(10, -1), rtol=1e-7)
