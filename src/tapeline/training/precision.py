"""The number format of the forward pass. Weights, loss and optimiser stay in float32.

So do buffers, gradients and what travels between ranks: only the operations that autocast lists
compute in bfloat16, and their results are float32 again where a loss is taken.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from tapeline.errors import TrainingError


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """The context for a forward pass: bfloat16 where that is safe, or float32 throughout.

    bfloat16 has float32's exponent and 7 fraction bits (epsilon 2^-7, formulas.md section 7), so
    it needs no loss scaling.
    """
    if not bf16:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


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
            fix="Call `model.float()`; bf16 changes the forward pass only"
            if kinds
            else "Give the model a layer whose parameters require gradients",
        )
