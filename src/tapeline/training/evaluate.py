"""Evaluation: every window of an index exactly once, in order, beside the simplest predictors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.training.ballot import Ballot
from tapeline.training.step import predict
from tapeline.windows import BatchSource, WindowIndex
from tapeline.world import World

_ALONE = World()


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
    world: World = _ALONE,
    ballot: Ballot | None = None,
) -> Evaluation:
    """Evaluate a model, in evaluation mode and without gradients; each part's mode is put back.

    Sums are in float64. The last batch is shorter: nothing is dropped, nothing counted twice.
    Ranks take turns batch by batch, and every rank adds up all of them in the order of the
    windows: the same bits on any number of ranks.

    Args:
        model: maps `[n, inputs]` to `[n]` or `[n, 1]`.
        source: gives the batches.
        index: the windows.
        batch: windows in one forward pass.
        between: called before each batch; what it raises ends the evaluation.
        world: the ranks that take turns; all of them call this.
        ballot: carries their wishes to stop meanwhile; to be given where there are several ranks.

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
            starts = range(0, index.num_windows, batch)
            for first in range(0, len(starts), world.size):
                if between:
                    between()
                # A rank without a batch does the last one again: forward passes may be joint ones.
                start = starts[min(first + world.rank, len(starts) - 1)]
                windows = np.arange(start, min(start + batch, index.num_windows))
                x, y = source.batch(*index.locate(windows))
                prediction = predict(model, torch.from_numpy(x).to(device)).cpu().double()
                target = torch.from_numpy(y).double()
                sums = torch.stack([(prediction - target).square().sum(), target.square().sum()])
                found = _of_all(sums, device, world, ballot)[: len(starts) - first]
                for square, zero in found:
                    squares += square
                    zeros += zero
    finally:
        for module in training:  # not `model.train()`: a part that was frozen stays so
            module.training = True
    return Evaluation(index.num_windows, squares / index.num_windows, zeros / index.num_windows)


def _of_all(
    sums: Tensor, device: torch.device, world: World, ballot: Ballot | None
) -> list[list[float]]:
    """The two sums of each rank that takes turns, in their order; wishes to stop are counted."""
    if world.size == 1 and ballot is None:
        return [sums.tolist()]
    mine = torch.cat([sums, sums.new_tensor([ballot is not None and ballot.wish])]).to(device)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    table = torch.stack(all_ranks).cpu()
    if ballot:
        ballot.count(table[:, 2].sum())
    # Ranks that tensor parallelism cut one layer over did the same batch.
    same = len(all_ranks) // world.size
    found: list[list[float]] = table[::same, :2].tolist()
    return found
