"""What partial search saves and what it costs: live profiles of four models on this machine.

    python benchmarks/profiling_cost.py measure [--next] [--models resnet18,vgg11]
    python benchmarks/profiling_cost.py report --markdown FILE

Partial search is `tula profile` as it comes: 1 and 2 ranks, its own time budget, its own stop.
Full search measures every power of two from 8 to the largest size on each number of ranks, with the
same settings of a probe, on the same machine, in an order that alternates from model to model. The
share is the seconds of the probes of the one over those of the other, start of the ranks included.
Beside it stands the share of a full search that trains one epoch at every size (predicted by the
measured step times: steps of an epoch times the time of one).

Since the same configuration measured twice differs, partial search is also replayed on the rows of
full search: it gets the very rows that it asks for.

Regret: both choose by the rule that is named, among all sizes of the full search; what their choice
takes is read from the full search's measurements, where both are known. A table is one JSON file in
benchmarks/results/profiling_cost; what is there is not measured again, and `--next` measures one
table alone. The machine must be idle: about two minutes a model.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning
from mlflow_tula.files import write_json
from mlflow_tula.predictors.formulas import steps_per_epoch
from mlflow_tula.probing.sweep import AUTO_BUDGET_S, AUTO_QUICK_BUDGET_S, QUICK_STEP_S
from mlflow_tula.profiler import profile
from mlflow_tula.search import PartialSearch, Probe
from mlflow_tula.table import Measurement, ProfileTable
from mlflow_tula.workloads.job import Job

RESULTS = Path(__file__).parent / "results" / "profiling_cost"
MODELS = ("vgg11", "resnet18", "mobilenet_v3_small", "squeezenet1_1")
IMAGE_SIZE = 32
LARGEST = 256
"""Of both searches: larger ones cost full search most, so that without this bound its share of
the time would be larger, and the comparison kinder to partial search."""
LARGE_DATASET = 50_000
"""CIFAR's training images: what an epoch at every size would cost on a dataset of usual size."""

Kind = Literal["partial", "full"]
Key = tuple[int, int]
"""Local batch size and ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model: seconds, shares (fractions) and regrets (fractions)."""

    model: str
    num_probes: int
    num_full: int
    partial_s: float
    full_s: float
    partial_wall_s: float
    epoch_each_s: float
    large_epoch_each_s: float
    knee: Key
    full_knee: Key
    knee_regret: float
    fastest: Key
    best: Key
    regret: float
    replayed_share: float
    replayed_regret: float

    @property
    def share(self) -> float:
        """Of full search's time."""
        return self.partial_s / self.full_s


def path_of(folder: Path, model: str, kind: Kind) -> Path:
    """Where a table lies."""
    return folder / f"{model}-{kind}.json"


def pieces(models: Sequence[str]) -> Iterator[tuple[str, Kind]]:
    """Partial first for every other model, full first for the rest."""
    for number, model in enumerate(models):
        kinds: tuple[Kind, Kind] = ("partial", "full")
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            yield model, kind


def measure_one(folder: Path, model: str, kind: Kind, largest: int, worlds: Sequence[int]) -> None:
    """Measure one table and write it, with the seconds of the whole call."""
    began = time.monotonic()
    table = profile(
        job=Job(model=model, image_size=IMAGE_SIZE),
        search=kind,
        max_batch_size=largest,
        world_sizes=worlds or "auto",
    )
    wall = time.monotonic() - began
    write_json(path_of(folder, model, kind), {"wall_s": wall, "table": table.to_dict()})
    spent = seconds(table)
    print(f"{model}, {kind}: {len(table.measurements)} probes, {spent:.0f} s, wall {wall:.0f} s")


def read(folder: Path, model: str, kind: Kind) -> tuple[ProfileTable, float]:
    """A table and the seconds of the call that made it."""
    path = path_of(folder, model, kind)
    if not path.exists():
        raise click.ClickException(f"{path} is not there: run `measure` first")
    document = json.loads(path.read_text())
    return ProfileTable.from_dict(document["table"]), float(document["wall_s"])


def replay(full: ProfileTable) -> ProfileTable:
    """Partial search on what full search measured, within the time budget of `tula profile`."""
    rows = {(row.local_batch_size, row.world_size): row for row in full.measurements}
    candidates = [Probe(local_batch_size=size, devices_per_node=world) for size, world in rows]
    table = dataclasses.replace(full, measurements=())
    quick = (full.ok[0].step_time_s or 0.0) < QUICK_STEP_S
    search = PartialSearch(
        candidates, time_budget_s=AUTO_QUICK_BUDGET_S if quick else AUTO_BUDGET_S
    )
    while (probe := search.next_probe(table, seconds(table))) is not None:
        found = rows[probe.local_batch_size, probe.devices_per_node]
        table = dataclasses.replace(table, measurements=(*table.measurements, found))
    return table


def seconds(table: ProfileTable) -> float:
    """Of all probes together."""
    return sum(row.probe_time_s or 0.0 for row in table.measurements)


def choose(table: ProfileTable, keys: Sequence[Key], objective: str) -> Key:
    """What `tula recommend` says from this table, among these (local batch size, ranks)."""
    worlds = sorted({world for _, world in keys})
    choice = tula.recommend(
        tula.fit(table),
        cluster=[tula.ClusterSpec(devices_per_node=world) for world in worlds],
        candidates=sorted({size * world for size, world in keys}),
        objective=objective,  # type: ignore[arg-type]
    )
    return choice.local_batch_size, choice.devices_per_node


