"""The supervisor: starts a run, watches it, and starts it again until it is done or can't be.

Covers one machine, also as one of several (`nodes`). Each attempt: choose places, start, watch,
collect, end whatever is left, say who failed first, decide. SIGTERM, SIGINT or SIGUSR1 end the
attempt everywhere: the ranks save between the same two steps, and the supervisor ends with the
exit code for "start me again".
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from tapeline.clock import Clock
from tapeline.errors import RunError
from tapeline.signals import Verdict, triage
from tapeline.supervise.alerts import Alerts, write_gauges
from tapeline.supervise.elastic import change_text, load
from tapeline.supervise.history import History
from tapeline.supervise.job import Job, Outcome, Rules
from tapeline.supervise.launch import Engine, Launch
from tapeline.supervise.monitor import Monitor
from tapeline.supervise.nodes import Begin, Nodes
from tapeline.supervise.places import Places, devices
from tapeline.supervise.policy import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_REFUSED,
    EXIT_REQUEUE,
    EXIT_STOPPED,
    Action,
    Ended,
    How,
    decide,
)
from tapeline.supervise.quarantine import FILE, Quarantine
from tapeline.supervise.stragglers import Pace

_POLL_S = 0.02
_GAUGES_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(slots=True, repr=False)  # setting a signal's handler takes the repr of its object
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
    _nodes: Nodes = field(init=False)
    _pace: Pace = field(init=False)
    _stop: bool = field(init=False, default=False)
    _lives: int = field(init=False, default=0)  # of the run, before this attempt
    _lives_before: int = field(init=False)  # and before all of this supervisor's
    _ranks_before: int | None = field(init=False, default=None)
    _told_ns: int = field(init=False, default=0)
    _grow_asked: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._history = History(self.job.run)
        self._lives_before = self._history.num_lives()
        self._monitor = Monitor(self.job.run, self.rules.hang, self.clock)
        quarantine = Quarantine(self.job.run / FILE, self.rules.quarantine)
        self._places = Places(
            self.job.ranks,
            self.job.training,
            quarantine,
            self.rules.health,
            self.alerts,
            self.clock,
        )
        self._nodes = Nodes(
            self.job.node, self._history, self._places.host, lambda: self._stop, self.alerts.say
        )

    def supervise(self) -> Outcome:
        """Bring the run to its end.

        Raises:
            RunError: another supervisor looks after it, its ranks can't be ended, or what happened
                can't be written down.
        """
        node = self.job.node.index
        with (
            self._history.locked(node),
            self._signals(),
            contextlib.closing(self.alerts),
            contextlib.closing(self.engine),
        ):
            try:
                return self._attempts()
            except OSError as error:
                raise RunError(
                    self.job.run,
                    expected="room and permission for a supervisor's notes",
                    found=error.strerror or str(error),
                    fix="Make room, and start the same command again: it goes on from the newest "
                    "checkpoint",
                ) from error

    def _attempts(self) -> Outcome:
        while True:
            slots = self._slots()
            begin = self._nodes.begin(len(slots)) if slots else None
            if begin is None:
                return self._never_begun()
            launch, verdict = self._attempt(slots, begin)
            if not self._nodes.leads:
                continue
            action = self._decide()
            if not action.restart:
                return self._outcome(launch, verdict, action)
            self.alerts.say(f"{action.reason}, in {action.delay_s:.1f} s")
            self._sleep(action.delay_s)

    def _never_begun(self) -> Outcome:
        """Told to stop before an attempt, or as one of several machines that node 0 ended."""
        code, reason = self._nodes.decided() or (EXIT_REQUEUE, "told to stop")
        return Outcome(code, reason, (), "", len(self._history.ended))

    def _decide(self) -> Action:
        action = decide(self._history.ended, self.rules.policy, told=self._stop)
        if action.alert and action.restart:  # an end has an alert of its own
            number = len(self._history.ended)
            self.alerts.send("restarts", f"{self.job.run}: {number} attempts, {action.reason}")
        return action

    def _outcome(self, launch: Launch, verdict: Verdict | None, action: Action) -> Outcome:
        code, reason = action.exit_code, action.reason
        if code == EXIT_STOPPED:
            reason = f"{reason}: {self._history.stopped(after=self._lives)}"
        self._nodes.decide(launch.folder, code, reason)
        said = () if code else tuple(launch.errors_of(0))
        if code == EXIT_REFUSED and verdict:
            said = tuple(launch.errors_of(verdict.ranks[0]))
        elif code == EXIT_DO_NOT_REQUEUE:
            said = _words(launch, verdict)
            self.alerts.send("ended", f"{self.job.run}: given up, {reason}")
        return Outcome(code, reason, said, launch.output(), len(self._history.ended))

    # One attempt

    def _attempt(self, slots: list[int], begin: Begin) -> tuple[Launch, Verdict | None]:
        """Start, watch and end it; what is known of who failed first."""
        before, self._ranks_before = self._ranks_before, len(slots)
        if before not in (None, len(slots)):
            self.alerts.send("ranks", change_text(before or 0, len(slots), self.job.training))
        began_ns = self.clock.wall_ns()
        committed, self._lives = self._history.committed(), self._history.num_lives()
        command = self.job.resume if begin.resumes else self.job.begin
        environment = {"TAPELINE_ATTEMPT": str(begin.number), **devices(slots, os.environ)}
        number = begin.share.num_ranks
        loads = [load(rank, number, self.job.training) for rank in range(number)]
        self._pace = Pace(self.job.run, loads, self.rules.slow, self.clock)
        launch = self.engine.start(begin.folder, begin.share, command, environment)
        self._monitor.begin(launch, resumes=begin.resumes)
        try:
            planned, hung = self._watch(launch, slots, committed)
        finally:
            launch.end()
        stopped = self._history.stopped(after=self._lives)
        how = "stopped" if stopped else _how(launch, hung=hung is not None)
        self._nodes.end(launch.folder, how)
        verdict = hung
        if how in ("failed", "killed"):
            evidence = self._monitor.evidence(launch, self._places.host, over=True)
            verdict = triage(evidence, self._monitor.stuck_limits())[0]
            how = self._how_first(launch, verdict)
        if self._nodes.leads:
            ended = Ended(
                how,
                began_ns,
                self.clock.wall_ns(),
                self._history.committed(),
                planned and how == "preempted",
            )
            self._note(begin, ended, verdict, slots)
        return launch, verdict

    def _how_first(self, launch: Launch, verdict: Verdict) -> How:
        """How the first to fail ended: the others' ends are of its making.

        What has trained once under this supervisor isn't refused any more: it then failed.
        """
        exits = launch.exits()
        first = [exits[rank] for rank in verdict.ranks if rank in exits]
        if any(end.signal and not end.by_supervisor for end in first):
            return "killed"
        begun = self._history.num_lives() > self._lives_before
        refused = any(end.code == EXIT_REFUSED for end in first) and not begun
        return "refused" if refused else "failed"

    def _watch(
        self, launch: Launch, slots: list[int], committed: int
    ) -> tuple[bool, Verdict | None]:
        """Until it is over: whether it was stopped to go on with other ranks, and who hung."""
        stopped_s: float | None = None
        failed_s: float | None = None
        planned = False
        while True:
            gone = launch.gone()  # before the ends are read, so that none is missed
            self._monitor.look(launch)
            self.alerts.look()
            self._tell(len(slots))
            exits, others = launch.exits(), self._nodes.others(launch.folder)
            now_s = time.monotonic()
            if len(exits) == launch.share.num_ranks or (gone and all(others)):
                return planned, None
            failed = any(how in ("failed", "killed", "hung") for how in others)
            if failed or any(not end.orderly for end in exits.values()):
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
        who = ", ".join(map(str, ranks))
        they = f"ranks {who} make" if len(ranks) > 1 else f"rank {who} makes"
        limit = self._monitor.limit_text(ranks[0])
        self.alerts.send("hang", f"{self.job.run}: {they} no progress {limit}")
        if self.rules.policy.record_only:
            return None
        return self._monitor.collect_stacks(launch, self._places.host)

    def _note(
        self,
        begin: Begin,
        ended: Ended,
        verdict: Verdict | None,
        slots: list[int],
    ) -> None:
        """Keep how an attempt ended, in the supervisor's history and in the run's record."""
        how = ended.how
        evidence = "; ".join(verdict.evidence) if verdict else f"its ranks ended: {how}"
        steps = self._monitor.steps()
        self._history.note_end(
            after=self._lives,
            how=how if how in ("preempted", "failed") else "killed",
            step=min(steps.values(), default=None),
            evidence=evidence,
            wall_ns=ended.ended_ns,
            elsewhere=verdict is not None and 0 not in verdict.ranks,
        )
        self._history.add(
            ended,
            attempt=begin.number,
            ranks=begin.share.num_ranks,
            slots=slots,
            first=list(verdict.ranks) if verdict else [],
            evidence=evidence,
        )
        if verdict is None or self._stop or how == "refused":
            return
        self.alerts.send(
            "attempt", f"{self.job.run}: attempt {begin.number} {how}; {verdict.evidence[0]}"
        )
        if len(verdict.ranks) == 1:
            node, local = divmod(verdict.ranks[0], begin.share.num_local)
            host = self._nodes.host_of(begin.folder, node)
            self._places.failed(f"{host}:{slots[local]}", verdict.evidence[0])

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
        if not self._nodes.leads:
            return False
        return self._evicts(slots) or self._can_grow(len(slots), committed)

    def _evicts(self, slots: list[int]) -> bool:
        """Tell of new stragglers; whether the place of one was given up, by the rules."""
        evicted, alone = False, self.job.node.number == 1
        may_evict = self.rules.evict and alone and not self.rules.policy.record_only
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
        if not self._nodes.leads or now_ns - self._told_ns < _GAUGES_S * 1e9:
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
            self.alerts.look()
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
    if len(exits) == launch.share.num_ranks:
        if all(end.code == 0 for end in exits):
            return "finished"
        if all(end.orderly for end in exits):
            return "preempted"
    return "failed"


def _words(launch: Launch, verdict: Verdict | None) -> tuple[str, ...]:
    """What the first rank to fail said last, under who that was."""
    ranks = verdict.ranks if verdict else ()
    said = launch.errors_of(ranks[0]) if ranks else launch.said()
    return (*(verdict.evidence[:1] if verdict else ()), *said)
