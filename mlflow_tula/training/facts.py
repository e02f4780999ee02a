"""What a training run is told and what it tells: plain facts that cross process borders as JSON.

    TrainRequest    everything the ranks are told
    BatchPlan       the decision: how many samples, in what pieces, on how many devices
    Schedule        how the learning rate follows batch size and step
    Limits          when to stop, when to save
    StepRecord      one optimizer step
    EpochRecord     one pass over the training split, with the test accuracy after it
    TrainEvent      what `train(on_event=...)` is called with
    TrainResult     the end

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.specs import DeviceType, Spec, check_choice, check_int, check_real
from mlflow_tula.training.plans import BatchPlan as BatchPlan
from mlflow_tula.workloads.job import Job

REQUEST_NAME = "request.json"
EVENTS_NAME = "events.jsonl"
STOP_NAME = "stop"
"""What parent and ranks share in the folder of their group: a TrainRequest, one TrainEvent a line,
and a file whose presence asks for a checkpoint and an end."""

TRAINING_RATES = {"sgd": 0.05}
"""Learning rates at batch 64 where a job has none, instead of the cautious ones that a bare probe
takes: warm-up and clip bear them. Test accuracy on digits at 0.05 against 0.01, equal epochs, one
seed: a small VGG 98 against 86 % (batch 512: 96 against 53), MobileNetV3-small 97 against 67,
ResNet18 98 against 96; VGG11 learns at 0.05 too."""

EventKind = Literal["started", "steps", "epoch", "checkpoint", "warning", "finished"]
StopReason = Literal["completed", "target_accuracy", "max_steps", "time_limit"]
ScalingRule = Literal["sqrt", "linear", "none"]

AUTO = "auto"
CLASSIC_METHOD = "sqrt_clip"
METHODS = (
    AUTO,
    "adascale",
    "ags",
    "constant_scaling",
    "extrapolation",
    "lamb",
    "lars",
    "lars_clip",
    "linear_scaling",
    "plain",
    "sam",
    "scaling_autoclip",
    "scaling_clip",
    CLASSIC_METHOD,
    "sqrt_scaling",
    "static_scaling",
)
"""What a training can be done with: the recipe's rule, and those of the catalogue that keep one
batch size and one model on all ranks. Spelled out, so that naming one does not import torch."""
OTHER_METHODS = ("batch_growth", "batch_warmup", "post_local_sgd")
"""Of the catalogue, and for `tula compare` and loops of your own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(Spec):
    """How the learning rate follows the batch size and the step, and where gradients are clipped.

        peak = learning_rate * (B / reference_batch_size) ** (0.5 if sqrt, 1 if linear, 0 if none)
        lr(t) = peak * (t + 1) / W                                       t < W = warmup_share * T
        lr(t) = peak * (f + (1 - f) (1 + cos(pi (t - W) / (T - W))) / 2)         otherwise
        gradient <- gradient * min(1, clip_norm / norm)

    The job's learning rate is the one for `reference_batch_size`. f is `final_factor`, T the steps
    of all epochs. `clip_norm` 0 leaves gradients as they are. `scaling` and `clip_norm` are those
    of method `sqrt_clip`; every other `method` sets peak rate and clip by itself (training/
    method.py), with `method_settings` in place of its own, and has warm-up and decay in common.
    """

    method: str = AUTO
    method_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaling: ScalingRule = "sqrt"
    reference_batch_size: int = 64
    warmup_share: float = 0.1
    final_factor: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """Check every field once."""
        check_choice("scaling rule", self.scaling, ScalingRule)
        if self.method in OTHER_METHODS:
            raise InvalidInputError(
                f"method {self.method} changes the batch size or parts the ranks' models, which "
                "`tula train` does not: use it in your own loop (mlflow_tula.methods) or compare "
                "it with `tula compare`"
            )
        if self.method not in METHODS:
            raise UnknownNameError("method", self.method, METHODS)
        check_int("reference_batch_size", self.reference_batch_size)
        for name in ("warmup_share", "final_factor", "clip_norm"):
            check_real(name, getattr(self, name))
        if self.warmup_share >= 1 or self.final_factor > 1:
            raise InvalidInputError(
                "warmup_share must be below 1 and final_factor at most 1, not "
                f"{self.warmup_share:g} and {self.final_factor:g}"
            )

    def factor(self, global_batch_size: int) -> float:
        """Peak learning rate over the job's."""
        exponent = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}[self.scaling]
        return float((global_batch_size / self.reference_batch_size) ** exponent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(Spec):
    """When to stop and when to save; none of them changes what is computed until then.

    Training ends after the first epoch whose test accuracy (a fraction) reaches `target_accuracy`,
    after `max_steps` optimizer steps in all, or `time_limit_s` seconds after this process began;
    a later call goes on from there. Checkpoints are written after every
    `checkpoint_every_epochs`-th epoch, after the last one, at every such stop, and during an epoch
    when `checkpoint_every_s` have passed since the one before (None: not).
    """

    target_accuracy: float | None = None
    max_steps: int | None = None
    time_limit_s: float | None = None
    checkpoint_every_epochs: int = 1
    checkpoint_every_s: float | None = 300.0

    def __post_init__(self) -> None:
        """Check every field once."""
        if self.target_accuracy is not None:
            target = check_real("target_accuracy", self.target_accuracy, strict=True)
            if target > 1:
                raise InvalidInputError(
                    f"target_accuracy must be a fraction of at most 1, not {target:g}"
                )
        if self.max_steps is not None:
            check_int("max_steps", self.max_steps)
        if self.time_limit_s is not None:
            check_real("time_limit_s", self.time_limit_s, strict=True)
        check_int("checkpoint_every_epochs", self.checkpoint_every_epochs)
        if self.checkpoint_every_s is not None:
            check_real("checkpoint_every_s", self.checkpoint_every_s)

    def after(self, spent_s: float) -> Limits:
        """What is left of them when so many seconds were spent."""
        if self.time_limit_s is None:
            return self
        return dataclasses.replace(self, time_limit_s=max(self.time_limit_s - spent_s, 1e-3))


class _Metrics:
    """Mixin: the numbers of a record under names fit for MLflow."""

    __slots__ = ()

    def metrics(self) -> dict[str, float]:
        """Every measured number but the counters that place it (`step`, `epoch`)."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Spec, _Metrics):
    """One optimizer step; `step` counts from 1 over the whole training, resumes included.

    `train_loss` is the mean over the global batch; `gradient_norm` that of the averaged gradient
    before clipping; `step_time_s` is rank 0's, data and synchronisation included.
    """

    step: int
    epoch: int
    train_loss: float
    learning_rate: float
    gradient_norm: float | None
    gradient_variability: float | None
    step_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord(Spec, _Metrics):
    """One epoch, counted from 1; `step` and `samples` count from the beginning of training.

    `step_time_s` is the median over steps and the maximum over ranks; `epoch_time_s` covers the
    training steps alone, `evaluation_time_s` the test pass. `peak_memory_bytes` is the largest on
    a rank so far, evaluation included: reserved on CUDA, resident on a CPU. The gradient norm is
    the epoch's mean, its variability the last. `skipped_steps` are those a GradScaler refused.
    `rank_times_s` are every rank's own seconds a step, without its wait for the others (DDP on
    several ranks, else empty); `slowest_rank_ratio` is the largest over the median of the rest.
    """

    epoch: int
    step: int
    samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    learning_rate: float
    step_time_s: float | None
    epoch_time_s: float
    evaluation_time_s: float
    throughput: float | None
    peak_memory_bytes: int
    gradient_norm: float | None = None
    gradient_variability: float | None = None
    skipped_steps: int = 0
    rank_times_s: tuple[float, ...] = ()
    slowest_rank: int | None = None
    slowest_rank_ratio: float | None = None

    def __post_init__(self) -> None:
        """Keep what comes from JSON as a tuple."""
        object.__setattr__(self, "rank_times_s", tuple(self.rank_times_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainEvent(Spec):
    """Something happened; `kind` says which of the optional fields are there.

    | kind | fields |
    |---|---|
    | `started` | `message` (what, on what, resumed or not), `num_parameters` |
    | `steps` | `steps`: the records since the last such event (buffered, about one a second) |
    | `epoch` | `record` |
    | `checkpoint` | `message`: the file |
    | `warning` | `message`: a slow rank, another split, a restart |
    | `finished` | `message`: why it ended |

    `step` of `total_steps` are done, `remaining_s` more seconds are expected.
    """

    kind: EventKind
    step: int
    total_steps: int
    epoch: int
    elapsed_s: float
    remaining_s: float | None = None
    num_parameters: int | None = None
    message: str = ""
    steps: tuple[StepRecord, ...] = ()
    record: EpochRecord | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        values = dict(data)
        values["steps"] = tuple(StepRecord.from_dict(row) for row in values.get("steps") or ())
        if values.get("record") is not None:
            values["record"] = EpochRecord.from_dict(values["record"])
        return super(TrainEvent, cls).from_dict(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(Spec):
    """How a training ended.

    `epochs`, `steps` and `samples` count everything since its beginning, over all resumes, and so
    does `wall_time_s` (seconds of training and evaluation; start-up and downtime are not in it).
    `epochs_to_target` is the first epoch that reached `target_accuracy`, None if none did.
    `weights_digest` is the SHA-256 of the final weights: equal digests, equal models. `warnings`
    name what a person should know of: a slow rank, restarts. `rank_batch_sizes` is the last split
    among ranks where it was uneven.
    """

    plan: BatchPlan
    stop_reason: StopReason
    epochs: int
    steps: int
    samples: int
    test_accuracy: float
    best_test_accuracy: float
    train_loss: float
    wall_time_s: float
    step_time_s: float | None
    throughput: float | None
    peak_memory_bytes: int
    learning_rate: float
    epochs_to_target: int | None
    resumed_from_step: int
    weights_digest: str
    checkpoint_path: str
    history: tuple[EpochRecord, ...] = ()
    rank_batch_sizes: tuple[int, ...] = ()
    restarts: int = 0
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        values = dict(data)
        values["plan"] = BatchPlan.from_dict(values.get("plan") or {})
        rows = values.get("history") or ()
        values["history"] = tuple(EpochRecord.from_dict(row) for row in rows)
        for name in ("rank_batch_sizes", "warnings"):
            values[name] = tuple(values.get(name) or ())
        return super(TrainResult, cls).from_dict(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest(Spec):
    """What the ranks of one training process are told; `limits` and `device_type` may change."""

    job: Job
    plan: BatchPlan
    epochs: int
    output_dir: str
    schedule: Schedule
    limits: Limits
    device_type: DeviceType

    def __post_init__(self) -> None:
        """Check the number of epochs, and give a job without a learning rate that of training."""
        object.__setattr__(self, "epochs", check_int("epochs", self.epochs))
        rate = TRAINING_RATES.get(self.job.optimizer)
        if self.job.learning_rate is None and rate is not None:
            object.__setattr__(self, "job", self.job.replace(learning_rate=rate))
        check_choice("device type", self.device_type, DeviceType)
        self._check_method()

    def _check_method(self) -> None:
        """Refuse a method that needs what this training does not have."""
        method, job, plan = self.schedule.method, self.job, self.plan
        if method in ("sam", "extrapolation") and job.precision == "fp16":
            raise InvalidInputError(
                f"method {method} takes a gradient at a second point, which a GradScaler cannot "
                "follow: train in bf16 or fp32"
            )
        if method == "adascale" and plan.world_size * plan.accumulation_steps < 2:
            raise InvalidInputError(
                "method adascale compares the gradients of at least 2 ranks or accumulation "
                "passes, and this training has 1: give more of either"
            )
        if job.strategy == "fsdp" and method not in (AUTO, CLASSIC_METHOD):
            raise InvalidInputError(
                f"method {method} needs whole gradients on every rank: train with strategy 'ddp'"
            )
        if job.strategy == "fsdp" and self.schedule.method_settings:
            raise InvalidInputError(
                f"strategy 'fsdp' trains with method {CLASSIC_METHOD}, which takes no settings: "
                "train with strategy 'ddp'"
            )
        by_hook = method in ("adascale", "extrapolation") and plan.world_size > 1
        if by_hook and (plan.rank_batch_sizes or plan.balance):
            raise InvalidInputError(
                f"method {method} takes the ranks' own gradients for those of equally many "
                "samples: train it without uneven batches"
            )
        if by_hook and job.gradient_compression is not None:
            raise InvalidInputError(
                f"method {method} looks at the ranks' own gradients, and so does "
                f"gradient_compression={job.gradient_compression!r}: take one of the two"
            )

    @property
    def peak_learning_rate(self) -> float:
        """After warm-up, for the plan's batch."""
        factor = self.schedule.factor(self.plan.global_batch_size)
        return self.job.resolved_learning_rate * factor

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with a training that resumes from it, as plain JSON.

        Where the data lies, how many processes load it, and how ranks share a batch change nothing
        that a step computes.
        """
        job = self.job.to_dict()
        for name in ("data_dir", "download", "num_workers"):
            del job[name]
        return {
            "job": job,
            "plan": self.plan.identity(),
            "epochs": self.epochs,
            "schedule": self.schedule.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        values = dict(data)
        parts: dict[str, type[Spec]] = {
            "job": Job,
            "plan": BatchPlan,
            "schedule": Schedule,
            "limits": Limits,
        }
        for name, kind in parts.items():
            values[name] = kind.from_dict(values.get(name) or {})
        return super(TrainRequest, cls).from_dict(values)
