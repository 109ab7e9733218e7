"""A training loop of one's own, with the same bits at any number of ranks from 1 to 8.

python examples/lanes_own_loop.py [cuda]
torchrun --nproc-per-node 3 examples/lanes_own_loop.py [cuda]

The last line is a hash of the parameters: it is the same for both commands.
"""

import hashlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tapeline.training import Lanes, joined, make_deterministic


def batches(num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What any loader would give: every rank is given the whole batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        x = torch.randn(64, 40, generator=generator)
        yield x, x[:, :4].sum(dim=1, keepdim=True)


def main() -> None:
    """Train for 100 steps and print what came out."""
    make_deterministic(threads=1)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    with joined(device) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        lanes = Lanes(model, num_lanes=8, seed=7)
        for x, y in batches(100):
            batch = x.to(device), y.to(device)
            loss = lanes.backward(batch, lambda lane: F.mse_loss(model(lane[0]), lane[1]))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if world.rank == 0:
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            print(f"loss {loss.item():.4f}")
            print(hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
