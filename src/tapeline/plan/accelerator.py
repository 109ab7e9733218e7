"""Would a second or a faster accelerator help: what it leaves alone decides.

Covers: Amdahl's law with the data's and the compute's time of a step, in turn or overlapped; the
cost of an all-reduce, and the number of devices past which it takes longer than the compute; how
much of a device's peak is used. Does not cover overlap of communication with the backward pass:
what is said here is the cautious end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.plan.devices import Device
from tapeline.plan.inputs import Quantity

DATA_MS = Quantity("data_ms", "Milliseconds of a step spent on data", 0.74, positive=False)
COMPUTE_MS = Quantity("compute_ms", "Milliseconds of a step spent on compute", 1.17)
FASTER = Quantity("faster", "How many times faster the other accelerator computes", 2.0, least=1.0)
PARAMETERS = Quantity(
    "parameters", "Numbers in an all-reduce: the model's parameters", 1e6, most=1e15, whole=True
)
GRADIENT_BYTES = Quantity("gradient_bytes", "Bytes of one gradient", 4, most=64)
LINK_GB = Quantity("link_gb_per_s", "Bandwidth from one device to the next, 1e9 bytes a second", 25)
LATENCY_US = Quantity("latency_us", "Microseconds to begin each message", 5.0, positive=False)
MAX_DEVICES = Quantity("max_devices", "Devices to look at", 64, least=2, most=65536, whole=True)
FLOPS_PER_STEP = Quantity(
    "flops_per_step", "Floating-point operations of a step, for the share of the peak", most=1e30
)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step on one device takes.

    Attributes:
        overlapped: whether the next batch is made while the device computes.
    """

    data_ms: float
    compute_ms: float
    overlapped: bool

    def total_ms(self, compute_ms: float) -> float:
        """The step if computing took so long."""
        if self.overlapped:
            return max(self.data_ms, compute_ms)
        return self.data_ms + compute_ms


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the devices, and what passes over it at each step."""

    message_bytes: float
    bytes_per_s: float
    latency_s: float

    def all_reduce_ms(self, num_devices: int) -> float:
        """A ring: each device sends and receives `2 n (p − 1) / p`, in `2 (p − 1)` messages.

        Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".
        """
        p = num_devices
        sent_s = 2 * self.message_bytes * (p - 1) / p / self.bytes_per_s
        return 1e3 * (sent_s + 2 * (p - 1) * self.latency_s)


@dataclass(frozen=True, slots=True)
class AtDevices:
    """A step of the same global batch on so many devices."""

    num_devices: int
    compute_ms: float
    all_reduce_ms: float
    step_ms: float
    speedup: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class AcceleratorPlan:
    """What a faster accelerator and what more of them would bring.

    Attributes:
        step_ms: now.
        data_share: of it, that no accelerator makes shorter.
        faster: times, of the other accelerator's compute.
        speedup: of the step with it.
        limit: of the speedup, however fast it were; None if there is none.
        by_devices: for 1, 2, 4, … devices, the global batch divided.
        dominated_from: the fewest devices of these whose all-reduce takes longer than their
            compute; None if none.
        best_devices: with the shortest step of these.
        peak_share: of the device's dense bfloat16 peak that a step uses; None if unknown.
        overlapped: whether the next batch is made while the device computes.
    """

    step_ms: float
    data_share: float
    faster: float
    speedup: float
    limit: float | None
    by_devices: tuple[AtDevices, ...]
    dominated_from: int | None
    best_devices: int
    peak_share: float | None = None
    overlapped: bool = False


def plan_accelerator(
    step: Step,
    link: Link,
    *,
    faster: float,
    max_devices: int,
    device: Device | None = None,
    flops_per_step: float | None = None,
) -> AcceleratorPlan:
    """The step with an accelerator `faster` times as fast, and on up to `max_devices` like this.

    Data takes as long as now, whatever computes: one loader, with the global batch as it is.

    Source: Amdahl 1967, "Validity of the single processor approach to achieving large scale
        computing capabilities".

    Raises:
        TapelineError: more than the device's peak would be used.
    """
    now_ms = step.total_ms(step.compute_ms)
    counts = [2**power for power in range(max_devices.bit_length()) if 2**power <= max_devices]
    rows = tuple(_at(step, link, count) for count in counts)
    first = (row.num_devices for row in rows if row.all_reduce_ms > row.compute_ms)
    share = None
    if device and flops_per_step is not None:
        share = _peak_share(flops_per_step / (now_ms / 1e3), device)
    return AcceleratorPlan(
        now_ms,
        step.data_ms / (step.data_ms + step.compute_ms),
        faster,
        now_ms / step.total_ms(step.compute_ms / faster),
        now_ms / step.data_ms if step.data_ms > 0 else None,
        rows,
        next(first, None),
        min(rows, key=lambda row: row.step_ms).num_devices,
        share,
        step.overlapped,
    )


def _peak_share(flops_per_s: float, device: Device) -> float:
    share = flops_per_s / (device.bf16_tflops * 1e12)
    if share > 1:
        raise TapelineError(
            FLOPS_PER_STEP.option,
            expected=f"no more than the {device.bf16_tflops:g} dense bfloat16 TFLOPS of "
            f"{device.name}",
            found=f"{flops_per_s / 1e12:.4g} TFLOPS",
            fix="Correct the operations, the time of a step or the device",
        )
    return share


def _at(step: Step, link: Link, count: int) -> AtDevices:
    compute_ms, reduce_ms = step.compute_ms / count, link.all_reduce_ms(count)
    step_ms = step.total_ms(compute_ms + reduce_ms)
    speedup = step.total_ms(step.compute_ms) / step_ms
    return AtDevices(count, compute_ms, reduce_ms, step_ms, speedup, speedup / count)
