"""LOBSTER pairs: a twin of the real sample, and the sample's facts."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance

from tapeline.errors import TapeError
from tapeline.tape import Calendar, GridOptions, detect, read_tape

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "lobster"
OPENS_NS = 1_340_285_400 * 10**9  # 2012-06-21 09:30 in New York
NAME = "XYZ_2012-06-21_34200000_57600000_{}_2.csv"
EVERY = GridOptions(step_ns=None, depth=2)

MESSAGES = [
    "34200.004241176,1,16113575,18,5853300,1",
    "34200.00426064,1,16113584,18,5853200,1",
    "34200.00426064,5,0,18,5853200,1",
    "34201.9,3,16113584,18,5853200,1",
    "34202.1,2,16113584,18,5853200,-1",
    "34202.600000001,2,16113584,18,5853200,-1",
    "34203.25,2,16113584,18,5853200,-1",
    "34204.25,2,16113584,18,5853200,-1",
    "34206.25,2,16113584,18,5853200,-1",
]
BOOKS = [
    "5859400,200,5853300,18,5859800,200,5853000,150",
    "5859400,200,5853300,18,5859800,200,5853200,18",
    "5859400,200,5853300,18,5859800,200,5853200,18",
    "5859400,200,5853300,18,9999999999,0,-9999999999,0",
    "9999999999,0,5853300,18,9999999999,0,5853200,7",
    "5859400,200,5853400,18,5859800,200,5853200,18",
    "5859400,100,5853300,18,5859800,200,5853200,18",
    "5859300,200,5853300,18,5859800,200,5853200,18",
    "5859300,200,5853300,18,5859800,200,5853200,20",
]


def write_pair(folder: Path, messages=MESSAGES, books=BOOKS, name=NAME) -> list[Path]:
    paths = [folder / name.format(kind) for kind in ("message", "orderbook")]
    for path, lines in zip(paths, (messages, books), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return paths


class TestLobster(TapeConformance):
    reader = "lobster"

    def write(self, folder: Path) -> list[Path]:
        return write_pair(folder)


def refusal(path: Path, **arguments) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(path, format="lobster", **arguments))
    return str(error.value).replace(str(path.parent), "DIR")


def test_every_line_is_a_row_at_its_nanosecond(tmp_path):
    tape = read_tape(write_pair(tmp_path), grid=EVERY)
    (session,) = tape
    assert str(session.key) == "XYZ/2012-06-21"
    assert (session.times - OPENS_NS).tolist() == [
        4_241_176,
        4_260_640,
        4_260_640,
        1_900_000_000,
        2_100_000_000,
        2_600_000_001,
        3_250_000_000,
        4_250_000_000,
        6_250_000_000,
    ]
    assert session.origin == 585.33
    assert session.values[0].tolist() == pytest.approx(
        [0.305, 0, 18, 0.61, 200, -0.03, 150, 0.65, 200]
    )
    assert session.valid.tolist() == [True] * 4 + [False] + [True] * 4
    assert session.values[3].tolist() == pytest.approx([0.305, 0, 18, 0.61, 200, 0, 0, 0.61, 0])
    assert np.isnan(session.values[4]).all()
    counts = tape.report.counts
    assert (counts.lines_read, counts.states, counts.states_one_sided) == (9, 9, 1)
    assert (counts.rows_one_sided, counts.rows_thin) == (1, 1)
    assert tape.report.detected == {"date": "2012-06-21"}


def test_either_file_of_a_pair_will_do(tmp_path):
    message, book = write_pair(tmp_path)
    reports = []
    for paths in (message, book, [message, book]):
        tape = read_tape(paths, grid=EVERY)
        assert len(list(tape)) == 1
        reports.append(tape.report.counts)
    assert reports[0] == reports[1] == reports[2]


def test_two_days_continue_each_other(tmp_path):
    pairs = [write_pair(tmp_path, name=NAME.replace("06-21", day)) for day in ("06-21", "06-22")]
    tape = read_tape([message for message, _ in pairs])
    assert [session.key.date for session in tape] == ["2012-06-21", "2012-06-22"]


def test_a_date_may_be_given_and_must_be_known(tmp_path):
    message, _ = write_pair(tmp_path, name="day_{}_2.csv")
    tape = read_tape(message, options={"date": "2013-03-11"}, grid=EVERY)  # daylight saving began
    (session,) = tape
    assert str(session.key) == "day_message_2/2013-03-11"
    assert session.times[0] == 1_363_008_600 * 10**9 + 4_241_176
    assert refusal(message) == (
        "DIR/day_message_2.csv: expected the trade date, in the file's name or as the option date, "
        "found no date in the name. Give date as YYYY-MM-DD."
    )


def test_a_file_without_its_partner_is_refused(tmp_path):
    message, book = write_pair(tmp_path)
    book.unlink()
    assert refusal(message) == (
        f"DIR/{message.name}: expected a pair of files with `_message_` and `_orderbook_` in their "
        f"names, found no {book.name} beside it. Put both files into one folder, under the names "
        "LOBSTER gives them."
    )
    alone = message.rename(tmp_path / "alone.csv")
    assert "found neither in its name" in refusal(alone)


@pytest.mark.parametrize(("messages", "books"), [(MESSAGES[:-2], BOOKS), (MESSAGES, BOOKS[:-2])])
def test_files_out_of_step_are_refused(tmp_path, messages, books):
    message, book = write_pair(tmp_path, messages, books)
    assert refusal(message) == (
        f"DIR/{book.name}: expected as many lines as {message.name} has, found 2 or more lines "
        "without a partner. Fetch both files again: one may be cut short."
    )


@pytest.mark.parametrize("bad", ["34203,x", "soon,2,1,18,5853200,-1", "9e4,2,1,18,5853200,-1"])
def test_a_line_that_cannot_be_read_is_refused(tmp_path, bad):
    message, _ = write_pair(tmp_path, [*MESSAGES[:5], bad, *MESSAGES[6:]])
    assert re.match(r"DIR/\S+, line 6: expected at most 0.0000 % of the lines", refusal(message))


@pytest.mark.samples
def test_the_facts_of_the_real_pair():
    if not SAMPLES.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    message, book = sorted(SAMPLES.glob("AAPL_*.csv"))
    assert detect(message).name == detect(book).name == "lobster"
    tape = read_tape(message, grid=GridOptions(step_ns=None))
    (session,) = tape
    assert len(session) == 999
    assert session.valid.all()
    since_ns = session.times - OPENS_NS
    seconds = [line.split(",")[0].split(".") for line in message.read_text().splitlines()]
    exact = [int(s) * 10**9 + int(f.ljust(9, "0")) - 34_200 * 10**9 for s, f in seconds]
    assert since_ns.tolist() == exact
    assert since_ns[0] == 4_241_176
    assert np.count_nonzero(np.diff(session.times) == 0) == 109
    lines = book.read_text().splitlines()
    repeats = [a == b for a, b in pairwise(lines)]
    assert sum(repeats) == 61, "one for each hidden execution"
    assert (session.values[1:] == session.values[:-1]).all(axis=1).tolist() == repeats
    first = [int(text) for text in lines[0].split(",")]
    shown = session.values[0].astype(float) + [
        session.origin if "price" in name or name == "mid" else 0 for name in session.columns
    ]
    expected = np.array(first).reshape(10, 2, 2)[:, ::-1].reshape(-1) / ([10_000, 1] * 20)
    assert shown[1:].tolist() == pytest.approx(expected.tolist())


@pytest.mark.samples
def test_the_real_pair_on_the_grid_of_its_day():
    pytest.importorskip("pandas_market_calendars", reason="the extra `markets` isn't installed")
    if not SAMPLES.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    tape = read_tape(next(SAMPLES.glob("AAPL_*message*")), sessions=Calendar("XNYS"))
    (session,) = tape
    assert len(session) == 46_800
    assert not session.valid[0], "the first message comes 4 ms after the open"
    assert (tape.report.counts.rows_before_first, tape.report.counts.rows_stale) == (1, 0)
    assert tape.report.counts.rows_after_last == 46_800 - 99
