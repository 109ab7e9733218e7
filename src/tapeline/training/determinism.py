"""What makes a step repeatable: torch's switches, and draws keyed by what they belong to."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from tapeline.windows.order import mix


def make_deterministic(threads: int) -> None:
    """Set, for this process, everything that the bits of a step depend on.

    Deterministic algorithms only (an operation that has none raises), the cuBLAS workspace they
    need, no TF32, and a fixed number of threads: another number sums in another order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)


def seed_generators(seed: int) -> None:
    """Seed the process's generators, for models and layers that draw from them unasked."""
    random.seed(mix(seed, 1))
    np.random.seed(mix(seed, 2) % 2**32)  # noqa: NPY002 - the global one is what others draw from
    torch.manual_seed(mix(seed, 3))


@contextlib.contextmanager
def keyed_draws(device: torch.device, seed: int, *key: int) -> Iterator[None]:
    """Within the block torch's draws are a function of (seed, key) and of nothing drawn before.

    Afterwards the generators are as they were, so nobody else's draws change. The generators are
    spoken to directly: `torch.manual_seed` takes 0.1 ms, most of it asking after other backends.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(mix(seed, *key))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
