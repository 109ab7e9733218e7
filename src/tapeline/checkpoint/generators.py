"""The states of every random generator a training step may draw from.

Covers: Python's `random`, NumPy's global legacy generator, torch on the CPU and on every CUDA
device. Does not cover generators that a program makes itself: hand those over as `extra`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tapeline.errors import CheckpointError


def capture_generators() -> dict[str, Any]:
    """The state of every global generator, as tensors and plain data."""
    version, words, gauss_next = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss_next},
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (user code may draw from it)
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def check_generators(saved: Mapping[str, Any], devices: set[torch.device]) -> None:
    """Refuse states that this installation or the model's `devices` can't continue from.

    A device that was there at the save and is not here is no fault: nothing draws from it.

    Raises:
        CheckpointError: another version of a generator, or no state for a device in use.
    """
    here = capture_generators()
    for name, found, expected in (
        ("python", saved["python"]["version"], here["python"]["version"]),
        ("numpy", saved["numpy"]["bit_generator"], here["numpy"]["bit_generator"]),
        ("torch", f"{len(saved['torch'])} bytes", f"{len(here['torch'])} bytes"),
    ):
        if found != expected:
            raise CheckpointError(
                f"generators/{name}",
                expected=f"a state of the kind this installation has ({expected})",
                found=str(found),
                fix="Resume with the versions this checkpoint was made with",
            )
    for device in sorted(devices, key=str):
        if device.type == "cuda" and (device.index or 0) >= len(saved["cuda"]):
            raise CheckpointError(
                "generators/cuda",
                expected=f"a generator state for {device}, where the model is",
                found=f"{len(saved['cuda'])} device states in the checkpoint",
                fix="Move the model to a device that the checkpoint has a generator state for",
            )


def restore_generators(saved: Mapping[str, Any]) -> None:
    """Set every global generator to its saved state."""
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    # torch reads these bytes as wider numbers, so they must not lie at an odd place in a file.
    torch.set_rng_state(saved["torch"].clone())
    for index, cuda in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda.clone(), index)
