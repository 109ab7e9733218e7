"""Variants of a configuration, each trained with several seeds, and their validation errors.

Seeds are the configuration's and those after it, the same for every variant: what a seed does to
all of them alike cancels in a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.config import RunConfig
from tapeline.errors import ConfigError, TrainingError
from tapeline.files import finite_json
from tapeline.run import start
from tapeline.runs import RunFolder

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
_EVALUATIONS = 10  # over a run, at least


@dataclass(frozen=True, slots=True)
class Variant:
    """What the seeds of one variant came to.

    Attributes:
        steps: at which they were evaluated.
        curves: for each seed the validation loss at those steps; inf from where a run broke off.
        failures: what a run broke off with, by seed.
    """

    steps: tuple[int, ...]
    curves: dict[int, list[float]]
    failures: dict[int, str]

    def at(self, place: int) -> dict[int, float]:
        """The error of each seed at the evaluation of that place, such as -1 for the last."""
        return {seed: curve[place] for seed, curve in self.curves.items()}

    def best(self) -> dict[int, float]:
        """The lowest error of each seed over its run, which `checkpoint.keep_best` would keep."""
        return {seed: min(curve) for seed, curve in self.curves.items()}

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them: an error that isn't finite is None."""
        found = {"evaluated_at": self.steps, "curves": self.curves, "failures": self.failures}
        return finite_json(found)  # type: ignore[no-any-return]


def train_variants(
    config: RunConfig,
    variants: Mapping[str, Mapping[str, Any]],
    seeds: int,
    out: Path,
    say: Say,
    progress: Progress | None = None,
) -> dict[str, Variant]:
    """Train every variant with every seed, seed by seed, each as a run in a folder of its own.

    Args:
        config: what they have in common.
        variants: by name the settings of `[training]` that differ.
        say: told what begins.
        progress: called with the steps done and in all.

    Raises:
        ConfigError: a variant is no configuration, or nothing is held out for validation.
        TapelineError: a run can't begin.
    """
    if not config.validation.fraction:
        raise ConfigError(
            "validation.fraction",
            expected="a share of the data to judge by",
            found="0",
            fix="Set validation.fraction, such as 0.2",
        )
    settings = {name: _variant(config, name, changes) for name, changes in variants.items()}
    total = seeds * sum(setting.training.steps for setting in settings.values())
    before = 0
    found: dict[str, Variant] = {}
    for seed in range(config.seed, config.seed + seeds):
        for name, setting in settings.items():
            say(f"{name}, seed {seed}: {setting.training.steps:,} steps")
            run = out / f"{name.replace(' ', '-')}-seed-{seed}"

            def tell(done: int, _: int, before: int = before) -> None:
                if progress:
                    progress(before + done, total)

            failure = _train(setting.model_copy(update={"seed": seed}), run, tell)
            before += setting.training.steps
            steps = _evaluations(setting)
            errors = RunFolder(run).validations()
            curve = [errors[step]["loss"] if step in errors else math.inf for step in steps]
            replicas = found.setdefault(name, Variant(steps, {}, {}))
            replicas.curves[seed] = curve
            if failure:
                replicas.failures[seed] = failure
                say(f"    broke off: {failure}")
    return found


def _variant(config: RunConfig, name: str, changes: Mapping[str, Any]) -> RunConfig:
    values = config.resolved()
    values["training"] |= changes
    steps = values["training"]["steps"]
    every = min(config.validation.every, max(1, steps // _EVALUATIONS))
    values["validation"]["every"] = every  # changes no bit
    return RunConfig.from_mapping(values, name)


def _evaluations(config: RunConfig) -> tuple[int, ...]:
    every, last = config.validation.every, config.training.steps
    return tuple(sorted({*range(every, last + 1, every), last}))


def _train(config: RunConfig, run: Path, progress: Progress) -> str | None:
    """Train; returns why a run that had begun broke off."""
    try:
        start(config, run, progress=progress)
    except TrainingError as error:
        if not run.exists():
            raise  # it couldn't begin
        return str(error)
    return None
