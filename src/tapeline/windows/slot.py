"""One batch's memory on its way to a device.

Covers host memory (pinned where a device copies from it) and the copy. Does not know what is
written into it, or when: the loader and its thread do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from tapeline.session import Float32Array
from tapeline.windows.batch import BatchSource
from tapeline.windows.memory import on_large_pages

Batch = tuple[Tensor, ...]
_CACHE_LINE = 64


class Slot:
    """Memory for x and y of one batch, and the batch that is made of it.

    On CUDA the copy runs on a stream of its own beside the model's work, and an event says when
    it is done: before that the memory is not written again, and the batch not read.

    Args:
        x, y: the host memory.
        device: where the batch is wanted.

    Attributes:
        x, y: the host memory, as `BatchSource.draw` takes it.
    """

    def __init__(self, x: Tensor, y: Tensor, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._take(x, y)
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _take(self, x: Tensor, y: Tensor) -> None:
        self._whole = x, y  # kept, since a slice of all costs as much as a search
        bits = x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
        self.x: npt.NDArray[Any] = bits.numpy()
        self.y: Float32Array = y.numpy()
        self._batch: Batch = self._whole
        self._own = self._references()

    def _references(self) -> list[int]:
        """How often the batch and each of its tensors is referred to."""
        return [getrefcount(self._batch), *map(getrefcount, self._batch)]

    def free(self) -> None:
        """Make sure that the memory may be written to.

        Waits until the last copy out of it is done. If its batch is still held, the holder keeps
        the memory, and the slot takes other: whoever collects batches, as a `DataLoader` with a
        batch size does, gets them all as they were.
        """
        if self._cuda:
            self._done.synchronize()
        elif any(now > own for now, own in zip(self._references(), self._own, strict=True)):
            self._take(*map(torch.empty_like, self._whole))

    def put(self, x: Tensor, y: Tensor) -> None:
        """Write a batch that was gathered elsewhere to the front of the memory."""
        for memory, part in zip(self._whole, (x, y), strict=True):
            memory[: len(part)] = part

    def send(self, count: int, finish: Callable[[Tensor, Tensor], Batch] | None) -> None:
        """Make the batch of the first `count` windows.

        Args:
            count: how many were written.
            finish: makes the batch from x and y on the device: this memory itself on the host, a
                copy under way on CUDA. What it does there counts as part of the copy. None where
                x and y are the batch.
        """
        self._batch = self._made(count, finish)
        self._own = self._references()

    def _made(self, count: int, finish: Callable[[Tensor, Tensor], Batch] | None) -> Batch:
        x, y = whole = self._whole
        parts = whole if count == len(x) else (x[:count], y[:count])
        if not self._cuda:
            return finish(*parts) if finish else parts
        with torch.cuda.stream(self._stream):
            x, y = (part.to(self._device, non_blocking=True) for part in parts)
            batch = finish(x, y) if finish else (x, y)
            self._done.record(self._stream)
        return batch

    def receive(self) -> Batch:
        """The batch, safe to use on the device's current stream."""
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._done)
            for part in self._batch:
                part.record_stream(current)
        return self._batch


def ring(source: BatchSource, batch: int, device: torch.device, num: int) -> list[Slot]:
    """Slots for batches of `batch` windows: pinned for CUDA, else side by side on large pages."""
    kind = torch.bfloat16 if source.dtype == "bfloat16" else torch.float32
    x_shape, y_shape = source.x_shape(batch), source.y_shape(batch)
    if device.type == "cuda":
        pinned = partial(torch.empty, pin_memory=True)
        return [Slot(pinned(x_shape, dtype=kind), pinned(y_shape), device) for _ in range(num)]
    size = math.prod(x_shape) * kind.itemsize
    apart = -(-size // _CACHE_LINE) * _CACHE_LINE
    memory = on_large_pages(num * apart)
    # Each a tensor of its own and not a view of one: saving one would save them all.
    pieces = (torch.from_numpy(memory[n * apart : n * apart + size]) for n in range(num))
    return [Slot(x.view(kind).view(x_shape), torch.empty(y_shape), device) for x in pieces]
