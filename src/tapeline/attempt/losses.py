"""The losses of a life: kept on the device, journalled at the logging interval, checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tapeline.errors import TrainingError
from tapeline.runs import MetricsJournal


class LossHook:
    """Collects losses on the device and journals them at the logging interval.

    Reading one loss waits for the device; reading ten at once waits once.

    Args:
        metrics: the journal; None on ranks that leave it to rank 0, and check alone.
        every: steps between two readings.
    """

    def __init__(self, metrics: MetricsJournal | None, every: int) -> None:
        self._metrics = metrics
        self._every = every
        self._losses: list[Tensor] = []

    def __call__(self, number: int, loss: Tensor) -> None:
        """The hook: the loss of step `number`."""
        self._losses.append(loss)
        if number % self._every == 0:
            self.write(number)

    def settle(self, number: int) -> None:
        """Put everything up to step `number` on the disk, ahead of a checkpoint.

        Raises:
            TrainingError: as in `write`.
        """
        self.write(number)
        if self._metrics:
            self._metrics.sync()

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
        if self._metrics:
            self._metrics.losses(number, losses)
