"""Reading as a whole: formats told apart, a reader of levels, several files, bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance_tape import TapeConformance
from helpers_tape import Given, states_block
from test_tape_orders import snapshot, twin
from test_tape_orders import write as write_orders

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, Policy, detect, read, read_tape
from tapeline.tape.blocks import LevelEvents
from tapeline.tape.readers.base import Reader
from tapeline.tape.readers.text import CsvBlocks, exact_integers
from tapeline.tape.readers.times import Times

COLUMNS = ("at", "side", "level", "amount")
START_MS = 1_777_689_383_201


class LevelsReader(Reader):
    """A made-up format, as small as a reader can be."""

    name = "levels"
    looks_for = f"a CSV header with {', '.join(COLUMNS)}"

    @classmethod
    def recognises(cls, head):
        return head.header == list(COLUMNS)

    def blocks(self):
        for path in self.source.paths:
            times, lines, num = Times(f"{path}, column at"), CsvBlocks(path, COLUMNS), 0
            for num_before, batch in lines:
                times_ns, good = times.parse(batch.column("at"))
                prices, price_good = exact_integers(batch.column("level"), 9)
                sizes, size_good = exact_integers(batch.column("amount"), 9)
                good &= price_good & size_good
                lines.leave_out(batch, num_before, np.flatnonzero(~good))
                rows = np.flatnonzero(good)
                num += len(rows)
                are_bids = [side == b"bid" for side in batch.column("side").take(rows).to_pylist()]
                columns = [False] * len(rows), are_bids, prices[rows].tolist(), sizes[rows].tolist()
                yield LevelEvents(times_ns[rows], *columns)
            self.source.close(path, lines.unreadable, num)


class TestLevels(TapeConformance):
    reader = "levels"

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        monkeypatch.setitem(read.READERS, "levels", LevelsReader)

    def write(self, folder: Path) -> list[Path]:
        rng, lines, at = np.random.default_rng(0), [",".join(COLUMNS)], START_MS
        for _ in range(200):
            at += int(rng.integers(0, 3)) * 20
            side = "bid" if rng.integers(2) else "ask"
            price = (100 if side == "bid" else 101) + int(rng.integers(0, 5)) * (-1) ** (
                side == "bid"
            )
            lines.append(f"{at},{side},{price}.5,{rng.integers(0, 9)}")
        paths = [folder / "one.csv", folder / "two.csv"]
        paths[0].write_text("\n".join(lines[:90]) + "\n")
        paths[1].write_text("\n".join([lines[0], *lines[90:], ""]))
        return paths


class TestOrders(TapeConformance):
    reader = "orders"

    def write(self, folder: Path) -> list[Path]:
        return [write_orders(folder, twin())]


def test_a_file_that_none_recognises_names_them_all(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary\n")
    with pytest.raises(TapeError) as error:
        detect(path)
    message = str(error.value)
    for reader in read.READERS.values():
        assert f"{reader.name} ({reader.looks_for})" in message
    assert message.endswith(
        "found none of them, but a file that begins with `Dear diary`. Pin format (`--reader "
        "NAME`) if it is one of these; of a CSV whose time column has another name, say which "
        "(`--reader table --set options.time=NAME`)."
    )
    path.write_bytes(b"\x00\xff\x00\x01")
    with pytest.raises(TapeError, match="begins with `00 ff 00 01`"):
        detect(path)


def test_a_particular_reader_comes_before_a_general_one(tmp_path):
    path = write_orders(tmp_path, snapshot())
    assert read.READERS["table"].recognises(read.Head.of(path))
    assert detect(path).name == "orders"


def test_two_that_recognise_a_file_are_no_answer(tmp_path, monkeypatch):
    monkeypatch.setitem(read.READERS, "again", read.READERS["orders"])
    with pytest.raises(TapeError, match=r"found one that may be orders or orders. Say which, with"):
        detect(write_orders(tmp_path, snapshot()))


def test_arguments_are_checked(tmp_path):
    path = write_orders(tmp_path, snapshot())
    with pytest.raises(TapeError, match="paths: expected one file or more, found none"):
        read_tape([])
    with pytest.raises(TapeError, match=r"found .order.. Write orders, the nearest"):
        read_tape(path, format="order")
    with pytest.raises(TapeError, match=r"found .x.. Give one of them, or none"):
        read_tape(path, format="x")
    table = tmp_path / "table.csv"
    table.write_text("time,price\n1,1\n")
    with pytest.raises(TapeError, match=f"{table}: expected orders, as {path} is, found table"):
        read_tape([path, table])


def test_the_instrument_is_as_given_or_as_named_or_from_the_file(tmp_path):
    path = write_orders(tmp_path, twin())
    assert [s.key.instrument for s in read_tape(path)] == ["orders"]
    assert [s.key.instrument for s in read_tape(path, instrument="BTC")] == ["BTC"]


def test_files_that_continue_each_other_are_one_tape(tmp_path):
    lines = twin()
    whole = read_tape(write_orders(tmp_path, lines))
    (expected,) = whole
    parts = []
    for number, rows in enumerate((lines[:30], lines[30:])):
        (tmp_path / str(number)).mkdir()
        parts.append(write_orders(tmp_path / str(number), rows))
    tape = read_tape(parts)
    (session,) = tape
    assert session.values.tobytes() == expected.values.tobytes()
    assert tape.report.counts == whole.report.counts
    assert tape.report.source == f"{parts[0]} and {parts[1]}"


def test_sessions_come_one_by_one():
    """The first is there before the reader has been asked for the rest.

    Only the next time is: it tells whether the one after the first is stray.
    """
    day_ns = 86_400 * 10**9
    seen = []

    class Slow(Given):
        def blocks(self):
            for number in range(4):
                seen.append(number)
                yield states_block([(number * day_ns + 5, [(100, 1)], [(101, 1)])])

    reader = Slow([])
    reader.source.paths.append(Path("given"))
    tape = iter(
        read.Tape(reader, None, read.READERS["orders"].sessions(), GridOptions(1), Policy())
    )
    assert next(tape).key.date == "1970-01-01"
    assert seen == [0, 1, 2]


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Orders that come and go leave nothing behind but rows."""

    def peak_bytes(num_pairs: int) -> int:
        path = tmp_path / f"{num_pairs}.csv"
        with path.open("w") as file:
            file.write("id,timestamp,price,volume,action,direction\n")
            for number in range(num_pairs):
                side, price = (
                    ("bid", 100 - number % 50) if number % 2 else ("ask", 101 + number % 50)
                )
                at = START_MS + number // 100
                file.write(f"{number},{at},{price},1,created,{side}\n")
                if number >= 200:
                    file.write(f"{number - 200},{at},{price},0,deleted,{side}\n")
        program = (
            "import resource, sys; from tapeline.tape import read_tape\n"
            "assert sum(len(s) for s in read_tape(sys.argv[1]))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
        )
        command = [sys.executable, "-c", program, str(path)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    small, large = peak_bytes(40_000), peak_bytes(240_000)  # about 2 and 13 MB of text
    assert large - small < 20_000_000
