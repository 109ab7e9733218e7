"""Lanes on one rank: what is computed, keyed and kept, and what is refused."""

import itertools
from collections import namedtuple

import pytest
import torch
from helpers_ranks import Coupled, batches
from helpers_training import adam, deviation, examples, network, parameters, states
from torch import nn
from torch.nn import functional as F

from tapeline.errors import TrainingError
from tapeline.training import Lanes, TrainStep


def loss_of(model):
    return lambda lane: F.mse_loss(model(lane[0]).reshape(-1), lane[1])


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


# What is computed


@pytest.mark.parametrize("num_lanes", [1, 2, 4, 8])
def test_the_gradient_and_the_loss_are_those_of_the_whole_batch(num_lanes):
    model, batch = network(), examples()
    whole_loss = loss_of(model)(batch)
    whole_loss.backward()
    whole = gradients(model)
    loss = Lanes(model, num_lanes=num_lanes).backward(batch, loss_of(model))
    assert deviation(gradients(model), whole) <= 1e-7
    assert loss.item() == pytest.approx(whole_loss.item(), rel=1e-6)
    assert not loss.requires_grad


def test_a_second_call_replaces_the_gradient():
    model, batch = network(), examples()
    lanes = Lanes(model, num_lanes=4)
    lanes.backward(batch, loss_of(model))
    first = gradients(model)
    lanes.backward(batch, loss_of(model))
    assert deviation(gradients(model), first) == 0
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=True)
    lanes.backward(batch, loss_of(model))
    assert deviation(gradients(model), first) == 0


def test_gradients_lie_in_one_flat_buffer():
    model = network()
    Lanes(model, num_lanes=4).backward(examples(), loss_of(model))
    grads = [p.grad for p in model.parameters()]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    for left, right in itertools.pairwise(grads):
        assert left.data_ptr() + 4 * left.numel() == right.data_ptr()


def test_gradients_lie_in_the_order_of_their_parameters_memory():
    """Fused updates walk both side by side: in another order they take another's gradient."""
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    weights = []
    for lanes in (1, 4):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        Lanes(model, num_lanes=lanes).backward(
            x, lambda part, model=model: model(part).sin().mean()
        )
        assert model.weight.grad.stride() == model.weight.stride() != (12, 4, 2, 1)
        optimizer.step()
        weights.append(model.weight.detach())
    assert torch.allclose(*weights, atol=1e-7)


def test_losses_stay_what_they_were_when_the_next_step_is_done():
    model = network()
    lanes = Lanes(model, num_lanes=2)
    first = lanes.backward(examples(seed=1), loss_of(model))
    value = first.item()
    lanes.backward(examples(seed=2), loss_of(model))
    assert first.item() == value


def test_parameters_that_no_lane_used_have_gradients_of_zeros():
    model = Coupled()
    (batch,) = batches(1)
    Lanes(model, num_lanes=4).backward(batch, loss_of(model))
    assert model.unused.grad.tolist() == [0, 0, 0]


def test_frozen_parameters_stay_without_gradients():
    model = network()
    model[0].weight.requires_grad_(False)
    Lanes(model, num_lanes=2).backward(examples(), loss_of(model))
    assert model[0].weight.grad is None
    assert model[0].bias.grad.abs().max() > 0


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda x, y: torch.cat([x, y[:, None]], 1), lambda b: (b[:, :-1], b[:, -1])),
        (lambda x, y: [x, y], lambda b: b),
        (lambda x, y: {"x": x, "more": (y, [x])}, lambda b: (b["x"], b["more"][0])),
        (Pair, lambda b: (b.x, b.y)),
    ],
)
def test_batches_of_every_form_are_cut(form, read):
    model, (x, y) = network(), examples()
    lanes = Lanes(model, num_lanes=4)
    lanes.backward((x, y), loss_of(model))
    expected = gradients(model)
    lanes.backward(form(x, y), lambda lane: loss_of(model)(read(lane)))
    assert deviation(gradients(model), expected) == 0


def test_lanes_begin_on_alignment_boundaries_wherever_the_batch_lies():
    model, (x, y) = network(), examples()
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    seen = []

    def loss_fn(lane):
        seen.append(lane[0].data_ptr() % 64)
        return loss_of(model)(lane)

    lanes = Lanes(model, num_lanes=8)
    lanes.backward((shifted, y), loss_fn)
    lanes.backward((x, y), loss_fn)
    assert seen == [0] * 16


# Draws


