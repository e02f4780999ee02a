"""Published measurements as the benchmarks read them: a folder of CSVs, units in the column names.

    step_times.csv   source, model, hardware, nodes, devices, homogeneous, local_batch_size,
                     step_time_s, sync_time_s
    epoch_times.csv  hardware, task, global_batch_size, epoch_time_s      (100,000 samples assumed)
    convergence.csv  source, task, version_or_target, global_batch_size, epochs_to_target, std,
                     runs_total, runs_reached
    memory.csv       source, model, local_batch_size, peak_memory_bytes

Each is optional: what needs an absent one is left out. The tables themselves are other people's
and are not part of this repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

import mlflow_tula as tula

Floats = npt.NDArray[np.float64]

NUM_SAMPLES = 100_000
NAMES = ("step_times", "epoch_times", "convergence", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The tables of a folder; None where a file is absent."""

    step_times: pd.DataFrame | None
    epoch_times: pd.DataFrame | None
    convergence: pd.DataFrame | None
    memory: pd.DataFrame | None

    @classmethod
    def read(cls, folder: Path) -> Published:
        """Read the folder; one without any of the files is an error."""
        tables = {
            name: pd.read_csv(folder / f"{name}.csv") if (folder / f"{name}.csv").exists() else None
            for name in NAMES
        }
        if all(table is None for table in tables.values()):
            raise SystemExit(f"{folder} holds none of {', '.join(f'{n}.csv' for n in NAMES)}")
        return cls(**tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Step time against local batch size of one model on one device."""

    name: str
    hardware: str
    frame: pd.DataFrame

    @property
    def sizes(self) -> list[int]:
        """Local batch sizes, ascending."""
        return [int(size) for size in self.frame.local_batch_size]


def single_device_curves(data: Published) -> Iterator[Curve]:
    """Every curve of one device, repeated rows as their median."""
    if data.step_times is not None:
        steps = data.step_times
        one = steps[(steps.nodes == 1) & (steps.devices == 1)]
        for (source, hardware, model), group in one.groupby(["source", "hardware", "model"]):
            yield Curve(name=f"{source}:{model}", hardware=str(hardware), frame=_median(group))
    if data.epoch_times is not None:
        for (hardware, task), group in data.epoch_times.groupby(["hardware", "task"]):
            yield Curve(name=f"zeus:{task}", hardware=str(hardware), frame=_median(_steps(group)))


def _median(group: pd.DataFrame) -> pd.DataFrame:
    return group.groupby("local_batch_size", as_index=False).step_time_s.median()


def _steps(group: pd.DataFrame) -> pd.DataFrame:
    """Epoch times as step times."""
    renamed = group.rename(columns={"global_batch_size": "local_batch_size"})
    return renamed.assign(step_time_s=renamed.epoch_time_s * renamed.local_batch_size / NUM_SAMPLES)


def node_tables(data: Published) -> Iterator[tuple[str, pd.DataFrame]]:
    """Tables over several nodes with equally many devices each: (name, frame)."""
    steps = data.step_times
    if steps is None or not (steps.nodes > 1).any():
        return
    even = steps[(steps.homogeneous == 1) & (steps.nodes >= 1)]
    even = even[even.source.str.startswith("adaptdl")]
    even = even.assign(devices_per_node=even.devices // even.nodes)
    keys = ["nodes", "devices_per_node", "local_batch_size"]
    for (model, devices), group in even.groupby(["model", "devices_per_node"]):
        measured = group.groupby(keys, as_index=False)[["step_time_s", "sync_time_s"]].median()
        yield f"{model} x{devices}", measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Epoch times and epochs to target of one task on one device, by batch size."""

    name: str
    hardware: str
    frame: pd.DataFrame

    @property
    def time_to_target_s(self) -> Floats:
        """What it really took, by row."""
        return (self.frame.epoch_time_s * self.frame.epochs_to_target).to_numpy(float)


def tasks(data: Published, *, at_least: int = 6) -> Iterator[Task]:
    """Every task with both its epoch times and its convergence at enough batch sizes."""
    if data.epoch_times is None or data.convergence is None:
        return
    zeus = data.convergence[data.convergence.source == "zeus-nsdi23"]
    for (hardware, task), epochs in data.epoch_times.groupby(["hardware", "task"]):
        for target, runs in zeus[zeus.task == task].groupby("version_or_target"):
            merged = epochs.merge(runs, on="global_batch_size")
            merged = merged[merged.epochs_to_target.notna()].sort_values("global_batch_size")
            if len(merged) >= at_least:
                frame = merged.assign(
                    local_batch_size=merged.global_batch_size,
                    step_time_s=merged.epoch_time_s * merged.global_batch_size / NUM_SAMPLES,
                )
                yield Task(name=f"{task} to {target}", hardware=str(hardware), frame=frame)


def to_table(frame: pd.DataFrame, name: str, hardware: str = "published") -> tula.ProfileTable:
    """The measured columns of a frame as a ProfileTable of a 40 GiB device."""
    known = ("local_batch_size", "nodes", "devices_per_node", "step_time_s", "peak_memory_bytes")
    return tula.ProfileTable.from_frame(
        frame[[column for column in known if column in frame]],
        workload=tula.Workload(model=name, dataset="published", dataset_size=NUM_SAMPLES),
        hardware=tula.HardwareSpec(
            device_type="cuda", device_name=hardware, device_memory_bytes=40 * 2**30
        ),
    )


def spread_probes(sizes: list[int], count: int) -> list[int]:
    """`count` of the sizes, geometrically spread, ends included."""
    rest = sorted(set(sizes))
    if len(rest) <= count:
        return rest
    chosen = []
    for goal in np.geomspace(rest[0], rest[-1], count):
        nearest = min(rest, key=lambda size: abs(np.log(size / goal)))
        chosen.append(nearest)
        rest.remove(nearest)
    return sorted(chosen)


def plain_line(columns: Floats, values: Floats) -> Floats:
    """Relative least squares with coefficients of at least zero: the baseline everywhere."""
    from scipy.optimize import nnls

    coefficients: Floats = nnls(columns / values[:, None], np.ones_like(values))[0]
    return coefficients


def line_through(sizes: Floats, values: Floats, wanted: Floats) -> Floats:
    """The plain line `a + b x` at the wanted sizes."""
    coefficients = plain_line(np.c_[np.ones(len(sizes)), sizes], values)
    return np.asarray(coefficients[0] + coefficients[1] * np.asarray(wanted, float))


def markdown_section(title: str, frame: pd.DataFrame) -> str:
    """A titled table of the documentation, numbers with one decimal."""
    cells = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    lines = ["| " + " | ".join(map(str, frame.columns)) + " |", "|---" * frame.shape[1] + "|"]
    return (
        f"## {title}\n\n" + "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)]) + "\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.1f}"
    return str(value)
