"""One batch's memory on its way to a device.

Covers host memory (pinned where a device copies from it) and the copy. Does not know what is
written into it, or when: the loader and its thread do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
        batch: what `send` made; to be set again by who changes it further.
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
        self.batch: Batch = ()
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

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """What is done inside runs on the copy's stream, and counts as part of the copy."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._done.record(self._stream)

    def send(self, count: int) -> Batch:
        """The first `count` windows on the device: this memory itself, or a copy under way."""
        parts = self._x[:count], self._y[:count]
        if not self._cuda:
            return parts
        return tuple(part.to(self._device, non_blocking=True) for part in parts)

    def receive(self) -> Batch:
        """The batch, safe to use on the device's current stream."""
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._done)
            for part in self.batch:
                part.record_stream(current)
        return self.batch
