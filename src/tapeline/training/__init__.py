"""Training: the step, the loop around it, and what makes both repeatable."""

from tapeline.training.evaluate import Evaluation, evaluate
from tapeline.training.loop import Hook, loop, train
from tapeline.training.parallel import data_parallel_grads
from tapeline.training.step import TrainStep

__all__ = [
    "Evaluation",
    "Hook",
    "TrainStep",
    "data_parallel_grads",
    "evaluate",
    "loop",
    "train",
]
