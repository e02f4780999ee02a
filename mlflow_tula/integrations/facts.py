"""What is asked of an observer, and what it learns of a loop; plain facts, no torch, no MLflow.

ObserverSettings    how often, what, and under which names
LoopFacts           what is trained, as far as a loop shows it
StepKey             the batch of a step: local batch size x passes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import (
    Precision,
    Spec,
    Strategy,
    Workload,
    check_choice,
    check_int,
    check_name,
)
from mlflow_tula.workloads.job import DEFAULT_IMAGE_SIZES, fitting_image_size

WARMUP_STEPS = 3
"""Intervals that are not timed: allocators, kernels' choice and compilation settle in them."""

UNNAMED_DATASET = "unnamed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverSettings(Spec):
    """How a training loop is observed.

    One point of each curve is logged every `every_n_steps` steps, and the gradients of two steps in
    a row are read every `gradient_every_n_steps` (0: never); in these the noise scale is estimated
    too, if `log_noise_scale`. `model` and `dataset` name the workload, where the class names that
    are seen would not do.
    """

    every_n_steps: int = 10
    gradient_every_n_steps: int = 100
    log_noise_scale: bool = True
    model: str | None = None
    dataset: str | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        check_int("every_n_steps", self.every_n_steps, maximum=10**9)
        check_int("gradient_every_n_steps", self.gradient_every_n_steps, minimum=0, maximum=10**9)
        if not isinstance(self.log_noise_scale, bool):
            raise InvalidInputError(
                f"log_noise_scale must be True or False, not {self.log_noise_scale!r}"
            )
        for name in ("model", "dataset"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """The batch of a step on one rank: samples of a pass, passes of a step."""

    local_batch_size: int
    accumulation_steps: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFacts(Spec):
    """What a loop shows of its workload.

    `input_shape` is that of one sample, with -1 where it varies; None where no model was seen to be
    called. `image_size` is in pixels a side, for inputs of three equal channels x side x side.
    """

    model: str
    num_parameters: int
    optimizer: str
    dataset: str | None = None
    dataset_size: int | None = None
    drop_last: bool = False
    input_shape: tuple[int, ...] | None = None
    precision: Precision = "fp32"
    strategy: Strategy = "ddp"
    batch_norm: bool = False
    momentum: float | None = None
    device_type: str = "cpu"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        """Check what a name is made of."""
        check_name("model", self.model)
        check_choice("precision", self.precision, Precision)
        check_choice("strategy", self.strategy, Strategy)

    @property
    def image_size(self) -> int | None:
        """Pixels a side of image-like inputs."""
        shape = self.input_shape
        if shape is None or len(shape) != 3 or shape[1] != shape[2] or shape[1] < 1:
            return None
        return shape[1]

    def workload(self, settings: ObserverSettings) -> dict[str, Any]:
        """The Workload as a dict; its `dataset_size` is None where no dataset was seen.

        Names are such that `tula recommend --model M --dataset D [--image-size N]` finds what is
        registered under them: the model is the class with its number of parameters (ResNet18 and
        ResNet50 are one class), the dataset its class with its size, and the shape of a sample
        where it is no image.
        """
        return {
            "model": settings.model or f"{self.model}-{self.num_parameters}",
            "dataset": settings.dataset or self._dataset_name(),
            "dataset_size": self.dataset_size,
            "image_size": self.image_size,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "strategy": self.strategy,
            "drop_last": self.drop_last,
            "num_parameters": self.num_parameters,
            "batch_norm": self.batch_norm,
            "variant": self._variant(settings),
        }

    def slug(self, settings: ObserverSettings) -> str:
        """The workload's part of the registered name."""
        return Workload.from_dict({**self.workload(settings), "dataset_size": 1}).slug

    def _dataset_name(self) -> str:
        name = UNNAMED_DATASET if self.dataset is None else self.dataset
        if self.dataset is not None and self.dataset_size is not None:
            name += f"-{self.dataset_size}"
        if self.image_size is None and self.input_shape:
            name += "-" + "x".join("any" if side < 0 else str(side) for side in self.input_shape)
        return name

    def _variant(self, settings: ObserverSettings) -> str:
        """As the command line names it (Job.variant): `--image-size`, `--momentum 0`."""
        parts = []
        if self.image_size is not None:
            usual = DEFAULT_IMAGE_SIZES.get(settings.dataset or "")
            model = settings.model or ""
            if usual is None or fitting_image_size(model, usual) != self.image_size:
                parts.append(f"{self.image_size}px")
        if self.optimizer == "sgd" and self.momentum == 0:
            parts.append("no-momentum")
        return "-".join(parts)
