"""The memory of batches: used again, unless someone still holds what lies in it."""

from itertools import islice

import numpy as np
import pytest
import torch
from helpers_windows import arrays
from torch.utils.data import DataLoader

from tapeline.windows import Feed, Form, Loader, Noise, Normaliser, Shuffled, WindowIndex
from tapeline.windows.memory import on_large_pages
from tapeline.windows.prefetch import HELD

DEPTHS = pytest.mark.parametrize("depth", [0, 2])
FORMS = {
    "plain": (Form(0), "seamless"),
    "bfloat16": (Form(0, dtype="bfloat16"), "seamless"),
    "augmented": (Form(0, augment=(Noise(0.1),)), "seamless"),
    "untouched": (Form(0, augment=(lambda x, y, _: (x, y),)), "seamless"),
    "padded": (Form(0), "pad"),
    "short": (Form(0), "short"),
}


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30, 25))


def loader_of(store, depth, form=FORMS["plain"][0], tail="seamless"):
    return Loader(store, WindowIndex(store, 4, 3), Shuffled(3), 8, tail, form, Feed(depth))


@DEPTHS
@pytest.mark.parametrize("kind", FORMS)
def test_batches_that_are_held_stay_as_they_are(store, kind, depth):
    with loader_of(store, depth, *FORMS[kind]) as one, loader_of(store, depth, *FORMS[kind]) as two:
        held = list(islice(one, 10))
        wanted = [tuple(part.clone() for part in batch) for batch in islice(two, 10)]
    for batch, other in zip(held, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


@DEPTHS
@pytest.mark.parametrize("of", [lambda x, y: (x, y), lambda x, _: (x,), lambda _, y: (y,)])
def test_any_of_its_tensors_holds_a_batch(store, of, depth):
    with loader_of(store, depth) as one, loader_of(store, depth) as two:
        held = [of(x, y) for x, y in islice(one, 10)]
        wanted = [of(x.clone(), y.clone()) for x, y in islice(two, 10)]
    for parts, others in zip(held, wanted, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(parts, others, strict=True))


@DEPTHS
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "padded", "short"])
def test_memory_is_that_of_a_ring_while_nobody_holds_it(store, kind, depth):
    form, tail = FORMS[kind]
    seen = set()
    with loader_of(store, depth, form, tail) as ours:
        for batch in islice(ours, 9):  # whole ones: what is padded is made anew
            seen.add(batch[0].data_ptr())
    assert len(seen) == HELD + depth


@DEPTHS
def test_a_dataloader_with_a_batch_size_gets_each_batch_as_it_was(store, depth):
    with loader_of(store, depth) as one, loader_of(store, depth) as two:
        together = next(iter(DataLoader(one, batch_size=6)))
        apart = [tuple(part.clone() for part in batch) for batch in islice(two, 6)]
    for part, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(part, torch.stack(parts))


def test_a_batch_is_saved_without_its_neighbours(store, tmp_path):
    index = WindowIndex(store, 4, 3)
    ours = Loader(store, index, batch=8, form=Form(0), feed=Feed(0))
    x, _ = next(iter(ours))
    torch.save(x, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 2 * x.nbytes + 2000


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 21) + 7])
def test_memory_is_as_long_as_asked_for_and_begins_a_page_where_it_is_large(num_bytes):
    memory = on_large_pages(num_bytes)
    memory[:] = 7
    assert (memory.shape, memory.dtype) == ((num_bytes,), np.uint8)
    assert num_bytes < 1 << 20 or memory.ctypes.data % (1 << 21) == 0


def test_a_small_store_is_scaled_once_to_the_same_bits(new_store):
    wide = new_store(arrays(3000, columns=100))  # 1.2 MB: on large pages
    index = WindowIndex(wide, 4, 3)
    scale = Normaliser.fit(wide, index)
    x, _ = next(iter(Loader(wide, index, batch=64, form=Form(0, scale), feed=Feed(0))))
    plain, _ = next(iter(Loader(wide, index, batch=64, form=Form(0), feed=Feed(0))))
    assert x.numpy().tobytes() == scale(plain.numpy()).tobytes()
