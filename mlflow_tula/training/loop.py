"""The training loop of one rank: steps, epochs, checkpoints, and agreement with the other ranks.

    loop = TrainLoop(setup, peers=peers, emit=send)
    loop.resume(state)            # of a checkpoint, where there is one
    result = loop.run()           # None where it was asked to stop

Ranks never decide alone. About twice a second they add up their losses and wishes in one small
all-reduce: to stop (a signal, a file, the time limit), to save (rank 0's clock), and how many
steps until the next such check. Losses and norms stay on the device until then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mlflow_tula.specs import Strategy
from mlflow_tula.training.checkpoint import (
    CHECKPOINT_NAME,
    capture_rng,
    restore_rng,
    save_checkpoint,
)
from mlflow_tula.training.facts import (
    BatchPlan,
    EventKind,
    Limits,
    StopReason,
    TrainEvent,
    TrainResult,
)
from mlflow_tula.training.peers import Peers, StepClock, peak_memory_bytes
from mlflow_tula.training.progress import Pending, Progress
from mlflow_tula.training.recipe import Recipe
from mlflow_tula.training.sharding import ShardedBatches
from mlflow_tula.training.states import States
from mlflow_tula.training.watch import RankWatch
from mlflow_tula.workloads.loaders import start_epoch
from mlflow_tula.workloads.losses import Loss, num_correct
from mlflow_tula.workloads.parallel import GradientWait, synchronised

_CHECK_INTERVAL_S = 0.5
_MOST_STEPS_BETWEEN_CHECKS = 100

Reason = StopReason | Literal["interrupted"]


@dataclass(kw_only=True, slots=True)
class Setup:
    """What one rank trains with; `model` is the bare module, `replica` it or DDP around it."""

    plan: BatchPlan
    epochs: int
    limits: Limits
    identity: dict[str, Any]
    folder: Path
    model: nn.Module
    replica: nn.Module
    loss: Loss
    recipe: Recipe
    batches: ShardedBatches
    train_loader: DataLoader[Any]
    test_loader: DataLoader[Any]
    num_test_batches: int
    strategy: Strategy = "ddp"
    autocast: torch.dtype | None = None
    description: str = ""
    stop_requested: Callable[[], bool] = lambda: False

    @property
    def times_ranks(self) -> bool:
        """Whether a rank's own time can be told from its wait for the others (DDP alone)."""
        return isinstance(self.replica, nn.parallel.DistributedDataParallel)


