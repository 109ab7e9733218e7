"""Evaluation: every window of an index exactly once, in order, beside the simplest predictors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.training.ballot import Ballot
from tapeline.training.objective import SQUARED_ERROR, Evaluation, Objective
from tapeline.training.step import predict
from tapeline.windows import BatchSource, WindowIndex
from tapeline.windows.changes import last_moves, move_rows
from tapeline.world import World

_ALONE = World()


def evaluate(
    model: nn.Module,
    source: BatchSource,
    index: WindowIndex,
    batch: int = 1024,
    *,
    objective: Objective = SQUARED_ERROR,
    between: Callable[[], None] | None = None,
    world: World = _ALONE,
    ballot: Ballot | None = None,
) -> Evaluation:
    """Evaluate a model, in evaluation mode and without gradients; each part's mode is put back.

    Sums are in float64. The last batch is shorter: nothing is dropped, nothing counted twice.
    Ranks take turns batch by batch, and every rank adds up all of them in the order of the
    windows: the same bits on any number of ranks. Simple predictors see the same windows alone.

    Args:
        model: maps `[n, inputs]` to what the objective asks for.
        source: gives the batches.
        index: the windows.
        batch: windows in one forward pass.
        objective: what the model was trained towards.
        between: called before each batch; what it raises ends the evaluation.
        world: the ranks that take turns; all of them call this.
        ballot: carries their wishes to stop meanwhile; to be given where there are several ranks.

    Raises:
        WindowError: the windows aren't the source's.
        TrainingError: `batch` below 1, or the model's output has another shape.
    """
    if batch < 1:
        raise TrainingError(
            "batch", expected="at least 1", found=str(batch), fix="Take 1,024, or what memory holds"
        )
    source.check(index)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = [module for module in model.modules() if module.training]
    model.eval()
    total: list[float] | None = None
    try:
        with torch.no_grad():
            starts = range(0, index.num_windows, batch)
            for first in range(0, len(starts), world.size):
                if between:
                    between()
                # A rank without a batch does the last one again: forward passes may be joint ones.
                start = starts[min(first + world.rank, len(starts) - 1)]
                located = index.locate(np.arange(start, min(start + batch, index.num_windows)))
                x, y = map(torch.from_numpy, source.batch(*located))
                output = predict(model, x.to(device), y, objective).cpu()
                sums = objective.sums(output, y, torch.from_numpy(last_moves(source, *located)))
                found = _of_all(sums, device, world, ballot)
                for one in found[: len(starts) - first]:
                    total = [a + b for a, b in zip(total or [0.0] * len(one), one, strict=True)]
    finally:
        for module in training:  # not `model.train()`: a part that was frozen stays so
            module.training = True
    assert total is not None, "an index has at least one window"
    return objective.evaluation(total, index.num_windows, _about(source))


def _about(source: BatchSource) -> list[dict[str, int]]:
    """Of each target its horizon, and the rows that its last move is over."""
    horizons = zip(source.targets[:, 0].tolist(), move_rows(source).tolist(), strict=True)
    return [{"horizon": horizon, "last_move_rows": rows} for horizon, rows in horizons]


def _of_all(
    sums: Tensor, device: torch.device, world: World, ballot: Ballot | None
) -> list[list[float]]:
    """The sums of each rank that takes turns, in their order; wishes to stop are counted."""
    if world.size == 1 and ballot is None:
        return [sums.tolist()]
    mine = torch.cat([sums, sums.new_tensor([ballot is not None and ballot.wish])]).to(device)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    table = torch.stack(all_ranks).cpu()
    if ballot:
        ballot.count(table[:, -1].sum())
    # Ranks that tensor parallelism cut one layer over did the same batch.
    same = len(all_ranks) // world.size
    found: list[list[float]] = table[::same, :-1].tolist()
    return found
