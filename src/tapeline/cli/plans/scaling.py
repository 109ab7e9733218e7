"""`tapeline plan scaling`: what a full run would gain over its proxies, and for how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapeline.cli.output import Json
from tapeline.cli.plans.frame import Answer, Plot, option, show
from tapeline.errors import TapelineError
from tapeline.plan import Inputs
from tapeline.plan.job import PRICE
from tapeline.plan.scaling import (
    FLOPS,
    FULL,
    MAX_RATIO,
    PUBLISHED,
    Allocation,
    Proxy,
    allocate,
    parse_proxy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.plan.scaling_fit import ScalingPlan
    from tapeline.report import Table

Proxies = Annotated[
    list[str] | None,
    typer.Option(
        "--proxy",
        metavar="GPU_HOURS:LOSS",
        help="What a smaller run took and reached; give five sizes or more, from 1 to 10 % of the "
        "full run.",
    ),
]


def scaling(
    proxy: Proxies = None,
    full_gpu_hours: Annotated[float | None, option(FULL)] = None,
    max_ratio: Annotated[float | None, option(MAX_RATIO)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    flops: Annotated[float | None, option(FLOPS)] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What a full run would gain over the largest proxy, how surely, and for how much.

    Example: tapeline plan scaling --full-gpu-hours 100 --proxy 1:0.0700 --proxy 2:0.0652
    --proxy 3:0.0629 --proxy 5:0.0605 --proxy 10:0.0580

    Example: tapeline plan scaling --flops 5.76e23
    """
    inputs = Inputs()
    if not proxy and flops is None:
        raise TapelineError(
            "--proxy",
            expected="proxies, or --flops for the published laws",
            found="neither",
            fix="Give five proxies or more, such as --proxy 3.5:0.0527",
        )
    tables: list[Table] = []
    notes: list[str] = []
    model: dict[str, Any] = {}
    plan, proxies = None, [parse_proxy(text) for text in proxy or ()]
    if proxies:
        from tapeline.plan.scaling_fit import plan_scaling

        plan = plan_scaling(
            proxies,
            inputs.take(FULL, full_gpu_hours),
            max_ratio=inputs.take(MAX_RATIO, max_ratio),
            price_per_hour=inputs.take(PRICE, price_per_hour),
        )
        tables += _tables(plan, proxies)
        notes += _notes(plan)
        model |= {"proxies": [asdict(one) for one in proxies], **asdict(plan)}
    if flops is not None:
        found = [allocate(inputs.take(FLOPS, flops), law) for law in PUBLISHED]
        tables.append(_published(found))
        notes.append(_apart(found))
        model["published"] = [asdict(one) for one in found]
    answer = Answer("scaling", inputs, model, tables, notes)
    figure = (lambda: _figure(plan, proxies)) if plan else None
    if plot and not figure:
        raise TapelineError(
            "--plot", expected="proxies to draw", found="none", fix="Give --proxy, or leave it out"
        )
    show(answer, as_json=as_json, plot=plot, figure=figure)


def _tables(plan: ScalingPlan, proxies: Sequence[Proxy]) -> list[Table]:
    from tapeline.report import Table

    return [
        Table(
            ["GPU-hours", "loss", "on the curve", "difference"],
            [
                [one.gpu_hours, _loss(one.loss), _loss(curve), one.loss - curve]
                for one in sorted(proxies, key=lambda one: one.gpu_hours)
                for curve in [plan.fit.loss(one.gpu_hours)]
            ],
            f"The proxies as given. Curve: {plan.fit.floor:.4g} + {plan.fit.above:.4g} × (hours / "
            f"{plan.fit.largest_gpu_hours:g})^−{plan.fit.power:.3g}, least squares (model)",
        ),
        Table(
            ["GPU-hours", "loss", "low", "high", "gain", "gain low", "gain high", "cost"],
            [
                [
                    one.gpu_hours,
                    *(_loss(loss) for loss in (one.loss, one.low, one.high)),
                    *(one.gain, one.gain_low, one.gain_high, one.cost),
                ]
                for one in plan.reaches
            ],
            "From the largest proxy to the full run: one such run, 95 % bands from a bootstrap of "
            "residuals, gain over the curve at the largest proxy (model)",
        ),
    ]


def _loss(loss: float) -> str:
    return f"{loss:.5g}"  # the third digit is where runs differ


def _notes(plan: ScalingPlan) -> list[str]:
    from tapeline.report import format_number

    full, left = plan.full, plan.left_out
    test = (
        f"Left out, the largest proxy ({left.ratio:.3g} times the next) is missed by "
        f"{format_number(abs(left.error))}."
    )
    gain = (
        f"{format_number(full.gain)} (95 % band {format_number(full.gain_low)} to "
        f"{format_number(full.gain_high)})"
    )
    if not plan.gain_is_told:
        return [
            f"No gain is told: the full run's would be {gain} over the largest proxy, no more than "
            "these proxies can be wrong by. Run more or larger ones.",
            test,
        ]
    return [
        f"The full run would lower the loss by {gain} for {format_number(full.cost)}: it pays if "
        f"that is worth {format_number(full.cost)} or more, a price of "
        f"{format_number(full.cost / full.gain)} for each 1 of loss.",
        test,
    ]


def _published(found: Sequence[Allocation]) -> Table:
    from tapeline.report import Table

    return Table(
        ["law", "parameters", "tokens", "tokens per parameter", "loss"],
        [
            [
                one.source,
                f"{one.parameters:.3g}",
                f"{one.tokens:.3g}",
                one.tokens_per_parameter,
                one.loss,
            ]
            for one in found
        ],
        "The best split of that compute for language models, C = 6 N D (published laws)",
    )


def _apart(found: Sequence[Allocation]) -> str:
    sizes = sorted(one.parameters for one in found)
    return (
        f"Two fits of the same published runs are {sizes[-1] / sizes[0]:.2g} times apart in model "
        "size, and neither is of market data: use them for the form of the law, not for a number."
    )


def _figure(plan: ScalingPlan, proxies: Sequence[Proxy]) -> Figure:
    from tapeline.report.plan_figures import Band, band_figure

    reaches = plan.reaches
    least = min(one.gpu_hours for one in proxies)
    largest = plan.fit.largest_gpu_hours
    before = [least * (largest / least) ** (step / 20) for step in range(20)]
    curve = [plan.fit.loss(hours) for hours in before]
    return band_figure(
        Band(
            [*before, *(one.gpu_hours for one in reaches)],
            [*curve, *(one.loss for one in reaches)],
            [*curve, *(one.low for one in reaches)],
            [*curve, *(one.high for one in reaches)],
        ),
        [(one.gpu_hours, one.loss) for one in proxies],
        names=("fitted law", "95 % band of one run beyond the largest proxy", "proxies"),
        labels=("GPU-hours", "loss"),
        logarithmic=True,
        note="Model: a saturating power law fitted by least squares; the band is a bootstrap of "
        "its residuals.",
    )