class TrainLoop:
    """One rank's side of a training run."""

    def __init__(self, setup: Setup, *, peers: Peers, emit: Callable[[TrainEvent], None]) -> None:
        """Take over a setup; `emit` is called on rank 0 alone."""
        self._setup = setup
        self._limits = setup.limits
        self._peers = peers
        self._emit = emit
        self._at = Progress()
        self._pending: list[Pending] = []
        self._clock = StepClock(peers.device)
        self._wait = GradientWait(self._clock.now)
        self._watch = RankWatch(setup, peers)
        self._states = States(setup.model, setup.recipe, by_name=setup.strategy == "fsdp")
        self._until_check = 1
        self._resumed_from = 0
        self._previously_s = 0.0
        self._began = self._saved = time.monotonic()

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self._setup.epochs * self._setup.batches.steps_per_epoch

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state as if nothing had happened."""
        self._states.load(state)
        self._at = Progress.from_dict(state["progress"])
        self._previously_s = self._at.elapsed_s
        self._resumed_from = self._at.step
        self._watch.resume(state.get("plan"))
        if self._peers.rank < len(state["rng"]):  # fewer ranks wrote it: the others begin anew
            restore_rng(state["rng"][self._peers.rank], self._peers.device)

    def run(self) -> TrainResult | None:
        """Train to the end or to a limit; None where a stop was requested (and saved)."""
        self._began = self._saved = time.monotonic()
        again = f", resumed after step {self._at.step}" if self._resumed_from else ""
        again += self._watch.cut_before
        parameters = sum(p.numel() for p in self._setup.model.parameters() if p.requires_grad)
        self._tell(
            "started", message=f"{self._setup.description}{again}", num_parameters=parameters
        )
        reason: Reason | None = self._limit_reached()
        while reason is None and self._at.epoch < self._setup.epochs:
            reason = self._run_epoch()
        if reason == "interrupted":
            return None
        result = self._result(reason or "completed")
        self._tell("finished", message=result.stop_reason)
        return result

    def _run_epoch(self) -> Reason | None:
        """The rest of the current epoch; the reason to stop, or None."""
        at, num_steps = self._at, self._setup.batches.steps_per_epoch
        passes = self._passes()
        self._setup.replica.train()
        self._clock.start()
        reason: Reason | None = None
        while at.step_in_epoch < num_steps:
            self._step(passes)
            last = at.step_in_epoch == num_steps
            reason, save = self._check(force=last or at.step == self._limits.max_steps)
            if not last:
                reason = reason or self._limit_reached()
            # A whole epoch is tested before time is up; only a person does not wait for that.
            leave = reason is not None and (not last or reason == "interrupted")
            if save or leave:
                self._save()
            if leave:
                return reason
            if not last and self._watch.moved():
                passes = self._passes()
        self._finish_epoch()
        reason = reason or self._limit_reached()
        due = at.epoch == self._setup.epochs or at.epoch % self._limits.checkpoint_every_epochs == 0
        if due or reason is not None:
            self._save()
        return reason

    def _passes(self) -> Iterator[tuple[Any, Tensor]]:
        """This rank's batches from here to the end of the epoch."""
        self._setup.batches.start(self._at.epoch, self._at.step_in_epoch)
        start_epoch(self._setup.train_loader, self._at.epoch)
        return iter(self._setup.train_loader)

    def _step(self, passes: Iterator[tuple[Any, Tensor]]) -> None:
        """One optimizer step over its accumulation passes."""
        recipe = self._setup.recipe
        share = self._setup.batches.share(self._at.step_in_epoch)
        recipe.begin_step(self._at.step)

        kept = [next(passes) for _ in share.passes] if recipe.needs_closure else None

        def forward_and_backward() -> Tensor:
            total = torch.zeros((), device=self._peers.device)
            for number, (first, end) in enumerate(share.passes, start=1):
                inputs, labels = next(passes) if kept is None else kept[number - 1]
                weight = (end - first) / share.samples
                last = number == len(share.passes)
                with synchronised(self._setup.replica, last=last):
                    loss = self._forward(self._setup.replica, inputs, labels)[0]
                    # DDP averages over ranks; times their number it is the sum over all samples.
                    self._backward(
                        recipe.scaler.scale(loss * (weight * self._peers.world_size)), last=last
                    )
                if recipe.after_backward is not None:
                    recipe.after_backward()
                total += loss.detach() * weight
            return total

        total = recipe.step(forward_and_backward)
        self._clock.mark()
        self._at.add_step(share.samples, recipe.learning_rate)
        self._pending.append(
            Pending(
                loss=total,
                norm=recipe.gradient_norm,
                variability=recipe.gradient_variability,
                learning_rate=recipe.learning_rate,
                samples=share.samples,
            )
        )

    def _forward(self, model: nn.Module, inputs: Any, labels: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Loss, output, and the labels on the device."""
        device, dtype = self._peers.device, self._setup.autocast
        inputs = inputs.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            output = model(inputs)
            return self._setup.loss(output, labels), output, labels

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """The backward pass; of the last one, how long it waits for the other ranks."""
        watched = last and self._wait.watch(loss, self._setup.replica)
        loss.backward()  # type: ignore[no-untyped-call]
        if watched and self._wait.begin is not None:
            self._clock.add_wait(self._wait.begin, self._clock.now())

    def _check(self, *, force: bool) -> tuple[Reason | None, bool]:
        """Every so many steps: read the pending numbers, and agree to stop or to save."""
        self._until_check -= 1
        if self._until_check > 0 and not force:
            return None, False
        times, pending, self._pending = self._clock.take(), self._pending, []
        parts = torch.stack([row.loss for row in pending]).tolist()
        wishes = [float(self._setup.stop_requested()), 0.0, 0.0, 0.0]
        if self._peers.rank == 0:  # one clock decides
            interval = int(_CHECK_INTERVAL_S / max(statistics.median(times), 1e-6))
            wishes[1:] = [
                float(self._out_of_time()),
                float(self._save_is_due()),
                float(min(max(interval, 1), _MOST_STEPS_BETWEEN_CHECKS)),
            ]
        own = self._watch.own_times(times, self._clock.waits_s)
        agreed = self._peers.sum([*parts, *wishes, *own])
        stop, out_of_time, save, interval_agreed = agreed[len(parts) :][:4]
        self._until_check = int(interval_agreed)
        self._tell("steps", steps=self._at.count(pending, agreed[: len(parts)], times))
        self._watch.take(self._at.tally, agreed[len(parts) + 4 :], len(times))
        for text in self._watch.news():
            self._tell("warning", message=text)
        self._clock.start()
        return ("interrupted" if stop else "time_limit" if out_of_time else None), save > 0

    def _finish_epoch(self) -> None:
        """Test the model and record the epoch."""
        began = time.monotonic()
        test_loss, test_accuracy = self._evaluate()
        median = self._at.tally.median_step_time_s or 0.0
        memory = float(peak_memory_bytes(self._peers.device))
        step_time_s, memory = self._peers.max([median, memory])
        record = self._at.finish_epoch(
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            step_time_s=step_time_s,
            evaluation_time_s=time.monotonic() - began,
            peak_memory_bytes=int(memory),
            global_batch_size=self._setup.plan.global_batch_size,
        )
        self._tell("epoch", record=record)
        self._watch.judge()
        for text in self._watch.news():
            self._tell("warning", message=text)

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy over the whole test split, each sample counted once."""
        model = self._setup.model
        self._peers.share_buffers(model.buffers())
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self._peers.device)
        for number, (inputs, target) in enumerate(self._setup.test_loader):
            loss, output, labels = self._forward(model, inputs, target)
            if number >= self._setup.num_test_batches:
                continue  # other ranks needed this one's part of the model
            sums[0] += loss * len(labels)
            sums[1] += num_correct(output, labels)
            sums[2] += len(labels)
        loss_sum, correct, samples = self._peers.sum(sums.tolist())
        return loss_sum / samples, correct / samples

    def _save(self) -> None:
        """Write a checkpoint; every rank gives the state of its random generators."""
        self._at.elapsed_s = self._elapsed_s()
        rng = self._peers.gather(capture_rng(self._peers.device))
        state = self._states.whole()
        if self._peers.rank == 0:
            state |= {
                "progress": self._at.to_dict(),
                "rng": rng,
                "plan": self._watch.plan.to_dict(),
            }
            path = save_checkpoint(self._setup.folder, state, identity=self._setup.identity)
            self._tell("checkpoint", message=str(path))
        self._saved = time.monotonic()
        self._clock.start()

    def _limit_reached(self) -> StopReason | None:
        """The limits that every rank knows by itself."""
        most = self._limits.max_steps
        if self._at.epochs_to_target(self._limits.target_accuracy) is not None:
            return "target_accuracy"
        return "max_steps" if most is not None and self._at.step >= most else None

    def _out_of_time(self) -> bool:
        limit = self._limits.time_limit_s
        return limit is not None and time.monotonic() - self._began >= limit

    def _save_is_due(self) -> bool:
        every = self._limits.checkpoint_every_s
        return every is not None and time.monotonic() - self._saved >= every

    def _elapsed_s(self) -> float:
        return self._previously_s + time.monotonic() - self._began

    def _tell(self, kind: EventKind, **fields: Any) -> None:
        """Emit an event, with the time left as this process's steps so far suggest."""
        if self._peers.rank != 0:
            return
        at, spent = self._at, time.monotonic() - self._began
        done, left = at.step - self._resumed_from, self.total_steps - at.step
        self._emit(
            TrainEvent(
                kind=kind,
                step=at.step,
                total_steps=self.total_steps,
                epoch=at.epoch,
                elapsed_s=self._elapsed_s(),
                remaining_s=left * spent / done if done else None,
                **fields,
            )
        )

    def _result(self, reason: StopReason) -> TrainResult:
        """Sum up; where the last epoch is not whole, test the model as it is now."""
        at, plan = self._at, self._setup.plan
        last = at.history[-1] if at.history else None
        if last is not None and last.step == at.step:
            accuracy, loss, step_time_s = last.test_accuracy, last.train_loss, last.step_time_s
        else:
            accuracy, loss = self._evaluate()[1], at.tally.mean_loss
            step_time_s = self._peers.max([at.tally.median_step_time_s or 0.0])[0]
        memory = self._peers.max([float(peak_memory_bytes(self._peers.device))])[0]
        memory = max([memory, *(float(row.peak_memory_bytes) for row in at.history)])
        return TrainResult(
            plan=plan,
            stop_reason=reason,
            epochs=at.epoch,
            steps=at.step,
            samples=at.samples,
            test_accuracy=accuracy,
            best_test_accuracy=max([accuracy, *(row.test_accuracy for row in at.history)]),
            train_loss=loss,
            wall_time_s=self._elapsed_s(),
            step_time_s=step_time_s or None,
            throughput=plan.global_batch_size / step_time_s if step_time_s else None,
            peak_memory_bytes=int(memory),
            learning_rate=at.learning_rate,
            epochs_to_target=at.epochs_to_target(self._limits.target_accuracy),
            resumed_from_step=self._resumed_from,
            weights_digest=self._states.digest(self._peers),
            checkpoint_path=str(self._setup.folder / CHECKPOINT_NAME),
            history=tuple(at.history),
            rank_batch_sizes=self._watch.plan.rank_batch_sizes,
            warnings=tuple(self._watch.warnings),
        )
