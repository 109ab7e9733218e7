"""The loader in others' loops: a torch DataLoader, Lightning, Accelerate."""

import json
import warnings
from itertools import islice

import pytest
import torch
from helpers_windows import arrays
from torch import nn
from torch.utils.data import DataLoader

from tapeline.errors import WindowError
from tapeline.windows import Feed, Form, Loader, Shuffled, WindowIndex

T, HORIZON, BATCH = 4, 3, 8


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30, 25))


def loader_of(store, tail="drop", depth=2):
    index = WindowIndex(store, T, HORIZON)
    return Loader(store, index, Shuffled(3), BATCH, tail, Form(0), Feed(depth))


def taken(batches, num=None):
    return [tuple(part.clone() for part in batch) for batch in islice(batches, num)]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("tail", ["drop", "short", "pad"])
def test_a_dataloader_passes_the_batches_on(store, tail):
    ours, wanted = loader_of(store, tail), loader_of(store, tail)
    wrapped = DataLoader(ours, batch_size=None)
    assert len(wrapped) == len(ours)
    for _ in range(2):
        assert_same(taken(wrapped), taken(wanted))
    assert ours.state() == wanted.state()


def test_an_endless_loader_in_a_dataloader(store):
    wrapped = DataLoader(loader_of(store, "seamless"), batch_size=None)
    assert_same(taken(wrapped, 30), taken(loader_of(store, "seamless"), 30))


def test_workers_are_refused_since_each_would_deliver_everything(store):
    wrapped = DataLoader(loader_of(store), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="expected num_workers=0, found a worker process"):
        next(iter(wrapped))


def test_started_workers_are_refused_too(store):
    wrapped = DataLoader(
        loader_of(store), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(WindowError) as error:
        next(iter(wrapped))
    assert str(error.value) == (
        "loader: expected to stay in its process, found an attempt to pickle or copy it, as "
        "worker processes do. Set num_workers=0, or build a loader in each process."
    )


def network():
    torch.manual_seed(0)
    return nn.Linear(T * 3, 1)


def by_hand(batches, num):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in islice(batches, num):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    return model.weight.detach().clone()


# Accelerate


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, about what this machine lacks
        yield accelerate.Accelerator(cpu=True)


@pytest.mark.parametrize("wrap", [False, True])
def test_accelerate_trains_on_the_same_batches(store, accelerator, wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    ours = loader_of(store)
    # What is prepared is read one batch ahead: the memory of the one in use must stay.
    batches = accelerator.prepare(DataLoader(ours, batch_size=None)) if wrap else ours
    steps = 0
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x).squeeze(1), y))
            optimizer.step()
            steps += 1
    assert steps == 2 * len(ours)
    reference = loader_of(store)
    wanted = by_hand([*taken(reference), *taken(reference)], steps)
    assert torch.equal(accelerator.unwrap_model(model).weight, wanted)


def test_accelerate_reads_ahead_and_the_state_after_the_steps_is_still_known(store, accelerator):
    ours = loader_of(store)
    batches = iter(accelerator.prepare(DataLoader(ours, batch_size=None)))
    taken(batches, 3)
    assert ours.position == 4 * BATCH
    resumed = loader_of(store)
    resumed.load_state_dict(ours.state_after(3))
    batches.close()
    assert_same(taken(resumed), taken(loader_of(store))[3:])


# Lightning


@pytest.fixture
def fit(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = network()
            self.seen = []

        def training_step(self, batch, number):
            x, y = batch
            self.seen.append((x.clone(), y.clone()))
            return nn.functional.mse_loss(self.layer(x).squeeze(1), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def run(loader, steps, checkpoint=None):
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, about workers and this machine
            trainer.fit(module, loader, ckpt_path=checkpoint)
            trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module, tmp_path / f"{steps}.ckpt"

    return run


@pytest.mark.parametrize("tail", ["drop", "seamless"])
def test_lightning_trains_on_the_same_batches(store, fit, tail):
    module, _ = fit(loader_of(store, tail), 25)
    reference = loader_of(store, tail)
    wanted = []
    while len(wanted) < 25:
        wanted += taken(reference, 25 - len(wanted))
    assert_same(module.seen, wanted)
    assert torch.equal(module.layer.weight, by_hand(wanted, 25))


def test_lightning_saves_the_loaders_state_and_goes_on_from_it(store, fit):
    whole, _ = fit(loader_of(store), 13)
    _, checkpoint = fit(loader_of(store), 5)
    saved = torch.load(checkpoint, weights_only=False)
    (state,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert json.loads(json.dumps(state)) == loader_of(store).state_after(5)
    resumed, _ = fit(loader_of(store), 13, checkpoint)
    assert_same(resumed.seen, whole.seen[5:])
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
