"""Your own data by `package.module:function`, made to fit; and what a pair of datasets is.

The function returns (train, test), or one dataset that is then split 80/20, stratified with a
fixed seed. It may take `data_dir`, `download`, `image_size`, `num_classes` and `seed` by name.
Samples are (tensor, label). Images [C, H, W] are resized to the job's image_size, where it has
one, and grey ones are repeated to three channels for torchvision's models.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, Subset

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.workloads.job import Job, fitting_image_size, is_import_path
from mlflow_tula.workloads.resolve import call_with_known, resolve_callable
from mlflow_tula.workloads.splits import SPLIT_SEED, TEST_FRACTION, stratified_split


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """Disjoint training and test data with the shape of a sample (None: not an image)."""

    train: Dataset[Any]
    test: Dataset[Any]
    num_classes: int
    image_size: int | None
    channels: int | None

    @property
    def train_size(self) -> int:
        """Training samples in an epoch."""
        return len(cast(Sized, self.train))

    @property
    def test_size(self) -> int:
        """Test samples."""
        return len(cast(Sized, self.test))


def labels_of(dataset: Dataset[Any]) -> Sequence[int]:
    """Every sample's label: from what the dataset keeps, else by reading all samples."""
    if isinstance(dataset, Subset):
        labels = labels_of(dataset.dataset)
        return [int(labels[i]) for i in dataset.indices]
    for name in ("targets", "labels", "y", "_labels"):
        kept = getattr(dataset, name, None)
        if kept is not None and not callable(kept) and len(kept) == len(cast(Sized, dataset)):
            return [int(label) for label in kept]
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) > 1:
        return [int(label) for label in tensors[1]]
    return [int(dataset[i][1]) for i in range(len(cast(Sized, dataset)))]


class FittedImages(Dataset[tuple[Tensor, Any]]):
    """Another dataset's images, resized and repeated to so many channels."""

    def __init__(self, base: Dataset[Any], image_size: int | None, channels: int) -> None:
        """Fit the samples of `base`."""
        self._base = base
        self._image_size = image_size
        self._channels = channels

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(cast(Sized, self._base))

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """One image [channels, image_size, image_size] and its label."""
        image, label = self._base[index]
        size = image.shape[-2:]
        if self._image_size is not None:
            size = torch.Size((self._image_size, self._image_size))
        if image.shape[-2:] != size:
            image = interpolate(image[None], size, mode="bilinear", antialias=True)[0]
        return image.expand(self._channels, *size), label


def build_own_datasets(job: Job) -> Datasets:
    """Call the job's dataset function and make what it returns a `Datasets`."""
    train, test = _call(job)
    for name, part in (("training", train), ("test", test)):
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or not len(part):
            raise InvalidInputError(
                f"the {name} data of {job.dataset!r} must be a dataset of known, non-zero length, "
                f"not {type(part).__name__}"
            )
    if train is test:
        raise InvalidInputError(
            f"{job.dataset!r} returned the same object for training and test: return one dataset "
            f"to have it split, or two"
        )
    num_classes = job.num_classes or _num_classes(job, train)
    image_size, channels = _image_shape(job, train)
    if channels is not None:
        image_size, channels = _fitting_shape(job, image_size, channels)
        train, test = (_fit(job, part, image_size, channels) for part in (train, test))
    return Datasets(
        train=train,
        test=test,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
    )


def _fit(job: Job, part: Any, image_size: int | None, channels: int) -> Any:
    if _image_shape(job, part) == (image_size, channels):
        return part
    return FittedImages(part, image_size, channels)


def _call(job: Job) -> tuple[Any, Any]:
    known = {
        "data_dir": job.data_dir,
        "download": job.download,
        "image_size": job.image_size,
        "num_classes": job.num_classes,
        "seed": job.seed,
    }
    function = resolve_callable(job.dataset)
    try:
        made = call_with_known(function, **known)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InvalidInputError(
            f"dataset {job.dataset!r} failed: {type(error).__name__}: {reason}"
        ) from error
    if isinstance(made, Datasets):
        return made.train, made.test
    if isinstance(made, tuple):
        if len(made) != 2:
            raise InvalidInputError(
                f"dataset {job.dataset!r} must return (train, test) or one dataset, not {len(made)}"
            )
        return made[0], made[1]
    return _split(made)


def _split(dataset: Any) -> tuple[Any, Any]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
        return dataset, None  # refused by the caller
    if _is_class(dataset[0][1]):
        train, test = stratified_split(labels_of(dataset))
    else:
        order = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
        cut = max(1, round(TEST_FRACTION * len(dataset)))
        train, test = np.sort(order[cut:]), np.sort(order[:cut])
    return Subset(dataset, train.tolist()), Subset(dataset, test.tolist())


def _is_class(label: Any) -> bool:
    if isinstance(label, Tensor):
        return label.ndim == 0 and not label.is_floating_point()
    return isinstance(label, (int, np.integer))


def _num_classes(job: Job, train: Any) -> int:
    base = train
    while isinstance(base, Subset):
        base = base.dataset
    for name in ("num_classes", "classes"):
        kept = getattr(base, name, None)
        if isinstance(kept, int) and kept > 0:
            return kept
        if isinstance(kept, (list, tuple)) and kept:
            return len(kept)
    if not _is_class(train[0][1]):
        raise InvalidInputError(
            f"the labels of {job.dataset!r} are no class numbers: say how wide the model's output "
            f"is with --num-classes"
        )
    return max(labels_of(train)) + 1


def _image_shape(job: Job, train: Any) -> tuple[int | None, int | None]:
    """(side, channels) of the first sample; no side where not square, Nones where no image."""
    sample = train[0]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise InvalidInputError(
            f"samples of {job.dataset!r} must be (input, label), not {type(sample).__name__}"
        )
    image = sample[0]
    if not isinstance(image, Tensor):
        raise InvalidInputError(
            f"samples of {job.dataset!r} must start with a tensor, not "
            f"{type(image).__name__}: apply torchvision.transforms.ToTensor"
        )
    if image.ndim != 3 or not image.is_floating_point():
        if is_import_path(job.model):
            return None, None
        raise InvalidInputError(
            f"torchvision's models take float images [C, H, W], not {image.dtype} of shape "
            f"{list(image.shape)}: use a model of your own, or change {job.dataset!r}"
        )
    channels, height, width = image.shape
    return (height if height == width else None), channels


def _fitting_shape(job: Job, image_size: int | None, channels: int) -> tuple[int | None, int]:
    """The side and channels that the job's model is to see."""
    if is_import_path(job.model):
        return job.image_size or image_size, channels
    if channels not in (1, 3):
        raise InvalidInputError(
            f"torchvision's models take 3 channels (1 is repeated), not the {channels} of "
            f"{job.dataset!r}: use a model of your own"
        )
    size = job.image_size or image_size
    if size is None:
        raise InvalidInputError(
            f"the images of {job.dataset!r} are not square: say the size to resize them to with "
            f"--image-size"
        )
    return fitting_image_size(job.model, size), 3
