"""A ledger in a loop with Hugging Face Accelerate, one a process.

accelerate launch examples/ledger_accelerate.py FOLDER [epochs]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tapeline.ledger import Ledger, account_of, process_began_ns
from tapeline.world import World


def main(folder: Path, epochs: int) -> None:
    """Train some epochs with a checkpoint and an evaluation after each."""
    accelerator = Accelerator()
    world = World(
        accelerator.process_index, accelerator.num_processes, accelerator.local_process_index
    )
    with Ledger(folder, world=world, began_ns=process_began_ns()) as ledger:
        model = nn.Linear(40, 1)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(4096, 40)
        loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), 64, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for epoch in range(epochs):
            for x, y in ledger.batches(loader):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                ledger.step_done(ledger.step + 1)
            with ledger.span("evaluation"), torch.no_grad():
                model(x)
            with ledger.span("checkpoint"):
                accelerator.save_state(folder / f"epoch-{epoch}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        account = account_of(folder)
        print(f"goodput {account.goodput:.1%} of {account.job.wall_ns / 1e9:.1f} s, all ranks")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
