"""`tapeline checkpoints`: what a run has saved, as a person and as a script sees it."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tapeline import cli
from tapeline.checkpoint import load_state
from tapeline.checkpoint.durable import DurableTier
from tapeline.errors import CheckpointError

TOML = """
[data]
store = "market"
[model]
arguments = { hidden = 8 }
[training]
steps = 12
batch = 16
[validation]
every = 4
[checkpoint]
every = 4
keep = 9
durable = "far"
durable_every = 6
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a store and a finished run, as the command line makes them."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for arguments in (
            ["ingest", "--synthetic", "2", "--out", "market"],
            ["train", "run.toml", "--out", "run"],
        ):
            patch.setattr(sys, "argv", ["tapeline", *arguments])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code
    return folder


@pytest.fixture
def tapeline(trained, tapeline, monkeypatch, tmp_path):
    """Run a verb of `tapeline checkpoints` in a copy of that folder."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    record = json.loads((folder / "run" / "run.json").read_text())
    assert record["config"]["checkpoint"]["durable"] == str(trained / "far")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    return functools.partial(tapeline, "checkpoints")


FAR = ("--set", "checkpoint.durable=far")


def checkpoint(step: int) -> Path:
    return Path(f"run/checkpoints/step-{step:08d}")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def listed(tapeline) -> list[dict]:
    code, out, _ = tapeline("run", *FAR, "--json")
    assert code == 0
    return json.loads(out)["checkpoints"]


def test_the_list_shows_both_tiers(tapeline):
    rows = listed(tapeline)
    assert [(row["step"], row["tier"], row["verified"]) for row in rows] == [
        (12, "local", True),
        (12, "durable", None),
        (8, "local", True),
        (8, "durable", None),
        (4, "local", True),
    ]
    newest = rows[0]
    assert newest["note"] == "resume begins here"
    assert newest["attempt"] == 1
    assert newest["tags"] == []
    assert newest["num_bytes"] == (checkpoint(12) / "rank-0.safetensors").stat().st_size
    lines = Path("run/metrics/rank-0.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    mse = {line["step"]: line["validation"]["loss"] for line in figures if "validation" in line}
    assert {row["step"]: row["metric"] for row in rows} == mse


def test_the_list_tells_an_interval_that_was_chosen(tapeline):
    decision = {
        "at_step": 4,
        "num_steps": 6,
        "range_steps": [5, None],
        "why": "the best interval",
        "costs": {"blocking_s": 0.25, "write_s": 0.0, "step_s": 0.5},
    }
    Path("run/intervals.jsonl").write_text(json.dumps(decision) + "\n")
    assert tapeline("run")[2] == (
        "interval from step 4: 6 steps (5 to any), the best interval; a save blocks 0.25 s and is "
        "written for 0 s, a step takes 0.5 s\n"
    )
    assert json.loads(tapeline("run", "--json")[1])["interval"] == decision


def test_the_list_is_a_table_with_or_without_its_name(tapeline):
    code, out, _ = tapeline("run", *FAR)
    assert code == 0
    assert "run: 5 checkpoints" in out
    assert tapeline("list", "run", *FAR) == (0, out, "")


def test_verify_finds_a_flipped_byte_in_either_tier(tapeline):
    assert tapeline("verify", "run", *FAR) == (0, "", "run: 5 checkpoints verified\n")
    flip(checkpoint(4) / "rank-0.safetensors")
    flip(Path("far/step-00000008/rank-0.safetensors"))
    code, out, err = tapeline("verify", "run", *FAR, "--json")
    assert code == 2
    assert [one["place"][-13:] for one in json.loads(out)["damaged"]] == [
        "step-00000008",
        "step-00000004",
    ]
    assert err.startswith(
        "tapeline: run: expected the bytes that were saved, found 2 of 5 checkpoints damaged, "
        "the newest: "
    )
    assert err.endswith("A resume passes over them; delete their folders to be rid of them.\n")
    assert err.count("\n") == 1
    assert [row["verified"] for row in listed(tapeline)] == [True, None, True, None, False]


def test_a_tagged_one_stays_for_ever(tapeline):
    code, _, err = tapeline("tag", "run", 4, "paper", *FAR)
    assert (code, err) == (0, "run: step 4 is tagged paper (local, durable)\n")
    code, _, err = tapeline("tag", "run", 8, "best-1", *FAR)
    assert (code, err) == (0, "run: step 8 is tagged best-1 (local, durable)\n")
    tags = {(row["step"], row["tier"]): row["tags"] for row in listed(tapeline)}
    assert tags == {
        (12, "local"): [],
        (12, "durable"): [],
        (8, "local"): ["best-1"],
        (8, "durable"): ["best-1"],
        (4, "local"): ["paper"],
        (4, "durable"): ["paper"],
    }
    code, out, _ = tapeline("prune", "run", "--set", "checkpoint.keep=1", "--json")
    assert json.loads(out) == {
        "run": "run",
        "dry_run": False,
        "kept": {"12": ["newest"], "8": ["tagged best-1"], "4": ["tagged paper"]},
        "deleted": [],
    }
    code, _, err = tapeline("tag", "run", 8, "paper", *FAR)
    assert code == 2
    assert "expected no tag of that name" in err
    code, _, err = tapeline("tag", "run", 5, "other", *FAR)
    assert (code, err) == (
        2,
        "tapeline: run, step 5: expected a step that was saved, found 4, 8, 12. See `tapeline "
        "checkpoints` for the steps there are.\n",
    )
    assert tapeline("tag", "run", 8, "a/b", *FAR)[0] == 2


def test_a_tier_that_cannot_be_reached_is_told_and_left_out(tapeline, monkeypatch):
    def refuse(_: DurableTier) -> None:
        raise CheckpointError("far", expected="an answer", found="none", fix="Wait")

    with monkeypatch.context() as patch:
        patch.setattr(DurableTier, "steps", refuse)
        told = "the durable copies are left out: far: expected an answer, found none. Wait.\n"
        code, out, err = tapeline("run", *FAR, "--json")
        assert (code, err) == (1, told)
        assert [row["step"] for row in json.loads(out)["checkpoints"]] == [12, 8, 4]
        assert f"the durable copies are left out: {json.loads(out)['unreachable']}\n" == told
        verified = "run: 3 checkpoints verified\n"
        assert tapeline("verify", "run", *FAR) == (1, "", f"{verified}{told}")
    assert json.loads(tapeline("run", *FAR, "--json")[1])["unreachable"] is None


def test_a_tag_whose_copy_fails_stays_and_is_made_good(tapeline):
    Path("gone").touch()  # a file where the folder of copies should be
    code, _, err = tapeline("tag", "run", 4, "paper", "--set", "checkpoint.durable=gone")
    assert code == 2
    assert "gone: expected a place for durable copies that can be read and written" in err
    tags = {(row["step"], row["tier"]): row["tags"] for row in listed(tapeline)}
    assert tags[4, "local"] == ["paper"]
    code, _, err = tapeline("tag", "run", 4, "paper", *FAR)
    assert (code, err) == (0, "run: step 4 is tagged paper (local, durable)\n")


def test_prune_says_first_and_deletes_then(tapeline):
    keep_one = ("--set", "checkpoint.keep=1")
    code, _, err = tapeline("prune", "run", *keep_one, "--dry-run")
    assert (code, err) == (0, "step 12: newest\nstep 8: would go\nstep 4: would go\n")
    assert checkpoint(4).is_dir()
    code, _, err = tapeline("prune", "run", *keep_one)
    assert (code, err) == (0, "step 12: newest\nstep 8: deleted\nstep 4: deleted\n")
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000012"]


def test_prune_never_takes_the_one_that_a_resume_begins_from(tapeline):
    """A later one verifies, but is of a life that was given up."""
    journal = Path("run/attempts.jsonl")
    life = {"attempt": 2, "started": "2026-01-01T00:00:00Z", "from_step": 4}
    with journal.open("a") as stream:
        stream.write(json.dumps(life) + "\n")
    rows = listed(tapeline)
    assert rows[-1]["note"] == "resume begins here"
    assert rows[0]["note"] == (
        "attempt 2 began again from step 4: what attempt 1 saved beyond that was given up"
    )
    code, _, err = tapeline("prune", "run", "--set", "checkpoint.keep=1")
    assert code == 0
    assert err.endswith("step 4: newest\n")
    assert checkpoint(4).is_dir()


def test_export_writes_plain_files(tapeline):
    code, _, err = tapeline("export", "run", 8, "--out", "plain", *FAR)
    assert (code, err) == (0, "plain: model.safetensors, state.safetensors, state.json\n")
    state = load_state(checkpoint(8))
    model = load_file("plain/model.safetensors")
    assert model
    for name, tensor in model.items():
        assert torch.equal(tensor, state.tensors[f"model/{name}"])
    rest = load_file("plain/state.safetensors")
    assert {f"model/{name}" for name in model} | set(rest) == set(state.tensors)
    told = json.loads(Path("plain/state.json").read_text())
    assert (told["step"], told["config"]["training"]["steps"]) == (8, 12)
    code, _, err = tapeline("export", "run", 8, "--out", "plain", *FAR)
    assert (code, err) == (
        2,
        "tapeline: plain: expected a new or empty folder, found other files. Choose another "
        "folder.\n",
    )


def test_export_takes_the_copy_where_the_disk_was_lost(tapeline):
    expected = load_state(checkpoint(8)).tensors
    shutil.rmtree("run/checkpoints")
    assert tapeline("export", "run", 8, "--out", "plain", *FAR)[0] == 0
    for name, tensor in load_file("plain/model.safetensors").items():
        assert torch.equal(tensor, expected[f"model/{name}"])


def test_a_folder_that_is_no_run_is_refused(tapeline):
    code, _, err = tapeline("far")
    assert code == 2
    assert err.startswith("tapeline: far: expected the folder of a run, with run.json")


@pytest.mark.parametrize("verb", ["list", "verify", "tag", "export", "prune"])
def test_every_verb_shows_an_example(tapeline, verb):
    code, out, _ = tapeline(verb, "--help")
    assert code == 0
    assert f"Example: tapeline checkpoints {verb}" in " ".join(out.split())
