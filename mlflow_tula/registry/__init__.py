"""Bundle <-> registered model version: register, load, find, resolve, promote."""

from mlflow_tula.registry.finding import (
    CHAMPION,
    RegisteredPredictor,
    find,
    for_hardware,
    load,
    load_table,
    resolve,
)
from mlflow_tula.registry.registration import (
    default_recommendation,
    register,
    registered_already,
)

__all__ = [
    "CHAMPION",
    "RegisteredPredictor",
    "default_recommendation",
    "find",
    "for_hardware",
    "load",
    "load_table",
    "register",
    "registered_already",
    "resolve",
]
