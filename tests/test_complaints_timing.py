"""Public complaints about step-time profilers, one test each, named after its thread."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import probe_parts
import pytest
import torch
from probe_parts import own_job, training_steps

import mlflow_tula as tula
from mlflow_tula.probing.clock import CudaClock, SynchronizedClock
from mlflow_tula.probing.memory import CpuMeter
from mlflow_tula.probing.probe import run_probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.steps import TrainingSteps
from mlflow_tula.profiler import is_input_bound, profile
from mlflow_tula.table import COLUMNS, ProfileTable

QUICK = ProbeSettings(max_steps=6, time_limit_s=2.0)


def probe(make: Callable[[], TrainingSteps], size: int = 8) -> dict[str, Any]:
    return run_probe(make, CpuMeter(), QUICK, local_batch_size=size, world_size=1)


# --- what is run


def test_lightning_13696_13851_21903_no_step_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials ran no training step, so everything succeeded; test_profiler.py counts two ranks."""
    monkeypatch.setenv(probe_parts.COUNT_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    for size, passes in ((8, 1), (16, 3)):
        counts = tmp_path / "rank0.txt"
        counts.unlink(missing_ok=True)
        facts = probe(
            lambda size=size, passes=passes: training_steps(
                own_job("CountingNet", optimizer="CountingSGD"), size, accumulation_steps=passes
            ),
            size,
        )
        count = Counter(counts.read_text().splitlines())
        steps = facts["warmup_steps"] + facts["num_steps"]
        assert facts["warmup_steps"] >= 2
        assert facts["num_steps"] >= 3
        assert count["optimizer 0"] == facts["optimizer_steps"] == steps
        extra = facts["gradient_passes"]
        assert count[f"train {size}"] == count[f"backward {size}"] == passes * steps
        assert count[f"train {size // 2}"] == count[f"backward {size // 2}"] == 2 * extra
        assert count[f"evaluate {size}"] == facts["evaluation_passes"] == 1


# --- asynchronous devices


@dataclass
class AsynchronousDevice:
    """Work is queued in a millisecond of the fake clock, and takes its seconds later."""

    now_s: float = 0.0
    queue: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.now_s += 0.001
        self.queue.append(seconds)

    def wait(self) -> None:
        self.now_s += sum(self.queue)
        self.queue.clear()


class QueuingModel(torch.nn.Module):
    """A model whose forward pass only queues work: a second, or what `seconds` says of each."""

    def __init__(self, device: AsynchronousDevice, seconds: Iterator[float] | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)
        self.device = device
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        timed = self.training and self.seconds is not None
        self.device.launch(next(self.seconds) if timed else 1.0)
        return self.net(inputs)


def test_mlx_benchmark_pr21_nerfstudio_183_pytorch_pr177765_completion_counts() -> None:
    """Timed without waiting for the device: 10 to 50 times too fast."""
    device = AsynchronousDevice()
    clock = SynchronizedClock(device.wait, lambda: device.now_s)
    device.launch(5.0)  # queued before the mark: not part of the step
    start = clock.mark()
    device.launch(1.0)
    device.launch(2.0)
    end = clock.mark()
    assert clock.seconds(start, end) == pytest.approx(3.002)

    def queued() -> TrainingSteps:
        steps = training_steps(own_job("small_net"), 8, accumulation_steps=2, clock=clock)
        steps.module = steps.model = QueuingModel(device)
        steps.parameters = list(steps.module.parameters())
        return steps

    facts = probe(queued)
    assert facts["compute_time_s"] == pytest.approx(2.002), "two passes of a second each"
    assert facts["step_time_s"] == pytest.approx(2.002, abs=0.5)


class RecordedEvent:
    """As torch.cuda.Event: milliseconds between two points of the stream."""

    def __init__(self, **options: object) -> None:
        assert options == {"enable_timing": True}
        self.at_ms = 0.0

    def record(self, stream: list[float]) -> None:
        stream[0] += 1500.0
        self.at_ms = stream[0]

    def elapsed_time(self, end: RecordedEvent) -> float:
        return end.at_ms - self.at_ms


def test_nerfstudio_183_cuda_events_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stand in the stream of work, are awaited, and count in milliseconds."""
    stream, waits = [0.0], []
    monkeypatch.setattr(torch.cuda, "Event", RecordedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    device = torch.device("cuda", 0)
    clock = CudaClock(device)
    start, end = clock.mark(), clock.mark()
    clock.synchronize()
    assert waits == [device]
    assert clock.seconds(start, end) == pytest.approx(1.5)


# --- which steps count


@pytest.mark.parametrize(("place", "max_steps"), [(5, 6), (9, 40)])
def test_alpa_823_anemoi_core_pr1254_mmsegmentation_132_slow_start(
    place: int, max_steps: int
) -> None:
    """The first steps compile and search for algorithms; one step falls out of line."""
    rng = random.Random(0)
    seconds = [1.0 + rng.gauss(0, 0.01) for _ in range(100)]
    seconds[:5] = [10 * each for each in seconds[:5]]
    seconds[place] = 20.0
    device = AsynchronousDevice()

    def scripted() -> TrainingSteps:
        clock = SynchronizedClock(device.wait, lambda: device.now_s)
        steps = training_steps(own_job("small_net"), 8, clock=clock)
        steps.module = steps.model = QueuingModel(device, iter(seconds))
        steps.parameters = list(steps.module.parameters())
        return steps

    settings = ProbeSettings(max_steps=max_steps, time_limit_s=100.0)
    facts = run_probe(scripted, CpuMeter(), settings, local_batch_size=8, world_size=1)
    assert facts["compute_time_s"] == pytest.approx(1.0, rel=0.02)
    assert facts["step_time_s"] == pytest.approx(1.0, rel=0.05), "with the real data's wait"
    assert facts["warmup_steps"] + facts["num_steps"] == facts["optimizer_steps"]


def compiling(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler that takes its time."""
    time.sleep(0.3)
    return graph.forward


def test_composer_2214_compile_time_stays_out() -> None:
    """A size finder compiled anew for every size, and its times were those of the compiler."""

    def compiled(size: int) -> TrainingSteps:
        steps = training_steps(own_job("small_net"), size)
        steps.model = torch.compile(steps.module, backend=compiling)
        return steps

    graphs = []
    for size in (8, 16, 24):
        facts = probe(lambda size=size: compiled(size), size)
        assert facts["probe_time_s"] > 0.3, "it did compile"
        assert facts["step_time_s"] < 0.1
        graphs.append(facts["compiled_graphs"])
    assert set(graphs) == {graphs[0]}, "each size is compiled as a training of its own is"
    assert graphs[0] >= 1
    assert probe(lambda: training_steps(own_job("small_net"), 8))["compiled_graphs"] == 0


# --- where the time goes


@pytest.mark.slow
def test_geti_pr5958_ultralytics_pr7659_speechbrain_784_input_bound() -> None:
    """A larger batch does not help, for the loader is what is slow: say so."""
    table = profile(
        probe_parts.small_net,
        probe_parts.SlowBlobs,
        batch_sizes=[8],
        world_sizes=[1],
        settings=QUICK,
    )
    (row,) = table.measurements
    assert row.data_time_s is not None
    assert row.data_time_s >= 8 * 0.005
    assert row.compute_time_s is not None
    assert row.compute_time_s < row.data_time_s
    assert is_input_bound(row)
    assert row.reason.startswith("input-bound: ")


# --- units

UNITS = (
    "_s",
    "_bytes",
    "_bytes_per_s",
    "_usd",
    "_per_hour",
)
PURE = {
    *("local_batch_size", "global_batch_size", "nodes", "devices_per_node", "cpu_cores"),
    *("accumulation_steps", "num_steps", "world_size"),
    *("gradient_norm", "gradient_variability", "noise_scale", "cpu_time_ratio"),
    *("epochs_to_target", "reach_rate", "throughput"),
}
"""Counts and ratios. throughput: samples per second, a word that people search for (docs)."""


def unit_of(name: str) -> str | None:
    plain = name.removesuffix("_lower").removesuffix("_upper")
    if plain in PURE:
        return ""
    return next((unit for unit in UNITS if plain.endswith(unit)), None)


def test_gpt_neox_pr739_units(table: ProfileTable, bundle: tula.PredictorBundle) -> None:
    """Milliseconds were taken for seconds: a number's name carries its unit, all the way round."""
    rows = [dataclasses.asdict(row) for row in table.measurements]
    choice = tula.recommend(bundle, cluster=tula.ClusterSpec(), epochs=2)
    points = [dataclasses.asdict(point) for point in choice.curve]
    out = bundle.predict(pd.DataFrame({"local_batch_size": [8, 32]}))
    documents = [
        *({**row} for row in rows),
        *points,
        *out.to_dict("records"),
        *(link.to_dict() for link in table.links),
        table.hardware.to_dict(),
    ]
    unknown = {
        str(name)
        for document in documents
        for name, value in document.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and unit_of(str(name)) is None
    }
    assert unknown == set()
    assert [
        name for name in COLUMNS if "time" in name and not name.endswith(("_s", "_ratio"))
    ] == []


def test_gpt_neox_pr739_round_trips(table: ProfileTable, tmp_path: Path) -> None:
    """Through JSON, CSV and a frame and back: the same numbers in the same units."""
    again = ProfileTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table
    parts = {"workload": table.workload, "hardware": table.hardware}
    framed = ProfileTable.from_frame(table.to_frame(), **parts)
    assert framed.measurements == table.measurements
    path = tmp_path / "table.csv"
    table.to_frame().to_csv(path, index=False)
    read = ProfileTable.from_frame(pd.read_csv(path), **parts)
    assert [row.step_time_s for row in read.measurements] == [
        row.step_time_s for row in table.measurements
    ]
    assert [row.peak_memory_bytes for row in read.measurements] == [
        row.peak_memory_bytes for row in table.measurements
    ]
