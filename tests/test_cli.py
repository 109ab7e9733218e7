"""The command line: data on standard output, talk on standard error, never a traceback."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapeline.ingest import IngestConfig

ORDERS = """id,timestamp,exchange_timestamp,price,volume,action,direction
1,1777689383000,0,100.0,1.5,created,bid
2,1777689383100,0,101.0,2.0,created,ask
3,1777689384900,0,99.0,1.0,created,bid
"""


@pytest.fixture
def market(tapeline):
    """A small store, made the way a user makes one."""
    code, out, err = tapeline("ingest", "--synthetic", 3, "--out", "market")
    assert (code, out) == (0, "")
    assert "market/mmap: 3 sessions, 3,420 rows" in err
    return Path("market")


def write_config(**sections: str) -> Path:
    path = Path("run.toml")
    text = '[data]\nstore = "market"\n[training]\nsteps = 6\nbatch = 16\n'
    path.write_text(text + "".join(sections.values()))
    return path


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys; sys.argv = ['tapeline', '--help']\n"
        "from tapeline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'numba', 'pyarrow', 'matplotlib', 'pydantic'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in ("ingest", "store", "bench", "train", "resume", "tutorial", "demo"):
        assert verb in done.stdout


@pytest.mark.parametrize(
    "verb",
    [
        "ingest",
        "store info",
        "store windows",
        "store verify",
        "store convert",
        "store join",
        "bench",
        "train",
        "resume",
        "demo",
    ],
)
def test_every_verb_shows_an_example(tapeline, verb):
    code, out, _ = tapeline(*verb.split(), "--help")
    assert code == 0
    assert f"Example: tapeline {verb}" in " ".join(out.split())


def test_ingest_train_resume_as_json(tapeline, market):
    write_config()
    code, out, err = tapeline("train", "run.toml", "--out", "runs/a", "--json")
    assert code == 0
    trained = json.loads(out)
    assert trained["steps"] == 6
    assert trained["run"] == "runs/a"
    code, out, _ = tapeline("resume", "runs/a", "--json")
    assert code == 0
    assert json.loads(out)["state_sha256"] == trained["state_sha256"]
    code, out, err = tapeline("train", "run.toml", "--out", "runs/b", "--set", "training.steps=3")
    assert (code, out) == (0, "")
    assert "runs/b: 3 steps done" in err
    assert "predicting no change" in err


def test_ingest_of_orders_reports_and_prints_json(tapeline):
    Path("orders.csv").write_text(ORDERS)
    code, out, err = tapeline("ingest", "orders.csv", "--out", "s", "--json")
    assert code == 0
    assert "orders.csv (orders, time_unit ms, tick 1): 3 records" in err
    values = json.loads(out)
    assert values["tapes"][0]["lines_read"] == 3
    assert values["rows"] == 4
    code, out, _ = tapeline("store", "info", "s", "--json")
    assert json.loads(out)["sessions"][0]["session"] == "orders/2026-05-02"


def test_store_convert_info_verify(tapeline, market):
    assert tapeline("store", "convert", market, "--to", "csv")[0] == 0
    code, out, _ = tapeline("store", "info", market, "--format", "csv")
    assert code == 0
    assert "SYN/2024-01-01" in out
    code, _, err = tapeline("store", "verify", market, "--format", "csv")
    assert (code, err) == (0, "market/csv: 3 sessions verified\n")
    code, _, err = tapeline("store", "convert", market, "--to", "csv")
    assert code == 2
    assert err == (
        "tapeline: market/csv: expected a place for new shards, found files already there. Choose "
        "another folder, or replace them with `--replace` (`replace=True`).\n"
    )


def test_bench_as_json_and_with_a_projection(tapeline, market):
    code, out, err = tapeline(
        "bench", market, "--repetitions", 3, "--rows", 11_700_000, "--plot", "budget", "--json"
    )
    assert code == 0
    values = json.loads(out)
    assert [row["case"] for row in values["rows"]] == [
        "csv looped",
        "npy looped",
        "mmap looped",
        "mmap row-index",
        "mmap gathered",
    ]
    assert values["projection"][0]["bytes"] == 11_700_000 * 41 * 4
    assert Path("budget.svg").exists()
    assert Path("budget.png").exists()
    code, out, err = tapeline("bench", market, "--repetitions", 3, "--rows", 1000)
    assert code == 0
    assert "mmap gathered" in out
    assert "row-index gather / gather: " in err


def test_bench_leaves_the_store_as_it_is(tapeline, market, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in market.rglob("*")}
    code, _, err = tapeline("bench", market, "--repetitions", 3)
    assert code == 0
    assert "copying market to " in err
    assert {path: path.stat().st_mtime_ns for path in market.rglob("*")} == before
    usage = shutil.disk_usage(market)._replace(free=1_000)
    monkeypatch.setattr("tapeline.budget.shutil.disk_usage", lambda _: usage)
    code, _, err = tapeline("bench", market, "--repetitions", 3)
    assert code == 2
    needed = 5 * 3_420 * (41 * 4 + 2 * 8)  # rows of 41 columns, time and age; csv counts thrice
    assert (
        f"expected room for about {needed:,} bytes, the store in mmap, npy, csv, found 1,000" in err
    )
    assert err.endswith("Make room, or set TMPDIR to a folder on a larger disk.\n")


def damage(path: Path, position: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_verify_finds_a_flipped_byte(tapeline, market):
    damage(market / "mmap" / "values.f32")
    code, out, err = tapeline("store", "verify", market, "--json")
    assert code == 2
    assert len(json.loads(out)["damaged"]) == 1
    assert "market/mmap: expected the bytes that were written, found 1 parts that differ" in err


WRONG = {
    "no input": (["ingest"], "ingest: expected files or --synthetic N, found neither."),
    "missing file": (["ingest", "gone.csv"], "gone.csv: expected"),
    "empty file": (["ingest", "empty.csv"], "empty.csv: expected"),
    "another format": (["ingest", "other.csv"], "none of them, but a file that begins with `a,b`"),
    "cut short": (["ingest", "cut.csv.gz"], "cut.csv.gz: expected"),
    "mostly unreadable": (["ingest", "bad.csv"], "line 3"),
    "unknown store format": (["ingest", "--synthetic", "1", "--format", "hdf"], "format 'hdf'"),
    "unknown store format, before the file is read": (
        ["ingest", "gone.csv", "--format", "hdf"],
        "format 'hdf': expected one of mmap, npy, zarr, csv",
    ),
    "impossible place, before the file is read": (
        ["ingest", "gone.csv", "--out", "other.csv/store"],
        "expected a folder that can be made and written to, found a file, other.csv. Choose",
    ),
    "a directory": (["ingest", "market"], "market: expected a file, found a directory."),
    "no sessions": (["ingest", "--synthetic", "0", "--out", "none"], "at least one session"),
    "no store": (["store", "info", "gone"], "gone: expected a store"),
    "no config": (["train", "gone.toml"], "gone.toml: expected a readable TOML file"),
    "no run": (["resume", "gone"], "gone: expected the folder of a run"),
    "misspelt key": (
        ["train", "run.toml", "--set", "training.stepz=3"],
        "Write `steps`, the nearest.",
    ),
    "batch 0": (["train", "run.toml", "--set", "training.batch=0"], "key `training.batch`"),
    "too long": (["train", "run.toml", "--set", "windows.length=2000"], "1140 in the longest"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence_exit_2_and_nothing_left_behind(tapeline, market, case):
    Path("empty.csv").write_text("")
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("cut.csv.gz").write_bytes(gzip.compress(ORDERS.encode() * 50)[:-20])
    Path("bad.csv").write_text(ORDERS.replace("101.0", "a lot").replace("99.0", "?"))
    write_config()
    before = sorted(str(path) for path in Path().rglob("*"))
    arguments, message = WRONG[case]
    code, out, err = tapeline(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tapeline: ")
    assert message in err
    assert sorted(str(path) for path in Path().rglob("*")) == before


def test_every_field_of_the_configuration_is_named_in_the_help_and_can_be_set(tapeline):
    Path("orders.csv").write_text(ORDERS)
    _, out, _ = tapeline("ingest", "--help")
    said = " ".join(out.split())
    options = {"reader", "instrument", "sessions"}
    for name in IngestConfig.model_fields:
        assert (f"--{name}" if name in options else name) in said
    code, _, err = tapeline(
        "ingest", "orders.csv", "--out", "s", "--set", "max_lifted_share=0", "--set", "depth=1"
    )
    assert (code, "s/mmap: 1 session," in err) == (0, True)


def test_a_store_cut_short_is_refused(tapeline, market):
    values = market / "mmap" / "values.f32"
    values.write_bytes(values.read_bytes()[:-4])
    code, _, err = tapeline("store", "info", market)
    assert code == 2
    assert err == (
        "tapeline: market/mmap/values.f32: expected 560,880 bytes, as the store's index says, "
        "found 560,876 bytes. Copy the file again, or write the store again.\n"
    )


def test_a_checkpoint_of_another_run_is_refused_with_both_sides_shown(tapeline, market):
    write_config()
    assert tapeline("train", "run.toml", "--out", "runs/a")[0] == 0
    smaller = ("--set", "model.arguments.hidden=8")
    assert tapeline("train", "run.toml", "--out", "runs/b", *smaller)[0] == 0
    ours, theirs = (Path(f"runs/{run}/checkpoints/step-00000006") for run in "ab")
    shutil.rmtree(ours)
    theirs.rename(ours)
    begun = [json.loads(Path(f"runs/{run}/run.json").read_text())["created"] for run in "ab"]
    code, _, err = tapeline("resume", "runs/a")
    assert code == 2
    assert f"it is of run run, begun {begun[1]}, not of run, begun {begun[0]}" in err


def test_an_impossible_place_is_one_sentence(tapeline, market):
    Path("file").write_text("in the way")
    write_config()
    code, _, err = tapeline("train", "run.toml", "--out", "file/run")
    assert code == 2
    assert err == (
        "tapeline: file/run: Not a directory. Check the path, its permissions and the disk.\n"
    )


WARNING = """
import warnings
from tapeline import cli
cli.app = lambda: warnings.warn_explicit("It is full.", RuntimeWarning, {place}, 7)
cli.main()
"""


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("cli.__file__", "tapeline: warning: It is full.\n"),
        ("'model.py'", "model.py:7: RuntimeWarning: It is full.\n"),
    ],
)
def test_a_warning_of_ours_is_a_sentence(place: str, told: str):
    command = [sys.executable, "-c", WARNING.format(place=place)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", told)


def test_wrong_use_exits_2(tapeline):
    code, out, err = tapeline("stor")
    assert (code, out) == (2, "")
    assert "No such command 'stor'" in err
