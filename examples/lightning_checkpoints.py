"""A Lightning run that can be killed at any moment and goes on with the same bits.

python examples/lightning_checkpoints.py FOLDER

Kill it (`kill -9`), start the same command again, as often as you like: the last line, a hash of
the parameters, is the one of a run that was never killed. The Trainer's own checkpoints lack the
states of the random generators, so with dropout they go on with other draws.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from tapeline.checkpoint import Checkpointer, capture_state, restore_state
from tapeline.errors import CheckpointError
from tapeline.store import Shards, write_shards
from tapeline.tape import synthetic_sessions
from tapeline.windows import Form, Loader, Shuffled, WindowIndex

T, HORIZON, BATCH, STEPS = 20, 10, 32, 60


class Checkpoints(Checkpoint):
    """Saves all state of a fit every so many optimiser steps, and goes on from the newest.

    Saved are the module, its optimiser and scheduler, all generators, and the Trainer's loops with
    the position of each loader that has `state_dict()`. For one process and one optimiser.

    A resumed fit must draw from the global generators what the first one drew and no more: a
    loader that shuffles by them draws once when it is started. tapeline's `Loader` doesn't.

    Args:
        folder: of the checkpoints; made at the first save.
        every: optimiser steps between saves.
        keep: how many of the newest stay.

    Raises:
        CheckpointError: at the fit's start: every checkpoint is damaged, or of another module,
            or there are several optimisers; later: a save failed.
    """

    def __init__(self, folder: str | Path, *, every: int, keep: int = 3) -> None:
        self._checkpointer = Checkpointer(folder, keep=keep)
        self._every = every
        self._saved = 0

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Restore, before the loops begin and the loaders are started."""
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise CheckpointError(
                "configure_optimizers",
                expected="one optimiser, with one scheduler or none",
                found=f"{len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}",
                fix="Capture each with tapeline.checkpoint.capture_state(extra=…) in a callback",
            )
        if self._checkpointer.entries():
            state = self._checkpointer.load().state
            restore_state(state, module, **self._parts(trainer))
            self._saved = state.step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, *_: Any
    ) -> None:
        """Save where that is due: once after an optimiser step, however many batches it took."""
        self._checkpointer.check()
        step = trainer.global_step
        if step > self._saved and step % self._every == 0:
            epoch = trainer.current_epoch
            self._checkpointer.save(
                capture_state(module, **self._parts(trainer), step=step, epoch=epoch)
            )
            self._saved = step

    def teardown(self, *_: Any, **__: Any) -> None:
        """Finish a save in flight, however the fit ended."""
        self._checkpointer.close()

    def _parts(self, trainer: lightning.Trainer) -> dict[str, Any]:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return {
            "optimizer": trainer.optimizers[0],
            "scheduler": schedulers[0] if schedulers else None,
            "extra": {"loops": trainer.fit_loop},
        }


class Module(lightning.LightningModule):
    """A perceptron with dropout, Adam and a schedule."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(T * num_columns, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The squared error of one batch."""
        x, y = batch
        return F.mse_loss(self.layers(x).squeeze(1), y)

    def configure_optimizers(self) -> Any:
        """Adam and a cosine over the whole run, step by step."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def market(folder: Path) -> Loader:
    """Batches of a small synthetic market, epoch after epoch."""
    if not (folder / "store").exists():
        write_shards(synthetic_sessions(2, rows=300), folder / "store", "mmap")
    shards = Shards(folder / "store")
    index = WindowIndex(shards, T, HORIZON)
    return Loader(shards, index, Shuffled(0), BATCH, "drop", Form(shards.column("mid")))


def fit(folder: Path, *callbacks: lightning.Callback, checkpoint: str | None = None) -> Module:
    """Train to the last step, from the beginning or from `checkpoint`, Lightning's own."""
    lightning.seed_everything(0, verbose=False)
    loader = market(folder)
    module = Module(len(loader.source.shards.columns))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module


def sha256(model: nn.Module) -> str:
    """Over all parameters."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(sha256(fit(where, Checkpoints(where / "checkpoints", every=10))))
