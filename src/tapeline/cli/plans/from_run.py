"""`--from-run`: what a run recorded, under the names that plans ask for.

Reads the run folder; measures nothing itself. What isn't there is said, not invented.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeline.errors import TapelineError
from tapeline.plan import Inputs

if TYPE_CHECKING:
    from tapeline.plan import Measured

Number = tuple[float, str]
_S_PER_HOUR = 3600.0
_NS_PER_MS, _NS_PER_MINUTE = 1e6, 60e9


def measured(run: Path | None) -> Measured | None:
    """The numbers of a run; None without one.

    Raises:
        RunError: the folder is not that of a run.
    """
    if run is None:
        return None
    from tapeline.clock import SystemClock
    from tapeline.plan import Measured
    from tapeline.runs import RunFolder

    folder = RunFolder(run, SystemClock())
    record = folder.record()
    config = record.get("config", {})
    stated = config.get("checkpoint", {}).get("mtbf_hours")
    decisions = folder.intervals()
    failing, why_not = _failing(folder.attempts(), stated)
    numbers: dict[str, Number] = {}
    missing: dict[str, str] = {}
    for found, names, why in (
        (_stepping(run, config.get("training", {}).get("batch")), _STEPPING, _NO_LEDGER),
        (_saving(decisions), _SAVING, "saves weren't timed (checkpoint.every isn't auto)"),
        (failing, ("mtbf_hours",), why_not),
        (_model(record), ("parameters",), "its record is older than that number in it"),
    ):
        numbers |= found
        missing |= {name: why for name in names if name not in found}
    told = {"mtbf_hours"} if stated is not None else set()
    return Measured(str(run), numbers, missing, stated=frozenset(told))


_NO_LEDGER = "no ledger of it tells this"
_STEPPING = (
    *("data_ms", "compute_ms", "communication_ms", "checkpoint_ms", "rest_ms"),
    *("restart_minutes", "accelerators"),
    *("samples_per_second", "loader_samples_per_second"),
)
_SPENT = {
    "data_ms": ("data", "transfer"),
    "compute_ms": ("compute", "communication"),
    "communication_ms": ("communication",),
    "checkpoint_ms": ("checkpoint",),
    "rest_ms": ("evaluation", "other"),
}
_SAVING = ("checkpoint_seconds", "async_fraction", "write_slowdown")


def loading(run: Path) -> Measured | None:
    """What a run's loader takes for a batch, waited for or not; None where that wasn't timed."""
    import numpy as np

    from tapeline.plan import Measured
    from tapeline.runs import read_metrics

    found = [read_metrics(path).snapshot["batch_s"] for path in (run / "metrics").glob("rank-*")]
    medians_ms = [float(np.median(one.values)) * 1000 for one in found if len(one)]
    if not medians_ms:
        return None
    how = f"median of {sum(map(len, found))} readings, of the slowest rank"
    return Measured(str(run), {"loader_ms": (max(medians_ms), how)})


def check_overlapped(inputs: Inputs, overlap: bool) -> None:
    """Refuse a run's loader for steps that wait for it in turn.

    Raises:
        TapelineError: the loader's rate was measured alongside the compute.
    """
    if not overlap and inputs.values["loader_samples_per_second"].source == "measured":
        raise TapelineError(
            "--no-overlap",
            expected="--loader-samples-per-second beside it",
            found="the rate of a run whose loader worked alongside the compute",
            fix="Give the loader's own rate",
        )


def device_of(run: Path) -> str:
    """What the run's record says that it was trained on."""
    return str(_record(run).get("machine", {}).get("device", "unknown"))


def precision_of(run: Path) -> str:
    """What the run's forward pass computes in."""
    return str(_record(run).get("config", {}).get("training", {}).get("precision", "float32"))


def _record(run: Path) -> dict[str, Any]:
    from tapeline.clock import SystemClock
    from tapeline.runs import RunFolder

    return RunFolder(run, SystemClock()).record()


def _stepping(run: Path, batch: int | None) -> dict[str, Number]:
    """What the ledger says of a step, over all ranks, and of a start.

    A loader that is waited for gives a batch in the time of data and compute together.
    """
    from tapeline.ledger import account_of

    if not (run / "ledger").is_dir():
        return {}
    account = account_of(run)
    spent, steps = account.job.phases_ns, account.job.kept_steps + account.job.redone_steps
    found: dict[str, Number] = {}
    if steps and spent["compute"]:
        how = f"mean over {steps} steps in the ledger"
        for name, phases in _SPENT.items():
            found[name] = (sum(spent[phase] for phase in phases) / steps / _NS_PER_MS, how)
        num = len(account.ranks)
        found["accelerators"] = (num, "its ranks")
        if batch:
            step_ms = found["data_ms"][0] + found["compute_ms"][0]
            found["samples_per_second"] = (
                batch / num / found["compute_ms"][0] * 1000,
                f"a batch of {batch} over {num} ranks, compute a {how}",
            )
            found["loader_samples_per_second"] = (
                batch / step_ms * 1000,
                f"a batch of {batch} in data and compute, a {how}",
            )
    starts = [life for rank in account.ranks for life in rank.lives if life.starts_again]
    if starts:
        lost_ns = sum(
            sum(life.times.lost_ns[kind] for kind in ("restart", "reload")) for life in starts
        ) + sum(
            life.detection_ns + life.down_ns for rank in account.ranks for life in rank.lives[:-1]
        )
        minutes = lost_ns / len(starts) / _NS_PER_MINUTE
        found["restart_minutes"] = (
            minutes,
            f"from failure to first step, mean over {len(starts)} in the ledger",
        )
    return found


def _model(record: dict[str, Any]) -> dict[str, Number]:
    """What the record says of the model."""
    number = record.get("num_parameters")
    return {} if number is None else {"parameters": (number, "its record")}


def _saving(decisions: list[dict[str, Any]]) -> dict[str, Number]:
    """What the controller of `checkpoint.every = "auto"` measured last."""
    if not decisions:
        return {}
    costs, how = decisions[-1]["costs"], "medians of the last saves"
    whole_s = costs["blocking_s"] + costs["write_s"]
    if not whole_s > 0:
        return {}
    found: dict[str, Number] = {"checkpoint_seconds": (whole_s, how)}
    if costs["write_s"] > 0:
        found["async_fraction"] = (costs["blocking_s"] / whole_s, how)
        found["write_slowdown"] = (costs["slowdown"], how)
    return found


def _failing(lives: list[dict[str, Any]], stated: float | None) -> tuple[dict[str, Number], str]:
    """The MTBF that the run was told, else its failures; and why neither is there."""
    if stated is not None:
        return {"mtbf_hours": (stated, "its configuration")}, ""
    ended = [life for life in lives if "ended" in life]
    hours = sum(_lived_s(life) for life in ended) / _S_PER_HOUR
    failures = sum(life.get("how") in ("killed", "failed") for life in lives)
    if not hours > 0:
        return {}, "no life of it has a recorded end"
    if not failures:
        return {}, f"no failure in {hours:.3g} h, which is too little to tell"
    return {
        "failures": (failures, "lives that were killed or failed"),
        "exposure_hours": (hours, "lives with a recorded end"),
    }, ""


def _lived_s(life: dict[str, Any]) -> float:
    between = datetime.fromisoformat(life["ended"]) - datetime.fromisoformat(life["started"])
    return max(0.0, between.total_seconds())
