"""All state, taken and put back: bitwise continuation, hashes, refusals."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_checkpoint import CountingSampler, Run, seed_everything
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tapeline.checkpoint import (
    State,
    capture_state,
    load_checkpoint,
    load_state,
    part_sha256,
    restore_model,
    restore_state,
    save_checkpoint,
    save_state,
    state_sha256,
)
from tapeline.checkpoint.generators import check_generators
from tapeline.checkpoint.tree import Flattener, unflatten
from tapeline.errors import CheckpointError


def through_disk(state: State, folder: Path) -> State:
    return load_state(save_state(folder / "checkpoint", state))


def test_five_steps_saved_and_five_more_are_ten(tmp_path: Path):
    straight = Run(seed=1).train(10)
    expected = part_sha256(straight.capture())
    save_state(tmp_path / "c", Run(seed=1).train(5).capture())
    resumed = Run(seed=2).train(3)
    resumed.restore(load_state(tmp_path / "c")).train(5)
    assert part_sha256(resumed.capture()) == expected
    assert state_sha256(resumed.capture()) == state_sha256(Run(seed=1).train(10).capture())


def test_a_state_that_is_given_up_is_taken_over_and_continues_bitwise(tmp_path: Path):
    expected = state_sha256(Run(seed=1).train(10).capture())
    for give_up in (False, True):
        state = through_disk(Run(seed=1).train(5).capture(), tmp_path)
        before = state_sha256(state)
        run = Run(seed=2)
        restore_state(
            state,
            run.model,
            run.optimizer,
            scheduler=run.scheduler,
            sampler=run.sampler,
            give_up=give_up,
        )
        run.num_steps = 5
        moment = run.optimizer.state[run.model[0].weight]["exp_avg"]
        saved = state.tensors["optimizer/state/0.weight/exp_avg"]
        assert (moment.data_ptr() == saved.data_ptr()) is give_up
        assert state_sha256(run.train(5).capture()) == expected
        assert (state_sha256(state) == before) is not give_up


def test_tensors_of_whole_cache_lines_lie_as_torch_puts_them(tmp_path: Path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(3, 5), nn.BatchNorm1d(5)).bfloat16()
    state = through_disk(capture_state(model, None, step=1), tmp_path)
    for tensor in state.tensors.values():
        assert tensor.data_ptr() % tensor.element_size() == 0
        assert tensor.data_ptr() % 64 == 0 or tensor.nbytes % 64


def test_weights_alone_do_not_continue_bitwise(tmp_path: Path):
    expected = state_sha256(Run(seed=1).train(10).capture())
    state = through_disk(Run(seed=1).train(5).capture(), tmp_path)
    resumed = Run(seed=2)
    restore_model(state, resumed.model)
    resumed.train(5)
    assert state_sha256(resumed.capture()) != expected


def test_small_face_round_trip(tmp_path: Path):
    run = Run(seed=1).train(4)
    path = save_checkpoint(tmp_path / "c", run.model, run.optimizer, run.sampler, 4)
    assert path == tmp_path / "c"
    draws = torch.rand(3)
    fresh = Run(seed=9)
    assert load_checkpoint(path, fresh.model, fresh.optimizer, fresh.sampler) == 4
    assert torch.equal(torch.rand(3), draws)
    assert fresh.sampler.position == 4
    assert all(map(torch.equal, fresh.model.state_dict().values(), run.model.state_dict().values()))


def test_an_optimizer_that_never_stepped_replaces_one_that_did(tmp_path: Path):
    state = through_disk(Run(seed=1).capture(), tmp_path)
    resumed = Run(seed=2).train(3).restore(state)
    assert resumed.optimizer.state_dict()["state"] == {}
    assert state_sha256(resumed.capture()) == state_sha256(state)


def test_saved_hyperparameters_win(tmp_path: Path):
    model = nn.Linear(2, 1)
    saved = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), fused=True)
    state = through_disk(capture_state(model, saved, step=0), tmp_path)
    fresh = torch.optim.Adam(model.parameters(), lr=0.5, foreach=True, betas=(0.1, 0.2))
    restore_state(state, model, fresh)
    group = fresh.param_groups[0]
    assert torch.equal(group["lr"], torch.tensor(0.25))
    assert (group["fused"], group["foreach"], group["betas"]) == (True, None, (0.9, 0.999))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
        torch.optim.Adafactor,
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        torch.optim.Rprop,
    ],
)
def test_optimizers_continue_bitwise(make, tmp_path: Path):
    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum() + model.weight.sin().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    seed_everything(1)
    model = nn.Linear(3, 4)
    optimizer = make(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, None, 2)
    other = nn.Linear(3, 4)
    resumed = make(other.parameters())
    load_checkpoint(tmp_path / "c", other, resumed, None)
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    assert state_sha256(capture_state(other, resumed, step=4)) == state_sha256(
        capture_state(model, optimizer, step=4)
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_in_another_memory_order_continues_bitwise(fused, tmp_path: Path):
    """What was read lies row by row; fused updates walk a parameter and its moments in memory."""
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))

    def made():
        seed_everything(1)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    state = through_disk(capture_state(model, optimizer, step=1), tmp_path)
    other, resumed = made()
    restore_state(state, other, resumed)
    assert resumed.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    assert torch.equal(model.weight, other.weight)


class WideMomentum(torch.optim.Optimizer):
    """Keeps float32 momentum for bfloat16 parameters; torch's own load would round it."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.full_like(p, 1 / 3, dtype=torch.float32)


