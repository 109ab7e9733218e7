"""Windows over a store: which there are, in what order, and as batches.

A window is `T` consecutive rows of one session; its target is the change of one column from the
window's last row to the row `horizon` later in the same session. Nothing here knows about models.
"""

from tapeline.windows.audit import REASONS, Audit
from tapeline.windows.augment import ColumnDropout, Draws, Noise, Scaling, named
from tapeline.windows.batch import BatchSource, make_batch, make_batch_vec
from tapeline.windows.form import Feed, Form
from tapeline.windows.identity import data_fingerprint
from tapeline.windows.index import WindowIndex
from tapeline.windows.loader import Loader
from tapeline.windows.order import Eras, Order, Sequential, Shuffled, WithReplacement
from tapeline.windows.rows import RowPolicy, select
from tapeline.windows.sampler import WindowSampler
from tapeline.windows.scale import Normaliser

__all__ = [
    "REASONS",
    "Audit",
    "BatchSource",
    "ColumnDropout",
    "Draws",
    "Eras",
    "Feed",
    "Form",
    "Loader",
    "Noise",
    "Normaliser",
    "Order",
    "RowPolicy",
    "Scaling",
    "Sequential",
    "Shuffled",
    "WindowIndex",
    "WindowSampler",
    "WithReplacement",
    "data_fingerprint",
    "make_batch",
    "make_batch_vec",
    "named",
    "select",
]
