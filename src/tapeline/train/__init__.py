"""Training: the step, the loop around it, and what makes both repeatable."""

from tapeline.train.evaluate import Evaluation, evaluate
from tapeline.train.loop import Hook, loop, train
from tapeline.train.parallel import data_parallel_grads
from tapeline.train.step import TrainStep

__all__ = [
    "Evaluation",
    "Hook",
    "TrainStep",
    "data_parallel_grads",
    "evaluate",
    "loop",
    "train",
]
