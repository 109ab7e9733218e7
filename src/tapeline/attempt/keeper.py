"""What is saved during a life of a run, where it is copied to, and stopping when told to.

Covers: the hook that saves, the durable copies behind it, and the end by a preemption. Does not
cover which steps are due (`cadence`).

Where every rank holds the whole state, rank 0 saves it and the others follow (`Follower`): they
stop between the same two steps, and wait for rank 0 before they end. Where each holds a share,
every rank has a keeper, and all of them save at the same steps.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from tapeline.attempt.cadence import Cadence
from tapeline.attempt.observer import Observer
from tapeline.checkpoint import Checkpointer, State
from tapeline.checkpoint.drain import Drain
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.manifest import METRIC
from tapeline.checkpoint.preempt import Preempted, PreemptionGuard
from tapeline.clock import Clock
from tapeline.errors import CheckpointError, TapelineError
from tapeline.ledger import Ledger


class Copies:
    """The durable copies of a run: which saves are copied, and the thread that does it.

    A copy that fails is told in a warning, since the next one may succeed; the last one of a run
    is not allowed to fail.

    Args:
        tier: where to.
        every: steps between copies.
        last: the last step of the run, which is always copied.
        clock: to measure copies by.

    Attributes:
        longest_s: what the longest copy so far took.
    """

    def __init__(self, tier: DurableTier, every: int, last: int, clock: Clock) -> None:
        self._every = every
        self._last = last
        try:
            there = tier.steps()
        except CheckpointError as error:  # it may be back when the first copy is due
            warnings.warn(f"The durable copies can't be listed: {error}", RuntimeWarning, 2)
            there = []
        self._newest = max(there, default=0)
        self._finished = last in there
        self.longest_s = 0.0
        self.drain = Drain(tier, self._copied, clock)

    def due(self, step: int) -> bool:
        """Whether the save of a step is to be copied; asked once for each save."""
        due = step // self._every > self._newest // self._every
        if step == self._last:
            due = not self._finished
        if due:
            self._newest = step
        return due

    def leave(self, step: int, folder: Path) -> None:
        """Copy the last save of a life that is told to stop: its machine may be taken away."""
        if step > self._newest:
            self.drain.submit(folder)

    def resume(self, step: int, folder: Path) -> None:
        """Copy what a life before this one should have copied."""
        if step and self.due(step):
            self.drain.submit(folder)

    def _copied(self, _: Path, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)

    def check(self) -> None:
        """Warn of a copy that failed; asked between two steps."""
        try:
            self.drain.raise_failure()
        except TapelineError as error:
            warnings.warn(f"A checkpoint was not copied: {error}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def copying(copies: Copies | None) -> Iterator[None]:
    """Wait at the end of the block until all is copied.

    Raises:
        CheckpointError: a copy failed; where the block ended by an error, that one is raised and
            told of the copy.
    """
    try:
        yield
    except BaseException as error:
        if copies:
            try:
                copies.drain.close()
            except TapelineError as failure:
                error.add_note(f"A checkpoint was not copied either: {failure}")
        raise
    if copies:
        copies.drain.close()


class Keeper:
    """The hook that saves the run, and ends it when it is told to stop.

    Args:
        checkpointer: saves.
        cadence: says when.
        guard: says whether to stop.
        observer: which life this is; its ledger books what saves cost.
        capture: the state after a step.
        settle: puts on disk what a checkpoint must not be ahead of, up to a step; says whether
            there may be one.
        copies: durable ones, if any.
        goes_on: without a checkpoint, where a save fails that is not the last of this life.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        cadence: Cadence,
        guard: PreemptionGuard,
        observer: Observer,
        *,
        capture: Callable[[int], State],
        settle: Callable[[int], bool],
        copies: Copies | None,
        goes_on: bool,
    ) -> None:
        self._checkpointer = checkpointer
        self._cadence = cadence
        self._guard = guard
        self._capture = capture
        self._settle = settle
        self._copies = copies
        self._goes_on = goes_on
        self._attempt = observer.attempt
        self._ledger = observer.ledger
        self._metric: tuple[int, float] | None = None
        self._saved = observer.first

    def step_done(self, number: int, _: Tensor) -> None:
        """A hook ahead of what saves: the step has ended."""
        try:
            self._checkpointer.check()  # a write in the background that failed
        except CheckpointError as error:
            self._bear(error, last=False)
        self._ledger.background_write = writing = self._checkpointer.busy
        if self._copies:
            self._copies.check()
        self._cadence.step_done(number, writing=writing)
        self._guard.measured(  # after each step: a write in the background has ended in one
            save_s=self._cadence.longest_save_s + (self._copies.longest_s if self._copies else 0.0),
            poll_s=self._cadence.longest_step_s,
        )

    def validated(self, number: int, loss: float) -> None:
        """Note what an evaluation after step `number` found: saves compare it."""
        self._metric = (number, loss)

    def __call__(self, number: int, _: Tensor) -> None:
        """The hook that saves where that is due."""
        if self._cadence.due(number):
            self.save(number, last=number == self._cadence.last)
        if number < self._cadence.last:  # else the run has ended anyway
            self.stop_if_told(number)

    def go_on(self, _: int, __: Tensor) -> None:
        """The hook after all others: the next step begins."""
        self._cadence.go_on()

    def stop_if_told(self, number: int) -> None:
        """Save after step `number` and end the run, if a notice has come.

        Raises:
            Preempted: it was saved; the exit code tells a supervisor to start it again.
        """
        if self._guard.agreed():
            self.leave(number)
            raise Preempted(number, str(self._guard.reason))

    def leave(self, number: int) -> None:
        """Save after step `number`, since the run ends there; all is written on return."""
        self.save(number, last=True)
        with self._ledger.span("checkpoint"):
            self._checkpointer.wait()
        if self._copies:
            self._copies.leave(number, self._checkpointer.path(number))

    def save(self, number: int, *, last: bool = False) -> None:
        """Save after step `number`, unless that was done; `last` is the last of this life."""
        if self._saved == number:
            return
        with self._ledger.span("checkpoint"):
            if not self._settle(number):
                return
            of_step, loss = self._metric or (None, None)
            metric = loss if of_step == number else None
            try:
                self._checkpointer.save(
                    self._capture(number),
                    metadata={"attempt": self._attempt, METRIC: metric},
                    durable=bool(self._copies and self._copies.due(number)),
                )
                self._saved = number
            except CheckpointError as error:
                self._bear(error, last=last)
        self._cadence.saved(number)

    def _bear(self, error: CheckpointError, *, last: bool) -> None:
        """Warn of a save that failed, where the run goes on without it; else raise it."""
        if last or not self._goes_on:
            raise error
        warnings.warn(f"The run goes on without a checkpoint: {error}", RuntimeWarning, 1)


