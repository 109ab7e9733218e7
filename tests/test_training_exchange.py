"""The exchange between ranks: the tree's sum on each, and the bytes it takes."""

import pytest
import torch
from helpers_ranks import on_ranks, sha256

from tapeline.training.exchange import Exchange
from tapeline.training.tree import TreeSum

NUM_LANES, SIZE = 8, 1000


def lane_values(exchange):
    """One vector a lane, the same wherever it is made, of lengths that the ranks share evenly."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(NUM_LANES, SIZE, generator=generator)
    values *= 10.0 ** torch.randint(-4, 4, values.shape, generator=generator)
    padded = torch.zeros(NUM_LANES, exchange.padded(SIZE))
    padded[:, :SIZE] = values
    return padded


def summed(exchange):
    tree = TreeSum()
    values = lane_values(exchange)
    for lane in exchange.lanes:
        tree.add(range(lane, lane + 1), values[lane])
    return exchange.sum(tree.values)[:SIZE]


def on_rank(rank, world_size):
    exchange = Exchange(NUM_LANES, rank, world_size)
    hashes = {sha256(summed(exchange)) for _ in range(2)}
    return hashes, exchange.bytes_sent / 2


@pytest.fixture(scope="module")
def alone():
    exchange = Exchange(NUM_LANES, 0, 1)
    result = summed(exchange)
    assert exchange.bytes_sent == 0
    return sha256(result)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_world_of_a_power_of_two_sends_what_the_best_all_reduce_sends(alone, ranks):
    for hashes, bytes_sent in on_ranks(ranks, on_rank):
        assert hashes == {alone}
        assert bytes_sent == 2 * SIZE * 4 * (ranks - 1) / ranks


def test_an_uneven_world_sends_its_subtrees_and_gets_the_same_sum(alone):
    share = 334 * 4  # bytes: 1,000 numbers in 3 shares, rounded up
    found = on_ranks(3, on_rank)
    assert [hashes for hashes, _ in found] == [{alone}] * 3
    num_subtrees = [1, 2, 2]  # and then each rank's finished share
    assert [sent for _, sent in found] == [2 * share * (num + 1) for num in num_subtrees]
