"""Checkpoints of a Lightning fit: the same bits after real kills; the Trainer's own are not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
from helpers_examples import flip, in_child, load_example, output_of

from tapeline.checkpoint import Shelf
from tapeline.errors import CheckpointError


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("lightning")
    return load_example("lightning_checkpoints")


def killer(example: ModuleType, at_step: int):
    """A callback that kills its process without notice after a step and what is saved then."""
    from lightning.pytorch.callbacks import Checkpoint  # these run last, in their order

    class Killer(Checkpoint):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == at_step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer()


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory) -> str:
    """The hash of the fit that was never disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    never = example.Checkpoints(folder / "checkpoints", every=10**6)
    return in_child(lambda: example.sha256(example.fit(folder, never)))


def fit(example: ModuleType, folder: Path, every: int, kill_at: int | None = None) -> str | None:
    callbacks = [example.Checkpoints(folder / "checkpoints", every=every)]
    if kill_at:
        callbacks.append(killer(example, kill_at))
    return in_child(lambda: example.sha256(example.fit(folder, *callbacks)))


# An epoch has 16 batches, so that these kills come in the middle, at its end and beyond, before
# the first save, right after one, and long after.
@pytest.mark.parametrize(("every", "kills"), [(10, (7, 27, 50)), (16, (16, 47, 48))])
def test_a_fit_that_is_killed_goes_on_bitwise(example, whole, tmp_path, every, kills):
    for kill_at in kills:
        assert fit(example, tmp_path, every, kill_at) is None
        saved = Shelf(tmp_path / "checkpoints").steps()
        assert max(saved, default=0) == kill_at // every * every
    assert fit(example, tmp_path, every) == whole


def test_the_trainers_own_checkpoints_go_on_with_other_draws(example, whole, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def own() -> str:
        saves = ModelCheckpoint(tmp_path / "own", every_n_train_steps=10, save_top_k=-1)
        return example.sha256(example.fit(tmp_path, saves, killer(example, 27)))

    assert in_child(own) is None
    newest = max((tmp_path / "own").iterdir(), key=lambda path: int(path.stem.split("step=")[1]))
    assert newest.stem.endswith("step=20")

    def resumed() -> str:
        no_save = ModelCheckpoint(save_top_k=0)
        return example.sha256(example.fit(tmp_path, no_save, checkpoint=str(newest)))

    assert in_child(resumed) != whole


def test_the_example_goes_on_from_a_kill_as_a_command(example, whole, tmp_path):
    killed = fit(example, tmp_path, 10, 27)
    assert killed is None
    assert in_child(lambda: output_of("lightning_checkpoints", tmp_path)) == f"{whole}\n"


def test_a_flipped_byte_costs_one_interval_and_no_bit(example, whole, tmp_path):
    fit(example, tmp_path, 10, 27)
    flip(tmp_path / "checkpoints" / "step-00000020" / "rank-0.safetensors")
    assert fit(example, tmp_path, 10) == whole


def test_accumulated_batches_are_saved_once_a_step(example, tmp_path):
    import lightning

    def accumulated(folder: Path, kill_at: int | None = None) -> list[object]:
        lightning.seed_everything(0, verbose=False)
        loader = example.market(folder)
        module = example.Module(len(loader.source.shards.columns))
        callbacks = [example.Checkpoints(folder / "checkpoints", every=4)]
        trainer = lightning.Trainer(
            max_steps=14,
            accumulate_grad_batches=3,
            accelerator="cpu",
            callbacks=[*callbacks, *([killer(example, kill_at)] if kill_at else [])],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
        return [example.sha256(module), trainer.current_epoch, trainer.global_step]

    (tmp_path / "whole").mkdir()
    straight = in_child(lambda: accumulated(tmp_path / "whole"))
    assert in_child(lambda: accumulated(tmp_path, 6)) is None
    assert in_child(lambda: accumulated(tmp_path, 11)) is None
    assert Shelf(tmp_path / "checkpoints").steps() == [8, 4]
    assert in_child(lambda: accumulated(tmp_path)) == straight


def test_several_optimisers_are_refused(example, tmp_path):
    import torch

    class Two(example.Module):
        def configure_optimizers(self):
            self.automatic_optimization = False
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def told() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(example, "Module", Two)
            with pytest.raises(CheckpointError) as error:
                fit = example.fit
                fit(tmp_path, example.Checkpoints(tmp_path / "checkpoints", every=1))
        return str(error.value)

    assert in_child(told) == (
        "configure_optimizers: expected one optimiser, with one scheduler or none, found 2 and 0. "
        "Capture each with tapeline.checkpoint.capture_state(extra=…) in a callback."
    )
