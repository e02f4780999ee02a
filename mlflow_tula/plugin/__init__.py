"""What MLflow finds by entry point (pyproject.toml), one module each.

    run_context.py    mlflow.run_context_provider   hardware tags on every run of this machine
    backend.py        mlflow.project_backend        `mlflow run ANY_PROJECT -b tula`
    evaluator.py      mlflow.model_evaluator        `mlflow.models.evaluate(..., evaluators="tula")`
    deployments.py    mlflow.deployments            `get_deploy_client("tula")`

MLflow loads some of them in the middle of its own import, so each imports at its top nothing but
the abstract class that it fills in. Two of them in one module would be a circular import.
"""
