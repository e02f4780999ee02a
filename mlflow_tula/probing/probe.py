"""One probe on one rank: the protocol of a trial.

    |build| step | evaluate | step ... | step step step ... | passes ... |
            ---- warm-up (>= 2) ------- ---- timed --------- gradients, untimed

1. Model, optimizer and loader are built anew, from the job's seed.
2. Warm-up: the first step makes the optimizer's state; then one forward pass as validation runs
   it; the last warm-up step is recorded for its memory.
3. Timed steps until their median is known (`StepSeries`). All ranks see the largest step time of
   any rank, and so stop after the same step.
4. Gradient passes (forward and backward, no update): under DDP a rank's own gradient, then the
   average; on one device half and whole batch. Their norms give the noise scale, and under DDP
   their time without all-reduce is the compute time; the rest of the timed passes is sync.

step time = median over steps, then the maximum over ranks; the same for its parts. Counted are
`optimizer_steps` = `warmup_steps + num_steps`, `evaluation_passes` and `gradient_passes`.
"""

from __future__ import annotations

import math
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mlflow_tula.gradients import gradient_variability, noise_scale
from mlflow_tula.launch.slow import OwnTimes, slowest_rank
from mlflow_tula.probing.contention import run_queue_wait_s
from mlflow_tula.probing.memory import MemoryMeter, MemoryReading, held_bytes
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.steps import StepTimes, TrainingSteps
from mlflow_tula.probing.stopping import StepSeries

MAX_GRADIENT_PASSES = 8
GRADIENT_TIME_SHARE = 0.4
"""Gradient passes take at most this share of the timed steps' time; one or two are always made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAnswer:
    """What one rank measured."""

    step_s: float
    own: OwnTimes | None
    host: str
    step_std_s: float
    data_s: float
    passes_s: float
    forward_s: float
    optimizer_s: float
    local_passes_s: float | None
    gradient_norm: float | None
    cpu_ratio: float
    waiting_share: float | None
    memory: MemoryReading


def run_probe(
    make_steps: Callable[[], TrainingSteps],
    meter: MemoryMeter,
    settings: ProbeSettings,
    *,
    local_batch_size: int,
    world_size: int,
) -> dict[str, Any]:
    """Measure one configuration on this rank and return what all ranks measured together.

    Args:
        make_steps: builds model, data and optimizer.
        meter: reads this rank's memory.
        settings: how many steps.
        local_batch_size: samples per rank and pass.
        world_size: ranks.
    """
    began = time.perf_counter()
    compiled_before = _forget_compiled_graphs()
    meter.start()
    steps = make_steps()
    run = _ProbeRun(steps, meter, settings, world_size)
    run.warm_up()
    run.time_steps()
    run.read_gradients()
    meter.stop()
    accumulation = steps.accumulation_steps
    answer = run.answer
    facts = {
        "warmup_steps": run.series.num_warmup,
        "num_steps": len(run.series.timed),
        "optimizer_steps": len(run.series.seconds),
        "stopped_by": run.series.reason,
        "step_times_s": run.series.seconds,
        "evaluation_passes": 1,
        "gradient_passes": run.gradient_passes,
        "compiled_graphs": _compiled_graphs() - compiled_before,
        "gradient_variability": gradient_variability(run.norms),
        "noise_scale": run.noise_scale(local_batch_size, accumulation),
    }
    run.drop()
    del steps
    ranks = _gather(answer(meter.reading()), world_size)
    return facts | _together(ranks) | {"probe_time_s": time.perf_counter() - began}


class _ProbeRun:
    """The steps of one probe, in order."""

    def __init__(
        self, steps: TrainingSteps, meter: MemoryMeter, settings: ProbeSettings, world_size: int
    ) -> None:
        self._steps: TrainingSteps | None = steps
        self._meter = meter
        self._settings = settings
        self._world_size = world_size
        self.series = StepSeries(settings)
        self._own: list[StepTimes] = []
        self._local_s: list[float] = []
        self._small: list[float] = []
        self._large: list[float] = []
        self.gradient_passes = 0
        self._waited: float | None = None

    @property
    def steps(self) -> TrainingSteps:
        assert self._steps is not None, "the probe is over"
        return self._steps

    def drop(self) -> None:
        """Let go of model, optimizer and data."""
        self._steps = None

    def warm_up(self) -> None:
        """Untimed steps and one evaluation pass; the last step is recorded."""
        for number in range(self._settings.warmup_steps):
            if number == self._settings.warmup_steps - 1:
                with self._meter.record(self._held):
                    self.steps.evaluate()
                with self._meter.record(self._held):
                    times = self.steps.step()
            else:
                times = self.steps.step()
            self._take(times)

    def time_steps(self) -> None:
        """Steps until the median is known, in agreement with all ranks."""
        before = run_queue_wait_s()
        while not self._take(self.steps.step()):
            pass
        after = run_queue_wait_s()
        self._waited = None if before is None or after is None else after - before

    def read_gradients(self) -> None:
        """Own and averaged (or half and whole) gradients, as many as are worth their time."""
        if self.steps.is_sharded:
            return  # no rank has a gradient of its own, nor passes that wait for nobody
        step_s = statistics.median(self.series.timed)
        budget = GRADIENT_TIME_SHARE * step_s * len(self.series.timed)
        # Two at least where their time is the compute time.
        least = 1 if self._world_size == 1 else 2
        number = max(least, min(MAX_GRADIENT_PASSES, int(budget / step_s)))
        for _ in range(number):
            if self._world_size > 1:
                seconds, small, large = self.steps.local_passes()
                self._local_s.append(seconds)
                self._small.append(small)
                self._large.append(large)
            elif (norms := self.steps.split_passes()) is not None:
                self._small.append(norms[0])
                self._large.append(norms[1])
            else:
                return
            self.gradient_passes += 1

    @property
    def norms(self) -> list[float]:
        """Norm of the averaged gradient of every optimizer step, warm-up included."""
        return [times.gradient_norm for times in self._own]

    def noise_scale(self, local_batch_size: int, accumulation_steps: int) -> float | None:
        """From the gradient passes of all ranks."""
        if not self._small:
            return None
        if self._world_size == 1:
            half = local_batch_size // 2
            return noise_scale(self._small, self._large, small_batch=half, large_batch=2 * half)
        together: list[list[float]] = [[] for _ in range(self._world_size)]
        dist.all_gather_object(together, self._small)
        size = local_batch_size * accumulation_steps
        return noise_scale(
            [norm for own in together for norm in own],
            self._large,
            small_batch=size,
            large_batch=size * self._world_size,
        )

    def answer(self, memory: MemoryReading) -> RankAnswer:
        """This rank's medians over the timed steps."""
        timed = self._own[self.series.num_warmup :]
        whole = [times.step_s for times in timed]
        busy = sum(times.passes_s + times.optimizer_s for times in timed)
        cpu = sum(times.cpu_s for times in timed)
        waited = self._waited
        own = [times.own_s for times in timed if times.own_s is not None]
        return RankAnswer(
            step_s=statistics.median(whole),
            own=OwnTimes.of(own) if own else None,
            host=socket.gethostname(),
            step_std_s=statistics.stdev(whole) if len(whole) > 1 else 0.0,
            data_s=statistics.median(times.data_s for times in timed),
            passes_s=statistics.median(times.passes_s for times in timed),
            forward_s=statistics.median(times.forward_s for times in timed),
            optimizer_s=statistics.median(times.optimizer_s for times in timed),
            local_passes_s=statistics.median(self._local_s) if self._local_s else None,
            gradient_norm=_finite_median([times.gradient_norm for times in timed]),
            cpu_ratio=cpu / (busy * torch.get_num_threads()) if busy > 0 else 0.0,
            waiting_share=None if waited is None or cpu <= 0 else waited / (waited + cpu),
            memory=memory,
        )

    def _held(self) -> int:
        steps = self.steps
        return held_bytes(steps.module, steps.optimizer, world_size=self._world_size)

    def _take(self, times: StepTimes) -> bool:
        """Note a step; the largest of all ranks decides, alike on each, whether to go on."""
        self._own.append(times)
        seconds = times.step_s
        if self._world_size > 1:
            largest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            seconds = float(largest[0])
        return self.series.add(seconds)


