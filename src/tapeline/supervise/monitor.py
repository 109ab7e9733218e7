"""Watching the heartbeats of an attempt: who hangs, and its stacks before anything is killed.

Progress is a step completed or a phase entered. How long a rank may go without is learned by phase
(those of a step are one): five
times the longest that was seen in this run, after its first steps, and never less than a floor.
Until then generous limits hold. A rank that was never heard of counts as in "startup": a monitor
that is blind doesn't take that for health. How long that may take is learned from lives that
resumed: they hash the data and read a checkpoint, which the first doesn't.

Time counts only while the monitor itself runs: after a machine slept, or a supervisor was stopped,
nobody is accused of the time in between.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tapeline.clock import Clock
from tapeline.ledger import Beat, heartbeat_path, read_heartbeat
from tapeline.ledger.tail import kernel_state
from tapeline.signals import Evidence, Exit, Heartbeat, Limits, RankEvidence, Verdict, triage
from tapeline.supervise.launch import Launch
from tapeline.supervise.processes import publish

_NS_PER_S = 1e9
_LONGEST_GAP_S = 1.0  # between two looks; what is beyond was not watched
_FIRST_STEPS = 5  # of an attempt: compilation, caches, the first allocation
_STACKS_S = 2.0


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long a rank may go without progress, in seconds.

    Attributes:
        factor: times the longest that was seen in a phase.
        floor_s: the least, for the phases of a step.
        slow_floor_s: the least, for startup, restore, checkpoint and evaluation.
        unlearned_s: for the phases of a step, until something was seen.
        slow_unlearned_s: for the others.
    """

    factor: float = 5.0
    floor_s: float = 5.0
    slow_floor_s: float = 30.0
    unlearned_s: float = 300.0
    slow_unlearned_s: float = 900.0


_SLOW = ("startup", "restore", "checkpoint", "evaluation")
_STEP = "step"  # all other phases: a look sees too few of a step's parts to tell them apart


@dataclass(slots=True)
class _Seen:
    """The last progress of one rank, and for how long it has been watched since."""

    beat: Beat | None = None
    watched_s: float = 0.0
    first_step: int | None = None


