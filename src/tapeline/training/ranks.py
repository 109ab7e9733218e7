"""Ranks: joining them, and what a step must know of a model that torch shares among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tapeline.world import World


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


def is_distributed(model: nn.Module) -> bool:
    """Whether torch shares its training among ranks: DDP, FSDP2 or tensor parallelism."""
    return isinstance(model, DistributedDataParallel) or any(map(_is_cut, model.parameters()))


def data_rank(model: nn.Module) -> int:
    """This rank's place among those with rows of their own, of a model that is distributed.

    Ranks that tensor parallelism cut one layer over have the same rows and draw the same masks.
    """
    for parameter in model.parameters():
        if _is_cut(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            return mesh.get_local_rank("data") if "data" in mesh.mesh_dim_names else 0
    return dist.get_rank()


def set_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward pass exchanges gradients, for micro-batches before the last."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = sync
    elif set_fsdp2 := getattr(model, "set_requires_gradient_sync", None):
        set_fsdp2(sync)


def clip_grad_norm(model: nn.Module, largest: float) -> None:
    """Scale all gradients down until their norm over all parameters is `largest` at most."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not any(map(_is_cut, grads)):
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        return
    # Each by itself: torch's own refuses tensors that are cut over different ranks.
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack([_full(norm) for norm in norms]))
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # as torch's
    for grad in grads:
        grad.mul_(factor)


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as if on one device, on every rank; all ranks must call it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: _full(value) for name, value in inner.state_dict().items()}


def _is_cut(tensor: Tensor) -> bool:
    """Whether it is a DTensor, found out without importing that."""
    return hasattr(tensor, "device_mesh")


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_cut(tensor) else tensor  # type: ignore[no-any-return]
