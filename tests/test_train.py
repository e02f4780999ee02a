"""`train` from the caller's side: requests refused at once, and real processes of ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError, TrainingError
from mlflow_tula.hardware import detect
from mlflow_tula.train import (
    BatchPlan,
    Limits,
    TrainEvent,
    TrainResult,
    saved_plan,
    train,
)
from mlflow_tula.workloads.job import Job

TWO_RANKS = pytest.mark.skipif(
    detect("cpu").devices_per_node < 2, reason="two ranks need two cores"
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_DEVICE", "cpu")


def small_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": "train_parts:small_net",
        "image_size": 8,
        "dataset_size": 640,
        "learning_rate": 0.1,
    }
    return Job(**(fields | changes))


# ---------------------------------------------------------------- refused before anything starts


def test_more_devices_than_there_are(tmp_path: Path) -> None:
    plan = BatchPlan.of(4096, devices_per_node=1024)
    with pytest.raises(InvalidInputError, match=r"at most this machine's \d+ .* not 1024"):
        train(small_job(), plan, epochs=1, output_dir=tmp_path)


def test_no_epochs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="epochs must be a whole number of at least 1"):
        train(small_job(), BatchPlan.of(8), epochs=0, output_dir=tmp_path)


def test_several_nodes_need_a_master(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="master as host:port"):
        train(small_job(), BatchPlan.of(8, nodes=2), epochs=1, output_dir=tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot use .* for checkpoints"):
        train(small_job(), BatchPlan.of(8), epochs=1, output_dir=tmp_path / "file" / "out")


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".training-0.lock"),
        pytest.raises(InvalidInputError, match="another training is at work in"),
    ):
        train(small_job(), BatchPlan.of(8), epochs=1, output_dir=tmp_path)


def decision(plan: BatchPlan) -> dict[str, Any]:
    return {
        "kind": "tula.training_decision",
        "schema_version": 1,
        "plan": plan.to_dict(),
        "identity": {"plan": {"global_batch_size": plan.global_batch_size}},
    }


def test_the_saved_decision(tmp_path: Path) -> None:
    assert saved_plan(tmp_path) is None
    path = tmp_path / "decision.json"
    plan = BatchPlan.of(48, accumulation_steps=3, source="tula.vgg11.digits version 3")
    path.write_text(json.dumps(decision(plan)))
    assert saved_plan(tmp_path) == plan
    path.write_text(json.dumps(decision(plan) | {"schema_version": 2}))
    with pytest.raises(SchemaError, match="newer than 1"):
        saved_plan(tmp_path)
    path.write_text("{")
    with pytest.raises(SchemaError, match="is not JSON"):
        saved_plan(tmp_path)


def test_another_batch_size_does_not_resume(tmp_path: Path) -> None:
    (tmp_path / "decision.json").write_text(json.dumps(decision(BatchPlan.of(48))))
    (tmp_path / "checkpoint.pt").write_bytes(b"not looked at")
    with pytest.raises(InvalidInputError, match=r"another training \(.*=.*, not .*start anew"):
        train(small_job(), BatchPlan.of(64), epochs=1, output_dir=tmp_path)
    assert (tmp_path / "checkpoint.pt").exists()


# ---------------------------------------------------------------- one process of one rank


def test_a_training_from_end_to_end(tmp_path: Path) -> None:
    events: list[TrainEvent] = []
    threads: set[threading.Thread] = set()

    def on_event(event: TrainEvent) -> None:
        events.append(event)
        threads.add(threading.current_thread())

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    plan = BatchPlan.of(64, source="a test")
    result = train(small_job(), plan, epochs=2, output_dir=tmp_path, on_event=on_event)
    assert result.plan == plan == saved_plan(tmp_path)
    assert (result.steps, result.samples, result.stop_reason) == (20, 1280, "completed")
    assert [record.step for event in events for record in event.steps] == list(range(1, 21))
    assert [event.kind for event in events if event.kind != "steps"] == [
        "started",
        *["epoch", "checkpoint"] * 2,
        "finished",
    ]
    assert "64 x 1 x 1 on cpu (a test)" in events[0].message
    assert (events[0].num_parameters or 0) > 1000
    assert threads == {threading.current_thread()}
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [
        "checkpoint.previous.pt",
        "checkpoint.pt",
        "decision.json",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "resnet81"}, InvalidInputError, "unknown model 'resnet81': did you mean"),
        ({"dataset": "cifar10", "data_dir": "/nowhere"}, InvalidInputError, "cifar10"),
        ({"dataset_size": 40}, InvalidInputError, "at most the dataset's 40 training samples"),
        ({"loss": "train_parts:diverging"}, TrainingError, r"loss is nan at step 7"),
    ],
)
def test_what_only_the_ranks_can_know(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(small_job(**changes), BatchPlan.of(64), epochs=2, output_dir=tmp_path)


@pytest.mark.slow
def test_starting_anew_forgets_the_checkpoints(tmp_path: Path) -> None:
    first = train(small_job(), BatchPlan.of(64), epochs=1, output_dir=tmp_path)
    plan = BatchPlan.of(32)
    other = train(small_job(), plan, epochs=1, output_dir=tmp_path, resume=False)
    assert other.resumed_from_step == 0
    assert other.weights_digest != first.weights_digest
    assert saved_plan(tmp_path) == plan


@pytest.mark.slow
def test_an_error_in_the_listener_ends_the_ranks(tmp_path: Path) -> None:
    def on_event(event: TrainEvent) -> None:
        if event.kind == "epoch":
            raise RuntimeError("the store is full")

    job = small_job(model="train_parts:slow_net")
    with pytest.raises(RuntimeError, match="the store is full"):
        train(job, BatchPlan.of(64), epochs=50, output_dir=tmp_path, on_event=on_event)
    assert not workers_of(tmp_path)


# ---------------------------------------------------------------- kills and signals

CALLER = """
import sys
from pathlib import Path
from mlflow_tula.train import BatchPlan, Limits, train
from mlflow_tula.workloads.job import Job

