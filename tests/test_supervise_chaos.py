"""Twenty faults by a seeded schedule: nothing lost, nobody left, the same end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers_supervise import ended, plan, state_after
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import FakeClock
from tapeline.ledger import Ledger
from tapeline.reliability import efficiency
from tapeline.supervise.chaos import KINDS, Chaos, schedule
from tapeline.supervise.processes import marked
from tapeline.supervise.trial import compare

STEPS = 1500
S = 1_000_000_000


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
    for strike in schedule(20, 0.05, 8):
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
    assert len(lives) == 1 + len({at for at, strike in chaos.done if strike.kind != "slow"})


def wait_until_trained(chaos, process):
    deadline = time.monotonic() + 60
    while not chaos.ready():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)


def test_a_run_under_chaos_is_compared_with_itself_in_peace(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step in (10, 20, 30):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").touch()
    clock = FakeClock()
    for begin, end in ((0, 20), (10, 30)):
        ledger = Ledger(tmp_path, from_step=begin, clock=clock)
        clock.advance(S)  # starting
        for step in range(begin + 1, end + 1):
            ledger.switch("compute")
            clock.advance(S)
            ledger.step_done(step)
            if step % 10 == 0:
                with ledger.span("checkpoint"):
                    clock.advance(S)
        ledger.close()
    one, other = ({"part_sha256": {"model": m, "step": "s"}} for m in "ab")
    trial = compare(tmp_path, one, other, 1)
    assert (trial.strikes, trial.parted) == (1, ("model",))
    assert trial.goodput == pytest.approx(30 / 46)
    # Of 46 s, 11 are lost to steps done again with their save, one to the restart.
    going_s = 46 - 12 - 3
    carried = efficiency(going_s / 3, blocking_s=1.0, mtbf_s=45.0) * 45 / 46
    assert trial.predicted == pytest.approx(carried * 30 / going_s)


@pytest.mark.parametrize(
    ("option", "value", "least"), [("--mtbf", "0", "0.1"), ("--minutes", "-1", "0.1")]
)
def test_a_schedule_that_is_none_is_refused(option, value, least):
    done = CliRunner().invoke(app, ["chaos", "run.toml", "--out", "chaos", option, value])
    assert done.exit_code == 2
    assert f"greater than or equal to {least}" in " ".join(done.output.replace("│", "").split())


def test_a_killed_chaos_leaves_no_supervisor(tmp_path):
    note = tmp_path / "pid"
    inner = f"import os, time; open({str(note)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(600)"
    outer = (
        "import sys; from pathlib import Path; from tapeline.supervise.trial import under_chaos; "
        f"under_chaos(Path({str(tmp_path)!r}), [sys.executable, '-c', {inner!r}], [], 0.0, print)"
    )
    process = subprocess.Popen([sys.executable, "-c", outer])
    until(lambda: note.exists() and note.read_text().endswith("."))
    supervisor = psutil.Process(int(note.read_text()[:-1]))
    process.kill()
    process.wait()
    until(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
