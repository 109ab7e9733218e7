"""Batches: the loop and the gather give the same bits, of the rows that were asked for."""

import numpy as np
import pytest
import torch
from helpers_windows import among, arrays, listed, session, valid_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import (
    BatchSource,
    Eras,
    Normaliser,
    Shuffled,
    WindowIndex,
    WindowSampler,
    WithReplacement,
    make_batch,
    make_batch_vec,
)
from tapeline.windows.device import TorchGather

BOTH = pytest.mark.parametrize("make", [make_batch, make_batch_vec])
FORMATS = ("mmap", "npy", "csv")


def same_bits(a, b):
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype == np.float32
        assert one.flags.c_contiguous
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@settings(max_examples=30)
@given(
    among(st.integers(0, 15), st.integers(10, 15), 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_loop_and_gather_are_equal_bit_for_bit_in_every_format(
    new_store, lengths, T, horizon, columns, seed, data
):
    rng = np.random.default_rng(seed)
    bits = [rng.integers(0, 2**32, (rows, columns), dtype=np.uint32) for rows in lengths]
    days = [np.where(np.isfinite(b.view(np.float32)), b.view(np.float32), 1) for b in bits]
    windows = valid_windows([[True] * rows for rows in lengths], T, horizon)
    picked = data.draw(st.lists(st.sampled_from(windows), min_size=1, max_size=8))
    sessions, starts = zip(*picked, strict=True)
    target = data.draw(st.integers(0, columns - 1))
    with np.errstate(over="ignore"):
        wanted = (
            np.array([days[s][a : a + T].reshape(-1) for s, a in picked]),
            np.array(
                [
                    days[s][a + T + horizon - 1, target] - days[s][a + T - 1, target]
                    for s, a in picked
                ]
            ),
        )
        for fmt in FORMATS:
            store = new_store(days, fmt)
            same_bits(make_batch(store, sessions, starts, T, horizon, target), wanted)
            same_bits(make_batch_vec(store, sessions, starts, T, horizon, target), wanted)


@BOTH
def test_the_target_is_the_change_from_the_last_row_to_the_row_horizon_later(new_store, make):
    rows = np.arange(12, dtype=np.float32)
    store = new_store([np.stack([rows, rows**2], axis=1)])
    x, y = make(store, [0, 0], [0, 6], T=3, horizon=3, target_col=1)
    assert x.tolist() == [[0, 0, 1, 1, 2, 4], [6, 36, 7, 49, 8, 64]]
    assert y.tolist() == [5**2 - 2**2, 11**2 - 8**2]


@BOTH
def test_the_last_window_of_the_last_session_is_there(new_store, make):
    days = arrays(40, 30)
    x, y = make(new_store(days), [1], [0])
    np.testing.assert_array_equal(x[0], days[1][:20].reshape(-1))
    assert y[0] == days[1][29, 0] - days[1][19, 0]


@BOTH
def test_an_empty_batch_is_empty(new_store, make):
    none = np.empty(0, np.int64)
    x, y = make(new_store(arrays(40)), none, none)
    assert (x.shape, y.shape) == ((0, 60), (0,))


@BOTH
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.int64])
def test_any_whole_numbers_will_do(new_store, make, dtype):
    store = new_store(arrays(40, 40))
    same_bits(
        make(store, np.array([1, 0], dtype), np.array([3, 10], dtype)),
        make(store, [1, 0], [3, 10]),
    )


@BOTH
@pytest.mark.parametrize(
    ("sessions", "starts", "where", "found"),
    [
        ([0, 1], [10, 1], "window 1", "session 1 of 30 rows, start 1"),
        ([0, 0], [11, 0], "window 0", "session 0 of 40 rows, start 11"),
        ([0], [-1], "window 0", "session 0 of 40 rows, start -1"),
        ([2], [0], "window 0", "session 2 of 0 rows, start 0"),
        ([3], [0], "window 0", "session 3 of 0 rows, start 0"),
        ([-1], [0], "window 0", "session -1 of 0 rows, start 0"),
        ([0], [2**63 - 1], "window 0", f"session 0 of 40 rows, start {2**63 - 1}"),
    ],
)
def test_a_window_outside_its_session_is_refused(new_store, make, sessions, starts, where, found):
    store = new_store(arrays(40, 30, 0))
    with pytest.raises(WindowError) as error:
        make(store, sessions, starts)
    assert str(error.value) == (
        f"{where} of the batch: expected 30 rows within one of 3 sessions, found {found}. "
        "Draw windows from a sampler made for this store."
    )


