"""What a process has to have done before it can train: imports that torch puts off, and kernels.

For a standby, whose forks then start at once. Touches no device and leaves no thread behind: the
one that loads the loader's kernel is not used.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

from tapeline.store import Shards, write_shards
from tapeline.tape import synthetic_sessions
from tapeline.windows import BatchSource, Shuffled, WindowIndex
from tapeline.windows.drawn import Drawn

# Torch imports these at the first step of a run: `use_deterministic_algorithms` and `distribute`.
_PUT_OFF = ("torch._inductor", "torch._dynamo", "torch.distributed.fsdp", "tapeline.run")
_ROWS = 200


def ready() -> None:
    """Import everything that a run needs, and gather windows of a small store of its own."""
    for name in _PUT_OFF:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(synthetic_sessions(2, rows=_ROWS), Path(folder), "mmap")
        shards = Shards(folder)
        index = WindowIndex(shards, 20, 10)
        source = BatchSource(shards, 20, 10, 0, None)
        source.batch(*index.locate(Shuffled(0).windows(index.num_windows, 0, 0, 4)))
        Drawn(source, index, Shuffled(0))(0, 4, *source.empty(4))
