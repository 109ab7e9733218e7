"""From a state back to live objects: all of it or nothing.

Covers: the checks that come before anything is modified, and putting parts back, whole or as the
live objects are cut over ranks. Does not cover where a state comes from.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint.generators import check_generators, restore_generators
from tapeline.checkpoint.sharded import as_live, wanted_by
from tapeline.checkpoint.state import (
    ALIGNMENT_BYTES,
    OF_RANKS,
    RANK_PARTS,
    State,
    optimizer_parameters,
    take,
)
from tapeline.checkpoint.tree import Flattener, Json, unflatten
from tapeline.errors import CheckpointError

_SHOWN_DIFFERENCES = 5


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
    _check_world(state)
    saved = {name: state.values[name] for name in ("optimizer", "scheduler", "sampler")}
    saved |= {f"extra/{name}": tree for name, tree in state.values["extra"].items()}
    _check_presence(parts, saved)
    live = _check_model(state, model)
    if optimizer is not None:
        _check_optimizer(saved["optimizer"], model, optimizer)
    if scheduler is not None:
        _check_class("scheduler", saved["scheduler"], scheduler)
        saved["scheduler"] = saved["scheduler"]["state"]
    generators = unflatten(state.values["generators"], state.tensors.__getitem__)
    check_generators(generators, {parameter.device for parameter in model.parameters()})

    # These may still refuse, by rules of their own; the others can't any more.
    given = {name: part for name, part in parts.items() if part is not None and name != "optimizer"}
    before = {name: copy.deepcopy(take(name, part)) for name, part in given.items()}
    live.flatten({name: before[f"extra/{name}"] for name in extra or {}}, "extra")
    _check_shares(state, live)
    try:
        for name, part in given.items():
            _give(part, _copied(saved[name], state, live))
    except BaseException:
        for name, part in given.items():
            _give(part, before[name])
        raise
    if optimizer is not None:
        _restore_optimizer(_copied(saved["optimizer"], state, live, give_up), model, optimizer)
    _load_model(state, model, live)
    restore_generators(generators)


def restore_model(state: State, model: nn.Module) -> None:
    """Put back parameters and buffers alone: to evaluate, not to resume.

    Raises:
        CheckpointError: the model differs from the saved one; nothing has been modified.
    """
    live = _check_model(state, model)
    _check_shares(state, live)
    _load_model(state, model, live)


def _load_model(state: State, model: nn.Module, live: Flattener) -> None:
    def placed(name: str) -> Any:
        return _placed(state, live, name, state.tensors[name])

    model.load_state_dict(unflatten(state.values["model"], placed))


def _copied(tree: Json, state: State, live: Flattener, give_up: bool = False) -> Any:
    """A part with tensors of its own: parts may keep what they are given and change it in place.

    One that lies as torch would have put it can be taken over. Elsewhere it can't: sums over
    memory that is aligned otherwise may differ in their last bits.
    """

    def own(name: str) -> Any:
        tensor = state.tensors[name]
        if not (give_up and tensor.data_ptr() % ALIGNMENT_BYTES == 0):
            tensor = tensor.clone()
        return _placed(state, live, name, tensor)

    return unflatten(tree, own)


def _placed(state: State, live: Flattener, name: str, tensor: torch.Tensor) -> Any:
    """A tensor cut over the ranks as the live object is that it goes to."""
    place = wanted_by(name, state.shape(name), live.shares)
    return as_live(tensor, state.shares.get(name), live.split[place]) if place else tensor


def _give(part: Any, state: Any) -> None:
    if hasattr(part, "set_state"):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def _restore_optimizer(
    tree: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    numbers = {name: i for i, name in enumerate(optimizer_parameters(model, optimizer))}
    saved = {numbers.get(name, name): entries for name, entries in tree["state"].items()}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in tree["param_groups"]
    ]
    rest = {key: value for key, value in tree.items() if key != "class"}
    optimizer.load_state_dict({**rest, "state": saved, "param_groups": groups})
    # torch casts to the parameter's type, which loses bits of an optimiser that keeps more. And
    # what was read lies row by row: fused updates walk a parameter and its moments side by side
    # in memory, whatever its order (channels_last).
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved.items():
        if not isinstance(number, int):
            continue
        parameter = parameters[number]
        live = optimizer.state[parameter]
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                continue
            if live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device)
            if value.shape == parameter.shape and live[key].stride() != parameter.stride():
                live[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(live[key])


def _check_world(state: State) -> None:
    for part in RANK_PARTS:
        value = state.values[part]
        if isinstance(value, dict) and OF_RANKS in value:
            raise CheckpointError(
                part,
                expected=f"{value[OF_RANKS]} ranks: at the save each had a state of its own",
                found="another number of ranks",
                fix=f"Resume on {value[OF_RANKS]} ranks, or give up the state that differs",
            )


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


def _check_model(state: State, model: nn.Module) -> Flattener:
    """Compare a model with the saved one; returns what the live one holds."""
    flattener = Flattener()
    here_names = flattener.flatten(dict(model.state_dict()), "model")
    live = State(flattener.tensors, {}, flattener.shares)
    saved_names = state.values["model"]
    differences = []
    for name in sorted(here_names.keys() | saved_names.keys()):
        here = _described(here_names, name, live)
        saved = _described(saved_names, name, state)
        if here != saved:
            differences.append(f"{name} ({here} here, {saved} in the checkpoint)")
    if differences:
        raise CheckpointError(
            "model",
            expected="the tensors of the checkpoint",
            found=_listed(differences),
            fix="Build the model that this checkpoint was made with",
        )
    return flattener


def _check_shares(state: State, live: Flattener) -> None:
    for name, share in state.shares.items():
        place = wanted_by(name, share.shape, live.shares)
        if place is None or live.shares[place] != share:
            raise CheckpointError(
                name,
                expected=str(live.shares[place]) if place else "the whole tensor",
                found=f"the part {share}",
                fix="Load with like=capture_state(…) of the objects that the state is for",
            )


def _described(names: Mapping[str, Json], name: str, holder: State) -> str:
    """A model's entry in words: type, shape, and the name it is tied to."""
    if name not in names:
        return "nothing"
    reference = names[name].get("$tensor") if isinstance(names[name], dict) else None
    if reference is None:
        return "plain data"
    kind = str(holder.tensors[reference].dtype).removeprefix("torch.")
    words = f"{kind} {list(holder.shape(reference))}"
    tied = reference.removeprefix("model/")
    return words if tied == name else f"{words} tied to {tied}"


def _check_optimizer(saved: Json, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _check_class("optimizer", saved, optimizer)
    names = iter(optimizer_parameters(model, optimizer))
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
