"""The tree of lanes: who holds what, and that it is always the same sum."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TrainingError
from tapeline.training.tree import TreeSum, check_lanes, lanes_of, subtrees

POWERS = [1, 2, 4, 8, 16, 32]
worlds = st.sampled_from(POWERS).flatmap(
    lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes))
)


def reference(values):
    """The definition, by recursion."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return reference(values[:half]) + reference(values[half:])


def values(num, seed=0):
    """Numbers of very different sizes, so that every order of additions has its own bits."""
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal((num, 50)) * 10.0 ** rng.integers(-4, 4, (num, 50))
    return torch.from_numpy(spread.astype(np.float32))


@given(worlds)
def test_ranks_share_the_lanes_out_evenly_and_in_order(world):
    num_lanes, size = world
    held = [lanes_of(rank, size, num_lanes) for rank in range(size)]
    assert [lane for lanes in held for lane in lanes] == list(range(num_lanes))
    assert {len(lanes) for lanes in held} <= {num_lanes // size, -(-num_lanes // size)}


@given(worlds)
def test_subtrees_are_whole_aligned_and_as_large_as_can_be(world):
    num_lanes, size = world
    for rank in range(size):
        lanes = lanes_of(rank, size, num_lanes)
        spans = subtrees(lanes)
        assert [lane for span in spans for lane in span] == list(lanes)
        for span in spans:
            length = len(span)
            assert length & (length - 1) == 0
            assert span.start % length == 0
            parent = span.start // (2 * length) * 2 * length
            assert not set(range(parent, parent + 2 * length)) <= set(lanes)


def test_subtrees_of_three_ranks_on_eight_lanes():
    assert [subtrees(lanes_of(rank, 3, 8)) for rank in range(3)] == [
        [range(2)],
        [range(2, 4), range(4, 5)],
        [range(5, 6), range(6, 8)],
    ]


@given(worlds, st.integers(0, 5))
def test_every_world_finishes_the_same_sum(world, seed):
    num_lanes, size = world
    lanes = values(num_lanes, seed)
    whole = TreeSum()
    for rank in range(size):
        part = TreeSum()
        for lane in lanes_of(rank, size, num_lanes):
            part.add(range(lane, lane + 1), lanes[lane].clone())
        assert part.spans == subtrees(lanes_of(rank, size, num_lanes))
        for span, value in zip(part.spans, part.values, strict=True):
            whole.add(span, value)
    assert whole.spans == [range(num_lanes)]
    assert torch.equal(whole.values[0], reference(list(lanes)))


def test_the_sum_is_not_the_one_in_a_row():
    lanes = values(8)
    assert not torch.equal(reference(list(lanes)), sum(lanes[1:], lanes[0].clone()))


def test_at_most_one_value_a_level_is_held():
    tree, held, most = TreeSum(), 0, 0
    for lane in range(32):
        held += 1
        most = max(most, held)
        held -= len(tree.add(range(lane, lane + 1), torch.ones(1)))
        assert held == len(tree.values)
    assert most == 6
    assert tree.values[0].item() == 32


@pytest.mark.parametrize("num_lanes", [-2, 0, 3, 6, 12])
def test_lanes_that_are_no_power_of_two_are_refused(num_lanes):
    with pytest.raises(TrainingError) as error:
        check_lanes(num_lanes, 1)
    assert str(error.value) == (
        "num_lanes: expected a power of two, so that the tree of lanes has no gaps, "
        f"found {num_lanes}. Take 1, 2, 4, 8 or a larger one."
    )


def test_more_ranks_than_lanes_are_refused():
    check_lanes(4, 4)
    with pytest.raises(TrainingError) as error:
        check_lanes(4, 5)
    assert str(error.value) == (
        "num_lanes: expected at least 5, one for each rank, found 4. "
        "Start fewer ranks; another number of lanes is another run."
    )
