"""Some steps of a model written down call by call, so that two tellings of them can be compared.

Covers: what went into and came out of every module, gradients and losses as digests, and which
module moved a global generator of Python or NumPy. Torch's are keyed by the step.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from tapeline.checkpoint.state import tensor_bytes

OUTSIDE = "outside the model's forward pass"
BATCH = "the batch, its augmentation included"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was computed.

    Attributes:
        given, made: digests of what went in and came out; what went in is "" for gradients and
            the loss, which come of everything before.
    """

    step: int
    where: str
    given: str
    made: str


class Trace:
    """Collects entries while `watching`; hand its `step_done` to the loop as a hook."""

    def __init__(self, model: nn.Module, first: int) -> None:
        self.entries: list[Entry] = []
        self.moved: dict[str, str] = {}
        self._model = model
        self._step = first + 1
        self._open: list[dict[str, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Write down what the model does within the block."""
        before = _generators()
        hooks = []
        for name, module in self._model.named_modules():
            where = f"{name or 'model'} ({type(module).__name__})"
            hooks.append(module.register_forward_pre_hook(self._before))
            hooks.append(
                module.register_forward_hook(
                    lambda _, args, kwargs, out, where=where: self._after(
                        where, (args, kwargs), out
                    ),
                    with_kwargs=True,
                )
            )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        after = _generators()
        for name in before:
            if before[name] != after[name] and name not in self.moved:
                self.moved[name] = OUTSIDE

    def step_done(self, number: int, loss: Tensor) -> None:
        """The hook: step `number` is done."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                where = f"the backward pass (gradient of {name})"
                self.entries.append(Entry(number, where, "", _digest(parameter.grad)))
        self.entries.append(Entry(number, "the loss", "", _digest(loss)))
        self._step = number + 1

    def _before(self, _module: nn.Module, _args: Any) -> None:
        self._open.append(_generators())

    def _after(self, where: str, given: Any, made: Any) -> None:
        before, now = self._open.pop(), _generators()
        for name, state in now.items():
            if before[name] != state:
                self.moved.setdefault(name, where)  # the innermost ends first
        self.entries.append(Entry(self._step, where, _digest(given), _digest(made)))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {"entries": [asdict(entry) for entry in self.entries], "moved": self.moved}


def entries_of(told: Mapping[str, Any]) -> list[Entry]:
    """The entries of a trace as `as_dict` gives it."""
    return [Entry(**entry) for entry in told["entries"]]


def first_difference(one: list[Entry], other: list[Entry]) -> str | None:
    """What first made something else of the same; None if nothing did."""
    differing = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
    if not differing:
        return None
    first = differing[0][0]
    if not first.given:
        return first.where
    for mine, theirs in differing:
        # A module that was given something else is not at fault: whoever calls it may be.
        same = (mine.step, mine.where, mine.given) == (theirs.step, theirs.where, theirs.given)
        if same and mine.given:
            return mine.where
    return BATCH


def _generators() -> dict[str, str]:
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    numpy = f"{place} {xxhash.xxh3_64_hexdigest(np.asarray(words).tobytes())}"
    return {
        "np.random": numpy,
        "random": str(hash(random.getstate())),
    }


def _digest(value: Any) -> str:
    digest = xxhash.xxh3_128()
    for tensor in _tensors(value):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in _tensors(item))
