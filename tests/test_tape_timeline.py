"""The order of times: stray ones left out, earlier ones lifted, files without one refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.tape import GridOptions, TapeReport, read_tape
from tapeline.tape.blocks import TableRows
from tapeline.tape.readers.base import Source
from tapeline.tape.report import Counts
from tapeline.tape.timeline import Timeline

SECOND_NS = 10**9
START_MS = 1_777_689_383_000
HEADER = "id,timestamp,price,volume,action,direction"
FIX = (
    "Look there for a wrong time, an unsorted or reversed file, or one that holds the same events "
    "twice, and repair it; or raise max_lifted_share (`--set max_lifted_share=…`) if such events "
    "may be taken as of the latest time."
)


def orders(num: int = 300, step_ms: int = 400) -> list[str]:
    """Two orders that stay, and others that come and go between them, a few minutes of it."""
    lines = [f"b,{START_MS},100,1,created,bid", f"a,{START_MS},110,1,created,ask"]
    for number in range(num):
        side, price = ("bid", 101 + number % 3) if number % 2 else ("ask", 109 - number % 3)
        at = START_MS + number * step_ms
        lines.append(f"{number},{at},{price},1,created,{side}")
        lines.append(f"{number},{at + step_ms // 2},{price},0,deleted,{side}")
    return lines


def read(tmp_path: Path, lines: list[str], **given) -> tuple[list[Session], TapeReport]:
    path = tmp_path / "orders.csv"
    path.write_text("\n".join([HEADER, *lines, ""]))
    tape = read_tape(path, grid=GridOptions(depth=2), **given)
    return list(tape), tape.report


@pytest.mark.parametrize("ahead_ms", [3_600_000, 2_222_310_617_000])
def test_a_single_time_far_ahead_is_left_out_and_counted(tmp_path, ahead_ms):
    lines = orders()
    expected, whole = read(tmp_path, lines)
    at = int(lines[300].split(",")[1]) + ahead_ms
    lines.insert(301, f"7,{at},105,1,created,bid")
    (session,), report = read(tmp_path, lines)
    assert session.values.tobytes() == expected[0].values.tobytes()
    assert session.times.tobytes() == expected[0].times.tobytes()
    assert (report.counts.events_stray, report.counts.times_lifted) == (1, 0)
    assert report.counts.lines_read == whole.counts.lines_read + 1
    assert "1 event of a time far ahead of both neighbours, left out" in str(report)


def test_a_stray_time_in_a_short_file_is_named(tmp_path):
    lines = orders(5)
    lines.insert(6, "7,4000000000000,105,1,created,bid")
    with pytest.raises(TapeError) as error:
        read(tmp_path, lines)
    assert str(error.value) == (
        f"{tmp_path / 'orders.csv'}: expected at most 1.0000 % of the events to be out of the "
        "order of time, found 0 of 13 seconds behind one before them; 1 far ahead of both their "
        f"neighbours, the first event 7 at 2096-10-02T07:06:40.000000000Z. {FIX}"
    )
    assert read(tmp_path, lines, max_lifted_share=0.1)[1].counts.events_stray == 1


def test_two_times_ahead_lift_the_rest_which_is_refused_with_the_place(tmp_path):
    lines = orders()
    for number, at in enumerate((4_000_000_000_000, 4_000_000_000_001)):
        lines.insert(301 + number, f"x{number},{at},105,1,created,bid")
    with pytest.raises(TapeError) as error:
        read(tmp_path, lines)
    assert str(error.value) == (
        f"{tmp_path / 'orders.csv'}: expected at most 1.0000 % of the events to be out of the "
        "order of time, found 301 of 604 seconds behind one before them; the farthest: event 303 "
        "is at 2096-10-02T07:06:40.001000000Z, and event 304, after it, at "
        f"2026-05-02T02:37:22.800000000Z. {FIX}"
    )


@pytest.mark.parametrize(
    ("mistake", "events"),
    [(lambda lines: lines * 2, (602, 603)), (lambda lines: lines[::-1], (1, 600))],
    ids=["doubled", "reversed"],
)
def test_a_file_without_the_order_of_time_is_refused(tmp_path, mistake, events):
    with pytest.raises(TapeError) as error:
        read(tmp_path, mistake(orders()))
    message = str(error.value)
    assert f"event {events[0]} is at 2026-05-02T02:38:22.800000000Z, and event {events[1]}, " in (
        message
    )
    assert "after it, at 2026-05-02T02:36:23.000000000Z. Look there" in message


def test_a_book_that_nothing_follows_is_marked_as_too_old(tmp_path):
    """Two times an hour ahead, at the end of the tape: nothing is lifted, and no row is shown."""
    lines = orders()
    for number in range(2):
        at = START_MS + 3_600_000 + number
        lines.append(f"x{number},{at},105,1,created,bid")
    (session,), report = read(tmp_path, lines)
    age_ns = session.age_ns
    frozen = age_ns > 60 * SECOND_NS
    assert len(session) == 7_201
    assert not session.valid[frozen].any()
    assert report.counts.rows_stale == np.count_nonzero(frozen) == 6_840


def settled(times_s: list[int], cuts: list[int], share: float = 1) -> tuple[list[int], Counts]:
    counts = Counts()
    values = np.arange(len(times_s), dtype=np.float64)[:, None]
    times_ns = np.array(times_s, np.int64) * SECOND_NS
    bounds = [0, *sorted(cut % (len(times_s) + 1) for cut in cuts), len(times_s)]
    blocks = [
        TableRows(times_ns[a:b], values[a:b], ("number",), (False,)) for a, b in pairwise(bounds)
    ]
    timeline = Timeline(Source([Path("given")], counts, max_lifted_share=share))
    return [
        (int(time_ns) // SECOND_NS, int(number))
        for block in timeline.settle(blocks)
        for time_ns, (number,) in zip(block.times_ns, block.values, strict=True)
    ], counts


def expected(times_s: list[int]) -> list[tuple[int, int]]:
    """The rule, run by run."""
    runs: list[tuple[int, list[int]]] = []
    for number, time_s in enumerate(times_s):
        if not runs or runs[-1][0] != time_s:
            runs.append((time_s, []))
        runs[-1][1].append(number)
    found, reached = [], 0
    for place, (time_s, numbers) in enumerate(runs):
        is_inside = 0 < place < len(runs) - 1
        if is_inside and min(time_s - runs[place - 1][0], time_s - runs[place + 1][0]) > 60:
            continue
        reached = max(reached, time_s)
        found += [(reached, number) for number in numbers]
    return found


TIMES = st.lists(st.sampled_from([1, 2, 3, 61, 62, 63, 200, 5_000, 5_001]), max_size=12)


@given(TIMES, st.lists(st.integers(0, 12), max_size=6))
def test_blocks_cut_anywhere_give_what_the_rule_says(times_s, cuts):
    found, counts = settled(times_s, cuts)
    assert found == expected(times_s)
    assert counts.events_stray == len(times_s) - len(found)
    raw = dict(enumerate(times_s))
    assert counts.times_lifted == sum(time_s > raw[number] for time_s, number in found)


@pytest.mark.parametrize("num", [10_000, 10_001])
@pytest.mark.parametrize("cuts", [[], [2], [5_000], [5_000, 10_002], list(range(0, 10_000, 7))])
def test_so_many_events_of_one_time_are_not_stray(num, cuts):
    times_s = [1, 2, *[1_000] * num, 3]
    found, counts = settled(times_s, cuts)
    assert counts.events_stray == (num if num == 10_000 else 0)
    assert found[-1] == (3 if num == 10_000 else 1_000, num + 2)


def test_the_usual_lateness_is_no_fault_and_more_is_counted_against_the_share():
    times_s = [100, *[95] * 9, *range(101, 200)]
    _, counts = settled(times_s, [], share=0)
    assert counts.times_lifted == 9
    times_s[1] = 94
    assert settled(times_s, [], share=0.01)[1].times_lifted == 9
    with pytest.raises(TapeError, match=r"1 of 109 seconds behind .*event 1 is .* event 2, after"):
        settled(times_s, [], share=0.009)
