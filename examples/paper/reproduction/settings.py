"""What is measured and trained, at two scales: two CPU cores within an hour, or the paper's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow_tula.errors import InvalidInputError

Scale = Literal["small", "paper"]

SCALES: Mapping[Scale, Mapping[str, Any]] = {
    "small": {
        "models": "vgg11,resnet18,mobilenet_v3_small,squeezenet1_1",
        "dataset": "digits",
        "batch_sizes": (8, 16, 32, 64, 128, 256),
        "learning_dataset": "digits",
        "network": "auto",
        "large_batches": (64, 128, 256, 512),
        "reference_batch": 32,
        "epochs": 30.0,
        "max_steps": 16,
    },
    # ImageNet is not offered by name: `--models resnet50@imagefolder --data-dir FOLDER` takes it.
    "paper": {
        "models": "resnet50@cifar100,vgg11@cifar100,alexnet@caltech101,"
        "mobilenet_v3_large@caltech256",
        "dataset": "cifar100",
        "batch_sizes": (16, 32, 64, 128, 256, 512, 1024),
        "learning_dataset": "cifar100",
        "network": "resnet18",
        "large_batches": (512, 1024, 2048, 4096),
        "reference_batch": 128,
        "epochs": 90.0,
        "max_steps": 40,
    },
}
"""What an option takes at each scale where it is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of a reproduction, every one with its value.

    Sizes are samples: `batch_sizes` a rank for what is timed, `large_batches` and
    `reference_batch` in all for what is trained. `learning_rate` None is tuned on the validation
    split at the reference batch. `records` is a folder of measurements that are taken where they
    fit, and None means that everything is measured and trained anew.
    """

    folder: Path
    models: tuple[tuple[str, str], ...]
    """Each model with its dataset."""
    data_dir: str | None
    download: bool
    image_size: int | None
    batch_sizes: tuple[int, ...]
    world_sizes: tuple[int, ...] | None
    max_steps: int
    learning_dataset: str
    network: str
    large_batches: tuple[int, ...]
    reference_batch: int
    learning_rate: float | None
    epochs: float
    seeds: int
    workers: int | None
    records: Path | None

    @property
    def request(self) -> dict[str, str]:
        """What decides the result, without where it is kept; by name, as text."""
        unimportant = {"folder", "workers", "data_dir", "download"}
        return {
            name: str(getattr(self, name))
            for name in self.__dataclass_fields__
            if name not in unimportant
        }

    @property
    def largest(self) -> int:
        """The largest batch that is trained with."""
        return max(self.large_batches)


def make_settings(values: Mapping[str, Any], records: Path) -> Settings:
    """Options as the command line gives them, with those of the scale where they are open.

    Raises:
        InvalidInputError: a name or number that cannot be used, before anything is measured.
    """
    defaults = SCALES[values["scale"]]
    chosen = {
        name: values[name] if values[name] is not None else defaults[name] for name in defaults
    }
    largest, reference = max(chosen["large_batches"]), chosen["reference_batch"]
    if min(chosen["large_batches"]) <= reference:
        raise InvalidInputError(
            f"--large-batches must be above --reference-batch ({reference}), not "
            f"{min(chosen['large_batches'])}"
        )
    if len(chosen["large_batches"]) < 2 or len(chosen["batch_sizes"]) < 3:
        raise InvalidInputError(
            "a curve needs at least two --large-batches and three --batch-sizes, not "
            f"{len(chosen['large_batches'])} and {len(chosen['batch_sizes'])} (largest {largest})"
        )
    return Settings(
        folder=Path(values["output_dir"]) / "paper",
        models=_models(chosen["models"], chosen["dataset"]),
        data_dir=values["data_dir"],
        download=values["download"],
        image_size=values["image_size"],
        batch_sizes=chosen["batch_sizes"],
        world_sizes=values["world_sizes"],
        max_steps=chosen["max_steps"],
        learning_dataset=chosen["learning_dataset"],
        network=chosen["network"],
        large_batches=chosen["large_batches"],
        reference_batch=reference,
        learning_rate=values["learning_rate"],
        epochs=chosen["epochs"],
        seeds=values["seeds"],
        workers=values["workers"],
        records=records if values["from_records"] else None,
    )


def _models(words: str, dataset: str) -> tuple[tuple[str, str], ...]:
    """`a,b@data` as pairs; a model without `@` has the dataset of all."""
    pairs = []
    for word in (part.strip() for part in words.split(",")):
        model, _, own = word.partition("@")
        if not model:
            raise InvalidInputError(f"--models has an empty name in it: {words!r}")
        pairs.append((model, own or dataset))
    names = [model for model, _ in pairs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InvalidInputError(f"--models has {doubled[0]} twice: give each once")
    return tuple(pairs)
