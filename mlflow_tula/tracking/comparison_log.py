"""A comparison -> MLflow: every training as a nested run; curves, tables and figures on the parent.

The parent run holds accuracy and gap recovered of each method as metrics over the batch size, so
that MLflow draws the paper's figure 2 by itself.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tula.comparing.figures import draw_all
from mlflow_tula.comparing.summary import MethodRow
from mlflow_tula.comparing.tables import results_table, row_numbers, table_one, verdicts, words
from mlflow_tula.runs import PREFIX, Run, log_batch
from mlflow_tula.stores import store_errors

if TYPE_CHECKING:
    from mlflow_tula.compare import Comparison, Plan
    from mlflow_tula.comparing.facts import Outcome

_logger = logging.getLogger(__name__)


class OutcomeLogger:
    """Logs each training as a nested run as soon as it is done.

    A store that fails here costs a warning, not the comparison: results are in the record file.
    """

    def __init__(self, run: Run) -> None:
        """Log below this run."""
        self.run = run
        self._logged: set[str] = set()

    def __call__(self, outcome: Outcome, done: int, total: int) -> None:
        """Take an outcome of `compare`."""
        if outcome.trial.key in self._logged:
            return
        self._logged.add(outcome.trial.key)
        try:
            _log_outcome(self.run, outcome)
        except Exception as error:
            _logger.warning("a training could not be logged to MLflow: %s", error)


def _log_outcome(run: Run, outcome: Outcome) -> None:
    trial, now = outcome.trial, int(time.time() * 1000)
    with store_errors("log a training"):
        child = run.client.create_run(
            run.experiment_id,
            start_time=now - int(1000 * outcome.wall_time_s),
            run_name=f"{trial.method} batch {trial.batch_size} seed {trial.seed} {trial.split}",
            tags={"mlflow.parentRunId": run.run_id, "tula.command": "compare-training"},
        )
    run_id = str(child.info.run_id)
    params = {**trial.to_dict(), **trial.to_dict()["task"], "settings": words(trial.settings)}
    params.pop("task")
    names = ("accuracy", "loss", "train_loss", "train_accuracy", "steps", "samples", "cpu_time_s")
    metrics: list[tuple[str, object, int]] = [(name, getattr(outcome, name), 0) for name in names]
    metrics += [("wall_time_s", outcome.wall_time_s, 0), ("scaled_share", outcome.scaled_share, 0)]
    for epochs, loss, accuracy in outcome.curve:
        metrics += [("curve/train_loss", loss, round(100 * epochs))]
        metrics += [("curve/accuracy", accuracy, round(100 * epochs))]
    log_batch(
        run.client,
        run_id,
        metrics=metrics,
        params={PREFIX + name: str(value) for name, value in params.items()},
        tags={"tula.status": "diverged" if outcome.diverged else "ok", "tula.key": trial.key},
    )
    with store_errors("close a training"):
        run.client.set_terminated(run_id, status="FINISHED")


def log_comparison(run: Run, comparison: Comparison) -> None:
    """Log the table, Table I's layout, figures and the words that people read first."""
    rows = comparison.rows
    run.metrics({"reference/accuracy": rows[0].mean, "reference/accuracy_std": rows[0].std})
    run.log(metrics=[metric for row in rows[1:] for metric in _row_metrics(row)])
    task = comparison.plan.task
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        folder = Path(scratch)
        write_documents(folder, comparison)
        run.files(folder)
    run.describe(f"**{title(comparison.plan)}**\n\n" + "\n".join(
        [f"- {line}" for line in verdicts(rows)] + ["", results_table(rows)]
    ))  # fmt: skip
    run.params({"learning_rate": task.learning_rate})


def write_documents(folder: Path, comparison: Comparison) -> None:
    """comparison.json, comparison.md and the figures."""
    rows = comparison.rows
    folder.mkdir(parents=True, exist_ok=True)
    document = [row_numbers(row) for row in rows]
    (folder / "comparison.json").write_text(json.dumps(document, indent=1) + "\n")
    text = f"# {title(comparison.plan)}\n\n{results_table(rows)}\n\n{table_one(rows)}\n"
    (folder / "comparison.md").write_text(text)
    draw_all(folder / "figures", title(comparison.plan), rows, comparison.tuning)


def title(plan: Plan) -> str:
    """What was compared, in a line."""
    task = plan.task
    budget = f"{task.epochs:g} epochs" if plan.budget == "epochs" else "equal time"
    return (
        f"{task.dataset}, reference batch {task.reference_batch_size} at rate "
        f"{task.learning_rate:g}, {budget}, {plan.seeds} seeds"
    )


def _row_metrics(row: MethodRow) -> list[tuple[str, object, int]]:
    names = {
        "accuracy": row.mean,
        "accuracy_std": row.std,
        "gap_recovered": row.recovered,
        "train_loss": row.train_loss,
        "cpu_time_s": row.cpu_time_s,
    }
    return [(f"{name}/{row.method}", value, row.batch_size) for name, value in names.items()]
