"""The loader: batches of a store in an order, made ahead of the training step.

Covers what is made when, epochs, ranks, devices and the state. Does not cover how a batch is
gathered (`batch.py`, `device.py`) or in what order (`order.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.augment import Augmentation, Draws, augmented
from tapeline.windows.batch import BatchSource, Dtype, Layout
from tapeline.windows.device import TorchGather
from tapeline.windows.index import WindowIndex, whole
from tapeline.windows.order import Order, Sequential, Shuffled
from tapeline.windows.plan import Plan, Tail
from tapeline.windows.prefetch import HELD, Prefetcher, in_turn
from tapeline.windows.scale import Normaliser
from tapeline.windows.slot import Batch, Slot
from tapeline.world import World

_ALONE = World()


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


class Loader(IterableDataset[Batch]):
    """Iterates batches x and y of tensors, and a mask with tail "pad" (True for real windows).

    With tail "seamless" it has no end; otherwise an iteration ends with the epoch and the next
    one is the next epoch. A batch's memory is written again once the second next one is asked
    for: copy what must stay longer. The position counts delivered batches only.

    Args:
        shards: the store.
        index: its windows; decides T and horizons.
        order: in which they come.
        batch: windows in a global batch, over all ranks.
        tail: what becomes of an epoch's end, see `Plan`.
        form: what a batch is.
        feed: how it gets to the model.
        world: of which ranks this is one; each gets its equal slice of every global batch.

    Raises:
        WindowError: an argument outside its range, windows that the store doesn't hold, or ranks
            that don't divide the batch; while iterating: the loader was moved by someone else.
    """

    def __init__(
        self,
        shards: Shards,
        index: WindowIndex,
        order: Order | None = None,
        batch: int = 256,
        tail: Tail = "seamless",
        form: Form = Form(),
        feed: Feed = Feed(),
        world: World = _ALONE,
    ) -> None:
        horizon = index.horizons[0] if len(index.horizons) == 1 else index.horizons
        self.source = BatchSource(
            shards,
            index.T,
            horizon,
            form.targets,
            form.scale,
            "float32" if form.augment else form.dtype,
            form.layout,
        )
        self.source.check(index)
        self.index, self.form, self.feed, self.world = index, form, feed, world
        self.order: Order = Shuffled() if order is None else order
        self.plan = Plan(index.num_windows, batch, tail)
        whole("prefetch depth", feed.depth, 0)
        if batch % world.size:
            raise WindowError(
                "batch",
                expected=f"a multiple of the {world.size} ranks, whose gradients weigh the same",
                found=str(batch),
                fix="Choose another batch or another number of ranks",
            )
        self._device = torch.device(feed.device)
        self._blocks = self.source.blocks(index)
        self._position = 0
        self._torch: TorchGather | None = None
        self._kernel: threading.Thread | None = None
        self._lock = threading.Lock()
        self._open: list[Prefetcher[Slot]] = []

    @property
    def position(self) -> int:
        """Windows delivered to all ranks since the start of epoch 0; what was dropped counts."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch begins in."""
        return self._position // self.plan.num

    def skip_to(self, position: int) -> None:
        """Go to another position, forwards or back."""
        self._position = whole("position", position, 0)

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: with tail "seamless", since there is no end.
        """
        if self.plan.tail == "seamless":
            raise TypeError("a Loader with tail 'seamless' has no end, so no length")
        return self.plan.batches

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the position on; the thread ends with the iterator."""
        if get_worker_info() is not None:
            raise WindowError(
                "loader in a DataLoader",
                expected="num_workers=0",
                found="a worker process, of which each would deliver all batches",
                fix="Set num_workers=0; the loader reads ahead in a thread of its own",
            )
        position, seed = self._position, self.order.seed
        count = None if self.plan.tail == "seamless" else self.plan.left(position)
        with contextlib.closing(self._batches(position, count)) as batches:
            for batch in batches:
                if (self._position, self.order.seed) != (position, seed):
                    raise WindowError(
                        "loader",
                        expected=f"to be at position {position:,} of seed {seed}",
                        found=f"position {self._position:,} of seed {self.order.seed}",
                        fix="Set its state before iterating, and iterate it once at a time",
                    )
                position = self._position = self.plan.after(position)
                yield batch

    def _batches(self, position: int, count: int | None) -> Generator[Batch, None, None]:
        if self.feed.resident:
            numbers = itertools.count() if count is None else range(count)
            yield from (self._on_device(position + n * self.plan.batch) for n in numbers)
            return

        def fill(number: int, slot: Slot) -> None:
            self._fill(position + number * self.plan.batch, slot)

        size = self.plan.batch // self.world.size
        slots = [Slot(self.source, size, self._device) for _ in range(HELD + self.feed.depth)]
        if self.feed.depth == 0:
            yield from (slot.receive() for slot in in_turn(fill, slots, count))
            return
        prefetcher = Prefetcher(fill, slots, count)
        self._open.append(prefetcher)
        try:
            yield from (slot.receive() for slot in prefetcher)
        finally:
            prefetcher.close()
            self._open.remove(prefetcher)

    def _fill(self, position: int, slot: Slot) -> None:
        """Make the batch at a position in a slot: gather, send, augment, cast."""
        slot.wait()
        start, stop = self.plan.part(position, self.world)
        if self._kernel_is_loaded():
            self._draw(start, stop, slot)
        elif stop > start:
            slot.put(*self._gather(torch.device("cpu"))(torch.from_numpy(self._rows(start, stop))))
        self._mark_missing(start, stop, slot.y)
        slot.send(stop - start, partial(self._finished, start))

    def _on_device(self, position: int) -> Batch:
        """The batch at a position from the store on the device."""
        start, stop = self.plan.part(position, self.world)
        rows = torch.from_numpy(self._rows(start, stop)).to(self._device)
        x, y = self._gather(self._device)(rows)
        missing = np.zeros(tuple(y.shape), np.float32)
        if self._mark_missing(start, stop, missing):
            y += torch.from_numpy(missing).to(self._device)
        return self._finished(start, x, y)

    def _finished(self, start: int, x: Tensor, y: Tensor) -> Batch:
        """The batch as it is delivered, from x and y of the positions from `start` on."""
        if self.form.augment:
            draws = Draws(self.order.seed, start, len(x), x.device)
            windows = x.view(len(x), self.index.T, self.source.num_columns)
            windows, y = augmented(self.form.augment, windows, y, draws)
            x = windows.reshape(x.shape)
            if self.form.dtype == "bfloat16":
                x = x.to(torch.bfloat16)
        if self.plan.tail != "pad":
            return x, y
        real = torch.ones(len(x), dtype=torch.bool, device=x.device)
        lacking = self.plan.batch // self.world.size - len(x)
        if not lacking:
            return x, y, real
        return tuple(torch.cat([p, p.new_zeros(lacking, *p.shape[1:])]) for p in (x, y, real))

    def _kernel_is_loaded(self) -> bool:
        """Whether the kernel can be used without waiting.

        Loading it takes a quarter of a second, and compiling it some seconds where it never ran.
        Torch gathers the same bits meanwhile, so that the first batch is there at once.
        """
        with self._lock:
            if self._kernel is None:
                # Not a daemon: a process must not end while machine code is being made.
                self._kernel = threading.Thread(
                    target=self._load_kernel, name="tapeline-kernel", daemon=False
                )
                return False
            if self._kernel.ident is None:
                self._kernel.start()
            return not self._kernel.is_alive()

    def _load_kernel(self) -> None:
        x, y = self.source.empty(1)
        for draw in self.order.draws(self.plan.num, 0, 0, 1):
            self.source.draw(draw, self._blocks, x, y)

    def _draw(self, start: int, stop: int, slot: Slot) -> None:
        done = 0
        for span in self.plan.spans(start, stop):
            for draw in self.order.draws(self.plan.num, *span):
                to = done + draw.positions
                self.source.draw(draw, self._blocks, slot.x[done:to], slot.y[done:to])
                done = to

    def _windows(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Sessions and first rows of the windows at positions, as the order and the index say."""
        spans = self.plan.spans(start, stop)
        num = self.plan.num
        pieces = [self.order.windows(num, *span, compiled=False) for span in spans]
        return self.index.locate(np.concatenate([np.empty(0, np.int64), *pieces]))

    def _rows(self, start: int, stop: int) -> Int64Array:
        sessions, starts = self._windows(start, stop)
        rows: Int64Array = self.source.shards.offsets[sessions] + starts
        return rows

    def _mark_missing(self, start: int, stop: int, y: Float32Array) -> bool:
        """Write NaN over targets that don't exist; whether there can be any."""
        if self.index.targets == "all":
            return False
        missing = self.index.missing(*self._windows(start, stop))
        by_horizon = y[: stop - start].reshape(*missing.shape, -1)
        by_horizon[missing] = np.nan
        return True

    def _gather(self, device: torch.device) -> TorchGather:
        if self._torch is None:
            self._torch = TorchGather(self.source, device)
        return self._torch

    def __enter__(self) -> Loader:
        """The loader; its threads end with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every iteration and its thread; may be called again."""
        for prefetcher in list(self._open):
            prefetcher.close()

    def __getstate__(self) -> Any:
        raise WindowError(
            "loader",
            expected="to stay in its process",
            found="an attempt to pickle or copy it, as worker processes do",
            fix="Set num_workers=0, or build a loader in each process",
        )

    def state(self) -> dict[str, Any]:
        """Everything that decides the rest of the order, in at most about 100 bytes of JSON."""
        return self._state_at(self._position)

    def state_after(self, num_batches: int) -> dict[str, Any]:
        """The state once `num_batches` were delivered from the start of epoch 0.

        For loops that ask for a batch more than they have trained on, as Accelerate's does.
        """
        return self._state_at(self.plan.start_of(whole("num_batches", num_batches, 0)))

    def _state_at(self, position: int) -> dict[str, Any]:
        return {"position": position, "seed": self.order.seed, "of": " ".join(self._identity())}

    def _identity(self) -> tuple[str, ...]:
        data, windows = self.source.shards.fingerprint, self.index.fingerprint()
        shape = f"T{self.index.T}", f"batch{self.plan.batch}", f"{self.plan.num}"
        return self.order.name, *shape, windows[:8], data[:8]

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken; the order's seed is taken over too.

        The number of ranks, the tail, the depth, the device and the form may be others.

        Raises:
            WindowError: the state belongs to other data, windows, another batch or another
                order; nothing is changed then.
        """
        position, seed, of = (state.get(name) for name in ("position", "seed", "of"))
        saved, ours = str(of).split(" "), self._identity()
        if type(position) is not int or type(seed) is not int or len(saved) != len(ours):
            raise WindowError(
                "loader state",
                expected="a whole position and seed, and what they are of",
                found=f"position {position}, seed {seed}, of {of}",
                fix="Pass what `Loader.state_dict()` returned",
            )
        differing = [n for n, (a, b) in enumerate(zip(saved, ours, strict=True)) if a != b]
        if differing:
            raise WindowError(
                "loader state",
                expected=f"one of {_told(ours, differing)}, as this loader has",
                found=f"one of {_told(saved, differing)}",
                fix="Resume with the data, split, T, batch and order it was saved under, or start "
                "anew",
            )
        if position < 0:
            raise WindowError(
                "loader state",
                expected="a position of 0 or more",
                found=str(position),
                fix="Pass what `Loader.state_dict()` returned",
            )
        if not isinstance(self.order, Sequential):
            self.order = replace(self.order, seed=seed)  # type: ignore[type-var]
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """The same as `state`, under the name that torch and Lightning ask for."""
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same as `set_state`."""
        self.set_state(state)


def _told(identity: Sequence[str], which: list[int]) -> str:
    """Parts of what a state is of, in words."""
    order, length, batch, num, windows, data = identity
    words = (
        f"order {order}",
        f"T {length.removeprefix('T')}",
        f"batch {batch.removeprefix('batch')}",
        f"{num} windows",
        f"windows {windows}",
        f"data {data}",
    )
    return ", ".join(words[n] for n in which)
