"""Measure a few batch sizes of a training job, and know the rest.

    profile --> ProfileTable --> fit --> PredictorBundle --> register --> recommend --> train
    (torch)       (core)        (core)       (core)          (mlflow)      (core)       (torch)

Codemap, floor by floor (a module imports only from floors below its own):

    errors, specs, table     facts: what is trained, on what, what was measured
    predictors               step time, memory, convergence; formulas.py holds each equation once
    fit, cost, knee          a table becomes a PredictorBundle; time, dollars, where it stops paying
    recommend, search        the decision; which batch size to probe next
    cold_start               the same for a model that never ran here, from counted kernels
    gradients, workloads, hardware, launch, profiler, train      the torch side
    plots, tracking, registry, plugin                            the MLflow side
    integrations             observe training loops that people already have
    cli                      the only module that prints and exits

`import mlflow_tula` loads neither torch nor mlflow, and pandas and scipy only when they are used.
"""

import importlib

try:
    from mlflow_tula.errors import TulaError
    from mlflow_tula.fit import fit
    from mlflow_tula.predictors.bundle import FitReport, PredictorBundle
    from mlflow_tula.predictors.convergence import ConvergencePredictor
    from mlflow_tula.recommend import Recommendation, recommend
    from mlflow_tula.specs import ClusterSpec, HardwareSpec, Pricing, Workload
    from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable
except ImportError:
    raise
except Exception as error:
    # MLflow loads our plugin in the middle of its own import, and survives an ImportError alone.
    raise ImportError(f"mlflow_tula cannot be loaded: {type(error).__name__}: {error}") from error

__all__ = [
    "ClusterSpec",
    "ConvergencePredictor",
    "FitReport",
    "HardwareSpec",
    "LinkMeasurement",
    "Measurement",
    "PredictorBundle",
    "Pricing",
    "ProfileTable",
    "Recommendation",
    "TulaError",
    "Workload",
    "autolog",
    "fit",
    "recommend",
]

__version__ = "0.1.0"


def autolog(
    *,
    every_n_steps: int = 10,
    gradient_every_n_steps: int = 100,
    log_noise_scale: bool = True,
    model: str | None = None,
    dataset: str | None = None,
    disable: bool = False,
    exclusive: bool = False,
    silent: bool = False,
) -> None:
    """Observe every torch training loop of this process, and log it to MLflow (docs/mlflow.md).

    Step time, throughput, batch size, peak memory, gradient norm, gradient variability and noise
    scale go to the run that is active in the loop's thread, or to one that is made for it, in
    batches and outside the timed path. `tula fit --runs` makes predictors of such runs.

    Args:
        every_n_steps: one point of each curve in so many steps.
        gradient_every_n_steps: read the gradients of two steps in so many; 0 reads none.
        log_noise_scale: also estimate the noise scale in these.
        model: the workload's model name; else the class with its number of parameters.
        dataset: its dataset name; else the dataset's class with its size.
        disable: switch off, and put everything back that was changed.
        exclusive: log to no run that the user has started.
        silent: no warnings and notes of the observer.

    Raises:
        InvalidInputError: a setting that is no whole number, or too small.
    """
    # Not an import statement: to the import contracts, whoever asks this package for its version
    # would import torch and MLflow.
    integration = importlib.import_module("mlflow_tula.integrations.autolog")
    integration.autolog(
        every_n_steps=every_n_steps,
        gradient_every_n_steps=gradient_every_n_steps,
        log_noise_scale=log_noise_scale,
        model=model,
        dataset=dataset,
        disable=disable,
        exclusive=exclusive,
        silent=silent,
    )
