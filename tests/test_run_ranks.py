"""A run on several ranks: the same bits at any number of them, through kills, stops and moves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_ranks import Command

from tapeline.checkpoint import Shelf
from tapeline.clock import FakeClock
from tapeline.runs import RunFolder
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

MODEL = '''
import time
import torch

class Slow(torch.nn.Module):
    """A step takes long enough to be met in the middle of a run."""

    def forward(self, x):
        time.sleep(0.002)
        return x

def noisy(num_inputs):
    """Dropout draws, batch normalisation has buffers: both depend on the lane, not on the rank."""
    return torch.nn.Sequential(
        Slow(),
        torch.nn.Linear(num_inputs, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )

def ranked(num_inputs):
    """A forward pass that changes a weight by the rank, which no gradient shows."""
    import os
    model = noisy(num_inputs)

    def shift(module, _):
        with torch.no_grad():
            module.bias += 1e-3 * int(os.environ["RANK"])

    model[-1].register_forward_pre_hook(shift)
    return model
'''
CONFIG = """
[data]
store = "store"
[model]
factory = "noisy_model:noisy"
[training]
steps = 42
batch = 32
lanes = 8
optimizer = "adamw"
schedule = "cosine"
warmup_steps = 5
clip_norm = 1.0
[validation]
every = 20
fraction = 0.5
[checkpoint]
every = 7
keep = 2
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_shards(synthetic_sessions(3, rows=1500), folder / "store", "mmap")
    (folder / "noisy_model.py").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG)
    return folder


def train(workplace: Path, world_size: int, run: Path, *overrides: str) -> Command:
    settings = [word for override in overrides for word in ("--set", override)]
    file = workplace / "run.toml"
    argv = ("train", file, "--out", run, "--json", *settings)
    return Command(world_size, *argv, folder=workplace)


def resume(workplace: Path, world_size: int, run: Path) -> Command:
    return Command(world_size, "resume", run, "--json", folder=workplace)


def result_of(run: Path, printed: dict) -> dict:
    """Everything that must be equal, whatever the ranks did."""
    folder = RunFolder(run, FakeClock())
    return {
        "parts": printed["part_sha256"],
        "losses": folder.losses(),
        "validations": folder.validations(),
    }


def saved(run: Path, step: int):
    return lambda: any(found >= step for found in Shelf(run / "checkpoints").steps())


@pytest.fixture(scope="module")
def whole(workplace) -> dict:
    """The run that one process did without a stop."""
    run = workplace / "whole"
    return result_of(run, train(workplace, 1, run).done())


def test_another_number_of_ranks_does_the_same_run(workplace, whole):
    run, world_size = workplace / "on-3", 3
    assert result_of(run, train(workplace, world_size, run).done()) == whole
    record = json.loads((run / "run.json").read_text())
    assert record["contract"]["text"] == (
        "bit-exact across world sizes 1–8 on this platform and version"
    )
    assert record["determinism"]["threads"] == 1
    manifest = Shelf(run / "checkpoints").manifest(42)
    assert manifest.metadata["contract"] == record["contract"]
    assert manifest.metadata["world_size"] == world_size


def test_a_run_killed_and_moved_between_numbers_of_ranks_is_the_same_run(workplace, whole):
    run = workplace / "moved"
    life = train(workplace, 4, run)
    life.when(saved(run, 7))
    life.signal(signal.SIGKILL)
    life = resume(workplace, 3, run)
    life.when(saved(run, 14))
    life.signal(signal.SIGKILL, 2)  # one alone: the others must notice, and end in words
    assert life.wait() == [2, 2, -signal.SIGKILL]
    for rank in (0, 1):
        assert f"rank {rank} of 3: expected an answer from every other rank, " in life.told(rank)
        assert "Traceback" not in life.told(rank)
    life = resume(workplace, 1, run)
    life.when(saved(run, 28))
    life.signal(signal.SIGKILL)
    assert result_of(run, resume(workplace, 2, run).done()) == whole
    lives = RunFolder(run, FakeClock()).attempts()
    assert [one["world_size"] for one in lives] == [4, 3, 1, 2]
    assert [one["how"] for one in lives] == ["killed", "failed", "killed", "finished"]
    assert all(one["from_step"] >= 7 * n for n, one in enumerate(lives))


