"""Training: the step, the loop around it, and what makes both repeatable on any ranks."""

from tapeline.training.contract import Contract, contract_of
from tapeline.training.determinism import check_determinism, make_deterministic
from tapeline.training.evaluate import evaluate
from tapeline.training.lanes import Lanes
from tapeline.training.loop import Hook, loop, train
from tapeline.training.objective import Evaluation
from tapeline.training.parallel import data_parallel_grads
from tapeline.training.ranks import joined
from tapeline.training.step import TrainStep

__all__ = [
    "Contract",
    "Evaluation",
    "Hook",
    "Lanes",
    "TrainStep",
    "check_determinism",
    "contract_of",
    "data_parallel_grads",
    "evaluate",
    "joined",
    "loop",
    "make_deterministic",
    "train",
]
