"""A real run whose model does something to its own rank before a step, once."""

from helpers_ranks import Command

from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

MODEL = '''
import os, signal
from pathlib import Path
import torch

class Struck(torch.nn.Module):
    """Does what it is told to before a step, once."""

    def __init__(self, num_inputs, folder, rank, step, number):
        super().__init__()
        self.part = torch.nn.Linear(num_inputs, 1)
        self.drop = torch.nn.Dropout(0.3)
        self.mark, self.when, self.calls = Path(folder) / "struck", (rank, step), 0
        self.number = number

    def forward(self, x):
        self.calls += self.training
        rank, step = self.when
        if self.calls == step and rank == int(os.environ.get("RANK", -1)):
            if not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), self.number)
        return self.part(self.drop(x))

def struck(num_inputs, **arguments):
    return Struck(num_inputs, **arguments)
'''
CONFIG = """
[data]
store = "store"
[model]
factory = "struck_model:struck"
arguments = {{ folder = "{folder}", rank = {rank}, step = 40, number = {number} }}
[training]
steps = 60
batch = 32
lanes = 4
[validation]
fraction = 0.0
[checkpoint]
every = 10
"""


def prepare(folder, *, rank, number):
    write_shards(synthetic_sessions(2, rows=600), folder / "store", "mmap")
    (folder / "struck_model.py").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder, rank=rank, number=number))


def undisturbed(folder):
    return Command(
        1, "train", folder / "run.toml", "--out", folder / "whole", "--json", folder=folder
    )
