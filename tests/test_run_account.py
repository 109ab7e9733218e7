"""The account of real runs: through kills, a stop and a clock that is set back, on three ranks."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from helpers_ranks import Command

from tapeline.checkpoint import Shelf
from tapeline.ledger import account_of, read_heartbeat
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

# The whole of it, by hand: 5 kills, a stop of 20 s. It takes a minute.
KILLS, STOPPED_S = 2, 2.0
RANKS, STEPS = 3, 160
MODEL = """
import json
import os
import time
from pathlib import Path

import torch

from tapeline.training import TrainStep

HERE = Path(__file__).parent
LOG = (HERE / f"log-{os.environ['RANK']}.jsonl").open("a", buffering=1)
if (HERE / "clock-set-back").exists():
    real = time.time_ns
    time.time_ns = lambda: real() - 300 * 10**9


def note(step, number, x, y):
    begin = time.monotonic()
    loss = done(step, number, x, y)
    entry = [os.getpid(), number, begin, time.monotonic()]
    LOG.write(json.dumps(entry) + "\\n")
    return loss


done, TrainStep.__call__ = TrainStep.__call__, note


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.03)
        return x


def slow(num_inputs):
    return torch.nn.Sequential(Slow(), torch.nn.Linear(num_inputs, 1))
"""
CONFIG = f"""
[data]
store = "store"
[model]
factory = "logged_model:slow"
[training]
steps = {STEPS}
batch = 16
lanes = 4
[validation]
fraction = 0.0
[checkpoint]
every = 10
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("account")
    write_shards(synthetic_sessions(2, rows=300), folder / "store", "mmap")
    (folder / "logged_model.py").write_text(MODEL)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def own_goodput(workplace: Path, began: float) -> float:
    """By the test's own log: the time in steps that count, over the time from begin to end."""
    useful = whole = 0.0
    for rank in range(RANKS):
        lines = (workplace / f"log-{rank}.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("]")]
        lives = defaultdict(list)
        for pid, number, begin, end in entries:
            lives[pid].append((number, begin, end))
        counted: dict[int, float] = {}
        for steps in lives.values():  # a later life gives up what it begins before
            first = steps[0][0]
            counted = {number: s for number, s in counted.items() if number < first}
            counted |= {number: end - begin for number, begin, end in steps}
        assert sorted(counted) == list(range(STEPS))
        useful += sum(counted.values())
        whole += entries[-1][-1] - began
    return useful / whole


def test_the_account_of_a_run_with_kills_a_stop_and_a_clock_set_back_is_the_tests_own(workplace):
    chance = random.Random(5)
    run = workplace / "run"
    saved = [chance.randrange(10, STEPS - 40) for _ in range(KILLS)]
    life = Command(
        RANKS, "train", workplace / "config.toml", "--out", run, "--json", folder=workplace
    )
    began = time.monotonic()
    for number, step in enumerate(sorted(saved)):
        life.when(lambda step=step: max(Shelf(run / "checkpoints").steps(), default=0) >= step)
        time.sleep(0.1 * chance.random())
        life.signal(signal.SIGKILL, *chance.choice([(), (0,), (2,)]))
        life.wait()
        if number == 0:
            (workplace / "clock-set-back").touch()
        life = Command(RANKS, "resume", run, "--json", folder=workplace)

    def moves() -> bool:
        beat = read_heartbeat(run / "heartbeat" / "rank-1")
        return beat is not None and beat.pid == life.processes[1].pid and beat.step > max(saved)

    life.when(moves)
    life.signal(signal.SIGSTOP, 1)
    time.sleep(STOPPED_S)
    life.signal(signal.SIGCONT, 1)
    life.done()

    account = account_of(run)  # an error, if a rank's doesn't close
    assert len(account.ranks) == RANKS
    for rank in account.ranks:
        parts = [(one.lived_ns, one.detection_ns, one.down_ns) for one in rank.lives]
        assert rank.times.wall_ns == sum(map(sum, parts))
        assert len(rank.lives) == KILLS + 1
        assert rank.times.kept_steps == STEPS
    assert account.job.redone_steps > 0
    assert account.clock_faults == ()
    assert any("the wall clock moved by -300.0 s" in note for note in account.notes)
    assert account.job.estimated_ns == 0, "lines end where rank 0 saves, on every rank"
    assert account.goodput == pytest.approx(own_goodput(workplace, began), rel=0.01)
