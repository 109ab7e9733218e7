"""Text that isn't quite as asked for: read where it is clear, refused in one sentence elsewhere."""

from __future__ import annotations

import bz2
import lzma
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tapeline.errors import TapeError
from tapeline.tape import GridOptions, read_tape

COLUMNS = ["id", "timestamp", "price", "volume", "action", "direction"]
START_MS = 1_777_689_383_000

Rows = list[list[str]]


def rows(num: int = 20) -> Rows:
    found = [COLUMNS]
    for number in range(num):
        side, price = ("bid", 99 - number % 3) if number % 2 else ("ask", 101 + number % 3)
        at = str(START_MS + 250 * number)
        found.append([str(number), at, str(price), "1", "created", side])
    return found


def text(lines: Rows, comma: str = ",", end: str = "\n") -> bytes:
    return "".join(comma.join(line) + end for line in lines).encode()


def read(tmp_path: Path, content: bytes, **given):
    path = tmp_path / "orders.csv"
    path.write_bytes(content)
    tape = read_tape(path, grid=GridOptions(depth=2), **given)
    sessions = list(tape)
    return sessions, tape.report


def refusal(tmp_path: Path, content: bytes, **given) -> str:
    with pytest.raises(TapeError) as error:
        read(tmp_path, content, **given)
    return str(error.value).replace(str(tmp_path / "orders.csv"), "FILE")


def each(column: str, change: Callable[[str], str]) -> Rows:
    header, *lines = rows()
    at = header.index(column)
    return [header, *([*line[:at], change(line[at]), *line[at + 1 :]] for line in lines)]


def iso(time: str) -> str:
    return datetime.fromtimestamp(int(time) / 1000, UTC).isoformat()


def seconds(time: str) -> str:
    whole, fraction = divmod(int(time), 1000)
    return f"{whole}.{fraction:03}".rstrip("0").rstrip(".")


CLEAR = {
    "blanks after commas": text(rows(), ", "),
    "tabs before them": text(rows(), "\t ,"),
    "line ends of Windows": text(rows(), end="\r\n"),
    "a byte order mark": b"\xef\xbb\xbf" + text(rows()),
    "actions in upper case": text(each("action", str.upper)),
    "directions in mixed case": text(each("direction", str.title)),
    "seconds of no to three decimals": text(each("timestamp", seconds)),
    "times in ISO 8601": text(each("timestamp", iso)),
    "and with a blank in them": text(each("timestamp", lambda time: iso(time).replace("T", " "))),
    "and with a Z": text(each("timestamp", lambda time: iso(time).replace("+00:00", "Z"))),
}


@pytest.mark.parametrize("case", CLEAR)
def test_what_is_clear_is_read(tmp_path, case):
    (expected,), whole = read(tmp_path, text(rows()))
    (session,), report = read(tmp_path, CLEAR[case])
    assert report.counts == whole.counts
    for name in ("values", "times", "age_ns", "valid"):
        assert getattr(session, name).tobytes() == getattr(expected, name).tobytes()


def test_a_time_without_a_zone_is_asked_about_and_read_with_it(tmp_path):
    content = text(each("timestamp", lambda time: iso(time).removesuffix("+00:00")))
    assert refusal(tmp_path, content) == (
        "FILE, column timestamp: expected times with a zone, found `2026-05-02 02:36:23`, which "
        "has none. Say which it is, with zone (`--set options.zone=America/New_York`)."
    )
    (session,), _ = read(tmp_path, content, options={"zone": "UTC"})
    assert session.times.tobytes() == read(tmp_path, text(rows()))[0][0].times.tobytes()


WHY = {
    "id": ("", "the id is missing"),
    "timestamp": ("soon", "the timestamp is no time from 1990 to 2100"),
    "price": ("1,000", "the number of fields is 7 and not 6"),
    "volume": ("1e-10", "the volume is no number of nine decimals or fewer"),
    "action": ("opened", "the action is none of created, changed and deleted"),
    "direction": ("buy", "the direction is neither bid nor ask"),
}


