"""The forward pass in 16 bits: what it changes, what stays in float32, and with lanes."""

import pytest
import torch
from helpers_training import CPU, adam, deviation, examples, network, parameters

from tapeline.training import TrainStep
from tapeline.training.precision import autocast


def test_autocast_is_on_only_where_asked():
    with autocast(CPU, "float32"):
        assert not torch.is_autocast_enabled("cpu")
    for precision in ("bfloat16", "float16"):
        with autocast(CPU, precision):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == getattr(torch, precision)
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == getattr(torch, precision)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_weights_gradients_and_optimiser_stay_in_float32(lanes, precision):
    model = network()
    optimizer = adam(model)
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    loss = TrainStep(model, optimizer, precision=precision, lanes=lanes)(0, *examples())
    assert seen == [getattr(torch, precision)] * lanes
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    grads = [p.grad for p in model.parameters()]
    assert {t.dtype for t in [loss, *parameters(model), *grads, *state]} == {torch.float32}


def test_lanes_in_bfloat16_are_the_whole_batch_in_bfloat16_but_for_its_rounding():
    ends = []
    for lanes in (1, 8):
        model = network()
        TrainStep(model, adam(model), precision="bfloat16", lanes=lanes)(0, *examples())
        ends.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    scale = ends[0].abs().max()
    assert (ends[0] - ends[1]).abs().max() <= 2**-7 * scale


# float16: the loss is scaled


def gradients(precision, *, stretch=1.0, lanes=1, accumulate=1):
    model, (x, y) = network(), examples()
    step = TrainStep(model, adam(model), precision=precision, lanes=lanes, accumulate=accumulate)
    loss = step(0, x, stretch * y)
    return step, loss, torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("way", [{"lanes": 4}, {"accumulate": 4}, {}])
def test_scaling_shows_neither_in_the_loss_nor_in_the_gradients(way):
    _, plain_loss, plain = gradients("float32")
    step, loss, found = gradients("float16", **way)
    assert step.scaler.get_scale() == 2**16
    assert loss.item() == pytest.approx(plain_loss.item(), rel=2**-9)
    assert (found - plain).abs().max() <= 2**-9 * plain.abs().max()


def test_gradients_too_small_for_float16_survive_by_the_scaling():
    (x, _), vanished = examples(), {}
    for scaled in (False, True):
        model = network()
        step = TrainStep(model, adam(model), precision="float16")
        with autocast(CPU, "float16"):
            loss = 1e-8 * model(x).float().sum()  # float16 ends at 6e-8
        (step.scaler.scale(loss) if scaled else loss).backward()
        vanished[scaled] = float((model[3].weight.grad == 0).float().mean())
    assert vanished == {False: 1.0, True: 0.0}


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_step_that_overflows_is_left_out_and_the_scale_halved(lanes):
    model, (x, y) = network(), examples()
    optimizer = adam(model)
    before = parameters(model)
    step = TrainStep(model, optimizer, precision="float16", lanes=lanes, clip_norm=1.0)
    loss = step(0, x, 1e4 * y)
    assert torch.isfinite(loss)
    assert step.scaler.get_scale() == 2**15
    assert deviation(parameters(model), before) == 0
    assert optimizer.state_dict()["state"] == {}
    for number in range(1, 20):
        step(number, x, 1e4 * y)
    assert step.scaler.get_scale() < 2**14
    assert deviation(parameters(model), before) > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_without_float16_there_is_no_scaler():
    model = network()
    for precision in ("float32", "bfloat16"):
        assert TrainStep(model, adam(model), precision=precision).scaler is None
