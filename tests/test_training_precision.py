"""The forward pass in bfloat16: what it changes, what stays in float32, and with lanes."""

import pytest
import torch
from helpers_training import CPU, adam, examples, network, parameters

from tapeline.training import TrainStep
from tapeline.training.precision import autocast


def test_autocast_is_on_only_where_asked():
    with autocast(CPU, "float32"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast(CPU, "bfloat16"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("lanes", [1, 4])
def test_weights_gradients_and_optimiser_stay_in_float32(lanes):
    model = network()
    optimizer = adam(model)
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    loss = TrainStep(model, optimizer, precision="bfloat16", lanes=lanes)(0, *examples())
    assert seen == [torch.bfloat16] * lanes
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
