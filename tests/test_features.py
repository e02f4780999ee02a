"""Static features: counted kernels and bytes against torch's own counters and real runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from mlflow_tula.errors import InvalidInputError, SchemaError
from mlflow_tula.features import extract
from mlflow_tula.model_features import ModelFeatures, OperationGroup
from mlflow_tula.probing.counting import Counting
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.losses import build_loss
from mlflow_tula.workloads.models import build_model, num_parameters
from mlflow_tula.workloads.optimizers import build_optimizer


def tracked_peak(job: Job, batch: int) -> int:
    """What torch's MemTracker sees in the second step at this batch size."""
    model = build_model(job, 10, image_size=32, device="meta").train()
    optimizer = build_optimizer(job, model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    inputs = torch.empty(batch, 3, 32, 32, device="meta")
    target = torch.zeros(batch, dtype=torch.long, device="meta")
    tracker = MemTracker()
    tracker.track_external(model, optimizer, inputs, target)
    with tracker:
        build_loss(job)(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "squeezenet1_1"])
def test_peak_lines_are_memtrackers_peak_at_sizes_that_were_not_run(name: str) -> None:
    features = extract(Job(model=name))
    for batch in (8, 100, 512):
        assert features.peak_bytes(np.array([batch]))[0] == tracked_peak(Job(model=name), batch)


# VGG11, 10 classes, 32x32, SGD with momentum: measured, in MiB, less about 4 of other shape.
def test_memory_of_vgg11_is_what_was_measured() -> None:
    counted = extract(Job(model="vgg11")).peak_bytes(np.array([8, 64, 128, 1024])) / 2**20
    assert counted == pytest.approx([1485, 1533, 1592, 2625], rel=0.005)


def test_flops_are_those_of_torchs_counter() -> None:
    job = Job(model="resnet18")
    features = extract(job)
    model = build_model(job, 10, image_size=32)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(6, 3, 32, 32)).sum().backward()
    counted = sum(
        one.count * (one.flops_fixed + 6 * one.flops_per_sample) for one in features.operations
    )
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_depthwise_gradients_cost_twice_the_forward_pass() -> None:
    features = extract(Job(model="mobilenet_v2"))
    phases = {
        phase: sum(
            one.count * one.flops_per_sample
            for one in features.operations
            if one.kind == "depthwise_convolution" and one.phase == phase
        )
        for phase in ("forward", "backward")
    }
    assert phases["backward"] == pytest.approx(2 * phases["forward"])


def test_activations_and_intensity_are_those_of_the_layers(tmp_path: Path) -> None:
    features = extract(own(tmp_path, "return self.head(x.flatten(1))"))
    # of a sample: 3 x 64 inputs, 10 logits, 10 log-probabilities and the loss's own bytes
    assert 4 * (192 + 10 + 10) <= features.activation_bytes_per_sample <= 4 * 192 + 160
    assert features.arithmetic_intensity > 0
    deep, shallow = extract(Job(model="resnet34")), extract(Job(model="resnet18"))
    assert deep.activation_bytes_per_sample > 1.3 * shallow.activation_bytes_per_sample
    assert dict(deep.layers)["Conv2d"] == 36


def test_optimizer_state_and_precision_count() -> None:
    job = Job(model="squeezenet1_1")
    plain, momentum, adam = (
        extract(job.replace(optimizer=name, momentum=value))
        for name, value in (("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0))
    )
    parameters = 4 * num_parameters(build_model(job, 10, device="meta"))
    assert (plain.optimizer_bytes, momentum.optimizer_bytes) == (0, parameters)
    assert adam.optimizer_bytes > 1.9 * parameters
    at = np.array([512.0])
    assert extract(job.replace(precision="bf16")).peak_bytes(at) < momentum.peak_bytes(at)


def own(folder: Path, body: str) -> Job:
    (folder / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__(); self.head = nn.Linear(3 * 64, num_classes)\n"
        f"    def forward(self, x):\n        {body}\n"
    )
    return Job(model=f"{folder}/net.py:Net", image_size=8)


def test_a_model_that_looks_at_numbers_is_counted_on_small_real_batches(tmp_path: Path) -> None:
    job = own(tmp_path, "return self.head(x.flatten(1)) * float(x.mean())")
    features = extract(job)
    assert features.operations
    assert features.flops_per_sample == pytest.approx(2 * 2 * 3 * 64 * 10, rel=0.01)
    assert features.problem.startswith("meta: ")


def test_kernels_that_differ_from_batch_to_batch_become_sums_by_kind(tmp_path: Path) -> None:
    job = own(tmp_path, "return sum(self.head(one.flatten()) for one in x).expand(len(x), -1)")
    features = extract(job)
    assert "differ from batch to batch" in features.problem
    assert features.operations


def test_a_model_that_cannot_run_leaves_the_facts_that_can_be_had(tmp_path: Path) -> None:
    features = extract(own(tmp_path, "raise RuntimeError('not today')"))
    assert features.operations == ()
    assert features.parameter_bytes == 4 * (3 * 64 * 10 + 10)
    assert "not today" in features.problem
    assert np.isnan(features.peak_bytes(np.array([8]))[0])


def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def make(num_classes):\n    raise ValueError('no')\n")
    with pytest.raises(InvalidInputError, match="failed when called"):
        extract(Job(model=f"{tmp_path}/net.py:make", image_size=8))


def test_features_round_trip_and_refuse_damage() -> None:
    features = extract(Job(model="squeezenet1_1"))
    again = ModelFeatures.from_dict(json.loads(json.dumps(features.to_dict())))
    assert again == features
    with pytest.raises(InvalidInputError, match="operation kind"):
        OperationGroup(kind="magic", phase="forward", count=1)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="must be pairs"):
        ModelFeatures.from_dict({"peak_lines": [[1.0]]})
    with pytest.raises(SchemaError, match="operations of model features must be a list"):
        ModelFeatures.from_dict({"operations": "many"})


def test_counting_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    counting = Counting(Job(model="squeezenet1_1"))
    assert counting.result() == extract(Job(model="squeezenet1_1"))
    assert Counting(own(tmp_path, "raise SystemExit(3)")).result() is None
