"""The `tula` command: the only room that prints and exits.

One verb, one module of `mlflow_tula.cli`, one MLproject entry point. Exit codes: 0 done, 1 the
work failed (what was measured is kept), 2 the request was wrong (nothing was started), 130 Ctrl-C.
Command modules import click alone at the top; torch and mlflow are imported inside the commands,
so that `tula --help` answers at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from typing import Any

import click

from mlflow_tula import __version__
from mlflow_tula.errors import TulaError, TulaWarning
from mlflow_tula.redaction import masked

COMMANDS = {
    "demo": "demo",
    "main": "main_job",
    "profile": "profile",
    "fit": "fit",
    "register": "register",
    "recommend": "recommend",
    "train": "train",
    "compare": "compare",
    "diagnose": "diagnose",
    "import": "import_table",
    "models": "models",
    "monitor": "monitor",
    "registry": "registry",
    "sync": "sync",
    "doctor": "doctor",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for; lists them in the data's order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order in which the data flows."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"mlflow_tula.cli.{COMMANDS[cmd_name]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click's, with the nearest command in the message."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from mlflow_tula.errors import UnknownNameError

            name = args[0] if args else ""
            raise click.UsageError(str(UnknownNameError("command", name, COMMANDS))) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tula")
def tula() -> None:
    """Measure a few batch sizes of a training job, and know the rest.

    \b
    tula demo                        see it within a minute, with nothing to train
    tula main --model vgg11          profile, fit, register, recommend
    tula recommend --model vgg11     ask again later, in two seconds
    tula train --model vgg11         train with the recommended batch size
    mlflow ui                        see curves, predictions and registered predictors
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    sys.exit(run(args))


def run(args: list[str] | None = None, command: click.Command | None = None) -> int:
    """Run the command line, or one command that stands elsewhere, and return its exit code."""
    # Each is a field of the result as well, and stands in the table that people read.
    warnings.simplefilter("ignore", TulaWarning)
    # MLflow's own progress notes (migrations, input examples) would stand between the numbers.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # A store that fails is told in one line, below; MLflow would put its own stack trace before it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    try:
        chosen = tula if command is None else command
        code = chosen.main(args=args, prog_name=chosen.name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted; what was measured is kept, and the same command goes on", 130)
    except TulaError as error:
        return _fail(str(error), error.exit_code, always=getattr(error, "unheard", False))
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        if os.environ.get("TULA_DEBUG"):
            raise
        kind = type(error).__name__
        return _fail(f"{kind}: {error} (TULA_DEBUG=1 shows where; this is a bug of tula)", 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int, *, always: bool = False) -> int:
    """One line on stderr; of several processes that a launcher started only the first speaks."""
    # whatever raised it: click repeats the words of the command line, an address among them
    text = masked(" ".join(message.split()))
    if always or _speaks():
        click.echo(f"Error: {text}", err=True)
    return code


def _speaks() -> bool:
    """Whether this process is rank 0, or the only one."""
    from mlflow_tula.launch.place import find_place

    try:
        return find_place().leads
    except TulaError:
        return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
