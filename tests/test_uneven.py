"""Uneven local batches: one gradient however a batch is cut, and slow ranks named and relieved."""

import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.errors import InvalidInputError, SlowRankWarning
from mlflow_tula.fit import fit
from mlflow_tula.hardware import detect
from mlflow_tula.launch import RankGroup
from mlflow_tula.launch.slow import OwnTimes, slowest_rank
from mlflow_tula.profiler import ProbeSettings, profile
from mlflow_tula.specs import Workload
from mlflow_tula.table import SLOW_RATIO, ProfileTable
from mlflow_tula.training.balance import DEADBAND, Balancer, equalised
from mlflow_tula.training.facts import (
    REQUEST_NAME,
    BatchPlan,
    Limits,
    Schedule,
    TrainRequest,
    TrainResult,
)
from mlflow_tula.training.sharding import ShardedBatches, epoch_order, shared_out
from mlflow_tula.workloads.job import Job

TWO_RANKS = pytest.mark.skipif(
    detect("cpu").devices_per_node < 2, reason="two ranks need two cores"
)

# ---------------------------------------------------------------- plans and shares


def test_a_plan_with_uneven_batches_keeps_the_global_batch() -> None:
    plan = BatchPlan.of(64, devices_per_node=2, accumulation_steps=2, rank_batch_sizes=(8, 24))
    assert (plan.local_batch_size, plan.sizes) == (16, (8, 24))
    assert plan.words == "64 = (8+24) x 2"
    assert BatchPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.with_sizes((16, 16)).rank_batch_sizes == ()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 8, 16), r"one local batch size a rank, 2 in all, not 3: 8,8,16"),
        ((8, 16), r"must add up to global_batch_size / accumulation_steps = 32, not 8 \+ 16 = 24"),
        ((0, 32), r"rank_batch_sizes must be a whole number of at least 1, not 0"),
    ],
)
def test_sizes_that_do_not_make_the_batch(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BatchPlan.of(64, devices_per_node=2, accumulation_steps=2, rank_batch_sizes=sizes)


@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 90),
    st.sampled_from([1, 2]),
)
def test_each_sample_once_an_epoch_on_one_rank(
    sizes: list[int], passes: int, extra: int, smallest: int
) -> None:
    sizes[-1] += -sum(sizes) % len(sizes)
    plan = BatchPlan.of(
        sum(sizes) * passes,
        devices_per_node=len(sizes),
        accumulation_steps=passes,
        rank_batch_sizes=sizes,
    )
    size = plan.global_batch_size + extra
    ranks = [
        ShardedBatches(size, plan, rank=rank, seed=1, drop_last=False, smallest=smallest)
        for rank in range(plan.world_size)
    ]
    seen: list[int] = []
    taken = [iter(rank) for rank in ranks]
    for step in range(ranks[0].steps_per_epoch):
        counts = {len(rank.share(step).passes) for rank in ranks}
        assert len(counts) == 1, "all ranks take as many passes"
        for rank, batches, most in zip(ranks, taken, plan.sizes, strict=True):
            for _ in rank.share(step).passes:
                batch = next(batches)
                assert smallest <= len(batch) <= most
                seen += batch
    assert seen == epoch_order(size, 1, 0).tolist()[: len(seen)]
    assert size - len(seen) < plan.world_size * smallest * passes
    assert len(seen) == ranks[0].samples_per_epoch


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
def test_shares_are_whole_and_add_up(sizes: list[int], data: st.DataObject) -> None:
    pieces = data.draw(st.integers(1, 3))
    samples = data.draw(st.integers(pieces * len(sizes), pieces * sum(sizes)))
    counts = shared_out(samples, sizes, pieces=pieces)
    assert sum(counts) == samples
    assert all(pieces <= n <= pieces * size for n, size in zip(counts, sizes, strict=True))


# ---------------------------------------------------------------- who is slow, and what to do


def steps(*medians: float, scatter: float = 0.02) -> list[OwnTimes]:
    return [OwnTimes.of([m * (1 - scatter), m, m * (1 + scatter)]) for m in medians]


def test_the_slowest_rank_is_named_with_its_host() -> None:
    found = slowest_rank(steps(0.1, 0.1, 0.1, 0.16), ["a", "a", "b", "b"])
    assert found is not None
    assert found.is_slow
    assert found.text.startswith("rank 3 on host b takes 1.6 times the median of the others")
    even = slowest_rank(steps(0.1, 0.1 * (SLOW_RATIO - 0.05)))
    assert even is not None
    assert not even.is_slow
    assert slowest_rank(steps(0.1)) is None
    assert slowest_rank(steps(0.0, 0.1)) is None


