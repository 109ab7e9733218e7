"""What a triage looks at, and where a collector finds it. Nothing here reads a file.

A field that could not be had is None or absent, never zero: a triage that is blind says so.

Where from, with N for the rank:

`num_ranks`, `host`        `attempts.jsonl`: `world_size` and `host` of the last life
`heartbeat`                `heartbeat/rank-N`, the ledger's: step, phase, time. Its age is the
                           machine's monotonic clock less the record's time; seen from another
                           machine, for how long reads have shown the same record; of a rank that
                           the supervisor ended, as of then
`exit.code`, `.signal`     `supervise/attempt-…/rank-N.json`. Without a supervisor 0 or 75 by the
                           last line of the rank's ledger, or only that the pid is gone: `Exit()`
`exit.exception`           the first line of `errors/rank-N.txt`
`exit.time_ns`             the time in it, or when the supervisor saw the end
`exit.by_supervisor`       `hang.json` beside the supervisor's `rank-N.json`
`process_state`            `/proc/PID/stat`, by psutil on the rank's own machine
`shares`                   the account of `ledger/rank-N.jsonl`: each bucket over the time of the
                           last life, without its startup
`windows`                  `metrics/rank-N.jsonl`: `step_s` less `collective_wait_s`, step by step,
                           cut at the same steps on each rank: `aligned`. Or the ledger's
                           `step_times`: quantiles of `own`, with the time in communication over
                           the number of steps as `wait_s`: not aligned. A run of several ranks
                           that books no communication has `wait_s` None, not 0
`batch_s`                  the median `batch_s` in `metrics/rank-N.jsonl`
`kernels`                  the last `profile` in `metrics/rank-N.jsonl`
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# An end that was asked for: done, or told to stop and saved.
_ORDERLY = (0, os.EX_TEMPFAIL)
COLLECTIVE = "communication"  # the phase in which a rank waits for the others


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last sign of progress of one rank.

    Attributes:
        step: steps completed.
        phase: the phase of the ledger that it entered then.
        age_s: since step or phase last changed. A time that goes on by itself would hide a hang.
    """

    step: int
    phase: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank's process ended; `Exit()` is one that is gone without a trace.

    Attributes:
        code: of the process, where it ended by itself.
        signal: number of the one that ended it.
        exception: `Type: message`, as the rank wrote it down.
        time_ns: when, by the wall clock of its host, in whole nanoseconds since 1970.
        by_supervisor: it was ended on purpose, after another had failed.
    """

    code: int | None = None
    signal: int | None = None
    exception: str | None = None
    time_ns: int | None = None
    by_supervisor: bool = False

    @property
    def orderly(self) -> bool:
        """It was done, or stopped when told to."""
        return self.code in _ORDERLY and self.signal is None and self.exception is None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps of one rank over one window of the run.

    Attributes:
        own_s: float64 `[n]`, seconds a step without the wait in collectives: each step's, or n
            equally likely quantiles of them. In any order.
        wait_s: seconds a step in collectives, on average; None where it can't be told apart.
            Then `own_s` holds the wait too.
    """

    own_s: NDArray[np.float64]
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a profile of a few steps saw.

    Attributes:
        per_step: kernels (on a CPU: operators) launched in a step.
        median_us: how long one runs.
        busy: share of the computing time in which one runs.
    """

    per_step: float
    median_us: float
    busy: float


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """Everything known of one rank.

    Attributes:
        host: its machine's name; times of two hosts are not compared closely.
        heartbeat: None if there is none.
        exit: None while it runs.
        process_state: the letter that the kernel gives: R, S, D, T, t, Z, X, I; None if unknown.
        shares: bucket to share of the rank's time since its startup: useful, starved, checkpoint,
            lost, evaluation, other. None if there is no ledger, or hardly a step in it.
        windows: consecutive windows, at the same steps for each rank.
        batch_s: what its loader takes to make a batch, waited for or not; None if unknown.
        kernels: None if it was not profiled.
    """

    rank: int
    host: str = ""
    heartbeat: Heartbeat | None = None
    exit: Exit | None = None
    process_state: str | None = None
    shares: Mapping[str, float] | None = None
    windows: tuple[StepTimes, ...] = ()
    batch_s: float | None = None
    kernels: Kernels | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known of one life of a run.

    Attributes:
        num_ranks: how many ranks it was started with.
        ranks: what is known of each; one may be missing.
        aligned: entry i of a window's `own_s` is the same step on every rank. Then who was waited
            for is seen step by step; else, and in a window in which the ranks have not as many
            entries, ranks are taken as independent, which calls noise that
            all of them share imbalance.
    """

    num_ranks: int
    ranks: tuple[RankEvidence, ...] = ()
    aligned: bool = False
