"""Which parameters of a project say `auto`, and what the registry answers for them.

Every parameter of NAMES that the caller or MLproject's default sets to `auto` is filled in, if one
of them is a batch size; without one the project is none of our business and runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_args

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.specs import Precision, Workload, slugify

if TYPE_CHECKING:
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.registry import RegisteredPredictor
    from mlflow_tula.specs import HardwareSpec

# As in backend.py: shown in the log of `mlflow run`.
_logger = logging.getLogger("mlflow.projects.tula")

AUTO = "auto"
BATCH_NAMES = {
    "batch_size": "global_batch_size",
    "global_batch_size": "global_batch_size",
    "local_batch_size": "local_batch_size",
    "per_device_batch_size": "local_batch_size",
}
DEVICE_NAMES = {
    "devices": "devices_per_node",
    "devices_per_node": "devices_per_node",
    "nproc_per_node": "devices_per_node",
    "world_size": "world_size",
}
NAMES = {
    **BATCH_NAMES,
    **DEVICE_NAMES,
    "accumulation_steps": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
}
"""Parameter of a project (with `_` or `-`) -> field of the Recommendation."""

CONFIG = {
    "workload": "model/dataset, as `tula registry list` shows it",
    "hardware": "hardware slug or the device's name; this machine",
    "alias": "alias of the registered version; champion",
    "objective": "knee, min_time, min_cost, min_time_to_target or min_cost_to_target",
    "epochs": "length of the run",
    "deadline_s": "longest training time",
    "budget_usd": "most dollars",
    "memory_limit_bytes": "what a device may use",
    "usd_per_device_hour": "price",
    "usd_per_gb_hour": "price",
    "nodes": "number of nodes, or a list; 1",
    "devices_per_node": "devices, or a list; 1, or all where the project has a parameter for them",
    "candidates": "global batch sizes to choose from",
    "current_global_batch_size": "what is used today",
}
"""Keys of the backend's config, the JSON of `mlflow run -c`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What to pass on: parameters in place of `auto`, tags for the run, the decision in words."""

    parameters: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    headline: str = ""


def resolve(
    given: Mapping[str, Any], defaults: Mapping[str, str], config: Mapping[str, Any]
) -> Resolved:
    """Answer every `auto` of a project's parameters.

    Args:
        given: parameters of `-P`.
        defaults: those of MLproject.
        config: the backend's config; keys of CONFIG (MLflow's own, in capitals, are left alone).

    Raises:
        InvalidInputError: an unknown key or a bad value of the config, or no workload named.
        NotRegisteredError: nothing is registered for this workload on this hardware.
    """
    from mlflow_tula.hardware import detect

    hardware = detect()
    asked = _asked({**defaults, **given})
    tags = _hardware_tags(hardware)
    if not any(field in BATCH_NAMES.values() for field in asked.values()):
        return Resolved(tags=tags)
    _check_config(config)
    slug = workload_slug(str(config.get("workload") or _from_parameters({**defaults, **given})))
    found = _registered(slug, hardware, config)
    several = any(field in DEVICE_NAMES.values() for field in asked.values())
    choice = _recommend(found, config, several=several)
    parameters = {name: str(getattr(choice, field)) for name, field in asked.items()}
    _check_accumulation(choice, parameters, {**defaults, **given})
    return Resolved(
        parameters=parameters,
        tags={**tags, **_decision_tags(found, choice, parameters)},
        headline=f"{choice.headline} ({found.version_uri})",
    )


def workload_slug(text: str) -> str:
    """`vgg11/cifar100` or `vgg11.cifar100` as the registry spells it."""
    model, separator, dataset = text.strip().replace("/", ".", 1).partition(".")
    if not separator or not model or not dataset:
        raise InvalidInputError(f"a workload must be model/dataset (vgg11/cifar100), not {text!r}")
    return f"{slugify(model)}.{slugify(dataset)}"