@BOTH
@pytest.mark.parametrize(
    ("sessions", "starts", "found"),
    [
        ([0.0], [1], "float64 [1] and int64 [1]"),
        ([0], [1.0], "int64 [1] and float64 [1]"),
        ([True], [1], "bool [1] and int64 [1]"),
        ([0, 0], [1], "int64 [2] and int64 [1]"),
        ([[0]], [[1]], "int64 [1, 1] and int64 [1, 1]"),
        (0, 1, "int64 [] and int64 []"),
    ],
)
def test_windows_that_are_not_lists_of_whole_numbers_are_refused(
    new_store, make, sessions, starts, found
):
    with pytest.raises(WindowError) as error:
        make(new_store(arrays(40)), sessions, starts)
    assert str(error.value) == (
        f"batch: expected as many sessions as starts, whole numbers, found {found}. "
        "Pass what `WindowSampler.next()` returned."
    )


SHAPE_ERRORS = [
    ({"T": 0}, "T: expected a whole number, 1 or more, found 0. Choose another T."),
    ({"T": 2.0}, "T: expected a whole number, 1 or more, found 2.0. Choose another T."),
    (
        {"horizon": 0},
        "horizon: expected a whole number, 1 or more, found 0. Choose another horizon.",
    ),
    (
        {"target_col": -1},
        "target_col: expected a whole number, 0 or more, found -1. Choose another target_col.",
    ),
    (
        {"target_col": 3},
        "target_col: expected 0 to 2, a column of the store, found 3. "
        "Name the column with `Shards.column`.",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), SHAPE_ERRORS)
def test_a_shape_that_cannot_be_is_refused_everywhere(new_store, arguments, message):
    store = new_store(arrays(40))
    makers = [
        lambda: make_batch(store, [0], [0], **arguments),
        lambda: make_batch_vec(store, [0], [0], **arguments),
        lambda: BatchSource(store, **arguments),
    ]
    for make in makers:
        with pytest.raises(WindowError) as error:
            make()
        assert str(error.value) == message


def marked_store(new_store, fmt="mmap"):
    """40 rows; row 15 is marked and holds NaN and infinity."""
    day = session(0, 40, valid=np.arange(40) != 15)
    day.values[15] = [np.nan, np.inf, -np.inf]
    return new_store([session(9, 3), day], fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_batch_touches_a_marked_row(new_store, fmt):
    store = marked_store(new_store, fmt)
    index = WindowIndex(store, 4, 3)
    assert listed(index) == [(1, s) for s in [*range(9), *range(16, 34)]]
    windows = index.locate(np.arange(index.num_windows))
    for make in (make_batch, make_batch_vec):
        x, y = make(store, *windows, 4, 3)
        assert np.isfinite(x).all()
        assert np.isfinite(y).all()


@BOTH
def test_a_window_on_a_marked_row_is_refused(new_store, make):
    store = marked_store(new_store)
    make(store, [1, 1], [8, 16], 4, 3)
    for start in range(9, 16):
        with pytest.raises(WindowError) as error:
            make(store, [1, 1], [0, start], 4, 3)
        assert str(error.value) == (
            f"window 1 of the batch: expected 7 valid rows from start {start} of session 1, found "
            "rows marked invalid from row 15. Make the sampler from "
            "`WindowIndex(shards, T, horizon)` of this store."
        )


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=7, max_size=25), st.integers(0, 18))
def test_exactly_the_valid_windows_are_made(new_store, mask, start):
    store = new_store([session(0, 5), session(1, len(mask), valid=mask)])
    if (1, start) in valid_windows([[True] * 5, mask], 4, 3):
        make_batch_vec(store, [1], [start], 4, 3)
    else:
        with pytest.raises(WindowError):
            make_batch_vec(store, [1], [start], 4, 3)


# BatchSource


