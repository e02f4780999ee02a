"""Every method by name: what `tula compare` and `tula train --method` choose from.

A name stands for a method with settings that make it what its paper says; any setting can be
replaced: `build_method("scaling_clip", max_norm=0.5)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.methods.adascale import AdaScaleMethod
from mlflow_tula.methods.ags import AdaptiveScalingMethod
from mlflow_tula.methods.averaging import PostLocalMethod
from mlflow_tula.methods.batch_schedule import BatchGrowthMethod, BatchWarmupMethod
from mlflow_tula.methods.extrapolation import ExtrapolationMethod
from mlflow_tula.methods.layerwise import LayerwiseMethod
from mlflow_tula.methods.protocol import Method
from mlflow_tula.methods.sam import SharpnessAwareMethod
from mlflow_tula.methods.scaling import PlainMethod, ScalingMethod

_METHODS: dict[str, Callable[..., Any]] = {
    "plain": PlainMethod,
    "linear_scaling": lambda: ScalingMethod(name="linear_scaling", rule="linear"),
    "sqrt_scaling": lambda: ScalingMethod(name="sqrt_scaling", rule="sqrt"),
    "constant_scaling": lambda: ScalingMethod(
        name="constant_scaling", rule="constant", factor=4.0, warmup_epochs=0.0
    ),
    "scaling_clip": lambda: ScalingMethod(name="scaling_clip", rule="linear", max_norm=1.0),
    "sqrt_clip": lambda: ScalingMethod(name="sqrt_clip", rule="sqrt", max_norm=1.0),
    "scaling_autoclip": lambda: ScalingMethod(
        name="scaling_autoclip", rule="linear", clip_percentile=10.0
    ),
    "lars": lambda: LayerwiseMethod(name="lars"),
    "lars_clip": lambda: LayerwiseMethod(name="lars_clip", max_norm=1.0),
    "lamb": lambda: LayerwiseMethod(name="lamb", rule="sqrt"),
    "ags": AdaptiveScalingMethod,
    "static_scaling": lambda: AdaptiveScalingMethod(name="static_scaling", static=True),
    "adascale": AdaScaleMethod,
    "post_local_sgd": PostLocalMethod,
    "sam": SharpnessAwareMethod,
    "extrapolation": ExtrapolationMethod,
    "batch_warmup": BatchWarmupMethod,
    "batch_growth": BatchGrowthMethod,
}


def method_names() -> tuple[str, ...]:
    """The names that `build_method` knows, in alphabetical order."""
    return tuple(sorted(_METHODS))


def build_method(name: str, **settings: Any) -> Method:
    """The method of that name, with settings of your own where given."""
    if name not in _METHODS:
        raise UnknownNameError("method", name, _METHODS)
    method = _METHODS[name]()
    known = _settings(method)
    for setting in settings:
        if setting not in known:
            raise InvalidInputError(
                f"method {name!r} has no setting {setting!r}: it has {', '.join(sorted(known))}"
            )
    return cast(Method, replace(method, **settings))


def has_warmup(name: str) -> bool:
    """Whether the method of that name warms the learning rate up."""
    return "warmup_epochs" in _settings(build_method(name))


def _settings(method: Any) -> set[str]:
    return {field.name for field in fields(method)} - {"name"}
