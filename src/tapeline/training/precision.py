"""The number format of the forward pass. Weights, loss and optimiser stay in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[object]:
    """The context for a forward pass: bfloat16 where that is safe, or float32 throughout.

    bfloat16 has float32's exponent and 7 fraction bits (epsilon 2^-7, formulas.md section 7), so
    it needs no loss scaling.
    """
    if not bf16:
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