def test_memory_handed_in_is_written_again_and_returned(new_store):
    store = new_store(arrays(60, 50))
    sampler = WindowSampler(store.lengths, 5, 2, batch=16)
    source = BatchSource(store, 5, 2)
    memory = source.empty(16)
    for _ in range(3):
        windows = sampler.next()
        out = source.batch(*windows, out=memory)
        assert out[0] is memory[0]
        assert out[1] is memory[1]
        same_bits(memory, make_batch(store, *windows, 5, 2))


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (lambda s: s.empty(3), "float32 [3, 15] and float32 [3]"),
        (lambda s: s.empty(5), "float32 [5, 15] and float32 [5]"),
        (lambda s: (s.empty(4)[0][:, :-1], s.empty(4)[1]), "float32 [4, 14] and float32 [4]"),
        (lambda s: (s.empty(4)[0], s.empty(3)[1]), "float32 [4, 15] and float32 [3]"),
        (lambda s: (s.empty(4)[0].astype("f8"), s.empty(4)[1]), "float64 [4, 15] and float32 [4]"),
    ],
)
def test_memory_of_another_shape_is_refused_and_not_written(new_store, memory, found):
    source = BatchSource(new_store(arrays(60)), 5, 2)
    out = memory(source)
    for array in out:
        array.fill(7)
    with pytest.raises(WindowError) as error:
        source.batch(np.zeros(4, np.int64), np.arange(4), out=out)
    assert str(error.value) == (
        f"memory for the batch: expected float32 of shape [4, 15] and float32 of [4], contiguous, "
        f"found {found}. "
        "Take it from `BatchSource.empty(4)`."
    )
    assert all((array == 7).all() for array in out)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_scaled_batch_is_the_normaliser_of_the_batch_and_leaves_targets(new_store, fmt):
    days = [100 + day * [1, 1e-3, 1e6] for day in arrays(60, 50)]
    days[0][:, 1] = days[1][:, 1] = 3.5
    store = new_store(days, fmt)
    index = WindowIndex(store, 5, 2)
    scale = Normaliser.fit(store, index)
    windows = index.locate(np.arange(index.num_windows))
    x, y = make_batch(store, *windows, 5, 2, 2)
    same_bits(BatchSource(store, 5, 2, 2, scale).batch(*windows), (scale(x), y))


def test_a_scale_of_other_columns_is_refused(new_store):
    store = new_store(arrays(60, columns=2))
    scale = Normaliser.fit(store, WindowIndex(store))
    with pytest.raises(WindowError) as error:
        BatchSource(new_store(arrays(60)), scale=scale)
    assert str(error.value) == (
        "normaliser: expected one of 3 columns, as the store has, found one of 2. "
        "Fit the normaliser on this store."
    )


def test_a_source_checks_whose_windows_it_is_given(new_store):
    source = BatchSource(new_store(arrays(60)), 5, 2)
    source.check(WindowIndex.from_lengths([60], 5, 2))
    with pytest.raises(WindowError) as error:
        source.check(WindowIndex.from_lengths([60], 4, 3))
    assert str(error.value) == (
        "windows: expected T 5 and horizon 2, as the batches have, found T 4 and horizon 3. "
        "Give the sampler and the batches the same T and horizon."
    )
    with pytest.raises(WindowError, match="windows of session 0: expected 7 valid rows"):
        source.check(WindowIndex.from_lengths([61], 5, 2))
    with pytest.raises(WindowError, match="windows of session 1: expected 7 valid rows"):
        source.check(WindowIndex.from_lengths([60, 60], 5, 2))


# Several targets, formats of numbers, and torch


def rows_of(index, source, windows):
    sessions, starts = index.locate(windows)
    return sessions, starts, torch.from_numpy(source.shards.offsets[sessions] + starts)


@pytest.mark.parametrize("columns", [(1,), (2, 0)])
@pytest.mark.parametrize("horizons", [(3,), (5, 1, 3)])
def test_several_targets_come_horizon_by_horizon(new_store, columns, horizons):
    store = new_store(arrays(60, 50))
    index = WindowIndex(store, 5, horizons)
    sessions, starts = index.locate(np.arange(index.num_windows))
    x, y = BatchSource(store, 5, horizons, columns).batch(sessions, starts)
    wanted = [make_batch(store, sessions, starts, 5, h, c) for h in horizons for c in columns]
    same_bits((x, y), (wanted[0][0], np.stack([y for _, y in wanted], axis=1)))
    one = BatchSource(store, 5, horizons[0], columns[0]).batch(sessions, starts)[1]
    assert one.shape == (index.num_windows,)


def test_rows_are_the_flat_batch_in_another_shape(new_store):
    store = new_store(arrays(60))
    windows = np.zeros(4, np.int64), np.arange(4)
    flat, rows = (BatchSource(store, 5, 2, layout=layout) for layout in ("flat", "rows"))
    x, _ = rows.batch(*windows)
    assert x.shape == (4, 5, 3)
    same_bits((x.reshape(4, -1),), flat.batch(*windows)[:1])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=14, max_size=40), st.booleans())
