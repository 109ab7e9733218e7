"""A whole training run, the same job by each: this project, a plain loop, Lightning.

    python benchmarks/end_to_end.py [--quick] [--json]

The job is 10,000 steps (2,000 if quick) of the reference model on a synthetic store, with an
evaluation and a checkpoint every 500 steps, from opening the store to the last byte saved, on one
thread of torch. `tapeline` is `run.start`, with all that a run keeps. The others read the same rows
through a map-style dataset and a `DataLoader`: one window per item in two worker processes, or
whole batches by `__getitems__` in the process itself. The plain loop saves with `torch.save`,
Lightning with its `ModelCheckpoint`, neither waits for the disk. In each a ledger says what the
time between a batch and the end of its step was: `goodput` is its share of all time. The last
validation error shows that it was the same job; the orders of the windows differ.
"""

from __future__ import annotations

import functools
import logging
import runpy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from harness import Row, Samples, main
from lightning.pytorch.callbacks import ModelCheckpoint
from loaders import Batched, Windows, as_tensors, endless
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from tapeline.attempt import Data
from tapeline.config import RunConfig
from tapeline.ledger import Ledger, account_of
from tapeline.run import start
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions
from tapeline.training.models import perceptron
from tapeline.windows import Normaliser, WindowIndex

EVERY = 500
EXAMPLE = Path(__file__).parents[1] / "examples" / "ledger_lightning.py"
LedgerCallback = runpy.run_path(str(EXAMPLE))["LedgerCallback"]


def scaled(scale: Normaliser, batch: Any) -> tuple[Tensor, Tensor]:
    """A collate function: `[batch, T · columns]`, each column scaled, and the targets."""
    x, y = as_tensors(batch) if isinstance(batch, tuple) else default_collate(batch)
    return torch.from_numpy(scale(x.numpy())), y


def torch_loaders(config: RunConfig, kind: type[Windows]) -> list[DataLoader[Any]]:
    """Of the training windows, shuffled, and of those held out."""
    data = Data.open(config, None)
    workers = 0 if kind is Batched else 2
    options = {"num_workers": workers, "persistent_workers": workers > 0}

    def loader(index: WindowIndex, *, training: bool) -> DataLoader[Any]:
        return DataLoader(
            kind(data.shards, index),
            config.training.batch if training else 1024,
            shuffle=training,
            drop_last=training,
            collate_fn=functools.partial(scaled, data.normaliser),
            **options,
        )

    return [loader(data.training, training=True), loader(data.validation, training=False)]


def ours(config: RunConfig, folder: Path) -> float:
    """A run; returns the last validation error."""
    return float(start(config, folder).validation["mse"])


def plain(config: RunConfig, folder: Path, kind: type[Windows]) -> float:
    """What people write; returns the last validation error."""
    torch.manual_seed(config.seed)
    train, held_out = torch_loaders(config, kind)
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.training.learning_rate)
    batches = endless(train)
    with Ledger(folder) as ledger:
        for step in range(1, config.training.steps + 1):
            ledger.switch("data")
            x, y = next(batches)
            ledger.switch("compute")
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
            ledger.step_done(step)
            if step % EVERY == 0:
                with ledger.span("evaluation"), torch.no_grad():
                    model.eval()
                    sums = [
                        F.mse_loss(model(x).squeeze(1), y, reduction="sum") for x, y in held_out
                    ]
                    mse = float(sum(sums)) / len(held_out.dataset)
                    model.train()
                with ledger.span("checkpoint"):
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({"step": step, **state}, folder / f"{step}.pt")
    return mse


class Module(lightning.LightningModule):
    """The reference model as Lightning wants it."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.layers, self.learning_rate = perceptron(), learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The mean squared error."""
        return F.mse_loss(self.layers(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """The same, over all batches."""
        self.log("mse", self.training_step(batch, 0), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def by_lightning(config: RunConfig, folder: Path, kind: type[Windows]) -> float:
    """A fit; returns the last validation error."""
    torch.manual_seed(config.seed)
    train, held_out = torch_loaders(config, kind)
    trainer = lightning.Trainer(
        max_steps=config.training.steps,
        accelerator="cpu",
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            LedgerCallback(folder),
            ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(config.training.learning_rate), train, held_out)
    return float(trainer.callback_metrics["mse"])


SUBJECTS: dict[str, Callable[[RunConfig, Path], float]] = {
    "tapeline": ours,
    "loop, DataLoader per item 2w": functools.partial(plain, kind=Windows),
    "loop, DataLoader __getitems__ 0w": functools.partial(plain, kind=Batched),
    f"Lightning {lightning.__version__}, DataLoader __getitems__ 0w": functools.partial(
        by_lightning, kind=Batched
    ),
}


def measure(quick: bool) -> list[Row]:
    """All rows."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    samples = Samples()
    steps = 2_000 if quick else 10_000
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_shards(synthetic_sessions(8, rows=6000), root / "store", "mmap")
        for repetition in range(-1, 2 if quick else 3):  # the first compiles, and isn't counted
            values = {
                "data": {"store": str(root / "store")},
                "training": {"steps": steps if repetition >= 0 else EVERY},
                "validation": {"fraction": 0.25, "every": EVERY},
                "checkpoint": {"every": EVERY},
            }
            config = RunConfig.from_mapping(values, "benchmark")
            for subject, train in SUBJECTS.items():
                folder = root / f"{subject} {repetition}"
                before = time.perf_counter()
                mse = train(config, folder)
                seconds = time.perf_counter() - before
                if repetition >= 0:
                    useful_s = account_of(folder).job.buckets_ns["useful"] / 1e9
                    case = f"{steps:,} steps"
                    samples.add(case, subject, "seconds", seconds, "s")
                    samples.add(case, subject, "steps_per_s", steps / seconds, "1/s")
                    samples.add(case, subject, "goodput", useful_s / seconds, "")
                    samples.add(case, subject, "validation_mse", mse, "")
    return samples.rows("seconds", ("tapeline", "loop, DataLoader __getitems__ 0w"))


if __name__ == "__main__":
    main(__doc__, measure)
