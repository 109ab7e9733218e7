"""From the SIGKILL or SIGSTOP of one of two ranks to the next training step, under supervision.

Cases: `warm` (ranks forked from a standby), `hang` (SIGSTOP, warm) and `cold` (torchrun starts new
processes). `seconds_to_next_step` is split into `detect_and_tear_down_s` (until nothing is left of
the attempt), `start_s` (until the next attempt's first process is there) and `load_s` (until its
first step is done). A hang is detected by the limit that was learned, with a floor of 5 s:
`limit_s`. `num_within` counts the recoveries within the case's bound.

A rank is struck only after its attempt has saved a step: three in a row that saved none end a run.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import harness

from tapeline.ledger import heartbeat_path, read_heartbeat
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

CONFIG = """
[data]
store = "store"
[training]
steps = 1000000
batch = 64
lanes = 4
[validation]
fraction = 0.0
[checkpoint]
every = 100
"""
_LONGEST_S = 150.0
_BOUND_S = {"warm": 2.0, "hang": 10.0, "cold": 10.0}
T = TypeVar("T")


def measure(quick: bool) -> list[harness.Row]:
    """Each case in turn."""
    samples = harness.Samples()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(synthetic_sessions(2, rows=2000), folder / "store", "mmap")
        (folder / "run.toml").write_text(CONFIG)
        for case, number, repetitions in (
            ("warm", signal.SIGKILL, 3 if quick else 20),
            ("hang", signal.SIGSTOP, 1 if quick else 20),
            ("cold", signal.SIGKILL, 1 if quick else 20),
        ):
            recoveries(folder, case, number, repetitions, samples)
    return [*samples.rows("seconds_to_next_step", ()), *(_within(c, samples) for c in _BOUND_S)]


def _within(case: str, samples: harness.Samples) -> harness.Row:
    values = samples.values[case, "tapeline", "seconds_to_next_step"]
    number = float(sum(value <= _BOUND_S[case] for value in values))
    unit = f"of {len(values)} in {_BOUND_S[case]:g} s"
    return harness.Row(case, "tapeline", "num_within", number, unit, number, number, len(values))


def recoveries(
    folder: Path, case: str, number: signal.Signals, repetitions: int, samples: harness.Samples
) -> None:
    """One supervised run, one of whose ranks is ended again and again."""
    run = folder / case
    argv = [sys.executable, "-m", "tapeline", "supervise", str(folder / "run.toml"), "--out"]
    argv += [str(run), "--ranks", "2", "--max-restarts", "1000"]
    with (folder / f"{case}.log").open("w") as log:
        supervisor = subprocess.Popen(
            argv + ([] if case == "cold" else ["--warm"]), stdout=log, stderr=log
        )
        try:
            for repetition in range(repetitions):
                _wait(lambda: _trained(run, 60), supervisor)
                time.sleep(0.5)
                pid = _pid(run, repetition % 2)
                struck, wall = time.monotonic(), time.time()
                os.kill(pid, number)
                now = _wait(functools.partial(_next, run, pid, repetition % 2), supervisor)
                samples.add(case, "tapeline", "seconds_to_next_step", now - struck, "s")
                _split(run, case, wall, now - struck, samples)
        except TimeoutError:
            print((folder / f"{case}.log").read_text(), file=sys.stderr)
            raise
        finally:
            supervisor.terminate()
            supervisor.wait()


def _split(run: Path, case: str, wall: float, whole_s: float, samples: harness.Samples) -> None:
    line = json.loads((run / "supervise/history.jsonl").read_text().splitlines()[-1])
    newest = max((run / "supervise").glob("attempt-*"))
    detect_s = line["ended_ns"] / 1e9 - wall
    start_s = min(path.stat().st_mtime for path in newest.glob("rank-*.json")) - wall
    samples.add(case, "tapeline", "detect_and_tear_down_s", detect_s, "s")
    samples.add(case, "tapeline", "start_s", start_s - detect_s, "s")
    samples.add(case, "tapeline", "load_s", whole_s - start_s, "s")
    if case == "hang":
        hang = json.loads((run / f"supervise/attempt-{line['attempt']:04d}/hang.json").read_text())
        limit_s = min(rank["limit_s"] for rank in hang["ranks"])
        samples.add(case, "tapeline", "limit_s", limit_s, "s")


def _trained(run: Path, steps: int) -> int | None:
    beats = [read_heartbeat(heartbeat_path(run, rank)) for rank in (0, 1)]
    pids = [_pid(run, rank) for rank in (0, 1)]
    if all(b and b.pid == p for b, p in zip(beats, pids, strict=True)):
        done = min(b.step for b in beats if b)
        first = _from_step(run)
        saved = max((run / "checkpoints").glob("step-*/manifest.json"), default=None)
        if first is None or saved is None or int(saved.parent.name[5:]) <= first:
            return None
        return done if done >= first + steps else None
    return None


def _from_step(run: Path) -> int | None:
    lines = (run / "attempts.jsonl").read_text().splitlines()
    begun = [json.loads(line) for line in lines if '"from_step"' in line]
    return begun[-1]["from_step"] if begun else None


def _pid(run: Path, rank: int) -> int:
    newest = max((run / "supervise").glob("attempt-*"), default=run)
    try:
        return int(json.loads((newest / f"rank-{rank}.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0


def _next(run: Path, before: int, rank: int) -> float | None:
    """When the first step of another process was done."""
    beat = read_heartbeat(heartbeat_path(run, rank))
    if beat is None or beat.pid in (0, before):
        return None
    first = _from_step(run)
    return time.monotonic() if first is not None and beat.step > first else None


def _wait(look: Callable[[], T | None], supervisor: subprocess.Popen[bytes]) -> T:
    deadline = time.monotonic() + _LONGEST_S
    while (found := look()) is None:
        if time.monotonic() > deadline or supervisor.poll() is not None:
            raise TimeoutError(f"no training step; the supervisor ended: {supervisor.poll()}")
        time.sleep(0.005)
    return found


if __name__ == "__main__":
    harness.main(__doc__, measure)
