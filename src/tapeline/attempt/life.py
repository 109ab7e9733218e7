"""One life of a run: restore, train to the last step, save, say how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tapeline.attempt.cadence import Cadence, interval_controller
from tapeline.attempt.keeper import Copies, Follower, Keeper, copying
from tapeline.attempt.losses import LossHook
from tapeline.attempt.origin import Origin, restore, run_identity
from tapeline.attempt.parts import Parts
from tapeline.attempt.promise import Promise
from tapeline.checkpoint import (
    Checkpointer,
    Ranks,
    Shelf,
    Skipped,
    part_sha256,
)
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.interval import IntervalController
from tapeline.checkpoint.preempt import Preempted, PreemptionGuard
from tapeline.checkpoint.resume import TaintJournal
from tapeline.checkpoint.retain import Retention
from tapeline.clock import Clock
from tapeline.config import CheckpointConfig
from tapeline.files import canonical_json
from tapeline.runs import MetricsJournal, RunFolder, code_state
from tapeline.training import evaluate, loop
from tapeline.training.ranks import from_first, wait_for_all
from tapeline.world import World

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
        part_sha256: over each part of the state after the last step; over rank 0's share of it
            where ranks hold shares.
        losses: of every step, the later one where a step was done twice.
        validation: at the end; None without a validation split.
        contract: what holds of its bits.
        skipped: checkpoints that were passed over on the way in, and why.
    """

    folder: Path
    steps: int
    from_step: int
    part_sha256: dict[str, str]
    losses: list[float]
    validation: dict[str, Any] | None
    contract: str
    skipped: tuple[Skipped, ...]

    @property
    def state_sha256(self) -> str:
        """Over all state after the last step, as `checkpoint.state_sha256` has it."""
        return hashlib.sha256(canonical_json(self.part_sha256).encode()).hexdigest()

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
            "contract": self.contract,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
        }


def live(run: RunFolder, parts: Parts, progress: Progress | None, clock: Clock) -> RunResult:
    """Bring a run to its last step, from wherever its last life left it; on every rank.

    Raises:
        Preempted: it was told to stop, and saved.
        CheckpointError: there are checkpoints, and none can be used; or a save failed.
    """
    settings, steps, world = parts.config.checkpoint, parts.config.training.steps, parts.world
    writes = world.rank == 0
    taints = taints_of(run)
    tier = _tier(settings) if writes else None
    ranks = Ranks.joined() if parts.is_cut else None
    origin = _origin(run, tier, taints, parts, ranks)
    if origin.state:
        parts.restore(origin.state)
    if tier:
        tier.resumed_from(origin.step)
    promise = Promise.of_new(parts).kept(origin.step, run.record(), origin.metadata)
    attempt = from_first(
        world, lambda: run.begin_attempt(from_step=origin.step, world_size=world.size)
    )
    if origin.identity and writes:
        taints.resumed(origin.identity, step=origin.step, attempt=attempt)
    life = _Life(run, parts, taints, attempt, origin, promise, progress, clock)
    try:
        copies = Copies(tier, settings.durable_every, steps) if tier else None
        with copying(copies):
            life.train(copies, ranks)
        parts.check_equal(state := parts.state(steps))
    except BaseException as error:
        how = _how(error)
        if writes:
            if how != "failed":
                taints.release()
            evidence = f"{type(error).__name__}: {error}"
            run.end_attempt(attempt, how=how, step=life.done, evidence=evidence)
        if how == "preempted":
            wait_for_all(world)  # a launcher kills the others as soon as one has gone
        raise
    if writes:
        taints.release()
        run.end_attempt(attempt, how="finished", step=steps, evidence="its last step was saved")
    wait_for_all(world)
    return RunResult(
        folder=run.path,
        steps=steps,
        from_step=origin.step,
        part_sha256=part_sha256(state),
        losses=list(run.losses().values()),
        validation=run.validations().get(steps),
        contract=promise.contract.text,
        skipped=origin.skipped,
    )


def _origin(
    run: RunFolder,
    tier: DurableTier | None,
    taints: TaintJournal,
    parts: Parts,
    ranks: Ranks | None,
) -> Origin:
    """Where this life begins; each rank has read what it holds."""
    shelf = Shelf(run.checkpoints_path)
    like = parts.state(0) if ranks else None
    return restore(
        run,
        tier,
        taints.tainted(),
        world=parts.world,
        read=lambda step: shelf.load_step(step, like=like, ranks=ranks),
    )