class Follower:
    """What a rank does in the place of a `Keeper` where rank 0 saves: it stops when all do.

    Args:
        guard: says whether to stop.
        ledger: of this rank.
        last: the last step of the run.
    """

    def __init__(self, guard: PreemptionGuard, ledger: Ledger, last: int) -> None:
        self._guard = guard
        self._ledger = ledger
        self._last = last

    def step_done(self, number: int, _: Tensor) -> None:
        """As the keeper's; nothing to look after here."""

    def validated(self, number: int, loss: float) -> None:
        """As the keeper's; rank 0 notes it."""

    def __call__(self, number: int, _: Tensor) -> None:
        """The hook that ends the run where that is due."""
        if number < self._last:
            self.stop_if_told(number)

    def go_on(self, _: int, __: Tensor) -> None:
        """As the keeper's; nothing to measure here."""

    def stop_if_told(self, number: int) -> None:
        """End the run after step `number`, if a notice has come to any rank.

        Raises:
            Preempted: rank 0 saves.
        """
        if self._guard.agreed():
            raise Preempted(number, str(self._guard.reason))

    def leave(self, number: int) -> None:
        """As the keeper's; rank 0 does it."""
        self.save(number)

    def save(self, _: int) -> None:
        """As the keeper's; rank 0 does it."""
        self._ledger.flush()
