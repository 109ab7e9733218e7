"""What a model is trained towards: losses against torch and NumPy by hand, and the baselines."""

import numpy as np
import pytest
import torch
from helpers_training import COLUMNS, HORIZON, T, examples, network
from helpers_windows import arrays
from torch import nn
from torch.nn import functional as F

from tapeline.config import ModelConfig, TrainingConfig
from tapeline.errors import TrainingError
from tapeline.training import TrainStep, evaluate
from tapeline.training.build import build_model, check_output
from tapeline.training.objective import Direction, SquaredError, classes_of, objective_of
from tapeline.training.step import batch_loss
from tapeline.windows import BatchSource, WindowIndex, make_batch

CHANGE = TrainingConfig()
HORIZONS = (1, 3, 6)  # the last longer than a window has rows before its end


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(70, 60, 40))


@pytest.fixture(scope="module")
def parts(store):
    """Training and validation windows for several horizons."""
    return list(WindowIndex(store, T, HORIZONS).split(train=0.6, validation="rest").values())


@pytest.fixture(scope="module")
def source(store):
    return BatchSource(store, T, HORIZONS, 1)


def linear(num_outputs):
    torch.manual_seed(num_outputs)
    return nn.Linear(T * COLUMNS, num_outputs)


def by_hand(store, index):
    """All windows of an index: x, the targets, and the last moves, by plain loops."""
    located = index.locate(np.arange(index.num_windows))
    x, y = make_batch(store, *located, T, HORIZONS, 1)
    moves = np.empty_like(y)
    for b, (session, start) in enumerate(zip(*located, strict=True)):
        column = store.values(session)[start : start + T, 1]
        for h, rows in enumerate(HORIZONS):
            moves[b, h] = column[-1] - column[-1 - min(rows, T - 1)]
    return x, y.astype(np.float64), moves.astype(np.float64)


# The change


def test_one_target_is_the_plain_squared_error_bit_for_bit():
    x, y = examples()
    model = network()
    wanted = F.mse_loss(model(x).reshape(-1), y)
    assert torch.equal(batch_loss(model, x, y), wanted)
    grads = torch.autograd.grad(wanted, list(model.parameters()))
    for ours, true in zip(
        torch.autograd.grad(batch_loss(model, x, y), list(model.parameters())), grads, strict=True
    ):
        assert torch.equal(ours, true)


def test_each_horizon_counts_by_its_own_scale(store, source, parts):
    training, _ = parts
    _, y, _ = by_hand(store, training)
    objective = objective_of(CHANGE, source, training)
    np.testing.assert_allclose(objective.mean_squares, np.square(y).mean(axis=0), rtol=1e-12)
    nothing = torch.zeros(len(y), len(HORIZONS))
    loss = objective.loss(nothing, torch.from_numpy(y).float())
    assert float(loss) == pytest.approx(1.0, abs=1e-5)  # predicting nothing, in each one's unit
    assert objective_of(CHANGE, BatchSource(store, T, HORIZON), training) == SquaredError()


def test_a_horizon_at_which_nothing_moves_keeps_its_unit(new_store):
    still = new_store([np.ones((30, COLUMNS))])
    index = WindowIndex(still, T, HORIZONS)
    objective = objective_of(CHANGE, BatchSource(still, T, HORIZONS), index)
    assert objective.mean_squares == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("batch", [7, 1000])
def test_changes_are_evaluated_beside_nothing_and_the_last_move(store, source, parts, batch):
    training, held_out = parts
    model, objective = linear(3), objective_of(CHANGE, source, training)
    found = evaluate(model, source, held_out, batch, objective=objective).as_dict()
    x, y, moves = by_hand(store, held_out)
    with torch.no_grad():
        predicted = model(torch.from_numpy(x)).double().numpy()
    mse, zero, last = (np.square(y - one).mean(axis=0) for one in (predicted, 0 * y, moves))
    units = np.array(objective.mean_squares)
    assert found["windows"] == len(y)
    assert found["loss"] == pytest.approx((mse / units).mean(), rel=1e-6)
    assert found["mse"] == found["loss"]
    assert found["skill"] == pytest.approx(1 - (mse / units).sum() / (zero / units).sum(), rel=1e-5)
    for h, one in enumerate(found["horizons"]):
        assert (one["horizon"], one["last_move_rows"]) == (HORIZONS[h], min(HORIZONS[h], T - 1))
        told = [one[name] for name in ("mse", "mse_zero", "mse_last_move")]
        np.testing.assert_allclose(told, [mse[h], zero[h], last[h]], rtol=1e-6)


# Outputs


def test_the_number_of_outputs_is_told_to_a_factory_that_asks(source):
    config = ModelConfig()
    model = build_model(config, T * COLUMNS, 3, 0, "cpu")
    assert model(torch.zeros(2, T * COLUMNS)).shape == (2, 3)
    given = ModelConfig(arguments={"num_outputs": 5})
    assert build_model(given, T * COLUMNS, 3, 0, "cpu")[-1].out_features == 5


def test_an_output_of_another_shape_is_told_with_both(source, parts):
    with pytest.raises(TrainingError) as error:
        check_output(linear(1), source, parts[0], 0, SquaredError())
    assert str(error.value) == (
        "model Linear: expected an output of shape [2, 3] for 2 windows, found shape [2, 1]. "
        "Let the model end in 3 outputs per window."
    )


# The direction


def class_of(change, dead_zone):
    return 1 + (change > np.float32(dead_zone)) - (change < -np.float32(dead_zone))


