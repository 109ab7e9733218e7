"""Training on several ranks for real: gloo processes, equal bits, moves between worlds."""

import contextlib
import functools
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import (
    Attention,
    Command,
    Convolution,
    Coupled,
    batches,
    hashes,
    on_ranks,
    sha256,
)
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tapeline.errors import TrainingError
from tapeline.training import Lanes, TrainStep
from tapeline.training.distribute import distribute, time_waits
from tapeline.training.ranks import full_tensors
from tapeline.training.step import warmup_then

NUM_LANES, STEPS = 8, 40
EXAMPLE = Path(__file__).parents[1] / "examples" / "lanes_own_loop.py"


def built(kind="adamw", make=Coupled, precision="float32", seed=3, steps=STEPS, **options):
    """A model with dropout and batch normalisation, its optimiser, and a step with everything."""
    model = make()
    optimizer = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    }[kind](model.parameters())
    step = TrainStep(
        model,
        optimizer,
        precision=precision,
        clip_norm=0.5,
        schedule=warmup_then("cosine", warmup_steps=10, total_steps=steps),
        seed=seed,
        lanes=Lanes(model, num_lanes=NUM_LANES, seed=seed, **options),
    )
    return model, optimizer, step


def trained(steps, stretch=1.0, **options):
    """The hashes of everything after some steps of a whole batch; y is stretched."""
    own_rows_only = options.get("own_rows_only", False)
    model, optimizer, step = built(steps=steps, **options)
    losses = []
    for number, (x, y) in enumerate(batches(steps)):
        rows = step.lanes.rows(len(x)) if own_rows_only else slice(None)
        losses.append(step(number, x[rows], stretch * y[rows]))
    scale = step.scaler.get_scale() if step.scaler else None
    return {**hashes(model, optimizer), "losses": sha256(torch.stack(losses)), "scale": scale}


VARIANTS = {
    "float32": (STEPS, {}),
    "bfloat16": (STEPS, {"precision": "bfloat16"}),
    "float16": (10, {"precision": "float16", "stretch": 1e3}),
    "own rows": (10, {"own_rows_only": True}),
    "adam": (10, {"kind": "adam"}),
    "sgd": (10, {"kind": "sgd"}),
    "convolution": (10, {"make": Convolution}),
    "attention": (10, {"make": Attention, "precision": "bfloat16"}),
}


def every_world(rank, world_size, sizes):
    """On ranks that form smaller worlds in turn: the hashes of each variant in each world."""
    found = {}
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            found[size] = {
                name: trained(steps, group=group, **options)
                for name, (steps, options) in VARIANTS.items()
            }
        dist.barrier()
    return found


def test_every_world_ends_in_the_same_bits():
    alone = {name: trained(steps, **options) for name, (steps, options) in VARIANTS.items()}
    assert len({found["model"] for found in alone.values()}) == len(VARIANTS)
    assert alone["float16"]["scale"] < 2**15  # steps were left out
    sizes = (1, 2, 3, 8)
    found = on_ranks(8, every_world, sizes)
    assert [sorted(worlds) for worlds in found] == [
        [size for size in sizes if rank < size] for rank in range(8)
    ]
    for rank, worlds in enumerate(found):
        for size, variants in worlds.items():
            assert variants == alone, f"rank {rank} of {size}"


def test_own_rows_are_the_same_run():
    assert trained(10, own_rows_only=True) == trained(10)


def chain(rank, world_size, folder, lives):
    """A run in lives of other numbers of ranks: each builds anew and reads what the last saved."""
    path = Path(folder) / "state.pt"
    for size, first, last in lives:
        group = dist.new_group(list(range(size)))
        if rank < size:
            model, optimizer, step = built(group=group)
            if path.exists():
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for number, batch in enumerate(batches(last)):
                if number >= first:
                    step(number, *batch)
            dist.barrier(group=group)
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, path)
            result = hashes(model, optimizer)
        dist.barrier()
    return result if rank < lives[-1][0] else None