def test_draws_belong_to_seed_step_and_lane():
    drawn = {}
    model = nn.Linear(1, 1)
    ones = torch.ones(8, 1)

    def draws(seed, step, num_lanes=4):
        found = []

        def loss_fn(lane):
            found.append(torch.rand(()).item())
            return model(lane).mean()

        Lanes(model, num_lanes=num_lanes, seed=seed).backward(ones, loss_fn, step=step)
        return found

    for key in [(0, 0), (0, 1), (1, 0), (5, 9)]:
        drawn[key] = draws(*key)
        torch.rand(7)
        assert draws(*key) == drawn[key]
    assert len({value for found in drawn.values() for value in found}) == 16
    assert draws(0, 0, num_lanes=8)[:4] == drawn[0, 0]


def test_steps_count_on_by_themselves():
    model = network(dropout=0.5)
    lanes = Lanes(model, num_lanes=2)
    losses = [lanes.backward(examples(), loss_of(model)).item() for _ in range(3)]
    assert len(set(losses)) == 3
    assert lanes.step == 3
    again = Lanes(model, num_lanes=2)
    again.set_state(lanes.state() | {"step": 1})
    assert [again.backward(examples(), loss_of(model)).item() for _ in range(2)] == losses[1:]


def test_global_generators_are_left_as_they_were():
    before = states()
    model = network(dropout=0.5)
    Lanes(model, num_lanes=4).backward(examples(), loss_of(model))
    assert states() == before


# Buffers


def test_running_statistics_move_by_the_mean_of_the_lanes():
    norm = nn.BatchNorm1d(3, momentum=0.2)
    x = torch.randn(16, 3) * 2 + 5
    Lanes(norm, num_lanes=4).backward(x, lambda lane: norm(lane).square().mean())
    lanes = x.view(4, 4, 3)
    mean, variance = lanes.mean((0, 1)), lanes.var(1).mean(0)
    torch.testing.assert_close(norm.running_mean, 0.2 * mean)
    torch.testing.assert_close(norm.running_var, 0.8 + 0.2 * variance)
    assert norm.num_batches_tracked.item() == 1


