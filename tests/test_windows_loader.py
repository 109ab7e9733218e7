"""The loader: the order's batches whatever the depth, and a thread that always ends."""

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from helpers_windows import among, arrays, session
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import (
    BatchSource,
    Eras,
    Feed,
    Form,
    Loader,
    Noise,
    Normaliser,
    Sequential,
    Shuffled,
    WindowIndex,
    WindowSampler,
    WithReplacement,
    make_batch,
    prefetch,
)
from tapeline.windows.prefetch import Prefetcher
from tapeline.world import World

T, HORIZON, BATCH = 4, 3, 8
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 5])
AHEAD = pytest.mark.parametrize("depth", [1, 2, 5])
ORDERS = [Shuffled(3), WithReplacement(3), Sequential(), Eras(3, 16)]
NUM = 34 + 24 + 19


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30, 25))


def loader_of(store, depth=2, seed=3, batch=BATCH, **options):
    options = {"order": Shuffled(seed), "form": Form(0), "feed": Feed(depth)} | options
    index = options.pop("index", None) or WindowIndex(store, T, HORIZON)
    return Loader(store, index, batch=batch, **options)


class Watched:
    """An augmentation that changes nothing: counts, fails at one batch, or waits."""

    def __init__(self, fail_at=None, error=None, wait_s=0.0):
        self.fail_at, self.error, self.wait_s = fail_at, error, wait_s
        self.made = 0

    def __call__(self, x, y, draws):
        time.sleep(self.wait_s)
        if self.made == self.fail_at:
            raise self.error
        self.made += 1
        return x, y


def by_hand(store, batches, seed=3):
    sampler = WindowSampler(store.lengths, T, HORIZON, BATCH, seed)
    return [make_batch(store, *sampler.next(), T, HORIZON) for _ in range(batches)]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "tapeline-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if prefetch_threads():
        gc.collect()
    assert not prefetch_threads()


def copied(batch):
    return tuple(part.clone().numpy() for part in batch)


def copies(loader, num=None):
    batches = iter(loader)
    try:
        return [copied(batch) for batch in islice(batches, num)]
    finally:
        batches.close()


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.tobytes() == b.tobytes()


def starts(store, batches, columns=3):
    """Which windows batches of stored rows hold, found by looking for the first row."""
    rows = {row.tobytes(): n for n, row in enumerate(store.mm)}
    return [rows[x[:columns].tobytes()] for batch in batches for x in batch[0]]


@DEPTHS
def test_batches_are_those_of_the_sampler_by_hand(store, depth):
    num = 3 * NUM // BATCH  # over two seams between epochs
    assert_same(copies(loader_of(store, depth), num), by_hand(store, num))


@DEPTHS
def test_only_delivered_batches_count(store, depth):
    watched = Watched()
    ours = loader_of(store, depth, form=Form(0, augment=(watched,)))
    batches = iter(ours)
    for delivered in range(1, 6):
        next(batches)
        assert ours.position == delivered * BATCH
    while watched.made < 5 + max(0, depth - 1):  # reads ahead, and isn't counted
        time.sleep(0.001)
    assert ours.position == 5 * BATCH
    batches.close()
    assert ours.position == 5 * BATCH


@DEPTHS
def test_a_state_taken_while_iterating_resumes_where_delivery_stood(store, depth):
    ours = loader_of(store, depth)
    copies(ours, 5)
    resumed = loader_of(store, seed=99)
    resumed.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert_same(copies(resumed, 4), by_hand(store, 9)[5:])
    # a second resume in one epoch, and one that goes on into the next
    again = loader_of(store, depth, seed=1)
    again.set_state(resumed.state())
    assert_same(copies(again, 12), by_hand(store, 21)[9:])


def test_iterating_again_goes_on(store):
    loader = loader_of(store)
    assert_same(copies(loader, 3) + copies(loader, 3), by_hand(store, 6))


class OddError(Exception):
    pass


