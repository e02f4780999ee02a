"""One optimizer step in timed parts.

    |-- data --|-- forward + backward (+ all-reduce) --|  norm  |-- optimizer --|

data       wait for the loader and the copy to the device, host clock
optimizer  unscale, step, zero_grad
norm       norm of the averaged gradient: outside the timed parts
sync       what the all-reduce adds: the second part less the same passes under `no_sync`

The step time is the sum of the timed parts, with a device synchronize at the end of each step.
With accumulation the data and pass parts of all passes add up and only the last one reduces.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from mlflow_tula.gradients import gradient_norm
from mlflow_tula.probing.clock import DeviceClock
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.loaders import build_loader, start_epoch
from mlflow_tula.workloads.losses import build_loss
from mlflow_tula.workloads.models import AUTOCAST, build_model
from mlflow_tula.workloads.optimizers import build_optimizer
from mlflow_tula.workloads.parallel import (
    GradientWait,
    compress_gradients,
    ddp_options,
    is_sharded,
    replicate,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of one step on this rank, and what else was read of it."""

    data_s: float
    passes_s: float
    optimizer_s: float
    gradient_norm: float
    cpu_s: float
    forward_s: float = 0.0
    """Part of `passes_s`: nothing is synchronised in it."""
    wait_s: float | None = None
    """Part of `passes_s` that waits for the other ranks; None where that cannot be told."""

    @property
    def step_s(self) -> float:
        """All timed parts."""
        return self.data_s + self.passes_s + self.optimizer_s

    @property
    def own_s(self) -> float | None:
        """All timed parts but the wait for other ranks."""
        return None if self.wait_s is None else max(self.step_s - self.wait_s, 0.0)


class Batches:
    """Full batches without end, moved to the device; partial last batches are skipped."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        """Start at epoch 0."""
        self._loader = loader
        self._device = device
        self._epoch = 0
        self._size = cast(int, loader.batch_size)
        self._iterator = self._restart()

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Itself."""
        return self

    def __next__(self) -> tuple[Any, Tensor]:
        """The next full batch."""
        for _ in range(len(self._loader) + 1):
            try:
                inputs, targets = next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._iterator = self._restart()
                continue
            if len(cast(Sized, targets)) == self._size:
                return _to_device(inputs, self._device), _to_device(targets, self._device)
        raise RuntimeError(f"the dataset gives no full batch of {self._size} samples per rank")

    def _restart(self) -> Iterator[Any]:
        start_epoch(self._loader, self._epoch)
        return iter(self._loader)


