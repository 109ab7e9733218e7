"""One configuration trained with k seeds: the seed varies initialisation, data order and draws.

Each seed is a run in a folder of its own. Called again, finished ones are taken as they are and
unfinished ones are resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeline.config import RunConfig
from tapeline.errors import ConfigError, RunError
from tapeline.runs import RunFolder
from tapeline.runs.replicas import replicas_of
from tapeline.runs.spread import Spread, spread_of
from tapeline.words import percent

Progress = Callable[[int, int], None]
Start = Callable[[RunConfig, Path, Progress], object]
Resume = Callable[[Path, Progress], object]


@dataclass(frozen=True, slots=True)
class Replicated:
    """What k seeds tell."""

    folder: str
    metric: str
    by_seed: dict[int, float]
    spread: Spread

    @property
    def sentence(self) -> str:
        """What they tell, in words."""
        s, k = self.spread, len(self.spread.values)
        told = (
            f"{self.metric} over {k} seeds: {s.mean:.6g} ± {s.mean_half_width:.2g} "
            f"({percent(s.confidence)} interval for the mean); a next run falls within "
            f"± {s.next_half_width:.2g}. Least to greatest, {min(s.values):.6g} to "
            f"{max(s.values):.6g}, holds a next run with a chance of {percent(s.coverage)} only"
        )
        return (
            f"{told}. {s.num_diverged} diverged and are in no interval" if s.num_diverged else told
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        by_seed = {str(seed): str(v) if v != v else v for seed, v in self.by_seed.items()}
        return {**asdict(self), "by_seed": by_seed, "spread": self.spread.as_dict()}


def replicate(
    config: RunConfig,
    out: Path,
    *,
    num_seeds: int,
    start: Start,
    resume: Resume,
    progress: Progress,
) -> Replicated:
    """Train a configuration with `num_seeds` seeds, from its own on.

    Args:
        config: its seed is the first.
        out: gets a folder for each seed.
        num_seeds: two at least.
        start, resume: train a run to its end; `run.start` and `run.resume`.
        progress: called with the steps of all seeds done and in all.

    Raises:
        ConfigError: fewer than two seeds.
        RunError: a folder holds another run, or fewer than two runs ended with a finite figure.
    """
    if num_seeds < 2:
        raise ConfigError(
            "--seeds",
            expected="two or more",
            found=str(num_seeds),
            fix="Three give a first idea, ten a narrow interval",
        )
    total = num_seeds * config.training.steps
    for number in range(num_seeds):
        seeded = with_seed(config, config.seed + number)
        folder = out / f"seed-{seeded.seed}"

        def tell(done: int, _: int, before: int = number * config.training.steps) -> None:
            progress(before + done, total)

        if not folder.exists():
            start(seeded, folder, tell)
        elif not _is_finished(folder, seeded):
            resume(folder, tell)
    found = replicas_of(out)
    return Replicated(
        str(out), found.metric, found.by_seed, spread_of(list(found.by_seed.values()))
    )


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The configuration with another seed; durable copies go to a place of that run alone."""
    saving = config.checkpoint
    if saving.durable:
        place = f"{saving.durable.rstrip('/')}/seed-{seed}"
        saving = saving.model_copy(update={"durable": place})
    changed = {"seed": seed, "name": f"{config.name}-seed-{seed}", "checkpoint": saving}
    return config.model_copy(update=changed)


def _is_finished(folder: Path, config: RunConfig) -> bool:
    run = RunFolder(folder)
    if run.record()["config_hash"] != config.hash():
        raise RunError(
            folder,
            expected=f"this configuration with seed {config.seed}",
            found="a run of another one",
            fix="Give another folder with --out",
        )
    lives = run.attempts()
    return bool(lives) and lives[-1].get("how") == "finished"
