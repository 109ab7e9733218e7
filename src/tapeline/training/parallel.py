"""Data parallelism: gradients of parts of a batch, and what they add up to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.training.step import batch_loss


def data_parallel_grads(
    model: nn.Module, x: Tensor, y: Tensor, num_shards: int = 2
) -> list[Tensor]:
    """The gradient of a batch, computed as `num_shards` ranks would: each on its part.

    The parts' gradients are averaged with the weight of their sizes, which is the gradient of the
    whole batch up to rounding. The model's own `.grad` is left alone.

    Args:
        model: as in `train`.
        x: `[batch, inputs]`.
        y: `[batch]`.
        num_shards: into how many parts the batch is cut, as even as possible.

    Returns:
        A tensor for each parameter that requires a gradient, in the order of `model.parameters()`;
        zeros where the loss doesn't depend on it.

    Raises:
        TrainingError: fewer windows than shards.
    """
    if not 1 <= num_shards <= len(x):
        raise TrainingError(
            "num_shards",
            expected=f"1 to {len(x)}, the windows in the batch",
            found=str(num_shards),
            fix="Use fewer shards or a larger batch",
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for part_x, part_y in zip(
        torch.tensor_split(x, num_shards), torch.tensor_split(y, num_shards), strict=True
    ):
        loss = batch_loss(model, part_x, part_y)
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        for into, grad in zip(total, grads, strict=True):
            into.add_(grad, alpha=len(part_x) / len(x))
    return total
