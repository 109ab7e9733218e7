"""`tapeline supervise` (and `tapeline train --supervise`): a run that starts itself again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapeline.cli.output import Json, Set, print_json, progress_bar, say
from tapeline.words import percent

if TYPE_CHECKING:
    from tapeline.config import RunConfig
    from tapeline.supervise.job import Outcome, Rules
    from tapeline.supervise.nodes import Node

Out = Annotated[
    Path | None, typer.Option(help="The run's folder; default: runs/ and the run's name.")
]
Ranks = Annotated[str, typer.Option(help="How many ranks: N, or MIN:MAX to go on with fewer.")]
Warm = Annotated[
    bool,
    typer.Option("--warm", help="Keep a spare process with all imports done, and no torchrun."),
]
Nodes = Annotated[
    int | None,
    typer.Option(help="On how many machines; default: as Slurm or Kubernetes says.", min=1),
]
NodeIndex = Annotated[int | None, typer.Option("--node", help="Which of them this is, from 0.")]
Address = Annotated[
    str | None, typer.Option(help="Of node 0, for the others; default: MASTER_ADDR or its name.")
]


def supervise(
    what: Annotated[Path, typer.Argument(help="A TOML file to train, or a run's folder.")],
    out: Out = None,
    ranks: Ranks = "1",
    warm: Warm = False,
    max_restarts: Annotated[int, typer.Option(help="Over the whole run.", min=0)] = 100,
    health: Annotated[
        str | None, typer.Option(help="Command: can place TAPELINE_SLOT be used? 0 is yes.")
    ] = None,
    alert: Annotated[
        str | None, typer.Option(help="Command for alerts, given as JSON in TAPELINE_ALERT.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="URL that alerts are posted to.")] = None,
    evict: Annotated[
        bool,
        typer.Option("--evict", help="Go on without a slow rank where that is faster."),
    ] = False,
    record_only: Annotated[
        bool, typer.Option("--record-only", help="Note and tell; end and restart nothing.")
    ] = False,
    nodes: Nodes = None,
    node: NodeIndex = None,
    address: Address = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train under supervision: found hung or dead, a run is started again until it is done.

    On several machines, start it on each, with one folder that all of them see.

    Exit code 75: told to stop, saved, start it again. 70: given up, do not requeue.

    Example: tapeline supervise examples/reference.toml --ranks 1:2 --set training.lanes=4
    """
    from tapeline.supervise.job import Rules
    from tapeline.supervise.nodes import Node
    from tapeline.supervise.policy import Policy

    policy = Policy(max_restarts=max_restarts, record_only=record_only)
    rules = Rules(policy=policy, health=health, evict=evict)
    here = Node.of(os.environ, number=nodes, index=node, address=address)
    if what.is_dir():
        settings, run, source = _recorded(what, out, overrides), what, None
    else:
        settings, run, source = _loaded(what, out, overrides)
    told = (alert, webhook)
    words = [*(w for o in overrides or [] for w in ("--set", o)), *(["--json"] if as_json else [])]
    end(
        run_supervised(
            settings,
            source,
            run,
            words,
            ranks=ranks,
            warm=warm,
            rules=rules,
            told=told,
            node=here,
        )
    )


