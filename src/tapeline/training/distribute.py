"""Torch's own ways to share a model's training among ranks: DDP, FSDP2, tensor parallelism.

They repeat bit for bit at an unchanged number of ranks and no further (`contract.py`); `lanes.py`
is exact across numbers of ranks. Torch's distributed tensors are imported where they are used: it
takes half as long as importing torch, and most runs don't need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tapeline.errors import TrainingError
from tapeline.training.step import TrainStep

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Strategy = Literal["ddp", "fsdp2"]
Waiting = Callable[[], AbstractContextManager[None]]


@runtime_checkable
class Planned(Protocol):
    """A model that says how tensor parallelism cuts it."""

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """A style for each submodule that is cut, by its name."""


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
        _shard(model, _mesh(model, data=dist.get_world_size()))
    if strategy == "fsdp2":
        return model
    # Asked for the search for unused parameters, DDP keeps the buckets of its first step. Without
    # it they are cut anew after that step, so a resumed run would sum its first one in another
    # order: other bits from three ranks on.
    return DistributedDataParallel(model, find_unused_parameters=True)


def time_waits(step: TrainStep, waiting: Waiting) -> bool:
    """Wait for other ranks in a context, such as a span of a ledger; the bits stay the same.

    Args:
        step: with lanes, or a distributed model.
        waiting: gives the context anew for each wait.

    Returns:
        Whether waiting can be told from computing: not on a device, which waits beside the host,
        and not under tensor parallelism, which waits in every layer.
    """
    model = step.model
    if step.device.type != "cpu":
        return False
    if step.lanes:
        step.lanes.exchange.waiting = waiting
        return True
    if isinstance(model, DistributedDataParallel):
        reduction = _Reduction(waiting)
        model.register_comm_hook(None, lambda _, bucket: reduction(bucket))
        return True
    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    if any(mesh is None or mesh.mesh_dim_names != ("data",) for mesh in meshes):
        return False
    _told_collectives(model, waiting)
    return True


def _told_collectives(model: nn.Module, waiting: Waiting) -> None:
    """Have the collectives of FSDP2 waited for in a context; on a CPU it waits for each anyway."""
    from torch.distributed.fsdp import FSDPModule

    class Told:
        """A collective as FSDP2 calls it by itself."""

        def __init__(self, collective: Callable[..., object]) -> None:
            self._collective = collective

        def allocate(
            self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
        ) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> object:
            with waiting():
                return self._collective(output_tensor, input_tensor, **options)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Told(dist.all_gather_into_tensor))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(Told(dist.reduce_scatter_tensor))  # type: ignore[arg-type]


class _Reduction:
    """What DDP does with its buckets by itself, with the wait for the last of them told.

    Once the last is full, no gradient is left to compute.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._open: list[dist.Work] = []

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        mean = bucket.buffer().mul_(1 / dist.get_world_size())
        work = dist.all_reduce(mean, async_op=True)
        self._open.append(work)
        if bucket.is_last():
            with self._waiting():
                for one in self._open:
                    one.wait()
            self._open = []
        reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda it: it.value()[0])
        return reduced


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
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = _mesh(model, data=ranks // ways, tensor=ways)
    parallelize_module(model, mesh["tensor"], model.tensor_parallel_plan())
    if ranks > ways:
        _shard(model, mesh["data"])
    return model


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on each child with parameters of its own, then on the rest."""
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        if any(p.requires_grad for p in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _mesh(model: nn.Module, **sizes: int) -> DeviceMesh:
    """All ranks, on the model's kind of device, in named dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = next(model.parameters()).device.type
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
