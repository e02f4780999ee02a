"""Trainings whose ranks fail go on from the last checkpoint with the same global batch."""

import json
from pathlib import Path
from typing import Any

import pytest
from launch_parts import ranks_left, until

from mlflow_tula.errors import InvalidInputError, TrainingError
from mlflow_tula.hardware import detect
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.train import BatchPlan, Limits, TrainEvent, saved_plan, train
from mlflow_tula.training.elastic import Restarts
from mlflow_tula.workloads.job import Job

TWO_RANKS = pytest.mark.skipif(
    detect("cpu").devices_per_node < 2, reason="two ranks need two cores"
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_DEVICE", "cpu")


def failure(rank: int | None = 1, kind: str = "SIGKILL", status: Any = "failed") -> RankFailure:
    return RankFailure(rank=rank, status=status, kind=kind, message=f"killed by {kind}")


# ---------------------------------------------------------------- how it goes on


@pytest.mark.parametrize(
    ("plan", "nodes", "devices", "expected"),
    [
        (BatchPlan.of(64, devices_per_node=4), 1, 2, (16, 2)),
        (BatchPlan.of(96, devices_per_node=4), 1, 3, (16, 2)),
        (BatchPlan.of(64, nodes=2, devices_per_node=2), 1, 2, (16, 2)),
        (BatchPlan.of(64, devices_per_node=2, accumulation_steps=2), 1, 1, (16, 4)),
        (BatchPlan.of(64, devices_per_node=2), 1, 4, (16, 1)),
        (BatchPlan.of(64, devices_per_node=2, rank_batch_sizes=(24, 40)), 1, 1, (32, 2)),
    ],
)
def test_another_world_keeps_the_global_batch(
    plan: BatchPlan, nodes: int, devices: int, expected: tuple[int, int]
) -> None:
    other = plan.for_world(nodes, devices)
    assert (other.local_batch_size, other.accumulation_steps) == expected
    assert other.global_batch_size == plan.global_batch_size
    assert other.local_batch_size <= max(plan.sizes)
    assert other.rank_batch_sizes == ()


def test_a_world_that_cannot_keep_it_says_why() -> None:
    with pytest.raises(InvalidInputError, match="64 cannot be kept on 3 ranks: 3 does not divide"):
        BatchPlan.of(64, devices_per_node=4).for_world(1, 3)
    with pytest.raises(InvalidInputError, match="only passes of 1 come out even"):
        BatchPlan.of(14, devices_per_node=7).for_world(1, 2, smallest=2)


def test_smaller_passes_after_running_out_of_memory() -> None:
    plan = BatchPlan.of(48, devices_per_node=2).with_smaller_passes()
    assert (plan.local_batch_size, plan.accumulation_steps) == (12, 2)
    with pytest.raises(InvalidInputError, match="local batch size 1 cannot be made smaller"):
        BatchPlan.of(2, devices_per_node=2).with_smaller_passes()
    with pytest.raises(InvalidInputError, match="smaller with batch normalisation"):
        BatchPlan.of(6, devices_per_node=2).with_smaller_passes(smallest=2)


def test_restarts_are_counted_and_the_reason_is_a_line() -> None:
    restarts, plan = Restarts(2), BatchPlan.of(64, devices_per_node=4)
    first = restarts.after(failure(), plan, saved_step=0, nodes=1)
    assert first.plan == plan
    assert first.reason == (
        "restart 1 of 2 from the beginning: rank 1: killed by SIGKILL; batch 64 = 16 x 1 x 4"
    )
    again = restarts.after(failure(), plan, saved_step=0, nodes=1)
    assert again.plan is not None
    assert again.plan.world_size == 2, "3 does not divide 64"
    third = restarts.after(failure(), again.plan, saved_step=9, nodes=1)
    assert third.plan is None
    assert third.reason == "after 2 restarts, the most that --max-restarts allows"


def test_the_same_rank_may_fail_again_where_something_was_saved_since() -> None:
    restarts, plan = Restarts(5), BatchPlan.of(64, devices_per_node=4)
    for saved in (0, 10, 20):
        assert restarts.after(failure(), plan, saved_step=saved, nodes=1).plan == plan


def test_what_no_restart_mends() -> None:
    plan = BatchPlan.of(64, devices_per_node=2)
    wrong = Restarts(3).after(failure(kind="InvalidInputError"), plan, saved_step=0, nodes=1)
    assert wrong.plan is None
    assert Restarts(0).after(failure(), plan, saved_step=0, nodes=1).reason == ""
    memory = failure(status="oom", kind="MemoryError")
    small = BatchPlan.of(2, devices_per_node=2)
    stuck = Restarts(3).after(memory, small, saved_step=0, nodes=1)
    assert stuck.plan is None
    assert stuck.reason == "no restart: local batch size 1 cannot be made smaller"


def test_a_lost_node_leaves_the_others_with_more_passes() -> None:
    plan = BatchPlan.of(64, nodes=2, devices_per_node=2)
    after = Restarts(1).after(failure(rank=None, kind="lost"), plan, saved_step=8, nodes=1)
    assert after.plan == plan.for_world(1, 2)
    assert after.reason.endswith("batch 64 = 16 x 2 x 2")


def test_a_wrong_number_of_restarts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_restarts must be a whole number of at least"):
        train(Job(model="vgg11"), BatchPlan.of(8), epochs=1, output_dir=tmp_path, max_restarts=-1)


# ---------------------------------------------------------------- with real ranks


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": "train_parts:linear_net",
        "loss": "train_parts:fails_as_told",
        "image_size": 8,
        "dataset_size": 320,
        "learning_rate": 0.1,
    }
    return Job(**(fields | changes))


