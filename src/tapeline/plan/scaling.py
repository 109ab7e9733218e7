"""What a full run would reach: proxies, what they must be like, and published laws.

Covers: proxies as they are given, the regimes to refuse, and how a compute budget is split between
model and data by the laws that were published for language models. The fit is `scaling_fit`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Quantity

FULL = Quantity("full_gpu_hours", "What the full run takes, in GPU-hours", most=1e12)
MAX_RATIO = Quantity(
    "max_ratio", "Refuse a full run of more than so many times the largest proxy", 10.0, least=1.0
)
FLOPS = Quantity(
    "flops", "Floating-point operations of a run, for the published laws", least=1e6, most=1e30
)
LEAST_SIZES = 5  # three parameters, one size left out, and one to tell an error by
_MOST_LOSS = 1e6


@dataclass(frozen=True, slots=True)
class Proxy:
    """A smaller run: what it took, and the loss that it reached."""

    gpu_hours: float
    loss: float


def parse_proxy(text: str) -> Proxy:
    """A proxy from `GPU_HOURS:LOSS`.

    Raises:
        TapelineError: it isn't two numbers, or one of them can't be.
    """
    hours, _, loss = text.partition(":")
    try:
        proxy = Proxy(float(hours), float(loss))
    except ValueError:
        proxy = Proxy(math.nan, math.nan)
    if 0 < proxy.gpu_hours <= 1e12 and abs(proxy.loss) <= _MOST_LOSS:
        return proxy
    raise TapelineError(
        f"--proxy {text}",
        expected="GPU_HOURS:LOSS, hours above 0 and a loss within a million of 0",
        found="something else",
        fix="Give what one proxy took and reached, such as 3.5:0.0527",
    )


def check_proxies(proxies: Sequence[Proxy], full_gpu_hours: float, max_ratio: float) -> None:
    """Refuse what can't be told from these proxies.

    Raises:
        TapelineError: they are too few, or the full run is too far beyond them.
    """
    sizes = {one.gpu_hours for one in proxies}
    if len(sizes) < LEAST_SIZES:
        raise TapelineError(
            "--proxy",
            expected=f"proxies of {LEAST_SIZES} sizes or more",
            found=f"{len(sizes)}",
            fix="Run more, from 1 to 10 % of the full run's compute",
        )
    if full_gpu_hours < max(sizes):
        raise TapelineError(
            f"--full-gpu-hours {full_gpu_hours:g}",
            expected=f"no less than the largest proxy's {max(sizes):g}",
            found="less",
            fix="Give the hours of the run that the proxies stand for",
        )
    if full_gpu_hours > max_ratio * max(sizes):
        raise TapelineError(
            f"--full-gpu-hours {full_gpu_hours:g}",
            expected=f"{max_ratio:g} times the largest proxy's {max(sizes):g} at most",
            found=f"{full_gpu_hours / max(sizes):.4g} times",
            fix=f"Run a proxy of {full_gpu_hours / max_ratio:.4g} GPU-hours or more, or raise "
            "--max-ratio, knowing that nothing there was measured",
        )


@dataclass(frozen=True, slots=True)
class Law:
    """`L = E + A/N^a + B/D^b` for N parameters and D tokens.

    Attributes:
        source: where it was published.
        a_factor, b_factor: A and B.
        floor: E.
        a_power, b_power: a and b.
    """

    source: str
    a_factor: float
    b_factor: float
    floor: float
    a_power: float
    b_power: float


PUBLISHED = (
    Law("Hoffmann et al. 2022, arXiv 2203.15556, as printed", 406.4, 410.7, 1.69, 0.34, 0.28),
    Law("Besiroglu et al. 2024, arXiv 2404.10102, refit", 482.01, 2085.43, 1.8172, 0.3478, 0.3658),
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The model and the data of least loss for a compute, by one law."""

    source: str
    parameters: float
    tokens: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        """D over N."""
        return self.tokens / self.parameters


def allocate(flops: float, law: Law) -> Allocation:
    """How a compute of `C = 6 N D` is split: `N = G (C/6)^(b/(a+b))`, `G = (aA/(bB))^(1/(a+b))`.

    Source: Hoffmann et al. 2022, arXiv 2203.15556, equation 4.
    """
    powers = law.a_power + law.b_power
    ratio = law.a_power * law.a_factor / (law.b_power * law.b_factor)
    parameters = ratio ** (1 / powers) * (flops / 6) ** (law.b_power / powers)
    tokens = flops / 6 / parameters
    loss = law.floor + law.a_factor / parameters**law.a_power + law.b_factor / tokens**law.b_power
    return Allocation(law.source, parameters, tokens, loss)