@DEPTHS
@pytest.mark.parametrize(
    "error", [OddError("disk"), KeyboardInterrupt(), SystemExit(3), MemoryError()]
)
@pytest.mark.parametrize("fail_at", [0, 4])
def test_an_error_in_gathering_comes_as_itself_at_its_batch(store, depth, error, fail_at):
    ours = loader_of(store, depth, form=Form(0, augment=(Watched(fail_at, error),)))
    batches = iter(ours)
    found = [copied(batch) for batch in islice(batches, fail_at)]
    assert_same(found, by_hand(store, fail_at))
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value is error
    assert ours.position == fail_at * BATCH
    assert not prefetch_threads()
    assert list(batches) == []


@DEPTHS
def test_a_stop_iteration_does_not_look_like_an_end(store, depth):
    batches = iter(loader_of(store, depth, form=Form(augment=(Watched(2, StopIteration()),))))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(batches)


@AHEAD
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_the_thread_ends_when_the_iterator_is_closed(store, depth, taken):
    batches = iter(loader_of(store, depth))
    list(islice(batches, taken))
    assert len(prefetch_threads()) == min(taken, 1)
    batches.close()
    assert not prefetch_threads()


@AHEAD
def test_the_thread_ends_when_the_iterator_is_forgotten(store, depth):
    batches = iter(loader_of(store, depth))
    next(batches)
    del batches
    gc.collect()
    assert not prefetch_threads()


@AHEAD
def test_the_thread_ends_when_the_consumer_fails(store, depth):
    def consume():
        for _ in loader_of(store, depth):
            raise OddError

    with pytest.raises(OddError):
        consume()
    gc.collect()
    assert not prefetch_threads()


def test_a_dead_thread_is_noticed(monkeypatch):
    monkeypatch.setattr(prefetch, "_CHECK_S", 0.01)
    monkeypatch.setattr(Prefetcher, "_work", lambda self: None)
    prefetcher = Prefetcher(lambda number, slot: None, [[], [], []])
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
    prefetcher = Prefetcher(lambda number, slot: None, [[], [], []])
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
def test_a_batch_stays_as_it_is_until_the_second_next_is_asked_for(
    store, depth, waits_s, produce_s
):
    form = Form(0, augment=(Watched(wait_s=produce_s),))
    batches = iter(loader_of(store, depth, form=form))
    wanted = by_hand(store, len(waits_s) + 1)
    before = next(batches)
    for number, wait_s in enumerate(waits_s):
        batch = next(batches)
        time.sleep(wait_s)
        assert_same([before, batch], wanted[number : number + 2])
        before = batch
    batches.close()


def test_memory_is_that_of_a_ring(store):
    batches = iter(loader_of(store, depth=2))
    seen = {x.data_ptr() for x, _ in islice(batches, 50)}
    batches.close()
    assert len(seen) == 2 + prefetch.HELD


@DEPTHS
@pytest.mark.parametrize(
    ("move", "found"),
    [
        (lambda ours: ours.skip_to(24), "position 24 of seed 3"),
        (lambda ours: next(iter(ours)), "position 16 of seed 3"),
        (lambda ours: ours.set_state(ours.state() | {"seed": 4}), "position 8 of seed 4"),
    ],
)
def test_a_loader_moved_by_someone_else_is_noticed(store, depth, move, found):
    ours = loader_of(store, depth)
    batches = iter(ours)
    next(batches)
    move(ours)
    with pytest.raises(WindowError) as error:
        next(batches)
    assert str(error.value) == (
        f"loader: expected to be at position 8 of seed 3, found {found}. "
        "Set its state before iterating, and iterate it once at a time."
    )


@pytest.mark.parametrize("depth", [-1, 1.5])
def test_a_depth_is_a_whole_number(store, depth):
    with pytest.raises(WindowError) as error:
        loader_of(store, depth)
    assert str(error.value) == (
        f"prefetch depth: expected a whole number, 0 or more, found {depth}. "
        "Choose another prefetch depth."
    )


def test_windows_of_another_store_are_refused_before_anything_is_read(store):
    longer = WindowIndex.from_lengths([40, 31, 25], T, HORIZON)
    with pytest.raises(WindowError, match="windows of session 1: expected 7 valid rows"):
        Loader(store, longer)


@DEPTHS
def test_no_global_generator_is_drawn_from(store, depth):
    def states():
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that must not move
        return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()

    before = states()
    copies(loader_of(store, depth, form=Form(augment=(Noise(0.1),))), 10)
    assert states() == before


