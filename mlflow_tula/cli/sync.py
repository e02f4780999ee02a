"""`tula sync`: tell the store what it could not be told while it was away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.render import print_json


@click.command("sync")
@click.argument("folder", default="tula_output", type=click.Path(file_okay=False))
@options.tracking_uri_option
@options.json_option
def command(folder: str, as_json: bool, **values: Any) -> None:
    """Send what waits in FOLDER for a store that was away (default: tula_output).

    \b
    tula sync
    tula sync tula_output --tracking-uri http://127.0.0.1:5000
    """
    from mlflow_tula.errors import InvalidInputError, WorkFailedError

    if not Path(folder).is_dir():
        raise InvalidInputError(f"there is no folder {folder}: give the --output-dir of a command")
    options.use_store(values, write=True)
    from mlflow import MlflowClient

    from mlflow_tula.outbox import find_outboxes

    sent = left = 0
    for box in find_outboxes(Path(folder)):
        waiting = len(box)
        remaining = box.send(MlflowClient())
        sent, left = sent + waiting - remaining, left + remaining
    if as_json:
        print_json({"sent": sent, "left": left})
    else:
        click.echo(f"sent {sent} calls, {left} are left" if sent or left else "nothing waits")
    if left:
        raise WorkFailedError(f"the store went away again: {left} calls still wait in {folder}")
