"""The stages that commands are made of: each reads one dataclass, writes the next.

`tula main` runs them one after the other; the other commands run one each, and leave their result
as JSON in the workload's folder, where the next finds it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli import options
from mlflow_tula.cli.serving import offer_recommender
from mlflow_tula.errors import InvalidInputError, TableError
from mlflow_tula.files import read_json, write_json

if TYPE_CHECKING:
    import pandas as pd

    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.predictors.convergence import ConvergencePredictor
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.registry import RegisteredPredictor
    from mlflow_tula.table import ProfileTable
    from mlflow_tula.workloads.job import Job

TABLE_FILE, BUNDLE_FILE, CHOICE_FILE = "table.json", "bundle.json", "recommendation.json"
PARTIAL_FILE = "table.partial.json"
NOISE_SCALE = "noise-scale"
"""The word of `--convergence` for epochs that follow from the profile's gradient noise."""

Values = Mapping[str, Any]


def read_table(path: Path) -> ProfileTable:
    """A profile table from its file."""
    from mlflow_tula.table import ProfileTable

    return ProfileTable.from_dict(read_json(path, made_by="tula profile"))


def read_bundle(path: Path) -> PredictorBundle:
    """A predictor bundle from its file."""
    from mlflow_tula.predictors.bundle import PredictorBundle

    return PredictorBundle.from_dict(read_json(path, made_by="tula fit"))


def read_convergence(path: str | None) -> pd.DataFrame | None:
    """The convergence data of `--convergence`, or None."""
    from mlflow_tula.documents import read_csv
    from mlflow_tula.table import MAX_ROWS

    return None if path is None else read_csv(path, max_rows=MAX_ROWS, name="--convergence")


def fit_table(
    table: ProfileTable,
    convergence: str | None,
    folder: Path,
    *,
    known: ConvergencePredictor | None = None,
) -> PredictorBundle:
    """Fit, and keep the bundle in the workload's folder; `known` serves where no file is given."""
    from mlflow_tula.fit import fit

    own = convergence_of(convergence, table)
    bundle = fit(table, convergence=known if own is None else own)
    write_json(folder / BUNDLE_FILE, bundle.to_dict())
    return bundle


def convergence_of(words: str | None, table: ProfileTable) -> ConvergencePredictor | None:
    """The convergence predictor of `--convergence`: of a file, or of the table's noise scale."""
    from mlflow_tula.predictors.convergence import ConvergencePredictor

    if words != NOISE_SCALE:
        return fit_convergence(words)
    # The median: at small batches the estimate scatters, in either direction.
    scales = [scale for row in table.ok if (scale := row.noise_scale or 0.0) > 0]
    if not scales:
        raise TableError(
            f"--convergence {NOISE_SCALE}: none of the {len(table.ok)} probes that ran tells the "
            "gradient noise scale; give a CSV, or profile two ranks or a batch of 2 and more"
        )
    return ConvergencePredictor.of_noise_scale(statistics.median(scales))


def fit_convergence(path: str | None) -> ConvergencePredictor | None:
    """The convergence predictor of `--convergence`, or None; what is wrong names the file."""
    from mlflow_tula.predictors.convergence import ConvergencePredictor

    frame = read_convergence(path)
    if frame is None:
        return None
    try:
        return ConvergencePredictor.fit(frame)
    except InvalidInputError as error:
        raise TableError(f"--convergence {path}: {error}") from error


def find_bundle(values: Values) -> tuple[PredictorBundle, str]:
    """The bundle to ask, and where it came from: a file, or the registry for this hardware."""
    check_decision(values)
    if values["bundle"] is not None:
        return read_bundle(Path(values["bundle"])), values["bundle"]
    from mlflow_tula import registry

    job = options.make_job(values)
    options.use_store(values, write=False)
    wanted = values["hardware"]
    if wanted is None:
        found = registry.resolve(
            job.workload_slug,
            options.detect_hardware(values["device"]),
            alias=values["alias"],
            profile_with=options.command_line("main", job),
        )
    else:
        found = registry.for_hardware(job.workload_slug, wanted)
    bundle = registry.load(found.name, alias=values["alias"])
    return bundle, f"models:/{found.name}@{values['alias']} (version {found.version})"


