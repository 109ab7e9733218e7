"""Functions and commands on several ranks: processes forked from a server that imported once."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tapeline.cli import main
from tapeline.training.determinism import keyed_draws

CPU = torch.device("cpu")
FORKS = multiprocessing.get_context("forkserver")
_LONGEST_S = 100  # a loaded machine is nobody's fault


def start_server():
    """Start what ranks are forked from; a process has one such server, so it is started once.

    It learns of this folder only through the environment.
    """
    FORKS.set_forkserver_preload(["helpers_ready"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()


def on_ranks(world_size, function, *arguments):
    """What `function(rank, world_size, *arguments)` returns on each rank; a rank's error is told.

    The function must be importable from the tests' folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = FORKS.SimpleQueue()
        processes = [
            FORKS.Process(target=_rank, args=(rank, world_size, folder, queue, function, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            results = dict(queue.get() for _ in processes)
        finally:
            for process in processes:
                process.join(5)  # done already, unless a rank died without a word
                process.kill()
    failed = [result for result in results.values() if isinstance(result, _Failure)]
    assert not failed, failed[0].text
    return [results[rank] for rank in range(world_size)]


class _Failure:
    def __init__(self, text):
        self.text = text


def _rank(rank, world_size, folder, queue, function, arguments):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "rendezvous").as_uri(),
            rank=rank,
            world_size=world_size,
        )
        result = function(rank, world_size, *arguments)
        dist.destroy_process_group()
    except BaseException:
        result = _Failure(f"rank {rank} of {world_size}: {traceback.format_exc()}")
    queue.put((rank, result))


class Command:
    """`tapeline …` on several ranks, in the environment that torchrun gives each.

    Without its agent, which ends all ranks soon after one: here each ends by itself.
    `program` is called instead of `tapeline`, with the arguments in `sys.argv`.
    """

    def __init__(self, world_size, *argv, folder, program=main):
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = [
            FORKS.Process(
                target=_command,
                args=(rank, world_size, port, self._folder, list(map(str, argv)), program),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait(self):
        """The exit code of each rank."""
        deadline = time.monotonic() + _LONGEST_S
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.signal(signal.SIGKILL)
        return codes

    def done(self):
        """What rank 0 printed as JSON, once all ranks have ended well."""
        return json.loads(self.printed())

    def printed(self):
        """What rank 0 printed, once all ranks have ended well."""
        codes = self.wait()
        assert set(codes) == {0}, (codes, [self.told(rank) for rank in range(len(codes))])
        return (self._folder / "out-0").read_text()

    def told(self, rank):
        """What a rank said on standard error."""
        return (self._folder / f"err-{rank}").read_text()

    def when(self, condition):
        """Return once it is true; it is an error if all ranks end before."""
        deadline = time.monotonic() + _LONGEST_S
        while not condition():
            alive = any(process.is_alive() for process in self.processes)
            assert alive and time.monotonic() < deadline, self.told(0)
            time.sleep(0.005)

    def signal(self, number, *ranks):
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)
                if number == signal.SIGKILL:
                    self.processes[rank].join()


def _command(rank, world_size, port, folder, argv, program):
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    sys.argv = ["tapeline", *argv]
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    try:
        program()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):
                stream.flush()


def sha256(*tensors):
    """One hash over the bytes of tensors, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def hashes(model, optimizer):
    """The hashes of a model's parameters and buffers, and of its optimiser's state."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "model": sha256(*model.state_dict().values()),
        "optimizer": sha256(*(value for value in state if isinstance(value, torch.Tensor))),
    }


class Coupled(nn.Module):
    """Every kind of layer the contract speaks of: dropout, batch normalisation, an unused part."""

    def __init__(self, inputs=12, hidden=20, dropout=0.3):
        super().__init__()
        with keyed_draws(CPU, 5):
            self.first = nn.Linear(inputs, hidden)
            self.norm = nn.BatchNorm1d(hidden)
            self.drop = nn.Dropout(dropout)
            self.last = nn.Linear(hidden, 1)
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Convolution(nn.Module):
    """Convolutions over 6 rows of 2 columns, normalised and pooled."""

    def __init__(self):
        super().__init__()
        with keyed_draws(CPU, 6):
            self.layers = nn.Sequential(
                nn.Conv1d(2, 16, 3, padding=1),
                nn.BatchNorm1d(16),
                nn.GELU(),
                nn.Conv1d(16, 16, 3),
                nn.Dropout1d(0.2),
                nn.AdaptiveMaxPool1d(1),
                nn.Flatten(),
                nn.Linear(16, 1),
            )

    def forward(self, x):
        return self.layers(x.view(len(x), 6, 2).transpose(1, 2))


class Attention(nn.Module):
    """One encoder layer over 6 rows of 2 columns, with dropout inside the attention."""

    def __init__(self):
        super().__init__()
        with keyed_draws(CPU, 7):
            self.embed = nn.Linear(2, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
            self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.layer(self.embed(x.view(len(x), 6, 2))).mean(dim=1))


def batches(num, size=24, inputs=12, seed=0):
    """`num` batches x `[size, inputs]`, y `[size]` of a learnable target."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        x = torch.randn(size, inputs, generator=generator)
        yield x, x[:, :3].sum(dim=1)
