"""The example models on the real tape: trained, evaluated, and told as what they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers_examples import EXAMPLES

from tapeline.config import RunConfig
from tapeline.report.baselines import in_words
from tapeline.run import start
from tapeline.store import write_shards
from tapeline.tape import demo_tape, read_orders

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.demo_tape,
    pytest.mark.skipif(demo_tape() is None, reason="the data package of the demo extra is missing"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tape") / "btcusd"
    sessions, _ = read_orders(demo_tape(), instrument="BTCUSD")
    write_shards(sessions, folder, "mmap")
    return folder


@pytest.mark.parametrize(
    ("example", "horizons", "figure", "simplest"),
    [
        ("conv_order_book", [10, 20, 40], "cross_entropy", "cross_entropy_frequencies"),
        ("transformer", [5, 10, 20], "mse", "mse_zero"),
    ],
)
def test_half_an_hour_of_tape_teaches_an_example_little_and_it_says_so(
    tmp_path, store, example, horizons, figure, simplest
):
    config = RunConfig.load(EXAMPLES / f"{example}.toml", [f"data.store={store}"])
    found = start(config, tmp_path / "run").validation
    assert [one["horizon"] for one in found["horizons"]] == horizons
    assert all(math.isfinite(one[figure]) for one in found["horizons"])
    last = found["horizons"][-1]
    assert last[figure] > last[simplest]
    assert found["skill"] < 0
    assert in_words(found).count("not ") >= len(horizons)
