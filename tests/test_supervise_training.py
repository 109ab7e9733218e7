"""Real runs under supervision: the bits of an undisturbed one, through losses, stops and chaos."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers_struck import prepare, undisturbed

from tapeline.cli.supervise import run_supervised
from tapeline.config import RunConfig
from tapeline.ledger import account_of
from tapeline.supervise.job import Rules
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.processes import marked

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
