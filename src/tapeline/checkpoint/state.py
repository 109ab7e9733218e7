"""Everything that determines the rest of a run, taken from live objects and put back.

Covers: parameters and buffers, optimiser, learning-rate scheduler, sampler, any further object
that can give and take its state (a gradient scaler, averaged weights), all generators, step and
epoch. Does not cover non-persistent buffers: torch defines them as not part of a model's state.

A restore checks first and changes afterwards: when it raises, nothing has been modified.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.generators import (
    capture_generators,
    check_generators,
    restore_generators,
)
from tapeline.checkpoint.tree import Flattener, Json, unflatten
from tapeline.errors import CheckpointError
from tapeline.files import canonical_json

PARTS = frozenset(
    ("step", "epoch", "model", "optimizer", "scheduler", "sampler", "extra", "generators")
)
ALIGNMENT_BYTES = 64  # of memory that torch allocates on the CPU
_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, eq=False)
class State:
    """What a checkpoint holds.

    Attributes:
        tensors: every tensor by its path, e.g. `model/0.weight`. They share memory with the
            objects they were captured from, so a state is of the moment until it is written.
        values: the rest as JSON, by part (`PARTS`). A tensor's place holds a reference to its name.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Json]

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
        CheckpointError: a part can't give its state, or the optimiser steps a parameter that
            the model doesn't hold.
    """
    flattener = Flattener()
    trees = {
        "model": dict(model.state_dict()),
        "optimizer": None if optimizer is None else _optimizer_tree(model, optimizer),
        "scheduler": None if scheduler is None else _scheduler_tree(scheduler),
        "sampler": None if sampler is None else _take("sampler", sampler),
        "extra": {name: _take(f"extra/{name}", part) for name, part in (extra or {}).items()},
        "generators": capture_generators(),
    }
    values = {part: flattener.flatten(tree, part) for part, tree in trees.items()}
    return State(flattener.tensors, {"step": int(step), "epoch": int(epoch), **values})


def restore_state(
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    scheduler: Any = None,
    sampler: Any = None,
    extra: Mapping[str, Any] | None = None,
    give_up: bool = False,
) -> None:
    """Put a state into freshly built objects, all of it or nothing.

    Saved hyperparameters replace those of the optimiser, as torch does. The state itself is not
    tied to the objects afterwards: it can be restored again, unless it is given up.

    Args:
        state: what to put back.
        model, optimizer, scheduler, sampler, extra: as in `capture_state`.
        give_up: the state isn't used afterwards. On the CPU the optimiser then takes over most of
            its tensors instead of copying them: two thirds of a state of Adam.

    Raises:
        CheckpointError: the objects differ from those the state was captured from (names, shapes
            and types of what differs), or a part is given on one side only.
        TapelineError: the sampler or an extra part refuses its state.
    """
    parts = {"optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    parts |= {f"extra/{name}": part for name, part in (extra or {}).items()}
    saved = {name: state.values[name] for name in ("optimizer", "scheduler", "sampler")}
    saved |= {f"extra/{name}": tree for name, tree in state.values["extra"].items()}
    _check_presence(parts, saved)
    _check_model(state, model)
    if optimizer is not None:
        _check_optimizer(saved["optimizer"], model, optimizer)
    if scheduler is not None:
        _check_class("scheduler", saved["scheduler"], scheduler)
        saved["scheduler"] = saved["scheduler"]["state"]
    generators = unflatten(state.values["generators"], state.tensors.__getitem__)
    check_generators(generators, {parameter.device for parameter in model.parameters()})

    # These may still refuse, by rules of their own; the others can't any more.
    given = {name: part for name, part in parts.items() if part is not None and name != "optimizer"}
    before = {name: copy.deepcopy(_take(name, part)) for name, part in given.items()}
    try:
        for name, part in given.items():
            _give(part, _copied(saved[name], state))
    except BaseException:
        for name, part in given.items():
            _give(part, before[name])
        raise
    if optimizer is not None:
        _restore_optimizer(_copied(saved["optimizer"], state, give_up), model, optimizer)
    model.load_state_dict(unflatten(state.values["model"], state.tensors.__getitem__))
    restore_generators(generators)


def restore_model(state: State, model: nn.Module) -> None:
    """Put back parameters and buffers alone: to evaluate, not to resume.

    Raises:
        CheckpointError: the model differs from the saved one; nothing has been modified.
    """
    _check_model(state, model)
    model.load_state_dict(unflatten(state.values["model"], state.tensors.__getitem__))


def part_sha256(state: State) -> dict[str, str]:
    """A hash for each part of a state (`model`, `optimizer`, `generators`, …).

    Each is the sha256 of the part's values as canonical JSON and of its tensors in the order of
    their names: name, type, shape and bytes.
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
    return hashlib.sha256(canonical_json(part_sha256(state)).encode()).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order, little-endian; no copy where none is needed."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _copied(tree: Json, state: State, give_up: bool = False) -> Any:
    """A part with tensors of its own: parts may keep what they are given and change it in place.

    One that lies as torch would have put it can be taken over. Elsewhere it can't: sums over
    memory that is aligned otherwise may differ in their last bits.
    """

    def own(name: str) -> torch.Tensor:
        tensor = state.tensors[name]
        if give_up and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
            return tensor
        return tensor.clone()

    return unflatten(tree, own)


