"""A run: its parts built from its configuration, handed to the loop, and picked up again.

The only place that knows every part. What a part does is decided in its own room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapeline.checkpoint import (
    Checkpointer,
    Skipped,
    State,
    capture_state,
    part_sha256,
    restore_state,
    state_sha256,
)
from tapeline.clock import Clock, SystemClock
from tapeline.config import RunConfig
from tapeline.errors import RunError, TrainingError
from tapeline.runs import MetricsJournal, RunFolder, code_state, record
from tapeline.store import Shards
from tapeline.training import TrainStep, evaluate, loop
from tapeline.training.build import build_model, build_optimizer, check_output
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

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run comes to.

    Attributes:
        folder: the run's folder.
        steps: steps done in all.
        from_step: where this life of the run began.
        state_sha256: over all state after the last step.
        part_sha256: over each part of it.
        losses: of every step, the later one where a step was done twice.
        validation: at the end; None without a validation split.
        skipped: checkpoints that were passed over on the way in, and why.
    """

    folder: Path
    steps: int
    from_step: int
    state_sha256: str
    part_sha256: dict[str, str]
    losses: list[float]
    validation: dict[str, Any] | None
    skipped: tuple[Skipped, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the losses as the mean of the last 50."""
        last = self.losses[-50:]
        return {
            "run": str(self.folder),
            "steps": self.steps,
            "from_step": self.from_step,
            "state_sha256": self.state_sha256,
            "part_sha256": self.part_sha256,
            "loss_last_50": sum(last) / len(last) if last else None,
            "validation": self.validation,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
        }


def start(
    config: RunConfig, folder: Path, *, progress: Progress | None = None, clock: Clock | None = None
) -> RunResult:
    """Train a new run to its last step.

    Args:
        config: what to do.
        folder: where to; made here, must be free.
        progress: called with the steps done and in all.
        clock: for the record.

    Raises:
        TapelineError: something in the configuration doesn't fit the data or the folder; nothing
            has been written then.
    """
    run = RunFolder(folder, clock or SystemClock())
    run.check_free()
    parts = _Parts.build(config, normaliser=None)
    check_output(parts.step.model, parts.source, parts.training)
    run.create(record(config, parts.data(), clock or SystemClock()))
    with run.locked():
        return _live(run, parts, progress)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> RunResult:
    """Go on with a run from its newest checkpoint that verifies, or from its beginning.

    Args:
        folder: the run's folder.
        overrides: `key=value` settings that don't change what the run computes, such as
            `data.store=…` for data that was moved.
        progress, clock: as in `start`.

    Raises:
        RunError: the folder isn't a run's, or an override would make it another run.
        CheckpointError: there are checkpoints, and none can be used.
        TapelineError: the data is not what it was.
    """
    run = RunFolder(folder, clock or SystemClock())
    saved = run.record()
    config = RunConfig.from_mapping(saved["config"], str(folder / "run.json"), overrides)
    if config.hash() != saved["config_hash"]:
        raise RunError(
            folder,
            expected="settings that leave the run's computation alone",
            found=", ".join(overrides) or "another version's meaning of its configuration",
            fix="Start another run with them, using `tapeline train`",
        )
    parts = _Parts.build(
        config, Normaliser.from_dict(n) if (n := saved["data"]["normaliser"]) else None
    )
    _check_data(folder, parts, saved["data"])
    with run.locked():
        return _live(run, parts, progress)


def _check_data(folder: Path, parts: _Parts, saved: dict[str, Any]) -> None:
    """Compare the data with what the record says of it, and its bytes with its hashes."""
    shards, config = parts.shards, parts.config.data
    if shards.fingerprint != saved["fingerprint"]:
        raise RunError(
            f"{folder}, data {config.store}",
            expected=f"the data of the run, fingerprint {saved['fingerprint']}",
            found=shards.fingerprint,
            fix="Resume with the data it was started on, or start another run",
        )
    if config.verify and (changed := shards.verify()):
        raise RunError(
            f"{folder}, data {config.store}",
            expected="the bytes that the run was started on",
            found=changed[0],
            fix="Restore the store from its source, or start another run",
        )


@dataclass(frozen=True, slots=True)
class _Parts:
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
    def build(cls, config: RunConfig, normaliser: Normaliser | None) -> _Parts:
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
                bf16=training.precision == "bfloat16",
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


def _live(run: RunFolder, parts: _Parts, progress: Progress | None) -> RunResult:
    """One life of a run: restore, train to the last step, save, say how it ended."""
    config, step = parts.config, parts.step
    steps = config.training.steps
    checkpointer = _checkpointer(run, parts)
    first, skipped = _restore(checkpointer, parts)
    attempt = run.begin_attempt(from_step=first, world_size=1)
    done = first
    with MetricsJournal(run.metrics_path(0), attempt) as metrics:
        losses = _LossHook(metrics, config.log_every)

        def validate(number: int, _: Tensor) -> None:
            if parts.validation and (number % config.validation.every == 0 or number == steps):
                found = evaluate(step.model, parts.source, parts.validation)
                metrics.validation(number, found.as_dict())

        def checkpoint(number: int, _: Tensor) -> None:
            checkpointer.check()  # a write in the background that failed ends the run here
            if number % config.checkpoint.every == 0 or number == steps:
                losses.write(number)
                metrics.sync()  # a checkpoint never covers steps whose metrics could be lost
                checkpointer.save(parts.state(number))

        def count(number: int, _: Tensor) -> None:
            nonlocal done
            done = number
            if progress:
                progress(number, steps)

        try:
            with checkpointer:
                loop(step, parts.loader, first, steps, (losses, validate, checkpoint, count))
        except BaseException as error:
            how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            evidence = f"{type(error).__name__}: {error}"
            run.end_attempt(attempt, how=how, step=done, evidence=evidence)
            raise
    run.end_attempt(attempt, how="finished", step=steps, evidence="its last step was saved")
    state = parts.state(steps)
    return RunResult(
        folder=run.path,
        steps=steps,
        from_step=first,
        state_sha256=state_sha256(state),
        part_sha256=part_sha256(state),
        losses=list(run.losses().values()),
        validation=run.validations().get(steps),
        skipped=skipped,
    )


def _checkpointer(run: RunFolder, parts: _Parts) -> Checkpointer:
    return Checkpointer(
        run.checkpoints_path,
        keep=parts.config.checkpoint.keep,
        metadata={**parts.identity(), "run": parts.config.name, "code": code_state(Path.cwd())},
    )


def _restore(checkpointer: Checkpointer, parts: _Parts) -> tuple[int, tuple[Skipped, ...]]:
    """Put the newest usable state into the parts; a run that saved nothing begins at 0."""
    newest = checkpointer.newest()
    if newest.path is None and not newest.skipped:
        return 0, ()
    loaded = checkpointer.load(expect=parts.identity())
    restore_state(
        loaded.state,
        parts.step.model,
        parts.step.optimizer,
        sampler=parts.loader,
        give_up=True,
    )
    return loaded.state.step, loaded.skipped


class _LossHook:
    """Collects losses on the device and journals them at the logging interval.

    Reading one loss waits for the device; reading ten at once waits once.
    """

    def __init__(self, metrics: MetricsJournal, every: int) -> None:
        self._metrics = metrics
        self._every = every
        self._losses: list[Tensor] = []

    def __call__(self, number: int, loss: Tensor) -> None:
        self._losses.append(loss)
        if number % self._every == 0:
            self.write(number)

    def write(self, number: int) -> None:
        """Journal what was collected up to step `number`.

        Raises:
            TrainingError: a loss is not finite.
        """
        if not self._losses:
            return
        losses: list[float] = torch.stack(self._losses).tolist()
        first = number - len(losses) + 1
        self._losses.clear()
        for step, loss in enumerate(losses, first):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"step {step}",
                    expected="a finite loss",
                    found=str(loss),
                    fix="Lower the learning rate, clip the gradient, or look at the data there",
                )
        self._metrics.losses(number, losses)
