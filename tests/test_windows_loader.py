"""The loader: the sampler's batches whatever the depth, and a thread that always ends."""

import gc
import random
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from helpers_windows import arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import BatchSource, Loader, WindowIndex, WindowSampler, make_batch, prefetch
from tapeline.windows.prefetch import Prefetcher

T, HORIZON, BATCH = 4, 3, 8
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 5])
AHEAD = pytest.mark.parametrize("depth", [1, 2, 5])


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30, 25))


def sampler(store, seed=3):
    return WindowSampler(store.lengths, T, HORIZON, BATCH, seed)


class Source(BatchSource):
    """Fails at one batch, or waits before each."""

    def __init__(self, store, fail_at=None, error=None, wait_s=0.0):
        super().__init__(store, T, HORIZON)
        self.fail_at, self.error, self.wait_s = fail_at, error, wait_s
        self.made = 0

    def batch(self, sessions, starts, out=None):
        time.sleep(self.wait_s)
        if self.made == self.fail_at:
            raise self.error
        self.made += 1
        return super().batch(sessions, starts, out)


def by_hand(store, batches, source=None):
    source = source or sampler(store)
    return [make_batch(store, *source.next(), T, HORIZON) for _ in range(batches)]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "tapeline-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert not prefetch_threads()


def copies(loader, num):
    batches = iter(loader)
    try:
        return [(x.copy(), y.copy()) for x, y in islice(batches, num)]
    finally:
        batches.close()


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for (x, y), (wanted_x, wanted_y) in zip(found, wanted, strict=True):
        assert x.tobytes() == wanted_x.tobytes()
        assert y.tobytes() == wanted_y.tobytes()


@DEPTHS
def test_batches_are_those_of_the_sampler_by_hand(store, depth):
    num = 3 * sampler(store).index.num_windows // BATCH  # over two seams between epochs
    loader = Loader(BatchSource(store, T, HORIZON), sampler(store), depth)
    assert_same(copies(loader, num), by_hand(store, num))


@DEPTHS
def test_the_sampler_counts_delivered_batches_only(store, depth):
    ours = sampler(store)
    source = Source(store)
    batches = iter(Loader(source, ours, depth))
    for delivered in range(1, 6):
        next(batches)
        assert ours.position == delivered * BATCH
    while source.made < 5 + max(0, depth - 1):  # reads ahead, and isn't counted
        time.sleep(0.001)
    assert ours.position == 5 * BATCH
    batches.close()
    assert ours.position == 5 * BATCH


@DEPTHS
def test_a_state_taken_while_iterating_resumes_where_delivery_stood(store, depth):
    ours = sampler(store)
    copies(Loader(BatchSource(store, T, HORIZON), ours, depth), 5)
    resumed = sampler(store, seed=99)
    resumed.set_state(ours.state())
    found = copies(Loader(BatchSource(store, T, HORIZON), resumed, depth), 4)
    assert_same(found, by_hand(store, 9)[5:])


def test_iterating_again_goes_on(store):
    loader = Loader(BatchSource(store, T, HORIZON), sampler(store))
    assert_same(copies(loader, 3) + copies(loader, 3), by_hand(store, 6))


class OddError(Exception):
    pass


@DEPTHS
@pytest.mark.parametrize(
    "error", [OddError("disk"), KeyboardInterrupt(), SystemExit(3), MemoryError()]
)
@pytest.mark.parametrize("fail_at", [0, 4])
def test_an_error_in_gathering_comes_as_itself_at_its_batch(store, depth, error, fail_at):
    ours = sampler(store)
    batches = iter(Loader(Source(store, fail_at, error), ours, depth))
    found = [(x.copy(), y.copy()) for x, y in islice(batches, fail_at)]
    assert_same(found, by_hand(store, fail_at))
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value is error
    assert ours.position == fail_at * BATCH
    assert not prefetch_threads()
    assert list(batches) == []


@DEPTHS
def test_a_stop_iteration_does_not_look_like_an_end(store, depth):
    batches = iter(Loader(Source(store, 2, StopIteration()), sampler(store), depth))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(batches)


@AHEAD
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_the_thread_ends_when_the_iterator_is_closed(store, depth, taken):
    batches = iter(Loader(BatchSource(store, T, HORIZON), sampler(store), depth))
    list(islice(batches, taken))
    assert len(prefetch_threads()) == min(taken, 1)
    batches.close()
    assert not prefetch_threads()


@AHEAD
def test_the_thread_ends_when_the_iterator_is_forgotten(store, depth):
    batches = iter(Loader(BatchSource(store, T, HORIZON), sampler(store), depth))
    next(batches)
    del batches
    gc.collect()
    assert not prefetch_threads()


@AHEAD
def test_the_thread_ends_when_the_consumer_fails(store, depth):
    def consume():
        for _ in Loader(BatchSource(store, T, HORIZON), sampler(store), depth):
            raise OddError

    with pytest.raises(OddError):
        consume()
    gc.collect()
    assert not prefetch_threads()


