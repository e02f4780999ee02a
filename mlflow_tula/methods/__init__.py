"""Large batches without the generalization gap: AGS, its rivals, and a recipe.

    protocol         TrainingPlan, Method, MethodRun: what every method is
    ags              adaptive gradient scaling as published, and its controls
    scaling          plain, linear and square-root learning-rate scaling, warm-up, clip
    clipping         norm clipping, at a fixed norm or at a percentile (AutoClip), as a hook
    layerwise        LARS, LAMB
    adascale         AdaScale: the gain as an automatic learning-rate factor
    sam, extrapolation    gradients taken at another point
    averaging        post-local SGD
    batch_schedule   batch warm-up; batch growth instead of learning-rate decay
    catalogue        every method by name
    recipe           the default: method, rate, warm-up and clip in one line

    step_scaling, scale_invariance, fused, fused_lars, wrapper    the machinery under them

One line in your own loop:

    optimizer, schedule = recipe(model, batch_size=1024, reference_batch_size=32,
                                 reference_learning_rate=0.05, steps_per_epoch=59)
or
    AdaptiveGradientScaling(optimizer, scaling_factor=4.0)      # hooks into optimizer.step()
"""

from mlflow_tula.methods.adascale import AdaScale
from mlflow_tula.methods.ags import (
    AdaptiveGradientScaling,
    ReplayedScaling,
    ScalingReport,
    constant_mean,
    shuffled,
)
from mlflow_tula.methods.averaging import post_local_sgd
from mlflow_tula.methods.batch_schedule import grow_batch, step_decay, warm_up_batch
from mlflow_tula.methods.catalogue import build_method, method_names
from mlflow_tula.methods.clipping import NormClipping, PercentileClipping
from mlflow_tula.methods.extrapolation import Extrapolation
from mlflow_tula.methods.layerwise import lamb, lars
from mlflow_tula.methods.protocol import BatchPhase, Method, MethodRun, TrainingPlan
from mlflow_tula.methods.recipe import recipe
from mlflow_tula.methods.sam import SharpnessAware
from mlflow_tula.methods.scaling import learning_rate_factor

__all__ = [
    "AdaScale",
    "AdaptiveGradientScaling",
    "BatchPhase",
    "Extrapolation",
    "Method",
    "MethodRun",
    "NormClipping",
    "PercentileClipping",
    "ReplayedScaling",
    "ScalingReport",
    "SharpnessAware",
    "TrainingPlan",
    "build_method",
    "constant_mean",
    "grow_batch",
    "lamb",
    "lars",
    "learning_rate_factor",
    "method_names",
    "post_local_sgd",
    "recipe",
    "shuffled",
    "step_decay",
    "warm_up_batch",
]
