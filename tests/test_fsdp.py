"""FSDP: one training whatever the strategy, memory and communication predicted and measured."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_uneven import trained
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.fit import fit
from mlflow_tula.predictors import memory_formulas as formulas
from mlflow_tula.predictors.memory import MemoryPredictor
from mlflow_tula.predictors.step_time import StepTimePredictor
from mlflow_tula.predictors.step_time import fit as fit_step_time
from mlflow_tula.predictors.sync_formulas import sync_time
from mlflow_tula.probes import Probe
from mlflow_tula.probing.session import ProbeSession
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.profiler import profile
from mlflow_tula.recommend import recommend
from mlflow_tula.specs import ClusterSpec, HardwareSpec, Workload
from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable
from mlflow_tula.train import BatchPlan, Limits, train
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.parallel import BLOCK_SHARE, blocks, largest_block

HARDWARE = HardwareSpec(
    device_type="cuda", device_name="GPU", device_memory_bytes=10**10, devices_per_node=8
)
P, BLOCK = 10_000_000, 1_000_000


def workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "model": "m",
        "dataset": "d",
        "dataset_size": 10_000,
        "strategy": "fsdp",
        "num_parameters": P,
        "block_parameters": BLOCK,
        "num_blocks": 12,
    }
    return Workload(**(fields | changes))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["deepspeed", "DeepSpeed", "zero3", "zero-2"])
def test_deepspeed_is_refused_with_what_to_use(name: str) -> None:
    words = r"DeepSpeed is not supported: --strategy fsdp shards parameters, gradients and"
    with pytest.raises(UnknownNameError, match=words) as caught:
        Job(model="vgg11", strategy=name)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_automatic_uneven_batches_need_ddp(tmp_path: Path) -> None:
    plan = BatchPlan.of(8, balance=True)
    with pytest.raises(InvalidInputError, match="cannot be found automatically"):
        train(Job(model="vgg11", strategy="fsdp"), plan, epochs=1, output_dir=tmp_path)


@pytest.mark.parametrize("way", [{"gradient_compression": "bf16"}, {"bucket_mb": 5}])
def test_ways_to_send_gradients_are_those_of_ddp(way: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="say how DDP sends gradients, and strategy 'fsdp'"):
        Job(model="vgg11", strategy="fsdp", **way)


def test_a_profile_of_compression_needs_ddp() -> None:
    with pytest.raises(InvalidInputError, match="gathers and scatters blocks: leave them out"):
        profile(
            job=Job(model="vgg11", strategy="fsdp"),
            batch_sizes=[8],
            gradient_compression=(None, "bf16"),
        )


def test_a_prediction_of_compression_needs_ddp_and_fsdp_gets_no_such_advice() -> None:
    rows = [(batch, 1, 1, 0.1 * batch / 32) for batch in (16, 32, 64)]
    rows += [(batch, 2, 1, 0.1 * batch / 32 + 0.1) for batch in (16, 32, 64)]
    bundle = fit(step_table(rows, "fsdp"))
    asked = pd.DataFrame({"local_batch_size": [32], "devices_per_node": [2]})
    with pytest.raises(InvalidInputError, match="measured with strategy fsdp: leave them out"):
        bundle.predict(asked, gradient_compression="bf16")
    cluster = ClusterSpec(devices_per_node=2)
    assert recommend(bundle, cluster=cluster, candidates=[64]).advice == ()
    copied = fit(step_table(rows, "ddp"))
    assert recommend(copied, cluster=cluster, candidates=[64]).advice != ()


# ---------------------------------------------------------------- blocks


def test_blocks_are_small_parts_of_the_model_and_what_is_tied_stays_whole() -> None:
    layers = [nn.Linear(64, 64) for _ in range(16)]
    model = nn.Sequential(*layers)
    assert len(blocks(model)) == 16
    assert largest_block(model) == 64 * 64 + 64
    layers[3].weight = layers[5].weight
    assert not {layers[3], layers[5]} & set(blocks(model))
    wide = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1000)]))
    assert [type(block) for block in blocks(wide)] == [nn.Linear, nn.Linear]
    assert 0 < BLOCK_SHARE < 1


def test_attention_is_never_cut() -> None:
    attention = nn.MultiheadAttention(16, 2)
    assert attention in blocks(nn.Sequential(attention, nn.Linear(2, 2)))


# ---------------------------------------------------------------- equations


@pytest.mark.parametrize(
    ("optimizer", "variant", "numbers"),
    [("sgd", "", 3), ("sgd", "no-momentum", 2), ("adamw", "", 4)],
)
def test_what_ranks_share(optimizer: str, variant: str, numbers: int) -> None:
    assert workload(optimizer=optimizer, variant=variant).sharded_bytes == 4 * P * numbers
    assert workload(optimizer=optimizer, strategy="ddp").sharded_bytes == 0


def memory_table(rows: list[tuple[int, int, int]], **changes: Any) -> ProfileTable:
    return ProfileTable(
        workload=workload(**changes),
        hardware=HARDWARE,
        measurements=tuple(
            Measurement(
                local_batch_size=batch,
                devices_per_node=ranks,
                step_time_s=0.1,
                peak_memory_bytes=peak,
            )
            for batch, ranks, peak in rows
        ),
    )


def peaks(predictor: MemoryPredictor, batch: int, ranks: list[int]) -> np.ndarray:
    sizes = np.full(len(ranks), float(batch))
    return formulas.peak_memory(predictor.to_dict(), sizes, np.array(ranks, float))[0]


def test_peak_memory_is_shared_by_the_ranks_but_for_the_largest_block() -> None:
    """Of one rank: 3 numbers a parameter and 1 MB a sample."""
    rows = [(batch, 1, 12 * P + batch * 10**6) for batch in (32, 64, 128)]
    predictor = MemoryPredictor.fit(memory_table(rows))
    found = peaks(predictor, 64, [1, 2, 4, 8])
    expected = [12 * P / n + 64 * 10**6 + 8 * BLOCK * (n > 1) for n in (1, 2, 4, 8)]
    assert found == pytest.approx(expected, rel=1e-6)
    again = MemoryPredictor.from_dict(predictor.to_dict())
    assert again == predictor


def test_a_measured_block_replaces_the_counted_one() -> None:
    rows = [(batch, 1, 12 * P + batch * 10**6) for batch in (32, 64, 128)]
    rows += [(64, 2, 6 * P + 64 * 10**6 + 5 * BLOCK)]
    predictor = MemoryPredictor.fit(memory_table(rows))
    assert peaks(predictor, 128, [4])[0] == pytest.approx(3 * P + 128 * 10**6 + 5 * BLOCK, rel=1e-3)


def test_what_ran_out_on_fewer_ranks_may_fit_on_more() -> None:
    rows = [(32, 1, 12 * P), (32, 2, 6 * P), (32, 4, 3 * P)]
    table = memory_table(rows).with_rows(
        [Measurement(local_batch_size=64, devices_per_node=1, status="oom", reason="no room")]
    )
    predictor = MemoryPredictor.fit(table)
    fits, reason = formulas.feasible(
        predictor.to_dict(), np.array([64.0, 64.0, 32.0]), np.array([1, 4, 8])
    )
    assert not fits[0]
    assert reason[0] == "ran out of memory when measured"
    assert "ran out" not in reason[1]
    assert fits[2], "it ran on four"


def step_table(rows: list[tuple[int, int, int, float]], strategy: str) -> ProfileTable:
    return ProfileTable(
        workload=workload(strategy=strategy),
        hardware=HARDWARE,
        measurements=tuple(
            Measurement(
                local_batch_size=batch,
                devices_per_node=ranks,
                accumulation_steps=steps,
                step_time_s=seconds,
            )
            for batch, ranks, steps, seconds in rows
        ),
    )


def step_time(predictor: StepTimePredictor, batch: int, ranks: int, steps: int) -> float:
    from mlflow_tula.predictors import step_time_formulas

    ones = np.ones(1)
    value, _, _ = step_time_formulas.step_time(
        predictor.params, batch * ones, ones, ranks * ones, steps * ones
    )
    return float(value[0])


def test_each_pass_communicates() -> None:
    """0.1 s of compute and 0.1 s of communication: four passes of FSDP take four times as long."""
    rows = [(batch, 1, 1, 0.1 * batch / 32) for batch in (16, 32, 64)]
    rows += [(batch, 2, 1, 0.1 * batch / 32 + 0.1) for batch in (16, 32, 64)]
    sharded = fit_step_time(step_table(rows, "fsdp"))
    copied = fit_step_time(step_table(rows, "ddp"))
    assert step_time(sharded, 32, 2, 4) == pytest.approx(0.8, rel=0.1)
    assert step_time(copied, 32, 2, 4) == pytest.approx(0.5, rel=0.1)


def test_the_backend_decides_what_sharding_sends() -> None:
    """gloo scatters by an all-reduce, and gathers slowly between two: 2 or 2.5, not 1.5 of them."""
    table = step_table([(batch, 1, 1, 0.1 * batch / 32) for batch in (16, 32, 64)], "fsdp")
    link = LinkMeasurement(
        scope="inter_node", nodes=2, devices_per_node=1, message_bytes=4 * P, time_s=1.0
    )
    links = (link, dataclasses.replace(link, message_bytes=8 * P, time_s=2.0))

    def sync(backend: str, strategy: str = "fsdp") -> list[float]:
        """Seconds of communication on 2 and 4 nodes, in all-reduces of two."""
        mine = dataclasses.replace(
            table,
            links=links,
            workload=workload(strategy=strategy),
            hardware=dataclasses.replace(HARDWARE, backend=backend),
        )
        tier = fit_step_time(mine).params["inter_node"]
        nodes = np.array([2.0, 4.0])
        return sync_time(tier, nodes, np.ones(2))[0].tolist()

    assert sync("nccl") == pytest.approx([1.5, 2.25], rel=1e-6)
    assert sync("gloo") == pytest.approx([2.5, 3.0], rel=1e-6)
    assert sync("gloo", "ddp") == pytest.approx([1.0, 1.5], rel=1e-6)


# ---------------------------------------------------------------- real ranks


def weights(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat([state["model"][name].reshape(-1) for name in sorted(state["model"])])


@pytest.mark.slow
def test_fsdp_trains_as_one_process_does_and_resumes(tmp_path: Path) -> None:
    """Momentum, accumulation, uneven batches, a last partial batch, a checkpoint between."""
    shape: dict[str, Any] = {"momentum": 0.9, "epochs": 2}
    alone, _ = trained(tmp_path / "one", BatchPlan.of(32), **shape)
    plan = BatchPlan.of(32, devices_per_node=2, accumulation_steps=2, rank_batch_sizes=(5, 11))
    folder = tmp_path / "two"
    trained(folder, plan, strategy="fsdp", limits=Limits(max_steps=5), **shape)
    state, result = trained(folder, plan, strategy="fsdp", **shape)
    assert (result.resumed_from_step, result.steps) == (5, 8)
    error = (weights(state) - weights(alone)).norm() / weights(alone).norm()
    assert error < 1e-6
    # the same checkpoint on another number of ranks
    trained(folder, BatchPlan.of(32), strategy="fsdp", momentum=0.9, epochs=2)


@pytest.mark.slow
def test_measured_memory_of_two_and_four_ranks_is_as_predicted() -> None:
    """Allocated bytes of ResNet18 at batch 8: predicted from one rank alone."""
    from mlflow_tula.workloads.describe import describe

    job = Job(model="resnet18", strategy="fsdp", dataset_size=256)
    found: dict[int, int] = {}
    for ranks in (1, 2, 4):
        settings = ProbeSettings(max_steps=3, time_limit_s=0.5)
        session = ProbeSession(
            job, world_size=ranks, device_type="cpu", settings=settings, threads_per_rank=1
        )
        with session:
            answer = session.probe(Probe(local_batch_size=8, devices_per_node=ranks), timeout_s=200)
        found[ranks] = answer["allocated_memory_bytes"]
        assert answer["sync_time_s"] is None or ranks == 1
    table = dataclasses.replace(memory_table([(8, 1, found[1])]), workload=describe(job))
    predicted = peaks(MemoryPredictor.fit(table), 8, [2, 4])
    assert predicted == pytest.approx([found[2], found[4]], rel=0.2)
    assert re.search("fsdp", table.workload.slug)
