"""Job: every choice that makes a training job, as flat JSON.

A Job is what the command line fills in, what worker processes receive, and what names a workload
in the registry. This module does not import torch, so that `tula recommend` can ask the registry
within a fraction of a second; whether a model or dataset exists is known when it is built.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import (
    Precision,
    Spec,
    Strategy,
    Workload,
    check_choice,
    check_int,
    check_name,
    check_real,
    check_strategy,
    slugify,
)
from mlflow_tula.table import Compression

DEFAULT_IMAGE_SIZES: dict[str, int] = {
    "digits": 32,
    "fashion_mnist": 32,
    "cifar10": 32,
    "cifar100": 32,
    "synthetic": 32,
    "caltech101": 224,
    "caltech256": 224,
    "imagefolder": 224,
}
"""Pixels a side where the job does not say; these are also the names of the built-in datasets.

Fashion-MNIST (28) and digits (8) are enlarged to 32, the smallest most of torchvision's models
take; your own dataset keeps the size of its samples.
"""

_FITTING_SIZES: dict[str, tuple[int, int]] = {
    "alexnet": (64, 1),
    "convnext": (32, 1),
    "densenet": (32, 1),
    "googlenet": (16, 1),
    "inception_v3": (75, 1),
    "maxvit_t": (224, 224),
    "regnet": (16, 1),
    "squeezenet": (28, 1),
    "vgg": (32, 1),
    "vit_h_14": (28, 14),
    "vit_b_16": (16, 16),
    "vit_b_32": (32, 32),
    "vit_l_16": (16, 16),
    "vit_l_32": (32, 32),
}
"""torchvision models (by prefix) that fail on small images: smallest size, and its multiples."""

DEFAULT_LEARNING_RATES: dict[str, float] = {
    "sgd": 0.01,
    "rmsprop": 0.0001,
    "adagrad": 0.01,
    "adam": 0.0003,
    "adamw": 0.0003,
    "nadam": 0.0003,
    "radam": 0.0003,
}
"""Starting points, low enough for models without batch norm (VGG, AlexNet); not tuned."""

SYNTHETIC_SIZE, SYNTHETIC_CHANNELS, SYNTHETIC_CLASSES = 2048, 3, 10

_IMPORT_PATH = re.compile(r"^[^:]+:[A-Za-z_][\w.]*$")


def fitting_image_size(model: str, size: int) -> int:
    """The smallest image size of at least `size` that torchvision's `model` takes.

    Images are enlarged to it, never the architecture changed: AlexNet on 32x32 images sees
    64x64, ViT-H/14 42x42. Your own models take every size.
    """
    for prefix, (smallest, multiple) in _FITTING_SIZES.items():
        if model.startswith(prefix) and not is_import_path(model):
            return -(-max(size, smallest) // multiple) * multiple
    return size


def is_import_path(name: str) -> bool:
    """Whether `name` is `package.module:function` (or `path/to/file.py:function`)."""
    return ":" in name


def import_path_name(name: str) -> str:
    """`package.module.function` of `package.module:function`; any other name as it is.

    The module stays in the name: two projects may both call their network `make`, and neither is
    a model of torchvision. Of a script's path the file's own name is kept.
    """
    if not is_import_path(name):
        return name
    module, _, function = name.rpartition(":")
    if module.endswith(".py"):
        module = Path(module).stem
    return f"{module}.{function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Spec):
    """One training job.

    `model`, `dataset`, `loss` and `optimizer` are built-in names or `package.module:function`.
    `image_size` is in pixels a side (None: the dataset's own). `dataset_size`, `channels` and
    `num_classes` give the shape of `synthetic` data; for other datasets `dataset_size` trains on
    a stratified subset of so many samples. `learning_rate` None takes the optimizer's default.
    `augment` mirrors and shifts training images. `num_workers` are loader processes per rank.
    `gradient_compression` and `bucket_mb` say how DDP sends gradients (None: fp32, 25 MiB).
    """

    model: str
    dataset: str = "digits"
    data_dir: str | None = None
    download: bool = False
    image_size: int | None = None
    dataset_size: int | None = None
    channels: int | None = None
    num_classes: int | None = None
    augment: bool = False
    precision: Precision = "fp32"
    optimizer: str = "sgd"
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    loss: str = "cross_entropy"
    drop_last: bool = True
    num_workers: int = 0
    strategy: Strategy = "ddp"
    seed: int = 0
    gradient_compression: Compression | None = None
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        """Check every field once; names that need torch to be known are checked when built."""
        for name in ("model", "dataset", "optimizer", "loss"):
            value = check_name(name, getattr(self, name))
            if is_import_path(value) and not _IMPORT_PATH.match(value):
                raise InvalidInputError(
                    f"{name} must be a built-in name or package.module:function, not {value!r}"
                )
            if not is_import_path(value):
                object.__setattr__(self, name, value.lower())
        check_choice("precision", self.precision, Precision)
        check_strategy(self.strategy)
        if self.gradient_compression is not None:
            check_choice("gradient compression", self.gradient_compression, Compression)
        if self.bucket_mb is not None:
            check_real("bucket_mb", self.bucket_mb, strict=True, maximum=2**16)
        if self.strategy == "fsdp" and (self.gradient_compression or self.bucket_mb is not None):
            raise InvalidInputError(
                "gradient_compression and bucket_mb say how DDP sends gradients, and strategy "
                "'fsdp' gathers and scatters blocks: leave them out, or take strategy 'ddp'"
            )
        for name, largest in (
            ("image_size", 8192),
            ("dataset_size", 10**9),
            ("channels", 1024),
            ("num_classes", 10**6),
        ):
            if getattr(self, name) is not None:
                number = check_int(name, getattr(self, name), maximum=largest)
                object.__setattr__(self, name, number)
        if self.dataset != "synthetic" and self.channels is not None:
            raise InvalidInputError(
                f"channels shapes the synthetic dataset only, not {self.dataset!r}: leave it out"
            )
        if self.dataset in DEFAULT_IMAGE_SIZES and self.dataset != "synthetic" and self.num_classes:
            raise InvalidInputError(
                f"num_classes is the {self.dataset} dataset's own: leave out {self.num_classes}"
            )
        if self.learning_rate is not None:
            check_real("learning_rate", self.learning_rate, strict=True)
        check_real("momentum", self.momentum)
        check_real("weight_decay", self.weight_decay)
        if self.momentum >= 1:
            raise InvalidInputError(f"momentum must be below 1, not {self.momentum:g}")
        object.__setattr__(
            self, "num_workers", check_int("num_workers", self.num_workers, minimum=0)
        )
        object.__setattr__(self, "seed", check_int("seed", self.seed, minimum=0, maximum=2**32 - 1))
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", os.fspath(self.data_dir))

    def replace(self, **changes: object) -> Job:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def bucket_bytes(self) -> int | None:
        """Most bytes of a DDP bucket; None is torch's own 25 MiB."""
        return None if self.bucket_mb is None else max(int(self.bucket_mb * 2**20), 1)

    @property
    def model_name(self) -> str:
        """The model's name in the registry: your own function's with its module."""
        return import_path_name(self.model)

    @property
    def dataset_name(self) -> str:
        """The dataset's name in the registry; an image folder carries the folder's name."""
        if self.dataset == "imagefolder" and self.data_dir:
            return f"imagefolder-{slugify(Path(self.data_dir).expanduser().absolute().name)}"
        return import_path_name(self.dataset)

    @property
    def resolved_image_size(self) -> int | None:
        """Pixels a side that reach the model: enlarged to what it takes (fitting_image_size).

        None for your own dataset without `image_size`: its samples keep their size.
        """
        size = self.image_size or DEFAULT_IMAGE_SIZES.get(self.dataset)
        return None if size is None else fitting_image_size(self.model, size)

    @property
    def image_size_note(self) -> str:
        """One line where the images are enlarged for the model, else an empty string."""
        asked = self.image_size or DEFAULT_IMAGE_SIZES.get(self.dataset)
        size = self.resolved_image_size
        if asked == size or size is None:
            return ""
        return f"{self.model} does not take images of {asked} pixels: they are enlarged to {size}"

    @property
    def resolved_learning_rate(self) -> float:
        """The learning rate, or the optimizer's default where the job has none."""
        if self.learning_rate is not None:
            return self.learning_rate
        return DEFAULT_LEARNING_RATES.get(self.optimizer, 0.001)

    @property
    def variant(self) -> str:
        """What sets this workload apart beyond model, dataset, precision and optimizer."""
        default = dataclasses.replace(self, image_size=None).resolved_image_size
        parts = []
        if self.resolved_image_size != default:
            parts.append(f"{self.resolved_image_size}px")
        if self.dataset == "synthetic":
            parts += [f"{self.channels}ch"] if self.channels not in (None, 3) else []
            if self.num_classes not in (None, SYNTHETIC_CLASSES):
                parts.append(f"{self.num_classes}classes")
        if self.dataset_size not in (None, SYNTHETIC_SIZE if self.dataset == "synthetic" else None):
            parts.append(f"n{self.dataset_size}")
        # Without momentum SGD keeps no buffers: another memory line.
        parts += ["no-momentum"] if self.optimizer == "sgd" and self.momentum == 0 else []
        parts += [slugify(import_path_name(self.loss))] if self.loss != "cross_entropy" else []
        parts += ["augment"] if self.augment else []
        return "-".join(parts)

    @property
    def workload_slug(self) -> str:
        """Equal to `describe(job).slug`, without importing torch."""
        return Workload(
            model=self.model_name,
            dataset=self.dataset_name,
            dataset_size=1,
            precision=self.precision,
            optimizer=import_path_name(self.optimizer),
            strategy=self.strategy,
            variant=self.variant,
        ).slug
