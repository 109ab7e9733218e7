"""Lanes: gradients of fixed shares of the batch, added up to the same bits at any number of ranks.

Covers a user's own loop (`Lanes.backward`) and, through it, `TrainStep`. Does not cover the
update: gradient clipping and optimisers see the whole gradient, which is the same on every rank.

What holds, on one platform with a fixed number of threads (`determinism.py`): parameters,
optimiser state, buffers and losses are the same bits at every number of ranks from 1 to the number
of lanes. Each lane is computed by itself, as its own micro-batch:

- draws of torch in the forward pass are keyed by (seed, step, lane);
- layers that couple examples, such as batch normalisation, see their lane and no more;
- buffers, such as running statistics, are the same in each lane's forward pass, and afterwards
  move by the mean over lanes of how far each lane moved them;
- a parameter that no lane used has a gradient of zeros.

What doesn't hold: a module that keeps numbers outside its parameters and buffers, draws from
Python's `random` or NumPy, or talks to other ranks in its forward pass sees the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_not
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.training.ballot import Ballot
from tapeline.training.determinism import kept_draws
from tapeline.training.exchange import Exchange
from tapeline.training.moving import MovingBuffers
from tapeline.training.precision import check_trainable
from tapeline.training.ranks import is_distributed
from tapeline.training.tree import TreeSum, check_lanes
from tapeline.world import World

Batch = TypeVar("Batch")
_ALIGNMENT = 64  # bytes; matrix kernels may take another path, with other bits, off a boundary


class Lanes:
    """Computes gradients lane by lane. Parameters and buffers are set to rank 0's at the start.

    Args:
        model: on its device; parameters that require a gradient in float32.
        num_lanes: shares of the global batch, a power of two; ranks share them out. Fixed for a
            run: another number is another run.
        seed: draws of lane l of step k are keyed by (seed, k, l).
        own_rows_only: batches hold the rows of this rank's lanes (`rows`), as a loader that reads
            no more gives them; otherwise every rank is given the whole batch.
        group: of processes; None is torch's default group, or no other rank where there is none.

    Attributes:
        step: the number of the next step.
        exchange: counts the bytes this rank sent.
        ballot: carries each rank's wish to stop along with the gradients.

    Raises:
        TrainingError: `num_lanes` is no power of two or below the number of ranks, the model has
            nothing to train in float32 or is a distributed one, or there are ranks but no process
            group.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_lanes: int,
        seed: int = 0,
        own_rows_only: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank, world_size = _place(group)
        check_lanes(num_lanes, world_size)
        check_trainable(model)
        if is_distributed(model):
            raise TrainingError(
                f"model {type(model).__name__}",
                expected="one that every rank holds whole and alone",
                found="one that torch shares among ranks",
                fix="Give Lanes the model itself; it does the exchange",
            )
        self.num_lanes = num_lanes
        self.seed = seed
        self.own_rows_only = own_rows_only
        self.step = 0
        self.ballot = Ballot()
        self.exchange = Exchange(num_lanes, rank, world_size, group)
        self._model = model
        self._parameters = _trained(model)
        self._device = self._parameters[0].device
        self._weight = torch.tensor(1 / num_lanes, device=self._device)  # exact: a power of two
        self._moving = MovingBuffers(model)
        self._num_gradients = sum(p.numel() for p in self._parameters)
        self._free: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}
        if world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), group=group, group_src=0)

    def rows(self, batch: int) -> slice:
        """Which rows of a global batch of `batch` this rank's lanes are.

        Raises:
            TrainingError: the batch can't be cut evenly.
        """
        size = self._lane_size(batch, self.num_lanes)
        lanes = self.exchange.lanes
        return slice(lanes.start * size, lanes.stop * size)

    def backward(
        self, batch: Batch, loss_fn: Callable[[Batch], Tensor], *, step: int | None = None
    ) -> Tensor:
        """Set every parameter's `.grad` to the gradient of the batch's mean loss.

        What `.grad` held is replaced, so no `zero_grad` is needed; it stays until the next call.

        Args:
            batch: a tensor, or a tuple, list or dict of such, with examples along the first
                dimension; on the model's device.
            loss_fn: takes one lane of the batch, in the same form; returns the mean over its
                examples, a tensor without dimensions.
            step: its number, which keys the draws; the default counts on from the last call.

        Returns:
            The mean loss over the whole batch, on the device; the same on every rank.

        Raises:
            TrainingError: the batch can't be cut evenly, the loss is no single number, or the model
                has other parameters to train than at the start.
        """
        self._check_parameters()
        number = self.step if step is None else step
        mine = self.exchange.lanes
        first, count = (0, len(mine)) if self.own_rows_only else (mine.start, self.num_lanes)
        size = self._lane_size(_num_examples(batch), count)
        tree = TreeSum()
        with kept_draws(self._device) as set_key, self._moving.kept():
            for place, lane in enumerate(mine, first):
                part = _cut(batch, place * size, (place + 1) * size)
                vector = self._attach(self._take().zero_())
                set_key(self.seed, number, lane)
                loss = _single(loss_fn(part))
                loss.backward(self._weight)  # type: ignore[no-untyped-call]
                torch.mul(loss.detach(), self._weight, out=vector[self._num_gradients])
                self._moving.collect(self._movement(vector), self.num_lanes)
                self._free += tree.add(range(lane, lane + 1), vector)
        if self.ballot.wish:
            tree.values[0][self._num_gradients + 1] = 1
        total = self._attach(self.exchange.sum(tree.values))
        self._free += tree.values  # read until the next call writes
        self._moving.move(self._movement(total))
        self.step = number + 1
        both = total[self._num_gradients :][:2].clone()
        self.ballot.count(both[1])
        return both[0]

    def state(self) -> dict[str, int]:
        """What decides the draws to come, for a checkpoint."""
        return {"step": self.step, "seed": self.seed, "num_lanes": self.num_lanes}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken.

        Raises:
            TrainingError: the state is of another number of lanes or another seed.
        """
        here = {"seed": self.seed, "num_lanes": self.num_lanes}
        saved = {name: state.get(name) for name in here}
        if saved != here or not isinstance(state.get("step"), int):
            raise TrainingError(
                "state of lanes",
                expected=f"a step, seed {self.seed} and {self.num_lanes} lanes",
                found=", ".join(f"{name} {state.get(name)}" for name in ("step", *here)),
                fix="Resume with the seed and number of lanes the run began with",
            )
        self.step = state["step"]

    def _check_parameters(self) -> None:
        """One that came later would be summed over neither lanes nor ranks."""
        now = _trained(self._model)
        if len(now) != len(self._parameters) or any(map(is_not, now, self._parameters)):
            raise TrainingError(
                f"model {type(self._model).__name__}",
                expected=f"the {len(self._parameters)} parameters to train that it had when Lanes "
                "was made",
                found=f"{len(now)}, not the same",
                fix="Make Lanes anew after freezing, unfreezing or replacing a layer, and give it "
                "the state() of the old",
            )

    def _lane_size(self, num_examples: int, count: int) -> int:
        if num_examples == 0 or num_examples % count:
            raise TrainingError(
                "batch",
                expected=f"a multiple of {count}, the lanes it is cut into",
                found=str(num_examples),
                fix="Choose such a batch, and leave out an incomplete last one",
            )
        return num_examples // count

    def _take(self) -> Tensor:
        """A vector for one lane: gradients, loss, a vote, what buffers moved, zeros to even out."""
        if self._free:
            return self._free.pop()
        size = self.exchange.padded(self._num_gradients + 2 + self._moving.size)
        return torch.empty(size, device=self._device)

    def _attach(self, vector: Tensor) -> Tensor:
        """Make the parameters' `.grad` views of a vector."""
        views = self._views.get(vector.data_ptr())
        if views is None:
            sizes = [p.numel() for p in self._parameters]
            pieces = torch.split(vector[: self._num_gradients], sizes)
            # In the order of the parameter's own memory (channels_last): fused updates walk a
            # parameter and its gradient side by side.
            views = [
                piece.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
                for piece, p in zip(pieces, self._parameters, strict=True)
            ]
            self._views[vector.data_ptr()] = views
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view
        return vector

    def _movement(self, vector: Tensor) -> Tensor:
        return vector[self._num_gradients + 2 :][: self._moving.size]


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    started = World.from_environment().size
    if started > 1:
        raise TrainingError(
            "process group",
            expected=f"one that joins the {started} ranks of WORLD_SIZE",
            found="none",
            fix="Wrap the program in `with joined():`, or call init_process_group first",
        )
    return 0, 1


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _single(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape != ():
        raise TrainingError(
            "loss_fn",
            expected="one number in a tensor, the mean over the lane's examples",
            found=f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss),
            fix="Return `losses.mean()`",
        )
    return loss


def _num_examples(batch: Any) -> int:
    sizes = {len(tensor) for tensor in _tensors(batch)}
    if len(sizes) != 1:
        raise _no_batch(", ".join(map(str, sorted(sizes))) or "none")
    return sizes.pop()


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        if not batch.dim():
            raise _no_batch("one without dimensions")
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [tensor for item in batch for tensor in _tensors(item)]
    raise _no_batch(type(batch).__name__)


def _no_batch(found: str) -> TrainingError:
    return TrainingError(
        "batch",
        expected="tensors with the same number of examples",
        found=found,
        fix="Give a tensor, or a tuple, list or dict of tensors; `loss_fn` can hold what isn't cut",
    )


def _cut(batch: Any, start: int, stop: int) -> Any:
    """The rows [start, stop) of every tensor, each beginning on an alignment boundary."""
    if isinstance(batch, Tensor):
        rows = batch[start:stop]
        return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows
    if isinstance(batch, Mapping):
        return {name: _cut(item, start, stop) for name, item in batch.items()}
    items = [_cut(item, start, stop) for item in batch]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
