"""The model of $name: a small convolution over the rows of a window."""

import torch
from torch import nn


class OverRows(nn.Module):
    """Windows `[batch, rows * columns]` as `[batch, columns, rows]`, convolved along the rows."""

    def __init__(self, num_inputs: int, rows: int, channels: int) -> None:
        super().__init__()
        self.rows = rows
        self.layers = nn.Sequential(
            nn.Conv1d(num_inputs // rows, channels, kernel_size=3),
            nn.ReLU(),
            nn.Conv1d(channels, channels, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * (rows - 4), 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(len(x), self.rows, -1).transpose(1, 2))


def build(num_inputs: int, rows: int = 20, channels: int = 16) -> nn.Module:
    """What `model.factory` names: `num_inputs` is rows times columns, `rows` is windows.length."""
    return OverRows(num_inputs, rows, channels)