def per_sample(row: Measurement) -> float:
    """Seconds a sample takes."""
    assert row.step_time_s is not None, "of rows that ran"
    return row.step_time_s / row.global_batch_size


def judge(folder: Path, model: str) -> Row:
    """Shares and regrets of one model."""
    partial, wall = read(folder, model, "partial")
    full, _ = read(folder, model, "full")
    true = {(row.local_batch_size, row.world_size): per_sample(row) for row in full.ok}
    keys = list(true)
    best = min(keys, key=lambda key: true[key])
    knee, full_knee = (_measured(choose(table, keys, "knee"), true) for table in (partial, full))
    fastest = _measured(choose(partial, keys, "min_time"), true)
    again = replay(full)
    replayed = _measured(choose(again, keys, "min_time"), true)
    samples = full.workload.dataset_size
    return Row(
        model=model,
        num_probes=len(partial.measurements),
        num_full=len(full.measurements),
        partial_s=seconds(partial),
        full_s=seconds(full),
        partial_wall_s=wall,
        epoch_each_s=_epoch_each(full, samples),
        large_epoch_each_s=_epoch_each(full, LARGE_DATASET),
        knee=knee,
        full_knee=full_knee,
        knee_regret=true[knee] / true[full_knee] - 1.0,
        fastest=fastest,
        best=best,
        regret=true[fastest] / true[best] - 1.0,
        replayed_share=seconds(again) / seconds(full),
        replayed_regret=true[replayed] / true[best] - 1.0,
    )


def _measured(key: Key, true: dict[Key, float]) -> Key:
    """The choice, which full search has measured."""
    if key not in true:
        raise click.ClickException(f"the choice {key} was not measured by full search")
    return key


def _epoch_each(table: ProfileTable, samples: int) -> float:
    """Seconds of one epoch at every configuration that ran."""
    return sum(
        float(steps_per_epoch(samples, [float(row.global_batch_size)], False)[0])
        * (row.step_time_s or 0.0)
        for row in table.ok
    )


def markdown(rows: Sequence[Row], hardware: str) -> str:
    """The section of docs/accuracy.md."""
    lines = [
        f"{hardware}; 32 x 32 pixels, local batches of 8 to {LARGEST} on 1 and 2 ranks. Choices "
        "are written as local batch x ranks.",
        "",
        "| model | probes | seconds | wall | of full search | of an epoch at every size | "
        f"of {LARGE_DATASET:,} samples | knee | knee of full search | slower than that by | "
        "fastest | truly fastest | regret | replayed: share | replayed: regret |",
        "|---|" + 14 * "--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.num_probes} of {row.num_full} | {row.partial_s:.0f} of "
            f"{row.full_s:.0f} | {row.partial_wall_s:.0f} s | {row.share:.0%} | "
            f"{row.partial_s / row.epoch_each_s:.0%} | "
            f"{row.partial_s / row.large_epoch_each_s:.1%} | {_name(row.knee)} | "
            f"{_name(row.full_knee)} | {row.knee_regret:+.1%} | {_name(row.fastest)} | "
            f"{_name(row.best)} | {row.regret:.1%} | "
            f"{row.replayed_share:.0%} | {row.replayed_regret:.1%} |"
        )
    spent, whole = sum(row.partial_s for row in rows), sum(row.full_s for row in rows)
    mean = sum(row.regret for row in rows) / len(rows)
    knees = sum(row.knee_regret for row in rows) / len(rows)
    lines += [
        "",
        f"Together {spent:.0f} of {whole:.0f} s, {spent / whole:.0%} of full search; mean regret "
        f"of the fastest {mean:.1%}, worst {max(row.regret for row in rows):.1%}; the knee is "
        f"{knees:+.1%} in time against that of full search on average.",
    ]
    return "\n".join(lines) + "\n"


def _name(key: Key) -> str:
    return f"{key[0]} x {key[1]}"


@click.group()
def main() -> None:
    """Share of full-search time that partial search spends, and the regret of its choice."""


@main.command()
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Tables.")
@click.option("--models", default=",".join(MODELS), show_default=True, help="Torchvision names.")
@click.option("--largest", default=LARGEST, show_default=True, help="Largest local batch size.")
@click.option("--world-sizes", default="", help="Ranks, comma-separated; empty: the default.")
@click.option("--next", "only_one", is_flag=True, help="Measure one missing table and stop.")
def measure(results: Path, models: str, largest: int, world_sizes: str, only_one: bool) -> None:
    """Measure what is missing."""
    worlds = [int(word) for word in world_sizes.split(",") if word]
    for model, kind in pieces(models.split(",")):
        if path_of(results, model, kind).exists():
            continue
        measure_one(results, model, kind, largest, worlds)
        if only_one:
            return


@main.command()
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Tables.")
@click.option("--models", default=",".join(MODELS), show_default=True, help="Torchvision names.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table here.")
def report(results: Path, models: str, page: Path | None) -> None:
    """Print the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        rows = [judge(results, model) for model in models.split(",")]
    hardware = read(results, rows[0].model, "full")[0].hardware
    text = markdown(rows, f"{hardware.device_name}, {hardware.cpu_cores} cores")
    print(text)
    for row in rows:
        print(json.dumps(dataclasses.asdict(row)))
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)


if __name__ == "__main__":
    main()