def test_bfloat16_is_rounded_as_torch_does(new_store, words, scaled):
    values = np.array(words, np.uint32).view(np.float32)
    edge = [0.0, -0.0, 1e-45, 2**-126, 3.3895314e38, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23]
    values = np.where(np.isfinite(values), values, 1)
    store = new_store([np.append(values, np.array(edge, np.float32))[:, None]])
    index = WindowIndex(store, 3, 1)
    scale = None
    if scaled:
        scale = Normaliser(np.array([0.3]), np.array([0.7]), 1)
    source = BatchSource(store, 3, 1, scale=scale, dtype="bfloat16")
    plain = BatchSource(store, 3, 1, scale=scale)
    sessions, starts, rows = rows_of(index, source, np.arange(index.num_windows))
    with np.errstate(over="ignore"):
        x, y = source.batch(sessions, starts)
        wanted, wanted_y = plain.batch(sessions, starts)
    assert x.dtype == np.uint16
    cast = torch.from_numpy(wanted).to(torch.bfloat16)
    np.testing.assert_array_equal(x, cast.view(torch.uint16).numpy())
    np.testing.assert_array_equal(y, wanted_y)
    by_torch, _ = TorchGather(source, torch.device("cpu"))(rows)
    np.testing.assert_array_equal(x, by_torch.view(torch.uint16).numpy())


def test_a_value_that_is_no_number_stays_none(new_store):
    day = session(0, 40, valid=np.arange(40) != 15)
    day.values[15] = [np.nan, -np.nan, np.inf]
    store = new_store([day])
    x, _ = BatchSource(store, 1, 1, dtype="bfloat16").batch(np.array([0]), np.array([15]))
    assert x.tolist() == [[0x7FC0, 0x7FC0, 0x7F80]]


@settings(max_examples=40)
@given(
    among(st.integers(0, 15), st.integers(10, 15), 4),
    st.integers(1, 5),
    st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    st.data(),
)
def test_torch_the_kernel_and_the_drawing_kernel_give_equal_bits(
    new_store, lengths, T, horizons, stride, columns, dtype, scaled, data
):
    store = new_store(arrays(*lengths, columns=columns))
    index = WindowIndex(store, T, horizons, stride)
    targets = data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=3))
    scale = Normaliser.fit(store, index) if scaled else None
    source = BatchSource(store, T, horizons, targets, scale, dtype)
    order = data.draw(st.sampled_from([Shuffled(3), WithReplacement(3), Eras(3, 4)]))
    num = index.num_windows
    sessions, starts, rows = rows_of(index, source, order.windows(num, 1, 0, num))
    x, y = source.batch(sessions, starts)
    by_torch = TorchGather(source, torch.device("cpu"))(rows)
    bits = by_torch[0].view(torch.uint16) if dtype == "bfloat16" else by_torch[0]
    drawn = source.empty(num)
    done = 0
    for draw in order.draws(num, 1, 0, num):
        part = slice(done, done + draw.positions)
        source.draw(draw, source.blocks(index), drawn[0][part], drawn[1][part])
        done += draw.positions
    for other in ((bits.numpy(), by_torch[1].numpy()), drawn):
        assert x.tobytes() == other[0].tobytes()
        assert y.tobytes() == other[1].tobytes()


def test_a_target_behind_the_end_of_the_store_is_nan_and_not_read(new_store):
    store = new_store(arrays(10))
    source = BatchSource(store, 4, (1, 3))
    _, y = source.batch(np.array([0]), np.array([5]))
    assert np.isnan(y[0]).tolist() == [False, True]
    _, by_torch = TorchGather(source, torch.device("cpu"))(torch.tensor([5]))
    np.testing.assert_array_equal(y, by_torch.numpy())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dtype": "float16"},
            "dtype: expected one of float32, bfloat16, found 'float16'. Choose float32.",
        ),
        ({"layout": "tiled"}, "layout: expected one of flat, rows, found 'tiled'. Choose flat."),
    ],
)
def test_a_form_that_is_none_is_refused(new_store, arguments, message):
    with pytest.raises(WindowError) as error:
        BatchSource(new_store(arrays(40)), **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_store_larger_than_the_caches_gives_the_same_bits(new_store, dtype):
    """There the kernel asks for memory ahead, and scales as it copies: neither changes a bit."""
    shards = new_store([np.random.default_rng(0).normal(size=(110_000, 41)).astype(np.float32)])
    assert shards.mm.nbytes > 1 << 24
    index = WindowIndex(shards)
    scale = Normaliser.fit(shards, WindowIndex(shards, stride=1000))
    sessions, starts = WindowSampler(index, seed=3).next()
    x, y = make_batch(shards, sessions, starts)
    for scaled in (None, scale):
        gathered, targets = BatchSource(shards, scale=scaled, dtype=dtype).batch(sessions, starts)
        wanted = torch.from_numpy(x if scaled is None else scaled(x))
        if dtype == "bfloat16":
            wanted = wanted.to(torch.bfloat16).view(torch.uint16)
        assert gathered.tobytes() == wanted.numpy().tobytes()
        assert targets.tobytes() == y.tobytes()
