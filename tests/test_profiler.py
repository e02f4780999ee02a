"""Real probes in real child processes; what fails is injected by a model of one's own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import probe_parts
import pytest
import torch
from launch_parts import ranks_left

from mlflow_tula.errors import InvalidInputError, ProfilingError, UnknownNameError
from mlflow_tula.launch.failures import memory_kills
from mlflow_tula.profiler import (
    ProbeSettings,
    ProfileEvent,
    ProfileInterrupted,
    is_input_bound,
    profile,
)
from mlflow_tula.table import Measurement, ProfileTable
from mlflow_tula.workloads.job import Job

HERE = Path(__file__).parent
QUICK = ProbeSettings(max_steps=6, time_limit_s=2.0)


@dataclass
class Profiled:
    table: ProfileTable
    events: list[ProfileEvent]
    counts: dict[int, Counter[str]]
    output: Path


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A counting model on one and two ranks, measured once for this module."""
    folder = tmp_path_factory.mktemp("counts")
    output = folder / "table.json"
    events: list[ProfileEvent] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(probe_parts.COUNT_FOLDER, str(folder))
        patch.setenv("MLFLOW_RUN_ID", "the parent's run")
        table = profile(
            probe_parts.CountingNet,
            probe_parts.hundred,
            probe_parts.plain_loss,
            probe_parts.CountingSGD,
            batch_sizes=[8, 32],
            world_sizes=[1, 2],
            accumulation_steps=2,
            settings=QUICK,
            on_event=events.append,
            output=output,
        )
    counts = {
        rank: Counter((folder / f"rank{rank}.txt").read_text().splitlines()) for rank in (0, 1)
    }
    return Profiled(table=table, events=events, counts=counts, output=output)


def test_every_configuration_is_a_row_with_its_parts(profiled: Profiled) -> None:
    rows = profiled.table.measurements
    assert [(row.local_batch_size, row.world_size) for row in rows] == [
        (8, 1),
        (32, 1),
        (8, 2),
        (32, 2),
    ]
    for row in rows:
        assert (row.status, row.accumulation_steps) == ("ok", 2)
        # On a busy machine one rank may be slower than the other, and then the row says so.
        assert row.reason == "" or is_input_bound(row) or row.slowest_rank is not None
        assert row.step_time_s is not None
        parts = (row.data_time_s, row.compute_time_s, row.sync_time_s, row.optimizer_time_s)
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(filter(None, parts)) < 2 * row.step_time_s
        assert row.num_steps is not None
        assert 3 <= row.num_steps <= 6
        assert row.gradient_norm is not None
        assert row.gradient_norm > 0
        assert row.gradient_variability is not None
        assert row.probe_time_s is not None
    assert {row.sync_time_s for row in rows if row.world_size == 1} == {0.0}


def test_the_three_memory_numbers_of_a_cpu(profiled: Profiled) -> None:
    for row in profiled.table.measurements:
        assert row.peak_memory_bytes is not None
        assert row.allocated_memory_bytes is not None
        # 836 parameters: some kilobytes of tensors in a process of some hundred megabytes.
        assert 5_000 < row.allocated_memory_bytes < 5_000_000
        assert 50e6 < row.peak_memory_bytes < 4e9


def test_lightning_13696_exactly_the_reported_steps_were_run(profiled: Profiled) -> None:
    finished = [e for e in profiled.events if e.kind == "probe_finished"]
    expected = {0: Counter[str](), 1: Counter[str]()}
    for event in finished:
        assert event.probe is not None
        assert event.measurement is not None
        size, details = event.probe.local_batch_size, event.details
        if not details.get("repeated"):
            assert (
                details["warmup_steps"] + event.measurement.num_steps == details["optimizer_steps"]
            )
        for rank in range(event.probe.world_size):
            count = expected[rank]
            count["optimizer 0"] += details["optimizer_steps"]
            count[f"evaluate {size}"] += details["evaluation_passes"]
            passes = 2 * details["optimizer_steps"]
            if event.probe.world_size > 1:
                passes += 2 * details["gradient_passes"]
            else:
                for what in ("train", "backward"):
                    count[f"{what} {size // 2}"] += 2 * details["gradient_passes"]
            count[f"train {size}"] += passes
            count[f"backward {size}"] += passes
    assert profiled.counts == expected


def test_the_workload_is_described_and_the_whole_dataset_counts(profiled: Profiled) -> None:
    workload = profiled.table.workload
    assert (workload.model, workload.dataset) == ("probe_parts.CountingNet", "probe_parts.hundred")
    assert workload.dataset_size == 100
    assert workload.num_parameters == 836
    assert workload.optimizer == "probe_parts.CountingSGD"
    assert not workload.batch_norm


def test_the_link_between_ranks_is_measured_once(profiled: Profiled) -> None:
    links = profiled.table.links
    plain = [link for link in links if link.num_buckets is None]
    gradient = [link for link in links if link.num_buckets is not None]
    assert len({link.message_bytes for link in plain}) == len(plain) == 5
    assert [link.compression for link in gradient] == [None, "bf16"]
    assert {link.message_bytes for link in gradient} == {profiled.table.workload.gradient_bytes}
    assert {link.devices_per_node for link in links} == {2}
    assert all(link.time_s > 0 for link in links)


def test_events_tell_what_is_measured_and_the_time_left(profiled: Profiled) -> None:
    kinds = [event.kind for event in profiled.events if event.kind != "probe_repeated"]
    assert kinds[:4] == ["starting", "started", "links_measured", "probe_started"]
    assert kinds[-1] == "finished"
    assert kinds.count("probe_finished") == 4
    last = profiled.events[-1]
    assert (last.num_done, last.num_expected, last.expected_remaining_s) == (4, 4, 0.0)
    assert last.reason == "every candidate was measured"
    middle = [event for event in profiled.events if event.kind == "probe_started"][1]
    assert middle.expected_remaining_s is not None
    assert middle.expected_remaining_s > 0


def test_the_table_so_far_is_on_disk_and_round_trips(profiled: Profiled) -> None:
    document = json.loads(profiled.output.read_text())
    assert ProfileTable.from_dict(document) == profiled.table


def test_nothing_is_left_running(profiled: Profiled) -> None:
    assert ranks_left() == []


def test_rows_measured_before_are_answers(profiled: Profiled) -> None:
    again = profile(
        probe_parts.CountingNet,
        probe_parts.hundred,
        probe_parts.plain_loss,
        probe_parts.CountingSGD,
        batch_sizes=[8, 32],
        world_sizes=[1, 2],
        accumulation_steps=2,
        workload=profiled.table.workload,
        resume_from=profiled.table,
    )
    assert again == profiled.table


def test_rows_of_another_workload_are_refused(profiled: Profiled) -> None:
    with pytest.raises(InvalidInputError, match="resume_from holds probe_parts-countingnet"):
        profile(
            probe_parts.small_net,
            probe_parts.hundred,
            workload=profiled.table.workload.__class__(model="x", dataset="y", dataset_size=9),
            resume_from=profiled.table,
        )


def test_wrong_requests_start_nothing() -> None:
    net, data = probe_parts.small_net, probe_parts.hundred
    with pytest.raises(InvalidInputError, match="profile needs model_fn"):
        profile()
    with pytest.raises(InvalidInputError, match="local_batch_size must be a whole number"):
        profile(net, data, batch_sizes=[0])
    with pytest.raises(InvalidInputError, match="world_size must be at most"):
        profile(net, data, world_sizes=[10_000])
    with pytest.raises(UnknownNameError, match="unknown search 'some'"):
        profile(net, data, search="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="not a lambda"):
        profile(lambda: None, data)
    with pytest.raises(InvalidInputError, match="dataset must be a function"):
        profile(net, [1, 2, 3])
    with pytest.raises(InvalidInputError, match="time_budget_s must be a finite number above 0"):
        profile(net, data, time_budget_s=0)
    with pytest.raises(InvalidInputError, match="memory_limit_bytes must be a whole number"):
        profile(net, data, memory_limit_bytes=-1)
    with pytest.raises(InvalidInputError, match="cannot write output"):
        profile(net, data, output="/proc/nowhere/table.json")
    assert ranks_left() == []


def test_the_profiler_imports_neither_torch_nor_mlflow_nor_click() -> None:
    code = (
        "import sys, mlflow_tula.profiler; "
        "assert not {'torch', 'mlflow', 'click'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- failures are rows


def _rows(table: ProfileTable) -> dict[tuple[int, int], Measurement]:
    return {(row.local_batch_size, row.world_size): row for row in table.measurements}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("oom_on_rank_1", "oom", "rank 1: OutOfMemoryError: CUDA out of memory"),
        (
            "killed_on_rank_1",
            "oom" if memory_kills() is None else "failed",
            "rank 1: killed by SIGKILL",
        ),
        ("raises_on_rank_0", "failed", "rank 0: ValueError: wrong shape of moon"),
    ],
)
def test_composer_pr2117_3510_a_failing_rank_is_a_row_and_the_sweep_goes_on(
    model: str, status: str, words: str
) -> None:
    began = time.monotonic()
    table = profile(
        getattr(probe_parts, model),
        probe_parts.blobs,
        batch_sizes=[8, 16, 12],
        world_sizes=[2],
        settings=QUICK,
    )
    rows = _rows(table)
    assert (rows[8, 2].status, rows[12, 2].status) == ("ok", "ok")
    assert rows[16, 2].status == status
    assert rows[16, 2].reason.startswith(words)
    assert time.monotonic() - began < 240, "the other rank must not wait for ever"
    assert ranks_left() == []


