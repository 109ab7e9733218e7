"""From files to a store: in one process or several, once or again, always the same store."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from typer.main import get_command

from tapeline import cli
from tapeline.cli.ingest import READER_OPTIONS
from tapeline.errors import ConfigError, StoreError, TapeError
from tapeline.ingest import IngestConfig, distinct, ingest, ingest_parallel, ingest_part
from tapeline.store import Shards
from tapeline.tape import READERS, Calendar, Gaps, LocalHours, UtcDays

SECOND_MS = 1000
DAY_MS = 86_400 * SECOND_MS
START_MS = 1_777_680_000_000  # 2026-05-02, midnight UTC
HEADER = "id,timestamp,price,volume,action,direction\n"


def orders(day: int, num: int = 20, offset: int = 0) -> str:
    """A book whose best bid moves once a second on one day."""
    start = START_MS + day * DAY_MS + offset * SECOND_MS
    lines = [f"{day}-ask,{start},101.0,2,created,ask\n", f"{day}-low,{start},90.0,5,created,bid\n"]
    for n in range(num):
        when = start + n * SECOND_MS
        lines.append(f"{day}-{offset}-{n},{when},{95 + n % 5}.5,1,created,bid\n")
        lines.append(f"{day}-{offset}-{n},{when + 900},{95 + n % 5}.5,1,deleted,bid\n")
    return HEADER + "".join(lines)


@pytest.fixture
def tapes(tmp_path):
    """Three files, a day each."""
    paths = []
    for day in range(3):
        paths.append(tmp_path / f"day-{day}.csv")
        paths[-1].write_text(orders(day))
    return [[path] for path in paths]


def reading_of(tapes, *overrides):
    given = {"instrument": "X"}
    files = [file for files in tapes for file in files]
    return IngestConfig.from_mapping(given, "test", overrides).reading(files)


def test_again_changes_nothing_and_new_files_are_appended(tapes, tmp_path):
    reading = reading_of(tapes)
    first = ingest(tapes[:2], tmp_path / "store", "mmap", reading)
    assert [report.counts.created for report in first.reports] == [22, 22]
    index = tmp_path / "store" / "mmap" / "index.json"
    before = (index.read_bytes(), index.stat().st_mtime_ns)
    ingest(tapes[:2], tmp_path / "store", "mmap", reading)
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before
    ingest(tapes, tmp_path / "store", "mmap", reading)
    ingest(tapes, tmp_path / "whole", "mmap", reading)
    grown, whole = Shards(tmp_path / "store"), Shards(tmp_path / "whole")
    assert grown.fingerprint == whole.fingerprint
    assert [key.date for key in grown.keys] == ["2026-05-02", "2026-05-03", "2026-05-04"]


def test_changed_files_are_refused_unless_replaced(tapes, tmp_path):
    reading = reading_of(tapes)
    ingest(tapes, tmp_path / "store", "mmap", reading)
    before = Shards(tmp_path / "store").fingerprint
    tapes[1][0].write_text(orders(1, num=10))
    with pytest.raises(StoreError, match="X/2026-05-03"):
        ingest(tapes, tmp_path / "store", "mmap", reading)
    assert Shards(tmp_path / "store").fingerprint == before
    ingest(tapes, tmp_path / "store", "mmap", reading, replace=True)
    assert Shards(tmp_path / "store").fingerprint != before


@pytest.mark.timeout(240)
def test_several_processes_write_the_store_of_one(tapes, tmp_path):
    reading = reading_of(tapes)
    ingest(tapes, tmp_path / "one", "mmap", reading)
    done = ingest_parallel(tapes, tmp_path / "two", "mmap", reading, num_jobs=2)
    assert [Path(report.source).name for report in done.reports] == [
        "day-0.csv",
        "day-1.csv",
        "day-2.csv",
    ]
    assert Shards(tmp_path / "two").fingerprint == Shards(tmp_path / "one").fingerprint
    assert [path.name for path in (tmp_path / "two").iterdir() if path.is_dir()] == ["mmap"]


def test_parts_of_an_array_job_are_joined_by_the_last(tapes, tmp_path):
    reading = reading_of(tapes)
    ingest(tapes, tmp_path / "one", "mmap", reading)
    for part in (3, 1):
        assert not ingest_part(tapes, tmp_path / "parts", "mmap", reading, part, 3).is_complete
    with pytest.raises(StoreError, match="no store"):
        Shards(tmp_path / "parts")
    assert ingest_part(tapes, tmp_path / "parts", "mmap", reading, 2, 3).is_complete
    assert Shards(tmp_path / "parts").fingerprint == Shards(tmp_path / "one").fingerprint
    with pytest.raises(TapeError) as caught:
        ingest_part(tapes, tmp_path / "parts", "mmap", reading, 1, 4)
    assert str(caught.value) == (
        "part 1/4: expected at most 3 parts, one for each tape, found 4. Use fewer parts, or give "
        "more files."
    )


def test_parts_of_other_files_or_settings_are_refused(tapes, tmp_path):
    ingest_part(tapes, tmp_path / "parts", "mmap", reading_of(tapes), 1, 2)
    for others, reading in ((tapes[:2], reading_of(tapes)), (tapes, reading_of(tapes, "depth=2"))):
        with pytest.raises(TapeError, match="expected the files and settings of the parts that"):
            ingest_part(others, tmp_path / "parts", "mmap", reading, 2, 2)
    assert ingest_part(tapes, tmp_path / "parts", "mmap", reading_of(tapes), 2, 2).is_complete


@pytest.mark.timeout(120)
def test_workers_end_with_the_process_that_started_them(tapes, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tapeline.ingest import *\n"
        "if __name__ == '__main__':\n"
        "    tapes = [[Path(p)] for p in sys.argv[1:]] * 1\n"
        "    reading = IngestConfig.from_mapping({'instrument': 'X'}, 't').reading(tapes[0])\n"
        "    ingest_parallel(tapes, Path('store'), 'mmap', reading, 2)\n"
    )
    (tmp_path / "job.py").write_text(code)
    job = subprocess.Popen(
        [sys.executable, "job.py", *(str(path) for (path,) in tapes)], cwd=tmp_path
    )
    parent = psutil.Process(job.pid)
    deadline = time.monotonic() + 60
    while not (workers := parent.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.01)
    job.kill()
    job.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert workers
    assert not alive


def test_a_url_stays_a_url(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.csv").write_text(orders(0))
    url = "memory://tapeline-test/market"
    arguments = ["ingest", "day.csv", "--out", url, "--format", "zarr", "--json"]
    monkeypatch.setattr(sys, "argv", ["tapeline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["store"] == url
    assert Shards(url, "zarr").keys[0].date == "2026-05-02"
    assert [path.name for path in tmp_path.iterdir()] == ["day.csv"]


def test_a_table_of_several_instruments_is_refused(tmp_path):
    table = tmp_path / "two.csv"
    table.write_text(
        "time,symbol,price\n2026-05-02T10:00:00Z,AAA,100\n2026-05-02T10:00:01Z,BBB,5000\n"
    )
    with pytest.raises(
        TapeError, match="expected rows of one instrument, found several, such as AAA, BBB"
    ):
        ingest([[table]], tmp_path / "store", "mmap", reading_of([[table]]))
    table.write_text(
        "time,symbol,price\n2026-05-02T10:00:00Z,AAA,100\n2026-05-02T10:00:01Z,AAA,101\n"
    )
    (report,) = ingest([[table]], tmp_path / "store", "mmap", reading_of([[table]])).reports
    assert report.detected["left_out"] == "symbol"


def test_either_or_both_files_of_a_pair_are_one_tape(tmp_path):
    message = tmp_path / "X_2012-06-21_34200000_57600000_message_1.csv"
    book = tmp_path / "X_2012-06-21_34200000_57600000_orderbook_1.csv"
    message.write_text("34200.1,1,1,18,1000000,1\n34200.9,1,2,18,1000000,1\n")
    book.write_text("1000100,5,1000000,18\n1000100,5,1000000,36\n")
    both = [[book], [message]]
    tapes = distinct(both, reading_of(both))
    assert len(tapes) == 1
    ingest(tapes, tmp_path / "store", "mmap", reading_of(both))
    assert [key.date for key in Shards(tmp_path / "store").keys] == ["2012-06-21"]


def test_a_bare_nan_and_absurd_depths(tapes):
    assert reading_of(tapes, "crossed=nan").policy.crossed == "nan"
    with pytest.raises(TapeError, match="expected at most 1,000 levels a side, found 1,000,000"):
        reading_of(tapes, "depth=1000000")
    with pytest.raises(TapeError, match="step_ns: expected 1 or more, found 0"):
        reading_of(tapes, "step_s=1e-10")


def test_files_that_continue_each_other_are_one_tape(tmp_path):
    (tmp_path / "a.csv").write_text(orders(0))
    (tmp_path / "b.csv").write_text(orders(0, offset=30))
    both = [tmp_path / "a.csv", tmp_path / "b.csv"]
    reading = reading_of([both])
    ingest([both], tmp_path / "joined", "mmap", reading)
    (key,) = Shards(tmp_path / "joined").keys
    assert key.date == "2026-05-02"
    with pytest.raises(StoreError, match="X/2026-05-02"):
        ingest([[path] for path in both], tmp_path / "apart", "mmap", reading)
    assert not (tmp_path / "apart").exists()


def test_a_bad_file_among_good_ones_leaves_nothing(tapes, tmp_path):
    tapes[2][0].write_text("id,timestamp\n1,2\n")
    with pytest.raises(TapeError):
        ingest(tapes, tmp_path / "store", "mmap", reading_of(tapes[:1]))
    assert not (tmp_path / "store").exists()


def test_settings_reach_the_objects(tapes):
    reading = reading_of(
        tapes, "step_s=1", "depth=3", "max_age_s=0", "crossed=drop", "hold_s=2", "age_column=true"
    )
    assert (reading.grid.step_ns, reading.grid.depth) == (1_000_000_000, 3)
    assert reading.grid.max_age_s is None
    assert reading.grid.age_column is True
    assert (reading.policy.crossed, reading.policy.hold_s) == ("drop", 2.0)
    assert reading.policy.locked == "hold"  # the orders reader's own
    assert reading_of(tapes, "step_s=0").grid.step_ns is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("utc", UtcDays),
        ("gap:600", Gaps),
        ("hours:09:30-16:00@America/New_York", LocalHours),
        ("calendar:XNYS", Calendar),
    ],
)
def test_rules_of_sessions_by_name(tapes, text, rule):
    assert isinstance(reading_of(tapes, f"sessions={text}").sessions(), rule)


@pytest.mark.parametrize("text", ["", "gap", "gap:soon", "hours:9-16", "calendar:", "weekly"])
def test_an_unknown_rule_of_sessions(tapes, text):
    with pytest.raises(TapeError) as caught:
        reading_of(tapes, f"sessions='{text}'")
    assert str(caught.value) == (
        "sessions: expected utc, gap:SECONDS, hours:HH:MM-HH:MM@ZONE or calendar:NAME, found "
        f"{text!r}. Write one such as calendar:XNYS or hours:17:00-16:00@America/Chicago."
    )


def test_unknown_settings_and_values(tapes):
    with pytest.raises(ConfigError, match="Write `depth`, the nearest"):
        reading_of(tapes, "deptth=3")
    with pytest.raises(ConfigError, match="key `crossed`"):
        reading_of(tapes, "crossed=repair")
    with pytest.raises(TapeError, match="depth: expected 1 or more, found 0"):
        reading_of(tapes, "depth=0")
    with pytest.raises(TapeError, match=r"format: expected .*, found 'lobstr'. Write lobster"):
        reading_of(tapes, "reader=lobstr")


@pytest.mark.parametrize("override", ["step_s=1", "crossed=nan", "max_age_s=5", "hold_s=2"])
def test_sessions_of_other_options_are_refused_at_the_store(tapes, tmp_path, override):
    ingest(tapes[:1], tmp_path, "mmap", reading_of(tapes))
    name = override.partition("=")[0]
    with pytest.raises(StoreError, match=rf"rows are made: expected {name} .*found {name} "):
        ingest(tapes[1:2], tmp_path, "mmap", reading_of(tapes, override))
    assert len(Shards(tmp_path)) == 1


@pytest.mark.parametrize("name", ["max_unreadable_share", "max_lifted_share", "max_unclear_share"])
@pytest.mark.parametrize("share", ["5", "-0.1"])
def test_a_share_is_from_zero_to_one(tapes, tmp_path, name, share):
    with pytest.raises(TapeError) as caught:
        ingest(tapes, tmp_path, "mmap", reading_of(tapes, f"{name}={share}"))
    assert str(caught.value) == (
        f"{name}: expected a share from 0 to 1, found {share}. Give {name} as a fraction: 0.05 is "
        "five percent."
    )


def test_files_of_two_formats_are_refused_before_any_is_read(tapes, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("time,price\n2024-01-02T10:00:00Z,1\n")
    with pytest.raises(TapeError) as caught:
        reading_of([[tapes[0][0], table]])
    assert str(caught.value) == (
        f"{table}: expected orders, as {tapes[0][0]} is, found table. Ingest files of different "
        "formats one after the other: each call appends to the store."
    )


def test_rows_without_a_derived_column_stand_in_the_report(tapes, tmp_path):
    reading = reading_of(tapes, 'derive=["log_return"]')
    (report, *_) = ingest(tapes, tmp_path, "mmap", reading).reports
    assert report.counts.rows_undefined == {"log_return": 1}
    assert report.as_dict()["rows_marked"] == 1
    assert "40 rows, 1 of them marked (1 without log_return)" in str(report)


@pytest.mark.timeout(240)
def test_processes_tell_how_far_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("tapeline.ingest.files._WATCH_S", 0.001)
    tapes = [[tmp_path / f"{day}.csv"] for day in range(3)]
    for day, (path,) in enumerate(tapes):
        path.write_text(orders(day, 8_000))
    told = []
    reading = reading_of(tapes)
    ingest_parallel(
        tapes, str(tmp_path / "s"), "mmap", reading, 2, progress=lambda *args: told.append(args)
    )
    num_bytes = sum(path.stat().st_size for (path,) in tapes)
    assert {total for _, total in told} == {num_bytes}
    done = [part for part, _ in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] <= num_bytes


def test_help_lists_the_options_of_each_reader():
    options = {
        name: ", ".join(field.name for field in dataclasses.fields(kind.Options))
        for name, kind in READERS.items()
    }
    assert (
        "; ".join(f"{name}: {names}" for name, names in options.items() if names) == READER_OPTIONS
    )
    help_of_set = next(
        p.help for p in get_command(cli.app).commands["ingest"].params if "--set" in p.opts
    )
    assert READER_OPTIONS in help_of_set


def wrong_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files that can't be ingested, and what is said of each."""
    text = "time,price\n" + "2024-01-02T10:00:00Z,1\n" * 50_000
    noise = text + "".join(f"2024-01-02T10:00:00Z,{n * n % 7919}\n" for n in range(200_000))
    cut = "a file that can be read to its end, found Truncated compressed stream. Fetch the file "
    cut += "again: it may be cut short or damaged"
    found = {
        "folder": (None, "a file, found a directory. Give the files in it"),
        "empty.csv": (b"", "a market data file, found an empty file. Give one with data"),
        "header.csv": (
            b"time,price\n",
            "data for one valid row or more, found no record. Check that there is more to it than "
            "a header",
        ),
        "cut.csv.gz": (gzip.compress(text.encode())[:-200], cut),
        "cut.csv.zst": (pa.compress(noise.encode(), "zstd", asbytes=True)[:-200], cut),
        "nothing.csv.gz": (
            gzip.compress(b""),
            "a market data file, found one that holds nothing, unpacked. Fetch it again: it may be "
            "cut short",
        ),
    }
    for name, (content, _) in found.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return {name: (folder / name, said) for name, (_, said) in found.items()}


