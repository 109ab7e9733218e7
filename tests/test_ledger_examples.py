"""The examples of ledgers in loops of others, run as a user runs them."""

from __future__ import annotations

import importlib
import os
import time

from helpers_examples import in_child, output_of
from helpers_ranks import FORKS

from tapeline.ledger import account_of, heartbeat_path, read_heartbeat


def run(name, folder, *arguments):
    """What an example prints as a command."""

    def command():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return output_of(name, folder, *arguments)

    return in_child(command)


def test_own_loop_killed_and_started_again(tmp_path) -> None:
    first = FORKS.Process(target=output_of, args=("ledger_own_loop", tmp_path, "1000000"))
    first.start()
    deadline = time.monotonic() + 90
    beat = None
    while (beat is None or beat.step < 120) and time.monotonic() < deadline:
        time.sleep(0.02)
        beat = read_heartbeat(heartbeat_path(tmp_path, 0))
    first.kill()
    first.join()
    reached = read_heartbeat(heartbeat_path(tmp_path, 0))
    assert reached is not None and reached.step >= 120
    told = run("ledger_own_loop", tmp_path, reached.step + 100)
    assert "goodput" in told
    account = account_of(tmp_path)
    killed, second = account.ranks[0].lives
    assert (killed.how, second.how) == (None, "ended")
    assert second.from_step % 50 == 0 and second.from_step <= killed.step
    assert account.job.kept_steps == reached.step + 100
    assert account.job.redone_steps == killed.step - second.from_step
    assert account.job.estimated_ns == 0
    lost = account.job.lost_ns
    assert min(lost["down"], lost["restart"], lost["reload"]) > 0
    assert account.job.buckets_ns["checkpoint"] > 0


def test_lightning_in_two_lives(tmp_path) -> None:
    importlib.import_module("lightning")
    run("ledger_lightning", tmp_path, 1)
    run("ledger_lightning", tmp_path, 2)
    account = account_of(tmp_path)
    assert [(life.from_step, life.step) for life in account.ranks[0].lives] == [(0, 32), (32, 64)]
    assert account.job.kept_steps == 64 and account.job.redone_steps == 0
    buckets = account.job.buckets_ns
    named = ("useful", "starved", "checkpoint", "startup", "evaluation")
    assert all(buckets[bucket] > 0 for bucket in named)
    assert account.job.estimated_ns == 0


def test_accelerate(tmp_path) -> None:
    told = run("ledger_accelerate", tmp_path, 2)
    account = account_of(tmp_path)
    assert told.startswith(f"goodput {account.goodput:.1%}")
    assert account.job.kept_steps == 128
    buckets = account.job.buckets_ns
    named = ("useful", "starved", "checkpoint", "startup", "evaluation")
    assert all(buckets[bucket] > 0 for bucket in named)