def chaos(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    out: Annotated[Path, typer.Option(help="A new folder for both runs.")],
    mtbf: Annotated[
        float, typer.Option(min=0.1, max=86400, help="Seconds between two faults, on average.")
    ] = 60.0,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=525600, help="Of training; no faults after that.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Decides when, what and where.")] = 0,
    ranks: Ranks = "2",
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Kill, stop, slow and starve a run of yours, and see that nothing is lost.

    Exit code 1: the run ended, but with other bits than the same run undisturbed.

    Example: tapeline chaos examples/reference.toml --out chaos --mtbf 10 --minutes 2
    """
    from dataclasses import asdict

    from tapeline.store import open_reader
    from tapeline.supervise.chaos import schedule
    from tapeline.supervise.elastic import Ranks as Asked
    from tapeline.supervise.trial import compare, under_chaos, undisturbed

    Asked.parse(ranks)
    open_reader(_loaded(config, out, overrides)[0].data.store)

    def command(name: str, *more: str) -> list[str]:
        argv = ["-m", "tapeline", "supervise", str(config), "--out", str(out / name), "--json"]
        sets = [word for override in overrides or [] for word in ("--set", override)]
        return [sys.executable, *argv, "--ranks", ranks, "--warm", *more, *sets]

    run = out.absolute() / "chaos"
    strikes = schedule(max(1, round(minutes * 120 / mtbf)), mtbf, seed)
    restarts = ("--max-restarts", str(2 * len(strikes)))
    struck, number = under_chaos(run, command("chaos", *restarts), strikes, minutes * 60, say)
    whole = undisturbed(out / "undisturbed", command("undisturbed"))
    trial = compare(run, struck, whole, number)
    if as_json:
        print_json(asdict(trial))
    else:
        end = "the same bits" if not trial.parted else f"other bits in {', '.join(trial.parted)}"
        say(f"{trial.strikes} faults; {end} as undisturbed; the account closes")
        if not trial.strikes:
            say("The run ended before the first fault: give more training.steps or less --mtbf")
        measured, predicted = (_share(x) for x in (trial.goodput, trial.predicted))
        say(f"goodput {measured}; {predicted} predicted for these failures and costs")
    raise typer.Exit(1 if trial.parted else 0)


def _share(value: float | None) -> str:
    return "unknown" if value is None else percent(value, ".1f")


def train_supervised(
    config: Path, out: Path | None, ranks: str, warm: bool, overrides: list[str], as_json: bool
) -> None:
    """`tapeline train --supervise`."""
    supervise(config, out, ranks, warm, overrides=overrides, as_json=as_json)


def run_supervised(
    settings: RunConfig,
    source: Path | None,
    run: Path,
    words: list[str],
    *,
    ranks: str,
    warm: bool,
    rules: Rules,
    told: tuple[str | None, str | None] = (None, None),
    node: Node | None = None,
) -> Outcome:
    """Supervise a run to its end.

    Args:
        settings: its configuration.
        source: the file of it; None for a run that has begun.
        run: its folder.
        words: more arguments of `tapeline train` and `tapeline resume`.
        ranks, warm, rules: as asked for.
        told: the command and the URL for alerts.
        node: this machine, where it is one of several.
    """
    from dataclasses import replace

    from tapeline.clock import SystemClock
    from tapeline.supervise.alerts import Alerts
    from tapeline.supervise.elastic import Ranks as Asked
    from tapeline.supervise.job import Job
    from tapeline.supervise.launch import Engine, Torchrun
    from tapeline.supervise.nodes import Node
    from tapeline.supervise.standby import Standby
    from tapeline.supervise.supervisor import Supervisor

    run = run.absolute()
    begin = ("tapeline", "train", str(source), "--out", str(run), *words)
    resume = ("tapeline", "resume", str(run), *words)
    job = Job(run, begin, resume, Asked.parse(ranks), settings.training, node or Node())
    engine: Engine = Standby(run) if warm else Torchrun(run)
    hang = replace(rules.hang, unlearned_s=settings.supervision.first_steps_s)
    rules = replace(rules, hang=hang)
    clock = SystemClock()
    alerts = Alerts(lambda text: say(f"tapeline: {text}"), clock, *told)
    with progress_bar("Training") as progress:
        total = settings.training.steps
        supervisor = Supervisor(
            job, rules, engine, alerts, clock, stepped=lambda step: progress(step, total)
        )
        return supervisor.supervise()


def end(outcome: Outcome) -> None:
    """Print what the run printed, or why it ended, and leave with its exit code."""
    from tapeline.supervise.policy import EXIT_REFUSED

    typer.echo(outcome.output, nl=False)
    if outcome.exit_code not in (0, EXIT_REFUSED):
        attempts = "1 attempt" if outcome.attempts == 1 else f"{outcome.attempts} attempts"
        say(f"tapeline: ended after {attempts}: {outcome.reason}")
    for line in outcome.said:
        say(line)
    raise typer.Exit(outcome.exit_code)


def _recorded(run: Path, out: Path | None, overrides: list[str] | None) -> RunConfig:
    from tapeline.clock import SystemClock
    from tapeline.config import RunConfig
    from tapeline.errors import RunError
    from tapeline.runs import RunFolder

    if out and out.absolute() != run.absolute():
        raise RunError(
            "--out",
            expected=f"{run}, the folder of the run that is gone on with",
            found=str(out),
            fix="Leave it out, or give a TOML file to begin another run",
        )
    record = RunFolder(run, SystemClock()).record()
    return RunConfig.from_mapping(record["config"], str(run / "run.json"), overrides or [])


def _loaded(
    config: Path, out: Path | None, overrides: list[str] | None
) -> tuple[RunConfig, Path, Path]:
    from tapeline.config import RunConfig

    settings = RunConfig.load(config, overrides or [])
    return settings, out or Path("runs") / settings.name, config.absolute()
