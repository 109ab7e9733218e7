"""What layers keep beside their parameters, made a function of the lanes and not of the ranks.

Covers every buffer of a model, such as the running statistics of batch normalisation. Each lane's
forward pass finds the buffers as they were before the step; afterwards a buffer moves by the mean
over lanes of how far each moved it. With equal lanes that is one update with the mean of the
lanes' statistics. Buffers of whole numbers, such as counters, move by whole numbers or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tapeline.errors import TrainingError


class MovingBuffers:
    """The buffers of a model while its lanes run one after the other.

    Attributes:
        size: numbers that a lane's movement takes.
    """

    def __init__(self, model: nn.Module) -> None:
        # By module and name, since a forward pass may put another tensor in a buffer's place.
        places: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                places.setdefault(id(buffer), (module, name))
        self._places = list(places.values())
        self._sizes = [getattr(module, name).numel() for module, name in self._places]
        self.size = sum(self._sizes)
        self._before: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block lanes run; afterwards the buffers are as they were before."""
        live = [getattr(module, name) for module, name in self._places]
        self._before = [(buffer, buffer.clone()) for buffer in live]
        try:
            yield
        finally:
            self._put_back()

    def collect(self, into: Tensor, num_lanes: int) -> None:
        """Write a lane's share of the mean movement, `[size]`; the next lane begins as this one."""
        if not self._places:
            return
        for (module, name), (_, before), piece in zip(
            self._places, self._before, torch.split(into, self._sizes), strict=True
        ):
            now, then = _numbers(getattr(module, name)), _numbers(before)
            # Not `now - then` alone: an infinity that stays would have moved by NaN.
            moved = torch.where(now == then, 0, now - then)
            piece.copy_(moved.reshape(-1).float() / num_lanes)
        self._put_back()

    def move(self, movement: Tensor) -> None:
        """Move every buffer by the mean movement `[size]`.

        Raises:
            TrainingError: a buffer of whole numbers would move by a fraction.
        """
        if not self._places:
            return
        for (module, name), piece in zip(
            self._places, torch.split(movement, self._sizes), strict=True
        ):
            buffer = getattr(module, name)
            step = piece.view(buffer.shape)
            if not buffer.is_floating_point():
                if not torch.equal(step, step.round()):
                    raise TrainingError(
                        f"buffer {name} of {type(module).__name__}",
                        expected="lanes that move it by the same whole number",
                        found=f"a mean movement of {step[step != step.round()][0].item():g}",
                        fix="Keep what depends on the examples in a floating-point buffer",
                    )
                step = step.long()
            buffer.copy_(_numbers(buffer) + step)

    def _put_back(self) -> None:
        for (module, name), (live, before) in zip(self._places, self._before, strict=True):
            live.copy_(before)
            setattr(module, name, live)


def _numbers(buffer: Tensor) -> Tensor:
    return buffer if buffer.is_floating_point() else buffer.long()
