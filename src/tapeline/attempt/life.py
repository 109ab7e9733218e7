"""One life of a run: restore, train to the last step, save, say how it ended."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tapeline.attempt.cadence import Cadence, interval_controller
from tapeline.attempt.course import Course, RolledBack, begins_before, read_passed_over
from tapeline.attempt.ending import ORDERLY, RunResult, evidence_of, how_of
from tapeline.attempt.keeper import Copies, Follower, Keeper, copying
from tapeline.attempt.losses import LossHook
from tapeline.attempt.meter import KernelHooks, StepMeter
from tapeline.attempt.observer import Observer
from tapeline.attempt.origin import Origin, restore, run_identity
from tapeline.attempt.parts import Parts
from tapeline.attempt.promise import Promise
from tapeline.attempt.stopping import Stopping
from tapeline.attempt.watching import Watching
from tapeline.checkpoint import Checkpointer, Ranks, Shelf, State, part_sha256
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.interval import IntervalController
from tapeline.checkpoint.preempt import PreemptionGuard
from tapeline.checkpoint.resume import TaintJournal
from tapeline.checkpoint.retain import Retention
from tapeline.clock import Clock
from tapeline.config import CheckpointConfig
from tapeline.runs import RunFolder, code_state
from tapeline.training import evaluate, loop
from tapeline.training.loop import Hook
from tapeline.training.ranks import from_first, wait_for_all
from tapeline.world import World

Progress = Callable[[int, int], None]

# A resume that came so far has shown that its checkpoint can be trained from. Few, so that a
# machine that is killed often doesn't put good checkpoints under suspicion.
_STEPS_TO_SURVIVE = 10


def live(
    run: RunFolder,
    parts: Parts,
    progress: Progress | None,
    clock: Clock,
    began_ns: int,
) -> RunResult:
    """Bring a run to its last step, from wherever its last life left it; on every rank.

    A rollback ends a life and begins the next, with parts built anew: exactly what a kill and a
    resume would do.

    Args:
        run: its folder.
        parts: freshly built.
        progress: called with the steps done and in all.
        clock: for all times.
        began_ns: monotonic time at which this life began.

    Raises:
        Preempted: it was told to stop, and saved.
        Stopped: it met its criteria to stop, and was saved.
        CheckpointError: there are checkpoints, and none can be used; or a save failed.
    """
    while True:
        try:
            return _one_life(run, parts, progress, clock, began_ns)
        except RolledBack:
            began_ns = clock.monotonic_ns()
            parts = Parts.build(parts.data, parts.world)


def _one_life(
    run: RunFolder, parts: Parts, progress: Progress | None, clock: Clock, began_ns: int
) -> RunResult:
    settings, steps, world = parts.config.checkpoint, parts.config.training.steps, parts.world
    writes = world.rank == 0
    taints = taints_of(run)
    tier = _tier(settings) if writes else None
    ranks = Ranks.joined() if parts.is_cut else None
    restoring_ns = clock.monotonic_ns()
    origin = _origin(run, tier, taints, parts, ranks)
    if origin.state:
        parts.restore(origin.state)
    restored_ns = clock.monotonic_ns() - restoring_ns
    if tier:
        tier.resumed_from(origin.step)
    promise = Promise.of_new(parts).kept(origin.step, run.record(), origin.metadata)
    saved = origin.metadata.get("passed_over", ())
    passed_over = from_first(world, lambda: read_passed_over(run, saved))
    said = {"config": parts.config.resolved(), **promise.as_dict()}
    attempt = from_first(
        world, lambda: run.begin_attempt(from_step=origin.step, world_size=world.size, said=said)
    )
    if origin.identity and writes:
        taints.resumed(origin.identity, step=origin.step, attempt=attempt)
    with Observer(
        run,
        world,
        attempt=attempt,
        first=origin.step,
        clock=clock,
        began_ns=began_ns,
        restored_ns=restored_ns,
        device=parts.step.device,
    ) as observer:
        course = Course(parts.loader, origin.step, passed_over)
        life = _Life(run, parts, taints, promise, progress, observer, course)
        state = life.live(
            Copies(tier, settings.durable_every, steps, clock) if tier else None, ranks
        )
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
        before=begins_before(run),
    )


def _tier(settings: CheckpointConfig) -> DurableTier | None:
    if not settings.durable:
        return None
    number, best = settings.durable_keep, settings.keep_best
    keep = Retention(last=number, best=best) if number else None
    return DurableTier(settings.durable, keep=keep)


def taints_of(run: RunFolder) -> TaintJournal:
    """Which checkpoints of a run failed on resume."""
    return TaintJournal(run.path / "taint.jsonl", within_steps=_STEPS_TO_SURVIVE)


def retention_of(settings: CheckpointConfig) -> Retention:
    """The rule that a configuration asks for."""
    return Retention(last=settings.keep, every=settings.keep_every, best=settings.keep_best)


class _Life:
    """The hooks of one life, and what they share."""

    def __init__(
        self,
        run: RunFolder,
        parts: Parts,
        taints: TaintJournal,
        promise: Promise,
        progress: Progress | None,
        observer: Observer,
        course: Course,
    ) -> None:
        self._run = run
        self._parts = parts
        self._taints = taints
        self._promise = promise
        self._progress = progress
        self._observer = observer
        self._course = course
        self._ledger = observer.ledger
        self._first = observer.first
        self._clock = observer.clock
        self._steps = parts.config.training.steps
        self._writes = observer.writes
        self._ballot = parts.step.ballot if parts.world.size > 1 else None

    def live(self, copies: Copies | None, ranks: Ranks | None) -> State:
        """Train, and record how it ended; the state after the last step.

        Args:
            copies: durable ones, if this rank makes any.
            ranks: those that save together.
        """
        try:
            with copying(copies):
                self._train(copies, ranks)
            self._parts.check_equal(state := self._parts.state(self._steps))
        except BaseException as error:
            self._end(how_of(error), evidence_of(error))
            if isinstance(error, ORDERLY):
                wait_for_all(self._parts.world)  # a launcher kills the others once one has gone
            raise
        self._end("finished", "its last step was saved")
        wait_for_all(self._parts.world)
        return state

    def _end(self, how: str, evidence: str) -> None:
        if not self._writes:
            return
        if how != "failed":
            self._taints.release()
        observer = self._observer
        self._run.end_attempt(
            observer.attempt, how=how, step=observer.ledger.step, evidence=observer.said(evidence)
        )

    def _train(self, copies: Copies | None, ranks: Ranks | None) -> None:
        parts = self._parts
        with contextlib.ExitStack() as open_parts:
            guard = self._guard(parts.config.checkpoint)
            open_parts.enter_context(_entered_in_main_thread(guard))
            meter = StepMeter(self._observer, parts)
            open_parts.callback(lambda: meter.write(self._ledger.step))  # however it ends
            watching = Watching(self._run, parts, self._observer, self._course)
            losses = LossHook(self._observer, parts, meter, watching)
            kernels = open_parts.enter_context(
                contextlib.closing(KernelHooks(self._observer, parts.step.device))
            )
            keeper = self._keeper(guard, copies, ranks, losses, open_parts)
            stopping = Stopping(self._run, parts, losses, keeper)
            stopping.check(self._first)  # a life that begins where one was stopped ends there too

            def validate(number: int, _: Tensor | None = None) -> None:
                if self._validation_is_due(number):
                    self._validate(number, keeper)

            # Rank 0 says, since it goes on writing while others would read.
            made_up = not self._first or from_first(
                parts.world, lambda: self._first in self._run.validations()
            )
            if not made_up:
                validate(self._first)  # a stop in the middle of it left it out
            hooks: tuple[Hook, ...] = (
                self._count,  # first: it ends the step's computing
                kernels.end,
                meter,
                keeper.step_done,
                losses,
                *([validate] if parts.data.validation else []),
                *([self._survived] if self._writes else []),
                keeper,
                *([self._wait_for_save] if self._waits_for_saves else []),
                *([stopping] if stopping.judges else []),
                *([self._tell] if self._progress else []),
                keeper.go_on,
                kernels.begin,
            )
            batches = open_parts.enter_context(contextlib.closing(self._course.batches()))
            loop(parts.step, batches, self._first, self._steps, hooks, self._ledger.switch)
            watching.look()
            self._ledger.switch("checkpoint")  # what is in flight is waited for, on every rank

    def _keeper(
        self,
        guard: PreemptionGuard,
        copies: Copies | None,
        ranks: Ranks | None,
        losses: LossHook,
        open_parts: contextlib.ExitStack,
    ) -> Keeper | Follower:
        if not (self._writes or ranks):
            return Follower(guard, self._ledger, self._steps)
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
            self._observer,
            capture=self._parts.state,
            settle=losses.settle,  # a checkpoint never covers steps whose metrics could be lost
            copies=copies,
            goes_on=self._parts.config.checkpoint.on_failure == "go_on",
        )

    def _validation_is_due(self, number: int) -> bool:
        every = self._parts.config.validation.every
        return bool(self._parts.data.validation) and (number % every == 0 or number == self._steps)

    def _validate(self, number: int, keeper: Keeper | Follower) -> None:
        parts = self._parts
        assert parts.data.validation, "asked for only where there is a validation split"

        def between() -> None:
            self._ledger.switch("evaluation")  # entered again: it makes progress
            keeper.stop_if_told(number)

        with self._ledger.span("evaluation"):
            found = evaluate(
                parts.step.model,
                parts.data.source,
                parts.data.validation,
                objective=parts.step.objective,
                between=between,
                world=parts.rows,
                ballot=self._ballot,
            )
        if self._writes:
            self._observer.journal.validation(number, found.as_dict())
        keeper.validated(number, found.loss)
        if parts.config.checkpoint.keep_best and number > self._first:
            keeper.save(number)

    def _count(self, number: int, _: Tensor) -> None:
        self._ledger.step_done(number)

    @property
    def _waits_for_saves(self) -> bool:
        """Whether rank 0 alone saves, at steps that all know.

        Where rank 0 decides as it goes, which it tells nobody, the others book that as waiting in
        the next collective; and after a rollback, lines of their ledgers are parted in proportion.
        """
        parts, every = self._parts, self._parts.config.checkpoint.every
        return parts.world.size > 1 and not parts.is_cut and every != "auto"

    def _wait_for_save(self, number: int, _: Tensor) -> None:
        """Wait for rank 0, so that every rank books what a save costs."""
        every = self._parts.config.checkpoint.every
        if every != "auto" and number % every == 0:
            with self._ledger.span("checkpoint"):
                wait_for_all(self._parts.world)

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
            self._run, settings, attempt=self._observer.attempt, first=self._first, last=self._steps
        )

    def _checkpointer(self, copies: Copies | None, ranks: Ranks | None) -> Checkpointer:
        config = self._parts.config
        checkpointer = Checkpointer(
            self._run.checkpoints_path,
            keep=retention_of(config.checkpoint),
            metadata={
                **self._parts.identity(),
                **self._promise.as_dict(),
                "passed_over": self._course.as_metadata(),
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
