"""Nested state as JSON beside tensors, and back.

Covers: what `state_dict()` and `state()` methods return, namely tensors, NumPy arrays, numbers
(also infinite and NaN), text, None, and lists, tuples, dicts (any plain keys) and Counters of
these. Does not cover arbitrary objects: they would need pickle, which is never loaded here.

A tensor is replaced by `{"$tensor": name}`. Two names of the same memory (tied parameters) refer
to one tensor, so that the references also say what is tied. The order of a dict is not kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from tapeline.checkpoint.sharded import Share, is_split, share_of
from tapeline.errors import CheckpointError

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and str-keyed dicts of these

DTYPE_NAMES = {  # what the safetensors format can hold
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Flattener:
    """Collects the tensors of several trees under names that are paths into them.

    The tensors are detached, not copied: they share memory with what they were taken from. Of a
    DTensor it is the part that this rank holds.

    Attributes:
        tensors: what was found.
        shares: which part it is, for each DTensor.
        split: these DTensors themselves.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shares: dict[str, Share] = {}
        self.split: dict[str, Any] = {}
        self._names_by_memory: dict[tuple[object, ...], str] = {}

    def flatten(self, value: Any, name: str) -> Json:
        """`value` as JSON; its tensors go to `self.tensors` under names that start with `name`.

        Raises:
            CheckpointError: something in `value` is neither a tensor nor plain data.
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, np.generic):
            return self.flatten(value.item(), name)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._add(value.detach(), name)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {"$array": self._add(torch.from_numpy(native), name)}
        if isinstance(value, Mapping):
            return self._flatten_mapping(value, name)
        if isinstance(value, list | tuple):
            items = [self.flatten(item, f"{name}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        raise CheckpointError(
            name,
            expected="tensors, arrays, numbers, text, None, and lists, tuples and dicts of these",
            found=f"an object of {type(value).__module__}.{type(value).__qualname__}",
            fix="Leave it out of the state, or return one of these in its place",
        )

    def _flatten_mapping(self, value: Mapping[Any, Any], name: str) -> Json:
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {str(k): self.flatten(v, f"{name}/{_escape(k)}") for k, v in value.items()}
        pairs = [
            [self.flatten(k, name), self.flatten(v, f"{name}/{_escape(repr(k))}")]
            for k, v in sorted(value.items(), key=lambda item: repr(item[0]))
        ]
        return {"$counter" if isinstance(value, Counter) else "$items": pairs}

    def _add(self, tensor: Any, name: str) -> str:
        if not is_split(tensor):
            return self._add_dense(tensor, name, None)
        share = share_of(tensor)
        first = self._add_dense(tensor.to_local(), name, share)
        if first == name:
            self.shares[name] = share
            self.split[name] = tensor
        return first

    def _add_dense(self, tensor: torch.Tensor, name: str, share: Share | None) -> str:
        unsupported = (
            f"a tensor of layout {tensor.layout}"
            if tensor.layout is not torch.strided
            else "a tensor without data (device meta)"
            if tensor.is_meta
            else f"a tensor of {tensor.dtype}"
            if tensor.dtype not in DTYPE_NAMES
            else None
        )
        if unsupported:
            raise CheckpointError(
                name,
                expected="a dense tensor of a type that safetensors can hold",
                found=unsupported,
                fix="Convert it, or leave it out of the state",
            )
        if tensor.numel() == 0 and share is None:
            self.tensors[name] = tensor
            return name
        memory = (
            tensor.device,
            # An empty part has no address, but what is tied on one rank is tied on all.
            tensor.data_ptr() if tensor.numel() else tensor.untyped_storage()._cdata,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            share,
        )
        first = self._names_by_memory.setdefault(memory, name)
        self.tensors.setdefault(first, tensor)
        return first


def unflatten(value: Json, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The nested state that `Flattener.flatten` was given; `tensor(name)` finds each tensor."""
    if isinstance(value, list):
        return [unflatten(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (mark, inner), *_ = value.items()
        match mark:
            case "$tensor":
                return tensor(inner)
            case "$array":
                return tensor(inner).cpu().numpy()
            case "$float":
                return float(inner)
            case "$tuple":
                return tuple(unflatten(item, tensor) for item in inner)
            case "$items" | "$counter":
                pairs = {unflatten(k, tensor): unflatten(v, tensor) for k, v in inner}
                return pairs if mark == "$items" else Counter(pairs)
    return {key: unflatten(item, tensor) for key, item in value.items()}


def references(value: Json) -> Iterator[str]:
    """The names of all tensors that flattened state refers to, tied ones more than once."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("$tensor", "$array"):
                yield item
            else:
                yield from references(item)


def _escape(key: str) -> str:
    """A key as one segment of a name: `a/b` of a flat dict must not meet `b` within `a`."""
    return key.replace("%", "%25").replace("/", "%2F")
