"""Bundle <-> registered model version: register, load, find, resolve, promote."""

from mlflow_tula.registry.registration import (
    CHAMPION,
    RegisteredPredictor,
    find,
    load,
    load_table,
    register,
    resolve,
)

__all__ = [
    "CHAMPION",
    "RegisteredPredictor",
    "find",
    "load",
    "load_table",
    "register",
    "resolve",
]