@dataclass(slots=True)
class Monitor:
    """Watches one run over its attempts; what it has learned holds for all of them.

    Args:
        run: folder of the run.
        limits: what to learn by.
        clock: for the time between looks.
    """

    run: Path
    limits: HangLimits
    clock: Clock
    longest_s: dict[str, float] = field(default_factory=dict)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _looked_ns: int = 0
    _resumes: bool = False

    def begin(self, launch: Launch, *, resumes: bool) -> None:
        """Watch this machine's ranks of a new attempt, which resumes the run or begins it."""
        self._resumes = resumes
        self._seen = {rank: _Seen() for rank in launch.share.ranks}
        self._looked_ns = self.clock.monotonic_ns()

    def look(self, launch: Launch) -> None:
        """Read the heartbeats; to be called often."""
        now_ns = self.clock.monotonic_ns()
        passed_s = min((now_ns - self._looked_ns) / _NS_PER_S, _LONGEST_GAP_S)
        self._looked_ns = now_ns
        pids = launch.pids()
        for rank, seen in self._seen.items():
            beat = read_heartbeat(heartbeat_path(self.run, rank))
            seen.watched_s += passed_s
            if beat is None or beat.pid != pids.get(rank):
                continue  # of an attempt before
            before = seen.beat
            if before and (beat.step, beat.phase) == (before.step, before.phase):
                continue
            if seen.first_step is None:
                seen.first_step = beat.step
            self._learn(before, seen)
            seen.beat, seen.watched_s = beat, 0.0

    def hung(self, launch: Launch) -> list[int]:
        """Ranks that run, and have gone without progress for longer than they may."""
        exits = launch.exits()
        return [
            rank
            for rank, seen in self._seen.items()
            if rank not in exits and seen.watched_s > self.allowed_s(_phase(seen))
        ]

    def allowed_s(self, phase: str) -> float:
        """How long a phase may take, by what was seen so far."""
        slow, limits = phase in _SLOW, self.limits
        longest_s = self.longest_s.get(_kind(phase))
        if longest_s is None:
            return limits.slow_unlearned_s if slow else limits.unlearned_s
        return max(limits.factor * longest_s, limits.slow_floor_s if slow else limits.floor_s)

    def limit_text(self, rank: int) -> str:
        """For how long a rank went without progress when that was too long, and by what."""
        phase = _phase(self._seen[rank])
        by = "until one is learned" if phase in _SLOW else "by supervision.first_steps_s"
        if _kind(phase) in self.longest_s:
            by = "learned from the run"
        return f"for {self.allowed_s(phase):.3g} s in {phase}, the limit {by}"

    def steps(self) -> dict[int, int]:
        """Steps done, of each rank that was heard of in this attempt."""
        return {rank: seen.beat.step for rank, seen in self._seen.items() if seen.beat}

    def evidence(self, launch: Launch, host: str, *, over: bool = False) -> Evidence:
        """What a triage needs to say who failed first, or who is waited for.

        Args:
            launch: of the attempt.
            host: this machine's name.
            over: the attempt has ended everywhere: a rank of another machine that has left no end
                is lost with it.
        """
        exits, pids = launch.exits(), launch.pids()
        for rank, found in exits.items():
            if found.code:
                exits[rank] = _with_words(found, launch.errors_of(rank))
        share = launch.share  # of other machines' ranks, only how they ended is seen here
        ranks = [
            RankEvidence(rank, f"node {rank // share.num_local}", exit=exits.get(rank, Exit()))
            for rank in set(range(share.num_ranks)) - self._seen.keys()
            if over or rank in exits
        ]
        for rank, seen in self._seen.items():
            beat = seen.beat
            heart = Heartbeat(beat.step, beat.phase, seen.watched_s) if beat else None
            end = exits.get(rank)
            state = None if end else _state(pids.get(rank))
            ranks.append(RankEvidence(rank, host, heartbeat=heart, exit=end, process_state=state))
        return Evidence(share.num_ranks, tuple(ranks))

    def stuck_limits(self) -> Limits:
        """The limits in the terms of a triage."""
        return Limits(
            stuck_s={phase: self.allowed_s(phase) for phase in _SLOW},
            stuck_else_s=self.allowed_s(_STEP),
        )

    def collect_stacks(self, launch: Launch, host: str) -> Verdict:
        """Have every rank write its stacks and end, and keep them with what is known of the hang.

        A rank that was stopped is continued for that: it writes its stacks, and does nothing else.

        Returns:
            Who is waited for, as `hang.json` in the attempt's folder says too.
        """
        evidence = self.evidence(launch, host)
        verdict = triage(evidence, self.stuck_limits())[0]
        found = {
            "verdict": verdict.as_dict(),
            "ranks": [
                {
                    "rank": rank.rank,
                    "state": rank.process_state,
                    "step": rank.heartbeat.step if rank.heartbeat else None,
                    "phase": rank.heartbeat.phase if rank.heartbeat else None,
                    "age_s": rank.heartbeat.age_s if rank.heartbeat else None,
                    "limit_s": self.allowed_s(_phase(self._seen[rank.rank])),
                }
                for rank in evidence.ranks
                if rank.rank in self._seen
            ],
        }
        node = launch.share.node.index
        publish(launch.folder / (f"hang-{node}.json" if node else "hang.json"), found)
        launch.signal(signal.SIGUSR2)
        launch.signal(signal.SIGCONT)
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline and self._seen.keys() - launch.exits().keys():
            time.sleep(0.02)
        return verdict

    def _learn(self, before: Beat | None, seen: _Seen) -> None:
        phase = before.phase if before else "startup"
        if phase == "startup" and not self._resumes:
            return
        if before and phase not in _SLOW and before.step < (seen.first_step or 0) + _FIRST_STEPS:
            return
        kind = _kind(phase)
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), seen.watched_s)


def _kind(phase: str) -> str:
    return phase if phase in _SLOW else _STEP


def _phase(seen: _Seen) -> str:
    return seen.beat.phase if seen.beat else "startup"


def _with_words(end: Exit, lines: list[str]) -> Exit:
    """An end with what the rank said last, which tells a fault of its own from another's."""
    said = [line for line in lines if line.strip()]
    return Exit(
        code=end.code,
        exception=said[-1].removeprefix("tapeline: ").removesuffix(".") if said else None,
        time_ns=end.time_ns,
        by_supervisor=end.by_supervisor,
    )


def _state(pid: int | None) -> str | None:
    """The letter that the kernel gives a process."""
    if pid is None:
        return None
    with contextlib.suppress(psutil.Error):
        return kernel_state(psutil.Process(pid))
    return None
