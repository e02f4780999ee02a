"""Models that never ran here, from those that did: leave one out over real profiles.

    python benchmarks/cold_start.py [--markdown build/cold-start.md]

Reads the profiles that benchmarks/cold_start_measure.py made on this machine, leaves out every
model in turn (both its image sizes), and predicts it: without any probe, and after the one probe
of at most five seconds that the product would choose. Beside it the naive answers: time in
proportion to FLOPs, memory as counted on fake tensors, and for other hardware the ratio of speeds.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import mlflow
import numpy as np

from mlflow_tula import registry
from mlflow_tula.cold_start import best_probe, cold_bundle
from mlflow_tula.errors import InvalidInputError, TulaWarning
from mlflow_tula.features import extract
from mlflow_tula.fit import fit
from mlflow_tula.hardware import detect
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors import cross_model_formulas as formulas
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.predictors.cross_model import CrossModelPredictor, KnownModel
from mlflow_tula.predictors.formulas import student_quantile
from mlflow_tula.predictors.transfer import Transfer, transferred_log_times
from mlflow_tula.recommend import recommend
from mlflow_tula.specs import ClusterSpec
from mlflow_tula.table import ProfileTable
from mlflow_tula.workloads.job import Job

RESULTS = Path(__file__).parent / "results" / "cold_start"
PROBE_S = 5.0
ASKED = ("resnet34", "resnet50")
Row = tuple[ModelFeatures, ProfileTable]


@dataclass
class Errors:
    """Relative errors, whether the interval covered, and regrets, over all rows."""

    time: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    allocated: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)


def read(folder: Path, suffix: str = "") -> list[Row]:
    """The profiles with their features, counted anew where a file has none."""
    rows = []
    for path in sorted(folder.glob(f"*[0-9]{suffix}.json")):
        if not suffix and "thread" in path.stem:
            continue
        table = ProfileTable.from_dict(json.loads(path.read_text()))
        if table.features is None:
            job = Job(model=table.workload.model, image_size=table.workload.image_size)
            table = dataclasses.replace(table, features=extract(job))
            path.write_text(json.dumps(table.to_dict()) + "\n")
        assert table.features is not None, "counted above"
        rows.append((table.features, table))
    return rows


def without(rows: Sequence[Row], name: str) -> list[Row]:
    """All but one model."""
    return [row for row in rows if row[1].workload.model != name]


def score(
    bundle: PredictorBundle,
    model: KnownModel,
    known: CrossModelPredictor,
    errors: Errors,
    probes: ProfileTable | None,
) -> None:
    """Add a left-out model's errors; a probed size is no prediction."""
    done = {row.local_batch_size for row in probes.ok} if probes is not None else set()
    other = np.array([size not in done for size in model.sizes])
    mean, covariance = known.log_step_time(model.features, model.sizes, probes)
    rest = (model.log_times - mean)[other]
    half = student_quantile(0.95, 6.0) * np.sqrt(np.diag(covariance))[other]
    errors.time += np.abs(np.expm1(-rest)).tolist()
    errors.covered += (np.abs(rest) <= half).tolist()
    allocated, peaks, _ = known.memory(model.features, model.sizes, probes)
    errors.allocated += np.abs(allocated / model.allocated - 1.0)[other].tolist()
    errors.peak += np.abs(peaks / model.peaks - 1.0)[other].tolist()
    samples = dict(zip(model.sizes.tolist(), np.exp(model.log_times) / model.sizes, strict=True))
    choice = recommend(
        bundle,
        cluster=ClusterSpec(),
        candidates=[int(size) for size in model.sizes],
        objective="min_time",
    )
    chosen = samples[float(choice.global_batch_size)]
    errors.regret.append(chosen / min(samples.values()) - 1.0)


def probed(
    table: ProfileTable,
    known: CrossModelPredictor,
    bundle: PredictorBundle,
    features: ModelFeatures,
) -> ProfileTable:
    """The table with the row that the product would have measured within five seconds."""
    sizes = tuple(row.local_batch_size for row in table.ok)
    cold = bundle.cold_start
    assert cold is not None, "a bundle of a model that was left out"
    among = dataclasses.replace(
        bundle, cold_start=dataclasses.replace(cold, local_batch_sizes=tuple(sorted(set(sizes))))
    )
    choice = recommend(bundle, cluster=ClusterSpec(), candidates=sorted(set(sizes)))
    plan = best_probe(known, features, among, around=choice.local_batch_size, seconds=PROBE_S)
    size = min(sizes) if plan is None else plan.local_batch_size
    rows = tuple(row for row in table.ok if row.local_batch_size == size)
    return dataclasses.replace(table, measurements=rows)


def leave_one_out(rows: Sequence[Row]) -> tuple[Errors, Errors, list[float], list[float]]:
    """Errors without and with a probe; those of FLOPs alone and of the bare count."""
    before, after, by_flops, by_count = Errors(), Errors(), [], []
    for name in sorted({table.workload.model for _, table in rows}):
        rest = without(rows, name)
        known = CrossModelPredictor.fit(rest)
        pace = np.median(np.concatenate([seconds_per_flop(row) for row in rest]))
        for features, table in rows:
            if table.workload.model != name:
                continue
            model = KnownModel.of(features, table)
            assert model is not None, "every profile has rows of one rank"
            bundle = cold_bundle(known, features, table.workload)
            score(bundle, model, known, before, None)
            probes = probed(table, known, bundle, features)
            sharper = cold_bundle(known, features, table.workload, probes=probes)
            score(sharper, model, known, after, probes)
            guess = pace / seconds_per_flop((features, table))
            by_flops += np.abs(guess - 1.0).tolist()
            counted = formulas.peak_bytes(features.peak_lines, model.sizes)
            by_count += np.abs(counted / model.allocated - 1.0).tolist()
    return before, after, by_flops, by_count


