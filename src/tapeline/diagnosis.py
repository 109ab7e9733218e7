"""What a run's folder says of why it is slow, stuck or dead: evidence collected, and judged.

Covers reading it, of a run that goes on or one that ended, and what can be asked of the machine
that looks. Nothing is written, and nothing but a process's state is asked of the run itself. Does
not cover the judgement (`signals.triage`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.clock import Clock, SystemClock
from tapeline.errors import RunError
from tapeline.files import read_journal
from tapeline.ledger import Account, Beat, account_of, heartbeat_path, read_heartbeat
from tapeline.runs import Metrics, RunFolder, read_metrics
from tapeline.runs.live import process_state, same_boot
from tapeline.signals import (
    Evidence,
    Exit,
    Heartbeat,
    Kernels,
    Limits,
    RankEvidence,
    StepTimes,
    Verdict,
    triage,
)
from tapeline.words import percent

_WARM_UP_STEPS = 5
_NUM_WINDOWS, _WINDOW_STEPS, _MOST_STEPS = 20, 10, 2000
_FEWEST_STEPS = 20  # of fewer, the shares are those of the first batches
_WEIGHTY = 0.1
_LOST_TO = {
    "redone": "steps done again",
    "detection": "the time until an end was noticed",
    "down": "the time nobody ran",
    "restart": "starting again",
    "reload": "reading checkpoints",
}
_ORDERLY = {"ended": os.EX_OK, "Preempted": os.EX_TEMPFAIL, "Stopped": os.EX_OK}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        verdicts: the most pressing first; at least one.
        findings: of the run's watchers in its last life, as they were journalled.
        attempt: the life that was judged.
        lives: whether any of its ranks goes on.
        before: the lives before it, as `attempts.jsonl` tells them.
        account: of all lives; None without ledgers.
    """

    verdicts: tuple[Verdict, ...]
    findings: tuple[dict[str, Any], ...]
    attempt: int
    lives: bool
    before: tuple[dict[str, Any], ...] = ()
    account: Account | None = None

    @property
    def outweighed(self) -> str | None:
        """What took more of all lives' time than a change of the steps can return, if anything."""
        first = self.verdicts[0]
        if self.account is None or self.account.goodput is None or first.kind in ("crash", "hang"):
            return None
        job = self.account.job
        bucket = max(("lost", "startup"), key=job.buckets_ns.__getitem__)
        share = job.buckets_ns[bucket] / job.wall_ns
        if share <= max(_WEIGHTY, *(verdict.ceiling or 0.0 for verdict in self.verdicts)):
            return None
        told = f"{percent(share)} of the run's time"
        if bucket == "startup":
            return f"{told} went by before the first step"
        most = max(job.lost_ns, key=job.lost_ns.__getitem__)
        return f"{told} was lost to failures, the most of it to {_LOST_TO[most]}"

    @property
    def healthy(self) -> bool:
        """Whether everything was seen, and nothing found."""
        return self.verdicts[0].kind == "healthy"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {
            "attempt": self.attempt,
            "lives": self.lives,
            "healthy": self.healthy,
            "goodput": self.account and self.account.goodput,
            "buckets_ns": self.account and self.account.job.buckets_ns,
            "outweighed": self.outweighed,
            "before": list(self.before),
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
            "findings": list(self.findings),
        }


def diagnose(
    run: Path,
    *,
    limits: Limits | None = None,
    clock: Clock | None = None,
    account: Account | None = None,
) -> Diagnosis:
    """Say why a run is slow, stuck or dead, from its folder alone.

    Args:
        run: its folder.
        limits: from where on something is a finding.
        clock: for the ages of heartbeats.
        account: of the run, where it is known already.

    Raises:
        RunError: the folder isn't a run's, or none of its lives has begun.
        LedgerError: a ledger doesn't add up.
    """
    folder = RunFolder(run, clock or SystemClock())
    folder.record()
    account = account or _account(folder)
    evidence = _collected(folder, clock or SystemClock(), account)
    *before, life = folder.attempts()
    attempt = life["attempt"]
    findings = [line for line in read_journal(folder.findings_path) if line["attempt"] == attempt]
    lives = any(rank.process_state is not None for rank in evidence.ranks)
    verdicts = triage(evidence, limits)
    return Diagnosis(verdicts, tuple(findings), attempt, lives, tuple(before), account)


