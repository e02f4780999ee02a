"""The recommender beside the predictors: registered once, then served by MLflow's own command."""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.render import note, print_json
from mlflow_tula.cli.types import switch

SERVE = "mlflow models serve -m models:/tula.recommender@champion --env-manager local"


def offer_recommender(name: str) -> None:
    """Register the recommender where this store has none; no reason to fail what was asked for.

    Args:
        name: the predictor that was registered just now; the input example asks it.
    """
    from mlflow_tula.errors import TulaError
    from mlflow_tula.serving.recommender_files import ensure_recommender

    try:
        version, added = ensure_recommender(name)
    except TulaError as error:
        note(f"the recommender was not registered: {error}")
        return
    if added:
        note(f"registered tula.recommender version {version}: serve decisions with `{SERVE}`")


@click.command("recommender")
@switch("--force", default=False, text="Register a new version even where there is one.")
@options.tracking_uri_option
@options.json_option
def recommender_command(as_json: bool, **values: Any) -> None:
    """Register the recommender, the model that `mlflow models serve` serves.

    `tula main`, `register` and `import` do so themselves where there is none of this release.
    """
    options.use_store(values, write=True)
    from mlflow_tula.serving.recommender_files import RECOMMENDER, ensure_recommender

    version, added = ensure_recommender(force=values["force"])
    if as_json:
        print_json({"name": RECOMMENDER, "version": version, "added": added})
        return
    click.echo(f"{'registered' if added else 'found'} {RECOMMENDER} version {version}")
    click.echo(f"serve it with {SERVE}")
