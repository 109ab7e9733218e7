"""What a loader is told beside its windows: what a batch is, and how it gets to the model.

Values only; nothing here is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from tapeline.windows.augment import Augmentation, described
from tapeline.windows.batch import Dtype, Layout
from tapeline.windows.scale import Normaliser


@dataclass(frozen=True, slots=True)
class Form:
    """What a batch is.

    Attributes:
        targets: the columns whose change is predicted. One number and one horizon give y
            `[batch]`, anything else `[batch, targets]`, all columns of the first horizon first.
        scale: scales x; y stays in the columns' own units.
        dtype: of x.
        layout: x as "flat" `[batch, T · columns]` or in "rows" `[batch, T, columns]`.
        augment: what x and y are put through, in float32 on the batch's device, before the cast.
    """

    targets: int | tuple[int, ...] = (0,)
    scale: Normaliser | None = None
    dtype: Dtype = "float32"
    layout: Layout = "flat"
    augment: tuple[Augmentation, ...] = ()

    def fingerprint(self) -> str:
        """Which form it is: xxh3-64 over all of it; functions count by their names."""
        steps = [described(step) for step in self.augment]
        digest = xxhash.xxh3_64(repr((self.targets, self.dtype, self.layout, steps)).encode())
        for factor in self.scale.factors() if self.scale else ():
            digest.update(factor.data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Feed:
    """How batches get to the model; changes no bit of them on one kind of device.

    Attributes:
        depth: batches made ahead in a background thread; 0 makes each when it is asked for.
        device: where batches are wanted, as torch names it.
        resident: the whole store lies on the device and batches are gathered there. Nothing is
            made ahead then.
    """

    depth: int = 2
    device: str = "cpu"
    resident: bool = False
