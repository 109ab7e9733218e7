"""`tapeline plan`: derive it instead of guessing it. One file per verb."""

from __future__ import annotations

import typer

from tapeline.cli.plans.accelerator import accelerator
from tapeline.cli.plans.checkpoint import checkpoint
from tapeline.cli.plans.compare import compare
from tapeline.cli.plans.goodput import goodput
from tapeline.cli.plans.memory import memory
from tapeline.cli.plans.scaling import scaling
from tapeline.cli.plans.search import search
from tapeline.cli.plans.spot import spot
from tapeline.cli.plans.stop import stop
from tapeline.cli.plans.throughput import throughput

app = typer.Typer(
    help="Derive a number instead of guessing it, from what is given, measured or a stated "
    "default. Example: tapeline plan checkpoint --mtbf-hours 6",
    no_args_is_help=True,
)
app.command("checkpoint")(checkpoint)
app.command("spot")(spot)
app.command("goodput")(goodput)
app.command("compare")(compare)
app.command("accelerator")(accelerator)
app.command("memory")(memory)
app.command("throughput")(throughput)
app.command("search")(search)
app.command("scaling")(scaling)
app.command("stop")(stop)
