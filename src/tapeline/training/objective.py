"""What a model is trained towards: how its output is judged, and beside which simple predictors.

Covers the loss of a batch, the sums of an evaluation, and what they come to. Runs no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tapeline.config import TrainingConfig
from tapeline.windows import BatchSource, WindowIndex
from tapeline.windows.changes import changes

_CLASSES = 3  # down, flat, up


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model came to on a set of windows, beside the simplest predictors on the same ones.

    Attributes:
        windows: how many, each once.
        loss: the objective's, as in training.
        simplest: the same of the simplest prediction.
        figures: the same and more by name, means over the horizons.
        horizons: for each target its `horizon`, and the figures of the model and of each of the
            simple predictors.
    """

    windows: int
    loss: float
    simplest: float
    figures: Mapping[str, float]
    horizons: tuple[Mapping[str, Any], ...]

    @property
    def skill(self) -> float:
        """The share of the simplest prediction's loss that the model removes; 0 of none."""
        return 1.0 - self.loss / self.simplest if self.simplest > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, as JSON can hold them."""
        return {
            "windows": self.windows,
            "loss": self.loss,
            **self.figures,
            "skill": self.skill,
            "horizons": [dict(one) for one in self.horizons],
        }


class Objective(Protocol):
    """A pure function of the model's output `[n, outputs]` and targets `[n]` or `[n, targets]`."""

    def num_outputs(self, num_targets: int) -> int:
        """The outputs that a model has to give for each window."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch, in float32 whatever the output is."""

    def sums(self, output: Tensor, y: Tensor, moves: Tensor) -> Tensor:
        """What an evaluation adds up over batches, float64 `[sums]`.

        Args:
            output: of the model.
            y: the targets.
            moves: `[n, targets]`, the last moves of the targets' columns.
        """

    def evaluation(
        self, sums: Sequence[float], windows: int, about: Sequence[Mapping[str, int]]
    ) -> Evaluation:
        """What the sums over all windows come to; `about` each target: its horizon."""


