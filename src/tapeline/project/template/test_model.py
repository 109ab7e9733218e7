"""What must hold before hours are spent on training: `pytest`."""

import torch

from model import build


def test_each_window_gets_one_prediction() -> None:
    assert build(num_inputs=20 * 41)(torch.zeros(7, 20 * 41)).shape == (7, 1)


def test_every_parameter_learns() -> None:
    model = build(num_inputs=20 * 41)
    model(torch.randn(7, 20 * 41)).square().mean().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []
