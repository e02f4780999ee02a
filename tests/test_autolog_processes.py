"""autolog() in programs of their own: how they end, several ranks, `mlflow run`, the scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
HEAD = """
import sys; sys.path.insert(0, {tests!r})
import time, mlflow, torch, mlflow_tula
from loop_parts import digits, net, train
torch.set_num_threads(1)
mlflow_tula.autolog(every_n_steps=1)
"""


def start(body: str, store: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD.format(tests=str(ROOT / "tests")) + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{store}", **environment},
    )


def all_runs() -> list:
    client = MlflowClient()
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("", 0, "FINISHED"),
        ("raise RuntimeError('the data ran out')", 1, "FAILED"),
    ],
)
def test_a_made_run_ends_as_the_program_does(
    store: Path, ending: str, code: int, status: str
) -> None:
    child = start(f"model, optimizer = train()\n{ending}", store)
    _, error = child.communicate(timeout=120)
    assert child.returncode == code, error
    (run,) = all_runs()
    assert run.info.status == status
    assert run.data.metrics["local_batch_size"] == 64
    assert "Traceback" not in error or "the data ran out" in error


def test_ctrl_c_in_the_loop(store: Path) -> None:
    body = """
def tell(number):
    if number == 20:
        print('there', flush=True)
        time.sleep(60)
train(after_step=tell)
"""
    child = start(body, store)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "there"
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in error
    (run,) = all_runs()
    assert run.info.status == "KILLED"
    assert run.data.metrics["num_steps"] == 16


def test_a_killed_program_leaves_a_run_that_the_doctor_can_close(store: Path) -> None:
    from mlflow_tula import doctor

    body = """
from mlflow_tula.integrations import sessions, watch
sessions.PATIENCE_S, watch.FLUSH_EVERY_S = 0.0, 0.1
mlflow_tula.autolog(every_n_steps=1)
def tell(number):
    if number == 20:
        until = time.monotonic() + 60
        while mlflow.search_runs(output_format='list', search_all_experiments=True) == []:
            assert time.monotonic() < until
            time.sleep(0.1)
        print('there', flush=True)
        time.sleep(60)
train(after_step=tell)
"""
    child = start(body, store)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "there"
    child.kill()
    child.communicate(timeout=60)
    (run,) = all_runs()
    assert run.info.status == "RUNNING"
    assert run.info.run_id in {one.run_id for one in doctor.stale_runs()}


def test_of_two_ranks_rank_0_logs_the_world(store: Path) -> None:
    script = store.parent / "ranks.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
import mlflow, torch, mlflow_tula
from loop_parts import digits, net
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
mlflow_tula.autolog(every_n_steps=5, gradient_every_n_steps=5)
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(digits(), batch_size=32, sampler=DistributedSampler(digits()))
for number, (images, labels) in enumerate(loader):
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{store}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = all_runs()
    metrics = run.data.metrics
    assert (metrics["local_batch_size"], metrics["devices_per_node"], metrics["nodes"]) == (
        32,
        2,
        1,
    )
    assert metrics["global_batch_size"] == 64
    assert metrics["gradient_norm"] > 0
    assert run.data.tags["tula.model"] == "Sequential-5210"
    assert run.data.tags["tula.dataset"] == "TensorDataset-1797"


def test_a_project_s_run_is_used_and_not_ended(store: Path) -> None:
    made = MlflowClient().create_run("0")
    child = start("train()", store, MLFLOW_RUN_ID=made.info.run_id)
    _, error = child.communicate(timeout=120)
    assert child.returncode == 0, error
    (run,) = all_runs()
    assert run.info.status == "RUNNING"
    assert run.data.metrics["local_batch_size"] == 64


def test_a_dead_server_costs_seconds_and_no_training(store: Path, free_port: int) -> None:
    begin = time.monotonic()
    child = start(
        "train(); print('trained')", store, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{free_port}"
    )
    out, error = child.communicate(timeout=120)
    assert (child.returncode, out.strip()) == (0, "trained"), error
    assert "does not answer" in error
    assert "Traceback" not in error
    assert time.monotonic() - begin < 60


def test_the_example(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "02_autolog_your_loop.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=store.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "5 runs of digits-cnn.digits-8px" in done.stdout
    assert "choice: global batch size" in done.stdout


@pytest.mark.parametrize(
    ("script", "options", "heading"),
    [
        ("autolog_overhead.py", ["--rounds", "1", "--steps", "2", "--batch-size", "2"], "| step |"),
        ("observed_runs_speed.py", ["--runs", "30"], "| runs |"),
        ("autolog_noise.py", ["--batches", "2"], "| network |"),
    ],
)
def test_the_benchmarks_run(
    script: str, options: list[str], heading: str, tmp_path: Path, clean_mlflow: Path
) -> None:
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options, "--markdown", str(page)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert page.read_text().startswith(heading)
