"""What keeping a ledger costs a step, and how fast an account is made.

    python benchmarks/ledger.py [--quick] [--json]

`step` is a loop that does nothing but tell the ledger about a step: two phases, the step's end,
three heartbeats; `beat` is one heartbeat. Both in processor time, which others on the machine
don't lengthen much. `account` reads ten million steps (a million if quick) in a process of its
own: written by the ledger at a hundred steps a second, and with a line for every
step, the worst a user can do. `whole loop` is a real run of the reference model, with ledger,
metrics, watchers, heartbeat and checkpoints at the automatic interval, beside the bare step on one
batch that is fed again and again; `run on one batch` is fed the same, so that it shows what the
records cost, apart from what a loader does to the caches. Turns of a hundred steps are taken in
one process, and the processor time of the thread that trains is compared.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
from harness import Row, Samples, main

from tapeline.attempt import Data, Parts, Progress
from tapeline.attempt.course import Course
from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.ledger import Heartbeat, Ledger, ledger_path
from tapeline.run import start
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions
from tapeline.world import World

TURN = 100
STEPS, STEP_NS, DATA_NS = 100_000, 10_000_000, 1_000_000
READ = """
import pathlib, re, sys, time
from tapeline.ledger import account_of
account_of(pathlib.Path(sys.argv[1]))  # compiles, and imports
before, before_cpu = time.perf_counter(), time.process_time()
found = account_of(pathlib.Path(sys.argv[2]))
after, after_cpu = time.perf_counter(), time.process_time()
assert found.job.kept_steps == int(sys.argv[3]), found.job.kept_steps
# Not `ru_maxrss`, which a process inherits from the one that started it.
status = pathlib.Path("/proc/self/status").read_text()
peak_mb = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024
print(after - before, after_cpu - before_cpu, peak_mb)
"""


def cost_of_a_step(folder: Path) -> float:
    """Microseconds of processor time."""
    with Ledger(folder) as ledger:
        before = time.process_time()
        for step, _ in enumerate(ledger.batches(range(STEPS)), 1):
            ledger.step_done(step)
        return (time.process_time() - before) / STEPS * 1e6


def cost_of_a_beat(folder: Path) -> float:
    """Microseconds of processor time."""
    heartbeat = Heartbeat(folder / "beats", 1, 0)
    before = time.process_time()
    for step in range(STEPS):
        heartbeat.beat(step, 4, step)
    after = time.process_time()
    heartbeat.close()
    return (after - before) / STEPS * 1e6


def write_by_the_second(folder: Path, steps: int) -> None:
    """As the ledger itself writes: steps of 10 ms, a checkpoint each 1000."""
    clock = FakeClock()
    with Ledger(folder, clock=clock) as ledger:
        for step in range(1, steps + 1):
            ledger.switch("data")
            clock.advance(DATA_NS)
            ledger.switch("compute")
            clock.advance(STEP_NS - DATA_NS)
            ledger.step_done(step)
            if step % 1000 == 0:
                with ledger.span("checkpoint"):
                    clock.advance(STEP_NS)


def write_by_the_step(folder: Path, steps: int) -> None:
    """A line for every step."""
    generator = np.random.default_rng(0)
    with Ledger(folder, clock=FakeClock()):
        pass
    end = 0
    with ledger_path(folder, 0).open("a") as file:
        for first in range(0, steps, 100_000):
            spent = generator.integers(DATA_NS, STEP_NS, (100_000, 2)).tolist()
            for step, (data, compute) in enumerate(spent, first + 1):
                end += data + compute
                file.write(
                    f'{{"attempt":1,"step":{step},"end":{end},"data":{data},"compute":{compute}}}\n'
                )


def whole_loop(root: Path, samples: Samples, turns: int) -> None:
    """Turns of a run, and of the bare step."""
    write_shards(synthetic_sessions(3, rows=6000), root / "store", "mmap")
    values = {
        "data": {"store": str(root / "store")},
        "training": {"steps": TURN * (turns + 2)},
        "validation": {"fraction": 0.0},
        "checkpoint": {"every": "auto"},
    }
    config = RunConfig.from_mapping(values, "benchmark")
    parts = Parts.build(Data.open(config, None), World())
    fixed = [part.clone() for part in next(iter(parts.loader))]

    def taking_turns(subject: str) -> Progress:
        began = time.thread_time()

        def take_turns(done: int, _: int) -> None:
            nonlocal began
            if done % TURN:
                return
            spent = (time.thread_time() - began) / TURN
            before = time.thread_time()
            for number in range(TURN):
                parts.step(number, *fixed)
            bare = (time.thread_time() - before) / TURN
            if done > 2 * TURN:  # the first are warm-up, the compilation of kernels among it
                samples.add("whole loop", subject, "us_per_step", spent * 1e6, "us")
                if subject == "run on one batch":
                    samples.add("whole loop", "bare step", "us_per_step", bare * 1e6, "us")
            began = time.thread_time()

        return take_turns

    start(config, root / "run", progress=taking_turns("run"))
    with mock.patch.object(Course, "batches", lambda _: (fixed for _ in itertools.count())):
        start(config, root / "fixed", progress=taking_turns("run on one batch"))


def measure(quick: bool) -> list[Row]:
    """All rows."""
    samples = Samples()
    repetitions = 3 if quick else 9
    steps = 1_000_000 if quick else 10_000_000
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(repetitions):
            folder = root / str(number)
            samples.add("step", "tapeline", "us_per_step", cost_of_a_step(folder), "us")
            samples.add("beat", "tapeline", "us_per_beat", cost_of_a_beat(folder), "us")
        whole_loop(root, samples, 8 if quick else 40)
        write_by_the_second(root / "by second", steps)
        write_by_the_step(root / "by step", steps)
        write_by_the_step(root / "warm", 300_000)
        for _ in range(2 if quick else 3):
            for case in ("by second", "by step"):
                done = subprocess.run(
                    [sys.executable, "-c", READ, root / "warm", root / case, str(steps)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                seconds, cpu_seconds, peak_mb = map(float, done.stdout.split())
                case = f"account of {steps:,} steps, lines {case}"
                samples.add(case, "tapeline", "seconds", seconds, "s")
                samples.add(case, "tapeline", "cpu_seconds", cpu_seconds, "s")
                samples.add(case, "tapeline", "peak_mb", peak_mb, "MB")
    return samples.rows("us_per_step", ("bare step",))


if __name__ == "__main__":
    main(__doc__, measure)
