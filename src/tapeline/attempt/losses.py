"""What a life learns: kept on the device, journalled at the logging interval, checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tapeline.attempt.observer import Observer
from tapeline.errors import TrainingError
from tapeline.training import TrainStep


class LossHook:
    """Collects losses and gradient norms on the device; journals them at the logging interval.

    Reading one number waits for the device; reading ten at once waits once. The wait is booked as
    computing, which the device does meanwhile.

    Args:
        observer: rank 0's journals; the others check alone.
        step: its gradient's norm and its learning rate are journalled.
        every: steps between two readings.
    """

    def __init__(self, observer: Observer, step: TrainStep, every: int) -> None:
        self._observer = observer
        self._step = step
        self._every = every
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def __call__(self, number: int, loss: Tensor) -> None:
        """The hook: the loss of step `number`."""
        self._losses.append(loss)
        if self._observer.writes and (norm := self._step.grad_norm()) is not None:
            self._norms.append(norm)
        if number % self._every == 0:
            self.write(number)

    def settle(self, number: int) -> None:
        """Put everything up to step `number` on the disk, ahead of a checkpoint.

        Raises:
            TrainingError: as in `write`.
        """
        self.write(number)
        self._observer.journal.sync()

    def write(self, number: int) -> None:
        """Journal what was collected up to step `number`.

        Raises:
            TrainingError: a loss is not finite.
        """
        if not self._losses:
            return
        losses, norms = self._read()
        if self._observer.writes:
            self._observer.journal.losses(
                number,
                losses,
                grad_norms=norms,
                learning_rate=self._step.learning_rate(number - 1),
            )
        for step, loss in enumerate(losses, number - len(losses) + 1):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"step {step}",
                    expected="a finite loss",
                    found=str(loss),
                    fix="Lower the learning rate, clip the gradient, or look at the data there",
                )

    def _read(self) -> tuple[list[float], list[float] | None]:
        """The losses and norms since the last reading."""
        with self._observer.ledger.span("compute"):
            losses: list[float] = torch.stack(self._losses).tolist()
            norms: list[float] | None = None
            if len(self._norms) == len(self._losses):
                norms = torch.stack(self._norms).tolist()
        self._losses, self._norms = [], []
        # A step in float16 whose gradient overflowed was left out, and is no news.
        if norms and self._step.scaler and not all(map(math.isfinite, norms)):
            norms = None
        return losses, norms
