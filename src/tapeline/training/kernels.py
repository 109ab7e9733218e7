"""Small kernels: how much of a step's computing is spent in running them, seen in one step.

Covers one step early in a life, by torch's profiler. Does not cover which kernels they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile

_LEAST_US = 1.0  # an operator of the CPU that runs shorter only hands on to another


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """The kernels of one step; on a CPU, operators without those they call.

    Attributes:
        number: how many were launched.
        median_us: half of the time in kernels is spent in ones that run shorter than this.
        total_us: how long they ran, together.
    """

    number: int
    median_us: float
    total_us: float


class KernelProfile:
    """Profiles what is done between `begin` and `end`. It takes tens of milliseconds once."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._profile: profile | None = None

    def begin(self) -> None:
        """Begin; nothing is profiled where another profiler is at work."""
        # Kineto tells of each begin and end on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        found = profile(use_kineto=self._on_device, use_device="cuda" if self._on_device else None)
        try:
            found.__enter__()  # type: ignore[no-untyped-call]
        except RuntimeError:  # one at a time; a user's own comes first
            return
        self._profile = found

    def end(self) -> KernelFigures | None:
        """The figures; None if nothing was profiled or launched."""
        if self._profile is None:
            return None
        found, self._profile = self._profile, None
        found.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._on_device:
            times = [
                event.time_range.elapsed_us()
                for event in found.function_events or ()
                if event.device_type.name == "CUDA"
            ]
        else:
            times = [
                event.self_cpu_time_total
                for event in found.function_events or ()
                if event.name.startswith("aten::") and event.self_cpu_time_total >= _LEAST_US
            ]
        return _figures(times)


def _figures(times_us: list[float]) -> KernelFigures | None:
    if not times_us:
        return None
    total = passed = sum(times_us)
    for time_us in sorted(times_us, reverse=True):
        passed -= time_us
        if passed <= total / 2:
            break
    return KernelFigures(len(times_us), time_us, total)
