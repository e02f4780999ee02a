"""Public complaints about memory and batch-size finders, one test each, named after its thread.

A fake device of set capacity drives the whole sweep through its decisions; test_profiler.py has
the same failures in real processes.
"""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fake_device import GB, FakeDevice
from probe_parts import own_job, training_steps

import mlflow_tula as tula
from mlflow_tula.cli import run
from mlflow_tula.errors import InvalidInputError, ProfilingError, TooFewProbesWarning
from mlflow_tula.probing.memory import CpuMeter, CudaMeter, MemoryReading, limit_memory
from mlflow_tula.probing.probe import run_probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.steps import TrainingSteps
from mlflow_tula.profiler import profile
from mlflow_tula.workloads.job import Job

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")
JOB = Job(model="vgg11")
ONE = tula.ClusterSpec()


def sweep(patch: pytest.MonkeyPatch, device: FakeDevice, **options: Any) -> tula.ProfileTable:
    device.install(patch)
    return profile(job=JOB, **{"world_sizes": [1], **options})


def statuses(table: tula.ProfileTable) -> dict[int, str]:
    return {row.local_batch_size: row.status for row in table.measurements}


def ask(bundle: tula.PredictorBundle, sizes: list[int], **options: Any) -> pd.DataFrame:
    devices = options.pop("devices_per_node", 1)
    frame = pd.DataFrame({"local_batch_size": sizes, "devices_per_node": devices})
    return bundle.predict(frame, **options)


def probe(model: str, meter: CpuMeter | None = None, *, size: int = 16) -> dict[str, Any]:
    return run_probe(
        lambda: training_steps(own_job(model), size),
        meter or CpuMeter(),
        ProbeSettings(max_steps=3),
        local_batch_size=size,
        world_size=1,
    )


# --- finding a size


def test_lightning_3259_tiny_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch size of 67,108,864 "succeeded": memory never ran out, and the data did."""
    device = FakeDevice(10**15, sample_bytes=1, devices=3, dataset_size=100)
    for search, world in itertools.product(("partial", "full"), (1, 2, 3)):
        share = -(-100 // world)
        table = sweep(monkeypatch, device, world_sizes=[world], search=search)
        assert {row.world_size for row in table.measurements} == {world}
        assert max(row.local_batch_size for row in table.measurements) <= share
        cluster = tula.ClusterSpec(devices_per_node=world)
        choice = tula.recommend(tula.fit(table), cluster=cluster, objective="min_time")
        assert all(point.global_batch_size <= 100 for point in choice.curve)
        assert choice.local_batch_size <= share
        assert not ask(tula.fit(table), [share + 1], devices_per_node=world)["fits"].any()
    asked = len(device.asked)
    with pytest.raises(InvalidInputError, match="at most 50 "):
        profile(job=JOB, batch_sizes=[51], world_sizes=[2])
    with pytest.raises(InvalidInputError, match="at most the dataset's 100 samples, not 128"):
        tula.recommend(tula.fit(table), cluster=ONE, candidates=[128])
    assert len(device.asked) == asked


def test_lightning_3103_first_size_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first size runs out: walk down to one that runs, never an UnboundLocalError."""
    device = FakeDevice(3 * GB, sample_bytes=GB)
    table = sweep(monkeypatch, device)
    found = statuses(table)
    assert (found[8], found[4], found[2]) == ("oom", "oom", "ok")
    choice = tula.recommend(tula.fit(table), cluster=ONE)
    assert choice.global_batch_size == 2
    listed = sweep(monkeypatch, FakeDevice(3 * GB, sample_bytes=GB), batch_sizes=[2, 4, 8])
    assert statuses(listed)[2] == "ok"


