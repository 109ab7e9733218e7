"""A run: begun from its configuration, and picked up again from its folder.

What a run consists of, and how one life of it goes, is in `attempt`. Under torchrun every rank
calls these: rank 0 makes the folder and the record, opens the data first and fits the normaliser
once for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tapeline.attempt import Data, Parts, Progress, Promise, RunResult, live
from tapeline.attempt.parts import check_ranks
from tapeline.clock import Clock, SystemClock
from tapeline.config import RunConfig
from tapeline.errors import RunError
from tapeline.runs import RunFolder, record
from tapeline.training import joined
from tapeline.training.ranks import from_first
from tapeline.windows import Normaliser
from tapeline.world import World

__all__ = ["Progress", "RunResult", "resume", "start"]


def start(
    config: RunConfig,
    folder: Path,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
    began_ns: int | None = None,
) -> RunResult:
    """Train a new run to its last step.

    Args:
        config: what to do.
        folder: where to; made here, must be free.
        progress: called with the steps done and in all.
        clock: for the record, and to measure by.
        began_ns: monotonic time at which the process began, for one that does nothing else; by
            default now.

    Raises:
        TapelineError: something in the configuration doesn't fit the data or the folder; nothing
            has been written then.
        Preempted: it was told to stop, and saved; a SystemExit.
    """
    clock = clock or SystemClock()
    began_ns = clock.monotonic_ns() if began_ns is None else began_ns
    run = RunFolder(folder, clock)
    with joined(config.training.device) as world, contextlib.ExitStack() as stack:
        check_ranks(config.training, world)

        def opened() -> Data:
            run.check_free()
            return Data.open(config, normaliser=None)

        parts = Parts.build(_on_every_rank(world, config, opened), world)
        promise = Promise.of_new(parts)

        def create() -> None:
            found = record(config, parts.data.record(), clock)
            size = {"num_parameters": sum(p.numel() for p in parts.model.parameters())}
            run.create({**found, **size, **promise.as_dict()})
            stack.enter_context(run.locked())

        from_first(world, create)
        return live(run, parts, progress, clock, began_ns)


def _on_every_rank(world: World, config: RunConfig, opened: Callable[[], Data]) -> Data:
    """What rank 0 opens; the others open it after rank 0, with its normaliser and sessions."""
    mine: list[Data] = []

    def first() -> tuple[dict[str, Any] | None, list[str]]:
        mine.append(opened())
        return mine[0].normaliser.as_dict() if mine[0].normaliser else None, mine[0].sessions

    fitted, sessions = from_first(world, first)
    normaliser = Normaliser.from_dict(fitted) if fitted else None
    return mine[0] if mine else Data.open(config, normaliser, sessions)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
    began_ns: int | None = None,
) -> RunResult:
    """Go on with a run from its newest checkpoint that can be used, or from its beginning.

    Args:
        folder: the run's folder.
        overrides: `key=value` settings that don't change what the run computes, such as
            `data.store=…` for data that was moved.
        progress, clock, began_ns: as in `start`.

    Raises:
        RunError: the folder isn't a run's, or an override would make it another run.
        CheckpointError: there are checkpoints, and none can be used.
        TapelineError: the data is not what it was.
        Preempted: as in `start`.
    """
    clock = clock or SystemClock()
    began_ns = clock.monotonic_ns() if began_ns is None else began_ns
    run = RunFolder(folder, clock)
    saved = run.record()
    config = RunConfig.from_mapping(saved["config"], str(folder / "run.json"), overrides)
    if config.hash() != saved["config_hash"]:
        raise RunError(
            folder,
            expected="settings that leave the run's computation alone",
            found=", ".join(overrides) or "another version's meaning of its configuration",
            fix="Start another run with them, using `tapeline train`",
        )
    fitted = saved["data"]["normaliser"]

    def opened() -> Data:
        normaliser = Normaliser.from_dict(fitted) if fitted else None
        data = Data.open(config, normaliser, saved["data"]["session_names"])
        _check_data(folder, data, saved["data"])
        return data

    with joined(config.training.device) as world, contextlib.ExitStack() as stack:
        check_ranks(config.training, world)
        parts = Parts.build(_on_every_rank(world, config, opened), world)
        from_first(world, lambda: stack.enter_context(run.locked()))
        return live(run, parts, progress, clock, began_ns)


def _check_data(folder: Path, data: Data, saved: dict[str, Any]) -> None:
    """Compare the data with what the record says of it, and its bytes with its hashes."""
    shards, config = data.shards, data.config.data
    if data.fingerprint != saved["read_fingerprint"]:
        raise RunError(
            f"{folder}, data {config.store}",
            expected=f"the data of the run, fingerprint {saved['read_fingerprint']}",
            found=data.fingerprint,
            fix="Resume with the data it was started on, or start another run",
        )
    if config.verify and (changed := shards.verify()):
        raise RunError(
            f"{folder}, data {config.store}",
            expected="the bytes that the run was started on",
            found=changed[0],
            fix="Restore the store from its source, or start another run",
        )
