"""The lessons of the tutorial: each measures or proves one thing and returns its figures."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tapeline.checkpoint import load_state, restore_model
from tapeline.prove.killing import resume_to_end, train_and_kill, train_to_end
from tapeline.session import Float32Array
from tapeline.store import FORMATS, Shards, write_shards
from tapeline.tape import synthetic_sessions
from tapeline.training import TrainStep, data_parallel_grads, evaluate, loop, train
from tapeline.training.determinism import make_deterministic
from tapeline.training.models import perceptron
from tapeline.training.step import batch_loss
from tapeline.windows import (
    BatchSource,
    Feed,
    Form,
    Loader,
    Normaliser,
    Shuffled,
    WindowIndex,
    WindowSampler,
    make_batch,
    make_batch_vec,
)

NUM_SESSIONS, SEED = 8, 0
_GRID_NS = 500_000_000
_CONFIG = """\
name = "tutorial"

[data]
store = {store}

[training]
steps = {steps}

[validation]
fraction = 0.25

[checkpoint]
every = 100
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """The small problem that the lessons share: the first sessions to train on, the last to judge.

    Attributes:
        root: a store in all three formats.
        shards: its memory-mapped one.
        training, held_out: windows before and after the cut.
        scale: fitted on the training windows' rows.
    """

    root: Path
    shards: Shards
    training: WindowIndex
    held_out: WindowIndex
    scale: Normaliser

    @classmethod
    def make(cls, root: Path) -> Problem:
        """Write the synthetic market to `root` and open it."""
        for fmt in FORMATS:
            write_shards(synthetic_sessions(NUM_SESSIONS, SEED), root, fmt, replace=True)
        shards = Shards(root)
        training, held_out = WindowIndex(shards).split(train=0.75, validation="rest").values()
        make_deterministic(threads=1)
        return cls(root, shards, training, held_out, Normaliser.fit(shards, training))

    def model(self) -> torch.nn.Module:
        """The reference model, always with the same first weights."""
        torch.manual_seed(SEED)
        return perceptron(20 * len(self.shards.columns))

    def sampler(self) -> WindowSampler:
        """Batches of 256 training windows, from the start of the order."""
        return WindowSampler(self.training, batch=256, seed=SEED)


def sizes(problem: Problem) -> dict[str, Any]:
    """Bytes in each format, and whether all give the same bits."""
    opened = {fmt: Shards(problem.root, fmt) for fmt in FORMATS}
    sessions, starts = WindowSampler(problem.shards.lengths, seed=SEED).next()
    batches = [make_batch(shards, sessions, starts) for shards in opened.values()]
    batches += [make_batch_vec(shards, sessions, starts) for shards in opened.values()]
    first_x, first_y = batches[0]
    return {
        "bytes": {fmt: _bytes(shards) for fmt, shards in opened.items()},
        "bytes_with_times_and_ages": {fmt: shards.bytes for fmt, shards in opened.items()},
        "formats_identical": all(
            _same_bits(x, first_x) and _same_bits(y, first_y) for x, y in batches
        )
        and len({shards.mm.tobytes() for shards in opened.values()}) == 1,
        "windows": WindowIndex(problem.shards).num_windows,
        "windows_per_session": WindowIndex(problem.shards).num_windows // len(problem.shards),
    }


def _bytes(shards: Shards) -> int:
    """Bytes of the values alone; of everything for csv, which keeps all in one table."""
    files = shards.index.files.items()
    return sum(file.bytes for name, file in files if shards.fmt == "csv" or "values" in name)


