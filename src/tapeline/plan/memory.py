"""Does a model fit: parameters, gradients, optimiser state and activations against a device.

Covers: when the state has to be sharded, when a layer or its activations no longer fit however it
is sharded, and how many devices that takes. Does not cover offloading, nor fragmentation beyond
the share that is kept free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tapeline.plan.inputs import Quantity

_GB = 1e9
PARAMETERS = Quantity("parameters", "Parameters of the model", 7e9, most=1e15, whole=True)
WEIGHT_BYTES = Quantity("weight_bytes", "Bytes of one weight", 4, most=64)
GRADIENT_BYTES = Quantity("gradient_bytes", "Bytes of its gradient", 4, positive=False, most=64)
OPTIMIZER_BYTES = Quantity(
    "optimizer_bytes",
    "Bytes of optimiser state for one weight; Adam in float32 keeps 8, SGD none",
    8,
    positive=False,
    most=64,
)
ACTIVATION_GB = Quantity(
    "activation_gb", "Activations of one step on one device, measured", positive=False
)
LAYERS = Quantity("layers", "Layers of equal size", 32, most=1e6, whole=True)
WIDTH = Quantity("width", "Width of a transformer layer", 4096, most=1e7, whole=True)
SEQUENCE = Quantity("sequence", "Rows in a window", 4096, most=1e9, whole=True)
MICRO_BATCH = Quantity("micro_batch", "Windows on one device at once", 1, most=1e9, whole=True)
HEADS = Quantity(
    "heads",
    "Attention heads whose scores are kept; 0 for fused attention, which keeps none",
    0,
    positive=False,
    most=1e5,
    whole=True,
)
MEMORY_GB = Quantity("memory_gb", "Memory of one device, 1e9 bytes each", 80)
FREE_SHARE = Quantity(
    "free_share", "Share of it kept free for contexts and fragments", 0.1, positive=False, most=0.9
)


@dataclass(frozen=True, slots=True)
class Needs:
    """Gigabytes (1e9 bytes) of a whole model, and of one device's activations.

    Attributes:
        weights, gradients, optimizer: of the whole model.
        activations: of one device, at its micro batch.
        layer: weights and gradients of one layer, which are whole while it works.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    layer: float

    @property
    def state(self) -> float:
        """What sharding divides."""
        return self.weights + self.gradients + self.optimizer

    def sharded(self, num_devices: int) -> float:
        """Of one of so many devices; on one nothing is gathered."""
        gathered = self.layer if num_devices > 1 else 0.0
        return self.state / num_devices + gathered + self.activations


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model needs and how many devices that takes.

    Attributes:
        needs: in GB.
        usable_gb: of one device.
        replica_gb: on each device with the whole state on it.
        fits_one: whether that is little enough.
        shard_over: the fewest devices over which the sharded state fits; None if it never does.
        divide_layers_over: the fewest devices if layers themselves are divided, tensor or pipeline
            parallel, and share all evenly: a lower bound.
        by_devices: (devices, GB on each with a sharded state).
    """

    needs: Needs
    usable_gb: float
    replica_gb: float
    fits_one: bool
    shard_over: int | None
    divide_layers_over: int
    by_devices: tuple[tuple[int, float], ...]


def needs(
    *,
    num_parameters: int,
    weight_bytes: float,
    gradient_bytes: float,
    optimizer_bytes: float,
    activation_gb: float,
    num_layers: int,
) -> Needs:
    """What a model of equal layers needs, from bytes for each parameter."""
    gb = num_parameters / _GB
    layer = gb * (weight_bytes + gradient_bytes) / num_layers
    return Needs(gb * weight_bytes, gb * gradient_bytes, gb * optimizer_bytes, activation_gb, layer)


def transformer_activation_gb(
    *, num_layers: int, width: int, sequence: int, micro_batch: int, num_heads: int
) -> float:
    """Activations of a transformer in 16 bits without recomputation, an estimate.

    `s b h L (34 + 5 a s / h)` bytes; the second term is the attention scores, which fused
    attention doesn't keep (a = 0).

    Source: Korthikanti et al. 2022, arXiv 2205.05198, equation 2.
    """
    each = 34 + 5 * num_heads * sequence / width
    return sequence * micro_batch * width * num_layers * each / _GB


def plan_memory(found: Needs, *, memory_gb: float, free_share: float) -> MemoryPlan:
    """How many devices a model takes: replicated, sharded, or with its layers divided.

    Source: sharding divides parameters, gradients and optimiser state over the devices and keeps
        one layer whole at a time (Rajbhandari et al. 2020, arXiv 1910.02054, stage 3).
    """
    usable = memory_gb * (1 - free_share)
    replica = found.sharded(1)
    room = usable - found.layer - found.activations
    shard_over = 1 if replica <= usable else None
    if shard_over is None and room > 0:
        shard_over = max(2, math.ceil(found.state / room))
    most = max(8, shard_over or 1)
    counts = [2**power for power in range(min(20, math.ceil(math.log2(most))) + 1)]
    return MemoryPlan(
        found,
        usable,
        replica,
        replica <= usable,
        shard_over,
        math.ceil((found.state + found.activations) / usable),
        tuple((count, found.sharded(count)) for count in counts),
    )
