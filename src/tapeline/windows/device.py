"""Batches in torch: the same gather as the kernel's, bit for bit, on any device.

Covers the store as a tensor, whole on a device or mapped where it lies. The kernel is faster on
the host; this is the way where there is none, and what the kernel is tested against.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tapeline.errors import WindowError
from tapeline.windows.batch import BatchSource

_MOST_ELEMENTS = 2**31 - 1  # what 32-bit indices of device kernels reach


class TorchGather:
    """Gathers batches of a `BatchSource`'s shape with torch.

    Args:
        source: the store and the shape.
        device: where the store's matrix goes, all of it; "cpu" leaves it where it is mapped.

    Raises:
        WindowError: more elements than a device's kernels can index.
    """

    def __init__(self, source: BatchSource, device: torch.device) -> None:
        num = source.flat.size
        if device.type != "cpu" and num > _MOST_ELEMENTS:
            raise WindowError(
                f"store on {device}",
                expected=f"at most {_MOST_ELEMENTS:,} values, which 32-bit indices reach",
                found=f"{num:,}",
                fix="Leave the store on the host: `Feed(resident=False)`",
            )
        with warnings.catch_warnings():
            # Torch has no read-only tensors and says so; nothing here writes to this one.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._flat = torch.from_numpy(source.flat).to(device)
        self._source = source
        columns, width = source.num_columns, source.T * source.num_columns
        num_windows = max(0, num // columns - source.T + 1)
        self._view = self._flat.as_strided((num_windows, width), (columns, 1))
        self._scaling = torch.from_numpy(source.scaling).to(device)
        self._targets = torch.from_numpy(source.targets).to(device)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The windows that start at rows of the matrix.

        Args:
            rows: int64 `[batch]`, on this device.

        Returns:
            x and y as `BatchSource.empty` shapes them, x in the source's dtype, in fresh memory.
        """
        source, columns = self._source, self._source.num_columns
        x = self._view.index_select(0, rows)
        if len(self._scaling[0]):
            x = x.sub_(self._scaling[0]).mul_(self._scaling[1])
        last = ((rows + source.T - 1) * columns)[:, None] + self._targets[:, 1]
        target = last + self._targets[:, 0] * columns
        inside = target.clamp(max=len(self._flat) - 1)
        y = self._flat[inside] - self._flat[last]
        y = torch.where(target == inside, y, torch.nan)
        if source.dtype == "bfloat16":
            x = x.to(torch.bfloat16)
        return x.view(source.x_shape(len(rows))), y.view(source.y_shape(len(rows)))
