"""Bundle <-> registered model version: register, load, find, resolve, promote."""

from mlflow_tula.registry.cross_model import (
    cross_model_name,
    known_elsewhere,
    load_cross_model,
    refit,
)
from mlflow_tula.registry.finding import (
    CHAMPION,
    RegisteredPredictor,
    find,
    for_hardware,
    load,
    load_table,
    resolve,
)
from mlflow_tula.registry.links import load_links, register_links
from mlflow_tula.registry.registration import (
    default_recommendation,
    register,
    registered_already,
)

__all__ = [
    "CHAMPION",
    "RegisteredPredictor",
    "cross_model_name",
    "default_recommendation",
    "find",
    "for_hardware",
    "known_elsewhere",
    "load",
    "load_cross_model",
    "load_links",
    "load_table",
    "refit",
    "register",
    "register_links",
    "registered_already",
    "resolve",
]