def seconds_per_flop(row: Row) -> np.ndarray:
    """Of every size of a model."""
    model = KnownModel.of(*row)
    assert model is not None, "every profile has rows of one rank"
    return np.exp(model.log_times) / (model.sizes * row[0].flops_per_sample)


def across_hardware(here: Sequence[Row], there: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Errors of models known elsewhere: carried over, and by the ratio of the speeds."""
    carried, naive = [], []
    for name in sorted({t.workload.model for _, t in there} & {t.workload.model for _, t in here}):
        mine, theirs = without(here, name), without(there, name)
        try:
            how = Transfer.fit(mine, theirs)
            known, other = CrossModelPredictor.fit(mine), CrossModelPredictor.fit(theirs)
        except InvalidInputError:
            continue
        for features, table in there:
            found = [row for row in here if row[1].workload == table.workload]
            if table.workload.model != name or not found:
                continue
            model, away = KnownModel.of(*found[0]), KnownModel.of(features, table)
            assert model is not None, "every profile has rows of one rank"
            assert away is not None, "and so has the other"
            mean, _ = transferred_log_times(how, known, other, features, table, model.sizes)
            carried += np.abs(np.expm1(mean - model.log_times)).tolist()
            # the same machine with one core of two: the naive answer is half as fast
            speed = here[0][1].hardware.cpu_cores / table.hardware.cpu_cores
            guess = np.interp(model.sizes, away.sizes, np.exp(away.log_times)) / speed
            naive += np.abs(guess / np.exp(model.log_times) - 1.0).tolist()
    return carried, naive


def speed(rows: Sequence[Row]) -> list[str]:
    """Seconds of counting ResNet50 and of a whole cold `tula recommend`, medians of three."""
    times = []
    for _ in range(3):
        began = time.monotonic()
        extract(Job(model="resnet50", image_size=224))
        times.append(time.monotonic() - began)
    lines = [f"| features of ResNet50 at 224 pixels | {np.median(times):.1f} s | 3 s |"]
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        hardware = detect()
        for _, table in rows:
            if table.workload.image_size == 32 and table.workload.model not in ASKED:
                here = dataclasses.replace(table, hardware=hardware)
                registry.register(fit(here), table=here)
        for model in ASKED:
            times = []
            for _ in range(3):
                began = time.monotonic()
                command = [sys.executable, "-m", "mlflow_tula", "recommend", "--model", model]
                subprocess.run(
                    [*command, "--tracking-uri", mlflow.get_tracking_uri()],
                    cwd=folder,
                    check=True,
                    capture_output=True,
                )
                times.append(time.monotonic() - began)
            lines.append(
                f"| `tula recommend --model {model}`, never profiled | {np.median(times):.1f} s "
                "| 5 s |"
            )
    return lines


def percent(values: Sequence[float], how: str = "median") -> str:
    """A share as people read it."""
    return f"{100 * float(np.median(values) if how == 'median' else np.mean(values)):.1f} %"


@click.command()
@click.option(
    "--profiles", type=click.Path(path_type=Path), default=RESULTS, help="Folder of profiles."
)
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables here.")
def main(profiles: Path, markdown: Path | None) -> None:
    """Print the tables."""
    warnings.simplefilter("ignore", TulaWarning)
    rows = read(profiles)
    names = sorted({table.workload.model for _, table in rows})
    before, after, by_flops, by_count = leave_one_out(rows)
    lines = [
        f"{len(names)} models ({', '.join(names)}) at 32 and 64 pixels, batch 8 to 128, one rank; "
        f"{len(before.time)} step times.",
        "",
        "| | no probe | bar | one probe of at most 5 s | bar | naive |",
        "|---|--:|--:|--:|--:|--:|",
        f"| step time, median error | {percent(before.time)} | 15 % | {percent(after.time)} | 6 % "
        f"| {percent(by_flops)} (FLOPs) |",
        f"| 90 % interval covers | {percent(before.covered, 'mean')} | 85-100 % | "
        f"{percent(after.covered, 'mean')} | | |",
        f"| allocated memory, median error | {percent(before.allocated)} | 5 % | "
        f"{percent(after.allocated)} | 2 % | {percent(by_count)} (fake tensors) |",
        f"| peak memory of the process, median error | {percent(before.peak)} | | "
        f"{percent(after.peak)} | | |",
        f"| regret of the fastest batch, mean | {percent(before.regret, 'mean')} | 10 % | "
        f"{percent(after.regret, 'mean')} | 3 % | |",
        f"| regret, worst | {100 * max(before.regret):.1f} % | | {100 * max(after.regret):.1f} % "
        "| | |",
    ]
    there = read(profiles, "-1thread")
    if there:
        carried, naive = across_hardware(rows, there)
        lines += [
            "",
            "| from one core to two, model left out | median error |",
            "|---|--:|",
            f"| carried over | {percent(carried)} |",
            f"| twice as fast | {percent(naive)} |",
        ]
    lines += ["", "| medians of three | seen | bar |", "|---|--:|--:|", *speed(rows)]
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(text)


if __name__ == "__main__":
    main()