class TrainingSteps:
    """Model, loss, optimizer and data of one probe on one rank, and its steps."""

    def __init__(
        self,
        job: Job,
        train: Dataset[Any],
        num_classes: int,
        image_size: int | None,
        *,
        local_batch_size: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
        device: torch.device,
        clock: DeviceClock,
    ) -> None:
        """Build everything anew: nothing of an earlier probe is left in it."""
        self.world_size = world_size
        self.accumulation_steps = accumulation_steps
        self.module = build_model(job, num_classes, image_size=image_size).to(device).train()
        self.model: nn.Module = self.module
        if world_size > 1:
            self.model = replicate(
                self.module,
                strategy=job.strategy,
                world_size=world_size,
                device=device,
                **ddp_options(job),
            )
            compress_gradients(self.model, job)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.loss = build_loss(job)
        self.optimizer: torch.optim.Optimizer = build_optimizer(job, self.parameters)
        loader = build_loader(
            job,
            train,
            local_batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=True,
            drop_last=False,
            pin_memory=device.type == "cuda",
        )
        self.batches = Batches(loader, device)
        self._device, self._clock = device, clock
        self._wait = GradientWait(clock.mark)
        self.is_sharded = is_sharded(self.module)
        self._autocast = AUTOCAST.get(job.precision)
        self._scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")

    def step(self) -> StepTimes:
        """One optimizer step: real data, forward, backward, all-reduce and update."""
        data_s = cpu_s = 0.0
        marks: list[tuple[Any, Any, Any]] = []
        for number in range(self.accumulation_steps):
            batch, waited = self._next_batch()
            data_s += waited
            last = number == self.accumulation_steps - 1
            cpu = time.process_time()
            start = self._clock.mark()
            with contextlib.nullcontext() if last else self._no_sync():
                between = self._backward(*batch)
            marks.append((start, between, self._clock.mark()))
            cpu_s += time.process_time() - cpu
        norm = gradient_norm(self.parameters, scale=self._scaler.get_scale())
        cpu = time.process_time()
        start = self._clock.mark()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        end = self._clock.mark()
        cpu_s += time.process_time() - cpu
        self._clock.synchronize()
        waiting = self._wait.begin
        return StepTimes(
            wait_s=None if waiting is None else self._clock.seconds(waiting, marks[-1][2]),
            data_s=data_s,
            passes_s=sum(self._clock.seconds(first, end) for first, _, end in marks),
            forward_s=sum(self._clock.seconds(first, between) for first, between, _ in marks),
            optimizer_s=self._clock.seconds(start, end),
            gradient_norm=norm,
            cpu_s=cpu_s,
        )

    def evaluate(self) -> None:
        """One forward pass as validation runs it: its memory counts too."""
        inputs, _ = next(self.batches)
        self.module.eval()
        with torch.no_grad(), self._precision():
            self.module(inputs)
        self.module.train()

    def local_passes(self) -> tuple[float, float, float]:
        """The passes of one step without all-reduce, then the average by hand, no update.

        Returns:
            Seconds of the passes, norm of this rank's own gradient, norm of the averaged one.
        """
        marks: list[tuple[Any, Any]] = []
        for _ in range(self.accumulation_steps):
            batch, _ = self._next_batch()
            start = self._clock.mark()
            with self._no_sync():
                self._backward(*batch)
            marks.append((start, self._clock.mark()))
        self._clock.synchronize()
        scale = self._scaler.get_scale()
        own = gradient_norm(self.parameters, scale=scale)
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        averaged = gradient_norm(self.parameters, scale=scale * self.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        return sum(self._clock.seconds(*pair) for pair in marks), own, averaged

    def split_passes(self) -> tuple[float, float] | None:
        """Gradient norms of half a batch and of the whole, at equal weights, no update.

        None where a batch has no halves, or where a half batch does not run although the whole
        one does (batch norm of one sample): that is no fault of the probe. An odd sample is left
        out.
        """
        inputs, targets = next(self.batches)
        half = len(targets) // 2
        if half < 1 or not isinstance(inputs, Tensor):
            return None
        scale = self._scaler.get_scale()
        try:
            self._backward(inputs[:half], targets[:half], share=1)
            small = gradient_norm(self.parameters, scale=scale)
            self._backward(inputs[half : 2 * half], targets[half : 2 * half], share=1)
            return small, gradient_norm(self.parameters, scale=2 * scale)
        except Exception as error:
            logger.info("no noise scale: a half batch of %d failed: %s", half, error)
            return None
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, inputs: Any, targets: Tensor, *, share: int | None = None) -> Any:
        """Both passes; the clock's mark between them."""
        with self._precision():
            loss = self.loss(self.model(inputs), targets) / (share or self.accumulation_steps)
        between = self._clock.mark()
        scaled = self._scaler.scale(loss)
        self._wait.watch(scaled, self.model)
        scaled.backward()  # type: ignore[no-untyped-call]
        return between

    def _next_batch(self) -> tuple[tuple[Any, Tensor], float]:
        start = time.perf_counter()
        batch = next(self.batches)
        self._clock.synchronize()
        return batch, time.perf_counter() - start

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()


def _to_device(value: Any, device: torch.device) -> Any:
    """Move tensors, and tensors in lists and dicts, to the device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(item, device) for item in value)
    return value
