"""A ledger beside Lightning's trainer: a callback, and a writer of checkpoints that tells it.

python examples/ledger_lightning.py FOLDER [epochs]

Run it again with more epochs: it goes on from the last checkpoint, in a second attempt.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tapeline.ledger import Ledger, account_of, process_began_ns
from tapeline.world import World


class LedgerCallback(L.Callback):
    """Keeps a ledger of a fit.

    The time from the end of one batch to the begin of the next is "data": the trainer fetches
    there, and other callbacks that work at the end of a batch are charged to it too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger: Ledger | None = None

    def on_train_start(self, trainer: L.Trainer, _: Any) -> None:
        """Begin: only now has the trainer read its checkpoint and knows its step."""
        world = World(trainer.global_rank, trainer.world_size, trainer.local_rank)
        self.ledger = Ledger(
            self.folder, world=world, from_step=trainer.global_step, began_ns=process_began_ns()
        )
        self.ledger.switch("data")

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch is there."""
        self.ledger.switch("compute")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """A step is done, unless gradients are still being accumulated."""
        if trainer.global_step > self.ledger.step:
            self.ledger.step_done(trainer.global_step)
        self.ledger.switch("data")

    def on_validation_start(self, *_: Any) -> None:
        """Of the trainer's sanity check before the training there is no ledger yet."""
        if self.ledger:
            self.ledger.switch("evaluation")

    def on_validation_end(self, *_: Any) -> None:
        """Back to waiting for a batch."""
        if self.ledger:
            self.ledger.switch("data")

    def on_train_end(self, *_: Any) -> None:
        """What follows is the trainer's teardown."""
        self.ledger.switch("other")

    def on_exception(self, _: Any, __: Any, exception: BaseException) -> None:
        """The ledger says how it ended."""
        if self.ledger:
            self.ledger.close(type(exception).__name__)

    def teardown(self, *_: Any, **__: Any) -> None:
        """The last checkpoint is written by now."""
        if self.ledger:
            self.ledger.close()


class LedgerCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints as Lightning does, and tells the callback's ledger."""

    def __init__(self, callback: LedgerCallback) -> None:
        super().__init__()
        self._callback = callback

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Save in the phase "checkpoint"."""
        with self._callback.ledger.span("checkpoint"):
            super().save_checkpoint(*arguments, **options)


class Model(L.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        """The loss, logged."""
        self.log("validation", self.training_step(batch, number))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def main(folder: Path, epochs: int) -> None:
    """Fit up to so many epochs."""
    x = torch.randn(2048, 40)
    examples = TensorDataset(x, x.sum(dim=1, keepdim=True))
    callback = LedgerCallback(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[callback, ModelCheckpoint(folder / "checkpoints", save_last=True)],
        plugins=[LedgerCheckpointIO(callback)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = folder / "checkpoints" / "last.ckpt"
    trainer.fit(
        Model(),
        DataLoader(examples, 64, shuffle=True),
        DataLoader(examples, 512),
        ckpt_path=saved if saved.exists() else None,
    )
    account = account_of(folder)
    for bucket, nanoseconds in account.job.buckets_ns.items():
        print(f"{bucket:<12} {nanoseconds / 1e9:8.3f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
