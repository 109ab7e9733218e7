"""Ranks: joining them, and torch's own ways to share a model's training among them.

Covers the process group, and the fast paths DDP, FSDP2 and tensor parallelism. These repeat
bit for bit at an unchanged number of ranks and no further (`contract.py`); `lanes.py` is exact
across numbers of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tapeline.errors import TrainingError
from tapeline.world import World

Strategy = Literal["ddp", "fsdp2"]


@runtime_checkable
class Planned(Protocol):
    """A model that says how tensor parallelism cuts it."""

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """A style for each submodule that is cut, by its name."""


@contextlib.contextmanager
def joined(device: str = "cpu") -> Iterator[World]:
    """Join the ranks that torchrun started, for the block; alone where it wasn't torchrun.

    NCCL for CUDA devices, each rank on the device of its local rank; gloo otherwise.

    Raises:
        RunError: the environment's RANK, WORLD_SIZE or LOCAL_RANK is no place in a world.
    """
    world = World.from_environment()
    if world.size == 1:
        yield world
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group("nccl" if on_cuda else "gloo", rank=world.rank, world_size=world.size)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Module, strategy: Strategy, *, tensor_parallel: int = 1) -> nn.Module:
    """Hand a model to torch's data parallelism. Build the optimiser afterwards, over the result.

    Args:
        model: on its device, with the same parameters on every rank for FSDP2; DDP sends rank 0's.
        strategy: "ddp" keeps the whole model on every rank, "fsdp2" a share of it.
        tensor_parallel: ranks that a model with a plan is cut over; the others hold copies, or
            with "fsdp2" shares.

    Returns:
        For "ddp" a wrapper with the model as `.module`; for "fsdp2" the model itself.

    Raises:
        TrainingError: the ranks can't be cut that way, or the model brings no plan.
    """
    if tensor_parallel > 1:
        model = _cut_tensors(model, strategy, tensor_parallel)
    elif strategy == "fsdp2":
        _shard(model, init_device_mesh(_device_type(model), (dist.get_world_size(),)))
    if strategy == "fsdp2":
        return model
    # Asked for the search for unused parameters, DDP keeps the buckets of its first step. Without
    # it they are cut anew after that step, so a resumed run would sum its first one in another
    # order: other bits from three ranks on.
    return DistributedDataParallel(model, find_unused_parameters=True)


def _cut_tensors(model: nn.Module, strategy: Strategy, ways: int) -> nn.Module:
    ranks = dist.get_world_size()
    if strategy != "fsdp2" or ranks % ways:
        raise TrainingError(
            "tensor_parallel",
            expected=f"a divisor of the {ranks} ranks, with strategy fsdp2",
            found=f"{ways} with {strategy}",
            fix="Change the number of ranks, or leave tensor_parallel at 1",
        )
    if not isinstance(model, Planned):
        raise TrainingError(
            f"model {type(model).__name__}",
            expected="a method tensor_parallel_plan, which says how it is cut",
            found="none",
            fix="Return {submodule name: ColwiseParallel() or RowwiseParallel(), …} from one",
        )
    mesh = init_device_mesh(
        _device_type(model), (ranks // ways, ways), mesh_dim_names=("data", "tensor")
    )
    parallelize_module(model, mesh["tensor"], model.tensor_parallel_plan())
    if ranks > ways:
        _shard(model, mesh["data"])
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on each child with parameters of its own, then on the rest."""
    for child in model.children():
        if any(p.requires_grad for p in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def is_distributed(model: nn.Module) -> bool:
    """Whether `distribute` made it."""
    return isinstance(model, DistributedDataParallel | FSDPModule) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )


def set_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward pass exchanges gradients, for micro-batches before the last."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = sync
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)


def clip_grad_norm(model: nn.Module, largest: float) -> None:
    """Scale all gradients down until their norm over all parameters is `largest` at most."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not any(isinstance(grad, DTensor) for grad in grads):
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        return
    # Each by itself: torch's own refuses tensors that are cut over different ranks.
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # as torch's
    for grad in grads:
        grad.mul_(factor)


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as if on one device, on every rank; all ranks must call it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in inner.state_dict().items()
    }
