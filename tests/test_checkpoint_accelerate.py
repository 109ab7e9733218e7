"""Checkpoints of an Accelerate loop: the same bits after real kills, beside Accelerate's own."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers_examples import flip, in_child, load_example, output_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tapeline.checkpoint import Shelf


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("accelerate")
    return load_example("accelerate_checkpoints")


def train(example: ModuleType, folder: Path, kill_at: int | None = None) -> str | None:
    def step_done(step: int) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child(lambda: example.sha256(example.train(folder, step_done)))


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory) -> str:
    """The hash of the loop that was never disturbed."""
    return train(example, tmp_path_factory.mktemp("whole"))


def test_a_loop_that_is_killed_goes_on_bitwise(example, whole, tmp_path):
    for kill_at in (7, 27, 41, 50):
        assert train(example, tmp_path, kill_at) is None
        saved = Shelf(tmp_path / "checkpoints").steps()
        assert max(saved, default=0) == kill_at // 10 * 10
    assert train(example, tmp_path) == whole


def test_the_example_goes_on_from_a_kill_as_a_command(example, whole, tmp_path):
    killed = train(example, tmp_path, 27)
    assert killed is None
    assert in_child(lambda: output_of("accelerate_checkpoints", tmp_path)) == f"{whole}\n"


def test_a_flipped_byte_costs_one_interval_and_no_bit(example, whole, tmp_path):
    train(example, tmp_path, 27)
    flip(tmp_path / "checkpoints" / "step-00000020" / "rank-0.safetensors")
    assert train(example, tmp_path) == whole


class Own:
    """The example's loop with Accelerate's own mechanism: a save at step 20, a kill at step 27."""

    def __init__(self, example: ModuleType, folder: Path) -> None:
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        self.accelerator = Accelerator(cpu=True)
        set_seed(0)
        self.folder, self.steps, self.done = folder / "own", example.STEPS, 0
        self.loader = example.market(folder, "cpu")
        num_inputs = example.T * len(self.loader.source.shards.columns)
        self.model = nn.Sequential(
            nn.Linear(num_inputs, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
        )
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        self.prepared = self.accelerator.prepare(self.model, optimizer, scheduler)

    def train(self, batches: Any, kill_at: int | None) -> None:
        model, optimizer, scheduler = self.prepared
        for x, y in islice(batches, self.steps - self.done):
            optimizer.zero_grad()
            self.accelerator.backward(nn.functional.mse_loss(model(x).squeeze(1), y))
            optimizer.step()
            scheduler.step()
            self.done += 1
            if kill_at and self.done == 20:
                self.accelerator.save_state(self.folder)
            if self.done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def resume(self) -> None:
        self.accelerator.load_state(self.folder)
        self.done = 20


def with_its_loader(
    example: ModuleType, folder: Path, kill_at: int | None, *, resume: bool = False
) -> str:
    """As its documentation says: a DataLoader that shuffles, and `skip_first_batches`."""
    own = Own(example, folder)
    xs, ys = zip(*((x.clone(), y.clone()) for x, y in islice(own.loader, 16)), strict=True)
    data = TensorDataset(torch.cat(xs), torch.cat(ys))
    batches = own.accelerator.prepare(DataLoader(data, batch_size=32, shuffle=True))
    if resume:
        own.resume()
    while own.done < own.steps:
        epoch, skipped = divmod(own.done, len(batches))
        batches.set_epoch(epoch)
        own.train(own.accelerator.skip_first_batches(batches, skipped), kill_at)
    return example.sha256(own.model)


def with_our_loader(
    example: ModuleType, folder: Path, kill_at: int | None, *, resume: bool = False
) -> str:
    """With a loader that tells its position, registered as its documentation says."""
    own = Own(example, folder)
    own.accelerator.register_for_checkpointing(own.loader)
    if resume:
        own.resume()
    own.train(own.loader, kill_at)
    return example.sha256(own.model)


def test_accelerates_own_state_is_not_enough_with_its_own_loader(example, tmp_path):
    straight = in_child(lambda: with_its_loader(example, tmp_path, None))
    assert in_child(lambda: with_its_loader(example, tmp_path, None)) == straight
    assert in_child(lambda: with_its_loader(example, tmp_path, 27)) is None
    assert in_child(lambda: with_its_loader(example, tmp_path, None, resume=True)) != straight


def test_with_our_loader_it_is_bitwise_but_a_flipped_byte_is_loaded_without_a_word(
    example, whole, tmp_path
):
    assert in_child(lambda: with_our_loader(example, tmp_path, 27)) is None
    assert in_child(lambda: with_our_loader(example, tmp_path, None, resume=True)) == whole
    flip(tmp_path / "own" / "model.safetensors")
    changed = in_child(lambda: with_our_loader(example, tmp_path, None, resume=True))
    assert changed not in (None, whole)
