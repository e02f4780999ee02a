"""Public complaints about batch sizes, their parts and last batches, named after their threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fake_device import GB, FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_parts import own_job, training_steps

import mlflow_tula as tula
from mlflow_tula.batches import check_global_batch_size
from mlflow_tula.cli.train import make_plan
from mlflow_tula.errors import InvalidInputError, NotRegisteredError
from mlflow_tula.hardware import detect
from mlflow_tula.probing.memory import CpuMeter
from mlflow_tula.probing.own import load_datasets
from mlflow_tula.probing.probe import run_probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.profiler import profile
from mlflow_tula.train import BatchPlan, Limits, Schedule, TrainResult, saved_plan
from mlflow_tula.training.checkpoint import load_checkpoint
from mlflow_tula.training.facts import TrainRequest
from mlflow_tula.training.loop import TrainLoop
from mlflow_tula.training.peers import Peers
from mlflow_tula.training.sharding import ShardedBatches
from mlflow_tula.training.worker import set_up
from mlflow_tula.workloads.job import Job

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")
SIZES = [8, 16, 32, 64]


def make_bundle(patch: pytest.MonkeyPatch, **device: Any) -> tula.PredictorBundle:
    FakeDevice(**{"capacity_bytes": 8 * GB, **device}).install(patch)
    table = profile(job=Job(model="vgg11"), batch_sizes=SIZES, world_sizes=[1, 2])
    return tula.fit(table)


def train_here(
    folder: Path, plan: BatchPlan, *, max_steps: int | None = None, **changes: Any
) -> TrainResult:
    """One rank of a training in this process, resumed where the folder has a checkpoint."""
    fields = {"model": "train_parts:small_net", "image_size": 8, "dataset_size": 400}
    request = TrainRequest(
        job=Job(**(fields | changes)),
        plan=plan,
        epochs=2,
        output_dir=str(folder),
        schedule=Schedule(),
        limits=Limits(max_steps=max_steps),
        device_type="cpu",
    )
    folder.mkdir(exist_ok=True)
    peers = Peers(rank=0, world_size=1, device=torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        setup = set_up(request, peers)
        loop = TrainLoop(setup, peers=peers, emit=lambda event: None)
        state = load_checkpoint(folder, identity=setup.identity)
        if state is not None:
            loop.resume(state)
        result = loop.run()
    assert result is not None
    return result


# --- a last batch of one


def test_pytorch_7716_fastai_1352_a_probe_meets_no_batch_of_one() -> None:
    """33 samples in batches of 16 leave one, on which batch norm fails in training."""
    job = own_job("norm_net", "thirty_three")
    settings = ProbeSettings(max_steps=6)
    facts = run_probe(
        lambda: training_steps(job), CpuMeter(), settings, local_batch_size=16, world_size=1
    )
    assert facts["optimizer_steps"] >= 6, "three epochs, and their ends"


@pytest.mark.parametrize("drop_last", [True, False])
def test_pytorch_7716_fastai_1352_training_meets_none(tmp_path: Path, drop_last: bool) -> None:
    """The same in a training: the single sample is left out, and the rest is trained on."""
    size = next(size for size in range(10, 200) if _train_size() % size == 1)
    result = train_here(tmp_path, BatchPlan.of(size), drop_last=drop_last)
    assert result.steps == 2 * (_train_size() // size)
    assert result.samples == result.steps * size


def _train_size() -> int:
    job = Job(model="train_parts:small_net", image_size=8, dataset_size=400)
    return load_datasets(job, whole=False).train_size


def test_pytorch_7716_fastai_1352_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recommended size that leaves a batch of one, or is one, comes with a warning."""
    bundle = make_bundle(monkeypatch, dataset_size=1025)
    cluster = tula.ClusterSpec()
    single = tula.recommend(bundle, cluster=cluster, candidates=[1])
    assert any("local batch of 1 breaks batch norm" in text for text in single.warnings)
    loose = replace(bundle, workload=replace(bundle.workload, drop_last=False))
    odd = tula.recommend(loose, cluster=cluster, candidates=[64])
    assert any("last batch of an epoch holds one sample" in text for text in odd.warnings)
    even = tula.recommend(loose, cluster=cluster, candidates=[40])
    assert not any("one sample" in text for text in even.warnings)
    with pytest.raises(InvalidInputError, match="at least 2 for a model with batch norm"):
        ShardedBatches(100, BatchPlan.of(2, devices_per_node=2), smallest=2)


# --- resuming


