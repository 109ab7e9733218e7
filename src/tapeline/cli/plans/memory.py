"""`tapeline plan memory`: does a model fit, and over how many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, FromRun, Plot, option, show
from tapeline.cli.plans.from_run import measured
from tapeline.errors import TapelineError
from tapeline.plan import Inputs, Measured
from tapeline.plan.devices import DEVICES, device_named
from tapeline.plan.memory import (
    ACTIVATION_GB,
    FREE_SHARE,
    GRADIENT_BYTES,
    HEADS,
    LAYERS,
    MEMORY_GB,
    MICRO_BATCH,
    OPTIMIZER_BYTES,
    PARAMETERS,
    SEQUENCE,
    WEIGHT_BYTES,
    WIDTH,
    MemoryPlan,
    needs,
    plan_memory,
    transformer_activation_gb,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.report import Table


def memory(
    parameters: Annotated[int | None, option(PARAMETERS)] = None,
    weight_bytes: Annotated[float | None, option(WEIGHT_BYTES)] = None,
    gradient_bytes: Annotated[float | None, option(GRADIENT_BYTES)] = None,
    optimizer_bytes: Annotated[float | None, option(OPTIMIZER_BYTES)] = None,
    activation_gb: Annotated[float | None, option(ACTIVATION_GB)] = None,
    layers: Annotated[int | None, option(LAYERS)] = None,
    width: Annotated[int | None, option(WIDTH)] = None,
    sequence: Annotated[int | None, option(SEQUENCE)] = None,
    micro_batch: Annotated[int | None, option(MICRO_BATCH)] = None,
    heads: Annotated[int | None, option(HEADS)] = None,
    memory_gb: Annotated[float | None, option(MEMORY_GB)] = None,
    free_share: Annotated[float | None, option(FREE_SHARE)] = None,
    device: Annotated[
        str | None, typer.Option(help="A device of the table, in place of --memory-gb.")
    ] = None,
    from_run: FromRun = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Does a model fit on one device, sharded, or only with its layers divided.

    Without --activation-gb, activations are estimated as those of a transformer.

    Example: tapeline plan memory --parameters 7000000000 --device h100-sxm
    """
    inputs = Inputs(_of_device(device), measured(from_run))
    num_layers = inputs.count(LAYERS, layers)
    estimated = activation_gb is None
    if activation_gb is None:
        activation_gb = transformer_activation_gb(
            num_layers=num_layers,
            width=inputs.count(WIDTH, width),
            sequence=inputs.count(SEQUENCE, sequence),
            micro_batch=inputs.count(MICRO_BATCH, micro_batch),
            num_heads=inputs.count(HEADS, heads),
        )
    else:
        inputs.take(ACTIVATION_GB, activation_gb)
    found = needs(
        num_parameters=inputs.count(PARAMETERS, parameters),
        weight_bytes=inputs.take(WEIGHT_BYTES, weight_bytes),
        gradient_bytes=inputs.take(GRADIENT_BYTES, gradient_bytes),
        optimizer_bytes=inputs.take(OPTIMIZER_BYTES, optimizer_bytes),
        activation_gb=activation_gb,
        num_layers=num_layers,
    )
    plan = plan_memory(
        found,
        memory_gb=inputs.take(MEMORY_GB, memory_gb),
        free_share=inputs.take(FREE_SHARE, free_share),
    )
    show(
        Answer("memory", inputs, plan, _tables(plan, estimated=estimated), [_decision(plan)]),
        as_json=as_json,
        plot=plot,
        figure=lambda: _figure(plan),
    )


def _of_device(name: str | None) -> Measured | None:
    """The memory of a device of the table, as a number with its source.

    Raises:
        TapelineError: the device isn't in the table.
    """
    if name is None:
        return None
    device = device_named(name)
    if device is None:
        raise TapelineError(
            "--device",
            expected=f"one of {', '.join(one.name for one in DEVICES)}",
            found=name,
            fix="Give --memory-gb in its place",
        )
    return Measured(
        device.reported, {MEMORY_GB.name: (device.memory_gb, device.source)}, source="printed"
    )


def _tables(plan: MemoryPlan, *, estimated: bool) -> list[Table]:
    from tapeline.report import Table

    found = plan.needs
    of_activations = (
        "estimated for a transformer in 16 bits (arXiv 2205.05198)" if estimated else "given"
    )
    return [
        Table(
            ["part", "GB", "how"],
            [
                ["weights", found.weights, "parameters × bytes"],
                ["gradients", found.gradients, "parameters × bytes"],
                ["optimiser state", found.optimizer, "parameters × bytes"],
                ["activations of one device", found.activations, of_activations],
                ["all of it on one device", plan.replica_gb, "sum"],
                ["usable on one device", plan.usable_gb, "memory without the free share"],
            ],
            "What the model needs (model, not measured)",
        ),
        Table(
            ["devices", "GB on each", "fits"],
            [
                [count, size, "yes" if size <= plan.usable_gb else "no"]
                for count, size in plan.by_devices
            ],
            "The state sharded over devices, one layer whole at a time (model, arXiv 1910.02054)",
        ),
    ]


def _decision(plan: MemoryPlan) -> str:
    from tapeline.report import format_count, format_number

    usable = f"{format_number(plan.usable_gb)} GB"
    replica = f"{format_number(plan.replica_gb)} GB"
    if plan.fits_one:
        return f"It fits on one device: {replica} of {usable}. Sharding isn't needed."
    if plan.shard_over is not None:
        return (
            f"It doesn't fit on one device ({replica}, {usable} usable). Sharded, it takes "
            f"{format_count(plan.shard_over)} devices or more."
        )
    return (
        f"No sharding helps: activations and one layer alone take "
        f"{format_number(plan.needs.activations + plan.needs.layer)} GB, {usable} are usable. "
        "Make the micro batch smaller, recompute activations, or divide the layers over "
        f"{format_count(plan.divide_layers_over)} devices or more."
    )


def _figure(plan: MemoryPlan) -> Figure:
    from tapeline.report.plan_figures import sweep_figure

    counts = [count for count, _ in plan.by_devices]
    return sweep_figure(
        {
            "needed, sharded": (counts, [size for _, size in plan.by_devices]),
            "usable": (counts, [plan.usable_gb] * len(counts)),
        },
        {},
        x_label="devices",
        y_label="memory of each (GB)",
        note="Model: parameters, gradients and optimiser state divided, one layer whole "
        "(arXiv 1910.02054).",
    )
