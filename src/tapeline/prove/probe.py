"""`python -m tapeline.prove.probe RUN [STEP]`: what a few steps of a run's model do, as JSON.

Without a step: what torch's determinism switch costs on its model.

A process of its own: what the environment says of threads is read when libraries are loaded, and
a model that is at fault must not touch whoever asks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tapeline.attempt import Data, Parts
from tapeline.checkpoint import Shelf, State
from tapeline.config import RunConfig
from tapeline.prove.outside import changes, kept_outside
from tapeline.prove.tracing import Trace, first_difference
from tapeline.runs import RunFolder
from tapeline.training import loop
from tapeline.training.determinism import determinism_cost
from tapeline.windows import Normaliser
from tapeline.world import World

_STEPS = 3


def observe(run: Path, step: int) -> dict[str, Any]:
    """Do a few steps on one rank from what `run` saved at `step`, put that back, do them again.

    Args:
        run: a run folder; nothing is written to it.
        step: of a checkpoint; 0 is the beginning.

    Returns:
        `trace`: of the first time; `again`: what the second made something else of, or None;
        `outside`: what the steps changed and the state didn't put back.
    """
    parts = _parts(run)
    shelf = Shelf(run / "checkpoints")
    begin = shelf.load_step(step) if step else _copy(parts.state(0))
    traces, kept = [], []
    for _ in range(2):
        parts.restore(_copy(begin))
        kept.append(kept_outside(parts.model))
        trace = Trace(parts.model, step)
        with trace.watching():
            last = step + _STEPS
            loop(parts.step, parts.loader, step, last, [trace.step_done])
        traces.append(trace)
    again = first_difference(traces[0].entries, traces[1].entries)
    return {
        "trace": traces[0].as_dict(),
        "again": again,
        "outside": changes(*kept),
    }


def price(run: Path) -> dict[str, float]:
    """What deterministic algorithms cost a step on one rank, see `determinism_cost`."""
    parts = _parts(run)
    with parts.loader as loader:
        batch = next(iter(loader))
        return determinism_cost(lambda: loop(parts.step, [batch], 0, 1))


def _parts(run: Path) -> Parts:
    saved = RunFolder(run).record()
    config = RunConfig.from_mapping(saved["config"], str(run))
    fitted = saved["data"]["normaliser"]
    return Parts.build(Data.open(config, Normaliser.from_dict(fitted) if fitted else None), World())


def _copy(state: State) -> State:
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    return State(tensors, state.values, state.shares)


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # for `module:function`, as the command line has it
    run, *steps = sys.argv[1:]
    print(json.dumps(observe(Path(run), int(steps[0])) if steps else price(Path(run))))
