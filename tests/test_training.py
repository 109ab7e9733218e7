"""Training: what a step computes, what it leaves alone, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from helpers_training import (
    COLUMNS,
    CPU,
    HORIZON,
    T,
    adam,
    deviation,
    examples,
    network,
    parameters,
    sampler,
    states,
)
from helpers_windows import arrays
from torch import nn

from tapeline.errors import TrainingError, WindowError
from tapeline.training import TrainStep, data_parallel_grads, evaluate, train
from tapeline.training.determinism import keyed_draws
from tapeline.training.step import warmup_then
from tapeline.windows import BatchSource, WindowIndex


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(120, 90, 60))


# The step


def test_a_step_is_gradient_descent_on_the_mean_square():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loss = step(0, torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 2.0]))
    assert loss.item() == ((2 - 1) ** 2 + (6 - 2) ** 2) / 2
    assert not loss.requires_grad
    gradient = (2 * (2 - 1) * 1 + 2 * (6 - 2) * 3) / 2
    assert model.weight.item() == 2 - 0.5 * gradient


@pytest.mark.parametrize("squeeze", [False, True])
def test_both_shapes_of_output_are_the_same_step(squeeze):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x).squeeze(1) if squeeze else self.inner(x)

    model, plain = Model(), network()
    losses = [TrainStep(m, adam(m))(0, *examples()).item() for m in (model, plain)]
    assert losses[0] == losses[1]
    assert deviation(parameters(model), parameters(plain)) == 0


@pytest.mark.parametrize("accumulate", [2, 3, 24])
def test_accumulation_is_one_larger_batch(store, accumulate):
    ends = []
    for parts in (1, accumulate):
        model = network()
        losses = train(model, store, sampler(store), 20, accumulate=parts, T=T, horizon=HORIZON)
        ends.append((parameters(model), losses))
    (whole, whole_losses), (cut, cut_losses) = ends
    assert deviation(whole, cut) <= 1e-6
    np.testing.assert_allclose(cut_losses, whole_losses, rtol=0, atol=1e-6)
    assert deviation(whole, parameters(network())) > 1e-3  # it did train


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 24])
def test_parts_of_a_batch_add_up_to_its_gradient(num_shards):
    model, (x, y) = network(), examples()
    nn.functional.mse_loss(model(x).reshape(-1), y).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    parts = data_parallel_grads(model, x, y, num_shards)  # 24 in 5 parts: 5, 5, 5, 5, 4
    assert deviation(parts, whole) <= 1e-7
    assert max(float(g.abs().max()) for g in whole) > 0.05
    assert deviation([p.grad for p in model.parameters()], whole) == 0


def test_gradients_of_frozen_parameters_are_left_out_and_of_unused_ones_are_0():
    model, (x, y) = network(), examples()
    model[0].weight.requires_grad_(False)
    model[0].spare = nn.Parameter(torch.ones(2))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    grads = dict(zip(names, data_parallel_grads(model, x, y, 2), strict=True))
    assert "0.weight" not in grads
    assert grads["0.spare"].tolist() == [0, 0]


@pytest.mark.parametrize("num_shards", [0, 25])
def test_more_parts_than_windows_are_refused(num_shards):
    with pytest.raises(TrainingError) as error:
        data_parallel_grads(network(), *examples(), num_shards)
    assert str(error.value) == (
        f"num_shards: expected 1 to 24, the windows in the batch, found {num_shards}. "
        "Use fewer shards or a larger batch."
    )


def test_bfloat16_changes_the_forward_pass_only(store):
    seen = []
    runs = {}
    for bf16 in (False, True):
        model = network()
        model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
        optimizer = adam(model)
        losses = train(
            model, store, sampler(store), 30, bf16=bf16, T=T, horizon=HORIZON, opt=optimizer
        )
        runs[bf16] = losses
        state = [v for s in optimizer.state.values() for v in s.values()]
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert {v.dtype for v in state} == {torch.float32}
    assert seen == [torch.float32] * 30 + [torch.bfloat16] * 30
    assert runs[True] != runs[False]
    np.testing.assert_allclose(runs[True], runs[False], rtol=0.02)
    # A loss that passed through bfloat16 would have 16 trailing zero bits.
    bits = np.array(runs[True], np.float32).view(np.uint32)
    assert (bits & 0xFFFF).any()


def test_draws_belong_to_seed_and_step_and_to_nothing_drawn_before():
    losses = {}
    for seed, number, drawn in [(1, 5, 0), (1, 5, 9), (1, 6, 0), (2, 5, 0), (2, 4, 0), (6, 0, 0)]:
        model = network(dropout=0.5)
        torch.rand(drawn)
        loss = TrainStep(model, adam(model), seed=seed)(number, *examples()).item()
        losses.setdefault((seed, number), set()).add(loss)
    assert all(len(found) == 1 for found in losses.values())
    assert len(set.union(*losses.values())) == len(losses)


def test_parts_of_a_batch_draw_differently():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out))
    ones = torch.ones(8, 4)
    TrainStep(model, adam(model), accumulate=2)(0, ones, torch.zeros(8))
    assert not torch.equal(*seen)


def test_global_generators_are_left_as_they_were(store):
    before = states()
    model = network(dropout=0.5)
    train(model, store, sampler(store), 3, T=T, horizon=HORIZON)
    evaluate(model, BatchSource(store, T, HORIZON), WindowIndex(store, T, HORIZON))
    assert states() == before


def test_global_generators_are_left_as_they_were_by_an_error():
    before = states()
    with pytest.raises(KeyError), keyed_draws(CPU, 1, 2):
        torch.rand(3)
        raise KeyError
    assert states() == before


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**80])
def test_any_whole_number_is_a_seed(seed):
    with keyed_draws(CPU, seed, 4):
        first = torch.rand(2)
    with keyed_draws(CPU, seed, 4):
        assert torch.equal(first, torch.rand(2))


def test_the_gradient_is_clipped_by_its_norm_over_all_parameters():
    def moved(clip_norm):
        model = network()
        before = parameters(model)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=clip_norm)
        step(0, *examples())
        return math.hypot(
            *(float((a - b).norm()) for a, b in zip(parameters(model), before, strict=True))
        )

    free = moved(None)
    assert free > 0.5
    assert moved(0.25) == pytest.approx(0.25, rel=1e-4)
    assert moved(10 * free) == pytest.approx(free)


def test_accumulated_gradients_are_clipped_once_together():
    def end(accumulate):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        TrainStep(model, optimizer, accumulate=accumulate, clip_norm=0.25)(0, *examples())
        return parameters(model)

    assert deviation(end(1), end(4)) <= 1e-6


# The schedule


def test_the_schedule_warms_up_in_a_line_and_falls_by_a_cosine():
    factor = warmup_then("cosine", warmup_steps=4, total_steps=12)
    assert [factor(k) for k in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [factor(k) for k in (4, 8, 12, 100)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert factor(6) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    flat = warmup_then("constant", warmup_steps=2, total_steps=12)
    assert [flat(k) for k in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert warmup_then("constant", warmup_steps=0, total_steps=12) is None
    assert warmup_then("cosine", warmup_steps=0, total_steps=2)(0) == 1.0
    assert warmup_then("cosine", warmup_steps=5, total_steps=5)(4) == 1.0


def test_the_schedule_scales_each_groups_rate_and_leaves_the_base():
    model = nn.Linear(1, 2, bias=True)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    used = []
    optimizer.register_step_pre_hook(
        lambda o, _a, _k: used.append([g["lr"] for g in o.param_groups])
    )
    model = nn.Sequential(model, nn.Flatten(0), nn.Unflatten(0, (-1, 2)), nn.Linear(2, 1))
    step = TrainStep(model, optimizer, schedule=lambda k: 1 / (k + 1))
    for number in (0, 1, 3):
        step(number, torch.ones(4, 1), torch.zeros(4))
        assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.1]
    assert used == [[1.0, 0.1], [0.5, 0.05], [0.25, 0.025]]


# What is refused


@pytest.mark.parametrize("num_outputs", [2, 24])
@pytest.mark.parametrize("use", ["train", "evaluate"])
def test_an_output_of_another_shape_is_refused(store, use, num_outputs):
    model = nn.Linear(T * COLUMNS, num_outputs)
    index = WindowIndex(store, T, HORIZON)
    with pytest.raises(TrainingError) as error:
        if use == "train":
            train(model, store, sampler(store), 1, T=T, horizon=HORIZON)
        else:
            evaluate(model, BatchSource(store, T, HORIZON), index, batch=24)
    assert str(error.value) == (
        "model Linear: expected an output of shape [24] or [24, 1] for 24 windows, "
        f"found shape [24, {num_outputs}]. Let the model end in one output per window."
    )


def test_parts_that_do_not_divide_the_batch_are_refused():
    model = network()
    before = parameters(model)
    with pytest.raises(TrainingError) as error:
        TrainStep(model, adam(model), accumulate=5)(0, *examples())
    assert str(error.value) == (
        "accumulate: expected a divisor of the batch, 24, found 5. "
        "Choose a batch that is a multiple of it."
    )
    assert deviation(parameters(model), before) == 0


def test_no_parts_are_refused():
    model = network()
    with pytest.raises(TrainingError) as error:
        TrainStep(model, adam(model), accumulate=0)
    assert str(error.value) == "accumulate: expected at least 1, found 0. Take 1 for none."


@pytest.mark.parametrize(
    ("model", "found", "fix"),
    [
        (nn.Identity(), "none", "Give the model a layer whose parameters require gradients"),
        (
            nn.Linear(T * COLUMNS, 1).requires_grad_(False),
            "none",
            "Give the model a layer whose parameters require gradients",
        ),
        (
            nn.Linear(T * COLUMNS, 1).double(),
            "float64",
            "Call `model.float()`; precision changes the forward pass only",
        ),
        (
            nn.Sequential(nn.Linear(T * COLUMNS, 2), nn.Linear(2, 1).bfloat16()),
            "bfloat16, float32",
            "Call `model.float()`; precision changes the forward pass only",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_in_float32_is_refused(store, model, found, fix):
    ours = sampler(store)
    with pytest.raises(TrainingError) as error:
        train(model, store, ours, 1, T=T, horizon=HORIZON)
    assert str(error.value) == (
        f"model {type(model).__name__}: expected parameters to train, in float32, "
        f"found {found}. {fix}."
    )
    assert ours.position == 0


def test_a_sampler_of_another_shape_is_refused(store):
    ours = sampler(store)
    with pytest.raises(WindowError, match="expected T 5 and horizon 3, as the batches have"):
        train(nn.Linear(15, 1), store, ours, 1, T=5, horizon=HORIZON)
    assert ours.position == 0
