"""`mlflow.deployments.get_deploy_client("tula")`: registered predictors as deployments.

A deployment is a registered predictor, its version the champion. It is named in full or as
`model/dataset`, which means this machine's hardware. `predict` takes one question a row:

    columns with a batch size    -> predictions (step time, memory, epoch time, cost, intervals)
    columns without one          -> a decision (objective, epochs, deadline_s, nodes, ...)

Nothing is started: the champion's files are read and evaluated in this process.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from mlflow.deployments.base import BaseDeploymentClient
from mlflow.exceptions import MlflowException

if TYPE_CHECKING:
    import pandas as pd

_BATCH = ("global_batch_size", "local_batch_size")


class TulaDeployments(BaseDeploymentClient):  # type: ignore[misc, unused-ignore]
    """Deployments are registered predictors; MLflow's verbs move the alias `champion`."""

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> pd.DataFrame:
        """Predictions or decisions, one row per row of `inputs` (a frame, or what makes one).

        Raises:
            MlflowException: an unknown deployment, or a question that cannot be asked.
        """
        with _mlflow_errors():
            name = self._name(deployment_name or endpoint)
            frame = _frame(inputs)
            from mlflow_tula.registry import load

            bundle = load(name)
            if any(column in frame for column in _BATCH):
                return bundle.predict(frame)
            return _decide(bundle, frame)

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Make the version `models:/<name>/<number>` the champion of a model without one."""
        from mlflow_tula.errors import InvalidInputError
        from mlflow_tula.registry.versions import list_versions

        with _mlflow_errors():
            full = self._name(name)
            current = next((one for one in list_versions(full) if one.champion), None)
            if current is not None:
                raise InvalidInputError(
                    f"{full} is deployed already, with version {current.version}: use "
                    "`mlflow deployments update`"
                )
        return self.update_deployment(name, model_uri, flavor, config, endpoint)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Promote the version `models:/<name>/<number>` by the gate, or with `-C force=true`."""
        from mlflow_tula.errors import InvalidInputError
        from mlflow_tula.registry.versions import promote

        with _mlflow_errors():
            full = self._name(name)
            number = (model_uri or "").removeprefix(f"models:/{full}/")
            if not number.isdigit():
                raise InvalidInputError(
                    f"model_uri must be models:/{full}/<version number>, not {model_uri!r}"
                )
            forced = str((config or {}).get("force", "false")).lower() == "true"
            promote(full, int(number), force=forced)
        return {"name": full, "flavor": "python_function", "version": int(number)}

    def delete_deployment(
        self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None
    ) -> None:
        """Take the alias `champion` away; no version is deleted."""
        from mlflow_tula.registry.versions import retire

        with _mlflow_errors():
            retire(self._name(name))

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Every registered predictor that has a champion."""
        from mlflow_tula.registry import find

        with _mlflow_errors():
            return [one.to_dict() for one in find() if one.alias is not None]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """What is registered under this name."""
        from mlflow_tula.registry.versions import list_versions

        with _mlflow_errors():
            full = self._name(name)
            versions = list_versions(full)
            shown = next((one for one in versions if one.champion), versions[0])
            return {**shown.to_dict(), "num_versions": len(versions)}

    def _name(self, name: str | None) -> str:
        """The registered name."""
        from mlflow_tula.errors import InvalidInputError
        from mlflow_tula.registry.versions import registered_name

        if not name:
            raise InvalidInputError("name the deployment: a registered name, or model/dataset")
        return registered_name(name)


def run_local(
    name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None
) -> None:
    """Serve the model over HTTP in this environment, as `mlflow models serve` does; blocks.

    Args:
        name: unused; a local server has no name.
        model_uri: the registered predictor.
        flavor: unused.
        config: `port` (5000) and `host`.

    Raises:
        MlflowException: the server could not start; its own output says why.
    """
    import os
    import subprocess
    import sys
    from pathlib import Path

    given = config or {}
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model_uri]
    command += ["--env-manager", "local", "--port", str(given.get("port", 5000))]
    command += ["--host", str(given.get("host", "127.0.0.1"))]
    # MLflow starts uvicorn by name: that of this environment, activated or not.
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(command, env={**os.environ, "PATH": here})
    if done.returncode not in (0, -signal.SIGTERM, -signal.SIGINT):
        raise MlflowException(
            f"the server of {model_uri} ended with exit code {done.returncode}: see its output"
        )


def target_help() -> str:
    """What `mlflow deployments help -t tula` prints."""
    from mlflow_tula.serving.questions import FIELDS

    return (
        "Target URI: tula. A deployment is a registered predictor, named in full\n"
        "(tula.vgg11.digits.<hardware>) or as model/dataset for this machine's hardware.\n"
        "\n"
        "  mlflow deployments predict -t tula --name vgg11/digits -I questions.json\n"
        "\n"
        'Rows with a batch size ({"global_batch_size": 128, "devices_per_node": 2}) are answered\n'
        "with predictions. Rows without one are answered with a decision; their columns are\n"
        f"{', '.join(FIELDS)}.\n"
        "create and update take models:/<name>/<version> and promote it through the gate\n"
        "(-C force=true goes past it); delete takes the alias champion away.\n"
    )


def _frame(inputs: Any) -> pd.DataFrame:
    """The questions as a frame: one dict is one question."""
    import pandas as pd

    from mlflow_tula.errors import InvalidInputError

    if isinstance(inputs, pd.DataFrame):
        frame = inputs
    elif isinstance(inputs, dict) and not any(isinstance(v, list | tuple) for v in inputs.values()):
        frame = pd.DataFrame([inputs])
    elif isinstance(inputs, dict | list):
        try:
            frame = pd.DataFrame(inputs)
        except ValueError as error:
            raise InvalidInputError(f"inputs make no table: {error}") from error
    else:
        raise InvalidInputError(f"inputs must be a DataFrame, not {type(inputs).__name__}")
    if frame.empty and not isinstance(inputs, dict):
        raise InvalidInputError("inputs must hold at least one question")
    return frame


def _decide(bundle: Any, frame: pd.DataFrame) -> pd.DataFrame:
    """One decision a row."""
    import pandas as pd

    from mlflow_tula.errors import InvalidInputError
    from mlflow_tula.serving.questions import Question, answer_row, records

    questions = records(frame) or [{}]
    rows = []
    for position, record in enumerate(questions):
        try:
            rows.append(answer_row(Question.from_record(record, also=_BATCH).decide(bundle)))
        except InvalidInputError as error:
            if len(questions) == 1:
                raise
            raise InvalidInputError(f"question {position + 1}: {error}") from error
    return pd.DataFrame(rows, index=frame.index if len(frame) else None)


class _mlflow_errors:  # noqa: N801
    """Our errors as MLflow's: what callers of a deployment client expect to catch."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise in the place of a TulaError."""
        from mlflow_tula.errors import TulaError
        from mlflow_tula.serving.faults import error_code

        if isinstance(error, TulaError):
            raise _deployment_error(str(error), error_code(error)) from error


def _deployment_error(message: str, code: str) -> Exception:
    """An MlflowException that MLflow's command line shows as one line."""
    import click
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2

    class DeploymentError(MlflowException, click.ClickException):  # type: ignore[misc, unused-ignore]
        """Both: raised to Python callers, and shown by click without a traceback."""

        def __init__(self) -> None:
            click.ClickException.__init__(self, message)
            MlflowException.__init__(self, message, error_code=databricks_pb2.ErrorCode.Value(code))

    return DeploymentError()