def test_a_run_that_moves_between_worlds_is_the_run_that_stayed(tmp_path):
    lives = [(4, 0, 13), (3, 13, 20), (1, 20, 22), (2, 22, STEPS)]
    alone = trained(STEPS)
    found = on_ranks(4, chain, str(tmp_path), lives)
    for rank in range(2):
        assert found[rank] == {part: alone[part] for part in ("model", "optimizer")}


def start_from_other_weights(rank, world_size):
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, float(rank))
    Lanes(model, num_lanes=4)
    return model.weight.tolist()


def test_every_rank_begins_with_the_weights_of_rank_0():
    assert on_ranks(2, start_from_other_weights) == [[[0.0, 0.0]]] * 2


# DDP, FSDP2, tensor parallelism


class Wide(nn.Module):
    """Large enough for several buckets of DDP, and with a plan for tensor parallelism."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(12, 600)
        self.middle = nn.Linear(600, 600)
        self.last = nn.Linear(600, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.04, generator=generator)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))

    def tensor_parallel_plan(self):
        return {"first": ColwiseParallel(), "middle": RowwiseParallel()}


def descend(step, first, last, place=0, parts=1):
    """Steps `first` to `last`; of each batch only this part's rows."""
    for number, (x, y) in enumerate(batches(last)):
        if number >= first:
            rows = slice(len(x) // parts * place, len(x) // parts * (place + 1))
            loss = step(number, x[rows], y[rows])
    return loss.item()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp_run(rank, world_size, make, cuts):
    model = Wide()
    optimizer = momentum(model)
    for first, last in cuts:
        loss = descend(TrainStep(make(model), optimizer), first, last, rank, world_size)
    return {**hashes(model, optimizer), "loss": loss}


def through_us(model):
    return distribute(model, "ddp")


def ddp_resumed(rank, world_size, make):
    return [ddp_run(rank, world_size, make, cuts) for cuts in ([(0, 6)], [(0, 3), (3, 6)])]


@pytest.mark.parametrize("ranks", [3, 4])
def test_ddp_resumes_to_the_same_bits_at_an_unchanged_number_of_ranks(ranks):
    found = on_ranks(ranks, ddp_resumed, through_us)
    whole = found[0][0]
    assert all(run == whole for runs in found for run in runs)


def waits_told(rank, world_size, strategy):
    """Hashes of the model with and without its waits told, and how often any was."""
    found, waits = [], []

    @contextlib.contextmanager
    def waiting():
        waits.append(None)
        yield

    for told in (False, True):
        torch.manual_seed(3)
        model = distribute(nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 1)), strategy)
        step = TrainStep(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        if told:
            assert time_waits(step, waiting)
        for number, (x, y) in enumerate(batches(5)):
            step(number, x[rank::world_size], y[rank::world_size])
        found.append({name: sha256(value) for name, value in full_tensors(model).items()})
    return found, len(waits)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_telling_waits_changes_no_bit(strategy):
    """On three ranks, where a mean by division and one by the reciprocal differ."""
    for (plain, told), num_waits in on_ranks(3, waits_told, strategy):
        assert plain == told
        assert num_waits >= 5


def test_plain_ddp_does_not():
    """Why `distribute` asks for what it does: should this fail, torch no longer needs it."""
    whole, resumed = on_ranks(3, ddp_resumed, nn.parallel.DistributedDataParallel)[0]
    assert whole["model"] != resumed["model"]


def sharded(rank, world_size, strategy, tensor_parallel):
    model = distribute(Wide(), strategy, tensor_parallel=tensor_parallel)
    place, parts = rank // tensor_parallel, world_size // tensor_parallel
    (x, _), *_ = batches(1)
    with torch.no_grad():
        output = model(x)
    step = TrainStep(model, momentum(model), clip_norm=0.5, accumulate=2)
    loss = descend(step, 0, 5, place, parts)
    tensors = full_tensors(model)
    return output.numpy(), loss, {name: t.detach().numpy() for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("ranks", "strategy", "tensor_parallel"),
    [(2, "ddp", 1), (2, "fsdp2", 1), (2, "fsdp2", 2), (4, "fsdp2", 2)],
)
def test_the_fast_paths_train_what_one_process_trains(ranks, strategy, tensor_parallel):
    whole = Wide()
    (x, _), *_ = batches(1)
    expected_output = whole(x).detach()
    expected_loss = descend(TrainStep(whole, momentum(whole), clip_norm=0.5), 0, 5)
    for output, loss, tensors in on_ranks(ranks, sharded, strategy, tensor_parallel):
        assert float((torch.from_numpy(output) - expected_output).abs().max()) <= 1e-6
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert list(tensors) == list(whole.state_dict())
        for name, tensor in whole.state_dict().items():
            assert float((torch.from_numpy(tensors[name]) - tensor).abs().max()) <= 1e-6, name


def masks(rank, world_size):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1))
    seen = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.tolist()))
    model = distribute(model, "ddp")
    TrainStep(model, momentum(model))(0, torch.ones(4, 50), torch.zeros(4))
    return seen