def _take(name: str, part: Any) -> Any:
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


def _give(part: Any, state: Any) -> None:
    if hasattr(part, "set_state"):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _scheduler_tree(scheduler: Any) -> dict[str, Any]:
    return {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def _optimizer_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The model's names of the optimiser's parameters, in the order torch numbers them."""
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
    names = _optimizer_parameters(model, optimizer)
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


def _restore_optimizer(
    tree: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    numbers = {name: i for i, name in enumerate(_optimizer_parameters(model, optimizer))}
    saved = {numbers.get(name, name): entries for name, entries in tree["state"].items()}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in tree["param_groups"]
    ]
    rest = {key: value for key, value in tree.items() if key != "class"}
    optimizer.load_state_dict({**rest, "state": saved, "param_groups": groups})
    # torch casts to the parameter's type, which loses bits of an optimiser that keeps more.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved.items():
        if not isinstance(number, int):
            continue
        live = optimizer.state[parameters[number]]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)


def _check_presence(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    absent = [name for name in saved if saved[name] is not None and parts.get(name) is None]
    surplus = [name for name in parts if parts[name] is not None and saved.get(name) is None]
    if absent or surplus:
        raise CheckpointError(
            "state",
            expected="the parts of the checkpoint, no more and no fewer",
            found=_listed(
                [f"no {name}, which the checkpoint has" for name in absent]
                + [f"{name}, which the checkpoint lacks" for name in surplus]
            ),
            fix="Pass the same parts as at the save; restore_model takes the weights alone",
        )


def _check_class(name: str, saved: Mapping[str, Any], part: Any) -> None:
    if type(part).__qualname__ != saved["class"]:
        raise CheckpointError(
            name,
            expected=f"{saved['class']}, as in the checkpoint",
            found=type(part).__qualname__,
            fix=f"Build the {name} that this run was started with",
        )


def _check_model(state: State, model: nn.Module) -> None:
    flattener = Flattener()
    here_names = flattener.flatten(dict(model.state_dict()), "model")
    saved_names = state.values["model"]
    differences = []
    for name in sorted(here_names.keys() | saved_names.keys()):
        here = _described(here_names, name, flattener.tensors)
        saved = _described(saved_names, name, state.tensors)
        if here != saved:
            differences.append(f"{name} ({here} here, {saved} in the checkpoint)")
    if differences:
        raise CheckpointError(
            "model",
            expected="the tensors of the checkpoint",
            found=_listed(differences),
            fix="Build the model that this checkpoint was made with",
        )


def _described(names: Mapping[str, Json], name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """A model's entry in words: type, shape, and the name it is tied to."""
    if name not in names:
        return "nothing"
    reference = names[name].get("$tensor") if isinstance(names[name], dict) else None
    if reference is None:
        return "plain data"
    tensor = tensors[reference]
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    tied = reference.removeprefix("model/")
    return words if tied == name else f"{words} tied to {tied}"


def _check_optimizer(saved: Json, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _check_class("optimizer", saved, optimizer)
    names = iter(_optimizer_parameters(model, optimizer))
    here = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in saved["param_groups"]]
    differences = []
    if len(here) != len(there):
        differences.append(f"{len(here)} parameter groups here, {len(there)} in the checkpoint")
    for i, (ours, theirs) in enumerate(zip(here, there, strict=False)):
        differences += [f"{n} in group {i} only here" for n in ours if n not in theirs]
        differences += [f"{n} in group {i} only in the checkpoint" for n in theirs if n not in ours]
        if sorted(ours) == sorted(theirs) and ours != theirs:
            differences.append(f"group {i} in another order")
    if differences:
        raise CheckpointError(
            "optimizer",
            expected="the parameter groups of the checkpoint",
            found=_listed(differences),
            fix="Build the optimizer with the same groups in the same order",
        )


def _listed(differences: list[str]) -> str:
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = len(differences) - _SHOWN_DIFFERENCES
    return f"{shown}; and {more} more" if more > 0 else shown
