"""The parts of a probe without child processes: clocks, stopping, guards, plans, memory."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe_parts import training_steps

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.probes import Probe
from mlflow_tula.probing.clock import HostClock, clock_for
from mlflow_tula.probing.contention import is_contended, run_queue_wait_s
from mlflow_tula.probing.guards import (
    CPU_BASE_BYTES,
    default_memory_limit,
    expected_peak_bytes,
    expected_seconds,
)
from mlflow_tula.probing.measure import is_input_bound, row_of
from mlflow_tula.probing.memory import CpuMeter, held_bytes, resident_peak_bytes
from mlflow_tula.probing.own import load_datasets, reference, save_tensors
from mlflow_tula.probing.plan import candidates, check_batch_sizes, check_world_sizes, smaller
from mlflow_tula.probing.probe import run_probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.stopping import StepSeries, median_interval
from mlflow_tula.specs import HardwareSpec, Workload
from mlflow_tula.table import ProfileTable
from mlflow_tula.workloads.job import Job

HARDWARE = HardwareSpec(
    device_type="cpu", device_name="cpu", device_memory_bytes=8 * 2**30, devices_per_node=4
)
WORKLOAD = Workload(model="net", dataset="data", dataset_size=100, num_parameters=1_000_000)


def _series(steps: list[float], **settings: float) -> StepSeries:
    series = StepSeries(ProbeSettings(**settings))  # type: ignore[arg-type]
    for seconds in steps:
        if series.add(seconds):
            break
    return series


def _table(*rows: tuple[int, float, int], world_size: int = 1) -> ProfileTable:
    return ProfileTable(
        workload=WORKLOAD,
        hardware=HARDWARE,
        measurements=tuple(
            row_of(
                Probe(local_batch_size=size, devices_per_node=world_size),
                step_time_s=seconds,
                peak_memory_bytes=peak,
                allocated_memory_bytes=peak // 2,
                num_steps=10,
                probe_time_s=12 * seconds + 1,
            )
            for size, seconds, peak in rows
        ),
    )


# --- clocks


def test_the_host_clock_is_monotonic() -> None:
    clock = HostClock()
    start = clock.mark()
    clock.synchronize()
    assert clock.seconds(start, clock.mark()) >= 0
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


# --- which steps count


def test_a_steady_series_stops_early_and_a_noisy_one_at_a_limit() -> None:
    steady = _series([0.5] * 100)
    assert (steady.reason, steady.num_warmup) == ("median known within 2%", 2)
    assert len(steady.timed) <= 6
    rng = random.Random(1)
    noisy = [rng.uniform(0.05, 0.15) for _ in range(500)]
    limited = _series(noisy, time_limit_s=1000.0, max_steps=30)
    assert (limited.reason, len(limited.timed)) == ("step limit", 30)
    slow = _series([10.0, 10.0, 8.0, 9.0, 11.0, 9.0], time_limit_s=4.0)
    assert (slow.reason, len(slow.timed)) == ("time limit", 3)


def test_an_outlier_does_not_spend_the_time_limit() -> None:
    rng = random.Random(2)
    steps = [0.1 * (1 + rng.gauss(0, 0.05)) for _ in range(100)]
    steps[3] = 19.0
    series = _series(steps, time_limit_s=5.0, max_steps=40)
    assert len(series.timed) > 5
    assert statistics.median(series.timed) == pytest.approx(0.1, rel=0.05)


def test_the_interval_of_the_median_covers_it_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(1000):
        low, high = median_interval([rng.gauss(0, 1) for _ in range(15)]) or (0.0, 0.0)
        hits += low <= 0.0 <= high
    assert hits / 1000 >= 0.93
    assert median_interval([1.0] * 5) is None
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == (1.0, 6.0)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=80))
def test_every_step_is_counted_once(steps: list[float]) -> None:
    series = _series(steps)
    assert series.num_warmup + len(series.timed) == len(series.seconds) <= len(steps)
    assert series.num_warmup <= 10


def test_settings_are_checked_and_round_trip() -> None:
    assert ProbeSettings(warmup_steps=0).warmup_steps == 2
    assert ProbeSettings(max_steps=1).min_steps == 1
    settings = ProbeSettings(max_steps=7)
    assert ProbeSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(InvalidInputError, match="max_steps must be a whole number"):
        ProbeSettings(max_steps=0)
    with pytest.raises(InvalidInputError, match="tolerance must be below 1"):
        ProbeSettings(tolerance=2.0)


# --- what may be probed


def test_no_candidate_exceeds_a_ranks_share_of_a_tiny_dataset() -> None:
    probes = candidates(WORKLOAD, [1, 2, 3], None)
    assert all(p.local_batch_size <= -(-100 // p.world_size) for p in probes)
    assert {p.local_batch_size for p in probes if p.world_size == 1} == {8, 16, 32, 64}
    tiny = Workload(model="m", dataset="d", dataset_size=3)
    assert [p.local_batch_size for p in candidates(tiny, [1], None)] == [3]


def test_explicit_sizes_are_checked_against_the_dataset() -> None:
    assert len(candidates(WORKLOAD, [1, 2], [4, 100])) == 3
    with pytest.raises(InvalidInputError, match="at most 100 "):
        candidates(WORKLOAD, [1], [101])
    with pytest.raises(InvalidInputError, match="above max_batch_size = 2"):
        candidates(WORKLOAD, [1], [4], max_batch_size=2)
    assert [p.local_batch_size for p in candidates(WORKLOAD, [1], None, max_batch_size=20)] == [
        8,
        16,
    ]


@pytest.mark.parametrize("sizes", [[0], [-1], [1.5], ["x"], [True], [None]])
def test_batch_sizes_that_are_none_are_refused(sizes: list[object]) -> None:
    with pytest.raises(InvalidInputError, match="local_batch_size must be a whole number"):
        check_batch_sizes(sizes)


def test_other_lists_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="the list is empty"):
        check_batch_sizes([])
    with pytest.raises(InvalidInputError, match="must be 'auto' or a list"):
        check_batch_sizes("8")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="must be 'auto' or a list"):
        check_batch_sizes(8)  # type: ignore[arg-type]
    assert check_batch_sizes("auto") is None
    assert check_batch_sizes([8, 4, 8]) == [4, 8]


def test_world_sizes_are_those_of_the_machine() -> None:
    assert check_world_sizes("auto", HARDWARE) == [1, 2]
    assert check_world_sizes([4, 1], HARDWARE) == [1, 4]
    with pytest.raises(InvalidInputError, match="at most the 4 cores of this machine, not 5"):
        check_world_sizes([5], HARDWARE)
    with pytest.raises(InvalidInputError, match="world_sizes must be 'auto' or a list"):
        check_world_sizes("two", HARDWARE)  # type: ignore[arg-type]


def test_walking_down_ends_at_one_and_with_batch_norm_at_two() -> None:
    def chain(workload: Workload) -> list[int]:
        found, step = [], smaller(Probe(local_batch_size=8), workload)
        while step is not None:
            found.append(step.local_batch_size)
            step = smaller(step, workload)
        return found

    assert chain(WORKLOAD) == [4, 2, 1]
    norm = Workload(model="m", dataset="d", dataset_size=9, batch_norm=True)
    assert chain(norm) == [4, 2]


# --- guards


def test_memory_is_predicted_before_a_probe_begins() -> None:
    nothing = _table()
    probe = Probe(local_batch_size=64)
    assert expected_peak_bytes(nothing, probe, lambda size: None) is None
    # Nothing measured: half as much again as counted, and what a process holds on a CPU.
    assert expected_peak_bytes(nothing, probe, lambda size: 10 * size) == CPU_BASE_BYTES + 960
    # Not even one sample would pass by that rule: the bare count decides.
    assert expected_peak_bytes(nothing, probe, lambda size: 10 * size, 5e8) == 640
    one = _table((8, 1.0, 1000))
    # 1,000 measured, 500 of them allocated; the estimate says 700 more: 1.5 times as much.
    assert expected_peak_bytes(one, probe, lambda size: 1200) == 1000 + 1050
    two = _table((8, 1.0, 1000), (16, 1.0, 1800))
    assert expected_peak_bytes(two, probe, lambda size: 0) == 1800 + 48 * 100
    flat = _table((8, 1.0, 1000), (16, 1.0, 900))
    assert expected_peak_bytes(flat, probe, lambda size: 0) == 900


def test_the_ranks_of_a_cpu_share_its_memory() -> None:
    one, two = (default_memory_limit(HARDWARE, size) for size in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.2)
    assert one <= 8 * 2**30
    gpu = HardwareSpec(device_type="cuda", device_name="T4", device_memory_bytes=16 * 2**30)
    assert default_memory_limit(gpu, 8) == 16 * 2**30


def test_the_duration_of_a_probe_is_never_its_fewest_steps_too_low() -> None:
    settings = ProbeSettings()
    table = _table((8, 1.0, 1000))
    assert expected_seconds(_table(), Probe(local_batch_size=8), settings) == 0.0
    assert expected_seconds(table, Probe(local_batch_size=64), settings) >= 8 * 5
    assert expected_seconds(table, Probe(local_batch_size=8), settings) >= 5


def test_input_bound_rows_are_told_apart() -> None:
    probe = Probe(local_batch_size=8)
    assert is_input_bound(row_of(probe, step_time_s=1.0, data_time_s=0.6))
    assert not is_input_bound(row_of(probe, step_time_s=1.0, data_time_s=0.4))
    assert not is_input_bound(row_of(probe, step_time_s=1.0))


def test_contention_is_what_the_kernel_says_else_the_ratio() -> None:
    assert is_contended(0.5, 1.0, 1.0)
    assert not is_contended(0.01, 0.1, 1.0)
    assert is_contended(None, 0.5, 1.0)
    assert not is_contended(None, 0.9, 1.0)
    waited = run_queue_wait_s()
    assert waited is None or waited >= 0.0


# --- memory


def test_the_cpu_meter_counts_every_allocation_of_a_pass() -> None:
    meter = CpuMeter()
    meter.start()
    with meter.record(lambda: 6_001_000):
        first = torch.ones(1_000_000)
        second = first + 1
        del first
        third = torch.ones(500_000)
    meter.stop()
    del second, third
    reading = meter.reading()
    assert reading.allocated_bytes == pytest.approx(8_000_000 + 1000, rel=0.01)
    assert reading.peak_bytes >= reading.allocated_bytes


def test_blocks_freed_from_before_a_recording_are_not_counted_twice() -> None:
    meter = CpuMeter()
    meter.start()
    buckets = torch.ones(1_000_000)
    with meter.record(lambda: 4_000_000):
        del buckets
        buckets = torch.ones(1_000_000)
    meter.stop()
    del buckets
    assert meter.reading().allocated_bytes == pytest.approx(4_000_000, rel=0.01)


@pytest.mark.skipif(resident_peak_bytes() is None, reason="needs /proc")
def test_a_small_probe_after_a_large_one_reads_as_it_would_alone() -> None:
    meter = CpuMeter()

    def peak(megabytes: int) -> int:
        meter.start()
        blocks = [torch.ones(250_000) for _ in range(megabytes)]
        meter.stop()
        del blocks
        return meter.reading().peak_bytes

    small, large, again = peak(20), peak(400), peak(20)
    assert large - small > 300e6
    assert abs(again - small) < 40e6


def test_held_bytes_are_parameters_gradients_momentum_and_buckets() -> None:
    net = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    parameters = 110 * 4
    assert held_bytes(net, optimizer, world_size=1) == parameters
    net(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert held_bytes(net, optimizer, world_size=1) == 3 * parameters
    assert held_bytes(net, optimizer, world_size=2) == 4 * parameters


# --- one's own functions


def module_level(num_classes: int = 4) -> torch.nn.Module:
    return torch.nn.Linear(8, num_classes)


class Factory:
    def make(self) -> None: ...


def test_functions_become_text_that_a_child_can_import() -> None:
    assert reference(module_level, "model_fn") == f"{__name__}:module_level"
    assert reference(Factory, "model_fn") == f"{__name__}:Factory"
    assert reference(torch.optim.Adam, "optimizer_fn") == "torch.optim.adam:Adam"
    assert reference("vgg11", "model_fn") == "vgg11"
    with pytest.raises(InvalidInputError, match="not a lambda"):
        reference(lambda: None, "model_fn")

    def local() -> None: ...

    with pytest.raises(InvalidInputError, match="not a local function"):
        reference(local, "model_fn")
    with pytest.raises(InvalidInputError, match="not method: pass a function that returns it"):
        reference(Factory().make, "model_fn")
    with pytest.raises(InvalidInputError, match="not Linear: pass a function that returns it"):
        reference(torch.nn.Linear(2, 2), "model_fn")


def test_tensors_travel_as_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.arange(40) % 4)
    path = save_tensors(data, tmp_path)
    assert path is not None
    assert save_tensors([1, 2], tmp_path) is None
    job = Job(model="probe_parts:small_net", dataset=f"{path}:tensors")
    loaded = load_datasets(job, whole=True)
    assert loaded.train_size == 40
    assert loaded.num_classes == 4
    assert torch.equal(loaded.train[3][0], data[3][0])
    split = load_datasets(Job(model="a:b", dataset="probe_parts:blobs"), whole=False)
    assert split.train_size == 320


def test_a_model_that_diverges_still_has_a_step_time() -> None:
    job = Job(
        model="probe_parts:small_net",
        dataset="probe_parts:blobs",
        loss="probe_parts:squares",
        optimizer="probe_parts:exploding",
    )
    answer = run_probe(
        lambda: training_steps(job),
        CpuMeter(),
        ProbeSettings(max_steps=3),
        local_batch_size=16,
        world_size=1,
    )
    assert answer["step_time_s"] > 0
    assert answer["gradient_norm"] is None
    assert answer["noise_scale"] is None


def test_a_half_batch_that_does_not_run_costs_only_the_noise_scale() -> None:
    job = Job(model="probe_parts:norm_net", dataset="probe_parts:blobs")
    steps = training_steps(job, size=2)
    steps.step()
    assert steps.split_passes() is None, "batch norm cannot take half of two samples"
    assert all(parameter.grad is None for parameter in steps.parameters)


@pytest.mark.parametrize("seed", range(40))
def test_never_more_timed_steps_than_the_limit(seed: int) -> None:
    draw = random.Random(seed)
    series = StepSeries(ProbeSettings(max_steps=6, time_limit_s=1e9, tolerance=1e-9))
    while not series.add(draw.lognormvariate(0.0, 0.4)):
        pass
    assert len(series.timed) == 6
    assert series.num_warmup + len(series.timed) == len(series.seconds)
