"""Stopping a run by criteria that were set before it began.

Covers judging it where a look is due, and ending the life on all ranks with its state saved. Does
not cover the criteria themselves (`plan.stop`), nor a loss that isn't finite: such a run fails at
once, whatever its criteria, since its state is not to be saved.
"""

from __future__ import annotations

from torch import Tensor

from tapeline.attempt.ending import Stopped
from tapeline.attempt.keeper import Follower, Keeper
from tapeline.attempt.losses import LossHook
from tapeline.attempt.parts import Parts
from tapeline.config import StopConfig
from tapeline.plan.stop import Criteria, Look, Stop, judge
from tapeline.runs import RunFolder
from tapeline.training.ranks import from_first


class Stopping:
    """The hook that judges a run where that is due, and ends it.

    The verdict follows from the journalled losses up to a step alone: a life that begins at that
    step comes to the same.

    Args:
        run: whose losses.
        parts: configuration and ranks.
        losses: put on the disk before they are judged.
        keeper: saves.

    Attributes:
        judges: whether there is anything to judge by.
    """

    def __init__(
        self, run: RunFolder, parts: Parts, losses: LossHook, keeper: Keeper | Follower
    ) -> None:
        self._run = run
        self._world = parts.world
        self._last = parts.config.training.steps
        self._criteria = criteria_of(parts.config.stop)
        self._after = parts.config.stop.after or self._last
        self.judges = bool(
            self._criteria.looks or self._criteria.target or self._after < self._last
        )
        self._losses = losses
        self._keeper = keeper

    def __call__(self, number: int, _: Tensor) -> None:
        """The hook: a step has ended.

        Raises:
            Stopped: the run should end; it was saved.
        """
        due = self._criteria.is_due(number) or number == self._after
        # What is about to be rolled back is not judged: those steps will be done again.
        if due and number < self._last and self._losses.settle(number):
            self.check(number)

    def check(self, number: int) -> None:
        """End the run after step `number`, if it should have been; on every rank.

        Raises:
            Stopped: as above.
        """

        def judged() -> Stop | None:
            found = judge(self._criteria, self._run.losses(), number)
            if found is None and number >= self._after:
                found = Stop(number, f"this life was to end after step {self._after:,}")
            return found

        if self.judges and number < self._last and (found := from_first(self._world, judged)):
            self._keeper.leave(number)
            raise Stopped(found.why)


def criteria_of(settings: StopConfig) -> Criteria:
    """What a configuration stops a run by."""
    return Criteria(
        settings.window,
        settings.patience,
        tuple(Look(*pair) for pair in settings.looks),
        Look(*settings.target) if settings.target else None,
    )