def make_recommendation(bundle: PredictorBundle, values: Values) -> Recommendation:
    """The decision that the options ask for."""
    from mlflow_tula.recommend import recommend

    options.check_devices(values, bundle.hardware)
    if bundle.convergence is None:
        _refuse_targets(
            values,
            "fit and register with `--convergence FILE` or `--convergence noise-scale` (tula fit, "
            "tula main, tula import)",
        )
    return recommend(
        bundle,
        cluster=options.make_clusters(values, bundle),
        candidates=values["candidates"],
        objective=values["objective"],
        epochs=values["epochs"],
        deadline_s=values["deadline"],
        budget_usd=values["budget"],
        memory_limit_bytes=values["memory_limit"],
        pricing=options.make_pricing(values),
        current_global_batch_size=values["current_batch_size"],
        knee_rule=values["knee_rule"],
        accumulation_steps=_more_than_one(values["accumulation_steps"]),
        gradient_compression=_one_compression(values),
        scaling=values["scaling"],
    )


def _more_than_one(steps: int | tuple[int, ...] | None) -> int | None:
    """A fixed accumulation; 1 leaves it to the recommender, for sizes that do not fit otherwise."""
    if isinstance(steps, tuple):
        steps = steps[0] if len(steps) == 1 else None
    return steps if steps is not None and steps > 1 else None


def register_bundle(
    bundle: PredictorBundle, table: ProfileTable, values: Values, *, command: str
) -> RegisteredPredictor:
    """Register in a run of its own, with the curves, figures and words of a profile's run."""
    from mlflow_tula import registry, tracking

    known = registry.registered_already(bundle)
    if known is not None:
        return known
    name = f"{command} {table.workload.slug}"
    with tracking.start_run(name, command=command, experiment=values["experiment"]) as run:
        done = registry.register(bundle, table=table, run_id=run.run_id)
        tracking.log_registration(run, done)
        choice = registry.default_recommendation(bundle)
        tracking.log_profile(run, table, bundle, choice, registered=done, nested=False)
    offer_recommender(done.name)
    return done


def _one_compression(values: Values) -> str | None:
    """How gradients will be sent: what a training was asked for; of a profile's several, none."""
    asked = values.get("gradient_compression")
    if isinstance(asked, tuple):
        asked = asked[0] if len(asked) == 1 else None
    return None if asked == "none" else asked


def check_decision(values: Values) -> None:
    """Refuse at once what `recommend` would refuse after a look-up, or minutes of profiling."""
    from mlflow_tula.recommend import Objective
    from mlflow_tula.specs import check_choice

    objective = values["objective"]
    check_choice("objective", objective, Objective)
    priced = options.make_pricing(values) is not None
    if (objective.startswith("min_cost") or values["budget"] is not None) and not priced:
        raise InvalidInputError(
            f"{'--budget' if values['budget'] is not None else 'objective ' + objective} needs a "
            "price: give --price-per-device-hour or --price-per-gb-hour"
        )
    limited = values["deadline"] is not None or values["budget"] is not None
    if limited and values["epochs"] is None and not objective.endswith("_to_target"):
        raise InvalidInputError("--deadline and --budget need the length of the run: give --epochs")


def check_convergence(values: Values) -> None:
    """Refuse data that cannot be used, and an objective to a target without data on it."""
    if values["convergence"] != NOISE_SCALE and fit_convergence(values["convergence"]) is None:
        _refuse_targets(
            values,
            "give --convergence a CSV of global_batch_size and epochs_to_target, or noise-scale",
        )


def _refuse_targets(values: Values, way_out: str) -> None:
    """Raise for an objective to a target, which needs convergence data that are not there."""
    if values["objective"].endswith("_to_target"):
        raise InvalidInputError(
            f"objective {values['objective']} needs convergence data: {way_out}, or choose knee, "
            "min_time or min_cost"
        )


def file_of(values: Values, option: str, name: str, job: Job) -> Path:
    """The file that `--<option>` names, else `name` in this workload's folder."""
    if values[option] is not None:
        return Path(values[option])
    hardware = options.detect_hardware(values["device"])
    return options.workload_folder(values, job, hardware) / name