def test_a_notice_to_one_rank_stops_all_between_the_same_two_steps(workplace, whole):
    run = workplace / "stopped"
    life = train(workplace, 3, run)
    life.when(saved(run, 14))
    life.signal(signal.SIGTERM, 1)
    assert life.wait() == [75, 75, 75]
    assert "preempted by a notice to another rank; saved at step" in life.told(0)
    assert "preempted by SIGTERM; saved at step" in life.told(1)
    steps = {life.told(rank).split("saved at step ")[1].split(".")[0] for rank in range(3)}
    (ended,) = RunFolder(run, FakeClock()).attempts()
    assert steps == {str(ended["step"])}
    assert ended["how"] == "preempted"
    assert ended["step"] in Shelf(run / "checkpoints").steps()
    assert result_of(run, resume(workplace, 2, run).done()) == whole


def test_torchrun_does_the_same_run(workplace, whole):
    run = workplace / "torchrun"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    tapeline = ("-m", "tapeline", "train", workplace / "run.toml", "--out", run, "--json")
    done = subprocess.run(
        [sys.executable, *launcher, *tapeline],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert result_of(run, json.loads(done.stdout)) == whole


def test_more_ranks_than_lanes_are_refused_before_anything_is_written(workplace):
    run = workplace / "too-many"
    life = train(workplace, 3, run, "training.lanes=2")
    assert life.wait() == [2, 2, 2]
    assert life.told(0) == (
        "tapeline: training.lanes: expected at least 3, one for each rank, found 2. Start fewer "
        "ranks, or another run with more lanes: they decide its bits.\n"
    )
    assert not run.exists()


def test_what_rank_0_cannot_begin_ends_every_rank_in_the_same_words(workplace, whole):
    life = train(workplace, 2, workplace / "whole")
    assert life.wait() == [2, 2]
    assert "expected a place for a new run, found files already there" in life.told(1)
    assert life.told(0) == life.told(1)


def test_ranks_that_part_are_noticed(workplace):
    life = train(workplace, 2, workplace / "parted", "model.factory=noisy_model:ranked")
    assert life.wait() == [2, 2]
    wanted = "rank 1 of 2: expected the same bits as on rank 0 after the last step, found others in"
    assert wanted in life.told(0)
    (ended,) = RunFolder(workplace / "parted", FakeClock()).attempts()
    assert ended["how"] == "failed"


# DDP and FSDP2: exact at one number of ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_fast_paths_repeat_at_an_unchanged_number_of_ranks_and_say_what_another_does(
    workplace, strategy
):
    settings = (f"training.strategy={strategy}", "training.lanes=1")
    run, again, moved = (workplace / f"{strategy}-{name}" for name in ("whole", "again", "moved"))
    first = result_of(run, train(workplace, 2, run, *settings).done())
    life = train(workplace, 2, again, *settings)
    life.when(saved(again, 14))
    life.signal(signal.SIGKILL)
    shutil.copytree(again, moved)
    life = resume(workplace, 2, again)
    assert result_of(again, life.done()) == first
    assert "contract" not in life.told(0)

    life = resume(workplace, 1, moved)
    text = life.done()["contract"]
    assert text.startswith("statistical from step ")
    assert text.endswith(": ranks 2 → 1")
    assert "This run no longer keeps its contract" in life.told(0)
    assert Shelf(moved / "checkpoints").manifest(42).metadata["contract"]["text"] == text
    record = json.loads((moved / "run.json").read_text())
    assert record["contract"]["text"].startswith("bit-exact at this world size, 2 ranks")
