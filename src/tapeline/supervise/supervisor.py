"""The supervisor: starts a run, watches it, and starts it again until it is done or can't be.

Covers one machine. Each attempt: choose places, start, watch, collect, end whatever is left, say
who failed first, decide. SIGTERM, SIGINT or SIGUSR1 end the attempt everywhere: the ranks save
between the same two steps, and the supervisor ends with the exit code for "start me again".
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tapeline.clock import Clock
from tapeline.config import TrainingConfig
from tapeline.signals import Verdict, triage
from tapeline.supervise.alerts import Alerts, write_gauges
from tapeline.supervise.elastic import Ranks, change_text, load
from tapeline.supervise.history import History
from tapeline.supervise.launch import Engine, Launch
from tapeline.supervise.monitor import HangLimits, Monitor
from tapeline.supervise.places import Places, devices
from tapeline.supervise.policy import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_REQUEUE,
    Action,
    Ended,
    How,
    Policy,
    decide,
)
from tapeline.supervise.quarantine import Quarantine, Rule
from tapeline.supervise.stragglers import Pace, SlowLimits

_POLL_S = 0.02
_GAUGES_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Job:
    """What is supervised.

    Attributes:
        run: its folder.
        begin: program and arguments that begin it.
        resume: that go on with it, once it has begun.
        ranks: how many.
        training: what decides on how many it can be trained; None allows any number.
    """

    run: Path
    begin: tuple[str, ...]
    resume: tuple[str, ...]
    ranks: Ranks = field(default_factory=Ranks)
    training: TrainingConfig | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """By what it is supervised.

    Attributes:
        policy: when to start again.
        hang: when a rank hangs.
        quarantine: when a place is left out.
        slow: when a rank is a straggler.
        evict: put the place of one in quarantine and go on without, where that is faster.
        health: a shell command that says by exit code 0 that TAPELINE_SLOT can be used.
        settle_s: after the first failure, how long the other ranks may take to say theirs.
        grace_s: after a stop, how long they may take to save.
    """

    policy: Policy = field(default_factory=Policy)
    hang: HangLimits = field(default_factory=HangLimits)
    quarantine: Rule = field(default_factory=Rule)
    slow: SlowLimits = field(default_factory=SlowLimits)
    evict: bool = False
    health: str | None = None
    settle_s: float = 0.5
    grace_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended.

    Attributes:
        exit_code: for the scheduler.
        reason: in words.
        first: what the first rank to fail said last; empty for a good end.
        output: what rank 0 printed in the last attempt.
        attempts: how many there were, in all lives of supervisors.
    """

    exit_code: int
    reason: str
    first: tuple[str, ...]
    output: str
    attempts: int


