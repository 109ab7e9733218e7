"""Augmentation: what a batch is varied by, as a function of (seed, position) and nothing else.

Covers noise, scaling, column dropout, and any function of the same form. A draw is keyed by the
window's position in the run, not by the batch or the process: a resumed run and any number of
ranks draw the same bits. They come from integer arithmetic, so every device draws the same too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tapeline.errors import WindowError
from tapeline.windows.order import mix

_GAMMA, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BYTES = 0x00FF00FF00FF00FF
# The sum of eight bytes, each uniform on 0…255: its mean and its standard deviation.
_MEAN, _STD = 8 * 127.5, (8 * (256**2 - 1) / 12) ** 0.5


class Draws:
    """Random numbers for the windows of one batch.

    Each call gives further numbers; the same calls in the same order give the same.

    Args:
        seed: of the run's order.
        first: position of the batch's first window since the start of the run.
        batch: how many windows.
        device: where the numbers are wanted.
    """

    def __init__(self, seed: int, first: int, batch: int, device: torch.device) -> None:
        self._seed = seed
        self._calls = 0
        self._positions = torch.arange(first, first + batch, device=device)

    def uniform(self, *shape: int) -> Tensor:
        """Float32 `[batch, *shape]`, uniform on [0, 1) in steps of 2^-24."""
        words = self._words(shape)
        return ((words >> 40) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """Float32 `[batch, *shape]`, of mean 0 and standard deviation 1, nearly normal.

        The sum of eight uniform bytes: exact on every device, which logarithms and cosines are
        not. Nothing lies beyond 4.88; the excess kurtosis is −0.15.
        """
        words = self._words(shape)
        pairs = (words & _BYTES) + ((words >> 8) & _BYTES)
        sums = (pairs * 0x0001000100010001 >> 48) & 0xFFFF
        return sums.to(torch.float32).sub_(_MEAN).mul_(1.0 / _STD)

    def _words(self, shape: tuple[int, ...]) -> Tensor:
        """Int64 `[batch, *shape]`: splitmix64 of (seed, call, position, place)."""
        self._calls += 1
        key = _signed(mix(self._seed, 1 << 62, self._calls))
        rows = _splitmix_((self._positions ^ key).mul_(_MIX_1))
        places = torch.arange(1, 1 + _product(shape), device=rows.device).mul_(_GAMMA)
        return _splitmix_(rows[:, None] + places).view(-1, *shape)


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _splitmix_(words: Tensor) -> Tensor:
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        # Torch shifts int64 with its sign: the mask makes it the unsigned shift.
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        words *= factor
    return words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


Augmentation = Callable[[Tensor, Tensor, Draws], tuple[Tensor, Tensor]]
"""Takes x float32 `[batch, T, columns]` (its own memory, so it may be written to), y and draws;
returns x and y of the same shapes. Must treat each window by itself."""


def _check_std(std: float) -> None:
    if not 0.0 <= std < float("inf"):
        raise WindowError(
            "std of an augmentation",
            expected="a finite number, 0 or more",
            found=str(std),
            fix="Take 0.01 for a hundredth of a column's deviation",
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """Adds to each value noise of standard deviation `std`, in the units of the scaled x.

    Raises:
        WindowError: `std` is negative or not finite.
    """

    std: float

    def __post_init__(self) -> None:
        _check_std(self.std)

    def __call__(self, x: Tensor, y: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """See `Augmentation`."""
        return x.add_(draws.normal(*x.shape[1:]).mul_(self.std)), y


@dataclass(frozen=True, slots=True)
class Scaling:
    """Multiplies each window by 1 + noise of standard deviation `std`; y is left.

    Raises:
        WindowError: `std` is negative or not finite.
    """

    std: float

    def __post_init__(self) -> None:
        _check_std(self.std)

    def __call__(self, x: Tensor, y: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """See `Augmentation`."""
        return x.mul_(draws.normal(1, 1).mul_(self.std).add_(1.0)), y


@dataclass(frozen=True, slots=True)
class ColumnDropout:
    """Sets each column of each window to 0 with probability `share`; the rest is left.

    Raises:
        WindowError: `share` is not a probability.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise WindowError(
                "share of columns dropped",
                expected="a probability, 0 to 1",
                found=str(self.share),
                fix="Take 0.1 for a tenth",
            )

    def __call__(self, x: Tensor, y: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """See `Augmentation`."""
        return x.masked_fill_(draws.uniform(1, x.shape[2]) < self.share, 0.0), y


_KNOWN: dict[str, type[Any]] = {
    "noise": Noise,
    "scaling": Scaling,
    "column_dropout": ColumnDropout,
}


def named(name: str, **arguments: Any) -> Augmentation:
    """An augmentation by name: noise, scaling, column_dropout, or `package.module:function`.

    Args:
        name: which.
        arguments: of the known ones, such as `std`; of a function, those that stay the same.

    Raises:
        WindowError: there is none of that name, or it takes other arguments.
    """
    if name in _KNOWN:
        try:
            known: Augmentation = _KNOWN[name](**arguments)
        except TypeError as error:
            raise WindowError(
                f"augmentation {name}",
                expected=f"arguments {', '.join(_KNOWN[name].__annotations__)}",
                found=str(error),
                fix="Correct the arguments",
            ) from None
        return known
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise WindowError(
            f"augmentation {name}",
            expected=f"{', '.join(_KNOWN)}, or an importable `package.module:function`",
            found=str(error),
            fix="Install the package, or run from the folder that holds the module",
        ) from None
    if not callable(found):
        raise WindowError(
            f"augmentation {name}",
            expected="a function of x, y and draws",
            found=type(found).__name__,
            fix="Name a function",
        )
    return partial(found, **arguments) if arguments else found


def augmented(
    steps: tuple[Augmentation, ...], x: Tensor, y: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """A batch put through augmentations in order.

    Raises:
        WindowError: one of them changes a shape or dtype.
    """
    for step in steps:
        shapes = (x.shape, x.dtype), (y.shape, y.dtype)
        x, y = step(x, y, draws)
        found = (x.shape, x.dtype), (y.shape, y.dtype)
        if found != shapes:
            raise WindowError(
                f"augmentation {getattr(step, '__name__', type(step).__name__)}",
                expected="x and y of the shape and dtype they had: "
                + " and ".join(_told(*one) for one in shapes),
                found=" and ".join(_told(*one) for one in found),
                fix="Return what was given, changed in its values only",
            )
    return x, y


def described(step: Augmentation) -> str:
    """A name for an augmentation, the same in every process: its module, name and arguments."""
    if isinstance(step, partial):
        arguments = *map(repr, step.args), *(f"{k}={v!r}" for k, v in sorted(step.keywords.items()))
        return f"{described(step.func)}({', '.join(arguments)})"
    kind = step if hasattr(step, "__qualname__") else type(step)
    name = f"{kind.__module__}:{kind.__qualname__}"
    return f"{name} {step!r}" if is_dataclass(step) else name


def _told(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
