"""The loop, evaluation and whole runs: a run in parts is the same run."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers_training import (
    BATCH,
    COLUMNS,
    HORIZON,
    T,
    adam,
    deviation,
    examples,
    network,
    parameters,
    sampler,
)
from helpers_windows import arrays, session
from torch import nn

from tapeline.errors import TrainingError, WindowError
from tapeline.training import TrainStep, evaluate, loop, train
from tapeline.training.build import check_output
from tapeline.training.models import perceptron
from tapeline.windows import BatchSource, Form, Loader, Normaliser, WindowIndex, WindowSampler


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(120, 90, 60))


def test_weights_that_wait_for_an_input_are_the_seeds(store):
    index = WindowIndex(store, T, HORIZON)
    weights = []
    for seed in (0, 0, 1):
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
        check_output(model, BatchSource(store, T, HORIZON, 0), index, seed)
        weights.append(model[0].weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# The loop


def batches_of(num):
    return [tuple(t.numpy() for t in examples(seed=seed)) for seed in range(num)]


def test_hooks_are_called_in_order_with_the_number_of_steps_done():
    model, calls, losses = network(), [], []
    loop(
        TrainStep(model, adam(model)),
        batches_of(3),
        10,
        13,
        (
            hook
            for hook in [
                lambda _, loss: losses.append(float(loss)),
                lambda k, loss: calls.append(("first", k, float(loss))),
                lambda k, loss: calls.append(("second", k, float(loss))),
            ]
        ),
    )
    assert calls == [
        (name, 11 + i, loss) for i, loss in enumerate(losses) for name in ("first", "second")
    ]
    assert len(losses) == 3


def test_each_phase_of_a_step_is_told_as_it_begins():
    model, phases = network(), []

    def batches():
        for batch in batches_of(2):
            phases.append("made")
            yield batch

    class Step(TrainStep):
        def __call__(self, *arguments):
            phases.append("done")
            return super().__call__(*arguments)

    step = Step(model, adam(model))
    loop(step, batches(), 0, 2, [lambda k, _: phases.append(k)], phases.append)
    names = ["data", "made", "transfer", "compute", "done"]
    assert phases == [*names, 1, *names, 2]

    phases.clear()
    loop(step, [examples()], 0, 1, [], phases.append)  # tensors where the model is: none to move
    assert phases == ["data", "compute", "done"]


def test_steps_are_numbered_from_first():
    numbers = []

    class Step(TrainStep):
        def __call__(self, number, x, y):
            numbers.append(number)
            return super().__call__(number, x, y)

    model = network()
    loop(Step(model, adam(model)), batches_of(9), 10, 13)
    assert numbers == [10, 11, 12]
    loop(Step(model, adam(model)), batches_of(2), 5, 5)
    assert numbers == [10, 11, 12]


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
    model, index = network(), WindowIndex(store, T, HORIZON)
    closed = []

    class Watched(Loader):
        def __iter__(self):
            try:
                yield from super().__iter__()
            finally:
                closed.append(True)

    ours = Watched(store, index, batch=BATCH, form=Form(0))

    def fail(done, loss):
        if done == 2:
            raise KeyError("hook")

    with pytest.raises(KeyError, match="hook"):
        loop(TrainStep(model, adam(model)), ours, 0, 9, [fail])
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
    assert result.loss == pytest.approx(math.fsum(errors) / len(errors), rel=1e-5)
    assert result.simplest == pytest.approx(math.fsum(targets) / len(targets), rel=1e-12)
    assert result.skill == 1 - result.loss / result.simplest
    (of_horizon,) = result.horizons
    assert result.as_dict() == {
        "windows": result.windows,
        "loss": result.loss,
        "mse": result.loss,
        "mse_zero": result.simplest,
        "skill": result.skill,
        "horizons": [
            {
                "horizon": HORIZON,
                "last_move_rows": 3,
                "mse": result.loss,
                "mse_zero": result.simplest,
                "mse_last_move": of_horizon["mse_last_move"],
            }
        ],
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
    assert result.loss > result.simplest > 0
    assert result.skill < 0


def test_where_nothing_moves_there_is_no_skill(new_store):
    still = new_store([np.ones((30, COLUMNS))])
    result = evaluate(Last(), BatchSource(still, T, HORIZON), WindowIndex(still, T, HORIZON))
    assert (result.loss, result.simplest, result.skill) == (1.0, 0.0, 0.0)


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
    training, validation = (
        WindowIndex(store, T, HORIZON).split(train=0.75, validation="rest").values()
    )
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
