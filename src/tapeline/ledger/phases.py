"""What a run's time can be spent on, and which bucket of the account it falls into."""

from __future__ import annotations

# In this order in every array of nanoseconds by phase.
PHASES = (
    "startup",  # imports, building the parts, the first compilation
    "restore",  # reading a checkpoint
    "data",  # waiting for the next batch
    "transfer",  # waiting for a batch to reach the device
    "compute",  # forward, backward, update
    "communication",  # waiting in collectives, where that can be told from compute
    "checkpoint",  # as long as the loop is blocked by one
    "evaluation",
    "other",  # logging, hooks, whatever wasn't named
)
BUCKETS = ("useful", "starved", "checkpoint", "lost", "startup", "evaluation", "other")
BUCKET_OF = {
    "startup": "startup",
    "restore": "startup",
    "data": "starved",
    "transfer": "starved",
    "compute": "useful",
    "communication": "useful",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "other",
}
INDEX = {phase: index for index, phase in enumerate(PHASES)}

NS_PER_S = 1_000_000_000