class Counting(nn.Module):
    """Buffers of every kind; `change` does to them what a forward pass might."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.change = change
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("wide", torch.full((2,), 1 + 2**-40, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x):
        self.change(self)
        return (self.weight * x).mean()


def count(module):
    module.number = module.number + 3  # another tensor in its place
    module.flag[1] = True


def test_whole_numbers_and_flags_move_as_each_lane_moves_them():
    model = Counting(count)
    lanes = Lanes(model, num_lanes=4)
    live = model.number
    for _ in range(2):
        lanes.backward(torch.ones(8), model)
    assert model.number.item() == 6
    assert model.number is live
    assert model.flag.tolist() == [False, True]


def test_buffers_that_stay_keep_every_bit():
    model = Counting(lambda module: None)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    Lanes(model, num_lanes=4).backward(torch.ones(8), model)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_counter_that_depends_on_the_lane_is_refused():
    model = Counting(lambda module: None)

    def loss_fn(lane):
        model.number += int(lane.sum())
        return model(lane)

    with pytest.raises(TrainingError) as error:
        Lanes(model, num_lanes=4).backward(torch.arange(4.0).clamp(max=1), loss_fn)
    assert str(error.value) == (
        "buffer number of Counting: expected lanes that move it by the same whole number, "
        "found a mean movement of 0.75. "
        "Keep what depends on the examples in a floating-point buffer."
    )


def test_an_error_in_a_lane_leaves_the_buffers_as_they_were():
    model, (batch,) = Coupled(), batches(1)
    before = [buffer.clone() for buffer in model.buffers()]

    def fail(lane):
        loss_of(model)(lane)
        raise KeyError("lane")

    with pytest.raises(KeyError, match="lane"):
        Lanes(model, num_lanes=4).backward(batch, fail)
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), before, strict=True))


# The step


def test_one_lane_is_the_step_without_lanes_to_the_bit():
    ends = []
    for options in ({}, {"lanes": 1}):
        model = network(dropout=0.3)
        step = TrainStep(model, adam(model), clip_norm=0.5, seed=2, **options)
        losses = [step(k, *examples(seed=k)).item() for k in range(5)]
        ends.append((losses, [p.tolist() for p in parameters(model)]))
    assert ends[0] == ends[1]


def test_the_steps_own_number_keys_the_draws():
    def end(first):
        model = network(dropout=0.5)
        step = TrainStep(model, adam(model), lanes=4)
        return [step(first + k, *examples()).item() for k in range(2)]

    assert end(3) == end(3)
    assert end(3) != end(4)


def test_a_step_of_lanes_is_a_step_of_the_batch():
    ends = []
    for lanes in (1, 8):
        model = network()
        step = TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.5, lanes=lanes
        )
        for number in range(20):
            step(number, *examples(seed=number))
        ends.append(parameters(model))
    assert deviation(*ends) <= 1e-6


def test_micro_batches_of_lanes_are_refused():
    model = network()
    with pytest.raises(TrainingError) as error:
        TrainStep(model, adam(model), accumulate=2, lanes=4)
    assert str(error.value) == (
        "accumulate: expected 1 with lanes, each of which is a micro-batch already, found 2. "
        "Take 1, or more lanes than 4 if one doesn't fit."
    )


# What is refused


@pytest.mark.parametrize("num", [0, 6, 25])
def test_batches_that_cannot_be_cut_evenly_are_refused(num):
    model = network()
    lanes = Lanes(model, num_lanes=4)
    message = (
        f"batch: expected a multiple of 4, the lanes it is cut into, found {num}. "
        "Choose such a batch, and leave out an incomplete last one."
    )
    with pytest.raises(TrainingError) as error:
        lanes.backward(examples(num), loss_of(model))
    assert str(error.value) == message
    with pytest.raises(TrainingError) as error:
        lanes.rows(num)
    assert str(error.value) == message
    assert lanes.step == 0


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.ones(8), torch.ones(4)), "4, 8"),
        ([], "none"),
        (None, "NoneType"),
        ({"x": torch.ones(8), "instrument": "BTCUSD"}, "str"),
        ((torch.ones(8), torch.ones(8).numpy()), "ndarray"),
        ((torch.ones(8), torch.ones(())), "one without dimensions"),
    ],
)
def test_batches_that_are_none_are_refused(batch, found):
    with pytest.raises(TrainingError) as error:
        Lanes(network(), num_lanes=4).backward(batch, loss_of(None))
    assert str(error.value) == (
        f"batch: expected tensors with the same number of examples, found {found}. "
        "Give a tensor, or a tuple, list or dict of tensors; `loss_fn` can hold what isn't cut."
    )


@pytest.mark.parametrize(
    ("loss_of", "found"), [(lambda output: output, "shape [6, 1]"), (lambda _: 1.5, "1.5")]
)
def test_a_loss_that_is_no_single_number_is_refused(loss_of, found):
    model, batch = network(), examples()
    with pytest.raises(TrainingError) as error:
        Lanes(model, num_lanes=4).backward(batch, lambda lane: loss_of(model(lane[0])))
    assert str(error.value) == (
        "loss_fn: expected one number in a tensor, the mean over the lane's examples, found "
        f"{found}. Return `losses.mean()`."
    )


def freeze(model):
    model[0].weight.requires_grad_(False)


def unfreeze(model):
    model[0].bias.requires_grad_(True)


def replace(model):
    model[0] = nn.Linear(4, 3)
    model[0].bias.requires_grad_(False)


@pytest.mark.parametrize(("change", "number"), [(freeze, 0), (unfreeze, 2), (replace, 1)])
def test_other_parameters_than_at_the_start_are_refused(change, number):
    """Gradients of a layer that came later would be summed over neither lanes nor ranks."""
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    lanes = Lanes(model, num_lanes=4)
    change(model)
    with pytest.raises(TrainingError) as error:
        lanes.backward(torch.ones(8, 4), lambda lane: model(lane).mean())
    assert str(error.value) == (
        "model Sequential: expected the 1 parameters to train that it had when Lanes was made, "
        f"found {number}, not the same. Make Lanes anew after freezing, unfreezing or replacing a "
        "layer, and give it the state() of the old."
    )


def test_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError) as error:
        Lanes(network(), num_lanes=4)
    assert str(error.value) == (
        "process group: expected one that joins the 2 ranks of WORLD_SIZE, found none. "
        "Wrap the program in `with joined():`, or call init_process_group first."
    )


@pytest.mark.parametrize("other", [{"seed": 8}, {"num_lanes": 2}, {"step": None}])
def test_the_state_of_other_lanes_is_refused(other):
    lanes = Lanes(network(), num_lanes=4, seed=7)
    state = {**lanes.state(), "step": 5, **other}
    with pytest.raises(TrainingError) as error:
        lanes.set_state(state)
    assert str(error.value) == (
        "state of lanes: expected a step, seed 7 and 4 lanes, "
        f"found step {state['step']}, seed {state['seed']}, num_lanes {state['num_lanes']}. "
        "Resume with the seed and number of lanes the run began with."
    )
    assert lanes.step == 0
