"""Measure a few batch sizes of a training job, and know the rest.

    profile --> ProfileTable --> fit --> PredictorBundle --> register --> recommend --> train
    (torch)       (core)        (core)       (core)          (mlflow)      (core)       (torch)

Codemap, floor by floor (a module imports only from floors below its own):

    errors, specs, table     facts: what is trained, on what, what was measured
    predictors               step time, memory, convergence; formulas.py holds each equation once
    fit, cost, knee          a table becomes a PredictorBundle; time, dollars, where it stops paying
    recommend, search        the decision; which batch size to probe next
    gradients, workloads, hardware, launch, profiler, train      the torch side
    plots, tracking, registry, plugin                            the MLflow side
    cli                      the only module that prints and exits

`import mlflow_tula` loads neither torch nor mlflow, and pandas and scipy only when they are used.
"""

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
    "fit",
    "recommend",
]

__version__ = "0.1.0"
