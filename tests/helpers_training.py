"""A small model, its batches, and how far two sets of parameters are apart."""

import random

import numpy as np
import torch
from torch import nn

from tapeline.training.determinism import keyed_draws
from tapeline.windows import WindowSampler

T, HORIZON, BATCH, COLUMNS = 4, 3, 24, 3
CPU = torch.device("cpu")


def sampler(store, seed=3):
    return WindowSampler(store.lengths, T, HORIZON, BATCH, seed)


def network(dropout=0.0, seed=0):
    with keyed_draws(CPU, seed):
        return nn.Sequential(
            nn.Linear(T * COLUMNS, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


def examples(num=BATCH, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num, T * COLUMNS)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(x[:, :2].sum(axis=1))


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def deviation(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def states():
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the one that must not move
    return torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()
