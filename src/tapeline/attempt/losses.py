"""What a life learns: kept on the device, journalled at the logging interval, checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tapeline.attempt.meter import StepMeter
from tapeline.attempt.observer import Observer
from tapeline.attempt.parts import Parts
from tapeline.attempt.watching import Watching
from tapeline.errors import TrainingError


class LossHook:
    """Collects losses and gradient norms on the device; journals them at the logging interval.

    Reading one number waits for the device; reading ten at once waits once. The wait is booked as
    computing, which the device does meanwhile.

    Args:
        observer: rank 0's journals; the others check alone.
        parts: its step's gradient norms and learning rates are journalled.
        meter: of the same steps; journalled with them.
        watching: looks at all of it.
    """

    def __init__(
        self, observer: Observer, parts: Parts, meter: StepMeter, watching: Watching
    ) -> None:
        self._observer = observer
        self._step = parts.step
        self._every = parts.config.log_every
        self._last = parts.config.training.steps
        self._meter = meter
        self._watching = watching
        self._losses: list[Tensor] = []
        self._norms: list[list[Tensor]] = []
        self._unseen_losses: list[float] = []
        self._unseen_norms: list[float] = []
        self._bad: tuple[int, float] | None = None  # the first that isn't finite

    def __call__(self, number: int, loss: Tensor) -> None:
        """The hook: the loss of step `number`.

        Raises:
            TrainingError: a loss is not finite, or a watcher halts the run.
            RolledBack: a watcher wants it to go back.
        """
        self._losses.append(loss)
        due = number % self._every == 0 or number == self._last
        # Clipping has found the norm; else one a reading, since each costs a percent of a step.
        if self._observer.writes and (due or self._step.clip_norm is not None):
            self._norms.append(self._step.grad_norms())
        if due:
            self._write(number)
            self._look(number)
            self._watching.act()
            self._check()

    def settle(self, number: int) -> bool:
        """Put everything up to step `number` on the disk, ahead of a checkpoint.

        Returns:
            Whether there may be one: not of a state that is about to be rolled back.

        Raises:
            TrainingError: a loss is not finite.
        """
        self._write(number)
        if self._bad:
            if self._watching.mends_non_finite:
                return False
            self._look(number)
        self._check()
        self._observer.journal.sync()
        return True

    def _check(self) -> None:
        if self._bad:
            step, loss = self._bad
            raise TrainingError(
                f"step {step}",
                expected="a finite loss",
                found=str(loss),
                fix="Lower the learning rate, clip the gradient, or look at the data there",
            )

    def _write(self, number: int) -> None:
        """Journal what was collected up to step `number`."""
        if not self._losses:
            return
        losses, norms = self._read()
        for step, loss in enumerate(losses, number - len(losses) + 1):
            if self._bad is None and not math.isfinite(loss):
                self._bad = step, loss
        if self._observer.writes:
            rate = self._step.learning_rate(number - 1)
            self._observer.journal.losses(number, losses, grad_norms=norms, learning_rate=rate)
            self._unseen_losses += losses
            self._unseen_norms += norms or []

    def _look(self, number: int) -> None:
        """Let the watchers look at what was journalled up to step `number`.

        Not at every save, nor by time where they are acted on: what they ask for must not depend
        on when saves are due or on how fast the machine is.
        """
        done = number == self._last or self._bad is not None
        machine = (self._meter.write if done else self._meter.write_if_due)(number)
        if not self._observer.writes or not (machine or done or self._watching.acts):
            return
        if self._unseen_losses:
            rate = self._step.learning_rate(number - 1)
            self._watching.learnt(number, self._unseen_losses, self._unseen_norms, rate, machine)
        self._unseen_losses, self._unseen_norms = [], []

    def _read(self) -> tuple[list[float], list[float] | None]:
        """The losses and norms since the last reading."""
        parts = [part for step in self._norms for part in step]
        with self._observer.ledger.span("compute"):
            read = _numbers([*self._losses, *parts])
        losses, parts_read = read[: len(self._losses)], read[len(self._losses) :]
        norms: list[float] | None = None
        if parts:
            size = len(self._norms[0])
            norms = [math.hypot(*parts_read[i : i + size]) for i in range(0, len(parts), size)]
        self._losses, self._norms = [], []
        # A step in float16 whose gradient overflowed was left out, and is no news.
        if norms and self._step.scaler and not all(map(math.isfinite, norms)):
            norms, self._unseen_norms = None, []
        return losses, norms


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Their values, waiting for their device once."""
    if scalars[0].is_cpu:  # nothing to wait for, and several times cheaper than a stack
        return [float(scalar) for scalar in scalars]
    read: list[float] = torch.stack(scalars).tolist()
    return read
