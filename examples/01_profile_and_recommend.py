"""Your own model and data: profile, fit, register, recommend, in plain Python.

    python examples/01_profile_and_recommend.py

Takes about a minute on two CPU cores. The functions that build the model, the data, the loss and
the optimizer stand at the top level of the file, because the probes run in child processes that
import them; the rest stands behind `if __name__ == "__main__"`.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import mlflow_tula as tula
from mlflow_tula.profiler import ProfileEvent, profile


def make_model() -> nn.Module:
    """A small convolutional network for 8x8 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128 * 16, 10),
    )


def make_dataset() -> Dataset[tuple[torch.Tensor, ...]]:
    """1,797 real handwritten digits that ship with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target))


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the training uses; its state counts in memory."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def say(event: ProfileEvent) -> None:
    """One line a finished probe."""
    row = event.measurement
    if event.kind == "probe_finished" and row is not None:
        step = f"{row.step_time_s * 1e3:.1f} ms a step" if row.step_time_s else row.reason
        print(f"batch {row.local_batch_size:4d} on {row.world_size} ranks: {step}")


def main() -> None:
    """Measure, fit, register and ask."""
    table = profile(
        model_fn=make_model,
        dataset=make_dataset,
        loss_fn=nn.functional.cross_entropy,
        optimizer_fn=make_optimizer,
        time_budget_s=45,
        on_event=say,
    )
    bundle = tula.fit(table)
    print(bundle.report, end="\n\n")

    # Registering needs MLflow; fitting and recommending do not.
    from mlflow_tula.registry import register

    registered = register(bundle, table=table)
    print(f"registered {registered.uri}\n")

    devices = table.hardware.devices_per_node
    clusters = [tula.ClusterSpec(devices_per_node=count) for count in sorted({1, devices})]
    print(tula.recommend(bundle, cluster=clusters, objective="knee", epochs=20))


if __name__ == "__main__":
    main()
