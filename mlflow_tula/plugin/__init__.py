"""What MLflow finds by entry point (pyproject.toml), one module each.

    run_context.py    mlflow.run_context_provider   hardware tags on every run of this machine
    backend.py        mlflow.project_backend        `mlflow run ANY_PROJECT -b tula`
    evaluator.py      mlflow.model_evaluator        `mlflow.models.evaluate(..., evaluators="tula")`
    deployments.py    mlflow.deployments            `get_deploy_client("tula")`
    serving/app.py    mlflow.app                    `mlflow server --app-name tula`

MLflow loads some of them in the middle of its own import, and survives an ImportError alone: the
entry points name attributes of this package, and whatever goes wrong behind one (a syntax error, a
half-upgraded file) becomes that ImportError, which MLflow only warns of. Each module imports at
its top nothing but the abstract class that it fills in; two of them in one module would be a
circular import.
"""

from __future__ import annotations

import importlib
from typing import Any

_OFFERED = {
    "HardwareContext": "mlflow_tula.plugin.run_context",
    "PredictorEvaluator": "mlflow_tula.plugin.evaluator",
    "TulaBackend": "mlflow_tula.plugin.backend",
    "create_app": "mlflow_tula.serving.app",
    "deployments": "mlflow_tula.plugin.deployments",
}
"""What an entry point names -> the module behind it."""


def __getattr__(name: str) -> Any:
    """The class or function, or the module itself, behind an entry point.

    Every fault is an ImportError, which MLflow survives; its command line shows it as one line.
    """
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_OFFERED[name])
        return module if _OFFERED[name].endswith(f".{name}") else getattr(module, name)
    except (Exception, SystemExit) as error:
        raise _broken(_OFFERED[name], error) from error


def _broken(module: str, error: BaseException) -> ImportError:
    """What MLflow is told of a module that cannot be loaded."""
    import click

    class BrokenPluginError(click.ClickException, ImportError):
        """Caught by MLflow as an ImportError; `mlflow server` ends with its message."""

    return BrokenPluginError(f"{module} cannot be loaded: {type(error).__name__}: {error}")
