"""Real runs under supervision: the bits of an undisturbed one, through losses, stops and chaos."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers_struck import prepare, undisturbed

from tapeline.cli.supervise import run_supervised
from tapeline.config import RunConfig
from tapeline.files import read_journal
from tapeline.ledger import account_of, read_attempts
from tapeline.run import start
from tapeline.supervise.job import Rules
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.processes import marked, published
from tapeline.supervise.stragglers import SlowLimits

FLOOR_S = 3.0


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
    lives = read_journal(run / "supervise/history.jsonl")
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


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (
            "data.target=nothing",
            "tapeline: .*: expected one of its 41 columns .* found `nothing`. .*",
        ),
        ("training.batch=64", "tapeline: {run}: expected settings that leave .*batch=64. .*"),
    ],
    ids=["of a new run", "of one that goes on"],
)
def test_a_wrong_configuration_ends_at_once_with_its_sentence(tmp_path, tapeline, mistake, told):
    prepare(tmp_path, rank=0, number=0)
    run, config = tmp_path / "run", tmp_path / "run.toml"
    goes_on = mistake.startswith("training")
    if goes_on:
        start(RunConfig.load(config, ["training.steps=1"]), run)
    argv = ("supervise", run if goes_on else config, "--out", run, "--ranks", "2", "--warm")
    code, out, err = tapeline(*argv, "--set", mistake)
    assert (code, out) == (2, "")
    assert re.fullmatch(told.format(run=run) + "\n", err), err
    (life,) = read_journal(run / "supervise/history.jsonl")
    assert life["how"] == "refused"
    assert not (run / "supervise/quarantine.json").exists()


def test_on_a_full_disk_the_supervisor_says_so(tmp_path):
    prepare(tmp_path, rank=0, number=0)
    command = f"{sys.executable} -m tapeline supervise {tmp_path}/run.toml --out {tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; {command}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tapeline: {tmp_path}/run: expected room and permission for a supervisor's notes, found "
        "File too large. Make room, and start the same command again: it goes on from the newest "
        "checkpoint.\n"
    )


def test_told_to_stop_while_no_place_is_fit_it_says_once_what_it_waits_for(tmp_path):
    prepare(tmp_path, rank=0, number=0)
    argv = ("supervise", tmp_path / "run.toml", "--out", tmp_path / "run", "--health", "false")
    command = [sys.executable, "-m", "tapeline", *map(str, argv)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stderr.readline() == (
            "tapeline: 0 of 1 places are fit by --health: waits until there are enough\n"
        )
        time.sleep(1.5)  # in which it looks again
        supervisor.terminate()
        said = supervisor.stderr.read()
    assert said == "tapeline: ended after 0 attempts: told to stop\n"
    assert supervisor.returncode == 75


def test_a_run_that_met_its_criteria_to_stop_is_not_started_again(tmp_path, tapeline):
    prepare(tmp_path, rank=0, number=0)
    file, run = tmp_path / "run.toml", tmp_path / "run"
    code, _, err = tapeline(
        "supervise", file, "--out", run, "--ranks", 2, "--set", "stop.target=[20, 0]"
    )
    assert code == 1, err
    assert err.splitlines()[-1].startswith(
        "tapeline: ended after 1 attempt: stopped by its own criteria: target missed: at step 20 "
    )
    (life,) = [
        json.loads(line) for line in (run / "supervise/history.jsonl").read_text().splitlines()
    ]
    assert (life["how"], life["first"]) == ("stopped", [])
    code, _, err = tapeline("supervise", run, "--out", tmp_path / "other")
    assert code == 2
    assert err == (
        f"tapeline: --out: expected {run}, the folder of the run that is gone on with, found "
        f"{tmp_path}/other. Leave it out, or give a TOML file to begin another run.\n"
    )


SLOW_MODEL = '''
import os, time
import torch

class Device(torch.nn.Module):
    """Under a supervisor, takes as long as a device would, without a load on the machine."""

    def __init__(self, num_inputs):
        super().__init__()
        self.part = torch.nn.Linear(num_inputs, 1)

    def forward(self, x):
        if "TAPELINE_ATTEMPT" in os.environ:
            time.sleep(0.01)
        return self.part(x)
'''


def slow_down(run, rank):
    """Stop a rank of the first attempt for most of the time, until a place is in quarantine."""
    rank_file = run / f"supervise/attempt-0001/rank-{rank}.json"
    while not (run / f"heartbeat/rank-{rank}").exists() or read_attempts(run) == []:
        time.sleep(0.05)
    process = psutil.Process(published(rank_file)["pid"])
    with contextlib.suppress(psutil.NoSuchProcess):
        while not (run / "supervise/quarantine.json").exists():
            process.suspend()
            time.sleep(0.19)
            process.resume()
            time.sleep(0.01)


def test_a_rank_that_is_slowed_down_is_found_by_its_own_work_and_left_out(tmp_path):
    prepare(tmp_path, rank=0, number=9)
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    config = (tmp_path / "run.toml").read_text()
    before, after = config.split("[model]")[0], config.split("[training]")[1]
    config = f'{before}[model]\nfactory = "slow_model:Device"\n[training]{after}'
    (tmp_path / "run.toml").write_text(config.replace("steps = 60", "steps = 150"))
    whole = undisturbed(tmp_path).done()
    run = tmp_path / "run"
    rules = Rules(slow=SlowLimits(persistent=4, num_windows=5), evict=True)
    settings = RunConfig.load(tmp_path / "run.toml")
    with ThreadPoolExecutor() as pool:
        slowing = pool.submit(slow_down, run, 2)
        outcome = run_supervised(
            settings, tmp_path / "run.toml", run, ["--json"], ranks="3:4", warm=True, rules=rules
        )
        slowing.result()
    assert outcome.exit_code == 0, outcome
    assert json.loads(outcome.output)["part_sha256"] == whole["part_sha256"]
    lives = read_journal(run / "supervise/history.jsonl")
    assert [(n["how"], n["slots"], n["planned"]) for n in lives] == [
        ("preempted", [0, 1, 2, 3], True),
        ("finished", [0, 1, 3], False),
    ]
    ((place, kept),) = json.loads((run / "supervise/quarantine.json").read_text()).items()
    assert place.endswith(":2")
    assert "rank 2 is slow in" in kept["reason"] and "times the best rank's" in kept["reason"]
