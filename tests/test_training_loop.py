"""The loop in this process: one rank, real models and data, no process group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_tula.errors import TrainingError
from mlflow_tula.training.checkpoint import load_checkpoint
from mlflow_tula.training.facts import (
    BatchPlan,
    Limits,
    Schedule,
    TrainEvent,
    TrainRequest,
    TrainResult,
)
from mlflow_tula.training.loop import TrainLoop
from mlflow_tula.training.peers import Peers
from mlflow_tula.training.worker import set_up
from mlflow_tula.workloads.job import Job

PEERS = Peers(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


def small_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": "train_parts:small_net",
        "image_size": 8,
        "dataset_size": 400,
        "learning_rate": 0.1,
    }
    return Job(**(fields | changes))


def run(
    folder: Path,
    job: Job | None = None,
    plan: BatchPlan | None = None,
    *,
    limits: Limits | None = None,
    schedule: Schedule | None = None,
    epochs: int = 3,
    events: list[TrainEvent] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult | None:
    request = TrainRequest(
        job=job or small_job(),
        plan=plan or BatchPlan.of(32),
        epochs=epochs,
        output_dir=str(folder),
        schedule=schedule or Schedule(),
        limits=limits or Limits(),
        device_type="cpu",
    )
    folder.mkdir(exist_ok=True)
    setup = set_up(request, PEERS)
    setup.stop_requested = stop
    told = events if events is not None else []
    loop = TrainLoop(setup, peers=PEERS, emit=told.append)
    state = load_checkpoint(folder, identity=setup.identity)
    if state is not None:
        loop.resume(state)
    return loop.run()


def finished(result: TrainResult | None) -> TrainResult:
    assert result is not None
    return result


def test_a_whole_training_tells_all_it_does(tmp_path: Path) -> None:
    events: list[TrainEvent] = []
    result = finished(run(tmp_path, events=events))
    assert (result.stop_reason, result.epochs, result.steps) == ("completed", 3, 36)
    assert result.samples == 36 * 32
    assert result.test_accuracy > 0.5
    steps = [record for event in events for record in event.steps]
    assert [record.step for record in steps] == list(range(1, 37))
    assert [record.epoch for record in steps] == [1] * 12 + [2] * 12 + [3] * 12
    assert all(record.gradient_norm for record in steps)
    assert all(record.gradient_variability for record in steps[1:])
    assert steps[0].learning_rate < steps[3].learning_rate > steps[-1].learning_rate
    epochs = [event.record for event in events if event.record is not None]
    assert tuple(epochs) == result.history
    assert epochs[-1].train_loss < epochs[0].train_loss
    assert epochs[0].train_loss == pytest.approx(sum(r.train_loss for r in steps[:12]) / 12)
    assert epochs[0].peak_memory_bytes > 10**8
    kinds = [event.kind for event in events if event.kind != "steps"]
    assert kinds == ["started", *["epoch", "checkpoint"] * 3, "finished"]
    assert events[-1].remaining_s == 0


@pytest.mark.parametrize("stop_at", [5, 12, 13, 30])
def test_a_resumed_training_is_the_unbroken_one_bit_for_bit(tmp_path: Path, stop_at: int) -> None:
    job = small_job(augment=True)
    whole = finished(run(tmp_path / "whole", job))
    part = finished(run(tmp_path / "cut", job, limits=Limits(max_steps=stop_at)))
    assert (part.stop_reason, part.steps) == ("max_steps", stop_at)
    torch.rand(7)
    rest = finished(run(tmp_path / "cut", job))
    assert rest.resumed_from_step == stop_at
    assert rest.weights_digest == whole.weights_digest
    assert rest.samples == whole.samples
    for old, new in zip(whole.history, rest.history, strict=True):
        assert (old.train_loss, old.test_accuracy, old.test_loss) == (
            new.train_loss,
            new.test_accuracy,
            new.test_loss,
        )
        assert old.gradient_variability == new.gradient_variability


def test_a_finished_training_gives_its_result_again(tmp_path: Path) -> None:
    first = finished(run(tmp_path))
    events: list[TrainEvent] = []
    again = finished(run(tmp_path, events=events))
    assert again.history == first.history
    assert again.weights_digest == first.weights_digest
    assert again.resumed_from_step == 36
    assert [event.kind for event in events] == ["started", "finished"]


@pytest.mark.parametrize("drop_last", [True, False])
def test_accumulation_has_the_gradient_of_the_large_batch(tmp_path: Path, drop_last: bool) -> None:
    job = small_job(model="train_parts:linear_net", dataset_size=397, drop_last=drop_last)
    one = finished(run(tmp_path / "one", job, BatchPlan.of(48)))
    cut = finished(run(tmp_path / "cut", job, BatchPlan.of(48, accumulation_steps=4)))
    assert one.steps == cut.steps == 3 * (8 if drop_last else 9)
    assert one.samples == cut.samples == 3 * (384 if drop_last else 397)
    weights = [
        load_checkpoint(
            tmp_path / name,
            identity=TrainRequest(
                job=job,
                plan=plan,
                epochs=3,
                output_dir="",
                schedule=Schedule(),
                limits=Limits(),
                device_type="cpu",
            ).identity(),
        )
        for name, plan in (
            ("one", BatchPlan.of(48)),
            ("cut", BatchPlan.of(48, accumulation_steps=4)),
        )
    ]
    assert weights[0] is not None
    assert weights[1] is not None
    for name, tensor in weights[0]["model"].items():
        torch.testing.assert_close(tensor, weights[1]["model"][name], rtol=1e-4, atol=1e-6)
    for old, new in zip(one.history, cut.history, strict=True):
        assert old.train_loss == pytest.approx(new.train_loss, rel=1e-5)
        assert old.gradient_norm == pytest.approx(new.gradient_norm, rel=1e-4)


def test_loader_processes_change_nothing(tmp_path: Path) -> None:
    plain = finished(run(tmp_path / "plain", small_job(augment=True), epochs=2))
    loaded = finished(run(tmp_path / "loaded", small_job(augment=True, num_workers=1), epochs=2))
    assert plain.weights_digest == loaded.weights_digest


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_too(tmp_path: Path, precision: str) -> None:
    result = finished(run(tmp_path, small_job(precision=precision), epochs=6))
    assert result.test_accuracy > 0.6
    assert result.history[0].gradient_norm is not None


def test_the_target_ends_training_and_is_remembered(tmp_path: Path) -> None:
    limits = Limits(target_accuracy=0.3)
    result = finished(run(tmp_path, limits=limits, epochs=20))
    assert result.stop_reason == "target_accuracy"
    assert result.epochs == result.epochs_to_target == len(result.history) < 20
    assert result.test_accuracy >= 0.3
    again = finished(run(tmp_path, limits=limits, epochs=20))
    assert (again.steps, again.stop_reason) == (result.steps, "target_accuracy")


def test_time_ends_training_with_a_tested_model(tmp_path: Path) -> None:
    result = finished(run(tmp_path, limits=Limits(time_limit_s=1e-3), epochs=50))
    assert result.stop_reason == "time_limit"
    assert 0 < result.steps <= 600
    assert 0 <= result.test_accuracy <= 1


def test_a_stop_is_answered_with_a_checkpoint_and_the_rest_is_the_same(tmp_path: Path) -> None:
    whole = finished(run(tmp_path / "whole"))
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return True

    events: list[TrainEvent] = []
    assert run(tmp_path / "cut", stop=stop, events=events) is None
    assert asked
    assert events[-1].kind == "checkpoint"
    assert 0 < events[-1].step < 36
    assert finished(run(tmp_path / "cut")).weights_digest == whole.weights_digest


def test_checkpoints_by_time_and_by_epochs(tmp_path: Path) -> None:
    often: list[TrainEvent] = []
    run(tmp_path / "often", limits=Limits(checkpoint_every_s=0.0), events=often, epochs=1)
    rare: list[TrainEvent] = []
    run(tmp_path / "rare", limits=Limits(checkpoint_every_epochs=2), events=rare, epochs=5)
    assert [event.kind for event in often].count("checkpoint") >= 2
    assert [event.epoch for event in rare if event.kind == "checkpoint"] == [2, 4, 5]


def test_a_diverging_training_names_step_and_rate_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    job = small_job(learning_rate=1e18, weight_decay=1e3)
    schedule = Schedule(clip_norm=0.0)
    with pytest.raises(TrainingError, match=r"loss is (nan|inf) at step \d+ with learning rate"):
        run(tmp_path, job, schedule=schedule)


def test_a_model_with_slow_running_statistics_is_changed_and_says_so(tmp_path: Path) -> None:
    events: list[TrainEvent] = []
    job = small_job(model="mobilenet_v3_small", image_size=32, dataset_size=64)
    run(tmp_path, job, BatchPlan.of(32), epochs=1, events=events)
    assert "batch-norm momentum raised to 0.1" in events[0].message
