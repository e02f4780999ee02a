"""`tula monitor [RUN]`: does a training take the time that was predicted?"""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json
from mlflow_tula.cli.types import real, switch


@click.command("monitor")
@click.argument("run_id", metavar="[RUN]", default="latest")
@option("--level", real("0.9"), "0.9", "Probability of the interval, above 0 and below 1.")
@switch("--tag", default=True, text="Tag the run: tula.drift, tula.drift_ratio.")
@options.tracking_uri_option
@options.json_option
def command(run_id: str, as_json: bool, **values: Any) -> None:
    """Compare a running or finished training with its prediction, and tag it.

    RUN is the id that `mlflow ui` shows; without one it is the newest `tula train`.

    \b
    tula monitor
    tula monitor 5d1c0c3e6f0b4d8f9a7e2b1c0d9e8f7a
    """
    options.use_store(values, write=False)
    from mlflow_tula.monitor import monitor

    report = monitor(run_id, level=values["level"], tag=values["tag"])
    if as_json:
        print_json({**report.to_dict(), "ratio": report.ratio})
        return
    click.echo(str(report))
    if report.drift == "slower":
        note(
            "look for what shares the machine, a slower loader or a hotter device; where it stays, "
            "profile again (`tula profile`): the new version replaces the champion if it is right"
        )
    elif report.drift == "faster":
        note("the machine or the code has become faster: profile again, the choice may change")
