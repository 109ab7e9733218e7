"""What every verb says: an example in its help, suggestions, and a sentence for what isn't a run.

The whole tree of commands is walked, so a new verb is held to the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers_report import write_page_run

from tapeline import cli

Tapeline = Callable[..., tuple[int, str, str]]


def commands() -> Iterator[tuple[str, Any]]:
    """Each verb and subverb, groups included."""
    waiting = [("", typer.main.get_command(cli.app))]
    while waiting:
        name, command = waiting.pop()
        for verb, below in getattr(command, "commands", {}).items():
            waiting.append((f"{name} {verb}".strip(), below))
        if name:
            yield name, command


COMMANDS = dict(commands())
GROUPS = [name for name, command in COMMANDS.items() if hasattr(command, "commands")]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_shows_an_example_of_itself(name: str) -> None:
    example = COMMANDS[name].help.partition("Example: ")[2]
    assert f"tapeline {name}" in example


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelt_verb_names_the_nearest(tapeline: Tapeline, name: str) -> None:
    *above, verb = name.split()
    doubled = verb + verb[-1]
    code, out, err = tapeline(*above, doubled)
    assert (code, out) == (2, "")
    assert f"No such command '{doubled}'. Did you mean '{verb}'" in err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in GROUPS])
def test_a_misspelt_option_names_the_nearest(tapeline: Tapeline, name: str) -> None:
    option = COMMANDS[name].params[-1].opts[0]
    if not option.startswith("--"):
        option = "--help"
    code, out, err = tapeline(*name.split(), f"{option}x")
    assert (code, out) == (2, "")
    assert f"No such option: {option}x (Possible options: " in err
    assert option in err.partition("Possible options: ")[2]


COMPLETED = {
    "tapeline dia": {"diagnose"},
    "tapeline checkpoints ": {"list", "verify", "tag", "export", "prune"},
    "tapeline plan s": {"spot", "search", "scaling", "stop"},
    "tapeline resume --s": {"--set"},
}


@pytest.mark.parametrize("line", COMPLETED)
def test_the_shell_completes_verbs_and_options(tapeline: Tapeline, monkeypatch, line: str) -> None:
    words = line.split(" ")
    monkeypatch.setenv("_TAPELINE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    code, out, _ = tapeline()
    assert code == 0
    assert set(out.split()) == COMPLETED[line]


# Verbs that read a run, with the run as @; those that take a configuration as well are not here.
READERS = (
    "resume @",
    "audit @",
    "rerun @ --out again",
    "compare @ good",
    "compare good @",
    "watch @ --once",
    "diagnose @",
    "advise @",
    "report @",
    "export @ --to prometheus --textfile x.prom",
    "export @ --to tensorboard --out boards",
    "quarantine list @",
    "quarantine add @ host:0 --reason why",
    "quarantine remove @ host:0",
    "checkpoints list @",
    "checkpoints verify @",
    "checkpoints tag @ 6 paper",
    "checkpoints export @ 6 --out exported",
    "checkpoints prune @ --dry-run",
    "plan checkpoint --from-run @",
    "plan accelerator --from-run @",
    "plan compare @",
    "runs show @",
    "runs diff @ good",
    "runs diff good @",
    "search show @",
)


def make_no_run(folder: Path, kind: str) -> None:
    if kind == "a file":
        folder.write_text("hello\n")
    elif kind == "an empty folder":
        folder.mkdir()
    elif kind == "a folder of something else":
        folder.mkdir()
        (folder / "data.csv").write_text("a,b\n1,2\n")
    elif kind != "nothing":
        shutil.copytree("good", folder)
        (folder / "run.json").write_bytes(DAMAGED[kind])


DAMAGED = {"an empty record": b"", "a torn record": b'{"format": "tapel', "a list": b"[]"}


@pytest.mark.parametrize("verb", READERS)
def test_what_is_no_run_is_told_in_a_sentence_by_every_verb(tapeline: Tapeline, verb: str) -> None:
    write_page_run(Path("good"))
    kinds = ("nothing", "a file", "an empty folder", "a folder of something else", *DAMAGED)
    for number, kind in enumerate(kinds):
        name = f"wrong-{number}"
        make_no_run(Path(name), kind)
        code, out, err = tapeline(*verb.replace("@", name).split())
        assert (code, out) == (2, ""), kind
        last = err.splitlines()[-1]
        assert last.startswith(f"tapeline: {name}"), kind
        assert ": expected " in last, kind
        assert ", found " in last, kind
        assert ".." not in last, kind
        assert len(re.findall(r"\. [A-Z]", last)) == 1, kind  # two sentences


# With a run at `good` and a configuration at run.toml: what follows `tapeline: `.
NO_FILE = "No such file or directory. Check the path, its permissions and the disk.\n"
TOLD = {
    "report good --out gone/x.html": f"gone/x.html: {NO_FILE}",
    "plan checkpoint --mtbf-hours 6 --plot gone/x": f"gone/x.svg: {NO_FILE}",
    "store windows good --length 0": "good: expected a store in mmap or npy or zarr or csv "
    "format, found no store. Make one with `tapeline ingest` or `write_shards`.\n",
    "supervise run.toml --ranks 2 --out two": "--ranks: expected a number of ranks that the "
    "configuration can be trained on, found 2:2. See training.lanes, training.batch and "
    "training.accumulate.\n",
    "train run.toml --set checkpoint.every=often": "run.toml with --set checkpoint.every=often, "
    "key `checkpoint.every`: expected a valid integer or 'auto', found 'often'. "
    "Correct the value.\n",
    "chaos run.toml --out struck --set training.lanes=3": "run.toml with --set training.lanes=3, "
    "key `training`: expected lanes to divide batch",
    "plan checkpoint --failure-shape nan": "--failure-shape: expected --simulate beside it, found "
    "nan alone. Say how many failures to simulate, or leave it out.\n",
    "plan checkpoint --machines -1": "--machines: expected --simulate beside it, found -1 alone. ",
    "ingest --synthetic 2 --part 1/2 --set depth=3": "ingest --synthetic: expected no option that "
    "is about files, found --set, --part. Leave it out.\n",
    "export good --to mlflow --uri nope": "--uri nope: expected an MLflow server that takes the "
    "run, found ",
}


@pytest.mark.parametrize("line", TOLD)
def test_what_is_wrong_is_told_in_a_sentence(tapeline: Tapeline, line: str) -> None:
    write_page_run(Path("good"))
    Path("run.toml").write_text('[data]\nstore = "market"\n')
    code, out, err = tapeline(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"tapeline: {TOLD[line]}")
    assert not Path("struck").exists()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_chaos_at_no_rate_is_refused(tapeline: Tapeline, value: str) -> None:
    code, _, err = tapeline("chaos", "run.toml", "--out", "struck", "--mtbf", value)
    assert code == 2
    assert "Invalid value for '--mtbf'" in err


def test_a_verb_that_is_interrupted_ends_in_a_line(tapeline: Tapeline, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tapeline.store.append_shards", interrupted)
    assert tapeline("ingest", "--synthetic", 1) == (130, "", "tapeline: interrupted\n")


def test_what_a_locale_cant_say_ends_no_verb(tmp_path: Path) -> None:
    for name in ("good", "other"):
        write_page_run(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "tapeline", "runs", "diff", "good", "other"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"good ? " in done.stdout


@pytest.mark.parametrize("verb", ["ingest --synthetic 1 --out full", "report good --out full"])
def test_a_full_disk_is_told_with_what_was_written(tmp_path: Path, verb: str) -> None:
    write_page_run(tmp_path / "good")
    limited = f"ulimit -f 1; {sys.executable} -m tapeline {verb}"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"tapeline: full\S*: File too large. Make room there, and give the command again.\n",
        done.stderr,
    )


def test_output_that_nobody_reads_further_ends_quietly() -> None:
    piped = f"{sys.executable} -m tapeline plan search | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
