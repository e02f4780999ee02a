"""Datasets of image files: any ImageFolder (ImageNet), Caltech 101 and 256."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets as tv_datasets
from torchvision.transforms import v2

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.workloads.splits import Indices, stratified_split

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_TEST_FOLDERS = ("test", "val", "valid", "validation")


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Some samples of a torchvision dataset of PIL images, each through a transform."""

    def __init__(
        self,
        base: Any,
        labels: Sequence[int],
        indices: Indices,
        transform: Callable[[Any], Tensor],
    ) -> None:
        """Keep `indices` of `base`; `labels` are those of all of base's samples."""
        self._base = base
        self._indices = indices
        self._transform = transform
        self.targets = torch.from_numpy(np.asarray(labels, dtype=np.int64)[indices])

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image [3, S, S] and its label."""
        image, label = self._base[int(self._indices[index])]
        return self._transform(image), int(label)


def image_transform(image_size: int, *, augment: bool) -> Callable[[Any], Tensor]:
    """Short side to `image_size`, centre crop, ImageNet's normalisation; or a random crop."""
    steps: list[Any] = [v2.RGB()]
    if augment:
        steps += [v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps += [v2.Resize(image_size, antialias=True), v2.CenterCrop(image_size)]
    steps += [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    return v2.Compose(steps)  # type: ignore[no-any-return]


def split_files(
    base: Any, labels: Sequence[int], image_size: int, *, augment: bool
) -> tuple[ImageFiles, ImageFiles]:
    """A stratified train/test split of one torchvision dataset."""
    train, test = stratified_split(labels)
    return (
        ImageFiles(base, labels, train, image_transform(image_size, augment=augment)),
        ImageFiles(base, labels, test, image_transform(image_size, augment=False)),
    )


def load_caltech(name: str, root: Path, *, download: bool) -> tuple[Any, Sequence[int], int]:
    """Caltech 101 or 256 in `root`: the dataset, its labels, its number of classes."""
    kind = tv_datasets.Caltech101 if name == "caltech101" else tv_datasets.Caltech256
    dataset = kind(str(root), download=download)
    return dataset, dataset.y, len(dataset.categories)


class _SameClasses(tv_datasets.ImageFolder):  # type: ignore[misc]  # untyped base
    """An ImageFolder with the classes, and so the labels, of another one."""

    def __init__(self, root: Path, class_to_idx: dict[str, int]) -> None:
        self._class_to_idx = class_to_idx
        super().__init__(str(root), allow_empty=True)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """The other dataset's classes; a folder that it lacks is an error."""
        found = {path.name for path in Path(directory).iterdir() if path.is_dir()}
        unknown = sorted(found - set(self._class_to_idx))
        if unknown:
            raise InvalidInputError(
                f"class {unknown[0]!r} of {str(directory)!r} is not in the training folder: "
                f"both need the same class folders"
            )
        return list(self._class_to_idx), self._class_to_idx


def load_image_folder(
    root: Path, image_size: int, *, augment: bool
) -> tuple[ImageFiles, ImageFiles, int]:
    """(train, test, number of classes) of a folder of class folders.

    `root` has `train` and one of `test`, `val`, `valid`, `validation`, each with a folder a
    class; or it has the class folders themselves (or only `train`): then 80/20 stratified.
    """
    train_root = root / "train" if (root / "train").is_dir() else root
    train = _image_folder(train_root)
    test_root = _test_folder(root, train.classes) if train_root != root else None
    if test_root is None:
        parts = split_files(train, train.targets, image_size, augment=augment)
        return *parts, len(train.classes)
    test = _SameClasses(test_root, train.class_to_idx)
    if not len(test):
        raise InvalidInputError(f"no images in {str(test_root)!r}: add some, or remove the folder")
    return (
        _all_of(train, image_transform(image_size, augment=augment)),
        _all_of(test, image_transform(image_size, augment=False)),
        len(train.classes),
    )


def _image_folder(root: Path) -> Any:
    try:
        return tv_datasets.ImageFolder(str(root))
    except FileNotFoundError as error:  # no class folders, or an empty one
        reason = str(error).splitlines()[0]
        raise InvalidInputError(f"{str(root)!r} is not a folder of classes: {reason}") from error


def _test_folder(root: Path, classes: Sequence[str]) -> Path | None:
    """The first test folder with class folders (ImageNet's `test` has none, its `val` has)."""
    for name in _TEST_FOLDERS:
        folder = root / name
        if any((folder / label).is_dir() for label in classes):
            return folder
    return None


def _all_of(dataset: Any, transform: Callable[[Any], Tensor]) -> ImageFiles:
    return ImageFiles(dataset, dataset.targets, np.arange(len(dataset)), transform)