def collect(run: Path, *, clock: Clock | None = None) -> Evidence:
    """The evidence that `diagnose` judges.

    Raises:
        RunError: none of the run's lives has begun.
        LedgerError: a ledger doesn't add up.
    """
    clock = clock or SystemClock()
    folder = RunFolder(run, clock)
    return _collected(folder, clock, _account(folder))


def _account(run: RunFolder) -> Account | None:
    return account_of(run.path) if (run.path / "ledger").exists() else None


def _collected(run: RunFolder, clock: Clock, account: Account | None) -> Evidence:
    lives = run.attempts()
    if not lives or "world_size" not in lives[-1]:
        raise RunError(
            run.path,
            expected="a run of which a life has begun",
            found="none in attempts.jsonl",
            fix="Look at what `tapeline train` said: it ended before its first step",
        )
    life = lives[-1]
    num_ranks = life["world_size"]
    metrics = [read_metrics(run.metrics_path(rank)) for rank in range(num_ranks)]
    windows = _windows(metrics, life["attempt"])
    ranks = [
        _Rank(run, rank, life, account, clock).evidence(windows[rank], metrics[rank])
        for rank in range(num_ranks)
    ]
    found = tuple(rank for rank in ranks if rank is not None)
    return Evidence(num_ranks, found, aligned=True)


