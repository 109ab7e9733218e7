"""Several horizons: every path makes the oracle's targets, and one number stays what it was."""

import numpy as np
import pytest
import torch
from helpers_windows import among, arrays, listed, valid_windows
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.config import RunConfig
from tapeline.errors import ConfigError
from tapeline.windows import (
    BatchSource,
    Form,
    Loader,
    Sequential,
    WindowIndex,
    WindowSampler,
    make_batch,
    make_batch_vec,
)
from tapeline.windows.changes import changes, last_moves, move_rows
from tapeline.windows.device import TorchGather

FORMATS = ("mmap", "npy", "csv", "zarr")


def bits(array):
    assert array.dtype == np.float32
    return array.view(np.uint32)


@settings(max_examples=15)
@given(
    among(st.integers(0, 16), st.integers(12, 16), 3),
    st.integers(1, 5),
    st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True).map(sorted),
    st.integers(0, 2**32 - 1),
)
def test_all_ways_to_a_target_are_the_oracles_bit_for_bit(new_store, lengths, T, horizons, seed):
    days = arrays(*lengths, seed=seed)
    windows = valid_windows([[True] * rows for rows in lengths], T, max(horizons))
    targets = np.array(
        [[days[s][a + T + h - 1, 1] - days[s][a + T - 1, 1] for h in horizons] for s, a in windows]
    )
    moved = np.array([min(h, T - 1) for h in horizons])
    moves = np.array(
        [[days[s][a + T - 1, 1] - days[s][a + T - 1 - k, 1] for k in moved] for s, a in windows]
    )
    for fmt in FORMATS:
        store = new_store(days, fmt)
        index = WindowIndex(store, T, horizons)
        assert listed(index) == windows
        assert int(index.audit().lost["horizon_tail"].max()) == max(horizons)
        located = index.locate(np.arange(index.num_windows))
        source = BatchSource(store, T, horizons, 1)
        rows = torch.from_numpy(store.offsets[located[0]] + located[1])
        form = Form(targets=(1,))
        with Loader(store, index, Sequential(), len(windows), form=form, tail="short") as loader:
            delivered = next(iter(loader))[1].numpy().copy()
        for made in (
            make_batch(store, *located, T, horizons, 1)[1],
            make_batch_vec(store, *located, T, horizons, 1)[1],
            TorchGather(source, torch.device("cpu"))(rows)[1].numpy(),
            np.concatenate(list(changes(source, index))),
            delivered,
        ):
            np.testing.assert_array_equal(bits(made), bits(targets))
        np.testing.assert_array_equal(bits(last_moves(source, *located)), bits(moves))
        np.testing.assert_array_equal(move_rows(source), moved)


def config(*overrides):
    return RunConfig.from_mapping({"data": {"store": "s"}}, "x", overrides)


def test_one_horizon_stays_what_it_was_before_there_were_several(new_store):
    assert config().hash() == "c0d8306fc998bb3b576b462e87dbec3db704c9a821d692fcbfba970844c0806b"
    assert config("windows.length=4", "windows.horizon=3").hash() == (
        "95fe6aa6869a3ff53c2698b7031361addb5d6589814e9ff28a3a2b6eec403443"
    )
    sampler = WindowSampler([40, 50], T=4, horizon=3, batch=8, seed=5)
    sampler.next()
    assert sampler.state() == {
        "position": 8,
        "seed": 5,
        "T": 4,
        "horizon": 3,
        "batch": 8,
        "windows": 78,
        "fingerprint": "56a6b300b9892d95",
        "order": 1,
    }
    store = new_store(arrays(40, 50))
    index = WindowIndex(store, 4, 3)
    with Loader(store, index, batch=8, form=Form(0)) as loader:
        order, *shape, windows, _, form = loader.state()["of"].split()
    assert (order, *shape, windows, form) == ("shuffled1", "T4", "B8", "78", "56a6b3", "60a8c9")


def test_a_list_of_one_is_that_one():
    assert config("windows.horizon=[7]").windows.horizons == 7
    assert config("windows.horizon=7").windows.horizons == 7
    assert config("windows.horizon=[5, 10, 20]").windows.horizons == (5, 10, 20)


@pytest.mark.parametrize("value", ["0", "[]", "[0]", "[10,5]", "[5,5]", "2.5", "true", "[1,'a']"])
def test_horizons_that_are_none_are_told(value):
    with pytest.raises(ConfigError) as error:
        config(f"windows.horizon={value}")
    assert str(error.value).partition(", found")[0] == (
        f"x with --set windows.horizon={value}, key `windows.horizon`: expected a whole number "
        "above 0, or a list of them that rises"
    )
