"""Your own training loop, observed by one line; then predictors from the runs it left behind.

    python examples/02_autolog_your_loop.py

Takes less than 30 s on two CPU cores: a small network learns scikit-learn's digits five times, with
five batch sizes. No profiling run: what was logged on the way is enough to ask which batch to take.
"""

from __future__ import annotations

import mlflow
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mlflow_tula as tula


def digits() -> TensorDataset:
    """1,797 real handwritten digits that ship with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target))


def train(batch_size: int, epochs: int = 2) -> float:
    """A plain torch loop: nothing in it knows of MLflow or tula. Returns the last loss."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = torch.tensor(0.0)
    for _ in range(epochs):
        for images, labels in DataLoader(digits(), batch_size=batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Observe, fit, ask."""
    tula.autolog(model="digits-cnn", dataset="digits-8px")  # the one line

    for batch_size in (16, 32, 64, 128, 256):
        with mlflow.start_run(run_name=f"batch {batch_size}") as run:
            train(batch_size)
        metrics = mlflow.get_run(run.info.run_id).data.metrics
        print(
            f"batch {batch_size:4d}: {metrics['step_time_s'] * 1e3:6.2f} ms a step, "
            f"{metrics['throughput']:8,.0f} samples/s, noise scale "
            f"{metrics.get('noise_scale', float('nan')):.0f}"
        )

    # The same on the command line:  tula fit --runs "tags.\"tula.model\" = 'digits-cnn'"
    from mlflow_tula.tracking.observed_runs import read_observed_runs

    observed = read_observed_runs("tags.\"tula.model\" = 'digits-cnn'")
    print(f"\n{observed.runs_used} runs of {observed.table.workload.slug}")
    bundle = tula.fit(observed.table)
    print(tula.recommend(bundle, cluster=tula.ClusterSpec(), epochs=20))


if __name__ == "__main__":
    main()