def test_an_excess_within_the_scatter_of_steps_names_nobody() -> None:
    """Bursts of other work hit six of ten steps of rank 1 and four of rank 0."""
    often = [0.2, 0.1, 0.2, 0.1, 0.2, 0.2, 0.1, 0.2, 0.1, 0.2]
    seldom = [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2, 0.1, 0.2, 0.1]
    found = slowest_rank([OwnTimes.of(seldom), OwnTimes.of(often)])
    assert found is not None
    assert (found.rank, found.ratio) == (1, pytest.approx(2.0))
    assert not found.is_slow


def test_a_burst_in_some_looks_names_nobody_and_a_slow_rank_stays_one() -> None:
    quiet, hit = OwnTimes.of([0.1, 0.1]), OwnTimes.of([0.15, 0.15])
    fast = OwnTimes.over([quiet] * 10)
    burst = slowest_rank([fast, OwnTimes.over([hit] * 6 + [quiet] * 4)])
    assert burst is not None
    assert (burst.ratio, burst.is_slow) == (pytest.approx(1.5), False)
    always = slowest_rank([fast, OwnTimes.over([hit] * 9 + [quiet])])
    assert always is not None
    assert always.is_slow


@given(st.integers(0, 10**6), st.sampled_from([2, 4]))
def test_equal_ranks_on_a_busy_machine_are_not_named(seed: int, num_ranks: int) -> None:
    """Steps that other work doubles at random: 4 in 10 of them, on any rank."""
    chance = random.Random(seed)
    ranks = [
        OwnTimes.over(
            OwnTimes.of([0.1 * (1 + (chance.random() < 0.4)) for _ in range(5)]) for _ in range(20)
        )
        for _ in range(num_ranks)
    ]
    found = slowest_rank(ranks)
    assert found is not None
    assert not found.is_slow


def test_one_probe_of_a_layout_accuses_nobody() -> None:
    """Rows of a layout are probes minutes apart: two of them must say the same."""
    table = ProfileTable.from_frame(
        pd.DataFrame({"local_batch_size": [8, 16, 8, 16], "step_time_s": [0.1, 0.2, 0.12, 0.22]}),
        workload=Workload(model="net", dataset="data", dataset_size=640),
        hardware=detect("cpu"),
    )
    one, two, three, four = table.measurements
    said = {"devices_per_node": 2, "slowest_rank": 1}
    three = dataclasses.replace(three, **said, slowest_rank_ratio=1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowRankWarning)
        fit(dataclasses.replace(table, measurements=(one, two, three)))
    four = dataclasses.replace(four, **said, slowest_rank_ratio=1.6)
    with pytest.warns(SlowRankWarning, match=r"rank 1 of 2 takes 1\.6 times the median"):
        fit(dataclasses.replace(table, measurements=(one, two, three, four)))


def test_a_split_follows_speeds_and_rests_within_the_deadband() -> None:
    assert equalised((16, 16), (0.1, 0.3)) == (24, 8)
    assert equalised((16, 16), (0.1, 0.1 * (1 + DEADBAND / 2))) == (16, 16)
    assert equalised((10, 10, 10), (0.1, 0.1, 0.4)) == (14, 13, 3)
    assert equalised((4, 4), (0.01, 1.0), smallest=2) == (6, 2)


@given(
    st.lists(st.tuples(st.floats(0.0, 0.05), st.floats(1e-3, 1e-2)), min_size=2, max_size=6),
    st.integers(8, 64),
)
def test_repeated_adjustments_end_with_equal_times(
    ranks: list[tuple[float, float]], mean: int
) -> None:
    sizes: tuple[int, ...] = (mean,) * len(ranks)

    def times() -> list[float]:
        return [floor + slope * size for (floor, slope), size in zip(ranks, sizes, strict=True)]

    before = max(times())
    for _ in range(12):
        sizes = equalised(sizes, times())
        assert sum(sizes) == mean * len(ranks)
        assert min(sizes) >= 1
    assert max(times()) <= before * (1 + 1e-9) + max(slope for _, slope in ranks)


def test_adjustments_are_spaced_out() -> None:
    balancer, changes = Balancer(), []
    for check in range(40):
        split = balancer.add((16, 16), (0.1, 0.3), 5)
        if split is not None:
            changes.append(check)
            assert split == (24, 8)
    assert changes == [1, 3, 7, 15, 31]


# ---------------------------------------------------------------- real processes


def trained(folder: Path, plan: BatchPlan, **changes: Any) -> tuple[dict[str, Any], TrainResult]:
    """The checkpoint and the result of a training on gloo ranks, more than there are cores."""
    fields: dict[str, Any] = {
        "model": "train_parts:double_net",
        "image_size": 8,
        "dataset_size": 100,
        "learning_rate": 0.1,
        "momentum": 0.0,
        "drop_last": False,
    }
    limits = changes.pop("limits", Limits())
    epochs = changes.pop("epochs", 1)
    folder.mkdir(exist_ok=True)
    request = TrainRequest(
        job=Job(**(fields | changes)),
        plan=plan,
        epochs=epochs,
        output_dir=str(folder),
        schedule=Schedule(scaling="none", warmup_share=0.0, clip_norm=0.0),
        limits=limits,
        device_type="cpu",
    )
    group = RankGroup("mlflow_tula.training.worker", num_ranks=plan.world_size, threads_per_rank=1)
    (group.folder / REQUEST_NAME).write_text(json.dumps(request.to_dict()))
    with group:
        group.wait(120)
        result = TrainResult.from_dict(group.results()[0]["result"])
    return torch.load(folder / "checkpoint.pt", weights_only=True)["state"], result


