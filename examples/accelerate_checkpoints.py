"""An Accelerate loop that can be killed at any moment and goes on with the same bits.

python examples/accelerate_checkpoints.py FOLDER

Kill it (`kill -9`), start the same command again, as often as you like: the last line, a hash of
the parameters, is the one of a run that was never killed. For one process.
"""

import hashlib
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F

from tapeline.checkpoint import Checkpointer, capture_state, restore_state
from tapeline.store import Shards, write_shards
from tapeline.tape import synthetic_sessions
from tapeline.windows import Feed, Form, Loader, Shuffled, WindowIndex

T, HORIZON, BATCH, STEPS, EVERY = 20, 10, 32, 60, 10


def market(folder: Path, device: str) -> Loader:
    """Batches of a small synthetic market, epoch after epoch without an end."""
    if not (folder / "store").exists():
        write_shards(synthetic_sessions(2, rows=300), folder / "store", "mmap")
    shards = Shards(folder / "store")
    form, feed = Form(shards.column("mid")), Feed(device=device)
    index = WindowIndex(shards, T, HORIZON)
    return Loader(shards, index, Shuffled(0), BATCH, form=form, feed=feed)


def train(folder: Path, step_done: Callable[[int], None] = lambda _: None) -> nn.Module:
    """Train to the last step, from the beginning or from the newest checkpoint."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    loader = market(folder, str(accelerator.device))
    num_inputs = T * len(loader.source.shards.columns)
    model = nn.Sequential(nn.Linear(num_inputs, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    # What determines the rest lies in the objects that `prepare` wraps, so these are saved. The
    # loader is not prepared: it puts its batches on the device itself, and knows its position.
    parts: dict[str, Any] = {"scheduler": scheduler, "sampler": loader}
    prepared, stepper, schedule = accelerator.prepare(model, optimizer, scheduler)

    with loader, Checkpointer(folder / "checkpoints", keep=2) as checkpoints:
        done = 0
        if checkpoints.entries():
            state = checkpoints.load().state
            restore_state(state, model, optimizer, **parts)
            done = state.step
        for step, (x, y) in enumerate(islice(loader, STEPS - done), done + 1):
            stepper.zero_grad()
            accelerator.backward(F.mse_loss(prepared(x).squeeze(1), y))
            stepper.step()
            schedule.step()
            checkpoints.check()
            if step % EVERY == 0:
                checkpoints.save(capture_state(model, optimizer, step=step, **parts))
            step_done(step)
    return model


def sha256(model: nn.Module) -> str:
    """Over all parameters."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    print(sha256(train(Path(sys.argv[1]))))
