"""Ranks: joining them, and what a step must know of a model that torch shares among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tapeline.errors import TapelineError, TrainingError
from tapeline.world import World

T = TypeVar("T")


@contextlib.contextmanager
def joined(device: str = "cpu") -> Iterator[World]:
    """Join the ranks that torchrun started, for the block; alone where it wasn't torchrun.

    NCCL for CUDA devices, each rank on the device of its local rank; gloo otherwise. Ranks that
    have joined already stay joined.

    Raises:
        RunError: the environment's RANK, WORLD_SIZE or LOCAL_RANK is no place in a world.
        TrainingError: another rank ended, and this one can't go on without it.
    """
    world = World.from_environment()
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), world.local_rank)
        return
    if world.size == 1:
        yield world
        return
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group("nccl" if on_cuda else "gloo", rank=world.rank, world_size=world.size)
    try:
        with _lost_ranks_told(world):
            yield world
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _lost_ranks_told(world: World) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise TrainingError(
            f"rank {world.rank} of {world.size}",
            expected="an answer from every other rank",
            found=str(error).splitlines()[0].partition("] ")[2].partition(". ")[0] or "none",
            fix="See which rank ended first and why; `tapeline resume` goes on with the run",
        ) from error


def device_of(device: str, world: World) -> str:
    """The device of this rank, with its number where there are several ranks.

    Raises:
        TrainingError: all ranks would be on one device.
    """
    kind, _, number = device.partition(":")
    if world.size == 1 or kind != "cuda":
        return device
    if number:
        raise TrainingError(
            "training.device",
            expected="cuda, of which each rank takes the one of its local rank",
            found=device,
            fix="Leave out the number; CUDA_VISIBLE_DEVICES chooses among devices",
        )
    return f"cuda:{world.local_rank}"


def from_first(world: World, make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; all must call it.

    Raises:
        Exception: what it raised there, on every rank.
    """
    if world.size == 1:
        return make()
    box: list[Any] = [None]
    if world.rank == 0:
        try:
            box = [(make(), None)]
        except Exception as error:
            dist.broadcast_object_list([(None, _portable(error))])
            raise
    dist.broadcast_object_list(box)
    value, failure = box[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]


def _portable(error: Exception) -> TapelineError:
    """The error as other ranks can raise it."""
    if isinstance(error, TapelineError):
        return error
    return TrainingError(
        "rank 0",
        expected="to begin",
        found=f"{type(error).__name__}: {error}",
        fix="Correct that; the other ranks end with it",
    )


def from_all(world: World, value: T) -> list[T]:
    """Every rank's value, in the order of the ranks; all must call it."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def wait_for_all(world: World) -> None:
    """Return when every rank is here."""
    if world.size > 1:
        dist.barrier()


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


def grad_norms(model: nn.Module) -> list[Tensor]:
    """The norm of each parameter's gradient, on the device.

    None at all where each rank holds a share, since all of them would have to exchange theirs.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads or any(map(_is_cut, grads)):
        return []
    return list(torch._foreach_norm(grads))


def clip_grad_norm(model: nn.Module, largest: float) -> Tensor:
    """Scale all gradients down until their norm over all parameters is `largest` at most.

    Returns:
        The norm before, on the device.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not any(map(_is_cut, grads)):
        whole: Tensor = nn.utils.clip_grad_norm_(model.parameters(), largest)
        return whole
    # Each by itself: torch's own refuses tensors that are cut over different ranks.
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    norm = torch.linalg.vector_norm(torch.stack([_full(norm) for norm in norms]))
    factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # as torch's
    for grad in grads:
        grad.mul_(factor)
    return norm  # type: ignore[no-any-return]


def full_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as if on one device, on every rank; all ranks must call it."""
    return {name: _full(value) for name, value in unwrapped(model).state_dict().items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what DDP puts around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _is_cut(tensor: Tensor) -> bool:
    """Whether it is a DTensor, found out without importing that."""
    return hasattr(tensor, "device_mesh")


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_cut(tensor) else tensor  # type: ignore[no-any-return]
