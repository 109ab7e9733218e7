"""The loop: steps in order, and what is done between them. No knowledge of files or runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from tapeline.errors import TrainingError
from tapeline.store import Shards
from tapeline.training.determinism import refusals_told
from tapeline.training.precision import check_trainable
from tapeline.training.step import TrainStep
from tapeline.windows import BatchSource, Form, Loader, Normaliser, Shuffled, WindowSampler

Hook = Callable[[int, Tensor], object]
Phase = Literal["data", "transfer", "compute"]


def loop(
    step: TrainStep,
    batches: Iterable[Sequence[Tensor | np.ndarray]],
    first: int,
    last: int,
    hooks: Iterable[Hook] = (),
    switch: Callable[[Phase], None] | None = None,
) -> None:
    """Train from step `first` to before step `last`. Losses are the hooks': none is kept here.

    Args:
        step: does one step.
        batches: x `[batch, inputs]` and y as the step takes it, at least `last − first` of them. An
            iterator is left where the steps end, for the caller to go on with.
        first, last: numbers of steps; they key the draws and the schedule.
        hooks: called after each step, in order, with the number of steps done and the loss.
        switch: called as each phase of a step begins, with its name; one ends where the next
            begins, "compute" where the hooks say. Without "transfer" where nothing is to move.

    Raises:
        TrainingError: the batches end before the steps do, or torch's determinism switch is on
            and refuses an operation.
    """
    hooks = tuple(hooks)
    enter = switch or _unobserved
    source = iter(batches)
    try:
        with refusals_told(step.model):
            for number in range(first, last):
                enter("data")
                batch = next(source, None)
                if batch is None:
                    raise _too_few(number - first, last - first)
                x, y = batch
                if not (_is_at(x, step.device) and _is_at(y, step.device)):
                    enter("transfer")
                    x, y = (torch.as_tensor(part).to(step.device) for part in batch)
                enter("compute")
                loss = step(number, x, y)
                for hook in hooks:
                    hook(number + 1, loss)
    finally:
        # A loader's iterator was made here: end its thread now, not at collection.
        if isinstance(source, Generator) and source is not batches:
            source.close()


def _too_few(found: int, expected: int) -> TrainingError:
    return TrainingError(
        "batches",
        expected=f"{expected}, one for each step",
        found=str(found),
        fix="Give an iterable that goes on, such as a Loader",
    )


def _unobserved(_: Phase) -> None:
    pass


def _is_at(array: Tensor | np.ndarray, device: torch.device) -> TypeGuard[Tensor]:
    return isinstance(array, Tensor) and array.device == device


def train(
    model: nn.Module,
    shards: Shards,
    sampler: WindowSampler,
    steps: int,
    lr: float = 1e-3,
    accumulate: int = 1,
    bf16: bool = False,
    T: int = 20,
    horizon: int | Sequence[int] = 10,
    target_col: int = 0,
    opt: torch.optim.Optimizer | None = None,
    start_step: int = 0,
    scale: Normaliser | None = None,
) -> list[float]:
    """Train a model on a store, for scripts and notebooks; `tapeline train` does runs.

    Args:
        model: maps x `[batch, T · columns]` to `[batch]` or `[batch, horizons]`.
        shards: the store.
        sampler: decides the batches, and advances.
        steps: how many steps to do.
        lr: learning rate of the Adam that is made where `opt` is None.
        accumulate: micro-batches that each batch is cut into; the result is the batch's.
        bf16: forward pass under bfloat16 autocast; weights, loss and optimiser in float32.
        T, horizon, target_col: the shape of an example, as in `make_batch`.
        opt: the optimiser to go on with.
        start_step: steps done before; draws of step k are keyed by (the sampler's seed, k).
        scale: scales the inputs.

    Returns:
        The loss of each step.

    Raises:
        TrainingError: `accumulate` doesn't divide the batch, or the model can't be trained.
        WindowError: the sampler's windows aren't `shards`', or of another T or horizon.
    """
    check_trainable(model)  # first, since Adam refuses an empty list in words of its own
    optimizer = torch.optim.Adam(model.parameters(), lr=lr) if opt is None else opt
    step = TrainStep(
        model,
        optimizer,
        accumulate=accumulate,
        precision="bfloat16" if bf16 else "float32",
        seed=sampler.seed,
    )
    BatchSource(shards, T, horizon, target_col, scale).check(sampler.index)
    loader = Loader(
        shards,
        sampler.index,
        Shuffled(sampler.seed),
        sampler.batch,
        form=Form(target_col, scale),
    )
    loader.skip_to(sampler.position)

    losses: list[Tensor] = []
    hooks: list[Hook] = [lambda _, loss: losses.append(loss), lambda _, __: sampler.advance()]
    loop(step, loader, start_step, start_step + steps, hooks)
    return torch.stack(losses).tolist() if losses else []
