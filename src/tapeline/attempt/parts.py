"""The parts of a run, built from its configuration: the only place that knows every one.

Does not cover what is done with them (`life`), nor what is written about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapeline.checkpoint import State, capture_state, part_sha256, restore_state
from tapeline.config import RunConfig, TrainingConfig
from tapeline.errors import ConfigError, RunError, TrainingError
from tapeline.store import Shards
from tapeline.training import Contract, Lanes, TrainStep, contract_of
from tapeline.training.build import build_model, build_optimizer, check_output
from tapeline.training.determinism import make_deterministic, seed_generators
from tapeline.training.distribute import distribute
from tapeline.training.objective import Objective, objective_of
from tapeline.training.ranks import device_of, from_all, unwrapped
from tapeline.training.step import warmup_then
from tapeline.windows import (
    BatchSource,
    Feed,
    Form,
    Loader,
    Normaliser,
    Shuffled,
    WindowIndex,
    data_fingerprint,
    named,
)
from tapeline.world import World


@dataclass(frozen=True, slots=True)
class Data:
    """What a run reads, and how it is cut."""

    config: RunConfig
    shards: Shards
    sessions: list[str]
    training: WindowIndex
    validation: WindowIndex | None
    normaliser: Normaliser | None
    source: BatchSource

    @classmethod
    def open(
        cls,
        config: RunConfig,
        normaliser: Normaliser | None,
        sessions: Sequence[str] | None = None,
    ) -> Data:
        """Open the store and cut it.

        Args:
            config: says which store, and how it is cut.
            normaliser: fitted here unless it is known.
            sessions: the run's, by key; what else the store holds came later. None for all.

        Raises:
            RunError: the store lacks some of the sessions.
            TapelineError: the store can't be opened or cut like that.
        """
        data, windows = config.data, config.windows
        shards = Shards(data.store, cache=data.cache, cache_bytes=data.cache_bytes)
        target = shards.column(data.target)
        chosen = None if sessions is None else _numbers_of(shards, sessions)
        everything = WindowIndex(shards, windows.length, windows.horizons, sessions=chosen)
        fraction = config.validation.fraction
        train, held_out = everything, None
        if fraction:
            train, held_out = everything.split(train=1 - fraction, validation="rest").values()
        if data.normalise and normaliser is None:
            normaliser = Normaliser.fit(shards, train)
        source = BatchSource(shards, windows.length, windows.horizons, target, normaliser)
        keys = [str(key) for key in shards.keys] if sessions is None else list(sessions)
        return cls(config, shards, keys, train, held_out, normaliser, source)

    @property
    def fingerprint(self) -> str:
        """What the rows are that the run reads, whatever else the store holds."""
        indexes = [index for index in (self.training, self.validation) if index]
        return data_fingerprint(self.shards, *indexes)

    def record(self) -> dict[str, Any]:
        """What is read, for the record of the run."""
        return {
            "store": str(self.shards.folder),
            "fingerprint": self.shards.fingerprint,
            "index_xxh3": self.shards.index.digest(),
            "columns": list(self.shards.columns),
            "derived": self.shards.index.derived,
            "made": self.shards.index.made,
            "read_fingerprint": self.fingerprint,
            "sessions": len(self.sessions),
            "session_names": self.sessions,
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

    def loader(self, rows: World, device: str) -> Loader:
        """The training batches, for ranks that have rows of their own."""
        config = self.config
        return Loader(
            self.shards,
            self.training,
            Shuffled(config.seed),
            config.training.batch,
            form=Form(
                self.shards.column(config.data.target),
                self.normaliser,
                augment=tuple(named(a.name, **a.arguments) for a in config.data.augment),
            ),
            feed=Feed(device=device),
            world=rows,
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run consists of on one rank, built and not yet moved.

    Attributes:
        config: of the run.
        world: all ranks, and which of them this is.
        rows: those with rows of their own; ranks that tensor parallelism cut one layer over are
            one of them.
        data: what is read.
        loader: the training batches.
        step: does one step.
        contract: what holds of the bits as long as nothing changes.
    """

    config: RunConfig
    world: World
    rows: World
    data: Data
    loader: Loader
    step: TrainStep
    contract: Contract

    @classmethod
    def build(cls, data: Data, world: World) -> Parts:
        """Build from what is read; every rank must call it.

        Raises:
            ConfigError: the configuration can't be trained on so many ranks.
            TapelineError: the model can't be built or trained, or the device isn't there.
        """
        config, training = data.config, data.config.training
        check_ranks(training, world)
        make_deterministic(training.threads)
        seed_generators(config.seed)
        device = device_of(training.device, world)
        num_inputs = config.windows.length * len(data.shards.columns)
        objective = objective_of(training, data.source, data.training)
        num_outputs = objective.num_outputs(len(data.source.targets))
        model = build_model(config.model, num_inputs, num_outputs, config.seed, device)
        check_output(model, data.source, data.training, config.seed, objective)
        step = _step(config, model, world, objective)
        ways = training.tensor_parallel if world.size > 1 else 1
        rows = World(world.rank // ways, world.size // ways, world.local_rank)
        lanes = step.lanes
        return cls(
            config=config,
            world=world,
            rows=rows,
            data=data,
            loader=data.loader(World() if lanes and not lanes.own_rows_only else rows, device),
            step=step,
            contract=contract_of(
                training.strategy,
                num_lanes=training.lanes,
                world_size=world.size,
                threads=torch.get_num_threads(),  # the model's code may have set others
            ),
        )

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds and saves a share of the state, and not all of it."""
        return self.config.training.strategy == "fsdp2" and self.world.size > 1

    @property
    def model(self) -> nn.Module:
        """The model itself, without what DDP puts around it."""
        return unwrapped(self.step.model)

    def identity(self) -> dict[str, str]:
        """What a checkpoint must belong to, to be of this run."""
        return {
            "config_hash": self.config.hash(),
            "data_fingerprint": self.data.fingerprint,
        }

    def state(self, number: int) -> State:
        """Everything that determines the rest, after step `number`."""
        return capture_state(
            self.model,
            self.step.optimizer,
            step=number,
            epoch=self.loader.epoch,
            sampler=self.loader,
            extra=self._extra(),
        )

    def restore(self, state: State) -> None:
        """Put a state back; it isn't used afterwards.

        Raises:
            CheckpointError: it is of other parts.
        """
        restore_state(
            state,
            self.model,
            self.step.optimizer,
            sampler=self.loader,
            extra=self._extra(),
            give_up=True,
        )

    def check_equal(self, state: State) -> None:
        """Compare the end of a run under lanes over all ranks; each must call it.

        Raises:
            TrainingError: some rank's is another than rank 0's; on every rank.
        """
        if not self.step.lanes or self.world.size == 1:
            return
        ends = from_all(self.world, part_sha256(state))
        parted = [rank for rank, end in enumerate(ends) if end != ends[0]]
        if parted:
            parts = [part for part in ends[0] if ends[parted[0]][part] != ends[0][part]]
            raise TrainingError(
                f"rank {parted[0]} of {self.world.size}",
                expected="the same bits as on rank 0 after the last step",
                found=f"others in {', '.join(parts)}",
                fix="Look for what the model keeps or draws outside torch; see `training/lanes.py`",
            )

    def _extra(self) -> dict[str, Any]:
        return {"loss_scaler": self.step.scaler} if self.step.scaler else {}


def _numbers_of(shards: Shards, sessions: Sequence[str]) -> list[int]:
    numbers = {str(key): number for number, key in enumerate(shards.keys)}
    if missing := [key for key in sessions if key not in numbers]:
        raise RunError(
            f"{shards.folder}",
            expected=f"the {len(sessions)} sessions that the run was started on",
            found=f"none of {missing[0]}" + (f" and {len(missing) - 1} more" * (len(missing) > 1)),
            fix="Resume with the data it was started on, or start another run",
        )
    return [numbers[key] for key in sessions]


def check_ranks(training: TrainingConfig, world: World) -> None:
    """Refuse a number of ranks that a configuration can't be trained on.

    Raises:
        ConfigError: more ranks than lanes, or ranks that don't divide the batch evenly.
    """
    if training.strategy == "lanes":
        if world.size > training.lanes:
            raise ConfigError(
                "training.lanes",
                expected=f"at least {world.size}, one for each rank",
                found=str(training.lanes),
                fix="Start fewer ranks, or another run with more lanes: they decide its bits",
            )
        return
    ways = training.tensor_parallel if world.size > 1 else 1
    if world.size % ways or training.batch % (world.size // ways * training.accumulate):
        raise ConfigError(
            "training.batch",
            expected=f"a multiple of accumulate times the {world.size} ranks"
            + (f" over tensor_parallel {ways}" if ways > 1 else ""),
            found=str(training.batch),
            fix="Start another number of ranks, or choose another batch",
        )


def _step(config: RunConfig, model: nn.Module, world: World, objective: Objective) -> TrainStep:
    """The step of this rank, its model handed to torch where that shares the work."""
    training = config.training
    lanes: Lanes | int = 1
    if training.strategy == "lanes":
        if training.lanes > 1:
            # Ranks whose lanes are equally many are given no more than their rows.
            even = training.lanes % world.size == 0
            lanes = Lanes(model, num_lanes=training.lanes, seed=config.seed, own_rows_only=even)
    elif world.size > 1:
        model = distribute(model, training.strategy, tensor_parallel=training.tensor_parallel)
    step = TrainStep(
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
        lanes=lanes,
    )
    step.objective = objective
    return step
