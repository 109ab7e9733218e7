"""`tapeline sweep-batch`: does a larger batch improve the model at all?

Each batch is tried twice: over as many samples as the configuration's (fewer steps), and over as
many steps (more samples, more compute). Both are held against the configuration, paired by seed,
by the lowest validation error of each run: otherwise what overfits sooner would look worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tapeline.config import RunConfig
from tapeline.errors import ConfigError
from tapeline.prove.room import make_room
from tapeline.prove.variants import Progress, Say, Variant, train_variants
from tapeline.runs.spread import CONFIDENCE, Comparison, compare
from tapeline.words import percent

Rescale = Literal["none", "linear", "sqrt"]
Effort = Literal["equal samples", "equal steps"]
EFFORTS: tuple[Effort, ...] = ("equal samples", "equal steps")
_WARMUP_SHARE = 20  # one step in so many, where a rescaled rate has no warm-up of its own


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch with one effort.

    Attributes:
        effort: what it has in common with the configuration's own.
        against: the lowest error of each run held against the configuration's; None if a run
            broke off.
    """

    batch: int
    steps: int
    effort: Effort
    replicas: Variant
    against: Comparison | None

    @property
    def verdict(self) -> Literal["better", "worse", "no difference seen", "broke off"]:
        """What the seeds say."""
        if self.against is None:
            return "broke off"
        if not self.against.exceeds_noise:
            return "no difference seen"
        return "better" if self.against.difference < 0 else "worse"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {
            "batch": self.batch,
            "steps": self.steps,
            "effort": self.effort,
            "verdict": self.verdict,
            "against": self.against and self.against.as_dict(),
            **self.replicas.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """What larger batches came to.

    Attributes:
        rows: for each larger batch one of each effort.
        lr_rescale: how the learning rate grew with the batch.
    """

    base: Variant
    batch: int
    steps: int
    rows: tuple[BatchRow, ...]
    lr_rescale: str

    @property
    def base_mse(self) -> float:
        """The lowest validation error of the configuration itself, the mean of its seeds."""
        return fmean(self.base.best().values())

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "base": {"batch": self.batch, "steps": self.steps, **self.base.as_dict()},
            "rows": [row.as_dict() for row in self.rows],
            "lr_rescale": self.lr_rescale,
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """The finding in words, one for each effort."""
        return [self._sentence(effort) for effort in EFFORTS]

    def _sentence(self, effort: Effort) -> str:
        rows = [row for row in self.rows if row.effort == effort and row.against]
        best = min(rows, key=_difference, default=None)
        better = [row for row in rows if row.verdict == "better"]
        if better:
            best = min(better, key=_difference)
            cost = (
                ""
                if effort == "equal samples"
                else f", at {best.batch // self.batch} × the compute"
            )
            return (
                f"{effort}: batch {best.batch:,} improves the validation error by "
                f"{percent(-_difference(best) / self.base_mse, '.1f')} over {self.batch:,}{cost}."
            )
        hint = ""
        if best and best.against and best.against.seeds_to_decide and _difference(best) < 0:
            hint = (
                f"; {best.against.seeds_to_decide:,} seeds would tell whether the "
                f"{percent(-_difference(best) / self.base_mse, '.1f')} of batch {best.batch:,} are "
                "real"
            )
        return f"{effort}: no larger batch is seen to improve the model over {self.batch:,}{hint}."


def _difference(row: BatchRow) -> float:
    assert row.against, "of rows that didn't break off"
    return row.against.difference


def sweep_batch(
    config: RunConfig,
    factors: Sequence[int],
    seeds: int,
    out: Path,
    say: Say,
    *,
    lr_rescale: Rescale = "none",
    progress: Progress | None = None,
) -> BatchSweep:
    """Train larger batches at equal samples and at equal steps, and judge by the validation loss.

    Args:
        config: its batch is the smallest.
        factors: how many times larger the others are, from 2.
        seeds: two at least.
        out: folder for the runs; what an earlier trial left there is replaced.
        say, progress: as in `train_variants`.
        lr_rescale: how the learning rate grows with the batch; a warm-up of a twentieth of the
            steps is added where the configuration has none.

    Raises:
        ConfigError: too few steps for the largest batch at equal samples, or the configuration
            has a rescaled rate of its own.
        RunError: `out` holds something else, or too few runs reached their end.
        TapelineError: as in `train_variants`.
    """
    training = config.training
    _check(config, factors, lr_rescale)
    variants: dict[str, dict[str, Any]] = {f"batch {training.batch}": {}}
    for factor in factors:
        for effort in EFFORTS:
            name = f"batch {factor * training.batch}, {effort}"
            variants[name] = _larger(config, factor, effort, lr_rescale)
    make_room(out, "trial")
    (base_name, *names) = variants
    found = train_variants(config, variants, seeds, out, say, progress)
    # Each comparison may err: together they do as rarely as one alone (Bonferroni).
    confidence = 1 - (1 - CONFIDENCE) / len(names)
    base = found[base_name]
    rows = []
    for number, name in enumerate(names):
        replicas, changes = found[name], variants[name]
        against = None
        if not replicas.failures:
            against = compare(base.best(), replicas.best(), confidence)
        effort = EFFORTS[number % len(EFFORTS)]
        rows.append(BatchRow(changes["batch"], changes["steps"], effort, replicas, against))
    return BatchSweep(base, training.batch, training.steps, tuple(rows), lr_rescale)


def _check(config: RunConfig, factors: Sequence[int], lr_rescale: Rescale) -> None:
    training = config.training
    if training.steps < 2 * max(factors):
        raise ConfigError(
            "training.steps",
            expected=f"at least {2 * max(factors)}, two with the largest batch",
            found=str(training.steps),
            fix="Train more steps, or sweep smaller batches",
        )
    if lr_rescale != "none" and training.lr_rescale != "none":
        raise ConfigError(
            "training.lr_rescale",
            expected="none, where the sweep rescales the learning rate",
            found=training.lr_rescale,
            fix="Leave out --lr-rescale: the configuration's own grows with the batch",
        )


def _larger(config: RunConfig, factor: int, effort: Effort, lr_rescale: Rescale) -> dict[str, Any]:
    """The settings of `[training]` for a larger batch."""
    training = config.training
    shorter = factor if effort == "equal samples" else 1
    steps = training.steps // shorter
    changes: dict[str, Any] = {
        "batch": factor * training.batch,
        "steps": steps,
        "warmup_steps": -(-training.warmup_steps // shorter),
    }
    if lr_rescale != "none":
        changes |= {"lr_rescale": lr_rescale, "base_batch": training.batch}
        changes["warmup_steps"] = changes["warmup_steps"] or max(1, steps // _WARMUP_SHARE)
    return changes
