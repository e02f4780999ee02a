"""Models, data and losses of one's own for the profiler's tests; child processes import them.

Failures are injected here, by batch size and rank, and never by hooks in the package.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from mlflow_tula.probing.clock import DeviceClock, HostClock
from mlflow_tula.probing.own import load_datasets
from mlflow_tula.probing.steps import TrainingSteps
from mlflow_tula.workloads.job import Job

COUNT_FOLDER = "TULA_TEST_COUNTS"


def blobs(num: int = 400) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num) % 4
    return TensorDataset(torch.randn(num, 8, generator=generator) + labels[:, None], labels)


def hundred() -> TensorDataset:
    return blobs(100)


def thirty_three() -> TensorDataset:
    return blobs(33)


class SlowBlobs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self._data = blobs(64)
        self.targets = self._data.tensors[1]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.005)
        return self._data[index]


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class CountingNet(nn.Module):
    """Counts its training and evaluation passes in a file for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.net(inputs)
        _count("train" if self.training else "evaluate", len(inputs))
        if self.training:
            out.register_hook(lambda gradient: _count("backward", len(gradient)))
        return out


class CountingSGD(torch.optim.SGD):
    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, lr=0.01, momentum=0.9)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        _count("optimizer", 0)


def _count(what: str, size: int) -> None:
    folder = os.environ.get(COUNT_FOLDER)
    if folder:
        with (Path(folder) / f"rank{os.environ['RANK']}.txt").open("a") as file:
            file.write(f"{what} {size}\n")


class FailingNet(nn.Module):
    """Does `how` on `rank` when a batch of at least `at_batch` samples comes."""

    def __init__(self, how: str, *, rank: int, at_batch: int) -> None:
        super().__init__()
        self.net = small_net()
        self.how, self.rank, self.at_batch = how, rank, at_batch

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) >= self.at_batch and int(os.environ.get("RANK", "0")) == self.rank:
            if self.how == "raise_oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if self.how == "raise":
                raise ValueError("wrong shape of moon")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(3600)
        return self.net(inputs)


def oom_on_rank_1() -> nn.Module:
    return FailingNet("raise_oom", rank=1, at_batch=16)


def killed_on_rank_1() -> nn.Module:
    return FailingNet("kill", rank=1, at_batch=16)


def raises_on_rank_0() -> nn.Module:
    return FailingNet("raise", rank=0, at_batch=16)


def oom_from_4() -> nn.Module:
    return FailingNet("raise_oom", rank=0, at_batch=4)


def always_oom() -> nn.Module:
    return FailingNet("raise_oom", rank=0, at_batch=1)


class GreedyNet(nn.Module):
    """Allocates 1 MB a sample for real."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, inputs: Tensor) -> Tensor:
        ballast = torch.ones(len(inputs), 250_000)
        return self.net(inputs) + 0.0 * ballast.mean()


class _GreedyEvaluation(nn.Module):
    """Takes 1 MB a sample, and only where validation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return self.net(inputs)
        return self.net(inputs) + 0.0 * torch.ones(len(inputs), 250_000).mean()


def greedy_evaluation() -> nn.Module:
    return _GreedyEvaluation()


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


class OnlyAt16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Workspace of 2.00 GiB")
        return self.net(inputs)


def oom_only_at_16() -> nn.Module:
    return OnlyAt16()


def hangs_on_rank_1() -> nn.Module:
    return FailingNet("hang", rank=1, at_batch=16)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output**2).mean()


def exploding(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e30)


def own_job(model: str, dataset: str = "blobs", **more: str) -> Job:
    """A job of what is in this module."""
    names = {"model": model, "dataset": dataset, **more}
    return Job(**{name: f"{__name__}:{value}" for name, value in names.items()})


def training_steps(
    job: Job,
    size: int = 16,
    *,
    accumulation_steps: int = 1,
    clock: DeviceClock | None = None,
) -> TrainingSteps:
    """What a rank trains in a probe, in this process alone."""
    data = load_datasets(job, whole=True)
    return TrainingSteps(
        job,
        data.train,
        data.num_classes,
        None,
        local_batch_size=size,
        accumulation_steps=accumulation_steps,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        clock=clock or HostClock(),
    )


class SlowRank(nn.Module):
    """Takes 1 ms a sample, and twice as much on the last of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        self.last = world > 1 and int(os.environ.get("RANK", "0")) == world - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.001 * len(x) * (2 if self.last else 1))
        output: Tensor = self.inner(x)
        return output


def slow_last_rank() -> nn.Module:
    return SlowRank()
