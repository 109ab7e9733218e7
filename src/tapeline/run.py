"""A run: begun from its configuration, and picked up again from its folder.

What a run consists of, and how one life of it goes, is in `attempt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapeline.attempt import Parts, Progress, RunResult, live
from tapeline.clock import Clock, SystemClock
from tapeline.config import RunConfig
from tapeline.errors import RunError
from tapeline.runs import RunFolder, record
from tapeline.training.build import check_output
from tapeline.windows import Normaliser

__all__ = ["Progress", "RunResult", "resume", "start"]


def start(
    config: RunConfig, folder: Path, *, progress: Progress | None = None, clock: Clock | None = None
) -> RunResult:
    """Train a new run to its last step.

    Args:
        config: what to do.
        folder: where to; made here, must be free.
        progress: called with the steps done and in all.
        clock: for the record, and to measure by.

    Raises:
        TapelineError: something in the configuration doesn't fit the data or the folder; nothing
            has been written then.
        Preempted: it was told to stop, and saved; a SystemExit.
    """
    clock = clock or SystemClock()
    run = RunFolder(folder, clock)
    run.check_free()
    parts = Parts.build(config, normaliser=None)
    check_output(parts.step.model, parts.source, parts.training)
    run.create(record(config, parts.data(), clock))
    with run.locked():
        return live(run, parts, progress, clock)


def resume(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> RunResult:
    """Go on with a run from its newest checkpoint that can be used, or from its beginning.

    Args:
        folder: the run's folder.
        overrides: `key=value` settings that don't change what the run computes, such as
            `data.store=…` for data that was moved.
        progress, clock: as in `start`.

    Raises:
        RunError: the folder isn't a run's, or an override would make it another run.
        CheckpointError: there are checkpoints, and none can be used.
        TapelineError: the data is not what it was.
        Preempted: as in `start`.
    """
    clock = clock or SystemClock()
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
    parts = Parts.build(
        config, Normaliser.from_dict(n) if (n := saved["data"]["normaliser"]) else None
    )
    _check_data(folder, parts, saved["data"])
    with run.locked():
        return live(run, parts, progress, clock)


def _check_data(folder: Path, parts: Parts, saved: dict[str, Any]) -> None:
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
