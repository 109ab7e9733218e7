"""Reference models. Any importable callable `(num_inputs, **arguments) -> Module` can be one."""

from __future__ import annotations

from torch import nn


def perceptron(num_inputs: int = 820, hidden: int = 64, num_outputs: int = 1) -> nn.Module:
    """Two hidden layers of rectified units and the outputs: 820-64-64-1 by default.

    Args:
        num_inputs: T · columns of a window.
        hidden: units per hidden layer.
        num_outputs: per window, as the run's objective and horizons ask for.
    """
    return nn.Sequential(
        nn.Linear(num_inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_outputs),
    )
