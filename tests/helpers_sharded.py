"""Ranks for checkpoints: a small model under FSDP2, processes that die, and ranks as threads."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers_checkpoint import CountingSampler, Trained, seed_everything
from helpers_ranks import FORKS
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tapeline.checkpoint import Checkpointer, Ranks, State
from tapeline.checkpoint.sharded import Box, Share
from tapeline.checkpoint.votes import Channel
from tapeline.errors import CheckpointError
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


class ShardedRun(Trained):
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


class Threads(Channel):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, str]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._board = board

    def gather(self, value: Any) -> list[Any]:
        self._board[self._rank] = json.dumps(value)
        try:
            self._barrier.wait(60)
            answers = [json.loads(self._board[rank]) for rank in sorted(self._board)]
            self._barrier.wait(60)
        except threading.BrokenBarrierError:
            raise CheckpointError(
                "ranks", expected="an answer from every rank", found="a broken barrier", fix="Stop"
            ) from None
        return answers


def as_threads(num_ranks: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns, or raises, on each of some ranks that are threads."""
    channels = []
    for _ in range(2):
        barrier, board = threading.Barrier(num_ranks), {}
        channels.append([Threads(rank, barrier, board) for rank in range(num_ranks)])

    def run(rank: int) -> Any:
        try:
            return work(Ranks(rank, num_ranks, channels[0][rank], channels[1][rank]))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def cut(state: State, grid: Mapping[str, list[Box]], rank: int) -> State:
    """What a rank holds of a state: of the tensors in `grid`, its box."""
    tensors, shares = dict(state.tensors), {}
    for name, boxes in grid.items():
        shape = tuple(tensors[name].shape)
        shares[name] = Share(shape, boxes[rank])
        tensors[name] = tensors[name][boxes[rank].within(Box.whole(shape))].clone()
    return State(tensors, state.values, shares)


def by_rows(state: State, num_ranks: int) -> dict[str, list[Box]]:
    """A grid as FSDP2 makes it: each rank some rows of the model and the optimiser, or none."""
    grid = {}
    for name, tensor in state.tensors.items():
        if name.split("/")[0] in ("model", "optimizer") and tensor.ndim:
            each = -(-len(tensor) // num_ranks)
            ends = [min(len(tensor), each * rank) for rank in range(num_ranks + 1)]
            rest = tuple(tensor.shape[1:])
            grid[name] = [
                Box((a, *[0] * len(rest)), (b - a, *rest)) for a, b in itertools.pairwise(ends)
            ]
    return grid


def in_processes(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Run `function(rank, world_size, *arguments)` on ranks that may die; the exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            FORKS.Process(target=_rank, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(100)
        finally:
            for process in processes:
                process.kill()
    return [process.exitcode for process in processes]


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(rank, world_size, *arguments)
    except (CheckpointError, RuntimeError):  # a rank was lost: in a vote, or in the training
        os._exit(1)