def fail(monkeypatch: pytest.MonkeyPatch, how: str, **more: str) -> None:
    for name, value in {"HOW": how, "RANK": "1", **more}.items():
        monkeypatch.setenv(f"FAIL_{name}", value)


@TWO_RANKS
@pytest.mark.slow
def test_a_killed_rank_costs_no_more_than_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 17 of 20, after the first epoch's checkpoint: 10 steps are not done again."""
    fail(monkeypatch, "kill", CALL="17", ONCE=str(tmp_path / "failed"))
    plan = BatchPlan.of(32, devices_per_node=2)
    unbroken = train(job(loss="cross_entropy"), plan, epochs=2, output_dir=tmp_path / "unbroken")
    events: list[TrainEvent] = []
    result = train(
        job(), plan, epochs=2, output_dir=tmp_path / "out", max_restarts=1, on_event=events.append
    )
    assert (result.restarts, result.resumed_from_step, result.steps) == (1, 10, 20)
    assert result.weights_digest == unbroken.weights_digest
    assert result.warnings[0].startswith("restart 1 of 1 from step 10: rank 1: killed by SIGKILL")
    assert result.warnings[0] in [event.message for event in events if event.kind == "warning"]
    assert until(lambda: not ranks_left(), 10)


@TWO_RANKS
@pytest.mark.slow
def test_a_rank_that_is_gone_for_good_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks always fail: the second restart is on one, with twice the passes."""
    fail(monkeypatch, "exception", WORLD="2", CALL="5")
    plan = BatchPlan.of(32, devices_per_node=2)
    result = train(job(), plan, epochs=1, output_dir=tmp_path, max_restarts=3)
    assert result.restarts == 2
    assert result.plan.words == "32 = 16 x 2 x 1"
    assert (result.steps, result.samples) == (10, 320)
    assert saved_plan(tmp_path) == plan, "the decision stays"
    more = train(job(loss="cross_entropy"), plan, epochs=1, output_dir=tmp_path / "b")
    assert abs(result.train_loss - more.train_loss) < 1e-4


@TWO_RANKS
@pytest.mark.slow
def test_out_of_memory_goes_on_with_smaller_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "oom", ONCE=str(tmp_path / "failed"))
    plan = BatchPlan.of(32, devices_per_node=2)
    result = train(job(), plan, epochs=2, output_dir=tmp_path / "out", max_restarts=1)
    assert result.plan.words == "32 = 8 x 2 x 2"
    assert result.steps == 20


@TWO_RANKS
@pytest.mark.slow
def test_without_restarts_the_error_names_the_rank_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "kill")
    plan = BatchPlan.of(32, devices_per_node=2)
    with pytest.raises(TrainingError, match="training failed: rank 1: killed by SIGKILL"):
        train(job(), plan, epochs=2, output_dir=tmp_path, limits=Limits(max_steps=15))
    assert until(lambda: not ranks_left(), 10)
    assert json.loads((tmp_path / "decision.json").read_text())["plan"]["local_batch_size"] == 16
