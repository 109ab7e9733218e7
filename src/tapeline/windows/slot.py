"""One batch's memory on its way to a device.

Covers host memory (pinned where a device copies from it) and the copy. Does not know what is
written into it, or when: the loader and its thread do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from tapeline.session import Float32Array
from tapeline.windows.batch import BatchSource

Batch = tuple[Tensor, ...]


class Slot:
    """Memory for x and y of one batch, and the batch that is made of it.

    On CUDA the copy runs on a stream of its own beside the model's work, and an event says when
    it is done: before that the memory is not written again, and the batch not read.

    Args:
        source: shapes the batch.
        batch: windows in it.
        device: where the batch is wanted.

    Attributes:
        x, y: the host memory, as `BatchSource.draw` takes it.
    """

    def __init__(self, source: BatchSource, batch: int, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        kind = torch.bfloat16 if source.dtype == "bfloat16" else torch.float32
        self._x = torch.empty(source.x_shape(batch), dtype=kind, pin_memory=self._cuda)
        self._y = torch.empty(source.y_shape(batch), pin_memory=self._cuda)
        bits = self._x.view(torch.uint16) if kind == torch.bfloat16 else self._x
        self.x: npt.NDArray[Any] = bits.numpy()
        self.y: Float32Array = self._y.numpy()
        self._whole = self._x, self._y  # kept, since a slice of all costs as much as a search
        self._batch: Batch = ()
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the last copy out of this memory is done."""
        if self._cuda:
            self._done.synchronize()

    def put(self, x: Tensor, y: Tensor) -> None:
        """Write a batch that was gathered elsewhere to the front of the memory."""
        self._x[: len(x)] = x
        self._y[: len(y)] = y

    def send(self, count: int, finish: Callable[[Tensor, Tensor], Batch]) -> None:
        """Make the batch of the first `count` windows.

        Args:
            count: how many were written.
            finish: makes the batch from x and y on the device: this memory itself on the host, a
                copy under way on CUDA. What it does there counts as part of the copy.
        """
        parts = self._whole if count == len(self._x) else (self._x[:count], self._y[:count])
        if not self._cuda:
            self._batch = finish(*parts)
            return
        with torch.cuda.stream(self._stream):
            x, y = (part.to(self._device, non_blocking=True) for part in parts)
            self._batch = finish(x, y)
            self._done.record(self._stream)

    def receive(self) -> Batch:
        """The batch, safe to use on the device's current stream."""
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._done)
            for part in self._batch:
                part.record_stream(current)
        return self._batch
