"""Sharded saves for real: gloo ranks under FSDP2 and tensor parallelism, killed, on any number."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers_checkpoint import files_of, install
from helpers_ranks import on_ranks
from helpers_sharded import Planned, ShardedRun, Uneven, in_processes
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

from tapeline.checkpoint import Checkpointer, Ranks, Shelf, capture_state, verify
from tapeline.errors import CheckpointError
from tapeline.testing import Fault, FaultyDisk


def saved(rank, world_size, folder, ways, make):
    """What was trained, and what comes back on the same ranks."""
    run = ShardedRun(ways, make=make, seed=rank // ways).train(3)
    trained = run.full()
    with Checkpointer(folder, ranks=Ranks.joined(), background_from_bytes=0) as checkpoints:
        checkpoints.save(run.capture())
        for parameter in run.model.parameters():  # while the save is being written
            parameter.detach().zero_()
    return trained, resumed(rank, world_size, folder, ways, make)


def resumed(rank, world_size, folder, ways, make):
    return ShardedRun(ways, make=make, seed=7).resume(folder, Ranks.joined()).full()


def test_a_save_on_2_ranks_loads_on_1_3_and_4(tmp_path):
    (whole, back), (other, other_back) = on_ranks(2, saved, str(tmp_path), 1, Uneven)
    assert (whole, other) == (back, other_back)
    assert ShardedRun(0, seed=7).resume(tmp_path).full() == whole
    for ranks in (3, 4):
        assert on_ranks(ranks, resumed, str(tmp_path), 1, Uneven) == [whole] * ranks
    # The statistics of batch normalisation are each rank's own, the rest is shared.
    assert {name for name in whole if whole[name] != other[name]} == {
        "model norm.running_mean",
        "model norm.running_var",
    }


def test_two_dimensional_meshes_load_on_any_other(tmp_path):
    alone = ShardedRun(0, make=Planned).train(3)
    folders = {name: tmp_path / name for name in ("alone", "2 by 2", "1 by 2")}
    with Checkpointer(folders["alone"]) as checkpoints:
        checkpoints.save(alone.capture())
    wholes = {"alone": alone.full()}
    for name, ranks in (("2 by 2", 4), ("1 by 2", 2)):
        found = on_ranks(ranks, saved, str(folders[name]), 2, Planned)
        wholes[name] = found[0][0]
        assert found == [(wholes[name], wholes[name])] * ranks
    manifest = verify(folders["2 by 2"] / "step-00000003")
    # Cut over two of four ranks, held twice, written once.
    assert len(manifest.split["model/middle.bias"].pieces) == 2
    for name, folder in folders.items():
        assert ShardedRun(0, make=Planned).resume(folder).full() == wholes[name]
    for ranks, ways in ((4, 2), (3, 1)):
        found = on_ranks(ranks, each_resumed, [*map(str, folders.values())], ways)
        assert found == [list(wholes.values())] * ranks


def each_resumed(rank, world_size, folders, ways):
    return [resumed(rank, world_size, folder, ways, Planned) for folder in folders]


# A rank that fails


def with_a_fault(rank, world_size, folder):
    run = ShardedRun(1, seed=rank)
    ranks, told = Ranks.joined(), []
    with Checkpointer(folder, ranks=ranks, background_from_bytes=0) as checkpoints:
        checkpoints.save(run.train(1).capture())
        checkpoints.wait()
        before = {file: file.read_bytes() for file in files_of(Path(folder))}
        with FaultyDisk(Path(folder), Fault("io_error", 0, "*rank-1*")) as disk:
            checkpoints.save(run.train(1).capture())
            while not told:
                run.train(1)
                try:
                    checkpoints.check()
                    if not checkpoints.busy:
                        told.append("nothing")
                except CheckpointError as error:
                    told.append(str(error))
        after = {file: file.read_bytes() for file in files_of(Path(folder))}
        told.append(run.num_steps)
        ranks.loop.gather(None)  # nobody saves before all have looked
        checkpoints.save(run.train(1).capture())
    return told, bool(disk.struck), after == before, Shelf(Path(folder)).steps()[0]


def test_one_ranks_fault_is_told_on_all_after_the_same_step_and_training_goes_on(tmp_path):
    found = on_ranks(2, with_a_fault, str(tmp_path))
    (message, step), *_ = (told for told, *_ in found)
    assert message == (
        f"rank 1, {tmp_path / 'step-00000002'}: expected room and permission to write a "
        "checkpoint, found Input/output error. Make room or choose another folder; earlier "
        "checkpoints are as they were."
    )
    assert found == [([message, step], rank == 1, True, step + 1) for rank in range(2)]


def lives(rank, world_size, folder, dying, at_operation):
    """Resume, train and save each step; the rank that dies does so at an operation of its own."""
    run, ranks = ShardedRun(1, seed=rank), Ranks.joined()
    with Checkpointer(folder, ranks=ranks, keep=2, background_from_bytes=0) as checkpoints:
        if Shelf(Path(folder)).steps():
            run.restore(checkpoints.load(like=run.capture()).state)
        if rank == dying:
            install(at_operation, lambda: os.kill(os.getpid(), signal.SIGKILL))
        while True:
            checkpoints.save(run.train(1).capture())
            checkpoints.check()


def continued(rank, world_size, folder, steps):
    """From where it resumes, and whether it then does what an uninterrupted run does."""
    loaded = Checkpointer(folder, ranks=Ranks.joined()).load(like=ShardedRun(1).capture())
    run = ShardedRun(1, seed=5).restore(loaded.state)
    from_step = run.num_steps
    whole = run.train(steps - from_step).full()
    straight = ShardedRun(1, seed=rank).train(steps).full()
    return from_step, loaded.skipped, whole == straight


@pytest.mark.parametrize(("world_size", "num_lives"), [(1, 2), (2, 3), (3, 2)])
def test_killed_at_random_operations_it_goes_on_to_the_same_bits(tmp_path, world_size, num_lives):
    generator = random.Random(world_size)
    shelf, reached = Shelf(tmp_path), 0
    for _ in range(num_lives):
        dying, at_operation = generator.randrange(world_size), generator.randrange(10, 40)
        codes = in_processes(world_size, lives, str(tmp_path), dying, at_operation)
        # The others are told that a rank is lost, and end: nobody waits for ever.
        assert codes == [-signal.SIGKILL if rank == dying else 1 for rank in range(world_size)]
        committed = [entry.step for entry in shelf.entries()]
        for step in committed:
            verify(shelf.path(step))
        assert max(committed, default=0) >= reached
        reached = max(committed, default=0)
    assert reached >= 2
    found = on_ranks(world_size, continued, str(tmp_path), reached + 3)
    assert found == [(reached, (), True)] * world_size


def hangs(rank, world_size, folder):
    told = Path(folder) / "told"
    ranks = Ranks.joined(timeout_s=1)
    if rank == 0:
        try:
            ranks.behind.gather("here")
        except CheckpointError as error:
            told.write_text(f"{error.where}: {error.expected}. {error.fix}.")
    while not told.exists():
        time.sleep(0.05)


def test_a_rank_that_does_not_answer_in_time_is_given_up(tmp_path):
    in_processes(2, hangs, str(tmp_path))
    assert (tmp_path / "told").read_text() == (
        "ranks: an answer from every rank. "
        "Start the job again: it resumes from its newest checkpoint."
    )


# What can't be


def refusals(rank, world_size, folder):
    run = ShardedRun(1)
    mesh = init_device_mesh("cpu", (world_size,))
    summed = torch.nn.Module()
    summed.register_buffer("x", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(CheckpointError) as pending:
        capture_state(summed, None, step=1)
    ranks = Ranks.joined()
    with Checkpointer(folder, ranks=ranks) as checkpoints:
        checkpoints.save(run.train(1).capture())
        state = checkpoints.load(like=run.capture()).state
    with pytest.raises(CheckpointError) as other:
        ShardedRun(0).restore(state)
    return str(pending.value), str(other.value)


def test_what_cannot_be_saved_or_restored_is_told(tmp_path):
    assert on_ranks(2, refusals, str(tmp_path))[1] == (
        "state: expected tensors of which each rank holds a part, found one that is still to be "
        "summed over ranks, (Partial(sum),). Save between two steps.",
        "model/first.bias: expected the whole tensor, found the part [5] at [5] of [10]. "
        "Load with like=capture_state(…) of the objects that the state is for.",
    )
