"""The number format of the forward pass. Weights, loss and optimiser stay in float32.

So do buffers, gradients and what travels between ranks: only the operations that autocast lists
compute in 16 bits, and their results are float32 again where a loss is taken.

float16 reaches no further down than 6e-8, so small gradients would vanish on their way back: the
loss is scaled up before and the gradients down after it. The scale is a power of two, so this
rounds nothing. A step whose gradients overflow is left out and the scale halved: on every rank
alike, since each sees the gradients of all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from tapeline.errors import TrainingError

Precision = Literal["float32", "bfloat16", "float16"]


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context for a forward pass: 16 bits where that is safe, or float32 throughout.

    bfloat16 has float32's exponent and 7 fraction bits (epsilon 2^-7, formulas.md section 7), so
    it needs no loss scaling.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def loss_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler | None:
    """Torch's scaler where the precision needs one; its state belongs into checkpoints."""
    return torch.amp.GradScaler(device.type) if precision == "float16" else None


def check_trainable(model: nn.Module) -> None:
    """Raise unless the model has parameters to train, all of them float32.

    Raises:
        TrainingError: it has none, or of another type.
    """
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    if kinds != {"float32"}:
        raise TrainingError(
            f"model {type(model).__name__}",
            expected="parameters to train, in float32",
            found=", ".join(sorted(kinds)) or "none",
            fix="Call `model.float()`; precision changes the forward pass only"
            if kinds
            else "Give the model a layer whose parameters require gradients",
        )
