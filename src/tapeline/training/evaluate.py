"""Evaluation: every window of an index exactly once, in order, beside the simplest predictors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

from tapeline.errors import TrainingError
from tapeline.training.step import predict
from tapeline.windows import BatchSource, WindowIndex


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Errors on a set of windows, in the target's units squared.

    Attributes:
        windows: how many, each once.
        mse: mean squared error of the model.
        mse_zero: of predicting no change: the mean of the squared targets.
    """

    windows: int
    mse: float
    mse_zero: float

    @property
    def skill(self) -> float:
        """The share of `mse_zero` that the model removes; 0 where nothing moves."""
        return 1.0 - self.mse / self.mse_zero if self.mse_zero > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """The fields and the skill."""
        return {**asdict(self), "skill": self.skill}


def evaluate(
    model: nn.Module,
    source: BatchSource,
    index: WindowIndex,
    batch: int = 1024,
    *,
    between: Callable[[], None] | None = None,
) -> Evaluation:
    """Evaluate a model, in evaluation mode and without gradients; each part's mode is put back.

    Sums are in float64. The last batch is shorter: nothing is dropped, nothing counted twice.

    Args:
        model: maps `[n, inputs]` to `[n]` or `[n, 1]`.
        source: gives the batches.
        index: the windows.
        batch: windows in one forward pass.
        between: called before each batch; what it raises ends the evaluation.

    Raises:
        WindowError: the windows aren't the source's.
        TrainingError: `batch` below 1, or the model's output is neither `[n]` nor `[n, 1]`.
    """
    if batch < 1:
        raise TrainingError(
            "batch", expected="at least 1", found=str(batch), fix="Take 1,024, or what memory holds"
        )
    source.check(index)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = [module for module in model.modules() if module.training]
    model.eval()
    squares = zeros = 0.0
    try:
        with torch.no_grad():
            for start in range(0, index.num_windows, batch):
                if between:
                    between()
                windows = np.arange(start, min(start + batch, index.num_windows))
                x, y = source.batch(*index.locate(windows))
                prediction = predict(model, torch.from_numpy(x).to(device)).cpu().double()
                target = torch.from_numpy(y).double()
                squares += float((prediction - target).square().sum())
                zeros += float(target.square().sum())
    finally:
        for module in training:  # not `model.train()`: a part that was frozen stays so
            module.training = True
    return Evaluation(index.num_windows, squares / index.num_windows, zeros / index.num_windows)