def test_optimizer_state_wider_than_its_parameters_keeps_its_bits(tmp_path: Path):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = WideMomentum(model.parameters())
    optimizer.step()
    state = through_disk(capture_state(model, optimizer, step=1), tmp_path)
    fresh = WideMomentum(model.parameters())
    restore_state(state, model, fresh)
    momentum = fresh.state[model.weight]["momentum"]
    assert momentum.dtype is torch.float32
    assert torch.equal(momentum, torch.full((2, 2), 1 / 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3], gamma=0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            milestones=[2],
        ),
    ],
)
def test_schedulers_continue(make, tmp_path: Path):
    def steps(optimizer, scheduler, n):
        rates = []
        for _ in range(n):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def build():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, make(optimizer)

    _, optimizer, scheduler = build()
    expected = steps(optimizer, scheduler, 6)
    model, optimizer, scheduler = build()
    steps(optimizer, scheduler, 2)
    state = capture_state(model, optimizer, step=2, scheduler=scheduler)
    state = through_disk(state, tmp_path)
    model, optimizer, scheduler = build()
    restore_state(state, model, optimizer, scheduler=scheduler)
    assert steps(optimizer, scheduler, 4) == expected[2:]


class Averaged:
    """An extra part with `state_dict`, as gradient scalers and averaged weights have."""

    def __init__(self, value: float) -> None:
        self.mean = torch.full((3,), value)

    def state_dict(self):
        return {"mean": self.mean, "best": math.inf}

    def load_state_dict(self, state):
        self.mean, self.best = state["mean"], state["best"]


def test_extra_parts_are_restored_and_not_shared(tmp_path: Path):
    model = nn.Linear(1, 1)
    state = capture_state(model, None, step=7, epoch=2, extra={"ema": Averaged(0.5)})
    state = through_disk(state, tmp_path)
    assert (state.step, state.epoch) == (7, 2)
    first, second = Averaged(0), Averaged(0)
    restore_state(state, model, None, extra={"ema": first})
    first.mean += 1
    restore_state(state, model, None, extra={"ema": second})
    assert torch.equal(second.mean, torch.full((3,), 0.5))
    assert second.best == math.inf


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight


def test_tied_parameters_are_saved_once_and_stay_tied(tmp_path: Path):
    model = Tied()
    state = through_disk(capture_state(model, None, step=0), tmp_path)
    assert [name for name in state.tensors if name.startswith("model/")] == ["model/first.weight"]
    fresh = Tied()
    restore_state(state, fresh, None)
    assert torch.equal(fresh.second.weight, model.first.weight)
    assert fresh.second.weight is fresh.first.weight


@pytest.mark.parametrize("tied_at_save", [True, False])
def test_other_ties_are_refused(tied_at_save: bool):
    state = capture_state(Tied(tied_at_save), None, step=0)
    tied, free = "float32 [3, 3] tied to first.weight", "float32 [3, 3]"
    saved, here = (tied, free) if tied_at_save else (free, tied)
    with pytest.raises(CheckpointError) as error:
        restore_state(state, Tied(not tied_at_save), None)
    assert error.value.found == f"second.weight ({here} here, {saved} in the checkpoint)"


