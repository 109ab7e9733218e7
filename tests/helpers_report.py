"""Run folders written by hand for their pages: ranks, kills, findings, hostile names."""

from __future__ import annotations

import json
from pathlib import Path

from helpers_ledger import S, begin, kill, new_clock
from helpers_runs import losses_of, new_record

from tapeline.clock import utc
from tapeline.files import Journal
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder

EVIL = "<script>document.title='owned'</script>\"><img src=x onerror=\"document.title='owned'\">"
STEP_NS, DATA_NS, SAVE_NS = S // 4, S // 10, S // 2


def write_page_run(
    folder: Path,
    *,
    name: str = "r",
    ranks: int = 1,
    lives: tuple[tuple[int, int], ...] = ((0, 40),),
    ended: bool = True,
    validates: bool = True,
    seed: int = 0,
    told: str = "loss is far above what it was",
) -> Path:
    """A run on a fake clock.

    Args:
        folder: of the run.
        name: of the run.
        ranks: how many.
        lives: the steps done before and after each; all but the last are killed.
        ended: whether the last one says that it finished.
        validates: whether there are validations.
        seed: of its losses.
        told: what a watcher saw and an exception says.
    """
    clock = new_clock()
    run = RunFolder(folder, clock)
    record = new_record(f"seed={seed}")
    record["config"]["name"] = record["data"]["store"] = name
    record["world_size"] = ranks
    record["given"] = ["name", "training.steps"]
    run.create(record)
    with Journal(run.attempts_path) as journal, Journal(run.findings_path) as findings:
        for number, (first, last) in enumerate(lives, start=1):
            start = {"attempt": number, "started": utc(clock.wall_ns()), "host": "elsewhere"}
            journal.append({**start, "pid": 1, "world_size": ranks, "from_step": first})
            clean = ended and number == len(lives)
            _life(run, clock, number, ranks, (first, last), clean, validates, losses_of(seed))
            findings.append(_finding(number, last, told))
            if number < len(lives):
                journal.append({"attempt": number, "how": "killed", "evidence": told})
                clock.advance(7 * S)
            elif ended:
                journal.append(
                    {"attempt": number, "ended": utc(clock.wall_ns()), "how": "finished",
                     "step": last, "evidence": told}
                )  # fmt: skip
    run.errors_path(0).parent.mkdir()
    error = {"attempt": len(lives), "exception": f"ValueError: {told}", "wall_ns": clock.wall_ns()}
    if not ended:
        run.errors_path(0).write_text(json.dumps(error) + f"\n{told}\n")
    return folder


def _life(run, clock, number, ranks, steps, clean, validates, losses):
    first, last = steps
    ledgers = [
        begin(run.path, clock, rank=rank, size=ranks, attempt=number, from_step=first)
        for rank in range(ranks)
    ]

    def all_do(phase, ns):
        for ledger in ledgers:
            ledger.switch(phase)
        clock.advance(ns)

    all_do("startup", 3 * S)
    for step in range(first + 1, last + 1):
        all_do("data", DATA_NS)
        all_do("compute", STEP_NS + (20 * S if step == 25 else step * S // 400))
        for ledger in ledgers:
            ledger.step_done(step)
        if step % 10 == 0:
            all_do("checkpoint", SAVE_NS)
    for ledger in ledgers:
        ledger.close("ended") if clean else kill(ledger)
    for rank in range(ranks):
        with MetricsJournal(run.metrics_path(rank), number) as metrics:
            for end in range(first + 10, last + 1, 10):
                metrics.losses(
                    end, losses[end - 10 : end], grad_norms=[1.0] * 10, learning_rate=1e-3
                )
                machine = MachineFigures([STEP_NS] * 10, [0] * 10, 900.0 + rank, (500 + end) << 20)
                metrics.machine(end, machine)
                if validates and rank == 0:
                    metrics.validation(end, {"loss": losses[end - 1], "skill": float("nan")})


def _finding(attempt, step, told):
    return {
        "attempt": attempt,
        "watcher": "loss_spike",
        "step": step,
        "last_step": step,
        "seen": told,
        "means": "a bad batch",
        "severity": "warning",
        "action": "log",
    }