def _same_bits(a: Float32Array, b: Float32Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def precision(problem: Problem, steps: int = 300) -> dict[str, Any]:
    """The same training in float32 and under bfloat16, step by step."""
    losses, skill = {}, {}
    source = BatchSource(problem.shards, scale=problem.scale)
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        model = problem.model()
        losses[name] = train(
            model, problem.shards, problem.sampler(), steps, bf16=bf16, scale=problem.scale
        )
        skill[name] = evaluate(model, source, problem.held_out).as_dict()
    gaps = [abs(a - b) for a, b in zip(losses["float32"], losses["bfloat16"], strict=True)]
    worst = int(np.argmax(gaps))
    return {
        "steps": steps,
        "losses": losses,
        "last_50_mean": {name: float(np.mean(values[-50:])) for name, values in losses.items()},
        "largest_step_difference": gaps[worst],
        "largest_step_difference_share": gaps[worst] / losses["float32"][worst],
        "out_of_sample": skill,
    }


def exactness(problem: Problem, steps: int = 20) -> dict[str, Any]:
    """How far accumulation is from one batch, and averaged shards from the full gradient."""
    whole, parts = problem.model(), problem.model()
    for model, accumulate in ((whole, 1), (parts, 4)):
        train(
            model,
            problem.shards,
            problem.sampler(),
            steps,
            accumulate=accumulate,
            scale=problem.scale,
        )
    source = BatchSource(problem.shards, scale=problem.scale)
    x, y = (torch.from_numpy(a) for a in source.batch(*problem.sampler().next()))
    model = problem.model()
    full = torch.autograd.grad(batch_loss(model, x, y), list(model.parameters()))
    halves = data_parallel_grads(model, x, y, num_shards=2)
    half = len(x) // 2
    one = torch.autograd.grad(batch_loss(model, x[:half], y[:half]), list(model.parameters()))
    return {
        "accumulation_deviation": _distance(whole.parameters(), parts.parameters()),
        "data_parallel_deviation": _distance(full, halves),
        "half_batch_deviation": _distance(full, one),
    }


def _distance(a: Any, b: Any) -> float:
    with torch.no_grad():
        return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def resume(problem: Problem, folder: Path) -> dict[str, Any]:
    """200 steps at once, 100 + SIGKILL + resume, and 100 + only the weights kept."""
    steps, half = 200, 100
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / "tutorial.toml"
    path.write_text(_CONFIG.format(store=json.dumps(str(problem.root.absolute())), steps=steps))
    uninterrupted = train_to_end(path, folder / "uninterrupted")
    killed = train_and_kill(path, folder / "killed", at_step=half + 1)
    resumed = resume_to_end(folder / "killed")
    checkpoints = folder / "killed" / "checkpoints"
    middle = checkpoints / f"step-{half:08d}"
    only_weights = problem.model()
    restore_model(load_state(middle), only_weights)
    train(only_weights, problem.shards, problem.sampler(), half, scale=problem.scale)
    finished = problem.model()
    restore_model(load_state(checkpoints / f"step-{steps:08d}"), finished)
    return {
        "steps": steps,
        "killed": asdict(killed),
        "resumed_from_step": resumed["from_step"],
        "bitwise_equal": resumed["state_sha256"] == uninterrupted["state_sha256"],
        "state_sha256": {
            "uninterrupted": uninterrupted["state_sha256"],
            "killed_and_resumed": resumed["state_sha256"],
        },
        "weights_only_deviation": _distance(finished.parameters(), only_weights.parameters()),
        "checkpoint_bytes": sum(f.stat().st_size for f in middle.iterdir()),
    }


def prefetch(problem: Problem, steps: int = 200) -> dict[str, Any]:
    """How long a step waits for its batch without and with a thread that reads ahead."""
    found = {}
    for depth in (0, 2):
        model = problem.model()
        step = TrainStep(model, torch.optim.Adam(model.parameters()), seed=SEED)
        loader = Loader(
            problem.shards,
            problem.training,
            Shuffled(SEED),
            form=Form(0, problem.scale),
            feed=Feed(depth),
        )
        waits: list[float] = []
        start = time.perf_counter()
        loop(step, _timed(loader, waits), 0, steps)
        total = time.perf_counter() - start
        found[f"depth_{depth}"] = {
            "step_ms": 1e3 * total / steps,
            "wait_ms": 1e3 * float(np.median(waits)),
            "wait_share": sum(waits) / total,
        }
    hidden = 1.0 - found["depth_2"]["wait_ms"] / found["depth_0"]["wait_ms"]
    # On a machine whose cores are all busy the thread only gets in the way: no overlap to state.
    return {"steps": steps, **found, "overlap": hidden if hidden > 0 else None}


def _timed(batches: Any, waits: list[float]) -> Any:
    iterator = iter(batches)
    try:
        while True:
            start = time.perf_counter()
            batch = next(iterator)
            waits.append(time.perf_counter() - start)
            yield batch
    finally:
        iterator.close()


def instruments(root: Path) -> dict[str, Any]:
    """Two instruments in one store, and every window of it examined: none holds rows of both.

    Judged by the rows' own times and keys, not by the index that made the windows: a window's
    rows, its target's included, must follow each other on the grid within one instrument.
    """
    both = [
        session for name in ("SYN", "SYN2") for session in synthetic_sessions(4, 0, instrument=name)
    ]
    write_shards(both, root, "mmap", replace=True)
    shards = Shards(root)
    index = WindowIndex(shards)
    sessions, starts = index.locate(np.arange(index.num_windows))
    first = shards.offsets[sessions] + starts
    last = first + index.span - 1
    times = np.concatenate([session.times for session in both])
    owner = np.repeat([session.key.instrument for session in both], [len(s) for s in both])
    mixed = (owner[first] != owner[last]) | (
        times[last] - times[first] != (index.span - 1) * _GRID_NS
    )
    return {
        "instruments": sorted(set(owner.tolist())),
        "windows_examined": index.num_windows,
        "windows_mixing": int(mixed.sum()),
        "row_ranges_that_would_mix": int(shards.offsets[-1]) - index.span + 1 - index.num_windows,
    }