def test_a_dead_thread_is_noticed(monkeypatch):
    monkeypatch.setattr(prefetch, "_CHECK_S", 0.01)
    monkeypatch.setattr(Prefetcher, "_work", lambda self: None)
    prefetcher = Prefetcher(lambda number, slot: None, [[], []])
    with pytest.raises(RuntimeError) as error:
        next(iter(prefetcher))
    assert str(error.value) == (
        "the prefetch thread ended without a word; set prefetch depth 0 to see why"
    )
    prefetcher.close()
    prefetcher.close()


def test_what_a_thread_said_last_is_heard(monkeypatch):
    # The thread speaks and ends between the end of a wait and the question whether it lives.
    monkeypatch.setattr(prefetch, "_CHECK_S", 0.01)
    monkeypatch.setattr(Prefetcher, "_work", lambda self: None)
    prefetcher = Prefetcher(lambda number, slot: None, [[], []])
    prefetcher._thread.join()
    answers = iter([True, False])

    def is_alive():
        answer = next(answers)
        if not answer:
            prefetcher._ready.put(OddError("last words"))
        return answer

    monkeypatch.setattr(prefetcher._thread, "is_alive", is_alive)
    with pytest.raises(OddError, match="last words"):
        next(iter(prefetcher))
    prefetcher.close()


@settings(max_examples=25)
@given(
    st.integers(0, 4),
    st.lists(st.sampled_from([0.0, 0.0, 0.002]), min_size=3, max_size=12),
    st.sampled_from([0.0, 0.001]),
)
def test_a_batch_stays_as_it_is_until_the_next_is_asked_for(store, depth, waits_s, produce_s):
    batches = iter(Loader(Source(store, wait_s=produce_s), sampler(store), depth))
    wanted = by_hand(store, len(waits_s))
    for wait_s, batch, right in zip(waits_s, batches, wanted, strict=False):
        delivered = [array.copy() for array in batch]
        time.sleep(wait_s)
        assert_same([batch, delivered], [right, right])
    batches.close()


def test_memory_is_that_of_a_ring(store):
    batches = iter(Loader(BatchSource(store, T, HORIZON), sampler(store), depth=2))
    seen = {x.ctypes.data for x, _ in islice(batches, 50)}
    batches.close()
    assert len(seen) == 3


@DEPTHS
def test_a_sampler_moved_by_someone_else_is_noticed(store, depth):
    ours = sampler(store)
    batches = iter(Loader(BatchSource(store, T, HORIZON), ours, depth))
    next(batches)
    ours.next()
    with pytest.raises(WindowError) as error:
        next(batches)
    assert str(error.value) == (
        "loader: expected its sampler at position 8 of seed 3, found position 16 of seed 3. "
        "Set the sampler's state before iterating, and give each loader its own."
    )
    assert ours.position == 2 * BATCH


@DEPTHS
def test_a_seed_changed_by_someone_else_is_noticed(store, depth):
    ours = sampler(store)
    batches = iter(Loader(BatchSource(store, T, HORIZON), ours, depth))
    next(batches)
    ours.set_state(ours.state() | {"seed": 4})
    with pytest.raises(WindowError, match="position 8 of seed 3, found position 8 of seed 4"):
        next(batches)


@pytest.mark.parametrize("depth", [-1, 1.5])
def test_a_depth_is_a_whole_number(store, depth):
    with pytest.raises(WindowError) as error:
        Loader(BatchSource(store, T, HORIZON), sampler(store), depth)
    assert str(error.value) == (
        f"prefetch depth: expected a whole number, 0 or more, found {depth}. "
        "Choose another prefetch depth."
    )


def test_a_sampler_of_other_windows_is_refused_before_anything_is_read(store):
    with pytest.raises(WindowError, match="expected T 5 and horizon 3, as the batches have"):
        Loader(BatchSource(store, T + 1, HORIZON), sampler(store))
    longer = WindowSampler([40, 31, 25], T, HORIZON, BATCH)
    with pytest.raises(WindowError, match="windows of session 1: expected 7 valid rows"):
        Loader(BatchSource(store, T, HORIZON), longer)


@DEPTHS
def test_no_global_generator_is_drawn_from(store, depth):
    def states():
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that must not move
        return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()

    before = states()
    copies(Loader(BatchSource(store, T, HORIZON), sampler(store), depth), 10)
    assert states() == before


def test_two_loaders_side_by_side_do_not_disturb_each_other(store):
    index = WindowIndex(store, T, HORIZON)
    loaders = [
        iter(Loader(BatchSource(store, T, HORIZON), WindowSampler(index, batch=BATCH, seed=seed)))
        for seed in (3, 4)
    ]
    pairs = [
        [(x.copy(), y.copy()) for x, y in (next(loader) for loader in loaders)] for _ in range(6)
    ]
    for loader in loaders:
        loader.close()
    for side, seed in enumerate((3, 4)):
        assert_same([pair[side] for pair in pairs], by_hand(store, 6, sampler(store, seed)))
