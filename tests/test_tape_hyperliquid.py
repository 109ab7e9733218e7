"""Hyperliquid recordings: a twin of the real one, and its facts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance_tape import TapeConformance
from helpers_tape import absolute

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, detect, read_tape

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "crypto"
T0_NS = 1_737_918_843_893_903_000
EVERY = GridOptions(step_ns=None, depth=2)


def book(ms: int, bids, asks, coin: str = "BTC") -> tuple[int, dict[str, Any]]:
    levels = [[{"px": px, "sz": sz, "n": 1} for px, sz in side] for side in (bids, asks)]
    stamp = T0_NS // 10**6 + ms - 250
    return ms, {"channel": "l2Book", "data": {"coin": coin, "levels": levels, "time": stamp}}


def trades(ms: int, age_ms: int) -> tuple[int, dict[str, Any]]:
    stamp = T0_NS // 10**6 + ms - age_ms
    data = [{"coin": "BTC", "px": "105056.0", "side": "B", "sz": "0.00219", "time": stamp}]
    return ms, {"channel": "trades", "data": data}


ASKS = [("105056.0", "0.5"), ("105057.0", "3")]
LINES = [
    (0, {"channel": "subscriptionResponse", "data": {"method": "subscribe"}}),
    book(0, [("105055.0", "3.03622"), ("105054.0", "0.1428")], ASKS),
    book(14, [("105055.0", "3.03622"), ("105054.0", "0.1428")], ASKS),
    trades(274, 49_000),
    book(1_100, [("105055.0", "3.27523")], ASKS),
    book(1_600, [], ASKS),
    book(2_100, [("105055.5", "1"), ("105055.0", "3.1")], ASKS),
    trades(2_200, 100),
    book(2_700, [("105055.5", "1"), ("105055.0", "3.2")], ASKS),
    book(3_300, [("105055.5", "2"), ("105055.0", "3.2")], ASKS),
    book(3_900, [("105055.5", "1.00000001"), ("105055.0", "3.2")], ASKS),
    book(4_400, [("105055.5", "4"), ("105055.0", "3.2")], ASKS),
]


def write(path: Path, lines) -> Path:
    text = "".join(f"{T0_NS + ms * 10**6} {json.dumps(message)}\n" for ms, message in lines)
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TapeError) as error:
        list(read_tape(path))
    return str(error.value)


class TestHyperliquid(TapeConformance):
    reader = "hyperliquid"

    def write(self, folder: Path) -> list[Path]:
        return [write(folder / "feed", LINES)]


def test_books_are_known_when_received_and_old_trades_move_no_clock(tmp_path):
    tape = read_tape(write(tmp_path / "feed", LINES), grid=EVERY)
    (session,) = tape
    assert str(session.key) == "BTC/2025-01-26"
    since_ms = [(time - T0_NS) // 10**6 for time in session.times.tolist()]
    assert since_ms == [0, 14, 1_100, 1_600, 2_100, 2_700, 3_300, 3_900, 4_400]
    assert session.valid.tolist() == [True] * 3 + [False] + [True] * 5
    values = absolute(session)
    assert values[0].tolist() == pytest.approx(
        [105055.5, 105055, 3.03622, 105056, 0.5, 105054, 0.1428, 105057, 3]
    )
    assert values[2, 5:7].tolist() == [105055, 0], "one level: its price again"
    counts = tape.report.counts
    assert counts.other == {"other messages, left out": 1, "trades, left out": 2}
    assert (counts.lines_read, counts.times_stepped_back) == (len(LINES), 0)


@pytest.mark.parametrize(
    "message",
    [
        {"data": []},
        {"channel": "l2Book", "data": {"coin": "BTC", "levels": [[]]}},
        {"channel": "l2Book", "data": {"coin": "BTC", "levels": [[{"px": "1"}], []]}},
        book(0, [(str(n + 1), "1") for n in range(21)], [])[1],
        book(0, [("0", "1")], [])[1],
        book(0, [("NaN", "1")], [])[1],
    ],
)
def test_a_message_that_cannot_be_read_is_left_out(tmp_path, message):
    path = write(tmp_path / "feed", [*LINES, (5_000, message)])
    tape = read_tape(path, grid=EVERY, max_unreadable_share=0.1)
    (session,) = tape
    assert len(session) == 9
    assert tape.report.counts.lines_unreadable == 1
    assert f"line {len(LINES) + 1}: expected at most 0.1000 %" in refusal(path)


def test_several_coins_are_refused(tmp_path):
    path = write(tmp_path / "feed", [*LINES, book(5_000, [], [], coin="ETH")])
    assert refusal(path) == (
        f"{path}: expected messages of one coin, found BTC and ETH. Split the files by coin, and "
        "read them one by one."
    )


@pytest.mark.samples
def test_the_facts_of_the_real_recording():
    path = SAMPLES / "hyperliquid_btc_l2book_trades_raw_20250126.gz"
    if not path.exists():
        pytest.skip(f"the real market files aren't at {SAMPLES}")
    assert detect(path).name == "hyperliquid"
    tape = read_tape(path, grid=GridOptions(step_ns=None, depth=20))
    (session,) = tape
    counts = tape.report.counts
    assert counts.other == {"trades, left out": 9}
    assert (counts.lines_read, counts.states, counts.rows_thin) == (55, 46, 0)
    assert session.valid.all()
    lines = [line.split(b" ", 1) for line in gzip.decompress(path.read_bytes()).splitlines()]
    books = [(int(time), json.loads(text)) for time, text in lines if b'"l2Book"' in text]
    assert session.times.tolist() == [time for time, _ in books]
    first_trades = next((int(t), json.loads(text)) for t, text in lines if b'"trades"' in text)
    age_s = first_trades[0] / 1e9 - first_trades[1]["data"][0]["time"] / 1e3
    assert age_s == pytest.approx(49, abs=0.5)
    expected = [
        [[float(level["px"]), float(level["sz"])] for level in side]
        for _, message in books
        for side in message["data"]["levels"]
    ]
    by_level = np.array(expected).reshape(46, 2, 20, 2).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(absolute(session)[:, 1:], by_level.reshape(46, -1), rtol=1e-7)