@pytest.mark.slow
def test_a_map_not_a_threshold_after_a_failure_larger_sizes_are_still_tried() -> None:
    table = profile(
        "probe_parts:oom_only_at_16",
        probe_parts.blobs,
        batch_sizes=[8, 16, 32],
        world_sizes=[1],
        settings=QUICK,
    )
    assert [row.status for row in table.measurements] == ["ok", "oom", "ok"]


@pytest.mark.slow
def test_the_first_size_out_of_memory_walks_down() -> None:
    table = profile(probe_parts.oom_from_4, probe_parts.blobs, world_sizes=[1], settings=QUICK)
    rows = _rows(table)
    assert (rows[8, 1].status, rows[4, 1].status, rows[2, 1].status) == ("oom", "oom", "ok")


@pytest.mark.slow
def test_not_even_one_sample_fits_is_an_error_that_lists_each_size() -> None:
    with pytest.raises(
        ProfilingError, match="no batch size could be measured: 8 x 1 rank"
    ) as caught:
        profile(probe_parts.always_oom, probe_parts.blobs, world_sizes=[1], settings=QUICK)
    for size in (4, 2, 1):
        assert f"{size} x 1 rank (oom: rank 0: OutOfMemoryError" in str(caught.value)
    assert "CUDA out of memory" in str(caught.value.__cause__)
    assert ranks_left() == []


@pytest.mark.slow
def test_a_memory_limit_is_kept_by_prediction_and_by_the_allocator() -> None:
    probe = profile(
        probe_parts.GreedyNet, probe_parts.blobs, batch_sizes=[8], world_sizes=[1], settings=QUICK
    )
    base = probe.measurements[0].peak_memory_bytes
    assert base is not None
    table = profile(
        probe_parts.GreedyNet,
        probe_parts.blobs,
        batch_sizes=[16, 200, 340, 400],
        world_sizes=[1],
        memory_limit_bytes=base + 250_000_000,
        settings=QUICK,
    )
    rows = _rows(table)
    assert (rows[16, 1].status, rows[200, 1].status) == ("ok", "ok")
    for size in (340, 400):
        assert rows[size, 1].status == "oom"
        assert "predicted" in rows[size, 1].reason
    alone = profile(
        probe_parts.GreedyNet,
        probe_parts.blobs,
        batch_sizes=[8, 390],
        world_sizes=[1],
        memory_limit_bytes=base + 250_000_000,
        settings=QUICK,
    )
    assert _rows(alone)[390, 1].status == "oom"
    assert "DefaultCPUAllocator" in _rows(alone)[390, 1].reason


@pytest.mark.slow
def test_a_local_batch_of_one_with_batch_norm_is_said_and_never_a_crash() -> None:
    table = profile(
        probe_parts.norm_net,
        probe_parts.blobs,
        batch_sizes=[1, 8],
        world_sizes=[1],
        settings=QUICK,
    )
    assert table.workload.batch_norm
    rows = _rows(table)
    assert rows[1, 1].status == "failed"
    assert "Expected more than 1 value per channel" in rows[1, 1].reason
    assert rows[8, 1].status == "ok"


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_row() -> None:
    table = profile(
        "probe_parts:hangs_on_rank_1",
        probe_parts.blobs,
        batch_sizes=[8, 16],
        world_sizes=[2],
        settings=QUICK,
        probe_timeout_s=20.0,
    )
    rows = _rows(table)
    assert (rows[8, 2].status, rows[16, 2].status) == ("ok", "failed")
    assert rows[16, 2].reason.startswith("no answer within ")
    assert ranks_left() == []


# --- one's own loop