def test_transformers_25956_pr43718_a_resumed_run_keeps_its_batch(
    tmp_path: Path, store: Path
) -> None:
    """Resumed with another batch size, steps were counted anew and the run ended at once."""
    whole = train_here(tmp_path / "whole", BatchPlan.of(32))
    part = train_here(tmp_path / "cut", BatchPlan.of(32), max_steps=5)
    assert (part.steps, part.samples) == (5, 160)
    rest = train_here(tmp_path / "cut", BatchPlan.of(32))
    assert rest.resumed_from_step == 5
    assert (rest.steps, rest.samples) == (whole.steps, whole.samples)
    assert rest.samples == 2 * (whole.samples // 2) == rest.steps * 32
    folder = tmp_path / "decided"
    folder.mkdir()
    plan = BatchPlan.of(48, accumulation_steps=3, source="a registered predictor, version 3")
    document = {
        "kind": "tula.training_decision",
        "schema_version": 1,
        "plan": plan.to_dict(),
        "identity": {"plan": {"global_batch_size": 48}},
    }
    (folder / "decision.json").write_text(json.dumps(document))
    values: dict[str, Any] = {"batch_size": None, "devices": None, "resume": True}
    values |= {"uneven_batches": None, "num_nodes": 1}
    job = Job(model="vgg11")
    assert saved_plan(folder) == make_plan(values, job, detect("cpu"), folder) == plan
    anew = {**values, "resume": False, "bundle": None, "device": "cpu", "hardware": None}
    anew |= {"objective": "knee", "budget": None, "deadline": None, "tracking_uri": None}
    anew |= {"price_per_device_hour": None, "price_per_gb_hour": None, "alias": "champion"}
    anew |= {"model": "vgg11", "epochs": None}
    with pytest.raises(NotRegisteredError, match="nothing is registered for vgg11"):
        make_plan(anew, job, detect("cpu"), folder)


# --- local x accumulation x world size == global


def test_euroeval_22_transformers_pr33281_the_global_batch_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch was halved to fit and the accumulation not doubled."""
    bundle = make_bundle(monkeypatch)
    clusters = [tula.ClusterSpec(), tula.ClusterSpec(devices_per_node=2)]
    asked = [16, 64, 128, 256]
    for limit in (2 * GB, 3 * GB, 5 * GB, 8 * GB):
        choice = tula.recommend(
            bundle, cluster=clusters, candidates=asked, memory_limit_bytes=limit
        )
        accumulated = [point for point in choice.curve if point.accumulation_steps > 1]
        assert accumulated or limit == 8 * GB
        for point in (*choice.curve, choice):
            product = point.local_batch_size * point.accumulation_steps
            assert product * point.nodes * point.devices_per_node == point.global_batch_size
            assert point.global_batch_size in asked


@given(local=st.integers(1, 64), steps=st.integers(1, 16), world=st.integers(1, 16))
@settings(deadline=None)
def test_euroeval_22_a_plan_multiplies_out_or_is_none(local: int, steps: int, world: int) -> None:
    size = local * steps * world
    plan = BatchPlan.of(size, devices_per_node=world, accumulation_steps=steps)
    assert plan.local_batch_size == local
    with pytest.raises(InvalidInputError, match=r" = \d+, not \d+"):
        BatchPlan(
            global_batch_size=size + 1,
            local_batch_size=local,
            accumulation_steps=steps,
            nodes=1,
            devices_per_node=world,
        )


def test_yolov5_pr6568_5316_catalyst_1023_two_names_and_no_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is 16 for all devices or for each? And 30 on 4 devices was rounded in silence."""
    bundle = make_bundle(monkeypatch, devices=4)
    nearest = "world size 4, not 30; the nearest valid sizes are 28 and 32"
    four = {"devices_per_node": [4]}
    with pytest.raises(InvalidInputError, match=nearest):
        check_global_batch_size(30, world_size=4)
    with pytest.raises(InvalidInputError, match="nearest valid sizes are 28 and 32"):
        bundle.predict(pd.DataFrame({"global_batch_size": [30], **four}))
    cluster = tula.ClusterSpec(devices_per_node=4)
    with pytest.raises(InvalidInputError, match=nearest):
        tula.recommend(bundle, cluster=cluster, candidates=[30])
    with pytest.raises(InvalidInputError, match="28 and 32"):
        BatchPlan.of(30, devices_per_node=4)
    each = bundle.predict(pd.DataFrame({"local_batch_size": [16], **four}))
    together = bundle.predict(pd.DataFrame({"global_batch_size": [64], **four}))
    pd.testing.assert_frame_equal(each, together)
    with pytest.raises(InvalidInputError, match="exactly one of the columns"):
        bundle.predict(pd.DataFrame({"global_batch_size": [64], "local_batch_size": [16], **four}))
    with pytest.raises(InvalidInputError, match="batch_size"):
        bundle.predict(pd.DataFrame({"batch_size": [16], **four}))


# --- strategies


@pytest.mark.parametrize("strategy", ["deepspeed", "zero3"])
def test_transformers_pr29058_unsupported_strategy(strategy: str) -> None:
    """An immediate error that names it, and what to use instead."""
    with pytest.raises(InvalidInputError, match="fsdp"):
        Job(model="vgg11", strategy=strategy)  # type: ignore[arg-type]


def test_transformers_pr29058_unknown_strategy() -> None:
    with pytest.raises(InvalidInputError, match="unknown strategy 'zero4'"):
        Job(model="vgg11", strategy="zero4")  # type: ignore[arg-type]
