"""`tula registry`: what is registered, and what a person does with it after `tula register`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import print_json
from mlflow_tula.cli.serving import recommender_command
from mlflow_tula.cli.types import Listed, OpenText, count, switch

if TYPE_CHECKING:
    from mlflow_tula.registry.versions import Comparison, Version

name_argument = click.argument("name", metavar="NAME")


@click.group("registry")
def command() -> None:
    """List, show, compare, promote, roll back and prune registered predictors.

    NAME is a registered name in full, or model/dataset for this machine's hardware.

    \b
    tula registry list
    tula registry show vgg11/digits
    tula registry rollback vgg11/digits
    """


command.add_command(recommender_command)


@command.command("list")
@option("--workload", OpenText("all"), "all", "Only this model/dataset; all: every one.")
@option("--hardware", OpenText("all"), "all", "Only this hardware slug; all: every one.")
@options.tracking_uri_option
@options.json_option
def list_command(as_json: bool, **values: Any) -> None:
    """What is registered: of each predictor its champion."""
    options.use_store(values, write=False)
    from mlflow_tula import registry

    slug = values["workload"]
    found = registry.find(slug and slug.replace("/", "."), values["hardware"])
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    if not found:
        click.echo("nothing is registered: `tula main` profiles, fits and registers")
        return
    rows = [
        (
            one.workload_slug,
            one.hardware_slug,
            str(one.version),
            one.alias or "no champion",
            _percent(one.step_time_mape),
            _percent(one.memory_mape),
        )
        for one in found
    ]
    _print_table(("workload", "hardware", "version", "", "step error", "memory error"), rows)


@command.command("show")
@name_argument
@option("--version", count("3", open_word="auto"), "auto", "Version; auto: champion, else newest.")
@options.tracking_uri_option
@options.json_option
def show_command(name: str, as_json: bool, **values: Any) -> None:
    """Every version of a predictor, and how one of them was fitted."""
    options.use_store(values, write=False)
    from mlflow_tula import registry
    from mlflow_tula.errors import NotRegisteredError
    from mlflow_tula.registry import versions

    full = versions.registered_name(name)
    listed = versions.list_versions(full)
    wanted = values["version"]
    if wanted is None:
        shown = next((one for one in listed if one.champion), listed[0])
    else:
        by_number = {one.version: one for one in listed}
        if wanted not in by_number:
            raise NotRegisteredError(f"{full} has no version {wanted}; it has {_span(listed)}")
        shown = by_number[wanted]
    report = registry.load(full, version=shown.version).report
    if as_json:
        print_json(
            {
                "name": full,
                "version": shown.version,
                "report": {**report.to_dict(), "warnings": list(report.warnings)},
                "versions": [_plain(one) for one in listed],
            }
        )
        return
    click.echo(full)
    _print_versions(listed)
    click.echo(f"\nversion {shown.version}: {shown.reason}\n{report}")


@command.command("compare")
@name_argument
@option("--versions", Listed(example="1,3"), "auto", "Versions to compare; auto: the newest ten.")
@options.tracking_uri_option
@options.json_option
def compare_command(name: str, as_json: bool, **values: Any) -> None:
    """Ask several versions for the measurements of all of them: error, coverage, regret."""
    options.use_store(values, write=False)
    from mlflow_tula.registry import versions

    found = versions.compare(versions.registered_name(name), values["versions"])
    if as_json:
        print_json(
            [
                {
                    "version": one.version.version,
                    "champion": one.version.champion,
                    "all_rows": one.all_rows.to_dict(),
                    "unseen_rows": one.unseen_rows.to_dict(),
                }
                for one in found
            ]
        )
        return
    header = ("version", "", "rows", "error", "unseen rows", "their error", "coverage", "regret")
    _print_table((*header, "memory error"), [_comparison(one) for one in found])
    click.echo("error: mean absolute, of step time; unseen: rows of the other versions' tables")


@command.command("promote")
@name_argument
@option("--version", count("3", open_word="auto"), "auto", "Version; auto: the newest.")
@switch("--force", default=False, text="Promote it even where the gate says no.")
@options.tracking_uri_option
@options.json_option
def promote_command(name: str, as_json: bool, **values: Any) -> None:
    """Make a version the champion, if the gate finds it no worse than the present one."""
    options.use_store(values, write=True)
    from mlflow_tula.registry import versions

    full = versions.registered_name(name)
    number = values["version"]
    if number is None:
        number = versions.newest(full)
    verdict = versions.promote(full, number, force=values["force"])
    if as_json:
        print_json({"name": full, "version": number, **verdict.to_dict()})
        return
    click.echo(f"{full} version {number}: {verdict.reason}")


@command.command("rollback")
@name_argument
@options.tracking_uri_option
@options.json_option
def rollback_command(name: str, as_json: bool, **values: Any) -> None:
    """Give the alias back to the champion before the present one."""
    options.use_store(values, write=True)
    from mlflow_tula.registry import versions

    before = versions.rollback(versions.registered_name(name))
    if as_json:
        print_json({"name": before.name, "version": before.version})
        return
    click.echo(f"{before.name}: version {before.version} is the champion again")


@command.command("prune")
@name_argument
@option("--keep", count("5"), "5", "How many of the newest versions stay.")
@switch("--delete", default=False, text="Really delete; otherwise only say which would go.")
@options.tracking_uri_option
@options.json_option
def prune_command(name: str, as_json: bool, **values: Any) -> None:
    """Delete old versions; those with an alias and the champion before stay."""
    options.use_store(values, write=True)
    from mlflow_tula.registry import versions

    full = versions.registered_name(name)
    old = versions.prune(full, keep=values["keep"], delete=values["delete"])
    numbers = [one.version for one in old]
    if as_json:
        print_json({"name": full, "deleted": values["delete"], "versions": numbers})
        return
    if not numbers:
        click.echo(f"{full}: nothing to delete")
        return
    verb = "deleted" if values["delete"] else "--delete true would delete"
    click.echo(f"{full}: {verb} versions {', '.join(map(str, numbers))}")


def _print_versions(listed: Sequence[Version]) -> None:
    """One line a version, the newest first."""
    rows = [
        (
            str(one.version),
            ", ".join(one.aliases),
            one.gate,
            _percent(one.step_time_mape),
            _percent(one.memory_mape),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created_s)),
            one.table_digest,
        )
        for one in listed
    ]
    header = ("version", "alias", "gate", "step error", "memory error", "registered", "table")
    _print_table(header, rows)


def _comparison(one: Comparison) -> tuple[str, ...]:
    """The cells of one compared version."""
    return (
        str(one.version.version),
        "champion" if one.version.champion else "",
        str(one.all_rows.rows),
        _percent(one.all_rows.mape),
        str(one.unseen_rows.rows),
        _percent(one.unseen_rows.mape),
        _percent(one.all_rows.coverage),
        _percent(one.all_rows.regret),
        _percent(one.all_rows.memory_mape),
    )


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; what is not a number stays on the left."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        right = name.endswith(("error", "rows", "coverage", "regret")) or name == "version"
        grid.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(grid)


def _span(listed: Sequence[Version]) -> str:
    return ", ".join(str(one.version) for one in reversed(listed))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _plain(one: Version) -> dict[str, Any]:
    """A version as JSON types."""
    return {**one.to_dict(), "aliases": list(one.aliases)}
