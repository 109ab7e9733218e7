"""Accelerators: memory, memory bandwidth and dense bfloat16 peak, as their data sheets print them.

Covers a few devices of which the figures are sure. An unknown device is None here, and whoever
asks must give no percentage of it.

Data sheets often print the figure for weights of 2:4 sparsity first, twice the dense one, and those
of the H100, H200 and L4 no other: the dense one is then half of it. Memory is taken as 1e9 bytes a
GB; devices report somewhat more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One model of accelerator.

    Attributes:
        name: short.
        reported: what `torch.cuda.get_device_name` calls it.
        memory_gb: of 1e9 bytes.
        bandwidth_gb_per_s: of its memory.
        bf16_tflops: dense, with float32 accumulation, at boost clock.
        source: the document.
        sparse_tflops: the figure with sparsity that the same document prints, if it does.
    """

    name: str
    reported: str
    memory_gb: float
    bandwidth_gb_per_s: float
    bf16_tflops: float
    source: str
    sparse_tflops: float | None = None


_A100 = "NVIDIA A100 data sheet, 2021"
_H100 = "NVIDIA H100 data sheet, 2023"
DEVICES = (
    Device("a100-40gb-pcie", "NVIDIA A100-PCIE-40GB", 40, 1555, 312, _A100, 624),
    Device("a100-40gb-sxm", "NVIDIA A100-SXM4-40GB", 40, 1555, 312, _A100, 624),
    Device("a100-80gb-pcie", "NVIDIA A100 80GB PCIe", 80, 1935, 312, _A100, 624),
    Device("a100-80gb-sxm", "NVIDIA A100-SXM4-80GB", 80, 2039, 312, _A100, 624),
    Device("h100-pcie", "NVIDIA H100 PCIe", 80, 2000, 756, _H100, 1513),
    Device("h100-sxm", "NVIDIA H100 80GB HBM3", 80, 3350, 989, _H100, 1979),
    Device("h200-sxm", "NVIDIA H200", 141, 4800, 989, "NVIDIA H200 data sheet, 2024", 1979),
    Device("a10", "NVIDIA A10", 24, 600, 125, "NVIDIA A10 data sheet, 2021", 250),
    Device("l4", "NVIDIA L4", 24, 300, 121, "NVIDIA L4 data sheet, 2023", 242),
    Device("l40s", "NVIDIA L40S", 48, 864, 362, "NVIDIA L40S data sheet, 2023", 733),
)


def device_named(name: str) -> Device | None:
    """The device of a short or a reported name; None if it isn't in the table."""
    wanted = name.casefold()
    for device in DEVICES:
        if wanted in (device.name, device.reported.casefold()):
            return device
    return None
