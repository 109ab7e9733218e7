"""A small transformer over the rows of a window, for the change over several horizons at once.

tape=$(python -c "from tapeline.tape import demo_tape; print(demo_tape())")
tapeline ingest "$tape" --instrument BTCUSD --out stores/btcusd
tapeline train examples/transformer.toml
"""

import torch
from torch import nn


class RowTransformer(nn.Module):
    """Windows `[batch, rows * columns]` to predictions, `[batch, num_outputs]`: a token a row."""

    def __init__(
        self,
        columns: int,
        rows: int,
        width: int,
        heads: int,
        layers: int,
        dropout: float,
        num_outputs: int,
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
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The change over each horizon; x is `[batch, rows * columns]`."""
        tokens = self.embed(x.view(len(x), self.rows, self.columns)) + self.place
        return self.head(self.layers(tokens)[:, -1])


def build(
    num_inputs: int,
    num_outputs: int,
    rows: int = 20,
    width: int = 32,
    heads: int = 4,
    layers: int = 2,
    dropout: float = 0.1,
) -> RowTransformer:
    """What `model.factory` names: `num_inputs` is rows times columns, `rows` is windows.length.

    `num_outputs` is filled in by the run: one for each horizon.
    """
    return RowTransformer(num_inputs // rows, rows, width, heads, layers, dropout, num_outputs)
