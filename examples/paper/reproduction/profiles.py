"""Profiles of the models: full search measured once and kept, partial search replayed within it.

One full search of a model serves figures 1, 4, 9, 10 and 11. Partial search is asked what it would
measure next, and answered from the full search's rows until it stops by itself: the same probes,
without their time being spent twice. What it did not ask for is then unknown to its fit.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning
from mlflow_tula.files import read_json, write_json
from mlflow_tula.probes import Probe
from mlflow_tula.probing.sweep import AUTO_BUDGET_S, AUTO_QUICK_BUDGET_S, QUICK_STEP_S
from mlflow_tula.search import PartialSearch
from mlflow_tula.table import Measurement, ProfileTable
from reproduction.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

    from mlflow_tula.predictors.bundle import PredictorBundle


def profiles(settings: Settings) -> dict[str, ProfileTable]:
    """Each model's full search, measured where the folder has none yet."""
    return {model: full_search(settings, model, data) for model, data in settings.models}


def files(settings: Settings) -> list[Path]:
    """Where these profiles lie."""
    return [_path(settings, model, data) for model, data in settings.models]


def seconds_of(settings: Settings) -> float:
    """What measuring all of them took."""
    return sum(float(_read(path)["wall_s"]) for path in files(settings))


def full_search(settings: Settings, model: str, dataset: str) -> ProfileTable:
    """Every batch size on every number of ranks, from the folder or the records or measured."""
    from mlflow_tula.cli.progress import ProfileProgress
    from mlflow_tula.cli.render import note
    from mlflow_tula.profiler import profile
    from mlflow_tula.workloads.job import Job

    path = _path(settings, model, dataset)
    if path.exists():
        return ProfileTable.from_dict(_read(path)["table"])
    job = Job(
        model=model,
        dataset=dataset,
        image_size=settings.image_size,
        data_dir=settings.data_dir,
        download=settings.download,
    )
    if (known := _recorded(settings, model, job.workload_slug)) is not None:
        write_json(path, known)
        return ProfileTable.from_dict(known["table"])
    partial = path.with_suffix(".partial.json")
    earlier = ProfileTable.from_dict(_read(partial)) if partial.exists() else None
    note(f"{model} on {dataset}: full search, {len(settings.batch_sizes)} batch sizes")
    began = time.monotonic()
    with ProfileProgress(lambda event: None) as progress:
        table = profile(
            job=job,
            batch_sizes=settings.batch_sizes,
            world_sizes=settings.world_sizes or "auto",
            search="full",
            max_steps=settings.max_steps,
            on_event=progress,
            output=partial,
            resume_from=earlier,
        )
    spent = time.monotonic() - began
    if earlier is not None:
        spent += sum(row.probe_time_s or 0.0 for row in earlier.measurements)
    write_json(path, {"wall_s": spent, "table": table.to_dict()})
    partial.unlink(missing_ok=True)
    return table


def partial_search(table: ProfileTable) -> ProfileTable:
    """The rows that partial search asks for, in its order, until it stops by itself."""
    rows = {Probe.of(row): row for row in table.measurements}
    quick = (table.ok[0].step_time_s or 0.0) < QUICK_STEP_S
    budget = AUTO_QUICK_BUDGET_S if quick else AUTO_BUDGET_S
    search = PartialSearch(list(rows), time_budget_s=budget)
    found = replace(table, measurements=())
    spent = 0.0
    with quiet():
        while (probe := search.next_probe(found, spent)) is not None:
            spent += rows[probe].probe_time_s or 0.0
            found = found.with_rows([rows[probe]])
    return found


def fitted(table: ProfileTable) -> PredictorBundle:
    """`tula.fit`, without its warnings: what they say stands in the report."""
    with quiet():
        return tula.fit(table)


def predicted(bundle: PredictorBundle, rows: Sequence[Measurement]) -> pd.DataFrame:
    """What the bundle says of these configurations, one row each."""
    import pandas as pd

    names = ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps")
    frame = pd.DataFrame([{name: getattr(row, name) for name in names} for row in rows])
    with quiet():
        return bundle.predict(frame)


def unmeasured(table: ProfileTable, known: ProfileTable) -> list[Measurement]:
    """Rows that ran and that `known` does not have."""
    taken = {Probe.of(row) for row in known.measurements}
    return [row for row in table.ok if Probe.of(row) not in taken]


def worlds(table: ProfileTable) -> list[int]:
    """Numbers of ranks that ran, ascending."""
    return sorted({row.world_size for row in table.ok})


def curve(table: ProfileTable, world: int) -> list[Measurement]:
    """The rows on so many ranks that ran, by batch size."""
    rows = [row for row in table.ok if row.world_size == world]
    return sorted(rows, key=lambda row: row.global_batch_size)


def epoch_seconds(table: ProfileTable, row: Measurement, step_time_s: float | None = None) -> float:
    """Seconds for every sample of the dataset once, so that no size gains by leaving some out."""
    step = row.step_time_s if step_time_s is None else step_time_s
    assert step is not None, "of rows that ran"
    return table.workload.dataset_size / row.global_batch_size * step


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that are fields of the results as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        yield


def hardware_note(tables: dict[str, ProfileTable]) -> str:
    """Where it was measured."""
    table = next(iter(tables.values()))
    ranks = " and ".join(str(world) for world in worlds(table))
    return (
        f"Measured on {table.hardware.device_name}, {table.hardware.cpu_cores or '?'} cores; the "
        f"clusters are {ranks} ranks of this machine."
    )


def _path(settings: Settings, model: str, dataset: str) -> Path:
    """One file for all that decides the numbers."""
    asked = [
        model,
        dataset,
        settings.image_size,
        settings.batch_sizes,
        settings.world_sizes,
        settings.max_steps,
        settings.records is not None,
    ]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    name = model.rpartition(":")[2]
    return settings.folder / "profiles" / f"{name}-{digest}.json"


def _read(path: Path) -> dict[str, object]:
    return dict(read_json(path, made_by="examples/paper/run.py"))


def _recorded(settings: Settings, model: str, slug: str) -> dict[str, object] | None:
    """A full search that is on record for this workload."""
    if settings.records is None:
        return None
    path = settings.records / "profiling_cost" / f"{model}-full.json"
    if not path.exists():
        return None
    document = _read(path)
    return document if ProfileTable.from_dict(document["table"]).workload.slug == slug else None