def _asked(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Parameters that are to be filled in, with the field of the decision that fills each."""
    return {
        name: NAMES[key]
        for name, value in parameters.items()
        if (key := name.replace("-", "_")) in NAMES and str(value).strip().lower() == AUTO
    }


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise for a key that would be ignored in silence."""
    for key in config:
        # MLflow puts its own beside ours: ENV_MANAGER, SYNCHRONOUS, build_image, docker_auth, ...
        internal = key.isupper() or key.startswith("_") or key in ("build_image", "docker_auth")
        if not internal and key not in CONFIG:
            raise UnknownNameError("key of the backend config", key, CONFIG)


def _from_parameters(parameters: Mapping[str, Any]) -> str:
    """The workload that the project's own parameters `model` and `dataset` name."""
    model, dataset = parameters.get("model"), parameters.get("dataset")
    if not model or not dataset:
        raise InvalidInputError(
            "batch_size=auto needs to know what is trained: give the backend config a workload, "
            """such as -c '{"workload": "vgg11/cifar100"}'"""
        )
    precision, optimizer = parameters.get("precision", "fp32"), parameters.get("optimizer")
    return Workload(
        model=str(model),
        dataset=str(dataset),
        dataset_size=1,
        precision=cast(Precision, precision) if precision in get_args(Precision) else "fp32",
        optimizer=str(optimizer or "sgd"),
    ).slug


def _registered(
    slug: str, hardware: HardwareSpec, config: Mapping[str, Any]
) -> RegisteredPredictor:
    """The registered predictor to ask."""
    from mlflow_tula import registry

    wanted = config.get("hardware")
    if wanted is None:
        return registry.resolve(slug, hardware, alias=str(config.get("alias", registry.CHAMPION)))
    return registry.for_hardware(slug, str(wanted))


def _recommend(
    found: RegisteredPredictor, config: Mapping[str, Any], *, several: bool
) -> Recommendation:
    """Ask the bundle; one device, unless the config or a parameter says that it can use more."""
    from mlflow_tula import registry
    from mlflow_tula.serving.questions import FIELDS, Question

    bundle = registry.load(found.name, version=found.version)
    usual = sorted({1, bundle.hardware.devices_per_node}) if several else [1]
    asked = {name: config[name] for name in CONFIG if name in FIELDS and name in config}
    return Question.from_record({"devices_per_node": usual, **asked}).decide(bundle)


def _check_accumulation(
    choice: Recommendation, parameters: Mapping[str, str], all_parameters: Mapping[str, Any]
) -> None:
    """Say so where the project cannot be told to accumulate as the decision assumes."""
    if choice.accumulation_steps > 1 and not any(
        NAMES[name.replace("-", "_")] == "accumulation_steps" for name in parameters
    ):
        _logger.warning(
            "batch size %d fits with %d accumulation steps; the project has no parameter for "
            "them that says auto: it must split the batch itself",
            choice.global_batch_size,
            choice.accumulation_steps,
        )


def _hardware_tags(hardware: HardwareSpec) -> dict[str, str]:
    """As the run context provider sets them, which MLflow does not ask for project runs."""
    return {
        "tula.hardware": hardware.slug,
        "tula.fingerprint": hardware.fingerprint,
        "tula.device_type": hardware.device_type,
        "tula.device_name": hardware.device_name,
    }


def _decision_tags(
    found: RegisteredPredictor, choice: Recommendation, parameters: Mapping[str, str]
) -> dict[str, str]:
    """Which predictor was asked, and what it said."""
    filled = ", ".join(f"{name}={value}" for name, value in parameters.items())
    notes = [f"**{choice.headline}**", "", f"Asked `{found.version_uri}`; filled in {filled}.", ""]
    notes += [f"- {reason}" for reason in choice.reasons]
    notes += [f"- **warning:** {warning}" for warning in choice.warnings]
    return {
        "tula.command": "mlflow run -b tula",
        "tula.workload": found.workload_slug,
        "tula.registered_model": found.name,
        "tula.registered_version": str(found.version),
        "tula.resolved": filled,
        "tula.objective": choice.objective,
        "tula.global_batch_size": str(choice.global_batch_size),
        "mlflow.note.content": "\n".join(notes)[:4500],
    }
