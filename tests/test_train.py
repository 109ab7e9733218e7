"""Training: what a step computes, what it leaves alone, and that a run in parts is the same run."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from helpers_windows import arrays, session
from torch import nn

from tapeline.errors import TrainingError, WindowError
from tapeline.train import TrainStep, data_parallel_grads, evaluate, loop, train
from tapeline.train.determinism import keyed_draws
from tapeline.train.models import perceptron
from tapeline.train.step import warmup_then
from tapeline.windows import BatchSource, Loader, Normaliser, WindowIndex, WindowSampler

T, HORIZON, BATCH, COLUMNS = 4, 3, 24, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(120, 90, 60))


def sampler(store, seed=3):
    return WindowSampler(store.lengths, T, HORIZON, BATCH, seed)


def network(dropout=0.0, seed=0):
    with keyed_draws(CPU, seed):
        return nn.Sequential(
            nn.Linear(T * COLUMNS, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


def examples(num=BATCH, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num, T * COLUMNS)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(x[:, :2].sum(axis=1))


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def deviation(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def states():
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that must not move
    return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()


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
            "Call `model.float()`; bf16 changes the forward pass only",
        ),
        (
            nn.Sequential(nn.Linear(T * COLUMNS, 2), nn.Linear(2, 1).bfloat16()),
            "bfloat16, float32",
            "Call `model.float()`; bf16 changes the forward pass only",
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


# The loop


def batches_of(num):
    return [tuple(t.numpy() for t in examples(seed=seed)) for seed in range(num)]


def test_hooks_are_called_in_order_with_the_number_of_steps_done():
    model, calls = network(), []
    losses = loop(
        TrainStep(model, adam(model)),
        batches_of(3),
        10,
        13,
        (
            hook
            for hook in [
                lambda k, loss: calls.append(("first", k, float(loss))),
                lambda k, loss: calls.append(("second", k, float(loss))),
            ]
        ),
    )
    assert calls == [
        (name, 11 + i, loss) for i, loss in enumerate(losses) for name in ("first", "second")
    ]
    assert len(losses) == 3


def test_steps_are_numbered_from_first():
    numbers = []

    class Step(TrainStep):
        def __call__(self, number, x, y):
            numbers.append(number)
            return super().__call__(number, x, y)

    model = network()
    loop(Step(model, adam(model)), batches_of(9), 10, 13)
    assert numbers == [10, 11, 12]
    assert loop(Step(model, adam(model)), batches_of(2), 5, 5) == []


def test_batches_that_end_early_are_an_error():
    model = network()
    with pytest.raises(TrainingError) as error:
        loop(TrainStep(model, adam(model)), batches_of(3), 4, 9)
    assert str(error.value) == (
        "batches: expected 5, one for each step, found 3. "
        "Give an iterable that goes on, such as a Loader."
    )


def test_an_iterator_of_the_callers_own_goes_on_where_the_steps_ended():
    model = network()
    step = TrainStep(model, adam(model))
    batches = (batch for batch in batches_of(5))
    loop(step, batches, 0, 2)
    loop(step, batches, 2, 4)
    np.testing.assert_array_equal(next(batches)[0], batches_of(5)[4][0])


def test_an_error_in_a_hook_ends_the_loaders_thread(store):
    model, ours = network(), sampler(store)
    loader = Loader(BatchSource(store, T, HORIZON), ours)
    closed = []

    class Watched(Loader):
        def __iter__(self):
            try:
                yield from loader
            finally:
                closed.append(True)

    def fail(done, loss):
        if done == 2:
            raise KeyError("hook")

    with pytest.raises(KeyError, match="hook"):
        loop(TrainStep(model, adam(model)), Watched(loader.source, ours), 0, 9, [fail])
    assert closed == [True]
    assert ours.position == 2 * BATCH


# Evaluation


@pytest.mark.parametrize("batch", [1, 7, 251, 10_000])
def test_evaluation_is_over_every_window_once(store, batch):
    model = network()
    index = WindowIndex(store, T, HORIZON)
    result = evaluate(model, BatchSource(store, T, HORIZON, 1), index, batch)
    errors, targets = [], []
    for number in range(len(store)):
        values = store.values(number)
        for start in range(len(values) - T - HORIZON + 1):
            window = torch.from_numpy(values[start : start + T].reshape(1, -1).copy())
            target = float(values[start + T + HORIZON - 1, 1] - values[start + T - 1, 1])
            errors.append((model(window).item() - target) ** 2)
            targets.append(target**2)
    assert result.windows == len(errors) == index.num_windows
    assert result.mse == pytest.approx(math.fsum(errors) / len(errors), rel=1e-5)
    assert result.mse_zero == pytest.approx(math.fsum(targets) / len(targets), rel=1e-12)
    assert result.skill == 1 - result.mse / result.mse_zero
    assert result.as_dict() == {
        "windows": result.windows,
        "mse": result.mse,
        "mse_zero": result.mse_zero,
        "skill": result.skill,
    }


def test_evaluation_has_no_dropout_and_no_gradient_and_puts_each_mode_back(store):
    source, index = BatchSource(store, T, HORIZON), WindowIndex(store, T, HORIZON)
    model = network(dropout=0.5).train()
    model[2].eval()  # a part that the user froze
    gradients = []
    model.register_forward_hook(lambda _m, _i, out: gradients.append(out.requires_grad))
    first = evaluate(model, source, index, batch=100)
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert not any(gradients)
    assert evaluate(model.eval(), source, index, batch=100) == first
    assert not any(m.training for m in model.modules())


def test_an_error_in_evaluation_puts_the_mode_back(store):
    model = nn.Linear(T * COLUMNS, 2)
    with pytest.raises(TrainingError):
        evaluate(model, BatchSource(store, T, HORIZON), WindowIndex(store, T, HORIZON))
    assert model.training


class Last(nn.Module):
    """Predicts the last value of the first column; nothing to train."""

    def forward(self, x):
        return x[:, -COLUMNS]


def test_a_model_without_parameters_can_be_evaluated(store):
    result = evaluate(Last(), BatchSource(store, T, HORIZON), WindowIndex(store, T, HORIZON))
    assert result.mse > result.mse_zero > 0
    assert result.skill < 0


def test_where_nothing_moves_there_is_no_skill(new_store):
    still = new_store([np.ones((30, COLUMNS))])
    result = evaluate(Last(), BatchSource(still, T, HORIZON), WindowIndex(still, T, HORIZON))
    assert (result.mse, result.mse_zero, result.skill) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("batch", [0, -5])
def test_evaluation_in_batches_of_none_is_refused(store, batch):
    with pytest.raises(TrainingError) as error:
        evaluate(Last(), BatchSource(store, T, HORIZON), WindowIndex(store, T, HORIZON), batch)
    assert str(error.value) == (
        f"batch: expected at least 1, found {batch}. Take 1,024, or what memory holds."
    )


def test_windows_of_another_store_are_not_evaluated(store):
    other = WindowIndex.from_lengths([500], T, HORIZON)
    with pytest.raises(WindowError, match="windows of session 0: expected 7 valid rows"):
        evaluate(Last(), BatchSource(store, T, HORIZON), other)


# Whole runs


def test_200_steps_are_100_and_100_bit_for_bit(store):
    whole = network(dropout=0.3)
    losses = train(whole, store, sampler(store), 200, T=T, horizon=HORIZON)

    parts, ours = network(dropout=0.3), sampler(store)
    optimizer = adam(parts)
    first = train(parts, store, ours, 100, T=T, horizon=HORIZON, opt=optimizer)
    torch.rand(17)  # what others draw in between doesn't matter
    again = network(dropout=0.3, seed=8)
    again.load_state_dict(parts.state_dict())
    fresh = adam(again)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = sampler(store, seed=77)
    resumed.set_state(ours.state())
    second = train(again, store, resumed, 100, T=T, horizon=HORIZON, opt=fresh, start_step=100)

    assert first + second == losses
    assert deviation(parameters(whole), parameters(again)) == 0
    assert resumed.position == 200 * BATCH


def test_start_step_matters(store):
    ends = []
    for start in (0, 1):
        model = network(dropout=0.3)
        train(model, store, sampler(store), 3, T=T, horizon=HORIZON, start_step=start)
        ends.append(parameters(model))
    assert deviation(*ends) > 0


def test_training_learns_what_is_there(new_store):
    # Each value falls back to 0, so the target is minus the last value.
    rng = np.random.default_rng(0)
    days = [rng.standard_normal((400, COLUMNS)) * [5, 1, 1] + [0, 100, 0] for _ in range(3)]
    days[2][:, 2] = 3.0
    store = new_store(days)
    training, validation = WindowIndex(store, T, HORIZON).split(store, 0.25)
    scale = Normaliser.fit(store, training)
    source = BatchSource(store, T, HORIZON, scale=scale)
    model = network()
    before = evaluate(model, source, validation).skill
    ours = WindowSampler(training, batch=BATCH)
    losses = train(model, store, ours, 500, lr=1e-2, T=T, horizon=HORIZON, scale=scale)
    assert before < 0.1
    assert evaluate(model, source, validation).skill > 0.4  # a half is all there is
    assert np.mean(losses[-50:]) < 0.7 * np.mean(losses[:20])


def test_training_keeps_off_marked_rows(new_store):
    day = session(0, 200, valid=np.arange(200) % 50 != 20)
    day.values[20::50] = np.nan
    store = new_store([day])
    with pytest.raises(WindowError, match="Make the sampler from `WindowIndex"):
        train(network(), store, sampler(store), 1, T=T, horizon=HORIZON)
    ours = WindowSampler(WindowIndex(store, T, HORIZON), batch=BATCH)
    assert np.isfinite(train(network(), store, ours, 30, T=T, horizon=HORIZON)).all()


def test_the_reference_model_has_two_hidden_layers():
    shapes = [tuple(p.shape) for p in perceptron().parameters()]
    assert shapes == [(64, 820), (64,), (64, 64), (64,), (1, 64), (1,)]
    assert perceptron(60, hidden=8)(torch.zeros(5, 60)).shape == (5, 1)


def test_the_reference_shape_trains_with_the_defaults(new_store):
    store = new_store(arrays(300, 200, columns=41))
    losses = train(perceptron(), store, WindowSampler(store.lengths), 5)
    assert len(losses) == 5
    assert np.isfinite(losses).all()
