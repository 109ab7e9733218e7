"""What a model keeps in Python, beside its parameters and buffers: read before and after a step.

Covers attributes of modules, buffers that are not saved, and of classes and files of the user's
own also their attributes and global names. Does not cover what closures hold.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from tapeline.checkpoint.state import tensor_bytes

Kept = dict[str, tuple[str, str]]
_MODULE_HAS = frozenset(vars(nn.Module()))  # what every module has: parameters, buffers, hooks
_DEPTH = 5
_SHOWN_CHARACTERS = 40
_NOT_THE_USERS = ("torch", "tapeline", "builtins")


def kept_outside(model: nn.Module) -> Kept:
    """Every value outside the state by its path: a digest, and how it is shown."""
    found: Kept = {}
    for path, value in _values(model):
        if (text := fingerprint(value)) is not None:
            found[path] = (xxhash.xxh3_64_hexdigest(text.encode()), _shown(value))
    return found


def changes(before: Kept, after: Kept) -> dict[str, str]:
    """The paths whose values differ, each with "before → after", or what it is that changed."""
    nothing = ("", "none")
    found = {}
    for path, (digest, shown) in after.items():
        was, was_shown = before.get(path, nothing)
        if was != digest:
            found[path] = (
                f"{was_shown} → {shown}" if was_shown != shown else f"{shown} that changed"
            )
    return found


def _values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        title = f"{name or 'model'} ({type(module).__name__})"
        for attribute, value in vars(module).items():
            if attribute not in _MODULE_HAS:
                yield f"attribute `{attribute}` of {title}", value
        for buffer in module._non_persistent_buffers_set:
            yield f"buffer `{buffer}` of {title}, which isn't saved", module._buffers[buffer]
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    own = {kind for kind in classes if kind.__module__.split(".")[0] not in _NOT_THE_USERS}
    for kind in sorted(own, key=lambda kind: kind.__qualname__):
        for attribute, value in vars(kind).items():
            if not attribute.startswith("__"):
                yield f"attribute `{attribute}` of class {kind.__qualname__}", value
    for file in sorted({kind.__module__ for kind in own}):
        for attribute, value in vars(sys.modules[file]).items():
            if not attribute.startswith("__"):
                yield f"global `{attribute}` of {file}", value


def fingerprint(value: Any, depth: int = _DEPTH) -> str | None:
    """A text that is equal for equal values; None for what can't be told, such as functions."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, nn.Module | type) or depth == 0:
        return None  # modules are looked through one by one
    for kind, read in _READERS:
        if isinstance(value, kind):
            return f"{type(value).__name__} {read(value)}"
    if isinstance(value, Mapping):
        return _joined("mapping", [part for pair in value.items() for part in pair], depth)
    if isinstance(value, set | frozenset):
        told = [text for item in value if (text := fingerprint(item, depth - 1))]
        return f"set {sorted(told)}"
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return _joined(type(value).__name__, value, depth)
    fields = getattr(value, "__dict__", None)
    if fields and not callable(value) and type(value).__module__ != "builtins":
        return _joined(
            type(value).__name__, [part for pair in fields.items() for part in pair], depth
        )
    return None


def _joined(kind: str, items: Any, depth: int) -> str:
    return f"{kind} {[fingerprint(item, depth - 1) for item in list(items)]}"


def _tensor(value: torch.Tensor) -> str:
    return f"{value.dtype} {list(value.shape)} {xxhash.xxh3_128_hexdigest(tensor_bytes(value))}"


def _array(value: np.ndarray) -> str:
    text = repr(value.tolist()) if value.dtype.hasobject else value.tobytes().hex()
    return f"{value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(text.encode())}"


_READERS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
    (torch.Generator, lambda generator: _tensor(generator.get_state())),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state(legacy=False))),
    (random.Random, lambda generator: repr(generator.getstate())),
)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
    return f"a {type(value).__name__}"