WRONG = ["folder", "empty.csv", "header.csv", "cut.csv.gz", "cut.csv.zst", "nothing.csv.gz"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_told_and_leave_the_store_alone(tmp_path, name):
    path, said = wrong_files(tmp_path)[name]
    with pytest.raises(TapeError) as caught:
        ingest([[path]], tmp_path / "s", "mmap", reading_of([[path]]))
    assert str(caught.value) == f"{path}: expected {said}."
    assert not (tmp_path / "s").exists()


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # for root nothing is forbidden
    with pytest.raises(TapeError) as caught:
        reading_of([[tmp_path / "a.csv"]])
    assert str(caught.value) == (
        f"{tmp_path / 'a.csv'}: expected a file that may be read, found no permission to. Change "
        "its permissions, or read it as another user."
    )


@pytest.mark.timeout(240)
def test_the_command(tapes, tmp_path, tapeline):
    tapeline = functools.partial(tapeline, "ingest")
    files = [path for (path,) in tapes]
    code, out, err = tapeline(*files, "--out", "s", "--json", "--set", "depth=2")
    assert code == 0, err
    assert "s/mmap: 3 sessions, 120 rows, 0 of them marked" in err
    assert json.loads(out)["sessions"] == 3
    assert [tape["format"] for tape in json.loads(out)["tapes"]] == ["orders"] * 3
    assert Shards("s").columns[-1] == "ask_size_2"
    derived = ("--set", 'derive=["log_return"]')
    assert "120 rows, 3 of them marked" in tapeline(*files, "--out", "d", *derived)[2]
    assert tapeline(*files, "--out", "s", "--set", "depth=2")[0] == 0
    for part, told in (("1/2", "other parts are missing"), ("2/2", "3 sessions")):
        code, out, err = tapeline(*files, "--out", "p", "--part", part, "--instrument", "X")
        assert code == 0, err
        assert told in err
    assert tapeline(*files, "--out", "j", "--jobs", 2, "--instrument", "X")[0] == 0
    assert Shards("j").fingerprint == Shards("p").fingerprint
    code, _, err = tapeline(*files, "--out", "p", "--part", "two")
    assert (code, err) == (
        2,
        "tapeline: --part two: expected I/N, such as 3/16, found two. Count parts from 1.\n",
    )
    code, _, err = tapeline(*files, "--out", "p", "--part", "1/2", "--jobs", "2")
    assert code == 2
    assert "at most one of --jobs, --part and --replace" in err
