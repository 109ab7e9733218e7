"""The parts of a run, built from its configuration: the only place that knows every one.

Does not cover what is done with them (`life`), nor what is written about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapeline.checkpoint import State, capture_state
from tapeline.config import RunConfig
from tapeline.store import Shards
from tapeline.training import TrainStep
from tapeline.training.build import build_model, build_optimizer
from tapeline.training.determinism import make_deterministic, seed_generators
from tapeline.training.step import warmup_then
from tapeline.windows import (
    BatchSource,
    Feed,
    Form,
    Loader,
    Normaliser,
    Shuffled,
    WindowIndex,
    named,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run consists of, built and not yet moved."""

    config: RunConfig
    shards: Shards
    training: WindowIndex
    validation: WindowIndex | None
    source: BatchSource
    normaliser: Normaliser | None
    loader: Loader
    step: TrainStep

    @classmethod
    def build(cls, config: RunConfig, normaliser: Normaliser | None) -> Parts:
        """Build from the configuration; the normaliser is fitted here unless it is known."""
        make_deterministic(config.training.threads)
        data = config.data
        shards = Shards(data.store, cache=data.cache, cache_bytes=data.cache_bytes)
        target = shards.column(data.target)
        windows, training = config.windows, config.training
        everything = WindowIndex(shards, windows.length, windows.horizon)
        fraction = config.validation.fraction
        train, held_out = everything, None
        if fraction:
            train, held_out = everything.split(train=1 - fraction, validation="rest").values()
        if data.normalise and normaliser is None:
            normaliser = Normaliser.fit(shards, train)
        seed_generators(config.seed)
        num_inputs = windows.length * len(shards.columns)
        model = build_model(config.model, num_inputs, config.seed, training.device)
        return cls(
            config=config,
            shards=shards,
            training=train,
            validation=held_out,
            source=BatchSource(shards, windows.length, windows.horizon, target, normaliser),
            normaliser=normaliser,
            loader=Loader(
                shards,
                train,
                Shuffled(config.seed),
                training.batch,
                form=Form(
                    target,
                    normaliser,
                    augment=tuple(named(a.name, **a.arguments) for a in data.augment),
                ),
                feed=Feed(device=training.device),
            ),
            step=TrainStep(
                model,
                build_optimizer(training, model),
                accumulate=training.accumulate,
                precision=training.precision,
                clip_norm=training.clip_norm,
                schedule=warmup_then(
                    training.schedule,
                    warmup_steps=training.warmup_steps,
                    total_steps=training.steps,
                ),
                seed=config.seed,
            ),
        )

    def identity(self) -> dict[str, str]:
        """What a checkpoint must belong to, to be of this run."""
        return {"config_hash": self.config.hash(), "data_fingerprint": self.shards.fingerprint}

    def state(self, number: int) -> State:
        """Everything that determines the rest, after step `number`."""
        return capture_state(
            self.step.model,
            self.step.optimizer,
            step=number,
            epoch=self.loader.epoch,
            sampler=self.loader,
        )

    def data(self) -> dict[str, Any]:
        """What the run reads, for the record."""
        return {
            "store": str(self.shards.folder),
            "fingerprint": self.shards.fingerprint,
            "sessions": len(self.shards),
            "rows": int(self.shards.offsets[-1]),
            "training_windows": self.training.num_windows,
            "validation_windows": self.validation.num_windows if self.validation else 0,
            "training_fingerprint": self.training.fingerprint(),
            "audit": {
                "training": self.training.audit().as_dict(),
                "validation": self.validation.audit().as_dict() if self.validation else None,
            },
            "normaliser": self.normaliser.as_dict() if self.normaliser else None,
        }
