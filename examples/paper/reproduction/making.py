"""Make figures: measure, draw, judge, log; leave out what is done already.

A figure's folder holds its picture, page, table and `done.json`, which says what was asked, by
which code, resting on which files, and in which run of which store it was logged. The figure is
made again when any of these differ or the store no longer has the run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula import __version__
from mlflow_tula.errors import TulaError, WorkFailedError
from mlflow_tula.files import read_json, write_json
from reproduction import drawing, profiles
from reproduction.facts import Made, Paper, sentence
from reproduction.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

    from mlflow_tula.runs import Run

DONE = "done.json"
HERE = Path(__file__).resolve().parent.parent
_ROWS_SHOWN = 12


def make_figures(
    settings: Settings, scripts: Sequence[str], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Make these figures; several in runs below one that sums them up.

    Returns:
        What `done.json` says of each.
    """
    from mlflow_tula.tracking import start_run

    modules = [importlib.import_module(script) for script in scripts]
    if len(modules) == 1:
        return [_only(settings, modules[0], values)]
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    with start_run("paper", command="paper", experiment=values["experiment"]) as run:
        run.params(values)
        for module in modules:
            try:
                done.append(_below(settings, module, values))
            except WorkFailedError as error:
                failed.append(f"{module.PAPER.label} ({error})")
                continue
            run.describe(summary(done))
            run.tag({"tula.paper.figures": ", ".join(one["figure"] for one in done)})
        run.metrics({"figures": len(done), "held": sum(one["held"] == "held" for one in done)})
        if done:
            _log_summary(run, done)
        if failed:
            # The others are made and logged; what failed is tried again by the same command.
            raise WorkFailedError(f"not made: {'; '.join(failed)}")
    return done


def _only(settings: Settings, module: ModuleType, values: Mapping[str, Any]) -> dict[str, Any]:
    """One figure in a run of its own, which is the project's where `mlflow run` has made one."""
    from mlflow_tula.tracking import start_run

    known = _known(settings, module, values)
    paper: Paper = module.PAPER
    if known is not None and not _inside_a_run():
        _say(known, again=True)
        return known
    with start_run(f"paper {paper.label}", command="paper", experiment=values["experiment"]) as run:
        if known is None:
            return _make(settings, module, values, run)
        # `mlflow run` has made this run already: say where the figure is, and show it here too.
        _show_again(settings, paper, known, run)
        _say(known, again=True)
        return known


def _below(settings: Settings, module: ModuleType, values: Mapping[str, Any]) -> dict[str, Any]:
    """One of several figures, in a run below that of all."""
    from mlflow_tula.tracking import start_run

    known = _known(settings, module, values)
    if known is not None:
        _say(known, again=True)
        return known
    with start_run(f"paper {module.PAPER.label}", command="paper") as run:
        return _make(settings, module, values, run)


def _make(
    settings: Settings, module: ModuleType, values: Mapping[str, Any], run: Run
) -> dict[str, Any]:
    """Measure, draw, judge and log, and note that it is done."""
    began, load = time.monotonic(), os.getloadavg()[0]
    paper: Paper = module.PAPER
    made: Made = module.make(settings)
    words = sentence(paper, made.verdict)
    folder = folder_of(settings, paper)
    (folder / DONE).unlink(missing_ok=True)
    heading = f"the claim {made.verdict.held} here: {made.verdict.because}"
    drawing.draw(folder, f"{paper.label}: {paper.subject}", heading, made.panels)
    made.table.to_csv(folder / "table.csv", index=False)
    elapsed = time.monotonic() - began
    _log(run, paper, made, words, settings, values)
    run.metrics({"seconds": elapsed, "data_seconds": made.data_s})
    done = {
        "figure": paper.name,
        "label": paper.label,
        "subject": paper.subject,
        "held": made.verdict.held,
        "sentence": words,
        "because": made.verdict.because,
        "numbers": made.verdict.numbers,
        "notes": list(made.notes),
        "seconds": elapsed,
        "data_seconds": made.data_s,
        "digest": _digest(settings, module),
        "inputs": _inputs(settings, module),
        "run_id": run.run_id,
        "store": _store(),
        "made": time.strftime("%Y-%m-%d"),
        "load_average": max(load, os.getloadavg()[0]),
    }
    write_json(folder / DONE, done)
    _say(done)
    return done


def folder_of(settings: Settings, paper: Paper) -> Path:
    """Where a figure lies."""
    return settings.folder / (paper.name if paper.name == "table1" else f"figure_{paper.name}")


