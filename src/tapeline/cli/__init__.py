"""The command line: each verb parses, calls one function, and prints.

Standard output carries data, standard error carries talk. Exit 0 fine, 1 finding, 2 wrong use or
bad input, 70 a supervisor gave up, 75 told to stop and saved, 130 interrupted. Heavy imports stand
inside the verbs, so that `tapeline --help` needs neither torch nor NumPy.
"""

from __future__ import annotations

import errno
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from tapeline.cli.advise import advise_run
from tapeline.cli.bench import bench
from tapeline.cli.checkpoints import app as checkpoints
from tapeline.cli.diagnose import diagnose
from tapeline.cli.doctor import doctor
from tapeline.cli.export import export
from tapeline.cli.ingest import ingest
from tapeline.cli.new import new
from tapeline.cli.plans import app as plans
from tapeline.cli.prove import prove
from tapeline.cli.quarantine import app as quarantine
from tapeline.cli.repeat import audit, compare, replicate, rerun
from tapeline.cli.report import report
from tapeline.cli.runs import app as runs
from tapeline.cli.search import app as search
from tapeline.cli.store import app as store
from tapeline.cli.supervise import chaos, supervise
from tapeline.cli.tours import demo, tutorial
from tapeline.cli.train import resume, train
from tapeline.cli.trials import compare_precision, sweep_batch
from tapeline.cli.watch import watch
from tapeline.errors import TapelineError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Interruptible(TyperGroup):
    """Ctrl-C ends a verb in one line, with the exit code that a shell gives a signal's end."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("tapeline: interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="tapeline",
    cls=_Interruptible,
    help="Train sequence models on market tick data: know where every second went, never lose a "
    "step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("new")(new)
app.command("ingest")(ingest)
app.add_typer(store, name="store")
app.command("bench")(bench)
app.command("train")(train)
app.command("resume")(resume)
app.command("supervise")(supervise)
app.command("chaos")(chaos)
app.add_typer(quarantine, name="quarantine")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(plans, name="plan")
app.add_typer(runs, name="runs")
app.add_typer(search, name="search")
app.command("audit")(audit)
app.command("rerun")(rerun)
app.command("replicate")(replicate)
app.command("compare")(compare)
app.command("prove")(prove)
app.command("compare-precision")(compare_precision)
app.command("sweep-batch")(sweep_batch)
app.command("tutorial")(tutorial)
app.command("demo")(demo)
app.command("watch")(watch)
app.command("diagnose")(diagnose)
app.command("advise")(advise_run)
app.command("report")(report)
app.command("export")(export)
app.command("doctor")(doctor)


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    sys.path.append(str(Path.cwd()))  # for `module:function`; last, so that it hides no package
    warnings.formatwarning = _warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale can't say doesn't end a verb
            stream.reconfigure(errors="replace")
    try:
        app()
    except TapelineError as error:
        _fail(str(error))
    except MemoryError as error:
        _fail(f"memory: {error or 'there is not enough'}. Choose a smaller batch or model.")
    except OSError as error:
        from tapeline.files import meant

        where = meant(str(error.filename or "the operating system"))
        full = "Make room there, and give the command again"
        fix = full if error.errno in _FULL else "Check the path, its permissions and the disk"
        _fail(f"{where}: {error.strerror or error}. {fix}.")


_formatted = warnings.formatwarning


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning of ours is a sentence; another one has its place, as Python gives it."""
    if category is RuntimeWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"tapeline: warning: {message}\n"
    return _formatted(message, category, filename, lineno, line)


def _fail(message: str) -> None:
    typer.echo(f"tapeline: {message}", err=True)
    raise SystemExit(2)
