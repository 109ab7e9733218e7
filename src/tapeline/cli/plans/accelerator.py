"""`tapeline plan accelerator`: would a second or a faster one help."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, option, points, show
from tapeline.cli.plans.from_run import device_of, measured
from tapeline.plan import Inputs
from tapeline.plan.accelerator import (
    COMPUTE_MS,
    DATA_MS,
    FASTER,
    FLOPS_PER_STEP,
    GRADIENT_BYTES,
    LATENCY_US,
    LINK_GB,
    MAX_DEVICES,
    PARAMETERS,
    AcceleratorPlan,
    Link,
    Step,
    plan_accelerator,
)
from tapeline.plan.devices import DEVICES, device_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table

Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap",
        help="The next batch is made while the device computes: data's time is the loader's, not "
        "the wait for it.",
    ),
]


def accelerator(
    data_ms: Annotated[float | None, option(DATA_MS)] = None,
    compute_ms: Annotated[float | None, option(COMPUTE_MS)] = None,
    overlap: Overlap = False,
    faster: Annotated[float | None, option(FASTER)] = None,
    parameters: Annotated[int | None, option(PARAMETERS)] = None,
    gradient_bytes: Annotated[float | None, option(GRADIENT_BYTES)] = None,
    link_gb_per_s: Annotated[float | None, option(LINK_GB)] = None,
    latency_us: Annotated[float | None, option(LATENCY_US)] = None,
    max_devices: Annotated[int | None, option(MAX_DEVICES)] = None,
    device: Annotated[
        str | None, typer.Option(help="What the step was measured on, for the share of its peak.")
    ] = None,
    flops_per_step: Annotated[float | None, option(FLOPS_PER_STEP)] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What a faster accelerator, or more of them, would do for a step.

    Example: tapeline plan accelerator --data-ms 0.74 --compute-ms 1.17
    """
    inputs = Inputs(measured(from_run))
    step = Step(inputs.take(DATA_MS, data_ms), inputs.take(COMPUTE_MS, compute_ms), overlap)
    message_bytes = inputs.count(PARAMETERS, parameters) * inputs.take(
        GRADIENT_BYTES, gradient_bytes
    )
    link = Link(
        message_bytes,
        inputs.take(LINK_GB, link_gb_per_s) * 1e9,
        inputs.take(LATENCY_US, latency_us) / 1e6,
    )
    if device is None and from_run is not None:
        device = device_of(from_run)
    if flops_per_step is not None:
        inputs.take(FLOPS_PER_STEP, flops_per_step)
    plan = plan_accelerator(
        step,
        link,
        faster=inputs.take(FASTER, faster),
        max_devices=inputs.count(MAX_DEVICES, max_devices),
        device=device_named(device) if device else None,
        flops_per_step=flops_per_step,
    )
    model = {**asdict(plan), "devices": [asdict(one) for one in DEVICES]}
    notes = [*_decisions(plan), *_peak(plan, device, flops_per_step)]
    if inputs.values[DATA_MS.name].source == "measured" and not overlap:
        notes.append(
            "The run's wait for data is taken as fixed; if its loader is the limit, a faster "
            "accelerator waits for it the longer (then give the loader's own time and --overlap)."
        )
    show(
        Answer("accelerator", inputs, model, _tables(plan), notes),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan),
    )


def _tables(plan: AcceleratorPlan) -> list[Table]:
    from tapeline.report import Table

    turns = "alongside" if plan.overlapped else "in turn with"
    return [
        Table(
            ["devices", "compute ms", "all-reduce ms", "step ms", "speed-up", "of ideal"],
            [
                [
                    row.num_devices,
                    row.compute_ms,
                    row.all_reduce_ms,
                    row.step_ms,
                    f"{row.speedup:.2f} ×",
                    points(row.efficiency),
                ]
                for row in plan.by_devices
            ],
            f"The same global batch on more devices, the data's time as it is, {turns} the "
            "compute. Model: Amdahl 1967 and a ring all-reduce of 2n(p − 1)/p after the compute",
        ),
        Table(
            ["device", "memory GB", "GB/s", "dense bf16 TFLOPS", "printed with sparsity", "source"],
            [
                [
                    one.name,
                    one.memory_gb,
                    one.bandwidth_gb_per_s,
                    one.bf16_tflops,
                    one.sparse_tflops,
                    one.source,
                ]
                for one in DEVICES
            ],
            "Devices with sure figures, from data sheets",
        ),
    ]


def _decisions(plan: AcceleratorPlan) -> list[str]:
    from tapeline.report import format_number, format_percent

    limit = "without limit" if plan.limit is None else f"at most {plan.limit:.2f} ×"
    notes = [
        f"An accelerator {format_number(plan.faster)} times as fast makes a step "
        f"{plan.speedup:.2f} × faster ({limit}, however fast it were): data takes "
        f"{format_percent(plan.data_share)} of data and compute together."
    ]
    second = plan.by_devices[1]
    verdict = "helps" if second.speedup > 1 else "doesn't help"
    notes.append(f"A second one like it {verdict}: {second.speedup:.2f} ×.")
    if plan.dominated_from is not None:
        notes.append(
            f"From {plan.dominated_from} devices on, the all-reduce takes longer than the compute; "
            f"the shortest step is on {plan.best_devices}."
        )
    return notes


def _peak(plan: AcceleratorPlan, device: str | None, flops: float | None) -> list[str]:
    if plan.peak_share is not None:
        return [f"{points(plan.peak_share)} of {device}'s dense bfloat16 peak is used."]
    if flops is None:
        return []
    return [f"No share of the peak: {device or 'the device'} isn't in the table."]


def _figure(plan: AcceleratorPlan) -> Figure:
    from tapeline.report.plan_figures import sweep_figure

    counts = [row.num_devices for row in plan.by_devices]
    return sweep_figure(
        {
            "step": (counts, [row.step_ms for row in plan.by_devices]),
            "compute": (counts, [row.compute_ms for row in plan.by_devices]),
            "all-reduce": (counts, [row.all_reduce_ms for row in plan.by_devices]),
        },
        {},
        x_label="devices",
        y_label="milliseconds",
        note="Model: Amdahl 1967 and a ring all-reduce of 2n(p − 1)/p, not overlapped.",
    )