@pytest.fixture(scope="module")
def direction(source, parts):
    return objective_of(TrainingConfig(objective="direction", dead_zone=0.7), source, parts[0])


def test_classes_have_a_dead_zone_that_holds_its_ends():
    changes = torch.tensor([-3.0, -0.5, -0.4, 0.0, 0.5, 0.6])
    assert classes_of(changes, 0.5).tolist() == [0, 1, 1, 1, 1, 2]
    assert classes_of(changes, 0.0).tolist() == [0, 0, 0, 1, 2, 2]
    tenth = torch.tensor([0.1, -0.1])  # of float32, and so is the dead zone
    assert classes_of(tenth, 0.1).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_is_that_of_the_logits_by_hand(dtype):
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0, 1.0, 3.0], [0.5, 0.25, 0.0, -2.0, 4.0, 1.0]])
    y = torch.tensor([[-1.0, 0.5], [0.0, 0.0]])
    true = [[0, 2], [1, 1]]
    objective = Direction(0.1, ())
    told = [
        -(values[c] - np.log(np.exp(values).sum()))
        for row, classes in zip(logits.double().numpy().reshape(2, 2, 3), true, strict=True)
        for values, c in zip(row, classes, strict=True)
    ]
    found = objective.loss(logits.to(dtype), y)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(np.mean(told), rel=1e-6)
    flat = F.cross_entropy(logits.view(4, 3), torch.tensor(true).view(4))
    assert torch.equal(found, flat)


def test_frequencies_are_those_of_the_training_windows_alone(store, parts, direction):
    _, y, _ = by_hand(store, parts[0])
    classes = class_of(y.astype(np.float32), 0.7)
    for h, told in enumerate(direction.frequencies):
        counts = [1 + int((classes[:, h] == c).sum()) for c in range(3)]
        assert told == pytest.approx([n / (len(y) + 3) for n in counts], rel=1e-14)
        assert min(counts) > 1


@pytest.mark.parametrize("batch", [7, 1000])
def test_directions_are_evaluated_beside_frequencies_and_the_last_move(
    store, source, parts, direction, batch
):
    model = linear(9)
    found = evaluate(model, source, parts[1], batch, objective=direction).as_dict()
    x, y, moves = by_hand(store, parts[1])
    with torch.no_grad():
        logits = model(torch.from_numpy(x)).double().numpy().reshape(len(y), 3, 3)
    for h, one in enumerate(found["horizons"]):
        true = [int(class_of(np.float32(v), 0.7)) for v in y[:, h]]
        moved = [int(class_of(np.float32(v), 0.7)) for v in moves[:, h]]
        taken = [int(np.argmax(row)) for row in logits[:, h]]
        frequencies = direction.frequencies[h]
        likeliest = [int(np.argmax(frequencies))] * len(true)
        wanted = {
            "horizon": HORIZONS[h],
            "last_move_rows": min(HORIZONS[h], T - 1),
            "training_frequencies": list(frequencies),
            "cross_entropy": np.mean(
                [
                    np.log(np.exp(row).sum()) - row[c]
                    for row, c in zip(logits[:, h], true, strict=True)
                ]
            ),
            "cross_entropy_frequencies": np.mean([-np.log(frequencies[c]) for c in true]),
        }
        for name, guess in (("", taken), ("_frequencies", likeliest), ("_last_move", moved)):
            hits = [g == c for g, c in zip(guess, true, strict=True)]
            recalls = [
                np.mean([hit for hit, c in zip(hits, true, strict=True) if c == wanted_class])
                for wanted_class in sorted(set(true))
            ]
            wanted[f"accuracy{name}"] = np.mean(hits)
            wanted[f"balanced_accuracy{name}"] = np.mean(recalls)
        assert one == {
            key: value if isinstance(value, list | int) else pytest.approx(value, rel=1e-6)
            for key, value in wanted.items()
        }
    mean = np.mean([one["cross_entropy"] for one in found["horizons"]])
    assert found["loss"] == found["cross_entropy"] == pytest.approx(mean)
    assert found["skill"] == 1 - found["loss"] / found["cross_entropy_frequencies"]


def test_a_class_that_never_came_is_not_counted(new_store):
    still = new_store([np.ones((60, COLUMNS))])
    source = BatchSource(still, T, HORIZON)
    index = WindowIndex(still, T, HORIZON)
    objective = objective_of(TrainingConfig(objective="direction"), source, index)
    (one,) = evaluate(linear(3), source, index, objective=objective).horizons
    assert one["balanced_accuracy_frequencies"] == one["accuracy_last_move"] == 1.0
    assert 0 < one["cross_entropy_frequencies"] < 0.1


def test_logits_of_another_number_are_told(source, parts, direction):
    with pytest.raises(TrainingError) as error:
        check_output(linear(3), source, parts[0], 0, direction)
    assert str(error.value) == (
        "model Linear: expected an output of shape [2, 9] for 2 windows, found shape [2, 3]. "
        "Let the model end in 9 outputs per window."
    )


def test_lanes_and_parts_of_a_batch_add_up_to_the_whole(source, parts, direction):
    x, y = map(torch.from_numpy, source.batch(*parts[0].locate(np.arange(24))))
    ends = []
    for options in ({}, {"accumulate": 4}, {"lanes": 4}):
        model = linear(9)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        step.objective = direction
        ends.append((float(step(0, x, y)), model.weight.detach()))
    for loss, weight in ends[1:]:
        assert loss == pytest.approx(ends[0][0], rel=1e-5)
        torch.testing.assert_close(weight, ends[0][1])
    assert ends[0][0] == batch_loss(linear(9), x, y, objective=direction).item()
