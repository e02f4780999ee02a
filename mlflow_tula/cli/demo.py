"""`tula demo`: from a profile to a decision within a minute, in a store of its own.

A recorded profile that ships with the package takes the way of `tula main` (fit, register,
recommend, log); only the measuring is left out. `--live` measures a small network instead.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula import __version__
from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json
from mlflow_tula.cli.types import OpenText, switch
from mlflow_tula.errors import InvalidInputError, StoreError
from mlflow_tula.redaction import masked

if TYPE_CHECKING:
    from mlflow_tula.cli.main_job import Conclusion
    from mlflow_tula.demo import Recording

FRESH = "fresh"
FOLDER = "tula-demo"
MARKER = "tula-demo.json"
"""What makes a folder a demo's: it may be written to again, and removed without regret."""

EXPERIMENT = "tula-demo"
LIVE_JOB = ("--model", "squeezenet1_1")
LIVE_SWEEP = ("--time-budget", "20s", "--max-steps", "12", "--max-batch-size", "256")
_ELSEWHERE = (
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_REGISTRY_URI",
)
"""What `mlflow run` and a person's shell say of another store."""

_NO_ADDRESS = frozenset("%?#")
"""What means something else in an address."""


@click.command("demo")
@switch(
    "--live",
    default=False,
    text="Profile a small network on this machine instead, in under a minute.",
)
@option("--output-dir", str, FOLDER, "Folder of the demo: its MLflow store and its files.")
@option(
    "--tracking-uri",
    OpenText(FRESH),
    FRESH,
    "MLflow store; fresh: one of its own in --output-dir, never the one you use.",
)
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Show within a minute what tula does: a recorded profile becomes a decision in MLflow.

    \b
    tula demo                replay measurements that came with the package; nothing is trained
    tula demo --live         measure a small network on this machine
    rm -r tula-demo          the demo leaves nothing else
    """
    folder, asked = Path(values["output_dir"]), values["tracking_uri"]
    in_project = "MLFLOW_RUN_ID" in os.environ
    check_folder(folder)
    if asked is None:
        uri = own_uri(folder.absolute())
        for name in _ELSEWHERE:
            os.environ.pop(name, None)
    else:
        uri = asked
        options.use_store(values, write=True)
    mark(folder)
    words = ("--output-dir", str(folder), "--tracking-uri", uri, "--experiment", EXPERIMENT)
    found = _live(words, as_json=as_json) if values["live"] else _replay(words, as_json=as_json)
    # Under `mlflow run` the person stands in another folder.
    near = asked is None and not in_project and not folder.is_absolute()
    shown = own_uri(folder) if near else masked(uri)
    _tell(found, shown, as_json=as_json, live=values["live"])


def check_folder(folder: Path) -> None:
    """Raise unless the folder is a demo's, or can become one; nothing is written.

    Raises:
        InvalidInputError: it holds something else, or no address of a store can hold its path.
        StoreError: it cannot be read or written.
    """
    from mlflow_tula.cli.places import check_output

    way_out = "choose another --output-dir"
    odd = _NO_ADDRESS.intersection(str(folder.absolute()))
    if odd:
        raise InvalidInputError(
            f"the path of a store may have no {' or '.join(sorted(odd))}, and that of {folder} "
            f"has: {way_out}"
        )
    try:
        if folder.exists() and not folder.is_dir():
            raise InvalidInputError(f"{folder} is a file, and a demo needs a folder: {way_out}")
        if folder.is_dir() and not (folder / MARKER).is_file() and any(folder.iterdir()):
            raise InvalidInputError(
                f"the folder {folder} is there, and holds no demo of tula's: {way_out}"
            )
    except OSError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise StoreError(f"cannot read {folder}: {error.strerror or error}; {way_out}") from error
    check_output(folder)


def mark(folder: Path) -> None:
    """Make the folder a demo's."""
    from mlflow_tula.files import write_json

    note = {"kind": "tula.demo", "schema_version": 1, "made_with": __version__}
    write_json(folder / MARKER, note)


