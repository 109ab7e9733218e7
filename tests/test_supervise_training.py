"""Real runs under supervision: the bits of an undisturbed one, through losses, stops and chaos."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers_ranks import Command

from tapeline.cli.supervise import run_supervised
from tapeline.config import RunConfig
from tapeline.ledger import account_of
from tapeline.store import write_shards
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.processes import marked
from tapeline.supervise.supervisor import Rules
from tapeline.tape import synthetic_sessions

MODEL = '''
import os, signal
from pathlib import Path
import torch

class Struck(torch.nn.Module):
    """Does what it is told to before a step, once."""

    def __init__(self, num_inputs, folder, rank, step, number):
        super().__init__()
        self.part = torch.nn.Linear(num_inputs, 1)
        self.drop = torch.nn.Dropout(0.3)
        self.mark, self.when, self.calls = Path(folder) / "struck", (rank, step), 0
        self.number = number

    def forward(self, x):
        self.calls += self.training
        rank, step = self.when
        if self.calls == step and rank == int(os.environ.get("RANK", -1)):
            if not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), self.number)
        return self.part(self.drop(x))

def struck(num_inputs, **arguments):
    return Struck(num_inputs, **arguments)
'''
CONFIG = """
[data]
store = "store"
[model]
factory = "struck_model:struck"
arguments = {{ folder = "{folder}", rank = {rank}, step = 40, number = {number} }}
[training]
steps = 60
batch = 32
lanes = 4
[validation]
fraction = 0.0
[checkpoint]
every = 10
"""
FLOOR_S = 3.0


def prepare(folder, *, rank, number):
    write_shards(synthetic_sessions(2, rows=600), folder / "store", "mmap")
    (folder / "struck_model.py").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, rank=rank, number=number))


def undisturbed(folder):
    return Command(
        1, "train", folder / "run.toml", "--out", folder / "whole", "--json", folder=folder
    )


@pytest.mark.parametrize(
    ("number", "how"), [(9, "killed"), (19, "hung")], ids=["SIGKILL", "SIGSTOP"]
)
def test_losing_one_of_four_goes_on_with_three_to_the_same_bits(tmp_path, number, how):
    prepare(tmp_path, rank=3, number=number)
    whole = undisturbed(tmp_path).done()
    run = tmp_path / "run"
    rules = Rules(
        health=f"test $TAPELINE_SLOT != 3 -o ! -e {tmp_path}/struck",
        hang=HangLimits(floor_s=FLOOR_S),
    )
    settings = RunConfig.load(tmp_path / "run.toml")
    outcome = run_supervised(
        settings, tmp_path / "run.toml", run, ["--json"], ranks="2:4", warm=True, rules=rules
    )
    assert outcome.exit_code == 0, outcome
    assert json.loads(outcome.output)["part_sha256"] == whole["part_sha256"]
    lives = [
        json.loads(line) for line in (run / "supervise/history.jsonl").read_text().splitlines()
    ]
    assert [(n["how"], n["ranks"], n["first"]) for n in lives] == [
        (how, 4, [3]),
        ("finished", 3, []),
    ]
    assert not marked(run)
    account = account_of(run)  # closes, or is an error
    assert account.job.lost_ns["redone"] > 0
    if how == "hung":  # the whole wait is detection, and no step was done after it
        struck = account.ranks[3].lives[0]
        assert struck.step == 39
        assert struck.detection_ns >= FLOOR_S * 1e9


def test_a_wrong_configuration_ends_with_its_sentence(tmp_path):
    prepare(tmp_path, rank=0, number=9)
    argv = (
        "supervise",
        tmp_path / "run.toml",
        "--out",
        tmp_path / "run",
        "--ranks",
        "1:1",
        "--warm",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tapeline", *map(str, argv), "--set", "data.target=nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 70
    lines = done.stderr.splitlines()
    assert "ended after 3 attempts: 3 attempts in a row saved no new step" in done.stderr
    assert "nothing" in lines[-1] and lines[-1].startswith("tapeline: ")
    assert "Traceback" not in done.stderr


def test_a_run_that_met_its_criteria_to_stop_is_not_started_again(tmp_path):
    prepare(tmp_path, rank=0, number=0)
    file, run = tmp_path / "run.toml", tmp_path / "run"
    command = [sys.executable, "-m", "tapeline", "supervise", str(file), "--out", str(run)]
    done = subprocess.run(
        [*command, "--ranks", "2", "--set", "stop.target=[20, 0]"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "tapeline: ended after 1 attempts: stopped by its own criteria: target missed: at step 20 "
    )
    (life,) = [
        json.loads(line) for line in (run / "supervise/history.jsonl").read_text().splitlines()
    ]
    assert (life["how"], life["first"]) == ("stopped", [])
