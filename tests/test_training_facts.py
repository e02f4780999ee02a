import json
from typing import Any

import pytest

from mlflow_tula.errors import InvalidInputError, SchemaError, UnknownNameError
from mlflow_tula.training.facts import (
    BatchPlan,
    EpochRecord,
    Limits,
    Schedule,
    StepRecord,
    TrainEvent,
    TrainRequest,
    TrainResult,
)
from mlflow_tula.workloads.job import Job

STEP = StepRecord(
    step=3,
    epoch=1,
    train_loss=0.5,
    learning_rate=0.1,
    gradient_norm=None,
    gradient_variability=0.25,
    step_time_s=0.01,
)
EPOCH = EpochRecord(
    epoch=1,
    step=22,
    samples=1408,
    train_loss=0.5,
    test_loss=0.6,
    test_accuracy=0.9,
    learning_rate=0.1,
    step_time_s=0.01,
    epoch_time_s=0.22,
    evaluation_time_s=0.1,
    throughput=6400.0,
    peak_memory_bytes=2**30,
)


def request(**changes: Any) -> TrainRequest:
    fields: dict[str, Any] = {
        "job": Job(model="vgg11"),
        "plan": BatchPlan.of(64),
        "epochs": 10,
        "output_dir": "out",
        "schedule": Schedule(),
        "limits": Limits(),
        "device_type": "cpu",
    }
    return TrainRequest(**(fields | changes))


def test_a_plan_multiplies_out_or_is_refused() -> None:
    plan = BatchPlan(
        global_batch_size=96, local_batch_size=8, accumulation_steps=3, nodes=2, devices_per_node=2
    )
    assert plan.world_size == 4
    with pytest.raises(InvalidInputError, match="8 x 3 x 4 = 96, not 128"):
        BatchPlan(
            global_batch_size=128,
            local_batch_size=8,
            accumulation_steps=3,
            nodes=2,
            devices_per_node=2,
        )


def test_cutting_a_batch_names_the_nearest_that_can_be_cut() -> None:
    assert BatchPlan.of(96, devices_per_node=2, accumulation_steps=3).local_batch_size == 16
    with pytest.raises(InvalidInputError, match="nearest valid sizes are 9 and 12"):
        BatchPlan.of(10, devices_per_node=3)
    with pytest.raises(InvalidInputError, match="at most the dataset's 50 samples"):
        BatchPlan.of(64, dataset_size=50)
    for wrong in (0, -1, 1.5, "many", None, True):
        with pytest.raises(InvalidInputError, match="whole number of at least 1"):
            BatchPlan.of(wrong)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_accuracy": 95}, "must be a fraction of at most 1, not 95"),
        ({"target_accuracy": 0}, "above 0"),
        ({"max_steps": 0}, "max_steps must be a whole number"),
        ({"time_limit_s": -1}, "time_limit_s must be a finite number above 0"),
        ({"checkpoint_every_epochs": 0}, "checkpoint_every_epochs must be"),
        ({"checkpoint_every_s": float("nan")}, "checkpoint_every_s must be a finite"),
    ],
)
def test_bad_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Limits(**fields)


def test_bad_requests() -> None:
    with pytest.raises(
        InvalidInputError, match="epochs must be a whole number of at least 1, not 0"
    ):
        request(epochs=0)
    with pytest.raises(UnknownNameError, match="device type"):
        request(device_type="abacus")


def test_everything_crosses_a_process_border_as_json() -> None:
    def there_and_back(value: Any) -> Any:
        return type(value).from_dict(json.loads(json.dumps(value.to_dict())))

    event = TrainEvent(
        kind="steps", step=3, total_steps=220, epoch=0, elapsed_s=1.0, steps=(STEP, STEP)
    )
    result = TrainResult(
        plan=BatchPlan.of(64),
        stop_reason="completed",
        epochs=1,
        steps=22,
        samples=1408,
        test_accuracy=0.9,
        best_test_accuracy=0.9,
        train_loss=0.5,
        wall_time_s=1.0,
        step_time_s=None,
        throughput=None,
        peak_memory_bytes=1,
        learning_rate=0.0,
        epochs_to_target=None,
        resumed_from_step=0,
        weights_digest="00",
        checkpoint_path="out/checkpoint.pt",
        history=(EPOCH,),
    )
    epoch_event = TrainEvent(
        kind="epoch", step=22, total_steps=220, epoch=1, elapsed_s=1.0, record=EPOCH
    )
    for value in (STEP, EPOCH, event, epoch_event, result, request()):
        assert there_and_back(value) == value
    with pytest.raises(SchemaError, match="no field 'moon'"):
        TrainRequest.from_dict(request().to_dict() | {"moon": 1})


def test_metrics_are_numbers_with_names_that_carry_their_unit() -> None:
    assert STEP.metrics() == {
        "train_loss": 0.5,
        "learning_rate": 0.1,
        "gradient_variability": 0.25,
        "step_time_s": 0.01,
    }
    metrics = EPOCH.metrics()
    assert metrics["samples"] == 1408.0
    assert metrics["peak_memory_bytes"] == float(2**30)
    assert "epoch" not in metrics
    assert all(isinstance(value, float) for value in metrics.values())


def test_identity_is_what_decides_the_weights() -> None:
    same = [
        request(job=Job(model="vgg11", data_dir="elsewhere", download=True, num_workers=4)),
        request(plan=BatchPlan.of(64, source="tula.vgg11.digits version 3")),
        request(plan=BatchPlan.of(64, accumulation_steps=2, devices_per_node=2)),
        request(limits=Limits(max_steps=5), output_dir="moved", device_type="cuda"),
    ]
    other = [
        request(job=Job(model="vgg11", seed=1)),
        request(plan=BatchPlan.of(128)),
        request(epochs=11),
        request(schedule=Schedule(clip_norm=0)),
    ]
    assert all(each.identity() == request().identity() for each in same)
    assert all(each.identity() != request().identity() for each in other)


def test_a_job_without_a_rate_trains_at_the_one_that_warm_up_and_clip_bear() -> None:
    assert request().job.learning_rate == 0.05
    assert request(plan=BatchPlan.of(256)).peak_learning_rate == pytest.approx(0.1)
    assert request(job=Job(model="vgg11", learning_rate=0.2)).job.learning_rate == 0.2
    assert request(job=Job(model="vgg11", optimizer="adam")).job.learning_rate is None