@pytest.mark.parametrize("column", WHY)
def test_the_first_unreadable_line_is_told_with_its_fault(tmp_path, column):
    bad, why = WHY[column]
    lines = rows()
    lines[5][COLUMNS.index(column)] = bad
    shown = ",".join(lines[5])
    assert refusal(tmp_path, text(lines)) == (
        f"FILE, line 6: expected at most 0.1000 % of the lines to be unreadable, found 1 of 20, "
        f"the first being `{shown}`, where {why}. Repair the file, or raise max_unreadable_share "
        "(`--set max_unreadable_share=…`) if losing them is all right."
    )
    _, report = read(tmp_path, text(lines), max_unreadable_share=0.1)
    assert f"  the first unreadable: line 6: {shown} ({why})" in str(report)


def test_a_price_of_another_kind_and_a_negative_volume_are_told(tmp_path):
    lines = rows()
    lines[5][2] = "nan"
    assert "where the price is no number of nine decimals" in refusal(tmp_path, text(lines))
    lines = rows()
    lines[5][3] = "-1"
    assert "where the volume is negative" in refusal(tmp_path, text(lines))


def zipped(content: bytes) -> bytes:
    path = Path("inside.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("orders.csv", content)
    return path.read_bytes()


FOREIGN = {
    "utf-16": (lambda content: content.decode().encode("utf-16"), "text in UTF-16. Convert it"),
    "lone carriage returns": (
        lambda content: content.replace(b"\n", b"\r"),
        "lines that end in a carriage return alone. Convert their ends with `tr '\\r' '\\n'`",
    ),
    "bzip2": (bz2.compress, "a file packed by bzip2. Unpack it, or pack it with gzip or zstd"),
    "xz": (lzma.compress, "a file packed by xz. Unpack it, or pack it with gzip or zstd"),
    "zip": (zipped, "a zip archive. Unpack it"),
}


@pytest.mark.parametrize("reader", [None, "orders", "table"])
@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_that_is_something_else_is_named(tmp_path, monkeypatch, case, reader):
    monkeypatch.chdir(tmp_path)
    change, found = FOREIGN[case]
    message = refusal(tmp_path, change(text(rows())), format=reader)
    assert f"FILE: expected lines of text in UTF-8, found {found}" in message


@pytest.mark.parametrize("reader", [None, "orders", "table"])
@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_one_printable_sentence(tmp_path, seed, reader, capsys):
    garbage = np.random.default_rng(seed).bytes(100_000)
    for content in (garbage, b"\x1b[31m" + text(rows()), text(rows()) + garbage):
        message = refusal(tmp_path, content, format=reader)
        assert message.startswith("FILE")
        assert message.isprintable()
    assert capsys.readouterr().err == "", "pyarrow prints what it can't raise"


def test_a_name_that_stands_twice_is_refused(tmp_path):
    lines = [[*line[:3], line[2], *line[3:]] for line in rows()]
    assert refusal(tmp_path, text(lines)) == (
        "FILE, line 1: expected one column named price, found 2. Rename the one that isn't meant."
    )
    others = [["note", "note", *line] for line in rows()]
    assert read(tmp_path, text(others))[1].counts.lines_read == 20


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n\n"])
def test_nothing_but_a_header_is_said_so(tmp_path, end):
    assert refusal(tmp_path, ",".join(COLUMNS).encode() + end.encode()) == (
        "FILE: expected data for one valid row or more, found no record. Check that "
        "there is more to it than a header."
    )


def test_a_directory_is_not_a_damaged_file(tmp_path):
    for reader in (None, "orders", "table"):
        with pytest.raises(TapeError) as error:
            list(read_tape(tmp_path, format=reader))
        assert str(error.value) == (
            f"{tmp_path}: expected a file, found a directory. Give the files in it."
        )


def test_one_id_for_all_orders_is_told_when_no_row_is_valid(tmp_path):
    assert refusal(tmp_path, text(each("id", lambda _: "7"))) == (
        "FILE: expected data for one valid row or more, found 20 records, 0 events outside every "
        "session and 10 rows, none of them valid (10 one-sided); 19 orders were created under an "
        "id in use. Check the file and the sessions, or lower step_ns (`--set step_s=…`)."
    )