def test_two_loaders_side_by_side_do_not_disturb_each_other(store):
    loaders = [iter(loader_of(store, seed=seed)) for seed in (3, 4)]
    pairs = [[copied(next(loader)) for loader in loaders] for _ in range(6)]
    for loader in loaders:
        loader.close()
    for side, seed in enumerate((3, 4)):
        assert_same([pair[side] for pair in pairs], by_hand(store, 6, seed))


def test_a_block_ends_its_threads_and_iterators(store):
    with loader_of(store) as loader:
        batches = iter(loader)
        next(batches)
        assert len(prefetch_threads()) == 1
    assert not prefetch_threads()
    assert list(batches) == []
    assert_same(copies(loader, 2), by_hand(store, 3)[1:])


SCRIPT = """
import signal, sys, time
from tapeline import Shards, WindowIndex, Loader
from tapeline.windows import Form
def slow(x, y, draws):
    time.sleep(0.01)
    return x, y
shards = Shards(sys.argv[1])
for n, batch in enumerate(Loader(shards, WindowIndex(shards, 4, 3), form=Form(augment=(slow,)))):
    if n == 3:
        print("going", flush=True)
"""


def test_ctrl_c_ends_the_process_with_one_traceback(store):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, store.root], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"going\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode != 0
    assert told.count(b"Traceback") == 1
    assert told.rstrip().endswith(b"KeyboardInterrupt")


# The kernel and torch


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_batches_are_torchs_and_the_rest_the_kernels_of_equal_bits(store, order):
    ours = loader_of(store, 0, order=order)
    batches = iter(ours)
    found = [copied(next(batches)) for _ in range(2)]
    ours._kernel.join()
    found += [copied(next(batches)) for _ in range(20)]
    batches.close()
    assert not ours._kernel.is_alive()
    index, sampled = ours.index, []
    for number in range(22):
        pieces = [
            order.windows(NUM, *span)
            for span in ours.plan.spans(number * BATCH, (number + 1) * BATCH)
        ]
        sampled.append(make_batch(store, *index.locate(np.concatenate(pieces)), T, HORIZON))
    assert_same(found, sampled)


def loaded(loader):
    loader._kernel = threading.Thread(target=lambda: None)
    loader._kernel.start()
    loader._kernel.join()
    return loader


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tail", ["seamless", "pad"])
def test_a_store_resident_on_the_device_gives_the_kernels_bits(
    store, dtype, layout, scaled, order, tail
):
    index = WindowIndex(store, T, (2, HORIZON))
    scale = Normaliser.fit(store, index) if scaled else None
    form = Form((2, 0), scale, dtype, layout)
    found, wanted = (
        [tuple(part.clone() for part in batch) for batch in islice(ours, 12)]
        for ours in (
            loader_of(store, index=index, order=order, form=form, tail=tail, feed=feed)
            for feed in (Feed(resident=True), Feed(0))
        )
    )
    kernel = loaded(loader_of(store, 0, index=index, order=order, form=form, tail=tail))
    third = [tuple(part.clone() for part in batch) for batch in islice(kernel, 12)]
    assert found[0][0].shape == ((BATCH, T * 3) if layout == "flat" else (BATCH, T, 3))
    assert found[0][0].dtype == getattr(torch, dtype)
    assert found[0][1].shape == (BATCH, 4)
    for a, b, c in zip(found, wanted, third, strict=True):
        for one, other, last in zip(a, b, c, strict=True):
            assert one.dtype == other.dtype == last.dtype
            assert torch.equal(one, other)
            assert torch.equal(one, last)


def test_targets_that_do_not_exist_are_nan_on_every_way(store):
    index = WindowIndex(store, T, (1, 6), targets="any")
    sessions, first = index.locate(np.arange(index.num_windows))
    missing = index.missing(sessions, first)
    assert missing.any()
    for ours in (
        loader_of(store, index=index, order=Sequential(), batch=7, tail="short", feed=Feed(0)),
        loaded(loader_of(store, 0, index=index, order=Sequential(), batch=7, tail="short")),
        loader_of(
            store, index=index, order=Sequential(), batch=7, tail="short", feed=Feed(resident=True)
        ),
    ):
        y = np.concatenate([y.clone().numpy() for _, y in ours])
        np.testing.assert_array_equal(np.isnan(y), missing)
        there = store.mm[store.offsets[sessions] + first + T - 1 + 1, 0]
        last = store.mm[store.offsets[sessions] + first + T - 1, 0]
        np.testing.assert_array_equal(y[:, 0], there - last)


