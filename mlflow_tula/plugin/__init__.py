"""What MLflow finds by entry point (pyproject.toml), one module each.

    run_context.py    mlflow.run_context_provider   hardware tags on every run of this machine
    backend.py        mlflow.project_backend        `mlflow run ANY_PROJECT -b tula`
    evaluator.py      mlflow.model_evaluator        `mlflow.models.evaluate(..., evaluators="tula")`
    deployments.py    mlflow.deployments            `get_deploy_client("tula")`

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
    "HardwareContext": "run_context",
    "PredictorEvaluator": "evaluator",
    "TulaBackend": "backend",
    "deployments": "deployments",
}
"""What an entry point names -> the module behind it."""


def __getattr__(name: str) -> Any:
    """The class, or the module itself, behind an entry point; every fault is an ImportError."""
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_OFFERED[name]}")
        return module if name == _OFFERED[name] else getattr(module, name)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ImportError(
            f"mlflow_tula.plugin.{_OFFERED[name]} cannot be loaded: {kind}: {error}"
        ) from error