def test_ranks_of_ddp_draw_differently():
    first, second = on_ranks(2, masks)
    assert first != second


class Masked(Wide):
    """Shows the mask that dropout drew on what tensor parallelism left whole."""

    def forward(self, x):
        hidden = self.middle(torch.relu(self.first(x)))
        self.mask = (nn.functional.dropout(torch.ones_like(hidden), 0.5) > 0).tolist()
        return self.last(hidden * torch.tensor(self.mask))


def masks_of_cut_layers(rank, world_size):
    model = distribute(Masked(), "fsdp2", tensor_parallel=2)
    x, y = next(batches(1))
    TrainStep(model, momentum(model))(0, x, y)
    return model.mask


def test_ranks_that_hold_one_layer_draw_alike_and_others_differently():
    first, same, other, other_same = on_ranks(4, masks_of_cut_layers)
    assert first == same != other == other_same


def refusals(rank, world_size):
    told = []
    for attempt in (
        lambda: TrainStep(Wide(), momentum(Wide())),
        lambda: Lanes(distribute(nn.Linear(1, 1), "ddp"), num_lanes=2),
        lambda: distribute(Wide(), "ddp", tensor_parallel=2),
        lambda: distribute(Wide(), "fsdp2", tensor_parallel=3),
        lambda: distribute(nn.Linear(1, 1), "fsdp2", tensor_parallel=2),
    ):
        with pytest.raises(TrainingError) as error:
            attempt()
        told.append(str(error.value))
    return told


def test_what_ranks_cannot_do_is_refused():
    assert on_ranks(2, refusals)[0] == [
        "num_lanes: expected at least 2, one for each rank, found 1. "
        "Start fewer ranks; another number of lanes is another run.",
        "model DistributedDataParallel: expected one that every rank holds whole and alone, "
        "found one that torch shares among ranks. "
        "Give Lanes the model itself; it does the exchange.",
        "tensor_parallel: expected a divisor of the 2 ranks, with strategy fsdp2, "
        "found 2 with ddp. Change the number of ranks, or leave tensor_parallel at 1.",
        "tensor_parallel: expected a divisor of the 2 ranks, with strategy fsdp2, "
        "found 3 with fsdp2. Change the number of ranks, or leave tensor_parallel at 1.",
        "model Linear: expected a method tensor_parallel_plan, which says how it is cut, "
        "found none. Return {submodule name: ColwiseParallel() or RowwiseParallel(), …} from one.",
    ]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each rank"
            ),
        ),
    ],
)
def test_the_example_of_an_own_loop_prints_the_same_hash_on_two_ranks(tmp_path, device):
    example = functools.partial(runpy.run_path, str(EXAMPLE), run_name="__main__")
    one, two = (Command(size, device, folder=tmp_path, program=example) for size in (1, 2))
    assert one.printed().split()[-1] == two.printed().split()[-1]
