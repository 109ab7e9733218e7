"""Torch's own ways to share a model's training among ranks: DDP, FSDP2, tensor parallelism.

They repeat bit for bit at an unchanged number of ranks and no further (`contract.py`); `lanes.py`
is exact across numbers of ranks. Torch's distributed tensors are imported where they are used: it
takes half as long as importing torch, and most runs don't need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tapeline.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Strategy = Literal["ddp", "fsdp2"]


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