def _tier(settings: CheckpointConfig) -> DurableTier | None:
    if not settings.durable:
        return None
    number = settings.durable_keep
    return DurableTier(settings.durable, keep=Retention(last=number) if number else None)


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
        promise: Promise,
        progress: Progress | None,
        clock: Clock,
    ) -> None:
        self._run = run
        self._parts = parts
        self._taints = taints
        self._attempt = attempt
        self._first = origin.step
        self._promise = promise
        self._progress = progress
        self._clock = clock
        self._steps = parts.config.training.steps
        self._writes = parts.world.rank == 0
        self._ballot = parts.step.ballot if parts.world.size > 1 else None
        self.done = origin.step

    def train(self, copies: Copies | None, ranks: Ranks | None) -> None:
        """Train to the last step; `ranks` where they save together."""
        with contextlib.ExitStack() as open_parts:
            guard = self._guard(self._parts.config.checkpoint)
            open_parts.enter_context(_entered_in_main_thread(guard))
            metrics = self._metrics(open_parts)
            losses = LossHook(metrics, self._parts.config.log_every)
            keeper = self._keeper(guard, copies, ranks, losses, open_parts)

            def validate(number: int, _: Tensor | None = None) -> None:
                if self._validation_is_due(number):
                    self._validate(number, metrics, keeper)

            # Rank 0 says, since it goes on writing while others would read.
            made_up = not self._first or from_first(
                self._parts.world, lambda: self._first in self._run.validations()
            )
            if not made_up:
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

    def _metrics(self, open_parts: contextlib.ExitStack) -> MetricsJournal | None:
        if not self._writes:
            return None
        return open_parts.enter_context(MetricsJournal(self._run.metrics_path(0), self._attempt))

    def _keeper(
        self,
        guard: PreemptionGuard,
        copies: Copies | None,
        ranks: Ranks | None,
        losses: LossHook,
        open_parts: contextlib.ExitStack,
    ) -> Keeper | Follower:
        if not (self._writes or ranks):
            return Follower(guard, self._steps)
        checkpointer = open_parts.enter_context(self._checkpointer(copies, ranks))
        if copies:
            copies.resume(self._first, checkpointer.path(self._first))
        return Keeper(
            checkpointer,
            Cadence(
                self._every(),
                self._steps,
                checkpointer,
                self._clock,
                self._parts.world if ranks else World(),
            ),
            guard,
            capture=self._parts.state,
            settle=losses.settle,  # a checkpoint never covers steps whose metrics could be lost
            copies=copies,
            attempt=self._attempt,
            first=self._first,
        )

    def _validation_is_due(self, number: int) -> bool:
        every = self._parts.config.validation.every
        return bool(self._parts.data.validation) and (number % every == 0 or number == self._steps)

    def _validate(
        self, number: int, metrics: MetricsJournal | None, keeper: Keeper | Follower
    ) -> None:
        parts = self._parts
        assert parts.data.validation, "asked for only where there is a validation split"
        found = evaluate(
            parts.step.model,
            parts.data.source,
            parts.data.validation,
            between=lambda: keeper.stop_if_told(number),
            world=parts.rows,
            ballot=self._ballot,
        )
        if metrics:
            metrics.validation(number, found.as_dict())
        keeper.validated(number, found.mse)
        if parts.config.checkpoint.keep_best and number > self._first:
            keeper.save(number)

    def _count(self, number: int, _: Tensor) -> None:
        self.done = number

    def _survived(self, number: int, _: Tensor) -> None:
        if self._writes:
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

    def _checkpointer(self, copies: Copies | None, ranks: Ranks | None) -> Checkpointer:
        config = self._parts.config
        checkpointer = Checkpointer(
            self._run.checkpoints_path,
            keep=retention_of(config.checkpoint),
            metadata={
                **self._parts.identity(),
                **self._promise.as_dict(),
                "run": run_identity(self._run.record()),
                "code": code_state(Path.cwd()),
            },
            clock=self._clock,
            drain=copies.drain if copies else None,
            ranks=ranks,
        )
        checkpointer.resumed_from(self._first)
        return checkpointer

    def _guard(self, settings: CheckpointConfig) -> PreemptionGuard:
        return PreemptionGuard(
            grace_s=settings.grace_s,
            warn=lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2),
            notice_file=Path(settings.notice_file) if settings.notice_file else None,
            any_rank=self._ballot,
            clock=self._clock,
        )


def _entered_in_main_thread(guard: PreemptionGuard) -> contextlib.AbstractContextManager[object]:
    """The guard where signals can be caught; elsewhere only its notice file counts."""
    if threading.current_thread() is threading.main_thread():
        return guard
    return contextlib.nullcontext()
