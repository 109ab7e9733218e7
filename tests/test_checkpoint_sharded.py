"""Sharded saves for real: gloo ranks under FSDP2 and tensor parallelism, and any other number."""

from __future__ import annotations

from helpers_ranks import on_ranks
from helpers_sharded import ShardedRun, Uneven

from tapeline.checkpoint import Checkpointer, Ranks


def saved(rank, world_size, folder, ways, make, threshold):
    run = ShardedRun(ways, make=make, seed=rank).train(3)
    with Checkpointer(
        folder, ranks=Ranks.joined(timeout_s=60), background_from_bytes=threshold
    ) as checkpoints:
        checkpoints.save(run.capture())
    return run.full()


def resumed(rank, world_size, folder, ways, make):
    return ShardedRun(ways, make=make, seed=7).resume(folder, Ranks.joined(timeout_s=60)).full()


def test_a_save_on_2_ranks_loads_on_any_number(tmp_path):
    whole, other = on_ranks(2, saved, str(tmp_path), 1, Uneven, 0)
    alone = ShardedRun(0, seed=7).resume(tmp_path).full()
    assert alone == whole
    for ranks in (2, 3, 4):
        for rank, found in enumerate(on_ranks(ranks, resumed, str(tmp_path), 1, Uneven)):
            expected = other if (rank, ranks) == (1, 2) else whole
            assert found == expected
    assert whole != other