def own_uri(folder: Path) -> str:
    """The address of the demo's own store."""
    return f"sqlite:///{folder / 'mlflow.db'}"


def _replay(words: Sequence[str], *, as_json: bool) -> Conclusion:
    """The recording, by the command it was measured with, in the place of a measurement."""
    from mlflow_tula.cli.main_job import conclude
    from mlflow_tula.cli.replay import Replay
    from mlflow_tula.demo import read_recording
    from mlflow_tula.predictors.convergence import ConvergencePredictor

    recording = read_recording()
    recorded = shlex.split(recording.profile_command)[2:]
    objective = "min_time_to_target" if recording.convergence else "knee"
    values = main_values([*recorded, "--objective", objective, *words])
    options.use_store(values, write=True)
    if not as_json:
        _introduce(recording)
    from mlflow_tula.tracking import start_run

    job = options.make_job(values)
    with start_run(
        f"demo {job.workload_slug}", command="demo", experiment=values["experiment"]
    ) as run:
        sweep = Replay(run, job, recording, values)
        frame = recording.convergence_frame()
        known = ConvergencePredictor.fit(frame) if len(frame) else None
        found = conclude(sweep, as_json=as_json, known=known)
        found.must_be_registered()
    return found


def _live(words: Sequence[str], *, as_json: bool) -> Conclusion:
    """A real profile of a small network."""
    from mlflow_tula.cli.main_job import conclude
    from mlflow_tula.cli.sweep import profile_run

    values = main_values([*LIVE_JOB, *LIVE_SWEEP, *words])
    if not as_json:
        note(f"measuring {values['model']} on {values['dataset']} here, about 20 s of real steps")
    with profile_run("demo", values) as sweep:
        found = conclude(sweep, as_json=as_json)
        found.must_be_registered()
    return found


def main_values(words: Sequence[str]) -> dict[str, Any]:
    """The options of `tula main` as they are after these words."""
    from mlflow_tula.cli.main_job import command as main_command

    values = dict(main_command.make_context("main", list(words)).params)
    del values["as_json"]
    return values


def _introduce(recording: Recording) -> None:
    """What is replayed, in words."""
    workload, hardware = recording.table.workload, recording.table.hardware
    click.echo(
        f"Replaying a profile of {workload.model} on {workload.dataset}, measured on "
        f"{recording.recorded_on} in {recording.profile_time_s:.0f} s\n"
        f"on {hardware.devices_per_node} x {hardware.device_name} ({hardware.device_type}) by "
        f"`{recording.profile_command}`; nothing is trained now."
    )
    if recording.convergence:
        click.echo(f"With it go trainings of several batch sizes to a {recording.target}.")
    click.echo()


def _tell(found: Conclusion, uri: str, *, as_json: bool, live: bool) -> None:
    """The decision, and what to click."""
    from mlflow_tula.cli.look import look_at
    from mlflow_tula.cli.main_job import print_conclusion
    from mlflow_tula.cli.serving import offer_recommender

    done, job = found.must_be_registered(), found.sweep.job
    ask = options.command_line("recommend", job)
    if not live:
        ask += f" --hardware {found.sweep.hardware.slug}"
    ask += f" --tracking-uri {shlex.quote(uri)}"
    look = look_at(found, done, uri=uri, ask=ask)
    if as_json:
        print_json({**found.to_dict(), "look": look.to_dict()})
    else:
        print_conclusion(found)
    offer_recommender(done.name)
    if as_json:
        return
    click.echo()
    for line in look.lines():
        click.echo(line)
    click.echo()
    click.echo("Then measure your own:")
    if not live:
        click.echo("  tula demo --live                   a small network on this machine, a minute")
    click.echo("  tula main --model resnet18         any torchvision model, or package.module:make")
