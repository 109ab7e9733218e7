"""A small convolutional model of order books: along the columns of a row, then along the rows.

    tape=$(python -c "from tapeline.tape import demo_tape; print(demo_tape())")
    tapeline ingest "$tape" --instrument BTCUSD --out stores/btcusd
    tapeline train examples/conv_order_book.toml

It tells whether the price falls, stays or rises over each of several horizons. Every column of a
row is mixed first, then neighbouring rows, as in models of the DeepLOB family, in miniature.
Normalised by groups of channels of each window: nothing couples the examples.
"""

import torch
from torch import nn


class OrderBookConvolution(nn.Module):
    """Windows `[batch, rows * columns]` to logits, `[batch, num_outputs]`."""

    def __init__(
        self, columns: int, rows: int, channels: int, dropout: float, num_outputs: int
    ) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.within_row = nn.Sequential(
            nn.Conv1d(columns, channels, kernel_size=1), nn.GroupNorm(4, channels), nn.GELU()
        )
        self.along_rows = nn.Sequential(
            nn.Conv1d(channels, channels, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv1d(channels, channels, kernel_size=3, padding=2, dilation=2),
            nn.GELU(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * channels, num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down, flat and up of each horizon; x is `[batch, rows * columns]`."""
        books = self.within_row(x.view(len(x), self.rows, self.columns).transpose(1, 2))
        books = books + self.along_rows(books)
        return self.head(torch.cat([books.mean(dim=2), books[:, :, -1]], dim=1))


def build(
    num_inputs: int, num_outputs: int, rows: int = 20, channels: int = 16, dropout: float = 0.1
) -> OrderBookConvolution:
    """What `model.factory` names: `num_inputs` is rows times columns, `rows` is windows.length.

    `num_outputs` is filled in by the run: 3 for each horizon.
    """
    return OrderBookConvolution(num_inputs // rows, rows, channels, dropout, num_outputs)