@dataclass(slots=True)
class Supervisor:
    """Looks after one run.

    Args:
        job: what.
        rules: by what.
        engine: starts ranks.
        alerts: who is told.
        clock: for the times of the record.
        stepped: called often with the lowest step of all ranks.
    """

    job: Job
    rules: Rules
    engine: Engine
    alerts: Alerts
    clock: Clock
    stepped: Callable[[int], None] = lambda _: None
    _history: History = field(init=False)
    _monitor: Monitor = field(init=False)
    _places: Places = field(init=False)
    _pace: Pace = field(init=False)
    _stop: bool = field(init=False, default=False)
    _ranks_before: int | None = field(init=False, default=None)
    _told_ns: int = field(init=False, default=0)
    _grow_asked: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._history = History(self.job.run)
        self._monitor = Monitor(self.job.run, self.rules.hang, self.clock)
        quarantine = Quarantine(self._history.folder / "quarantine.json", self.rules.quarantine)
        self._places = Places(
            self.job.ranks,
            self.job.training,
            quarantine,
            self.rules.health,
            self.alerts,
            self.clock,
        )

    def supervise(self) -> Outcome:
        """Bring the run to its end.

        Raises:
            RunError: another supervisor looks after it, or its ranks can't be ended.
        """
        with self._history.locked(), self._signals(), contextlib.closing(self.engine):
            while True:
                slots = self._slots()
                if not slots:
                    return Outcome(EXIT_REQUEUE, "told to stop", (), "", len(self._history.ended))
                launch, verdict = self._attempt(slots)
                action = self._decide()
                if not action.restart:
                    return self._outcome(launch, verdict, action)
                self.alerts.say(f"{action.reason}, in {action.delay_s:.1f} s")
                self._sleep(action.delay_s)

    def _decide(self) -> Action:
        action = decide(self._history.ended, self.rules.policy, told=self._stop)
        if action.alert:
            number = len(self._history.ended)
            self.alerts.send("restarts", f"{self.job.run}: {number} attempts, {action.reason}")
        return action

    def _outcome(self, launch: Launch, verdict: Verdict | None, action: Action) -> Outcome:
        code, why = action.exit_code, self._history.stopped()
        reason = f"{action.reason}: {why}" if why else action.reason
        first = _words(launch, verdict) if code == EXIT_DO_NOT_REQUEUE else ()
        if code == EXIT_DO_NOT_REQUEUE:
            self.alerts.send("ended", f"{self.job.run}: given up, {reason}")
        return Outcome(code, reason, first, launch.output(), len(self._history.ended))

    # One attempt

    def _attempt(self, slots: list[int]) -> tuple[Launch, Verdict | None]:
        """Start, watch and end it; what is known of who failed first."""
        before, self._ranks_before = self._ranks_before, len(slots)
        if before not in (None, len(slots)):
            self.alerts.send("ranks", change_text(before or 0, len(slots), self.job.training))
        number, folder = self._history.next_attempt()
        began_ns = self.clock.wall_ns()
        committed = self._history.committed()
        command = self.job.resume if self._history.begun() else self.job.begin
        environment = {"TAPELINE_ATTEMPT": str(number), **devices(slots, os.environ)}
        loads = [load(rank, len(slots), self.job.training) for rank in range(len(slots))]
        self._pace = Pace(self.job.run, loads, self.rules.slow, self.clock)
        launch = self.engine.start(folder, len(slots), command, environment)
        self._monitor.begin(launch)
        try:
            planned, hung = self._watch(launch, slots, committed)
        finally:
            launch.end()
        how = "stopped" if self._history.stopped() else _how(launch, hung=hung is not None)
        verdict = hung
        if how in ("failed", "killed"):
            evidence = self._monitor.evidence(launch, self._places.host)
            verdict = triage(evidence, self._monitor.stuck_limits())[0]
        self._note(number, how, verdict, slots, began_ns, planned=planned and how == "preempted")
        return launch, verdict

    def _watch(
        self, launch: Launch, slots: list[int], committed: int
    ) -> tuple[bool, Verdict | None]:
        """Until it is over: whether it was stopped to go on with other ranks, and who hung."""
        num_ranks = len(slots)
        stopped_s: float | None = None
        failed_s: float | None = None
        planned = False
        while True:
            gone = launch.gone()  # before the ends are read, so that none is missed
            self._monitor.look(launch)
            self._tell(num_ranks)
            exits, now_s = launch.exits(), time.monotonic()
            if len(exits) == num_ranks or gone:
                return planned, None
            if any(not end.orderly for end in exits.values()):
                failed_s = failed_s or now_s
                if now_s - failed_s > self.rules.settle_s:
                    return planned, None
            if stopped_s is None and (self._stop or self._moves(slots, committed)):
                planned, stopped_s = not self._stop, now_s
                launch.signal(signal.SIGTERM)
            if stopped_s and now_s - stopped_s > self.rules.grace_s:
                return planned, None
            if hung := self._monitor.hung(launch):
                verdict = self._hung(launch, hung)
                if not self.rules.policy.record_only:
                    return planned, verdict
            time.sleep(_POLL_S)

    def _hung(self, launch: Launch, ranks: list[int]) -> Verdict | None:
        text = f"{self.job.run}: ranks {', '.join(map(str, ranks))} make no progress"
        self.alerts.send("hang", text)
        if self.rules.policy.record_only:
            return None
        return self._monitor.collect_stacks(launch, self._places.host)

    def _note(
        self,
        number: int,
        how: How,
        verdict: Verdict | None,
        slots: list[int],
        began_ns: int,
        *,
        planned: bool,
    ) -> None:
        """Keep how an attempt ended, in the supervisor's history and in the run's record."""
        now_ns = self.clock.wall_ns()
        evidence = "; ".join(verdict.evidence) if verdict else f"its ranks ended: {how}"
        steps = self._monitor.steps()
        self._history.note_end(
            how="preempted" if how == "preempted" else "killed",
            step=min(steps.values(), default=None),
            evidence=evidence,
            wall_ns=now_ns,
        )
        ended = Ended(how, began_ns, now_ns, self._history.committed(), planned)
        self._history.add(
            ended,
            attempt=number,
            ranks=len(slots),
            slots=slots,
            first=list(verdict.ranks) if verdict else [],
            evidence=evidence,
        )
        if verdict is None or self._stop:
            return
        self.alerts.send(
            "attempt", f"{self.job.run}: attempt {number} {how}; {verdict.evidence[0]}"
        )
        if len(verdict.ranks) == 1:
            self._places.failed(slots[verdict.ranks[0]], verdict.evidence[0])

    # Places

    def _slots(self) -> list[int]:
        """Where the next attempt goes; waits until there is enough, none if told to stop."""
        while not self._stop:
            if slots := self._places.choose():
                return slots
            self._sleep(1.0)
        return []

    def _moves(self, slots: list[int], committed: int) -> bool:
        """Whether to go on elsewhere: without a straggler, or on more places."""
        return self._evicts(slots) or self._can_grow(len(slots), committed)

    def _evicts(self, slots: list[int]) -> bool:
        """Tell of new stragglers; whether the place of one was given up, by the rules."""
        evicted, may_evict = False, self.rules.evict and not self.rules.policy.record_only
        for slow in self._pace.look():
            self.alerts.send("straggler", f"{self.job.run}: {slow.text}")
            if may_evict and slow.behind and slow.times_best:
                slot = slots[slow.rank]
                evicted |= self._places.evict(slot, len(slots), slow.times_best, slow.text)
        return evicted

    def _can_grow(self, num_ranks: int, committed: int) -> bool:
        """Whether more places are fit than are used, and this attempt has saved a step."""
        if num_ranks == self.job.ranks.most:
            return False
        now_at = self._history.committed()
        if now_at <= max(committed, self._grow_asked):
            return False
        self._grow_asked = now_at  # once for each saved step: a health check may take long
        return self._places.more_than(num_ranks)

    # The rest

    def _tell(self, num_ranks: int) -> None:
        steps = self._monitor.steps()
        self.stepped(min(steps.values(), default=0))
        now_ns = self.clock.monotonic_ns()
        if now_ns - self._told_ns < _GAUGES_S * 1e9:
            return
        self._told_ns = now_ns
        heard = len(steps) == num_ranks
        gauges = {
            "up": 1.0,
            "ranks": float(num_ranks),
            "ranks_heard": float(len(steps)),
            "step": float(min(steps.values())) if heard else None,
            "attempts": float(len(self._history.ended) + 1),
            "committed_step": float(self._history.committed()),
        }
        write_gauges(self._history.folder / "metrics.prom", str(self.job.run), gauges)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._told) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, _: int, __: FrameType | None) -> None:
        self._stop = True


def _how(launch: Launch, *, hung: bool) -> How:
    exits = list(launch.exits().values())
    if hung:
        return "hung"
    if len(exits) == launch.num_ranks:
        if all(end.code == 0 for end in exits):
            return "finished"
        if all(end.orderly for end in exits):
            return "preempted"
    return "killed" if any(end.signal and not end.by_supervisor for end in exits) else "failed"


def _words(launch: Launch, verdict: Verdict | None) -> tuple[str, ...]:
    """What the first rank to fail said last, under who that was."""
    ranks = verdict.ranks if verdict else ()
    said = launch.errors_of(ranks[0]) if ranks else launch.said()
    return (*(verdict.evidence[:1] if verdict else ()), *said)