# Epochs, tails and ranks


@pytest.mark.parametrize("order", [Shuffled(3), Sequential(), Eras(3, 16)])
@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@pytest.mark.parametrize("batch", [1, 7, 8, NUM - 1, NUM])
@pytest.mark.parametrize("depth", [0, 2])
def test_an_iteration_is_an_epoch_and_the_next_one_the_next(store, order, tail, batch, depth):
    ours = loader_of(store, depth, order=order, batch=batch, tail=tail)
    whole = NUM if tail != "drop" else NUM // batch * batch
    assert len(ours) == -(-whole // batch)
    for epoch in range(3):
        assert ours.epoch == epoch
        found = copies(ours)
        assert len(found) == len(ours)
        assert all(len(batch_[0]) == batch for batch_ in found[:-1])
        if tail == "pad":
            mask = np.concatenate([mask for _, _, mask in found])
            assert mask.sum() == NUM
            assert len(mask) == len(ours) * batch
            padded = [(x[~m], y[~m]) for x, y, m in found]
            assert not any(x.any() or y.any() for x, y in padded)
            found = [(x[m], y[m]) for x, y, m in found]
        rows = starts(store, found)
        index = ours.index
        sessions, first = index.locate(order.windows(NUM, epoch, 0, whole))
        assert rows == (store.offsets[sessions] + first).tolist()
    assert ours.epoch == 3


@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
def test_a_state_within_an_epoch_gives_the_rest_of_it_and_then_the_next(store, tail):
    whole = loader_of(store, tail=tail)
    wanted = [copies(whole), copies(whole)]
    for taken in range(len(whole) + 1):
        ours = loader_of(store, tail=tail)
        copies(ours, taken)
        resumed = loader_of(store, depth=0, seed=9, tail=tail)
        resumed.set_state(ours.state())
        assert ours.state() == whole.state_after(taken)
        if taken < len(whole):
            assert_same(copies(resumed), wanted[0][taken:])
        # at the epoch's end the next epoch is whole, not empty
        assert_same(copies(resumed), wanted[1])


@pytest.mark.parametrize("tail", ["seamless", "drop", "short", "pad"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_take_slices_of_the_same_global_batches(store, tail, size, dtype):
    form = Form(0, dtype=dtype, augment=(Noise(0.5),))
    alone = loader_of(store, tail=tail, form=form)
    ranks = [loader_of(store, 1, tail=tail, form=form, world=World(r, size)) for r in range(size)]
    for _ in range(2):
        sides = [list(islice(map(as_float, rank), 20)) for rank in ranks]
        wanted = list(islice(map(as_float, alone), 20))
        assert {len(side) for side in sides} == {len(wanted)}
        for number, batch in enumerate(wanted):
            parts = zip(*(side[number] for side in sides), strict=True)
            assert_same([tuple(map(np.concatenate, parts))], [batch])
        assert {rank.position for rank in ranks} == {alone.position}


def as_float(batch):
    return tuple(part.float().clone().numpy() for part in batch)


@settings(max_examples=60)
@given(
    among(st.integers(0, 25), st.integers(6, 25), 5),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=2, unique=True),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from(["seamless", "short", "pad"]),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 3, 4])), max_size=4),
    st.sampled_from([Shuffled, Eras]),
    st.data(),
)
def test_an_epoch_is_every_valid_window_once_through_stops_and_changing_ranks(
    new_store, lengths, T, horizons, stride, per_rank, seed, tail, lives, kind, data
):
    days = [day + np.float32(100 * n) for n, day in enumerate(arrays(*lengths))]
    store = new_store(days)
    index = WindowIndex(store, T, tuple(horizons), stride)
    batch = 12 * per_rank
    order = kind(seed) if kind is Shuffled else kind(seed, data.draw(st.integers(1, 40)))
    found, state = [], None
    for stop, size in [*lives, (10**6, 1)]:
        ranks = [
            Loader(store, index, order, batch, tail, Form(0), Feed(0), World(r, size))
            for r in range(size)
        ]
        if state:
            for rank in ranks:
                rank.set_state(state)
        need = -(-(index.num_windows - len(found)) // batch)
        for parts in islice(zip(*ranks, strict=True), min(stop, need)):
            for part in parts:
                real = part[2].numpy() if tail == "pad" else slice(None)
                found += starts(store, [(part[0].numpy()[real],)])
        state = ranks[0].state()
        if len(found) >= index.num_windows:
            break
    wanted = index.locate(order.windows(index.num_windows, 0, 0, index.num_windows))
    rows = (store.offsets[wanted[0]] + wanted[1]).tolist()
    assert found[: index.num_windows] == rows
    valid = [
        store.offsets[s] + a
        for s, n in enumerate(lengths)
        for a in range(0, n - T - max(horizons) + 1, stride)
    ]
    assert sorted(rows) == valid


def test_ranks_that_do_not_divide_the_batch_are_refused(store):
    with pytest.raises(WindowError) as error:
        loader_of(store, world=World(0, 3))
    assert str(error.value) == (
        "batch: expected a multiple of the 3 ranks, whose gradients weigh the same, found 8. "
        "Choose another batch or another number of ranks."
    )


def test_a_tail_that_is_none_and_one_that_drops_all_are_refused(store):
    with pytest.raises(WindowError) as error:
        loader_of(store, tail="wrap")
    assert str(error.value) == (
        "tail: expected one of seamless, drop, short, pad, found 'wrap'. "
        "Take seamless to train on, short to evaluate."
    )
    with pytest.raises(WindowError) as error:
        loader_of(store, tail="drop", batch=NUM + 1)
    assert str(error.value) == (
        "batch: expected at most 77, the windows of an epoch, with tail drop, found 78. "
        "Take a smaller batch, or another tail."
    )


def test_without_an_end_there_is_no_length(store):
    with pytest.raises(TypeError, match="has no end"):
        len(loader_of(store))


# Orders and devices


def test_a_sequential_order_has_no_seed_to_take_over(store):
    ours = loader_of(store, order=Sequential())
    copies(ours, 2)
    resumed = loader_of(store, order=Sequential())
    resumed.set_state(ours.state())
    assert (resumed.order, resumed.position) == (Sequential(), 16)


def test_more_values_than_a_device_can_index_are_refused(store):
    class Huge(BatchSource):
        flat = np.broadcast_to(np.float32(0), 2**31)

        def __setattr__(self, name, value):
            if name != "flat":
                super().__setattr__(name, value)

    from tapeline.windows.device import TorchGather

    with pytest.raises(WindowError) as error:
        TorchGather(Huge(store, T, HORIZON), torch.device("meta"))
    assert str(error.value) == (
        "store on meta: expected at most 2,147,483,647 values, which 32-bit indices reach, found "
        "2,147,483,648. Leave the store on the host: `Feed(resident=False)`."
    )


def test_marked_rows_are_in_no_batch(new_store):
    day = session(0, 40, valid=np.arange(40) != 15)
    day.values[15] = np.nan
    ours = loader_of(new_store([day]), tail="short")
    assert all(np.isfinite(x).all() and np.isfinite(y).all() for x, y in copies(ours))


# What isn't there


def test_the_name_of_an_order_is_no_order(store):
    with pytest.raises(WindowError) as error:
        loader_of(store, order="shuffled")
    assert str(error.value) == (
        "order: expected an order, such as Shuffled(seed=0), found 'shuffled'. "
        "Pass Shuffled(), WithReplacement(), Sequential() or Eras()."
    )


@pytest.mark.parametrize("device", ["cuda:99", "gpu", 1.5])
def test_a_device_that_is_not_there_is_refused_at_once(store, device):
    with pytest.raises(WindowError, match=r"^device .*: expected one that torch can use here, "):
        loader_of(store, feed=Feed(device=device))