folder, job = Path(sys.argv[1]), Job(**{job!r})
def on_event(event):
    print(event.kind, event.step, flush=True)
result = train(job, BatchPlan.of(64), epochs=3, output_dir=folder, on_event=on_event,
               limits=Limits(checkpoint_every_s=0.5))
print(result.weights_digest)
"""


def start_caller(folder: Path, job: Job) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CALLER.format(job=job.to_dict())), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def workers_of(folder: Path) -> list[psutil.Process]:
    """Processes of training ranks and agents that still run (there is one training at a time)."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if "mlflow_tula.training.worker" in line and process.status() != "zombie":
                environment = process.environ()
                if environment.get("TULA_TEST_FOLDER") == str(folder):
                    found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(caller: subprocess.Popen[str], kind: str, step: int) -> None:
    assert caller.stdout is not None
    for line in caller.stdout:
        words = line.split()
        if words[0] == kind and int(words[1]) >= step:
            return
    pytest.fail(f"the caller ended early: {caller.stderr.read() if caller.stderr else ''}")


def gone(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while workers_of(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder by which this test's worker processes are known."""
    monkeypatch.setenv("TULA_TEST_FOLDER", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_weights(marked: Path) -> None:
    job = small_job(model="train_parts:slow_net", augment=True)
    caller = start_caller(marked, job)
    wait_for(caller, "checkpoint", 3)
    workers = workers_of(marked)
    assert workers
    caller.kill()
    for worker in workers:
        worker.kill()
    caller.wait()
    assert gone(marked, within_s=20)
    resumed = train(job, BatchPlan.of(64), epochs=3, output_dir=marked)
    assert 0 < resumed.resumed_from_step < 30
    whole = train(job, BatchPlan.of(64), epochs=3, output_dir=marked / "whole")
    assert resumed.weights_digest == whole.weights_digest
    assert [row.train_loss for row in resumed.history] == [row.train_loss for row in whole.history]


@pytest.mark.slow
def test_ranks_leave_when_their_caller_is_killed(marked: Path) -> None:
    caller = start_caller(marked, small_job(model="train_parts:slow_net"))
    wait_for(caller, "steps", 1)
    assert workers_of(marked)
    caller.kill()
    caller.wait()
    assert gone(marked, within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_is_passed_on(marked: Path, number: signal.Signals) -> None:
    job = small_job(model="train_parts:slow_net")
    caller = start_caller(marked, job)
    wait_for(caller, "steps", 1)
    caller.send_signal(number)
    output, errors = caller.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert caller.returncode == -signal.SIGTERM
    else:
        assert "KeyboardInterrupt" in errors
    assert "checkpoint" in output
    assert not workers_of(marked)
    resumed = train(job, BatchPlan.of(64), epochs=3, output_dir=marked)
    assert resumed.resumed_from_step > 0
    assert resumed.steps == 30


# ---------------------------------------------------------------- two ranks over gloo


@pytest.mark.slow
@TWO_RANKS
def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    job = small_job(model="train_parts:linear_net", dataset_size=650, drop_last=False)

    def run(name: str, plan: BatchPlan) -> TrainResult:
        return train(job, plan, epochs=3, output_dir=tmp_path / name)

    one = run("one", BatchPlan.of(64))
    two = run("two", BatchPlan.of(64, devices_per_node=2, accumulation_steps=2))
    assert one.steps == two.steps == 33
    assert one.samples == two.samples == 1950
    for old, new in zip(one.history, two.history, strict=True):
        assert new.train_loss == pytest.approx(old.train_loss, rel=1e-4)
        assert new.test_loss == pytest.approx(old.test_loss, rel=1e-4)
        assert new.gradient_norm == pytest.approx(old.gradient_norm, rel=1e-3)
        # The whole test split, no sample twice: at most one near a border may flip.
        assert new.test_accuracy == pytest.approx(old.test_accuracy, abs=1.5 / 359)


@pytest.mark.slow
@TWO_RANKS
@pytest.mark.timeout(180)
def test_two_nodes_train_as_two_ranks_of_one_do(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    plan = BatchPlan.of(64, nodes=2)

    def node(rank: int) -> TrainResult:
        folder = tmp_path / "nodes"
        return train(small_job(), plan, epochs=1, output_dir=folder, node_rank=rank, master=master)

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(node, (0, 1)))
    assert results[0].weights_digest == results[1].weights_digest
    together = BatchPlan.of(64, devices_per_node=2)
    local = train(small_job(), together, epochs=1, output_dir=tmp_path / "local")
    assert local.train_loss == pytest.approx(results[0].train_loss, rel=1e-5)


@pytest.mark.slow
@TWO_RANKS
def test_two_ranks_resume_to_the_same_result(tmp_path: Path) -> None:
    plan = BatchPlan.of(64, devices_per_node=2)
    whole = train(small_job(), plan, epochs=2, output_dir=tmp_path / "whole")
    limits = Limits(max_steps=7)
    train(small_job(), plan, epochs=2, output_dir=tmp_path / "cut", limits=limits)
    rest = train(small_job(), plan, epochs=2, output_dir=tmp_path / "cut")
    assert rest.resumed_from_step == 7
    for old, new in zip(whole.history, rest.history, strict=True):
        assert new.train_loss == pytest.approx(old.train_loss, rel=1e-5)
        assert new.test_accuracy == pytest.approx(old.test_accuracy, abs=1.5 / 359)


@pytest.mark.slow
@pytest.mark.timeout(120)  # a rank that waits in its all-reduce waits for half an hour
@TWO_RANKS
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("raises_on_rank_1", "rank 1: ValueError: the moon is in the wrong phase"),
        ("dies_on_rank_1", "rank 1: killed by SIGSEGV"),
        ("out_of_memory_on_rank_1", r"rank 1: .*take a smaller local batch size"),
    ],
)
def test_composer_pr2117_3510_one_rank_fails_and_all_leave(
    marked: Path, loss: str, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        train(
            small_job(loss=f"train_parts:{loss}"),
            BatchPlan.of(64, devices_per_node=2),
            epochs=50,
            output_dir=marked,
        )
    assert not workers_of(marked)
    assert (marked / "training.log").exists()
    if loss != "out_of_memory_on_rank_1":
        assert (marked / "checkpoint.pt").exists()


# ---------------------------------------------------------------- a real model


@pytest.mark.slow
def test_resnet18_learns_digits(tmp_path: Path) -> None:
    job = Job(model="resnet18", dataset="digits")
    limits = Limits(target_accuracy=0.95)
    result = train(job, BatchPlan.of(64), epochs=8, output_dir=tmp_path, limits=limits)
    assert result.test_accuracy >= 0.95
    assert result.epochs_to_target is not None
