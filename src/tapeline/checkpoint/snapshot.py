"""A copy of a state in host memory that is kept and used again, laid out as its file.

Covers: the copy, from the CPU and from devices, and whether there is room for it. Does not cover
writing it.

The copy shares nothing with the live objects, so what happens to them after `take` can't reach
the file. On CUDA the copies run on a stream of their own and the current stream waits for them:
the host goes on at once, and no later kernel can overwrite what is still being copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tapeline.checkpoint.direct import host_memory
from tapeline.checkpoint.encoding import Layout
from tapeline.checkpoint.state import State

_SPARED_FRACTION = 0.1  # of the available memory: the loop's own needs vary between steps
_GROWTH_BYTES = 1 << 16  # of the header, as step numbers and sampler states get longer
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Image:
    """The bytes of a file to be, in page-aligned memory; the memory may be longer."""

    memory: torch.Tensor
    num_bytes: int
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Return when the copies from a device have arrived."""
        if self.copied is not None:
            self.copied.synchronize()


class Snapshot:
    """Host memory for one copy of a state."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def lacks_bytes(self, layout: Layout) -> int:
        """How many bytes a copy would need beyond what may be taken now; 0 where it fits."""
        if self._memory is not None and len(self._memory) >= layout.num_bytes:
            return 0
        # What is held is given back before more is taken.
        held = 0 if self._memory is None else len(self._memory)
        usable = int(available_bytes() * (1 - _SPARED_FRACTION)) + held
        return max(0, layout.num_bytes - usable)

    def take(self, state: State, layout: Layout) -> Image:
        """Copy a state. The image before is overwritten: its write must have ended."""
        devices = {tensor.device for tensor in state.tensors.values() if tensor.is_cuda}
        if self._memory is None or len(self._memory) < layout.num_bytes:
            self._memory = None
            self._memory = host_memory(layout.num_bytes + _GROWTH_BYTES, pinned=bool(devices))
        memory = self._memory
        memory.numpy()[: len(layout.header)] = memoryview(layout.header)
        copied = None
        if len(devices) == 1:
            copied = self._copy_beside(devices.pop(), memory, state, layout)
        else:
            _copy(memory, state, layout)
        return Image(memory, layout.num_bytes, copied)

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None

    def _copy_beside(
        self, device: torch.device, memory: torch.Tensor, state: State, layout: Layout
    ) -> torch.cuda.Event:
        current = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _copy(memory, state, layout, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        current.wait_event(copied)
        return copied


def available_bytes() -> int:
    """Memory that can be taken without swapping: of the machine, or less by the container's limit.

    Reads control groups of version 2; page cache that could be dropped counts as available.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such files, or no limit ("max")
        return available
    return min(available, max(0, limit - used + int(stat.get("inactive_file", 0))))


def _copy(
    memory: torch.Tensor, state: State, layout: Layout, *, non_blocking: bool = False
) -> None:
    for name, start in layout.starts.items():
        tensor = state.tensors[name]
        there = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        there.copy_(tensor, non_blocking=non_blocking)