@pytest.mark.slow
def test_functions_of_a_script_are_found_and_its_guard_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "my_job.py"
    script.write_text(
        "import torch\n"
        "from mlflow_tula.profiler import profile\n"
        "def net():\n"
        "    return torch.nn.Linear(8, 4)\n"
        "def data():\n"
        "    return torch.utils.data.TensorDataset(torch.randn(50, 8), torch.arange(50) % 4)\n"
        "if __name__ == '__main__':\n"
        "    print('guarded')\n"
        "    table = profile(net, data, batch_sizes=[8], world_sizes=[1], max_steps=3)\n"
        "    workload = table.workload\n"
        "    print(table.measurements[0].status, workload.slug, workload.dataset_size)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines() == ["guarded", "ok my_job-net.my_job-data 50"]


@pytest.mark.slow
def test_tensors_and_text_are_data_and_models_too() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.arange(60) % 4)
    table = profile(
        "probe_parts:small_net",
        data,
        optimizer_fn=torch.optim.Adam,
        batch_sizes=[4],
        world_sizes=[1],
        settings=QUICK,
    )
    assert table.workload.dataset_size == 60
    assert table.measurements[0].status == "ok"


@pytest.mark.slow
def test_a_job_that_cannot_be_built_is_a_wrong_request() -> None:
    with pytest.raises(InvalidInputError, match="did you mean vgg11"):
        profile(job=Job(model="vgg111"), world_sizes=[1])
    with pytest.raises(InvalidInputError, match="local_batch_size must be at most 100"):
        profile(probe_parts.small_net, probe_parts.hundred, batch_sizes=[101], world_sizes=[1])
    assert ranks_left() == []


@pytest.mark.slow
def test_auto_on_a_tiny_dataset_never_exceeds_it() -> None:
    table = profile(probe_parts.small_net, probe_parts.hundred, settings=QUICK)
    assert table.ok
    for row in table.measurements:
        assert row.local_batch_size <= -(-100 // row.world_size)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing_running(tmp_path: Path) -> None:
    def interrupt(event: ProfileEvent) -> None:
        if event.kind == "probe_started" and event.num_done == 1:
            raise KeyboardInterrupt

    output = tmp_path / "table.json"
    with pytest.raises(ProfileInterrupted, match="interrupted") as caught:
        profile(
            probe_parts.small_net,
            probe_parts.blobs,
            batch_sizes=[8, 16, 32],
            world_sizes=[1],
            settings=QUICK,
            on_event=interrupt,
            output=output,
        )
    assert isinstance(caught.value, KeyboardInterrupt)
    table = caught.value.table
    assert table is not None
    assert [row.local_batch_size for row in table.measurements] == [8]
    assert ProfileTable.from_dict(json.loads(output.read_text())) == table
    assert ranks_left() == []
    resumed = profile(
        probe_parts.small_net,
        probe_parts.blobs,
        batch_sizes=[8, 16],
        world_sizes=[1],
        settings=QUICK,
        resume_from=table,
    )
    assert resumed.measurements[0] == table.measurements[0]
    assert [row.local_batch_size for row in resumed.measurements] == [8, 16]


@pytest.mark.slow
def test_a_real_interrupt_ends_every_process_and_keeps_the_file(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from mlflow_tula.profiler import profile\n"
        "def show(event):\n"
        "    print(event.kind, event.num_done, flush=True)\n"
        "profile('probe_parts:hangs_on_rank_1', 'probe_parts:blobs', batch_sizes=[8, 16],\n"
        f"        world_sizes=[2], max_steps=3, on_event=show, output={str(output)!r})\n"
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.strip() == "probe_started 1":
                break
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "ProfileInterrupted: profiling was interrupted" in errors
    assert ranks_left(run.pid) == []
    table = ProfileTable.from_dict(json.loads(output.read_text()))
    assert [row.status for row in table.measurements] == ["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_and_loader_workers_are_measured(precision: str) -> None:
    job = Job(
        model="probe_parts:small_net",
        dataset="probe_parts:blobs",
        precision=precision,  # type: ignore[arg-type]
        num_workers=1,
    )
    table = profile(job=job, batch_sizes=[8], world_sizes=[1], settings=QUICK)
    (row,) = table.measurements
    assert (row.status, row.reason if "input" not in row.reason else "") == ("ok", "")
    assert table.workload.dataset_size == 320, "a job's own single dataset is split 80/20"
    assert ranks_left() == []