def update(state: dict[str, Any], start: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(state["model"][name] - start[name]).reshape(-1) for name in sorted(start)])


@pytest.mark.slow
def test_gradients_equal_those_of_one_process_to_1e_6(tmp_path: Path) -> None:
    """100 samples in batches of 32: three whole steps and a last one of 4 samples."""
    import train_parts

    from mlflow_tula.workloads.datasets import build_datasets
    from mlflow_tula.workloads.models import build_model

    job = Job(model="train_parts:double_net", image_size=8, dataset_size=100)
    start = build_model(job, build_datasets(job).num_classes, image_size=8).state_dict()
    assert isinstance(train_parts.double_net(10), torch.nn.Module)
    whole, result = trained(tmp_path / "one", BatchPlan.of(32))
    assert (result.steps, result.samples) == (4, 100)
    expected = update(whole, start)
    plans = [
        BatchPlan.of(32, devices_per_node=2, rank_batch_sizes=(8, 24)),
        BatchPlan.of(32, devices_per_node=2, accumulation_steps=2, rank_batch_sizes=(5, 11)),
        BatchPlan.of(32, devices_per_node=4, accumulation_steps=2, rank_batch_sizes=(1, 2, 6, 7)),
    ]
    for number, plan in enumerate(plans):
        state, result = trained(tmp_path / str(number), plan)
        assert (result.steps, result.samples) == (4, 100)
        error = (update(state, start) - expected).norm() / expected.norm()
        assert error < 1e-6, plan.words


@pytest.mark.slow
def test_a_slow_rank_is_named_and_gets_fewer_samples(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"model": "train_parts:slow_on_one_rank", "dataset_size": 640}
    even = BatchPlan.of(32, devices_per_node=2)
    _, result = trained(tmp_path / "even", even, **shape, limits=Limits(max_steps=20))
    assert result.warnings[0].startswith("rank 1 on host ")
    record = result.history[-1]
    assert record.slowest_rank == 1
    assert 2.0 < (record.slowest_rank_ratio or 0.0) < 4.0
    balanced = BatchPlan.of(32, devices_per_node=2, balance=True)
    state, relieved = trained(
        tmp_path / "auto", balanced, **shape, limits=Limits(max_steps=30), epochs=2
    )
    fast, slow = relieved.rank_batch_sizes
    assert fast + slow == 32
    assert 20 <= fast <= 27
    assert tuple(state["plan"]["rank_batch_sizes"]) == (fast, slow)
    again, resumed = trained(
        tmp_path / "auto", balanced, **shape, limits=Limits(max_steps=32), epochs=2
    )
    assert resumed.resumed_from_step == 30
    assert tuple(again["plan"]["rank_batch_sizes"]) == (fast, slow), "the split is kept"


@pytest.mark.slow
@TWO_RANKS
def test_a_profile_names_the_slow_rank_and_predictions_follow_it() -> None:
    """1 ms a sample on rank 0, 2 ms on rank 1: two ranks take twice as long as one."""
    table = profile(
        "probe_parts:slow_last_rank",
        "probe_parts:blobs",
        batch_sizes=[8, 16, 32, 64],
        world_sizes=[1, 2],
        settings=ProbeSettings(max_steps=8, time_limit_s=1.0),
    )
    pairs = [row for row in table.ok if row.world_size == 2]
    assert len(pairs) == 4
    for row in pairs:
        assert row.slowest_rank == 1
        assert 1.5 < (row.slowest_rank_ratio or 0.0) < 2.5
        assert row.reason.startswith("rank 1 on host ")
    assert all(row.slowest_rank is None for row in table.ok if row.world_size == 1)
    left_out = next(row for row in pairs if row.local_batch_size == 32)
    rest = [row for row in table.measurements if row is not left_out]
    with pytest.warns(SlowRankWarning, match=r"rank 1 of 2 takes \d\.\d times the median"):
        bundle = fit(dataclasses.replace(table, measurements=tuple(rest)))
    frame = pd.DataFrame({"local_batch_size": [32], "devices_per_node": [2]})
    predicted = float(bundle.predict(frame)["step_time_s"].iloc[0])
    assert predicted == pytest.approx(left_out.step_time_s, rel=0.15)
    assert any("follow the slowest rank" in text for text in bundle.report.warnings)
