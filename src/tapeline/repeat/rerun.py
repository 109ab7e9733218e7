"""A run again from its record: its code, its data, its settings; and whether the bits are the same.

The data is checked by hash before, and the packages are those that are installed: where they differ
from the record, that is told beside what was found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeline.checkpoint import Shelf, part_sha256
from tapeline.config import RunConfig
from tapeline.errors import CheckpointError, RunError
from tapeline.repeat.worktree import Recreated, recreated
from tapeline.runs import RunFolder
from tapeline.runs.audit import data_fault
from tapeline.runs.facts import CHANGES_BITS, surrounding_changes

_OF_NUMBERS = ("OMP_", "MKL_", "OPENBLAS_", "CUBLAS_", "NVIDIA_TF32", "TORCH_ALLOW", "PYTHONHASH")


@dataclass(frozen=True, slots=True)
class Rerun:
    """A run and its repetition, compared.

    Attributes:
        steps_compared: steps whose losses both have.
        first_difference: the first of them whose losses aren't the same bits.
        state_step: the last step of which both have a checkpoint; None: there is none.
        parts_differing: of the state at that step.
        validations_differ: steps whose validation figures aren't the same.
        surroundings: what is otherwise here than in the record, as far as it changes bits.
    """

    run: str
    again: str
    steps_compared: int
    first_difference: int | None
    state_step: int | None
    parts_differing: tuple[str, ...]
    validations_differ: tuple[int, ...]
    surroundings: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether everything that could be compared is the same to the bit, the state included."""
        differs = self.first_difference or self.parts_differing or self.validations_differ
        return not differs and self.state_step is not None and self.steps_compared > 0

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {**asdict(self), "bitwise_equal": self.is_equal}


def rerun(
    folder: Path,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    say: Callable[[str], None],
) -> Rerun:
    """Train a run again from its record, and compare.

    Args:
        out: the new run's; must be free.
        overrides: settings that change no bit, such as `data.store=…` for data that was moved.
        say: told what is being done.

    Raises:
        RunError: the record lacks code, the data isn't what it was, an override would make it
            another run, or training fails.
    """
    run = RunFolder(folder)
    record = run.record()
    RunFolder(out).check_free()
    config = RunConfig.from_mapping(record["config"], str(folder / "run.json"), overrides)
    if config.hash() != record["config_hash"]:
        raise RunError(
            folder,
            expected="settings that leave the run's computation alone",
            found=", ".join(overrides) or "another version's meaning of its configuration",
            fix="Train another run with them, using `tapeline train`",
        )
    say("comparing the data with its hashes")
    if fault := data_fault({**record, "config": config.resolved()}, verify=True):
        raise RunError(
            config.data.store,
            expected="the data of the run",
            found=fault.evidence.rstrip("."),
            fix=fault.change,
        )
    say("putting its code back")
    with recreated(record) as again:
        say(f"training {config.training.steps:,} steps again")
        _train(record, config, again, out)
    return compare_runs(folder, out)


def compare_runs(folder: Path, again: Path) -> Rerun:
    """Compare two runs bit for bit: losses, validation figures, and the last state of both."""
    first, second = (RunFolder(path) for path in (folder, again))
    losses = first.losses(), second.losses()
    steps = sorted(losses[0].keys() & losses[1].keys())
    differing = [s for s in steps if losses[0][s].hex() != losses[1][s].hex()]
    validations = first.validations(), second.validations()
    shared = sorted(validations[0].keys() & validations[1].keys())
    step, parts = _states(first, second)
    changes = surrounding_changes(*({**run.record(), "data": {}} for run in (first, second)))
    return Rerun(
        run=str(folder),
        again=str(again),
        steps_compared=len(steps),
        first_difference=differing[0] if differing else None,
        state_step=step,
        parts_differing=parts,
        validations_differ=tuple(
            s for s in shared if repr(validations[0][s]) != repr(validations[1][s])
        ),
        surroundings=tuple(
            f"{one.what}: {one.before} → {one.after}"
            for one in changes
            if one.weight >= CHANGES_BITS
        ),
    )


def _states(first: RunFolder, second: RunFolder) -> tuple[int | None, tuple[str, ...]]:
    """The last step that both hold a checkpoint of, and the parts of the state that differ."""
    shelves = Shelf(first.checkpoints_path), Shelf(second.checkpoints_path)
    for step in sorted({*shelves[0].steps()} & {*shelves[1].steps()}, reverse=True):
        try:
            a, b = (part_sha256(shelf.load_step(step)) for shelf in shelves)
        except CheckpointError:
            continue
        return step, tuple(
            name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
        )
    return None, ()


def _train(record: Mapping[str, Any], config: RunConfig, again: Recreated, out: Path) -> None:
    """Train in a process that imports the code put back."""
    values = config.resolved()
    values["checkpoint"] |= {"durable": None, "notice_file": None}  # those are the run's own
    if config.model.folder:
        values["model"]["folder"] = str(again.place(config.model.folder))
    recorded = record["environment"].get("variables", {})
    path = os.pathsep.join(map(str, again.import_folders(record)))
    environment = {
        **os.environ,
        **{name: text for name, text in recorded.items() if name.startswith(_OF_NUMBERS)},
        **({"PYTHONPATH": path} if path else {}),
    }
    with tempfile.TemporaryDirectory(prefix="tapeline-rerun-") as temporary:
        file = Path(temporary, "run.toml")
        file.write_text(toml_of(values), encoding="utf-8")
        command = [*_launcher(record), "train", str(file), "--out", str(out.absolute())]
        done = subprocess.run(
            command, cwd=temporary, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RunError(
            out,
            expected="training to its end",
            found=f"exit code {done.returncode}: {lines[-1] if lines else 'it said nothing'}",
            fix="Remove the folder, and train from the record's commit by hand to see all it says",
        )


def _launcher(record: Mapping[str, Any]) -> list[str]:
    """The command on as many ranks as the bits need: one, where they are the same on any."""
    ranks = record.get("world_size", 1)
    python = [sys.executable, "-P", "-m"]
    if ranks == 1 or record["contract"]["scope"] == "across world sizes":
        return [*python, "tapeline"]
    return [
        *(*python, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", "0", "-m", "tapeline"),
    ]


def toml_of(values: Mapping[str, Any]) -> str:
    """A configuration as TOML; what is None is left to its default."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_inline(value)}" for key, value in plain.items() if value is not None]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(k)} = {_inline(v)}" for k, v in value.items() if v is not None]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = (f"{_key(key)} = {_inline(one)}" for key, one in value.items() if one is not None)
        return f"{{ {', '.join(inner)} }}"
    if isinstance(value, list):
        return f"[{', '.join(_inline(one) for one in value)}]"
    if isinstance(value, float):
        return repr(value)
    # A string, a whole number or a truth value is written as in JSON, but for the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return _inline(str(key))
