"""One training step: forward, backward, update. The only place that does it.

Covers one process, lanes (`lanes.py`) and models that `distribute` handed to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.training.ballot import Ballot
from tapeline.training.determinism import keyed_draws
from tapeline.training.lanes import Lanes
from tapeline.training.objective import SQUARED_ERROR, Objective
from tapeline.training.precision import Precision, autocast, check_trainable, loss_scaler
from tapeline.training.ranks import (
    clip_grad_norm,
    data_rank,
    grad_norms,
    is_distributed,
    set_sync,
)

Schedule = Callable[[int], float]


class TrainStep:
    """Updates a model from one batch.

    Args:
        model: maps x `[n, inputs]` to what the objective asks for.
        optimizer: over the model's parameters.
        accumulate: micro-batches that a batch is cut into; their gradients, each scaled by its
            share, add up to the batch's.
        precision: of the forward pass, see `precision.py`.
        clip_norm: largest norm of the gradient over all parameters; None leaves it.
        schedule: step → factor on the learning rates that the optimizer has now.
        seed: dropout and other draws of step k are keyed by (seed, k); by (seed, k, place) on
            ranks with rows of their own, and by (seed, k, lane) with several lanes.
        lanes: lanes that a batch is cut into, or finished `Lanes` of this model, whose seed then
            counts. 1 is one whole batch, or a model that `distribute` made, each rank with rows
            of its own.

    Attributes:
        objective: gives the loss; the squared error unless another is set before the first step.
        scaler: of the loss, with float16: part of the state; None without.
        ballot: carries each rank's wish to stop, where there are several.

    Raises:
        TrainingError: `accumulate` below 1, or above 1 with lanes; a model without parameters in
            float32; several ranks, and neither lanes nor a distributed model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: int = 1,
        precision: Precision = "float32",
        clip_norm: float | None = None,
        schedule: Schedule | None = None,
        seed: int = 0,
        lanes: int | Lanes = 1,
    ) -> None:
        if accumulate < 1:
            raise TrainingError(
                "accumulate", expected="at least 1", found=str(accumulate), fix="Take 1 for none"
            )
        check_trainable(model)
        self.lanes = _lanes(model, lanes, seed)
        if self.lanes and accumulate > 1:
            raise TrainingError(
                "accumulate",
                expected="1 with lanes, each of which is a micro-batch already",
                found=str(accumulate),
                fix=f"Take 1, or more lanes than {self.lanes.num_lanes} if one doesn't fit",
            )
        self.model = model
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.precision: Precision = precision
        self.clip_norm = clip_norm
        self.schedule = schedule
        self.seed = seed
        self.objective: Objective = SQUARED_ERROR
        self.ballot = self.lanes.ballot if self.lanes else Ballot()
        self._shared = is_distributed(model)
        self._place = (data_rank(model),) if self._shared else ()
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.scaler = loss_scaler(self.device, precision)
        self._clipped_from: Tensor | None = None

    def __call__(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        """Do step `number` with x `[batch, inputs]` and y `[batch]` or `[batch, targets]`.

        With a distributed model x and y are this rank's rows; with lanes what `Lanes` was told.
        Returns the mean loss over all ranks' rows. It stays on the device: reading it here would
        wait for the device every step.

        Raises:
            TrainingError: the batch can't be cut evenly, or the model's output has another shape.
        """
        self.model.train()
        if self.lanes:
            total = self.lanes.backward((x, y), lambda lane: self._loss(*lane), step=number)
        else:
            total = self._backward(number, x, y)
        if self.scaler:
            total /= self.scaler.get_scale()
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self._clipped_from = clip_grad_norm(self.model, self.clip_norm)
        self._update(number)
        return total

    def grad_norms(self) -> list[Tensor]:
        """Norms of parts of the last step's gradient before it was clipped, on the device.

        Their norm is that of the whole, which is left to whoever reads them: many steps at once.
        None at all where it would take a message to other ranks, which hold shares.
        """
        clipped_from = self._clipped_from
        return grad_norms(self.model) if clipped_from is None else [clipped_from]

    def learning_rate(self, number: int) -> float:
        """The rate that step `number` is done with; of the first group, where there are several."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        return rate if self.schedule is None else rate * self.schedule(number)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a part of the batch, scaled where that is needed."""
        loss = batch_loss(self.model, x, y, precision=self.precision, objective=self.objective)
        return self.scaler.scale(loss) if self.scaler else loss

    def _backward(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        """Set the gradients to those of the batch, or of all ranks' batches; the mean loss."""
        if len(x) % self.accumulate:
            raise TrainingError(
                "accumulate",
                expected=f"a divisor of the batch, {len(x)}",
                found=str(self.accumulate),
                fix="Choose a batch that is a multiple of it",
            )
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        size = len(x) // self.accumulate
        parts = list(zip(torch.split(x, size), torch.split(y, size), strict=True))
        with keyed_draws(self.device, self.seed, number, *self._place):
            for part, (part_x, part_y) in enumerate(parts, 1):
                set_sync(self.model, part == len(parts))
                loss = self._loss(part_x, part_y) / self.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        if self._shared:
            total, votes = self._over_ranks(total)
            self.ballot.count(votes)
        return total

    def _over_ranks(self, total: Tensor) -> Tensor:
        """The mean of the ranks' losses, and how many of them wish to stop."""
        both = torch.stack([total, torch.full_like(total, float(self.ballot.wish))])
        dist.all_reduce(both)
        both[0] /= dist.get_world_size()
        return both

    def _update(self, number: int) -> None:
        if self.schedule is None:
            self._step()
            return
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        factor = self.schedule(number)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        self._step()
        # Put back, so that the state holds the base rate and the schedule needs no state at all.
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def _lanes(model: nn.Module, lanes: int | Lanes, seed: int) -> Lanes | None:
    """The lanes to go by; None where the batch stays whole."""
    if isinstance(lanes, int):
        if lanes == 1 and is_distributed(model):
            return None
        lanes = Lanes(model, num_lanes=lanes, seed=seed)
    return lanes if lanes.num_lanes > 1 else None


def batch_loss(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    precision: Precision = "float32",
    objective: Objective = SQUARED_ERROR,
) -> Tensor:
    """Mean loss of the model on x `[n, inputs]`, y `[n]` or `[n, targets]`; in float32.

    Raises:
        TrainingError: the model's output isn't of the shape that the objective asks for.
    """
    with autocast(x.device, precision):
        output = predict(model, x, y, objective)
    return objective.loss(output, y)


def predict(model: nn.Module, x: Tensor, y: Tensor, objective: Objective) -> Tensor:
    """The model's output for x `[n, inputs]`, whose targets are y.

    Raises:
        TrainingError: it isn't of shape `[n, outputs]`; one for each window may also be `[n]`.
    """
    output: Tensor = model(x)
    num = objective.num_outputs(math.prod(y.shape[1:]))
    shapes = [[len(x)], [len(x), 1]] if num == 1 else [[len(x), num]]
    if list(output.shape) not in shapes:
        raise TrainingError(
            f"model {type(model).__name__}",
            expected=f"an output of shape {' or '.join(map(str, shapes))} for {len(x)} windows",
            found=f"shape {list(output.shape)}",
            fix=f"Let the model end in {'one output' if num == 1 else f'{num} outputs'} per window",
        )
    return output


def warmup_then(
    kind: Literal["constant", "cosine"], *, warmup_steps: int, total_steps: int
) -> Schedule | None:
    """The factor on the learning rate at each step; None where it is always 1.

    A linear rise over `warmup_steps`, then "constant" 1, or half a "cosine" from 1 towards 0 at
    `total_steps`.
    """
    if kind == "constant" and warmup_steps == 0:
        return None

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if kind == "constant":
            return 1.0
        done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return factor
