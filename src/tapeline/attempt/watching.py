"""Watching a life: findings journalled as they are made, and what the configuration does of them.

Covers feeding the watchers at the logging interval, on the rank that writes, and ending the life
on all ranks where a finding asks for it. Does not cover how a life is begun again (`life`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tapeline.attempt.course import Course, RolledBack, read_passed_over
from tapeline.attempt.observer import Observer
from tapeline.attempt.parts import Parts
from tapeline.checkpoint import Shelf
from tapeline.errors import TrainingError
from tapeline.files import Journal
from tapeline.runs import MachineFigures, RunFolder, read_metrics
from tapeline.signals import Action, Finding, Snapshot, Watch
from tapeline.training.ranks import from_first


class Watching:
    """The watchers of one life.

    Args:
        run: its folder.
        parts: configuration and ranks.
        observer: of this life.
        course: the batches of this life.
    """

    def __init__(self, run: RunFolder, parts: Parts, observer: Observer, course: Course) -> None:
        self._run = run
        self._world = parts.world
        self._observer = observer
        self._course = course
        self._most_rollbacks = parts.config.watch.rollbacks
        self._actions = {
            name: Action(action) for name, action in parts.config.watch.actions().items()
        }
        self.acts = any(action is not Action.LOG for action in self._actions.values())
        self._watch = self._watcher(parts) if observer.writes else None
        self._asked: Finding | None = None

    def _watcher(self, parts: Parts) -> Watch:
        observer = self._observer
        history = Snapshot()
        if observer.first:
            history = read_metrics(self._run.metrics_path(0)).snapshot
        training, schedule = parts.config.training, parts.step.schedule

        def planned(step: int) -> float:
            factor = 1.0 if schedule is None else schedule(step - 1)
            return training.scaled_learning_rate * factor

        return Watch(
            history,
            from_step=observer.first,
            schedule=planned,
            actions=self._actions,
            # What is acted on must not depend on how fast the machine is.
            every_s=0.0 if self.acts else 1.0,
            clock=observer.clock,
        )

    @property
    def mends_non_finite(self) -> bool:
        """Whether a loss that isn't finite is rolled back to before it was."""
        return self._actions["non_finite"] is Action.ROLLBACK

    def learnt(
        self,
        number: int,
        losses: Sequence[float],
        norms: Sequence[float],
        rate: float,
        machine: MachineFigures | None,
    ) -> None:
        """Look at what the steps up to `number` learnt; findings are journalled."""
        assert self._watch, "only the rank that writes looks"
        metrics: dict[str, float | Sequence[float]] = {"loss": losses, "learning_rate": rate}
        if norms:
            metrics["grad_norm"] = norms
        for name in ("samples_per_s", "rss_bytes", "device_bytes", "utilisation"):
            if machine and (value := getattr(machine, name)) is not None:
                metrics[name] = float(value)
        self._tell(self._watch.observe(number, metrics))

    def look(self) -> None:
        """Look at what wasn't looked at yet; for the end of a life."""
        if self._watch:
            self._tell(self._watch.look())

    def _tell(self, findings: Sequence[Finding]) -> None:
        if not findings:
            return
        with Journal(self._run.findings_path) as journal:
            attempt = self._observer.attempt
            journal.append(*({"attempt": attempt, **one.as_dict()} for one in findings))
        asked = [one for one in findings if one.action is not Action.LOG]
        if asked and self._asked is None:
            self._asked = min(asked, key=lambda one: one.step)

    def act(self) -> None:
        """End the life, if a finding asks for it; every rank must call it at the same steps.

        Raises:
            RolledBack: what it showed in is recorded as passed over.
            TrainingError: it asks for a halt, or can't be rolled back.
        """
        if self.acts and from_first(self._world, self._decide):
            raise RolledBack

    def _decide(self) -> bool:
        """Whether to roll back; on the rank that writes."""
        asked = self._asked
        if asked is None:
            return False
        # What began before this life is only known to lie before its batches.
        first = max(asked.step, self._observer.first + 1)
        hindrance = self._hindrance(first) if asked.action is Action.ROLLBACK else None
        if asked.action is Action.HALT or hindrance:
            raise TrainingError(
                f"step {asked.step}, watcher {asked.watcher}",
                expected="nothing that halts the run"
                if hindrance is None
                else f"to roll back, but {hindrance}",
                found=asked.seen,
                fix=f"It usually means {asked.means}",
            )
        self._course.pass_over(
            self._run,
            self._observer.attempt,
            (first, max(first, asked.last_step)),
            f"{asked.watcher}: {asked.seen}",
        )
        return True

    def _hindrance(self, step: int) -> str | None:
        """Why it can't be rolled back to before a step; None if it can."""
        if len(read_passed_over(self._run)) >= self._most_rollbacks:
            return f"that was done {self._most_rollbacks} times (watch.rollbacks)"
        steps = Shelf(self._run.checkpoints_path).steps()
        if steps and min(steps) >= step:
            return f"the oldest checkpoint is of step {min(steps)}"
        return None
