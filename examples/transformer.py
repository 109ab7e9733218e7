"""A small transformer over the rows of a window.

tapeline ingest --synthetic 8 --out stores/market
tapeline train examples/transformer.toml
"""

import torch
from torch import nn


class RowTransformer(nn.Module):
    """Windows `[batch, rows * columns]` to one prediction each, `[batch, 1]`: a token a row."""

    def __init__(
        self, columns: int, rows: int, width: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.embed = nn.Linear(columns, width)
        self.place = nn.Parameter(0.02 * torch.randn(rows, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 4 * width, dropout, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the change of the target; x is `[batch, rows * columns]`."""
        tokens = self.embed(x.view(len(x), self.rows, self.columns)) + self.place
        return self.head(self.layers(tokens)[:, -1])


def build(
    num_inputs: int,
    rows: int = 20,
    width: int = 32,
    heads: int = 4,
    layers: int = 2,
    dropout: float = 0.1,
) -> RowTransformer:
    """What `model.factory` names: `num_inputs` is rows times columns, `rows` is windows.length."""
    return RowTransformer(num_inputs // rows, rows, width, heads, layers, dropout)
