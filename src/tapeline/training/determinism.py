"""What makes a step repeatable: torch's switches, and draws keyed by what they belong to.

Covers setting and checking the switches, the record of them, the operations that refuse, and what
the switch costs. Draws of Python's `random` and of NumPy in a forward pass are not keyed: a model
that needs noise takes it from torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tapeline.errors import TrainingError
from tapeline.windows.order import mix

_WORKSPACES = (":4096:8", ":16:8")  # the two that cuBLAS promises repeatable results with
_REFUSAL = "does not have a deterministic implementation"


def make_deterministic(threads: int) -> dict[str, Any]:
    """Set, for this process, everything that the bits of a step depend on, and check that it took.

    Deterministic algorithms only (an operation that has none raises), the cuBLAS workspace they
    need, no TF32, and a fixed number of threads: another number sums in another order.

    Returns:
        The record of what is set now, see `determinism_record`.

    Raises:
        TrainingError: the environment has a cuBLAS workspace without repeatable results.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)
    found = determinism_record()
    workspace = found["cublas_workspace"]
    if workspace not in _WORKSPACES:
        raise TrainingError(
            "environment variable CUBLAS_WORKSPACE_CONFIG",
            expected=" or ".join(_WORKSPACES),
            found=repr(workspace),
            fix="Unset it, or set it to one of them before the process starts",
        )
    check_determinism({**found, **_WANTED, "threads": threads})
    return found


_WANTED = {
    "deterministic_algorithms": True,
    "warn_only": False,
    "cudnn_benchmark": False,
    "cudnn_tf32": False,
    "matmul_precision": "highest",
    "matmul_tf32": False,
}


def determinism_record() -> dict[str, Any]:
    """Every setting of this process that the bits of a step depend on, as JSON can hold it.

    The version of torch and the processor's instruction set are among them: the contract holds on
    one platform.
    """
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def check_determinism(recorded: Mapping[str, Any]) -> None:
    """Raise if this process would compute other bits than the one a record was taken from.

    Raises:
        TrainingError: a setting differs; each is named with both values.
    """
    if differing := differences(recorded):
        raise TrainingError(
            "determinism",
            expected=", ".join(f"{name} {then}" for name, (then, _) in differing.items())
            + ", as recorded",
            found=", ".join(f"{name} {now}" for name, (_, now) in differing.items()),
            fix="Go back to what is recorded, or start another run: these bits would be others",
        )


def differences(recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from a record, each with the recorded and the present value."""
    here = determinism_record()
    return {n: (recorded.get(n), here[n]) for n in here if here[n] != recorded.get(n)}


def refused_operations(step: Callable[[], object]) -> list[str]:
    """The operations of `step` that have no deterministic implementation, each once, sorted.

    Calls `step` once, in a mode where they warn instead of raising. Settings are put back.
    """
    with warnings.catch_warnings(record=True) as caught, _algorithms(True, warn_only=True):
        warnings.simplefilter("always")
        step()
    texts = [str(warning.message) for warning in caught]
    return sorted({text.split(_REFUSAL)[0].strip() for text in texts if _REFUSAL in text})


def refusal(model: nn.Module, operations: Sequence[str]) -> TrainingError:
    """The error for a model with operations that have no deterministic implementation."""
    return TrainingError(
        f"model {type(model).__name__}",
        expected="operations that repeat their bits",
        found=f"{', '.join(operations)}, which torch can't promise that of",
        fix="Write the model with others; the documentation of "
        "torch.use_deterministic_algorithms lists those that don't repeat",
    )


@contextlib.contextmanager
def refusals_told(model: nn.Module) -> Iterator[None]:
    """Raise `refusal` for the operation with which torch ends the block."""
    try:
        yield
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        raise refusal(model, [str(error).split(_REFUSAL)[0].strip()]) from error


def determinism_cost(step: Callable[[], object], repetitions: int = 20) -> dict[str, float]:
    """What the switch costs on `step`: medians with and without it, interleaved, and their ratio.

    Calls `step` 2 · `repetitions` times and twice to warm up. Settings are put back.

    Returns:
        `deterministic_ms`, `free_ms` and `ratio`, the first over the second.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(repetitions + 1):
        for deterministic in times:
            with _algorithms(deterministic, warn_only=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                begin = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if repetition:
                    times[deterministic].append(time.perf_counter() - begin)
    with_it, without = (statistics.median(found) for found in times.values())
    return {
        "deterministic_ms": 1e3 * with_it,
        "free_ms": 1e3 * without,
        "ratio": with_it / without,
    }


@contextlib.contextmanager
def _algorithms(deterministic: bool, *, warn_only: bool) -> Iterator[None]:
    before = determinism_record()
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(
            before["deterministic_algorithms"], warn_only=before["warn_only"]
        )
        torch.backends.cudnn.benchmark = before["cudnn_benchmark"]


def seed_generators(seed: int) -> None:
    """Seed the process's generators, for models and layers that draw from them unasked."""
    random.seed(mix(seed, 1))
    np.random.seed(mix(seed, 2) % 2**32)  # noqa: NPY002 - the global one is what others draw from
    torch.manual_seed(mix(seed, 3))


@contextlib.contextmanager
def keyed_draws(device: torch.device, seed: int, *key: int) -> Iterator[None]:
    """Within the block torch's draws are a function of (seed, key) and of nothing drawn before.

    Afterwards the generators are as they were, so nobody else's draws change.
    """
    with kept_draws(device) as set_key:
        set_key(seed, *key)
        yield


@contextlib.contextmanager
def kept_draws(device: torch.device) -> Iterator[Callable[..., None]]:
    """Give a function `(seed, *key)` that keys torch's draws from then on.

    After the block the generators are as they were. They are spoken to directly:
    `torch.manual_seed` takes 0.1 ms, most of it asking after other backends.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]

    def set_key(seed: int, *key: int) -> None:
        for generator in generators:
            generator.manual_seed(mix(seed, *key))

    try:
        yield set_key
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