@dataclass(frozen=True, slots=True)
class SquaredError:
    """Predict the change itself: the mean squared error.

    Attributes:
        mean_squares: by target, the mean of its squares over the training windows, which its
            squared errors are divided by: else the longest horizon, which moves most, would be
            all that counts. Empty: errors stay in the target's units.
    """

    mean_squares: tuple[float, ...] = ()

    def num_outputs(self, num_targets: int) -> int:
        """One for each target."""
        return num_targets

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean over windows and targets."""
        prediction = output.float().reshape(y.shape)
        if not self.mean_squares:
            return F.mse_loss(prediction, y)
        errors = zip(prediction.unbind(1), y.unbind(1), self.mean_squares, strict=True)
        return torch.stack([F.mse_loss(ours, true) / unit for ours, true, unit in errors]).mean()

    def sums(self, output: Tensor, y: Tensor, moves: Tensor) -> Tensor:
        """Squared errors by target: of the model, of no change, of the last move going on."""
        target = y.double().reshape(len(y), -1)
        errors = output.double().reshape(target.shape) - target, target, moves.double() - target
        by_target = [row for one in errors for row in one.square().T.contiguous()]
        return torch.stack([row.sum() for row in by_target])

    def evaluation(
        self, sums: Sequence[float], windows: int, about: Sequence[Mapping[str, int]]
    ) -> Evaluation:
        """Beside predicting no change, and that the last move goes on."""
        means = np.reshape(sums, (3, -1)) / windows
        units = self.mean_squares or np.ones(len(about))
        loss, simplest, _ = (means / units).mean(axis=1).tolist()
        names = "mse", "mse_zero", "mse_last_move"
        return Evaluation(
            windows,
            loss,
            simplest,
            {"mse": loss, "mse_zero": simplest},
            tuple(
                {**one, **dict(zip(names, found, strict=True))}
                for one, found in zip(about, means.T.tolist(), strict=True)
            ),
        )


SQUARED_ERROR = SquaredError()


@dataclass(frozen=True, slots=True)
class Direction:
    """Predict whether the target falls, hardly moves or rises: the cross entropy of 3 classes.

    A model gives 3 logits for each target, `[n, 3 · targets]`: down, flat and up of the first
    target, then of the next. Float32 keeps no decimal fraction exactly: a dead zone should lie
    between two of the changes that occur, not on one.

    Attributes:
        dead_zone: changes up to so much, either way, are flat; in the target's units.
        frequencies: by target those of the classes in the training windows, float64. One is added
            to each count, so that a class that never came isn't impossible.
    """

    dead_zone: float
    frequencies: tuple[tuple[float, ...], ...]

    def num_outputs(self, num_targets: int) -> int:
        """Three for each target."""
        return _CLASSES * num_targets

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean over windows and targets, in nats."""
        classes = classes_of(y, self.dead_zone)
        return F.cross_entropy(output.float().reshape(-1, _CLASSES), classes.reshape(-1))

    def sums(self, output: Tensor, y: Tensor, moves: Tensor) -> Tensor:
        """By target the cross entropy, then how often each class was taken for each.

        First of the model, which takes its largest logit, then of the last move's class.
        """
        true, moved = (classes_of(one, self.dead_zone).reshape(len(y), -1) for one in (y, moves))
        logits = output.double().reshape(*true.shape, _CLASSES)
        entropy = F.cross_entropy(
            logits.reshape(-1, _CLASSES), true.reshape(-1), reduction="none"
        ).reshape(true.shape)
        cells = (_CLASSES * true + taken for taken in (logits.argmax(dim=2), moved))
        counts = [F.one_hot(one, _CLASSES**2).sum(dim=0).reshape(-1).double() for one in cells]
        return torch.cat([entropy.sum(dim=0), *counts])

    def evaluation(
        self, sums: Sequence[float], windows: int, about: Sequence[Mapping[str, int]]
    ) -> Evaluation:
        """Beside the training windows' frequencies, and that the last move's class goes on."""
        num = len(about)
        entropy = np.asarray(sums[:num]) / windows
        tables = np.reshape(sums[num:], (2, num, _CLASSES, _CLASSES))
        horizons = []
        for t, one in enumerate(about):
            model, moved = tables[:, t]
            counts, frequencies = model.sum(axis=1), np.array(self.frequencies[t])
            likeliest = np.zeros_like(model)
            likeliest[:, frequencies.argmax()] = counts
            found: dict[str, Any] = {
                **one,
                "training_frequencies": frequencies.tolist(),
                "cross_entropy": float(entropy[t]),
                "cross_entropy_frequencies": float(-(counts * np.log(frequencies)).sum() / windows),
            }
            for name, table in (("", model), ("_frequencies", likeliest), ("_last_move", moved)):
                there = counts > 0
                recalls = np.diag(table)[there] / counts[there]
                found[f"accuracy{name}"] = float(np.diag(table).sum() / windows)
                found[f"balanced_accuracy{name}"] = float(recalls.mean())
            horizons.append(found)
        names = "cross_entropy", "cross_entropy_frequencies", "accuracy", "balanced_accuracy"
        means = {name: float(np.mean([one[name] for one in horizons])) for name in names}
        return Evaluation(
            windows,
            means["cross_entropy"],
            means["cross_entropy_frequencies"],
            means,
            tuple(horizons),
        )


def classes_of(changes: Tensor, dead_zone: float) -> Tensor:
    """0 for down, 1 for flat, 2 for up, of float32 changes; int64 of the same shape."""
    return (changes > dead_zone).long() - (changes < -dead_zone).long() + 1


def objective_of(config: TrainingConfig, source: BatchSource, training: WindowIndex) -> Objective:
    """The objective of a run, with what it takes from the training windows' targets.

    Sums are sequential, in float64: the same bits on every machine.
    """
    num = len(source.targets)
    if config.objective == "direction":
        counts = np.ones((num, _CLASSES))
        for part in changes(source, training):
            classes = classes_of(torch.from_numpy(part), config.dead_zone)
            counts += F.one_hot(classes, _CLASSES).sum(dim=0).numpy()
        frequencies = (counts / counts.sum(axis=1, keepdims=True)).tolist()
        return Direction(config.dead_zone, tuple(map(tuple, frequencies)))
    if num == 1:
        return SQUARED_ERROR
    total = np.zeros(num)
    for part in changes(source, training):
        squares = np.square(part, dtype=np.float64)
        total = np.add.accumulate(np.vstack([total, squares]))[-1]
    means = total / training.num_windows
    return SquaredError(tuple(np.where(means > 0, means, 1.0).tolist()))
