"""The files of a profile's run: documents, figures as PNG, and one interactive page.

Each function fills a folder whose tree is that of the run's artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mlflow_tula import plots
from mlflow_tula.plots import interactive
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.table import ProfileTable

FIGURES = "figures"


def write_documents(
    folder: Path,
    table: ProfileTable,
    bundle: PredictorBundle | None,
    recommendation: Recommendation | None,
) -> Path:
    """The exact JSON documents, and the table as CSV for everybody else."""
    folder.mkdir()
    table.to_frame().to_csv(folder / "profile_table.csv", index=False)
    documents = {"profile": table, "bundle": bundle, "recommendation": recommendation}
    for name, document in documents.items():
        if document is not None:
            text = json.dumps(document.to_dict(), indent=1, sort_keys=True)
            (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return folder


def write_figures(
    folder: Path,
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None,
    memory_limit_bytes: float | None,
) -> Iterator[Path]:
    """The page and the overview, then each relation as a picture of its own.

    Yields:
        A folder whenever it is full, so that it can be sent while the next is drawn.
    """
    limit = {"memory_limit_bytes": memory_limit_bytes}
    first = _new(folder / "overview")
    page = first / FIGURES / "overview.html"
    interactive.save_html(page, table, bundle, recommendation, **limit)
    overview = plots.overview(table, bundle, recommendation, **limit)
    plots.save_png(overview, first / FIGURES / "overview.png")
    yield first
    second = _new(folder / "single")
    single = {
        "time_by_batch_size": plots.epoch_time(table, bundle, recommendation),
        "memory_by_batch_size": plots.memory(table, bundle, recommendation, **limit),
        "residuals": plots.residuals(table, bundle),
    }
    if recommendation is not None:
        single["cost_by_batch_size"] = plots.cost(table, bundle, recommendation)
        single["pareto"] = plots.pareto(recommendation)
    for name, figure in single.items():
        plots.save_png(figure, second / FIGURES / f"{name}.png")
    yield second


def _new(folder: Path) -> Path:
    (folder / FIGURES).mkdir(parents=True)
    return folder
