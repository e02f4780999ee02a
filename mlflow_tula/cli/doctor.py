"""`tula doctor`: is this installation sound, and what to do where it is not."""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.render import print_json
from mlflow_tula.cli.types import switch

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}


@click.command("doctor")
@switch("--fix", default=False, text="Close RUNNING runs whose process on this host has died.")
@options.device_option
@options.tracking_uri_option
@options.json_option
def command(as_json: bool, **values: Any) -> int:
    """Check versions, devices, store, registry, plugin points and stale runs."""
    import mlflow

    from mlflow_tula import doctor, stores

    if values["tracking_uri"] is not None:
        # Not checked here: what is wrong with the store is what the doctor is to say.
        mlflow.set_tracking_uri(values["tracking_uri"])
    if values["device"] != "auto":
        options.detect_hardware(values["device"])
    closed: list[doctor.StaleRun] = []
    if values["fix"] and stores.store_exists():
        stores.check_store(write=True)
        closed = doctor.close_stale_runs()
    found = doctor.examine()
    if as_json:
        checks = [one.to_dict() for one in found]
        print_json({"checks": checks, "closed": [one.to_dict() for one in closed]})
    else:
        _print(found, closed)
    return 1 if any(one.status == "error" for one in found) else 0


def _print(found: list[Any], closed: list[Any]) -> None:
    """One line a finding, and the way out below it."""
    for one in found:
        word, color = _MARKS[one.status]
        click.echo(f"{click.style(word.ljust(8), fg=color)} {one.name}: {one.message}")
        if one.way_out:
            click.echo(f"{'':8} -> {one.way_out}")
    for run in closed:
        click.echo(f"closed   {run.run_name or run.run_id} ({run.run_id})")
    counts = {status: sum(one.status == status for one in found) for status in _MARKS}
    click.echo(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")
