"""`tapeline advise`: before an accelerator is bought, what each lever would give at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, Plot, inputs_table, option, show
from tapeline.cli.plans.from_run import loading, measured, precision_of
from tapeline.errors import TapelineError
from tapeline.plan import Inputs, Measured, Quantity
from tapeline.plan.accelerator import (
    COMPUTE_MS,
    DATA_MS,
    FASTER,
    GRADIENT_BYTES,
    LATENCY_US,
    LINK_GB,
    PARAMETERS,
    Link,
)
from tapeline.plan.advice import BF16_COMPUTE_MS, Known, Lever, Spent, advise
from tapeline.plan.job import ACCELERATORS

if TYPE_CHECKING:
    from tapeline.budget import Budget
    from tapeline.report import Table

_WORTH_IT = 1.1
_COMMUNICATION_MS = Quantity("communication_ms", "Of compute, in collectives", positive=False)
_CHECKPOINT_MS = Quantity("checkpoint_ms", "Of a step, for checkpoints", positive=False)
_REST_MS = Quantity("rest_ms", "Of a step, for all else", positive=False)
_LOADER_MS = Quantity("loader_ms", "Of the loader, to make a batch alongside the steps")


def advise_run(
    run: Annotated[Path, typer.Argument(help="The folder of a run, live or dead.")],
    bf16_compute_ms: Annotated[float | None, option(BF16_COMPUTE_MS)] = None,
    faster: Annotated[float | None, option(FASTER)] = None,
    parameters: Annotated[int | None, option(PARAMETERS)] = None,
    link_gb_per_s: Annotated[float | None, option(LINK_GB)] = None,
    latency_us: Annotated[float | None, option(LATENCY_US)] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Say what each lever would give a run's steps at most, the most first.

    Gather, prefetch, bfloat16, async checkpoint, a second device, a faster one: from where the
    time of its steps went, by the ledger. What wasn't measured stays unknown.

    Example: tapeline advise runs/reference
    """
    from tapeline.report.plan_figures import lever_figure

    found = measured(run)
    assert found, "a run was named"
    inputs = Inputs(found, loading(run))
    spent = _spent(found, inputs)
    link = None
    if parameters is not None or PARAMETERS.name in found.numbers:
        link = _link(inputs, parameters, link_gb_per_s, latency_us)
    if bf16_compute_ms is not None:
        inputs.take(BF16_COMPUTE_MS, bf16_compute_ms)
    known = Known(
        faster=inputs.take(FASTER, faster),
        num_devices=inputs.count(ACCELERATORS),
        link=link,
        prefetch=True,
        loader_ms=_loader_ms(spent, inputs),
        bfloat16=precision_of(run) != "float32",
        bf16_compute_ms=bf16_compute_ms,
        saves=spent.checkpoint > 0,
        in_background="async_fraction" in found.numbers,
    )
    levers = advise(spent, known)
    show(
        Answer(
            "advise",
            inputs,
            {"step_ms": spent.step, "levers": [asdict(lever) for lever in levers]},
            [lever_table(levers, f"A step of {spent.step:.3g} ms: {spent}")],
            [_decision(levers), *_loader_note(known)],
        ),
        as_json=as_json,
        plot=plot,
        figure=lambda: lever_figure({str(run): levers}),
    )


def _spent(found: Measured, inputs: Inputs) -> Spent:
    if COMPUTE_MS.name not in found.numbers:
        raise TapelineError(
            found.run,
            expected="a run whose ledger has steps",
            found="no step in it",
            fix="Train it for some steps, or use `tapeline bench --advice`",
        )
    communication_ms = inputs.take(_COMMUNICATION_MS)
    return Spent(
        inputs.take(DATA_MS),
        inputs.take(COMPUTE_MS) - communication_ms,
        communication_ms,
        inputs.take(_CHECKPOINT_MS),
        inputs.take(_REST_MS),
    )


def _link(
    inputs: Inputs, parameters: int | None, link_gb_per_s: float | None, latency_us: float | None
) -> Link:
    return Link(
        inputs.count(PARAMETERS, parameters) * inputs.take(GRADIENT_BYTES),
        inputs.take(LINK_GB, link_gb_per_s) * 1e9,
        inputs.take(LATENCY_US, latency_us) / 1e6,
    )


def _loader_ms(spent: Spent, inputs: Inputs) -> float | None:
    """A loader that steps wait for, though it works alongside, takes as long as they do."""
    from tapeline.signals import Limits

    if spent.data >= Limits().starved * spent.step:
        return spent.data + spent.compute + spent.communication
    return inputs.take(_LOADER_MS) if inputs.knows(_LOADER_MS) else None


def budget_advice(budget: Budget) -> tuple[Inputs, dict[str, tuple[Lever, ...]]]:
    """By way to batch: what each lever would give a serial loop at most, and from what link."""
    inputs = Inputs()
    link = _link(inputs, budget.num_parameters, None, None)
    faster = inputs.take(FASTER)
    gathered = budget.row("mmap gathered")
    advice = {}
    for case in ("mmap looped", "mmap gathered"):
        row = budget.row(case)
        known = Known(
            faster=faster,
            link=link,
            looped=row is not gathered,
            gathered_data_ms=gathered.load_ms + gathered.batch_ms,
            bf16_compute_ms=row.compute_bf16_ms,
            saves=False,
        )
        advice[case] = advise(Spent(row.load_ms + row.batch_ms, row.compute_ms), known)
    return inputs, advice


def print_advice(inputs: Inputs, advice: Mapping[str, Sequence[Lever]]) -> None:
    """The advice of `budget_advice`, as tables and a decision each."""
    from tapeline.report import print_table

    print_table(inputs_table(inputs))
    for case, levers in advice.items():
        print_table(lever_table(levers, f"From {case}, in turn with the compute"))
        typer.echo(_decision(levers))


def lever_table(levers: Sequence[Lever], of_what: str) -> Table:
    """A line for each lever."""
    from tapeline.report import Table

    def times(factor: float | None) -> str | None:
        return None if factor is None else f"{factor:.2f} ×"

    return Table(
        ["lever", "gives at most", "limit", "how, in milliseconds of a step now / with it"],
        [[one.name, times(one.speedup), times(one.limit), one.formula] for one in levers],
        f"{of_what}. One lever at a time, the rest of the step as it is. Model: Amdahl 1967",
    )


def _decision(levers: Sequence[Lever]) -> str:
    """The best one that costs nothing, beside the best that must be bought."""
    known = [one for one in levers if one.speedup is not None and one.speedup >= _WORTH_IT]
    free = next((one for one in known if not one.buys), None)
    bought = next((one for one in known if one.buys), None)
    told = [
        f"Before buying: {free.name}, {free.speedup:.2f} × at most ({free.change})."
        if free
        else "Before buying: nothing that was measured gives a tenth.",
        f"Bought: {bought.name}, {bought.speedup:.2f} × at most."
        if bought
        else "Bought: no device gives a tenth.",
    ]
    return " ".join(told)


def _loader_note(known: Known) -> list[str]:
    if known.loader_ms is None:
        return [
            "The loader works alongside, and its own time wasn't measured: shorter steps may come "
            "to wait for it."
        ]
    return [
        f"The loader takes {known.loader_ms:.3g} ms a batch and works alongside: no device makes "
        "steps shorter than that."
    ]
