"""When a life of a run saves: at every so many steps, or as measured costs say.

Covers: taking the times between hooks, handing them to the interval controller, and the journal
of what it decides. Does not cover how the interval is chosen (`checkpoint.interval`).
"""

from __future__ import annotations

import socket
from pathlib import Path

from tapeline.checkpoint import Checkpointer, SaveStats
from tapeline.checkpoint.interval import Decision, IntervalController
from tapeline.clock import Clock
from tapeline.config import CheckpointConfig
from tapeline.files import Journal
from tapeline.ledger import account, ledger_path, read_ledger
from tapeline.runs import RunFolder
from tapeline.training.ranks import from_first
from tapeline.world import World

_S_PER_HOUR = 3600.0
_NS = 1e9


class Cadence:
    """Decides at which steps to save, and keeps the times it is decided by.

    After each step the loop's hook calls `step_done`, asks `due`, calls `saved` after a save, and
    `go_on` last: what hooks do between the two is not part of a step.

    Args:
        every: steps between saves, or the controller.
        last: the last step of the run, which is always saved.
        checkpointer: its counters are read.
        clock: for the times.
        world: the ranks that save together: they measure different times, so rank 0 decides.
    """

    def __init__(
        self,
        every: int | IntervalController,
        last: int,
        checkpointer: Checkpointer,
        clock: Clock,
        world: World,
    ) -> None:
        self._controller = every if isinstance(every, IntervalController) else None
        self._every = every if isinstance(every, int) else 0
        self.last = last
        self._checkpointer = checkpointer
        self._clock = clock
        self._world = world
        self._stats = SaveStats()
        self._began_ns = clock.monotonic_ns()
        self.longest_step_s = 0.0
        self.longest_save_s = 0.0

    def step_done(self, number: int, *, writing: bool) -> None:
        """Take the time of step `number`, and of a background write that has ended."""
        # A clock that stood still must not make a step of no length: costs are divided by it.
        seconds = max(1, self._clock.monotonic_ns() - self._began_ns) / _NS
        if seconds > self.longest_step_s:
            self.longest_step_s = seconds
        if self._controller:
            self._controller.step_done(seconds, writing=writing)
        if (stats := self._checkpointer.stats()) is not self._stats:
            self._saves_counted(number, stats)

    def _saves_counted(self, number: int, stats: SaveStats) -> None:
        written_s, self._stats = stats.background_s - self._stats.background_s, stats
        if written_s > 0:
            self.longest_save_s = max(self.longest_save_s, written_s)
            if self._controller:
                self._controller.written(number, written_s)

    def due(self, number: int) -> bool:
        """Whether to save after step `number`."""
        controller = self._controller
        if controller is None:
            return number % self._every == 0 or number == self.last
        if self._world.size == 1:
            return controller.due(number)
        return from_first(self._world, lambda: controller.due(number))

    def saved(self, number: int) -> None:
        """Take what a save after step `number` cost the loop."""
        blocked_s = self._checkpointer.stats().blocked_s - self._stats.blocked_s
        self.longest_save_s = max(self.longest_save_s, blocked_s)
        if self._controller:
            self._controller.saved(number, blocked_s, writing=self._checkpointer.busy)

    def go_on(self) -> None:
        """The next step begins now."""
        self._began_ns = self._clock.monotonic_ns()


def interval_controller(
    run: RunFolder, settings: CheckpointConfig, *, attempt: int, first: int, last: int
) -> IntervalController:
    """The controller of `checkpoint.every = "auto"` for one life; its decisions are journalled.

    Lives before are counted as long as rank 0's ledger knows of them: one that was killed, until
    its last sign of life.
    """
    path = run.intervals_path

    def log(decision: Decision) -> None:
        with Journal(path) as journal:
            journal.append({"attempt": attempt, **decision.as_record()})

    earlier = [life for life in run.attempts() if life["attempt"] < attempt]
    return IntervalController(
        first_step=first,
        total_steps=last,
        job=f"{socket.gethostname()}:{Path(run.path).absolute()}",
        mtbf_s=settings.mtbf_hours * _S_PER_HOUR if settings.mtbf_hours else None,
        num_failures=sum(life.get("how") in ("killed", "failed") for life in earlier),
        exposure_s=_exposure_s(run, attempt) if earlier else 0.0,
        log=log,
    )


def _exposure_s(run: RunFolder, attempt: int) -> float:
    """How long the lives before this one lived, as rank 0's ledger knows."""
    (rank,) = account([read_ledger(ledger_path(run.path, 0))]).ranks
    return sum(life.lived_ns for life in rank.lives if life.attempt < attempt) / _NS
