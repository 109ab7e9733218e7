"""One life of a run: restore, train to the last step, save, say how it ended."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapeline.attempt.cadence import Cadence, interval_controller
from tapeline.attempt.keeper import Copies, Keeper, copying
from tapeline.attempt.origin import Origin, restore, run_identity
from tapeline.attempt.parts import Parts
from tapeline.checkpoint import (
    Checkpointer,
    Skipped,
    part_sha256,
    restore_state,
    state_sha256,
)
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.interval import IntervalController
from tapeline.checkpoint.preempt import Preempted, PreemptionGuard
from tapeline.checkpoint.resume import TaintJournal
from tapeline.checkpoint.retain import Retention
from tapeline.clock import Clock
from tapeline.config import CheckpointConfig
from tapeline.errors import TrainingError
from tapeline.runs import MetricsJournal, RunFolder, code_state
from tapeline.training import evaluate, loop

Progress = Callable[[int, int], None]

# A resume that came so far has shown that its checkpoint can be trained from. Few, so that a
# machine that is killed often doesn't put good checkpoints under suspicion.
_STEPS_TO_SURVIVE = 10


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run comes to.

    Attributes:
        folder: the run's folder.
        steps: steps done in all.
        from_step: where this life of the run began.
        state_sha256: over all state after the last step.
        part_sha256: over each part of it.
        losses: of every step, the later one where a step was done twice.
        validation: at the end; None without a validation split.
        skipped: checkpoints that were passed over on the way in, and why.
    """

    folder: Path
    steps: int
    from_step: int
    state_sha256: str
    part_sha256: dict[str, str]
    losses: list[float]
    validation: dict[str, Any] | None
    skipped: tuple[Skipped, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the losses as the mean of the last 50."""
        last = self.losses[-50:]
        return {
            "run": str(self.folder),
            "steps": self.steps,
            "from_step": self.from_step,
            "state_sha256": self.state_sha256,
            "part_sha256": self.part_sha256,
            "loss_last_50": sum(last) / len(last) if last else None,
            "validation": self.validation,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
        }


def live(run: RunFolder, parts: Parts, progress: Progress | None, clock: Clock) -> RunResult:
    """Bring a run to its last step, from wherever its last life left it.

    Raises:
        Preempted: it was told to stop, and saved.
        CheckpointError: there are checkpoints, and none can be used; or a save failed.
    """
    settings, steps = parts.config.checkpoint, parts.config.training.steps
    taints = taints_of(run)
    tier = DurableTier(settings.durable) if settings.durable else None
    origin = restore(run, tier, taints.tainted())
    if origin.state:
        restore_state(
            origin.state,
            parts.step.model,
            parts.step.optimizer,
            sampler=parts.loader,
            give_up=True,
        )
    attempt = run.begin_attempt(from_step=origin.step, world_size=1)
    if origin.identity:
        taints.resumed(origin.identity, step=origin.step, attempt=attempt)
    life = _Life(run, parts, taints, attempt, origin, progress, clock)
    try:
        copies = Copies(tier, settings.durable_every, steps) if tier else None
        with copying(copies):
            life.train(copies)
    except BaseException as error:
        how = _how(error)
        if how != "failed":
            taints.release()
        evidence = f"{type(error).__name__}: {error}"
        run.end_attempt(attempt, how=how, step=life.done, evidence=evidence)
        raise
    taints.release()
    run.end_attempt(attempt, how="finished", step=steps, evidence="its last step was saved")
    state = parts.state(steps)
    return RunResult(
        folder=run.path,
        steps=steps,
        from_step=origin.step,
        state_sha256=state_sha256(state),
        part_sha256=part_sha256(state),
        losses=list(run.losses().values()),
        validation=run.validations().get(steps),
        skipped=origin.skipped,
    )


def taints_of(run: RunFolder) -> TaintJournal:
    """Which checkpoints of a run failed on resume."""
    return TaintJournal(run.path / "taint.jsonl", within_steps=_STEPS_TO_SURVIVE)


def retention_of(settings: CheckpointConfig) -> Retention:
    """The rule that a configuration asks for."""
    return Retention(last=settings.keep, every=settings.keep_every, best=settings.keep_best)


def _how(error: BaseException) -> str:
    if isinstance(error, Preempted):
        return "preempted"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


class _Life:
    """The hooks of one life, and what they share."""

    def __init__(
        self,
        run: RunFolder,
        parts: Parts,
        taints: TaintJournal,
        attempt: int,
        origin: Origin,
        progress: Progress | None,
        clock: Clock,
    ) -> None:
        self._run = run
        self._parts = parts
        self._taints = taints
        self._attempt = attempt
        self._first = origin.step
        self._progress = progress
        self._clock = clock
        self._steps = parts.config.training.steps
        self.done = origin.step

    def train(self, copies: Copies | None) -> None:
        """Train to the last step."""
        config, clock = self._parts.config, self._clock
        guard = self._guard(config.checkpoint)
        checkpointer = self._checkpointer(copies)
        with (
            _entered_in_main_thread(guard),
            MetricsJournal(self._run.metrics_path(0), self._attempt) as metrics,
            checkpointer,
        ):
            losses = _LossHook(metrics, config.log_every)

            def settle(number: int) -> None:
                losses.write(number)
                metrics.sync()  # a checkpoint never covers steps whose metrics could be lost

            keeper = Keeper(
                checkpointer,
                Cadence(self._every(), self._steps, checkpointer, clock),
                guard,
                capture=self._parts.state,
                settle=settle,
                copies=copies,
                attempt=self._attempt,
                first=self._first,
            )

            def validate(number: int, _: Tensor | None = None) -> None:
                if self._validation_is_due(number):
                    self._validate(number, metrics, keeper)

            if copies:
                copies.resume(self._first, checkpointer.path(self._first))
            if self._first and self._first not in self._run.validations():
                validate(self._first)  # a stop in the middle of it left it out
            hooks = (
                self._count,
                keeper.step_done,
                losses,
                validate,
                self._survived,
                keeper,
                self._tell,
                keeper.go_on,
            )
            loop(self._parts.step, self._parts.loader, self._first, self._steps, hooks)

    def _validation_is_due(self, number: int) -> bool:
        every = self._parts.config.validation.every
        return bool(self._parts.validation) and (number % every == 0 or number == self._steps)

    def _validate(self, number: int, metrics: MetricsJournal, keeper: Keeper) -> None:
        parts = self._parts
        assert parts.validation, "asked for only where there is a validation split"
        found = evaluate(
            parts.step.model,
            parts.source,
            parts.validation,
            between=lambda: keeper.stop_if_told(number),
        )
        metrics.validation(number, found.as_dict())
        keeper.validated(number, found.mse)
        if parts.config.checkpoint.keep_best and number > self._first:
            keeper.save(number)

    def _count(self, number: int, _: Tensor) -> None:
        self.done = number

    def _survived(self, number: int, _: Tensor) -> None:
        self._taints.step_done(number)

    def _tell(self, number: int, _: Tensor) -> None:
        if self._progress:
            self._progress(number, self._steps)

    def _every(self) -> int | IntervalController:
        settings = self._parts.config.checkpoint
        if settings.every != "auto":
            return settings.every
        return interval_controller(
            self._run, settings, attempt=self._attempt, first=self._first, last=self._steps
        )

    def _checkpointer(self, copies: Copies | None) -> Checkpointer:
        config = self._parts.config
        checkpointer = Checkpointer(
            self._run.checkpoints_path,
            keep=retention_of(config.checkpoint),
            metadata={
                **self._parts.identity(),
                "run": run_identity(self._run.record()),
                "code": code_state(Path.cwd()),
            },
            clock=self._clock,
            drain=copies.drain if copies else None,
        )
        checkpointer.resumed_from(self._first)
        return checkpointer

    def _guard(self, settings: CheckpointConfig) -> PreemptionGuard:
        return PreemptionGuard(
            grace_s=settings.grace_s,
            warn=lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2),
            notice_file=Path(settings.notice_file) if settings.notice_file else None,
            clock=self._clock,
        )


def _entered_in_main_thread(guard: PreemptionGuard) -> contextlib.AbstractContextManager[object]:
    """The guard where signals can be caught; elsewhere only its notice file counts."""
    if threading.current_thread() is threading.main_thread():
        return guard
    return contextlib.nullcontext()


class _LossHook:
    """Collects losses on the device and journals them at the logging interval.

    Reading one loss waits for the device; reading ten at once waits once.
    """

    def __init__(self, metrics: MetricsJournal, every: int) -> None:
        self._metrics = metrics
        self._every = every
        self._losses: list[Tensor] = []

    def __call__(self, number: int, loss: Tensor) -> None:
        self._losses.append(loss)
        if number % self._every == 0:
            self.write(number)

    def write(self, number: int) -> None:
        """Journal what was collected up to step `number`.

        Raises:
            TrainingError: a loss is not finite.
        """
        if not self._losses:
            return
        losses: list[float] = torch.stack(self._losses).tolist()
        first = number - len(losses) + 1
        self._losses.clear()
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"step {step}",
                    expected="a finite loss",
                    found=str(loss),
                    fix="Lower the learning rate, clip the gradient, or look at the data there",
                )
        self._metrics.losses(number, losses)
