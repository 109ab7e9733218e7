"""A ledger in a training loop of one's own: where its time goes, over kills and restarts.

python examples/ledger_own_loop.py FOLDER [steps]

Stop it with Ctrl-C or kill -9, start it again: it goes on from the last checkpoint, and the account
says what the stop cost.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tapeline.ledger import Ledger, account_of, process_began_ns


def batches(first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What any loader would give."""
    for step in range(first, last):
        x = torch.randn(256, 40, generator=torch.Generator().manual_seed(step))
        yield x, x[:, :4].sum(dim=1, keepdim=True)


def main(folder: Path, steps: int) -> None:
    """Train to `steps`, from wherever the last life left off."""
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved = folder / "checkpoint.pt"
    state = torch.load(saved) if saved.exists() else {"step": 0}
    done = state["step"]
    with Ledger(folder, from_step=done, began_ns=process_began_ns()) as ledger:
        if done:
            with ledger.span("restore"):
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        for step, (x, y) in enumerate(ledger.batches(batches(done, steps)), done + 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            ledger.step_done(step)
            if step % 50 == 0:
                with ledger.span("checkpoint"):
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({"step": step, **state}, saved.with_suffix(".new"))
                    saved.with_suffix(".new").replace(saved)
    account = account_of(folder)
    for bucket, nanoseconds in account.job.buckets_ns.items():
        print(f"{bucket:<12} {nanoseconds / 1e9:8.3f} s")
    print(f"{'goodput':<12} {account.goodput:8.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
