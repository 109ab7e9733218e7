"""`tapeline runs`, `audit`, `rerun`, `replicate` and `compare`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_runs import losses_of, new_record, write_run


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """The index of runs lies in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runs(tapeline):
    """A good run, its replicates, and a later bad one of another batch."""
    write_run(Path("runs/good"), new_record(name="good"))
    for seed in (1, 2, 3):
        record = new_record(f"seed={seed}", name=f"seed-{seed}")
        write_run(Path(f"runs/seed-{seed}"), record, mse=0.5 + 0.01 * seed)
    worse = [loss + (step >= 30) for step, loss in enumerate(losses_of(0), 1)]
    bad = new_record("training.batch=8", name="bad", created="2026-02-02")
    write_run(Path("runs/bad"), bad, losses=worse, mse=1.2)


def test_runs_are_listed(tapeline, runs):
    code, out, _ = tapeline("runs", "list", "--sort", "validation.mse", "--show", "training.batch")
    assert code == 0
    lines = out.splitlines()
    assert "runs: 5 runs" in lines[0]
    names = ("good", "seed-", "bad")
    assert [line.split()[0] for line in lines if line.strip().startswith(names)] == [
        *("good", "seed-1", "seed-2", "seed-3", "bad")
    ]
    code, out, _ = tapeline("runs", "list", "--where", "training.batch=8", "--json")
    assert [run["name"] for run in json.loads(out)] == ["bad"]
    code, out, err = tapeline("runs", "list", "nowhere")
    assert (code, out) == (2, "")
    assert "nowhere: expected a folder of runs, found no folder" in err
    assert tapeline("runs", "list", "--where", "batch")[0] == 2


def test_a_damaged_run_is_told(tapeline, runs):
    Path("runs/bad/run.json").write_text("{}")
    code, out, err = tapeline("runs", "list")
    assert (code, "5 runs" in out) == (0, True)
    assert "damaged: runs/bad" in err.replace(str(Path.cwd()) + "/", "")


def test_a_run_is_shown(tapeline, runs):
    code, out, _ = tapeline("runs", "show", "runs/bad")
    assert code == 0
    assert "8 (given)" in out
    assert "validation.loss" in out
    found = json.loads(tapeline("runs", "show", "runs/bad", "--json")[1])
    assert found["record"]["config"]["training"]["batch"] == 8
    assert found["lives"][0]["how"] == "finished"
    assert tapeline("runs", "show", "runs/none")[0] == 2


def test_what_changed_is_told_with_the_step(tapeline, runs):
    code, out, err = tapeline("runs", "diff", "runs/good", "runs/bad")
    assert code == 0
    assert "1 that hardly matter left out: --all shows them" in err
    assert "training.batch" in out
    assert "losses: other bits from step 30 on" in err
    assert "they leave the band of 3 other seeds at step 30" in err
    _, out, err = tapeline("runs", "diff", "runs/good", "runs/bad", "--all", "--json")
    found = json.loads(out)
    assert (found["changes"][0]["what"], found["divergence"]["leaves_band"]) == (
        *("training.batch", 30),
    )
    _, out, err = tapeline("runs", "diff", "runs/bad", "runs/good")
    assert "whether that is more than another seed does isn't known" in err
    _, _, err = tapeline("runs", "diff", "runs/good", "runs/good")
    assert "losses: the same bits in all 40 steps" in err


def test_the_last_good_run_is_found(tapeline, runs):
    code, out, err = tapeline("runs", "find", "runs/bad", "--good", "--same", "seed")
    assert code == 0
    assert "runs/bad: 1 run " in out
    assert "compare: tapeline runs diff" in err
    assert "runs/good runs/bad" in err
    code, out, err = tapeline("runs", "find", "runs/bad", "--target", "validation.mse<0.1")
    assert code == 1
    assert "no run like runs/bad with validation.mse<0.1" in err
    code, out, _ = tapeline("runs", "find", "runs/good", "--json")
    assert json.loads(out)[0]["name"] == "bad"


def test_an_audit_ends_with_the_sentence(tapeline, runs):
    code, out, err = tapeline("audit", "runs/good")
    assert code == 1
    assert "runs/good: nothing" in out
    assert "data out of reach" in out
    assert err.strip().splitlines()[-1].startswith("This result can't be re-created: ")
    found = json.loads(tapeline("audit", "runs/good", "--no-verify", "--json")[1])
    assert found["verdict"] == "nothing"


def test_two_configurations_are_compared(tapeline):
    for seed in range(4):
        first = new_record(f"seed={seed}", name=f"a{seed}")
        second = new_record(f"seed={seed}", "training.batch=8", name=f"b{seed}")
        write_run(Path(f"a/{seed}"), first, mse=0.5 + 0.1 * seed)
        write_run(Path(f"b/{seed}"), second, mse=0.4 + 0.1 * seed + 0.001 * (seed % 2))
    code, _, err = tapeline("compare", "a", "b")
    assert code == 0
    assert "validation.loss: b differs from a by -0.0995 ± " in err
    assert "that is more than seeds do" in err
    code, out, err = tapeline("compare", "a", "b/0", "--json")
    found = json.loads(out)
    assert (code, found["how"], found["exceeds_noise"]) == (1, "one run", False)
    code, _, err = tapeline("compare", "a/0", "b/0")
    assert code == 2
    assert "expected two seeds or more of one side" in err
    code, _, err = tapeline("compare", "a", "b/0")
    assert "of each would tell such a difference" in err


def test_seeds_are_trained_and_one_is_run_again(tapeline):
    assert tapeline("ingest", "--synthetic", 2, "--out", "market")[0] == 0
    Path("run.toml").write_text(
        'name = "x"\n[data]\nstore = "market"\n[training]\nsteps = 4\nbatch = 16\n'
    )
    code, out, err = tapeline("replicate", "run.toml", "--seeds", 2)
    assert code == 0, err
    assert "validation.loss over 2 seeds: " in err
    assert "holds a next run with a chance of 33 % only" in err
    found = json.loads(tapeline("replicate", "run.toml", "--seeds", 2, "--json")[1])
    assert list(found["by_seed"]) == ["0", "1"]
    _, out, _ = tapeline("runs", "list", "--json")
    assert {run["goodput"] for run in json.loads(out)} != {None}
    code, _, err = tapeline("replicate", "run.toml", "--seeds", 1)
    assert (code, "--seeds: expected two or more, found 1" in err) == (2, True)
    found = json.loads(tapeline("audit", "runs/x-seeds/seed-0", "--json")[1])
    assert "this machine" not in {one["what"] for one in found["obstacles"]}


@pytest.mark.parametrize(
    "verb", ["runs list", "runs diff", "audit", "rerun", "replicate", "compare"]
)
def test_every_verb_shows_an_example(tapeline, verb):
    code, out, _ = tapeline(*verb.split(), "--help")
    assert (code, "Example: tapeline" in " ".join(out.split())) == (0, True)