def _gather(answer: RankAnswer, world_size: int) -> list[RankAnswer]:
    """Every rank's answer, on every rank."""
    if world_size == 1:
        return [answer]
    together: list[Any] = [None] * world_size
    dist.all_gather_object(together, answer)
    return together


def _together(ranks: list[RankAnswer]) -> dict[str, Any]:
    """Maximum over ranks; sync is what the all-reduce adds to the passes."""
    slowest = max(ranks, key=lambda answer: answer.step_s)
    passes = max(answer.passes_s for answer in ranks)
    local = [answer.local_passes_s for answer in ranks if answer.local_passes_s is not None]
    compute = min(max(local), passes) if local else None if len(ranks) > 1 else passes
    own = [answer.own for answer in ranks if answer.own is not None]
    behind = slowest_rank(own, [answer.host for answer in ranks])
    used = [a.memory.device_used_bytes for a in ranks if a.memory.device_used_bytes is not None]
    waiting = [answer.waiting_share for answer in ranks if answer.waiting_share is not None]
    return {
        "step_time_s": slowest.step_s,
        "step_time_std_s": slowest.step_std_s,
        "data_time_s": max(answer.data_s for answer in ranks),
        "compute_time_s": compute,
        "backward_time_s": None if compute is None else max(compute - slowest.forward_s, 0.0),
        # medians of their own may differ by a hair: a part is never more than the step
        "sync_time_s": None if compute is None else min(passes - compute, slowest.step_s),
        "optimizer_time_s": max(answer.optimizer_s for answer in ranks),
        "peak_memory_bytes": max(answer.memory.peak_bytes for answer in ranks),
        "allocated_memory_bytes": max(answer.memory.allocated_bytes for answer in ranks),
        "device_used_bytes": max(used) if used else None,
        "gradient_norm": slowest.gradient_norm,
        "cpu_time_ratio": min(answer.cpu_ratio for answer in ranks),
        "waiting_share": max(waiting) if waiting else None,
        "slowest_rank": None if behind is None else behind.rank,
        "slowest_rank_ratio": None if behind is None else behind.ratio,
        "reason": behind.text if behind is not None and behind.is_slow else "",
    }


def _finite_median(values: list[float]) -> float | None:
    """A model that diverges in its first steps still has a step time."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _forget_compiled_graphs() -> int:
    """Make torch.compile start anew, as a training at this size would; the graphs made so far.

    A second size would else be compiled for any size, and from the eighth on not at all.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    return _compiled_graphs()


def _compiled_graphs() -> int:
    """Graphs that torch.compile made in this process so far; 0 where it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["stats"].get("unique_graphs", 0))