def test_ultralytics_pr25739_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even one sample fits: an error, no batch size out of thin air, nothing registered."""
    FakeDevice(GB, static_bytes=2 * GB, dataset_size=1437).install(monkeypatch)
    capsys.readouterr()
    code = run(["main", "--world-sizes", "1"])
    out, err = capsys.readouterr()
    assert code == 1
    assert "Error: no batch size could be measured: 8 x 1 rank (oom" in err
    assert "1 x 1 rank (oom" in err
    assert "Traceback" not in err
    assert "choice" not in out
    assert not list(store.parent.rglob("recommendation.json"))
    assert not list(store.parent.rglob("bundle.json"))
    from mlflow import MlflowClient

    assert list(MlflowClient().search_registered_models()) == []


def test_accelerate_1934_the_real_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "No executable batch size" hid the reason: name each size, chain the last real error."""
    with pytest.raises(ProfilingError, match="no batch size could be measured") as caught:
        sweep(monkeypatch, FakeDevice(GB, static_bytes=2 * GB))
    for size in (8, 4, 2, 1):
        assert f"{size} x 1 rank (oom: rank 0: OutOfMemoryError: CUDA out of" in str(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    assert "CUDA out of memory" in str(cause)
    assert isinstance(cause.__cause__, torch.OutOfMemoryError)


def test_ultralytics_1451_extrapolated_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of 1 to 16 were stretched to 281, which ran out of memory in the first epoch."""
    device = FakeDevice(80 * GB)
    table = sweep(monkeypatch, device, batch_sizes=[1, 2, 4, 8, 16])
    bundle = tula.fit(table)
    out = ask(bundle, [16, 64, 281])
    assert out["extrapolated"].tolist() == [False, True, True]
    assert out["fits"].tolist() == [True, True, False]
    assert "beyond 4x" in out["fits_reason"][2]
    width = out["peak_memory_bytes_upper"] / out["peak_memory_bytes_lower"]
    assert width[2] > width[0] > 1
    with pytest.raises(InvalidInputError, match="no candidate fits: the nearest is 281"):
        tula.recommend(bundle, cluster=ONE, candidates=[281])
    verified = profile(job=JOB, batch_sizes=[281], world_sizes=[1], resume_from=table)
    known = ask(tula.fit(verified), [281])
    assert known["fits"].tolist() == [True]
    assert known["fits_reason"].tolist() == ["was run"]
    assert tula.recommend(tula.fit(verified), cluster=ONE, candidates=[281]).global_batch_size


def test_deeplearning4j_5461_pytorch_49207_feasible_is_a_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 runs out of memory while 32 runs: the library takes another workspace."""
    device = FakeDevice(16 * GB, workspace={16: 14 * GB}, dataset_size=64)
    table = sweep(monkeypatch, device, batch_sizes=[8, 16, 32])
    assert statuses(table) == {8: "ok", 16: "oom", 32: "ok"}
    assert device.asked == [(8, 1), (16, 1), (32, 1)]
    out = ask(tula.fit(table), [8, 16, 20, 31, 32])
    assert out["fits"].tolist() == [True, False, False, False, True]
    choice = tula.recommend(tula.fit(table), cluster=ONE, candidates=[16, 32])
    assert 16 not in {point.local_batch_size for point in choice.curve if point.fits}


def test_yolov5_9287_flat_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat readings gave "batch size 253731": a slope of nothing is not divided by."""
    device = FakeDevice(16 * GB, sample_bytes=0, dataset_size=10**6)
    table = sweep(monkeypatch, device, batch_sizes=[8, 16])
    with pytest.warns(TooFewProbesWarning, match="does not grow from batch size 8 to 16"):
        bundle = tula.fit(table)
    assert any("measure larger ones" in text for text in bundle.report.warnings)
    out = ask(bundle, [16, 64, 65, 253_731])
    assert out["fits"].tolist() == [True, True, False, False]
    assert out["peak_memory_bytes_upper"][1] > 2 * out["peak_memory_bytes"][1]
    choice = tula.recommend(bundle, cluster=ONE)
    assert max(point.global_batch_size for point in choice.curve) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_what_is_recommended_as_measured_fits_the_device(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any device: workspace jumps, fragmentation, other processes, DDP's copy."""
    rng = random.Random(seed)
    room = rng.choice([4, 8, 16, 40]) * GB
    jumps = rng.sample([2**power for power in range(10)], rng.randint(0, 3))
    device = FakeDevice(
        room,
        static_bytes=int(room * rng.uniform(0.02, 0.7)),
        sample_bytes=int(room * 10 ** rng.uniform(-4, -0.7)),
        workspace={size: int(room * rng.uniform(0.05, 1.0)) for size in jumps},
        fragmentation=rng.choice([0, 0.1, 0.3]),
        others_bytes=int(room * rng.choice([0, 0.05, 0.3])),
        copy_bytes=int(room * rng.choice([0, 0.05, 0.2])),
        counts=rng.random() < 0.5,
        dataset_size=rng.choice([100, 1000, 50_000]),
        devices=rng.choice([1, 2, 4]),
    )
    try:
        table = sweep(monkeypatch, device, world_sizes="auto")
    except ProfilingError:
        assert device.reserved(1) > room - device.others_bytes
        return
    clusters = [tula.ClusterSpec(devices_per_node=n) for n in sorted({1, device.devices})]
    choice = tula.recommend(tula.fit(table), cluster=clusters)
    needed = device.reserved(choice.local_batch_size, choice.devices_per_node)
    assert needed <= room - device.others_bytes or not choice.choice.measured
    assert choice.choice.measured or any("predicted" in reason for reason in choice.reasons)


# --- what counts as memory


class WatchingMeter(CpuMeter):
    """When memory is read, is the probe's model still there?"""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[weakref.ref[object]] = []
        self.left: int | None = None

    def reading(self) -> MemoryReading:
        gc.collect()
        self.left = sum(reference() is not None for reference in self.watched)
        return super().reading()


def held_tensors() -> int:
    gc.collect()
    return sum(thing.nbytes for thing in gc.get_objects() if type(thing) is torch.Tensor)


def test_lightning_8028_20231_9625_probes_leave_nothing_behind() -> None:
    """What probes left behind was missing in the real training."""
    probe("small_net")
    before, meter = held_tensors(), WatchingMeter()

    def watched() -> TrainingSteps:
        steps = training_steps(own_job("small_net"))
        parts = (steps, steps.module, steps.optimizer, *steps.parameters)
        meter.watched = [weakref.ref(part) for part in parts]
        return steps

    settings = ProbeSettings(max_steps=3)
    for _ in range(2):
        run_probe(watched, meter, settings, local_batch_size=16, world_size=1)
        assert meter.watched
        assert meter.left == 0, "read while the model was alive"
    assert held_tensors() <= before
    steps = training_steps(own_job("small_net"))
    assert all(steps.step().step_s > 0 for _ in range(50))


def test_ultralytics_4679_deepspeech_321_validation_counts() -> None:
    """Training survived, validation ran out: memory is the largest over both."""
    megabytes = probe("greedy_evaluation")["allocated_memory_bytes"] / 1e6
    assert megabytes == pytest.approx(16, rel=0.1)
    assert probe("small_net")["allocated_memory_bytes"] < 1e6


def test_yolov5_5218_nemo_2988_pytorch_39022_ddp_needs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fits on one device and not under DDP, whose buckets are a copy of all gradients."""
    device = FakeDevice(16 * GB, copy_bytes=2 * GB)
    alone = sweep(monkeypatch, device, batch_sizes=[16, 32, 64])
    both = profile(job=JOB, batch_sizes=[16, 32, 64], world_sizes=[2], workload=alone.workload)
    predicted = tula.fit(alone)
    measured = tula.fit(both)
    for bundle in (predicted, measured):
        one = ask(bundle, [48], devices_per_node=1)["peak_memory_bytes"][0]
        two = ask(bundle, [48], devices_per_node=2)["peak_memory_bytes"][0]
        assert two - one == pytest.approx(2 * GB, rel=1e-6)
    room = ask(predicted, [48])["peak_memory_bytes_upper"][0] + GB
    asked = {"memory_limit_bytes": room}
    assert ask(predicted, [48], devices_per_node=1, **asked)["fits"].tolist() == [True]
    assert ask(predicted, [48], devices_per_node=2, **asked)["fits"].tolist() == [False]


def test_pytorch_35901_nemo_rl_2319_fragmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough was free in total, and no block of it large enough: the limit is on reserved bytes."""
    device = FakeDevice(14 * GB, fragmentation=0.5, others_bytes=GB, counts=True)
    table = sweep(monkeypatch, device, batch_sizes=[8, 16, 32, 64, 96])
    for row in table.ok:
        size = row.local_batch_size
        assert row.allocated_memory_bytes == device.allocated(size)
        assert row.peak_memory_bytes == device.reserved(size)
        assert row.device_used_bytes == device.reserved(size) + GB
    assert device.allocated(96) < 13 * GB < device.reserved(96)
    assert statuses(table) == {8: "ok", 16: "ok", 32: "ok", 64: "ok", 96: "oom"}
    assert (96, 1) not in device.asked, "predicted from reserved bytes, and not run"
    limit = (device.allocated(48) + device.reserved(48)) / 2
    assert ask(tula.fit(table), [48], memory_limit_bytes=limit)["fits"].tolist() == [False]


def test_pytorch_35901_cuda_has_three_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own counts, by name; and the bound is the allocator's, which is on reserved bytes."""
    bounds: list[float] = []
    answers = {
        "max_memory_reserved": 9 * GB,
        "max_memory_allocated": 5 * GB,
        "mem_get_info": (2 * GB, 16 * GB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    device = torch.device("cuda", 0)
    meter = CudaMeter(device)
    meter.start()
    meter.stop()
    assert meter.reading() == MemoryReading(
        peak_bytes=9 * GB, allocated_bytes=5 * GB, device_used_bytes=14 * GB
    )

    class Properties:
        total_memory = 16 * GB

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, *_: bounds.append(share)
    )
    limit_memory(4 * GB, device)
    limit_memory(64 * GB, device)
    assert bounds == [0.25, 1.0]


# --- a CPU


def test_ludwig_pr2455_lightning_20614_a_cpu_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU never says that memory ran out, the machine dies: three bounds hold instead."""
    memory = {"device_type": "cpu", "sample_bytes": GB // 10, "counts": True}
    device = FakeDevice(4 * GB, **memory)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 10**15}))
    table = sweep(monkeypatch, device)
    largest = max(row.local_batch_size for row in table.ok)
    assert device.allocated(largest) <= 4 * GB
    assert max(size for size, _ in device.asked) < 32, "beyond the memory nothing is even begun"
    shared = FakeDevice(4 * GB, **memory)
    sweep(monkeypatch, shared, world_sizes=[2])
    assert max(size for size, _ in shared.asked) <= 8, "two ranks share it"
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 2 * GB}))
    busy = FakeDevice(4 * GB, **memory)
    sweep(monkeypatch, busy)
    assert max(size for size, _ in busy.asked) <= 8, "others hold the rest"
    for bound in (16, 50):
        endless = FakeDevice(10**15, sample_bytes=1, device_type="cpu", dataset_size=70)
        sweep(monkeypatch, endless, max_batch_size=bound, search="full")
        assert max(size for size, _ in endless.asked) <= bound
    endless = FakeDevice(10**15, sample_bytes=1, device_type="cpu", dataset_size=70)
    sweep(monkeypatch, endless, search="full")
    assert max(size for size, _ in endless.asked) == 64


def test_lightning_20614_loader_workers_count() -> None:
    """The loaders' workers hold memory too, and no allocator of this process knows of it."""
    meter, held = CpuMeter(), 256 * 400_000

    def peak() -> int:
        meter.start()
        meter.stop()
        return meter.reading().peak_bytes

    alone = peak()
    code = "held = bytes(range(256)) * 400_000; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        together = peak()
        child.communicate("\n")
    assert held < together - alone < held + 50e6