def _log(
    run: Run,
    paper: Paper,
    made: Made,
    words: str,
    settings: Settings,
    values: Mapping[str, Any],
) -> None:
    """Picture, page, table, numbers and the sentence."""
    run.params({**values, **settings.request})
    run.metrics(made.verdict.numbers)
    run.tag(
        {
            "tula.paper.figure": paper.name,
            "tula.paper.held": made.verdict.held,
            "tula.paper.claim": words,
        }
    )
    run.describe(
        "\n\n".join(
            [
                words,
                f"**Claim.** {paper.claim}",
                f"**Rule.** {paper.rule}",
                *made.notes,
                _markdown(made),
            ]
        )
    )
    run.files(folder_of(settings, paper))
    _log_table(run, made.table)


def _log_table(run: Run, table: Any) -> None:
    """The data for MLflow's table view."""
    from mlflow_tula.stores import store_errors

    with store_errors("log the figure's table"):
        run.client.log_table(run.run_id, data=table, artifact_file="table.json")


def _markdown(made: Made) -> str:
    """The first rows of the table."""
    shown = made.table.head(_ROWS_SHOWN)
    lines = ["| " + " | ".join(map(str, shown.columns)) + " |", "|---" * len(shown.columns) + "|"]
    for row in shown.itertuples(index=False):
        cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    if len(made.table) > len(shown):
        lines.append(f"\n{len(made.table)} rows in all: the artifact table.json.")
    return "\n".join(lines)


def _show_again(settings: Settings, paper: Paper, known: Mapping[str, Any], run: Run) -> None:
    """The finished figure in another run, with the run that made it."""
    import pandas as pd

    run.tag(
        {
            "tula.paper.figure": paper.name,
            "tula.paper.held": known["held"],
            "tula.paper.claim": known["sentence"],
            "tula.paper.made_in": known["run_id"],
        }
    )
    run.describe(
        f"{known['sentence']}\n\nMade in run {known['run_id']}: nothing was measured again."
    )
    run.files(folder_of(settings, paper))
    _log_table(run, pd.read_csv(folder_of(settings, paper) / "table.csv"))


def _known(
    settings: Settings, module: ModuleType, values: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What `done.json` says, where it is still true."""
    path = folder_of(settings, module.PAPER) / DONE
    if not values["resume"] or not path.exists():
        return None
    try:
        known = read_json(path, made_by="examples/paper/run.py")
    except TulaError:
        return None
    same = known.get("digest") == _digest(settings, module) and known.get("store") == _store()
    if not same or known.get("inputs") != _inputs(settings, module):
        return None
    return known if _has_run(str(known.get("run_id"))) else None


def _has_run(run_id: str) -> bool:
    """Whether the store still has this run, finished."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        info = MlflowClient().get_run(run_id).info
    except MlflowException:
        return False
    return info.lifecycle_stage == "active" and info.status == "FINISHED"


def _store() -> str:
    from mlflow_tula.stores import store_identity

    return store_identity()


def _inside_a_run() -> bool:
    import mlflow

    return bool(os.environ.get("MLFLOW_RUN_ID")) or mlflow.active_run() is not None


def _digest(settings: Settings, module: ModuleType) -> str:
    """Of what was asked and of the code that answers it."""
    digest = hashlib.sha256(json.dumps(settings.request, sort_keys=True).encode())
    digest.update(__version__.encode())
    own = HERE / f"{module.__name__}.py"
    for path in (own, *sorted((HERE / "reproduction").glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _inputs(settings: Settings, module: ModuleType) -> dict[str, str]:
    """Digests of the profiles that a figure rests on.

    Trainings need none: each is named by everything that decides it, and the figure by its options.
    """
    if not hasattr(module, "profiles"):
        return {}
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""
        for path in profiles.files(settings)
    }


def _say(done: Mapping[str, Any], *, again: bool = False) -> None:
    """The sentence, on stderr where `--json` wants one document on stdout."""
    words = f"{done['sentence']} " + (
        f"(made already: run {done['run_id']})" if again else f"({done['seconds']:.0f} s)"
    )
    quiet = click.get_current_context().params.get("as_json", False)
    click.echo(words, err=quiet)


def summary(done: Sequence[Mapping[str, Any]]) -> str:
    """All sentences as Markdown."""
    held = sum(one["held"] == "held" for one in done)
    lines = [f"**{held} of {len(done)} claims of the paper held here.**", ""]
    lines += [f"- {one['sentence']} (run {one['run_id']})" for one in done]
    return "\n".join(lines)


def _log_summary(run: Run, done: Sequence[Mapping[str, Any]]) -> None:
    """All verdicts as one table."""
    import pandas as pd

    names = ("label", "subject", "held", "because", "seconds", "data_seconds", "run_id")
    _log_table(run, pd.DataFrame([{name: one[name] for name in names} for one in done]))
