"""What a supervisor decides by: policy, quarantine, numbers of ranks, limits, alerts."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import FakeClock
from tapeline.config import TrainingConfig
from tapeline.errors import RunError
from tapeline.ledger import Heartbeat, heartbeat_path
from tapeline.ledger.phases import INDEX
from tapeline.supervise.alerts import Alerts, write_gauges
from tapeline.supervise.elastic import Ranks, change_text, choose
from tapeline.supervise.launch import Launch
from tapeline.supervise.monitor import HangLimits, Monitor
from tapeline.supervise.nodes import Share
from tapeline.supervise.policy import Ended, Policy, decide, num_idle
from tapeline.supervise.processes import publish
from tapeline.supervise.quarantine import (
    FILE,
    Quarantine,
    Rule,
    kubernetes_affinity,
    slurm_exclude,
)

S = 1_000_000_000


def history(*committed, gap_s=1000):
    return [
        Ended("failed", (n * gap_s) * S, (n * gap_s + 1) * S, step)
        for n, step in enumerate(committed, 1)
    ]


# Policy


def test_a_failure_after_progress_restarts_at_once():
    action = decide(history(10, 20, 30), Policy())
    assert (action.restart, action.delay_s, action.alert) == (True, 0.0, False)
    assert action.reason == "restart 3 of 100"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    ("how", "reason", "code"),
    [
        ("finished", "finished", 0),
        ("stopped", "stopped by its own criteria", 1),
        ("refused", "refused as it was asked for", 2),
    ],
)
def test_a_run_that_is_over_is_over_whatever_the_supervisor_was_told(how, reason, code, told):
    (*_, last) = lives = history(10, 20)
    action = decide([*lives[:-1], dataclasses.replace(last, how=how)], Policy(), told=told)
    assert (action.restart, action.reason, action.exit_code) == (False, reason, code)


def test_told_to_stop_it_ends_with_the_code_for_starting_it_again():
    for lives in (history(10, 20), history(10, 10, 10, 10)):
        action = decide(lives, Policy(), told=True)
        assert (action.restart, action.reason, action.exit_code) == (False, "told to stop", 75)


def test_failures_without_progress_wait_longer_and_end():
    policy = Policy(max_idle=9, base_s=1.0, longest_s=5.0)
    delays = [decide(history(10, *[10] * n), policy).delay_s for n in range(8)]
    assert delays[:2] == [0.0, 0.0]
    for delay, least in zip(delays[2:], (1, 2, 4, 5, 5, 5), strict=True):
        assert least <= delay < 1.5 * least
    assert delays == [decide(history(10, *[10] * n), policy).delay_s for n in range(8)]
    other = Policy(max_idle=9, base_s=1.0, longest_s=5.0, seed=1)
    assert decide(history(10, 10, 10, 10), other).delay_s != delays[3]
    ended = decide(history(10, 10, 10, 10), Policy())
    assert (ended.restart, ended.exit_code, ended.alert) == (False, 70, True)
    assert ended.reason == "3 attempts in a row saved no new step"


def test_the_budget_counts_every_restart_of_the_run_but_planned_ones():
    lives = history(*range(10, 60, 10))
    assert decide(lives, Policy(max_restarts=5)).restart
    assert decide(lives, Policy(max_restarts=4)).reason == "all 4 restarts are used"
    planned = [*lives, Ended("preempted", 0, 0, 50, planned=True)]
    assert decide(planned, Policy(max_restarts=4)).restart
    refused = [Ended("refused", 0, 0, 0), *lives]
    assert decide(refused, Policy(max_restarts=5)).restart


def test_the_rate_of_restarts_is_worth_an_alert_and_not_their_number():
    policy = Policy(alert_restarts=3, alert_window_s=60)
    assert not decide(history(1, 2, 3, 4, gap_s=1000), policy).alert
    assert decide(history(1, 2, 3, 4, gap_s=10), policy).alert


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_a_run_ends_at_its_last_idle_attempt_and_at_none_before(committed, max_idle):
    policy = Policy(max_idle=max_idle)
    lives = history(*committed)
    idle = num_idle(lives)
    assert decide(lives, policy).restart == (idle < max_idle)
    best = max(committed)
    assert idle == len(committed) - (committed.index(best) + 1 if best else 0)


# Quarantine


def test_a_place_is_out_after_its_failures_and_on_probation_afterwards(tmp_path):
    path, rule = tmp_path / "q.json", Rule(failures=2, window_s=100, expiry_s=50, probation_s=200)
    places = Quarantine(path, rule)
    assert not places.failed("a:0", "first", 0)
    assert not places.failed("a:0", "much later", 101 * S)  # the first is out of the window
    assert places.failed("a:0", "soon after", 110 * S)
    places = Quarantine(path, rule)  # kept
    assert places.out(159 * S) == {"a:0": "soon after"}
    assert places.out(160 * S) == {}
    assert places.state(places.places()["a:0"], 161 * S) == "probation"
    assert places.failed("a:0", "again", 170 * S)  # one is enough, for twice as long
    assert places.out(269 * S) == {"a:0": "again"}
    assert places.out(270 * S) == {}
    assert places.state(places.places()["a:0"], 471 * S) == "watched"


def test_quarantine_in_the_words_of_schedulers():
    places = {"node2:0": "x", "node10:3": "y", "node2:1": "z"}
    assert slurm_exclude(places) == "node10,node2"
    (term,) = kubernetes_affinity(places)["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node10", "node2"]}
    ]
    assert (slurm_exclude({}), kubernetes_affinity({})) == ("", {})


def quarantine(*argv):
    return CliRunner().invoke(app, ["quarantine", *map(str, argv)])


def test_places_are_left_out_and_taken_back_by_hand(tmp_path):
    (tmp_path / "supervise").mkdir()
    kept = Quarantine(tmp_path / FILE, Rule())  # of a supervisor that runs meanwhile
    kept.failed("node1:0", "crashed", time.time_ns())
    added = quarantine("add", tmp_path, "node2:1", "--reason", "ECC errors", "--hours", "24")
    assert added.exit_code == 0 and added.stderr.startswith("node2:1 is left out until 20")
    kept.failed("node1:0", "crashed again", time.time_ns())
    assert kept.out(time.time_ns()) == {"node2:1": "ECC errors"}
    until_ns = kept.places()["node2:1"].until_ns
    assert 23 * 3600 * S < until_ns - time.time_ns() <= 24 * 3600 * S
    one, two = json.loads(quarantine("list", tmp_path, "--json").stdout)
    assert (one["place"], one["state"], one["until"], one["failures"]) == (
        "node1:0",
        "watched",
        None,
        2,
    )
    assert (two["place"], two["state"], two["reason"]) == ("node2:1", "out", "ECC errors")
    table = quarantine("list", tmp_path).stdout
    assert "node2:1" in table and "ECC errors" in table
    assert quarantine("list", tmp_path, "--slurm").stdout == "node2\n"
    assert "nodeAffinity" in json.loads(quarantine("list", tmp_path, "--kubernetes").stdout)
    assert quarantine("remove", tmp_path, "node2:1").exit_code == 0
    assert kept.out(time.time_ns()) == {}
    assert quarantine("list", tmp_path, "--slurm").stdout == "\n"


def test_places_of_another_name_and_runs_without_a_supervisor_are_refused(tmp_path):
    with pytest.raises(RunError, match="expected the folder of a run that was supervised, found"):
        raise quarantine("list", tmp_path).exception
    (tmp_path / "supervise").mkdir()
    with pytest.raises(RunError, match="expected host:slot, such as node7:0, found 'node7'"):
        raise quarantine("add", tmp_path, "node7", "--reason", "x").exception
    with pytest.raises(RunError, match="node7:0: expected a place, found none of that name"):
        raise quarantine("remove", tmp_path, "node7:0").exception
    Quarantine(tmp_path / FILE, Rule()).failed("node1:0", "x", 0)
    with pytest.raises(RunError, match="expected one of the places node1:0, found none of that"):
        raise quarantine("remove", tmp_path, "node7:0").exception


def test_another_file_is_refused(tmp_path):
    (tmp_path / "q.json").write_text("[1]")
    with pytest.raises(RunError, match="remove it to lift every quarantine"):
        Quarantine(tmp_path / "q.json", Rule())


# Numbers of ranks


def test_ranks_as_asked_for():
    assert (Ranks.parse("4"), Ranks.parse("2:4")) == (Ranks(4, 4), Ranks(2, 4))
    for wrong in ("0", "4:2", "a", "2:", "-1"):
        with pytest.raises(RunError, match="expected a number from 1, or MIN:MAX"):
            Ranks.parse(wrong)


def test_as_many_as_are_there_and_as_the_configuration_allows():
    lanes = TrainingConfig(batch=64, lanes=4)
    assert choose([0, 1, 3], Ranks(2, 4), lanes) == [0, 1, 3]
    assert choose([0, 1, 2, 3, 4, 5], Ranks(1, 6), lanes) == [0, 1, 2, 3]
    ddp = TrainingConfig(batch=64, strategy="ddp")
    assert choose([0, 1, 3], Ranks(1, 4), ddp) == [0, 1]  # 3 don't divide 64
    assert choose([0], Ranks(2, 4), ddp) == []
    assert change_text(4, 3, lanes).endswith("the same bits, since 4 lanes fix every sum")
    assert "other bits, since ddp" in change_text(4, 2, ddp)


# Limits


def watched(tmp_path):
    publish(tmp_path / "rank-0.json", {"pid": 7})
    clock = FakeClock(S)
    monitor = Monitor(tmp_path, HangLimits(), clock)
    launch = Launch(tmp_path, tmp_path, Share(1), lambda: False)
    monitor.begin(launch, resumes=False)
    heart = Heartbeat(heartbeat_path(tmp_path, 0), 1, 0)
    heart._pid = 7
    return clock, monitor, launch, heart


def pass_time(clock, monitor, launch, seconds):
    for _ in range(round(seconds * 10)):
        clock.advance(S // 10)
        monitor.look(launch)


def test_limits_are_learned_by_phase(tmp_path):
    clock, monitor, launch, heart = watched(tmp_path)
    pass_time(clock, monitor, launch, 100)
    assert monitor.hung(launch) == []  # startup, as far as is known
    for step in range(20):
        heart.beat(step, INDEX["compute"], 0)
        pass_time(clock, monitor, launch, 60 if step == 0 else 3)
    assert monitor.allowed_s("compute") == pytest.approx(15, abs=1)  # not 300, for the first step
    heart.beat(20, INDEX["checkpoint"], 0)
    pass_time(clock, monitor, launch, 40)
    assert monitor.hung(launch) == []
    heart.beat(20, INDEX["compute"], 0)
    pass_time(clock, monitor, launch, 14)
    assert monitor.hung(launch) == []
    assert monitor.allowed_s("checkpoint") == pytest.approx(200, abs=1)
    heart.beat(20, INDEX["compute"], 10**9)  # the same step again is no progress
    pass_time(clock, monitor, launch, 3)
    assert monitor.hung(launch) == [0]


def test_how_long_a_start_may_take_is_learned_from_resumes(tmp_path):
    clock, monitor, launch, heart = watched(tmp_path)
    pass_time(clock, monitor, launch, 2)
    heart.beat(0, INDEX["startup"], 0)
    pass_time(clock, monitor, launch, 1)
    heart.beat(0, INDEX["compute"], 0)
    pass_time(clock, monitor, launch, 1)
    assert monitor.allowed_s("startup") == HangLimits().slow_unlearned_s
    heart._pid = 8
    publish(tmp_path / "rank-0.json", {"pid": 8})
    monitor.begin(launch, resumes=True)
    pass_time(clock, monitor, launch, 20)  # importing, hashing: nothing is heard
    heart.beat(1, INDEX["startup"], 0)
    pass_time(clock, monitor, launch, 1)
    assert monitor.allowed_s("startup") == pytest.approx(100, abs=1)


def test_time_in_which_nobody_watched_accuses_nobody(tmp_path):
    clock, monitor, launch, heart = watched(tmp_path)
    heart.beat(1, INDEX["compute"], 0)
    monitor.look(launch)
    clock.advance(3600 * S)
    monitor.look(launch)
    assert monitor.hung(launch) == []


def test_beats_of_another_process_are_none(tmp_path):
    clock, monitor, launch, heart = watched(tmp_path)
    heart._pid = 8
    heart.beat(1, INDEX["compute"], 0)
    pass_time(clock, monitor, launch, 1)
    assert monitor.steps() == {}
    pass_time(clock, monitor, launch, 900)
    assert monitor.hung(launch) == [0]  # blind is not healthy


# Alerts


def test_alerts_reach_a_command_and_a_webhook_and_cool_down(tmp_path):
    got = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    clock, said = FakeClock(), []
    out = tmp_path / "alert"
    url = f"http://127.0.0.1:{server.server_port}"
    alerts = Alerts(said.append, clock, f'echo "$TAPELINE_ALERT" >> {out}', url, cooldown_s=10)
    try:
        assert alerts.send("hang", "one")
        assert not alerts.send("hang", "two")
        assert not alerts.send("hang", "two")  # the same again isn't even said
        alerts.close()
        assert alerts.send("crash", "three")  # of another kind
        alerts.close()
        clock.advance(10 * S)
        assert alerts.send("hang", "four")
        alerts.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [(a["text"], a["held_back"]) for a in got] == [("one", 0), ("three", 0), ("four", 2)]
    assert [json.loads(line) for line in out.read_text().splitlines()] == got
    assert said == ["one", "two", "three", "four"]


def test_an_alert_that_cant_be_delivered_is_told():
    said = []
    alerts = Alerts(said.append, FakeClock(), "exit 3", "http://127.0.0.1:9/")
    assert alerts.send("hang", "text")
    alerts.close()
    text, *failed = said
    assert text == "text"
    command, webhook = sorted(failed)
    assert command == "the alert command failed, exit code 3"
    assert re.fullmatch("the alert webhook failed: .*refused.*", webhook)


def test_an_alert_that_hangs_holds_nobody_up_and_is_ended(tmp_path):
    (waits := tmp_path / "alert").with_suffix(".sh").write_text(
        f"echo $$ > {waits}; while ! [ -e {tmp_path}/go ]; do sleep 0.02; done; echo > {waits}.sent"
    )
    said = []
    alerts = Alerts(said.append, FakeClock(), f"sh {waits}.sh")
    alerts.send("hang", "one")
    alerts.look()
    assert not Path(f"{waits}.sent").exists()
    (tmp_path / "go").touch()
    alerts.close()
    assert Path(f"{waits}.sent").exists()
    (tmp_path / "go").unlink()
    alerts = Alerts(said.append, FakeClock(), f"sh {waits}.sh & wait", longest_s=0.5)
    alerts.send("hang", "two")
    alerts.close()
    assert said == [
        "one",
        "two",
        "the alert command failed: it took longer than 0.5 s, and was ended",
    ]
    assert not psutil.pid_exists(pid := int(waits.read_text())) or (
        psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )


def test_gauges_leave_out_what_is_not_known(tmp_path):
    path = tmp_path / "m.prom"
    write_gauges(path, 'a"b', {"step": 3.0, "ranks": None})
    assert path.read_text() == '# TYPE tapeline_step gauge\ntapeline_step{run="a\\"b"} 3.0\n'
    assert [p.name for p in tmp_path.iterdir()] == ["m.prom"]
