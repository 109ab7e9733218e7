"""A small convolutional model of order books: along the columns of a row, then along the rows.

    tapeline ingest --synthetic 8 --out stores/market
    tapeline train examples/conv_order_book.toml

Every column of a row is mixed first, then neighbouring rows, as in models of the DeepLOB family,
in miniature. Normalised by groups of channels of each window: nothing couples the examples.
"""

import torch
from torch import nn


class OrderBookConvolution(nn.Module):
    """Windows `[batch, rows * columns]` to one prediction each, `[batch, 1]`."""

    def __init__(self, columns: int, rows: int, channels: int, dropout: float) -> None:
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
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predict the change of the target; x is `[batch, rows * columns]`."""
        books = self.within_row(x.view(len(x), self.rows, self.columns).transpose(1, 2))
        books = books + self.along_rows(books)
        return self.head(torch.cat([books.mean(dim=2), books[:, :, -1]], dim=1))


def build(
    num_inputs: int, rows: int = 20, channels: int = 16, dropout: float = 0.1
) -> OrderBookConvolution:
    """What `model.factory` names: `num_inputs` is rows times columns, `rows` is windows.length."""
    return OrderBookConvolution(num_inputs // rows, rows, channels, dropout)
