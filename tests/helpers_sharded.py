"""A small model whose parameters don't divide evenly, trained by FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers_checkpoint import CountingSampler, seed_everything
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tapeline.checkpoint import Checkpointer, Ranks, State, capture_state, restore_state
from tapeline.training.distribute import distribute


class Uneven(nn.Module):
    """10, 3 and 1 rows: at 3 and 4 ranks some hold fewer, some nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.3)
        self.middle = nn.Linear(10, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.middle(hidden)))


class Planned(nn.Module):
    """Cut by tensor parallelism: by rows, by columns, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"first": ColwiseParallel(), "middle": RowwiseParallel()}


class ShardedRun:
    """A run of AdamW on shares of a model; ways 0 for a plain model on one process."""

    def __init__(self, ways: int, *, make: type[nn.Module] = Uneven, seed: int = 0) -> None:
        seed_everything(seed)
        self.model = make()
        if ways:
            self.model = distribute(self.model, "fsdp2", tensor_parallel=ways)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=200
        )
        self.sampler = CountingSampler()
        self.num_steps = 0

    def train(self, num_steps: int) -> ShardedRun:
        for _ in range(num_steps):
            # Not a view, which FSDP2 would warn of.
            loss = self.model(self.sampler.next() + torch.rand(8, 1)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.num_steps += 1
        return self

    def capture(self) -> State:
        return capture_state(
            self.model,
            self.optimizer,
            step=self.num_steps,
            scheduler=self.scheduler,
            sampler=self.sampler,
        )

    def restore(self, state: State) -> ShardedRun:
        restore_state(
            state, self.model, self.optimizer, scheduler=self.scheduler, sampler=self.sampler
        )
        self.num_steps = state.step
        return self

    def resume(self, folder: str | Path, ranks: Ranks | None = None) -> ShardedRun:
        with Checkpointer(folder, ranks=ranks) as checkpoints:
            return self.restore(checkpoints.load(like=self.capture()).state)

    def full(self) -> dict[str, bytes]:
        """Every tensor of the model and the optimiser as if on one device, as bytes."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {f"model {name}": value for name, value in self.model.state_dict().items()}
        for parameter, entries in self.optimizer.state.items():
            tensors |= {f"{names[id(parameter)]} {key}": value for key, value in entries.items()}
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
            .detach()
            .numpy()
            .tobytes()
            for name, value in tensors.items()
        }
