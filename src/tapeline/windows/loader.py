"""The loader: batches of a store in an order, made ahead of the training step.

Covers what is made when, epochs, ranks, devices and the state. Does not cover how a batch is
gathered (`batch.py`, `device.py`) or in what order (`order.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tapeline.errors import WindowError
from tapeline.session import Float32Array, Int64Array
from tapeline.store import Shards
from tapeline.windows.augment import Draws, augmented
from tapeline.windows.batch import BatchSource
from tapeline.windows.device import TorchGather
from tapeline.windows.drawn import Drawn
from tapeline.windows.form import Feed, Form
from tapeline.windows.identity import checked_state, identity_of
from tapeline.windows.index import WindowIndex, whole
from tapeline.windows.order import Order, Sequential, Shuffled
from tapeline.windows.plan import Plan, Tail
from tapeline.windows.prefetch import HELD, Prefetcher, in_turn
from tapeline.windows.slot import Batch, Slot, ring
from tapeline.world import World

_ALONE, _PLAIN, _AHEAD = World(), Form(), Feed()


class Loader(IterableDataset[Batch]):
    """Iterates batches x and y of tensors, and a mask with tail "pad" (True for real windows).

    With tail "seamless" it has no end; otherwise an iteration ends with the epoch and the next
    one is the next epoch. A batch's memory is written again once the second next one is asked
    for, unless its tensors are still held; where only a view of them is (`x[:8]`, `x.numpy()`),
    copy it. The position counts delivered batches only.

    Args:
        shards: the store.
        index: its windows; decides T and horizons.
        order: in which they come.
        batch: windows in a global batch, over all ranks.
        tail: what becomes of an epoch's end, see `Plan`.
        form: what a batch is.
        feed: how it gets to the model.
        world: of which ranks this is one; each gets its equal slice of every global batch.

    Attributes:
        num_made, making_ns: batches made so far, also ahead, and the time that took by itself.

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
        form: Form = _PLAIN,
        feed: Feed = _AHEAD,
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
        self.order: Order = _checked_order(order)
        self.plan = Plan(index.num_windows, batch, tail)
        whole("prefetch depth", feed.depth, 0)
        if batch % world.size:
            raise WindowError(
                "batch",
                expected=f"a multiple of the {world.size} ranks, whose gradients weigh the same",
                found=str(batch),
                fix="Choose another batch or another number of ranks",
            )
        self._device = _checked_device(feed.device)
        self._position = 0
        self.num_made = self.making_ns = 0
        self._torch: TorchGather | None = None
        self._kernel: threading.Thread | None = None
        self._kernel_loaded = False
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

        drawn = self._drawn()

        def fill(number: int, slot: Slot) -> None:
            began_ns = time.perf_counter_ns()
            self._fill(position + number * self.plan.batch, slot, drawn)
            self.making_ns += time.perf_counter_ns() - began_ns
            self.num_made += 1

        size = self.plan.batch // self.world.size
        slots = ring(self.source, size, self._device, HELD + self.feed.depth)
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

    def _drawn(self) -> Drawn:
        return Drawn(self.source, self.index, self.order)

    def _fill(self, position: int, slot: Slot, drawn: Drawn) -> None:
        """Make the batch at a position in a slot: gather, send, augment, cast."""
        slot.free()
        start, stop = self.plan.part(position, self.world)
        if self._kernel_loaded or self._kernel_is_loaded():
            drawn(start, stop, slot.x, slot.y)
        elif stop > start:
            slot.put(*self._gather(torch.device("cpu"))(torch.from_numpy(self._rows(start, stop))))
        self._mark_missing(start, stop, slot.y)
        as_it_is = not self.form.augment and self.plan.tail != "pad"
        slot.send(stop - start, None if as_it_is else partial(self._finished, start))

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
            self._kernel_loaded = not self._kernel.is_alive()
            return self._kernel_loaded

    def _load_kernel(self) -> None:
        self._drawn()(0, 1, *self.source.empty(1))

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
        return {"position": position, "seed": self.order.seed, "of": " ".join(self._identity)}

    @cached_property
    def _identity(self) -> tuple[str, ...]:
        return identity_of(self.source.shards, self.index, self.order, self.plan, self.form)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken; the order's seed is taken over too.

        The number of ranks, the depth and the device may be others, and the store may have grown.

        Raises:
            WindowError: the state belongs to other data, windows, another batch, tail, order or
                form; nothing is changed then.
        """
        position, seed = checked_state(state, self._identity)
        if not isinstance(self.order, Sequential):
            self.order = replace(self.order, seed=seed)  # type: ignore[type-var]
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """The same as `state`, under the name that torch and Lightning ask for."""
        return self.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same as `set_state`."""
        self.set_state(state)


def _checked_order(order: object) -> Order:
    if order is None:
        return Shuffled()
    if not isinstance(order, Order):
        raise WindowError(
            "order",
            expected="an order, such as Shuffled(seed=0)",
            found=repr(order)[:80],
            fix="Pass Shuffled(), WithReplacement(), Sequential() or Eras()",
        )
    return order


def _checked_device(name: str) -> torch.device:
    """The device of that name, once something lies on it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        told = str(error).splitlines()[0].rstrip(".")
        raise WindowError(
            f"device {name!r}",
            expected="one that torch can use here, such as cpu",
            found=told,
            fix="Name another device, or install torch and the driver for this one",
        ) from None
