"""Preemption with real signals to real processes; the grace period on a fake clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tapeline.checkpoint.preempt import (
    EXIT_PREEMPTED,
    SIGNALS,
    Preempted,
    PreemptionGuard,
    children_shielded,
)
from tapeline.clock import FakeClock
from tapeline.errors import CheckpointError

SECOND = 1_000_000_000


def guard(**changes) -> PreemptionGuard:
    return PreemptionGuard(**{"grace_s": 30.0, "warn": pytest.fail} | changes)


def handlers() -> list:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_answered_at_the_boundary(number: signal.Signals):
    before = handlers()
    with guard() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
        assert stop.agreed()
        assert stop.agreed()
    assert handlers() == before


def test_handlers_are_put_back_after_an_error():
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(KeyError), guard():
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_the_reason():
    with guard() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGUSR1"


def test_what_an_inner_guard_notes_the_outer_has_noted():
    before = handlers()
    with guard() as outer:
        with guard() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (inner.reason, outer.reason) == ("SIGTERM", "SIGTERM")
        with guard() as later:
            assert not later.agreed()
    assert handlers() == before


def test_a_guard_can_be_entered_again():
    stop = guard()
    with stop:
        pass
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed()


def test_a_handler_that_python_did_not_set_becomes_the_default(monkeypatch: pytest.MonkeyPatch):
    really, before = signal.signal, handlers()
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: really(number, handler) and None)
        with guard():
            pass
    assert handlers() == [signal.SIG_DFL] * len(SIGNALS)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def test_outside_the_main_thread_it_is_refused():
    errors = []

    def enter() -> None:
        try:
            with guard():
                pass
        except CheckpointError as error:
            errors.append(error)

    before = handlers()
    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    assert str(errors[0]) == (
        "preemption: expected the main thread, the only one that Python gives signals to, "
        "found thread loader. Enter the guard in the main thread and hand it to the loop."
    )
    assert handlers() == before


def test_a_notice_file_is_looked_for_once_a_second(tmp_path: Path):
    clock = FakeClock()
    stop = guard(notice_file=tmp_path / "stop", clock=clock)
    assert not stop.agreed()
    (tmp_path / "stop").touch()
    clock.advance(SECOND - 1)
    assert not stop.agreed()
    clock.advance(1)
    assert stop.agreed()
    assert stop.reason == f"the notice file {tmp_path / 'stop'}"


def test_ranks_agree_at_the_same_boundary():
    """Three ranks in step: the flags of a boundary are gathered before any rank goes on."""
    flags: list[bool] = []
    ranks = [guard(any_rank=lambda flag: flags.append(flag) or any(told)) for _ in range(3)]
    told = [False]
    assert [rank.agreed() for rank in ranks] == [False, False, False]
    with ranks[1]:
        os.kill(os.getpid(), signal.SIGTERM)
    told = [True]
    flags.clear()
    assert [rank.agreed() for rank in ranks] == [True, True, True]
    assert flags == [False, True, False]
    assert [rank.reason for rank in ranks] == [
        "a notice to another rank",
        "SIGTERM",
        "a notice to another rank",
    ]


def test_a_save_that_would_not_fit_is_told_in_advance_and_once():
    said: list[str] = []
    stop = guard(warn=said.append)
    stop.measured(save_s=28.0, poll_s=2.0)
    assert said == []
    for _ in range(3):
        stop.measured(save_s=28.0, poll_s=2.5)
    assert said == [
        "A preemption would lose work: the grace period is 30 s, a step takes up to 2.5 s and a "
        "save 28 s. Save faster or more often, or ask for a longer grace period."
    ]
    stop.measured(save_s=1.0, poll_s=2.5)
    stop.measured(save_s=40.0, poll_s=2.5)
    assert len(said) == 2


@pytest.mark.parametrize("grace_s", [0.0, -1.0, float("nan")])
def test_a_grace_period_of_nothing_is_refused(grace_s: float):
    with pytest.raises(CheckpointError) as error:
        guard(grace_s=grace_s)
    assert str(error.value) == (
        f"grace period: expected a number of seconds above 0, found {grace_s:g}. "
        "Give the time between the notice and the kill."
    )


def test_preempted_says_where_and_passes_handlers_of_exceptions():
    error = Preempted(12, "SIGTERM")
    assert (error.step, error.reason, error.code) == (12, "SIGTERM", 75)
    assert str(error) == "preempted by SIGTERM; saved at step 12"
    assert not isinstance(error, Exception)


RUN = """
import os, subprocess, sys, threading, time
from tapeline.checkpoint.preempt import Preempted, PreemptionGuard, children_shielded
failed = []
threading.excepthook = failed.append
done = threading.Event()
loader = threading.Thread(target=done.wait)
loader.start()
with PreemptionGuard(grace_s=30, warn=print) as stop:
    with children_shielded():
        worker = subprocess.Popen([sys.executable, "-c", "print(input(), flush=True)"],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print("ready", flush=True)
    for step in range(1, 100_000):
        time.sleep(0.005)
        if stop.agreed():
            answer = worker.communicate("worker lives")[0].strip()
            print(step, stop.reason, loader.is_alive(), answer, failed, flush=True)
            done.set()
            raise Preempted(step, stop.reason)
"""


def test_a_signal_to_a_whole_job_stops_it_at_a_boundary_with_loaders_alive():
    with subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        os.killpg(job.pid, signal.SIGTERM)
        said = job.stdout.read().split(" ", 1)
    assert int(said[0]) >= 1
    assert said[1] == "SIGTERM True worker lives []\n"
    assert job.returncode == EXIT_PREEMPTED


def test_a_signal_while_children_are_started_is_not_lost():
    with guard() as stop:
        with children_shielded():
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
