"""A small training run with everything a checkpoint has to hold, and a way to crash a save."""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from tapeline.checkpoint import State, capture_state, restore_state
from tapeline.errors import CheckpointError

torch.set_num_threads(1)


class CountingSampler:
    """A sampler whose batches are a function of its position."""

    def __init__(self, num_rows: int = 64) -> None:
        self.num_rows = num_rows
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        rows = (torch.arange(8) * 7 + self.position * 5) % self.num_rows
        return torch.sin(rows.float()[:, None] * torch.arange(1, 7))

    def state(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "position": self.position}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["num_rows"] != self.num_rows:
            raise ValueError(f"sampler of {self.num_rows} rows, state of {state['num_rows']}")
        self.position = state["position"]


class Trained:
    """What a run is saved from and restored into."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: CountingSampler
    num_steps: int = 0

    def capture(self) -> State:
        return capture_state(
            self.model,
            self.optimizer,
            step=self.num_steps,
            scheduler=self.scheduler,
            sampler=self.sampler,
        )

    def restore(self, state: State) -> Self:
        restore_state(
            state, self.model, self.optimizer, scheduler=self.scheduler, sampler=self.sampler
        )
        self.num_steps = state.step
        return self


class Run(Trained):
    """A model with batch norm and dropout, AdamW, a scheduler, a sampler; all generators in use."""

    def __init__(self, seed: int = 0) -> None:
        seed_everything(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, betas=(0.8, 0.9))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=100
        )
        self.sampler = CountingSampler()

    def train(self, num_steps: int) -> Run:
        self.model.train()
        for _ in range(num_steps):
            rows = self.sampler.next()
            rows = rows + random.random() + float(np.random.random())  # noqa: NPY002
            loss = self.model(rows).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.num_steps += 1
        return self


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


UNREACHED, SURVIVED, REFUSED, DIED = 0, 2, 3, 9
_CHANGING = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def in_child(action: Callable[[], None], at_operation: int, fault: Callable[[], None]) -> int:
    """Run `action` in a forked child that calls `fault` at its n-th file operation (from 0).

    Operations are what changes a disk: an open for writing, fsync, rename, delete, making and
    removing folders. Returns one of the outcomes below.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        reached = install(at_operation, fault)
        action()
        code = SURVIVED if reached() else UNREACHED
    except CheckpointError:
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def install(at_operation: int, fault: Callable[[], None]) -> Callable[[], bool]:
    """Have `fault` called at the n-th file operation of this process; says whether it was."""
    seen = 0

    lock = threading.Lock()  # a save also works in threads

    def operation() -> None:
        nonlocal seen
        with lock:
            seen += 1
            reached = seen == at_operation + 1
        if reached:
            fault()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGING or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING
        ):
            operation()

    really_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        operation()
        really_fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)
    return lambda: seen > at_operation


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
