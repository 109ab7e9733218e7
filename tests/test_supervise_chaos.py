"""Twenty faults by a seeded schedule: nothing lost, nobody left, the same end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_supervise import ended, plan, state_after

from tapeline.supervise.chaos import KINDS, Chaos, schedule
from tapeline.supervise.processes import marked

STEPS = 1500


def test_a_schedule_is_its_seeds_and_has_every_kind():
    assert schedule(20, 60, 1) == schedule(20, 60, 1) != schedule(20, 60, 2)
    strikes = schedule(2000, 60, 1)
    assert {kind: sum(s.kind == kind for s in strikes) for kind in KINDS} == dict.fromkeys(
        KINDS, 400
    )
    assert sum(s.after_s for s in strikes) / 2000 == pytest.approx(60, rel=0.1)
    assert {s.kind for s in schedule(9, 1, 0, ("kill", "stop"))} == {"kill", "stop"}


def test_twenty_faults_change_nothing(tmp_path):
    plan(tmp_path)
    run = tmp_path / "run"
    helper = Path(__file__).with_name("helpers_supervise.py")
    command = [sys.executable, str(helper), str(tmp_path), "2", str(STEPS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    chaos = Chaos(run, lambda _: None)
    for strike in schedule(20, 0.05, 4):
        wait_until_trained(chaos, process)
        time.sleep(min(strike.after_s, 0.2))
        assert chaos.strike(strike)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert json.loads(output)["state"] == state_after(STEPS)
    assert not marked(run)
    lives = ended(tmp_path)
    assert lives[-1]["how"] == "finished"
    hung = sum(strike.kind == "stop" for _, strike in chaos.done)
    assert sum(life["how"] == "hung" for life in lives) == hung
    assert len(lives) == 1 + sum(strike.kind != "slow" for _, strike in chaos.done)


def wait_until_trained(chaos, process):
    deadline = time.monotonic() + 60
    while not chaos.ready():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
