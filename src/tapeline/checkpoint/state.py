"""Everything that determines the rest of a run, taken from live objects.

Covers: parameters and buffers, optimiser, learning-rate scheduler, sampler, any further object
that can give and take its state (a gradient scaler, averaged weights), all generators, step and
epoch. Does not cover non-persistent buffers: torch defines them as not part of a model's state.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.generators import capture_generators
from tapeline.checkpoint.sharded import Share
from tapeline.checkpoint.tree import Flattener, Json
from tapeline.errors import CheckpointError
from tapeline.files import canonical_json, sha256_json

PARTS = frozenset(
    ("step", "epoch", "model", "optimizer", "scheduler", "sampler", "extra", "generators")
)
RANK_PARTS = ("scheduler", "sampler", "extra")  # can't be taken over by other ranks if they differ
OF_RANKS = "$of_ranks"  # in place of such a part: how many ranks it needs
ALIGNMENT_BYTES = 64  # of memory that torch allocates on the CPU


@dataclass(frozen=True, eq=False)
class State:
    """What a checkpoint holds.

    Attributes:
        tensors: every tensor by its path, e.g. `model/0.weight`. They share memory with the
            objects they were captured from, so a state is of the moment until it is written.
        values: the rest as JSON, by part (`PARTS`). A tensor's place holds a reference to its name.
        shares: for each tensor of which this rank holds a part only (FSDP2, tensor parallelism),
            which one.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Json]
    shares: dict[str, Share] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, of the whole one where this rank holds a part."""
        share = self.shares.get(name)
        return share.shape if share else tuple(self.tensors[name].shape)

    @property
    def step(self) -> int:
        """Optimiser steps completed."""
        return int(self.values["step"])

    @property
    def epoch(self) -> int:
        """The epoch in progress."""
        return int(self.values["epoch"])


def capture_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    step: int,
    epoch: int = 0,
    scheduler: Any = None,
    sampler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> State:
    """Take the state of a run between two steps.

    Args:
        model: its `state_dict()` is taken.
        optimizer: None for a run without one.
        step: optimiser steps completed.
        epoch: the epoch in progress.
        scheduler: a learning-rate scheduler.
        sampler: an object with `state()` and `set_state()`, or with `state_dict()` and
            `load_state_dict()`.
        extra: further such objects by name.

    Raises:
        CheckpointError: a part can't give its state, the optimiser steps a parameter that the
            model doesn't hold, or `step` or `epoch` is no whole number from 0.
    """
    flattener = Flattener()
    trees = {
        "model": dict(model.state_dict()),
        "optimizer": None if optimizer is None else _optimizer_tree(model, optimizer),
        "scheduler": None if scheduler is None else _scheduler_tree(scheduler),
        "sampler": None if sampler is None else take("sampler", sampler),
        "extra": {name: take(f"extra/{name}", part) for name, part in (extra or {}).items()},
        "generators": capture_generators(),
    }
    values = {part: flattener.flatten(tree, part) for part, tree in trees.items()}
    values = {"step": _count("step", step), "epoch": _count("epoch", epoch), **values}
    return State(flattener.tensors, values, flattener.shares)


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)  # a number of NumPy or torch is one too
    except TypeError:
        count = -1
    if count < 0:
        raise CheckpointError(
            name,
            expected="a whole number, 0 or more",
            found=repr(value),
            fix="Pass how many were completed",
        )
    return count


def part_sha256(state: State) -> dict[str, str]:
    """A hash for each part of a state (`model`, `optimizer`, `generators`, …).

    Each is the sha256 of the part's values as canonical JSON and of its tensors in the order of
    their names: name, type, shape and bytes. Of a tensor in shares it is over this rank's.
    """
    digests = {part: hashlib.sha256(canonical_json(v).encode()) for part, v in state.values.items()}
    for name in sorted(state.tensors):
        tensor = state.tensors[name]
        digest = digests[name.split("/")[0]]
        digest.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor_bytes(tensor))
    return {part: digest.hexdigest() for part, digest in digests.items()}


def state_sha256(state: State) -> str:
    """One hash of a whole state: equal for equal bits, whatever the order of its dicts."""
    return sha256_json(part_sha256(state))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian; no copy where none is needed."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def take(name: str, part: Any) -> Any:
    """The state of an object that can give and take it.

    Raises:
        CheckpointError: it can't.
    """
    if hasattr(part, "set_state"):
        return part.state()
    if hasattr(part, "load_state_dict"):
        return part.state_dict()
    raise CheckpointError(
        name,
        expected="an object with state() and set_state(), or state_dict() and load_state_dict()",
        found=f"a {type(part).__qualname__}",
        fix="Pass an object that can give and take its state",
    )


def _scheduler_tree(scheduler: Any) -> dict[str, Any]:
    return {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def optimizer_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The model's names of the optimiser's parameters, in the order torch numbers them.

    Raises:
        CheckpointError: one is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    if None in found:
        raise CheckpointError(
            "optimizer",
            expected="only parameters of the model",
            found=f"{found.count(None)} of {len(found)} that the model doesn't hold",
            fix="Pass a module that holds every parameter, e.g. an nn.ModuleList",
        )
    return [name for name in found if name is not None]


def _optimizer_tree(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with the parameters' names in place of their numbers."""
    names = optimizer_parameters(model, optimizer)
    tree = optimizer.state_dict()
    return {
        **tree,
        "class": type(optimizer).__qualname__,
        "state": {names[k] if isinstance(k, int) else k: v for k, v in tree["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in tree["param_groups"]
        ],
    }