class _Rank:
    """What there is of one rank in one life."""

    def __init__(
        self, run: RunFolder, rank: int, life: dict[str, Any], account: Account | None, clock: Clock
    ) -> None:
        self._run, self._rank, self._life, self._clock = run, rank, life, clock
        beat = read_heartbeat(heartbeat_path(run.path, rank))
        self._beat = beat if beat and beat.attempt == life["attempt"] else None
        # The host is rank 0's: where that was started again, rank 0 is gone. Another rank that
        # began under another boot may be another machine's.
        self._is_seen = self._is_here = life["host"] == socket.gethostname()
        if self._is_here and not same_boot(run.path, rank, life["attempt"]):
            self._is_here, self._is_seen = False, rank == 0
        of_rank = [one for one in account.ranks if one.rank == rank] if account else []
        of_life = [one for one in (of_rank[0].lives if of_rank else ()) if self._is_of(one.attempt)]
        self._account = of_life[0] if of_life else None

    def evidence(self, windows: tuple[StepTimes, ...], metrics: Metrics) -> RankEvidence | None:
        """All of it; None if there is nothing."""
        state = self._state()
        end = self._exit(state)
        batch_s = metrics.snapshot["batch_s"]
        of_life = batch_s.values[batch_s.attempts == self._life["attempt"]]
        if self._beat is None and self._account is None and end is None:
            return None
        return RankEvidence(
            self._rank,
            self._life["host"],
            heartbeat=self._heartbeat(end),
            exit=end,
            process_state=state if end is None else None,
            shares=self._shares(),
            windows=windows,
            batch_s=float(np.median(of_life)) if len(of_life) else None,
            kernels=Kernels(**metrics.profile) if metrics.profile else None,
        )

    def _is_of(self, attempt: int) -> bool:
        return attempt == int(self._life["attempt"])

    def _heartbeat(self, end: Exit | None) -> Heartbeat | None:
        beat = self._beat
        if beat is None:
            return None
        if end is not None:
            return Heartbeat(beat.step, beat.phase, self._supervised().get("age_s") or 0.0)
        if not self._is_here:
            return None  # its clock is another's; a monitor there would have to tell the age
        return Heartbeat(beat.step, beat.phase, self._age_s(beat))

    def _age_s(self, beat: Beat) -> float:
        return max(0, self._clock.monotonic_ns() - beat.monotonic_ns) / 1e9

    def _state(self) -> str | None:
        """The letter of its process, if that is there."""
        beat = self._beat
        if beat is None or not self._is_here:
            return None
        return process_state(beat, self._age_s(beat))

    def _exit(self, state: str | None) -> Exit | None:
        """How it ended; None while it runs, or as far as can be told."""
        told = self._supervised()
        error = self._error()
        code, by_supervisor = told.get("code"), bool(told.get("hung"))
        if code is None and error is None:
            return self._silent_exit(state)
        time_ns = error["wall_ns"] if error else told.get("ended_ns")
        return Exit(
            code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            exception=error["exception"] if error else None,
            time_ns=time_ns,
            by_supervisor=by_supervisor and code is not None and code < 0,
        )

    def _silent_exit(self, state: str | None) -> Exit | None:
        """Of one that nobody saw end."""
        how = self._account.how if self._account else None
        if how is not None:
            code = _ORDERLY.get(how)
            return Exit(code=code) if code is not None else Exit(exception=how)
        if state not in (None, "Z", "X"):
            return None
        return Exit() if self._is_seen and (self._beat or "how" in self._life) else None

    def _error(self) -> dict[str, Any] | None:
        try:
            first = self._run.errors_path(self._rank).read_text().partition("\n")[0]
            told: dict[str, Any] = json.loads(first)
        except (OSError, ValueError):
            return None
        return told if self._is_of(told["attempt"]) else None

    def _supervised(self) -> dict[str, Any]:
        """What a supervisor saw of this process: its end, and whether it had hung."""
        for path in sorted(self._run.path.glob(f"supervise/attempt-*/rank-{self._rank}.json")):
            with contextlib.suppress(OSError, ValueError):
                told: dict[str, Any] = json.loads(path.read_text())
                if self._beat and told["pid"] == self._beat.pid:
                    return told | _hung(path.with_name("hang.json"), self._rank)
        return {}

    def _shares(self) -> dict[str, float] | None:
        """Each bucket over the life's time since its startup."""
        if self._account is None or self._account.step - self._account.from_step < _FEWEST_STEPS:
            return None
        times = self._account.times
        begun_ns = times.phases_ns["startup"] + times.phases_ns["restore"]
        lived_ns = times.wall_ns - begun_ns
        if lived_ns <= 0:
            return None
        buckets = {name: ns / lived_ns for name, ns in times.buckets_ns.items()}
        again_ns = times.lost_ns["restart"] + times.lost_ns["reload"]
        return buckets | {"startup": 0.0, "lost": (times.buckets_ns["lost"] - again_ns) / lived_ns}


def _hung(path: Path, rank: int) -> dict[str, Any]:
    if not path.exists():
        return {}
    ages = {one["rank"]: one["age_s"] for one in json.loads(path.read_text())["ranks"]}
    return {"hung": True, "age_s": ages.get(rank)}


def _windows(metrics: list[Metrics], attempt: int) -> list[tuple[StepTimes, ...]]:
    """Each rank's windows, cut at the same steps; the last ones of the life."""
    series = [one.snapshot["step_s"] for one in metrics]
    own = [one[one.attempts == attempt] for one in series]
    steps = own[0].steps[_WARM_UP_STEPS:] if own else np.empty(0, np.int64)
    for one in own[1:]:
        steps = np.intersect1d(steps, one.steps)
    steps = steps[-_MOST_STEPS:]
    size = max(_WINDOW_STEPS, len(steps) // _NUM_WINDOWS)
    cuts = [steps[start : start + size] for start in range(0, len(steps) - size + 1, size)]
    found = []
    for journal, step_s in zip(metrics, own, strict=True):
        wait_s = journal.snapshot["collective_wait_s"]
        wait_s = wait_s[wait_s.attempts == attempt]
        windows = []
        for cut in cuts:
            times = step_s.values[np.isin(step_s.steps, cut)]
            waits = wait_s.values[np.isin(wait_s.steps, cut)]
            known = len(waits) == len(times)
            windows.append(
                StepTimes(times - waits if known else times, waits.mean() if known else None)
            )
        found.append(tuple(windows))
    return found