class Odd(nn.Module):
    """Buffers of every awkward kind, and extra state."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        whole = torch.arange(12.0).reshape(3, 4) + fill
        self.register_buffer("scalar", torch.tensor(fill))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("transposed", whole.clone().T)
        self.register_buffer("slice", whole[1:, ::2])
        self.register_buffer("overlapping", whole[:2])
        self.register_buffer("halves", torch.full((3,), fill + 1 / 3, dtype=torch.bfloat16))
        self.register_buffer("booleans", torch.tensor([True, False, fill > 0]))
        self.register_buffer("nan", torch.tensor([math.nan, -0.0, math.inf]))
        self.register_buffer("complex", torch.tensor([1j, complex(fill)]))
        self.count = fill

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_awkward_tensors_round_trip(tmp_path: Path):
    model = Odd(5)
    state = capture_state(model, None, step=0)
    loaded = through_disk(state, tmp_path)
    assert state_sha256(loaded) == state_sha256(state)
    fresh = Odd(0)
    restore_state(loaded, fresh, None)
    assert fresh.count == 5
    assert state_sha256(capture_state(fresh, None, step=0)) == state_sha256(state)
    assert fresh.halves.dtype is torch.bfloat16
    assert fresh.empty.shape == (0, 4)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab/$%", max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_data_round_trips_through_json(value):
    flattener = Flattener()
    text = json.dumps(flattener.flatten(value, "x"), allow_nan=False)
    assert unflatten(json.loads(text), flattener.tensors.__getitem__) == value


similar_keys = st.sampled_from(["/", "%2F", "%252F", "1", 1, "'1'", "a/b", "a", "b"])


@given(st.dictionaries(similar_keys, st.integers(0, 99), max_size=6))
def test_tensors_of_similar_keys_are_not_mixed_up(numbers):
    flattener = Flattener()
    value = {key: {"b": torch.tensor(n)} for key, n in numbers.items()}
    back = unflatten(flattener.flatten(value, "x"), flattener.tensors.__getitem__)
    assert {key: inner["b"].item() for key, inner in back.items()} == numbers


def test_empty_tensors_are_never_tied():
    flattener = Flattener()
    flattener.flatten({"a": torch.zeros(0), "b": torch.zeros(0)}, "x")
    assert flattener.tensors.keys() == {"x/a", "x/b"}


def test_arrays_counters_and_nan_round_trip():
    flattener = Flattener()
    value = OrderedDict(
        big=np.arange(3, dtype=">f8")[::-1],
        counter=Counter({"a": 2, "b": 1}),
        nan=math.nan,
        number=np.int64(4),
    )
    back = unflatten(flattener.flatten(value, "x"), flattener.tensors.__getitem__)
    assert back["big"].tolist() == [2.0, 1.0, 0.0]
    assert back["big"].dtype == np.dtype("<f8")
    assert back["counter"] == value["counter"]
    assert isinstance(back["counter"], Counter)
    assert math.isnan(back["nan"])
    assert back["number"] == 4


def test_hash_ignores_the_order_of_dicts_and_nothing_else():
    state = Run(seed=1).train(2).capture()
    shuffled = State(dict(reversed(state.tensors.items())), dict(reversed(state.values.items())))
    assert state_sha256(shuffled) == state_sha256(state)
    parts = part_sha256(state)
    for part, name in [("model", "model/0.weight"), ("optimizer", "optimizer/state/0.weight/step")]:
        changed = copy.deepcopy(state)
        flat = changed.tensors[name].view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))
        differing = [p for p, digest in part_sha256(changed).items() if digest != parts[p]]
        assert differing == [part]
        assert state_sha256(changed) != state_sha256(state)
    reshaped = copy.deepcopy(state)
    reshaped.tensors["model/0.bias"] = reshaped.tensors["model/0.bias"].reshape(2, 4)
    assert part_sha256(reshaped)["model"] != parts["model"]


def fails_without_change(state: State, run: Run) -> CheckpointError:
    before = state_sha256(run.capture())
    with pytest.raises(CheckpointError) as error:
        run.restore(state)
    assert state_sha256(run.capture()) == before
    return error.value


def test_another_model_is_refused_with_names_and_shapes():
    state = Run(seed=1).train(1).capture()
    other = Run(seed=2).train(2)
    other.model[4] = nn.Linear(8, 2, bias=False)
    other.model[1] = nn.Identity()
    other.model.add_module("extra", nn.Linear(1, 1).double())
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    assert str(fails_without_change(state, other)) == (
        "model: expected the tensors of the checkpoint, found "
        "1.bias (nothing here, float32 [8] in the checkpoint); "
        "1.num_batches_tracked (nothing here, int64 [] in the checkpoint); "
        "1.running_mean (nothing here, float32 [8] in the checkpoint); "
        "1.running_var (nothing here, float32 [8] in the checkpoint); "
        "1.weight (nothing here, float32 [8] in the checkpoint); and 4 more. "
        "Build the model that this checkpoint was made with."
    )
    with pytest.raises(CheckpointError, match=r"1\.bias \(nothing here"):
        restore_model(state, other.model)


def test_another_type_is_refused():
    state = capture_state(nn.Linear(2, 1), None, step=0)
    with pytest.raises(CheckpointError, match=r"weight \(bfloat16 \[1, 2\] here, float32 \[1, 2\]"):
        restore_state(state, nn.Linear(2, 1, dtype=torch.bfloat16), None)


def test_another_optimizer_is_refused():
    state = Run(seed=1).train(1).capture()
    run = Run(seed=2).train(2)
    run.optimizer = torch.optim.SGD(run.model.parameters())
    assert str(fails_without_change(state, run)) == (
        "optimizer: expected AdamW, as in the checkpoint, found SGD. "
        "Build the optimizer that this run was started with."
    )


def test_other_parameter_groups_are_refused():
    state = Run(seed=1).train(1).capture()
    run = Run(seed=2)
    parameters = dict(run.model.named_parameters())
    bias = parameters["0.bias"]
    rest = [parameter for parameter in parameters.values() if parameter is not bias]
    run.optimizer = torch.optim.AdamW([{"params": rest}, {"params": [bias]}])
    assert fails_without_change(state, run).found == (
        "2 parameter groups here, 1 in the checkpoint; 0.bias in group 0 only in the checkpoint"
    )
    run.optimizer = torch.optim.AdamW(reversed(parameters.values()))
    assert fails_without_change(state, run).found == "group 0 in another order"


def test_parts_on_one_side_only_are_refused():
    run = Run(seed=1).train(1)
    state = run.capture()
    with pytest.raises(CheckpointError) as error:
        restore_state(state, run.model, None, sampler=run.sampler, extra={"ema": Averaged(0)})
    assert str(error.value) == (
        "state: expected the parts of the checkpoint, no more and no fewer, found "
        "no optimizer, which the checkpoint has; no scheduler, which the checkpoint has; "
        "extra/ema, which the checkpoint lacks. "
        "Pass the same parts as at the save; restore_model takes the weights alone."
    )


def test_another_scheduler_is_refused():
    state = Run(seed=1).capture()
    run = Run(seed=2)
    run.scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    assert fails_without_change(state, run).found == "ExponentialLR"


def test_a_sampler_that_refuses_leaves_everything_as_it_was():
    state = Run(seed=1).train(3).capture()
    run = Run(seed=2).train(2)
    run.sampler = CountingSampler(num_rows=32)
    before = state_sha256(run.capture())
    with pytest.raises(ValueError, match="sampler of 32 rows, state of 64"):
        run.restore(state)
    assert state_sha256(run.capture()) == before


def test_a_parameter_outside_the_model_is_refused():
    model, stranger = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), stranger])
    with pytest.raises(CheckpointError) as error:
        capture_state(model, optimizer, step=0)
    assert str(error.value) == (
        "optimizer: expected only parameters of the model, found 1 of 3 that the model doesn't "
        "hold. Pass a module that holds every parameter, e.g. an nn.ModuleList."
    )


def test_a_part_without_state_is_refused():
    with pytest.raises(CheckpointError) as error:
        capture_state(nn.Linear(1, 1), None, step=0, sampler=iter([]))
    assert str(error.value) == (
        "sampler: expected an object with state() and set_state(), or state_dict() and "
        "load_state_dict(), found a list_iterator. Pass an object that can give and take its state."
    )


def test_a_state_of_arbitrary_objects_is_refused():
    part = Averaged(0)
    part.mean = {1, 2}
    with pytest.raises(CheckpointError) as error:
        capture_state(nn.Linear(1, 1), None, step=0, extra={"ema": part})
    assert error.value.where == "extra/ema/mean"
    assert error.value.found == "an object of builtins.set"


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(2, device="meta"), "a tensor without data (device meta)"),
        (torch.zeros(2, dtype=torch.complex128), "a tensor of torch.complex128"),
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
)
def test_tensors_that_cannot_be_held_are_refused(tensor, found):
    with pytest.raises(CheckpointError) as error:
        Flattener().flatten({"a": tensor}, "extra")
    assert (error.value.where, error.value.found) == ("extra/a", found)


@pytest.mark.parametrize("name", ["step", "epoch"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None])
def test_a_count_is_a_whole_number_from_0(name: str, value):
    with pytest.raises(CheckpointError) as error:
        capture_state(nn.Linear(1, 1), None, **{"step": 0, name: value})
    assert str(error.value) == (
        f"{name}: expected a whole number, 0 or more, found {value!r}. "
        "Pass how many were completed."
    )


def test_a_count_of_numpy_is_one():
    assert capture_state(nn.Linear(1, 1), None, step=np.int64(3)).step == 3


def test_generators_of_another_kind_are_refused():
    run = Run(seed=2)
    state = run.capture()
    state.tensors["generators/torch"] = torch.zeros(16, dtype=torch.uint8)
    error = fails_without_change(state, run)
    assert (error.where, error.found) == ("generators/torch", "16 bytes")


def test_a_device_without_a_saved_generator_is_refused():
    state = Run(seed=1).capture()
    saved = unflatten(state.values["generators"], state.tensors.__getitem__) | {"cuda": [b""]}
    check_generators(saved, {torch.device("cpu"), torch.device("cuda", 0)})
    with pytest.raises(CheckpointError) as error:
        check_generators(saved, {torch.device("cuda", 1)})
    assert error.value.expected == "a generator state for cuda:1, where the model is"
    assert error.value.found == "1 device states in the checkpoint"
