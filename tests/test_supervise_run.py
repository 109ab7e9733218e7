"""Supervision with real processes: kills, stops, crashes and losses, without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers_supervise import ended, plan, state_after, supervisor

from tapeline.clock import utc
from tapeline.files import read_journal
from tapeline.ledger import read_attempts, read_heartbeat
from tapeline.supervise.history import History
from tapeline.supervise.launch import Torchrun
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.policy import Policy
from tapeline.supervise.processes import marked
from tapeline.supervise.quarantine import Rule


def test_a_killed_rank_is_replaced_and_nothing_is_lost(tmp_path):
    plan(tmp_path, (1, 1, 25, "SIGKILL"), (2, 0, 37, "SIGKILL"))
    outcome = supervisor(tmp_path, "2").supervise()
    assert (outcome.exit_code, outcome.reason) == (0, "finished")
    assert json.loads(outcome.output) == {"state": state_after(60), "ranks": 2}
    assert outcome.said == ("all steps done",)
    lives = ended(tmp_path)
    assert [(life["how"], life["first"]) for life in lives] == [
        ("killed", [1]),
        ("killed", [0]),
        ("finished", []),
    ]
    assert [life["committed"] for life in lives] == [20, 30, 60]
    assert "rank 1 was ended by SIGKILL, after step 25, in compute" in lives[0]["evidence"]
    assert not marked(tmp_path / "run")
    attempts = read_attempts(tmp_path / "run")
    assert [a.how for a in attempts] == ["killed", "killed", "finished"]
    assert all(a.ended_wall_ns for a in attempts)


def test_torchrun_starts_the_ranks_and_none_outlives_it(tmp_path):
    plan(tmp_path, (1, 1, 25, "SIGKILL"))
    run = tmp_path / "run"
    outcome = supervisor(tmp_path, "2", engine=Torchrun(run)).supervise()
    assert outcome.exit_code == 0, outcome
    assert json.loads(outcome.output)["state"] == state_after(60)
    assert [life["how"] for life in ended(tmp_path)] == ["killed", "finished"]
    assert not marked(run)


def test_who_raised_was_not_killed_though_torchrun_kills_the_others(tmp_path):
    plan(tmp_path, (1, 0, 0, "mortal"), (1, 1, 25, "raise"))
    supervisor(tmp_path, "2", engine=Torchrun(tmp_path / "run")).supervise()
    assert [(life["how"], life["first"]) for life in ended(tmp_path)] == [
        ("failed", [1]),
        ("finished", []),
    ]
    assert [a.how for a in read_attempts(tmp_path / "run")] == ["failed", "finished"]


def test_the_record_says_who_failed_first_and_not_what_rank_0_saw_of_it(tmp_path):
    for said, elsewhere, after, expected in (
        ("failed", True, 0, ("killed", "rank 1 was ended by SIGKILL", "then")),
        ("failed", False, 0, ("failed", "reset by peer", "then")),
        ("failed", True, 1, ("failed", "reset by peer", "then")),  # the attempt began no life
        ("preempted", True, 0, ("preempted", "reset by peer", "then")),
        (None, True, 0, ("killed", "rank 1 was ended by SIGKILL", utc(9))),
    ):
        lines = [{"attempt": 1, "from_step": 0}]
        if said:
            lines.append({"attempt": 1, "how": said, "evidence": "reset by peer", "ended": "then"})
        path = tmp_path / "attempts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        History(tmp_path).note_end(
            after=after,
            how="killed",
            step=3,
            evidence="rank 1 was ended by SIGKILL",
            wall_ns=9,
            elsewhere=elsewhere,
        )
        life = {}
        for line in read_journal(path):
            life |= line
        assert (life["how"], life["evidence"], life["ended"]) == expected


def test_a_stopped_rank_is_found_by_its_silence_and_its_stacks_are_kept(tmp_path):
    plan(tmp_path, (1, 1, 25, "SIGSTOP"))
    said: list[str] = []
    outcome = supervisor(tmp_path, "2", said=said).supervise()
    assert outcome.exit_code == 0
    assert re.search(
        r": (rank [01] makes|ranks 0, 1 make) no progress for \S+ s in \w+, the limit learned from "
        "the run$",
        said[0],
    )
    assert json.loads(outcome.output)["state"] == state_after(60)
    assert [(life["how"], life["first"]) for life in ended(tmp_path)] == [
        ("hung", [1]),
        ("finished", []),
    ]
    kept = tmp_path / "run/supervise/attempt-0001"
    hang = json.loads((kept / "hang.json").read_text())
    assert hang["verdict"]["ranks"] == [1]
    assert {rank["rank"]: rank["state"] for rank in hang["ranks"]}[1] == "T"
    for rank in (0, 1):  # the one that waits, and the one that was stopped
        assert 'trainer.py", line' in (kept / f"stacks-{rank}.txt").read_text()
    assert "wait_for_all" in (kept / "stacks-0.txt").read_text()


def test_a_hang_in_the_first_step_is_found_within_what_its_configuration_allows(tmp_path):
    plan(tmp_path, (1, 0, 0, "SIGSTOP"))
    said: list[str] = []
    hang = HangLimits(floor_s=30.0, unlearned_s=1.0, slow_unlearned_s=20.0)
    assert supervisor(tmp_path, "1", said=said, hang=hang).supervise().exit_code == 0
    assert said[0].endswith(
        "rank 0 makes no progress for 1 s in compute, the limit by supervision.first_steps_s"
    )
    assert [life["how"] for life in ended(tmp_path)] == ["hung", "finished"]


def test_an_alert_that_hangs_delays_no_restart(tmp_path):
    plan(tmp_path, (1, 0, 25, "SIGKILL"))
    waits = f"while ! [ -e {tmp_path}/run/.attempt-2 ]; do sleep 0.02; done; touch {tmp_path}/told"
    said: list[str] = []
    outcome = supervisor(tmp_path, "1", said=said, alert=waits).supervise()
    assert outcome.exit_code == 0
    assert (tmp_path / "told").exists()  # though it was after the restart that it waited for
    assert not [text for text in said if "failed:" in text]


def test_what_has_trained_is_not_refused_any_more_but_failed(tmp_path):
    plan(tmp_path, (1, 1, 5, "refuse"))
    assert supervisor(tmp_path, "2").supervise().exit_code == 0
    assert [life["how"] for life in ended(tmp_path)] == ["failed", "finished"]


def test_a_crash_loop_ends_with_the_first_ranks_words(tmp_path):
    plan(tmp_path, (0, 2, 5, "raise"))
    said: list[str] = []
    outcome = supervisor(tmp_path, "3", said=said).supervise()
    assert (outcome.exit_code, outcome.attempts) == (70, 3)
    assert outcome.reason == "3 attempts in a row saved no new step"
    assert outcome.said[0].startswith(
        "rank 2 raised ValueError: the loss of step 5 is no number, after step 5, in compute"
    )
    assert outcome.said[-1] == "ValueError: the loss of step 5 is no number"
    assert sum(line.startswith("Traceback") for line in outcome.said) == 1
    assert said[-1].endswith("given up, 3 attempts in a row saved no new step")
    assert {life["how"] for life in ended(tmp_path)} == {"failed"}
    # The budget is of the run, not of a supervisor.
    again = supervisor(
        tmp_path, "3", policy=Policy(max_restarts=3, max_idle=9, base_s=0)
    ).supervise()
    assert (again.reason, again.attempts) == ("all 3 restarts are used", 4)


def test_a_lost_place_is_left_out_and_taken_back_at_a_saved_step(tmp_path):
    plan(tmp_path, (1, 3, 15, "lose slot"))
    lost = tmp_path / "lost"
    said: list[str] = []
    watched = supervisor(
        tmp_path, "2:4", 900, said=said, health=f"test $TAPELINE_SLOT != 3 -o ! -e {lost}"
    )
    watched.stepped = lambda step: lost.unlink(missing_ok=True) if step > 100 else None
    outcome = watched.supervise()
    assert outcome.exit_code == 0
    assert json.loads(outcome.output) == {"state": state_after(900), "ranks": 4}
    lives = ended(tmp_path)
    assert [(life["how"], life["ranks"], life["planned"]) for life in lives] == [
        ("killed", 4, False),
        ("preempted", 3, True),
        ("finished", 4, False),
    ]
    assert any("goes on with 3 ranks instead of 4, the global batch as it was" in s for s in said)
    assert any("goes on with 4 ranks instead of 3" in s for s in said)


def test_a_place_that_fails_again_and_again_is_put_in_quarantine(tmp_path):
    plan(tmp_path, (1, 2, 15, "SIGKILL"), (2, 2, 25, "SIGKILL"))
    outcome = supervisor(tmp_path, "2:3", quarantine=Rule(failures=2)).supervise()
    assert json.loads(outcome.output) == {"state": state_after(60), "ranks": 2}
    (place,) = json.loads((tmp_path / "run/supervise/quarantine.json").read_text()).items()
    assert place[0].endswith(":2")
    assert place[1]["reason"].startswith("rank 2 was ended by SIGKILL")


def test_record_only_ends_nothing_and_starts_nothing(tmp_path):
    plan(tmp_path, (1, 1, 25, "raise"))
    outcome = supervisor(tmp_path, "2", policy=Policy(record_only=True)).supervise()
    assert (outcome.exit_code, outcome.reason, outcome.attempts) == (70, "only recording", 1)


@pytest.fixture
def apart(tmp_path):
    """A supervisor as a process of its own."""
    plan(tmp_path)
    helper = Path(__file__).with_name("helpers_supervise.py")
    command = [sys.executable, str(helper), str(tmp_path), "2", "20000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    heart = tmp_path / "run/heartbeat/rank-1"
    _until(lambda: (beat := read_heartbeat(heart)) is not None and beat.step > 20)
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def test_sigterm_of_the_parent_saves_everywhere_and_ends(apart, tmp_path):
    apart.send_signal(signal.SIGTERM)
    assert apart.wait(60) == 75
    (life,) = ended(tmp_path)
    assert life["how"] == "preempted"
    assert life["committed"] > 20
    assert not marked(tmp_path / "run")


def test_a_killed_parent_leaves_no_orphan(apart, tmp_path):
    assert len(marked(tmp_path / "run")) == 3  # the standby and two ranks
    apart.kill()
    _until(lambda: not marked(tmp_path / "run"))


def test_an_orphan_is_ended_before_the_next_attempt(tmp_path):
    plan(tmp_path)
    run = tmp_path / "run"
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "TAPELINE_SUPERVISED": str(run)},
        start_new_session=True,
    )
    assert supervisor(tmp_path, "1", 10).supervise().exit_code == 0
    assert orphan.wait(10) == -signal.SIGKILL


def test_a_run_has_one_supervisor(apart, tmp_path):
    with pytest.raises(ValueError, match="found one that is supervised now"):
        supervisor(tmp_path, "2").supervise()
    assert psutil.pid_exists(apart.pid)
    assert len(marked(tmp_path / "run")) == 3


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
