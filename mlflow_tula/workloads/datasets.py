"""Datasets by name, or your own, always as disjoint training and test data.

    data = build_datasets(Job(model="vgg11", dataset="fashion_mnist"))
    image, label = data.train[0]           # float [3, 32, 32], normalised; whole number

    digits         scikit-learn's real 8x8 images (nothing to download); stratified 80/20
    fashion_mnist  --data-dir, or Debian's package dataset-fashion-mnist, or --download
    cifar10, cifar100, caltech101, caltech256    torchvision's: --data-dir or --download
    imagefolder    any folder of class folders (--data-dir), such as ImageNet
    synthetic      noise around a pattern a class, of any shape and size

Datasets without a test split get a stratified 80/20 one with a fixed seed. Grey images are
repeated to three channels, because torchvision's models take three.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from mlflow_tula.errors import InvalidInputError, StoreError, UnknownNameError
from mlflow_tula.workloads.imagedata import (
    TensorImages,
    digits_arrays,
    read_idx,
    synthetic_arrays,
)
from mlflow_tula.workloads.job import (
    DEFAULT_IMAGE_SIZES,
    SYNTHETIC_CHANNELS,
    SYNTHETIC_CLASSES,
    SYNTHETIC_SIZE,
    Job,
    is_import_path,
)
from mlflow_tula.workloads.own_data import Datasets, build_own_datasets, labels_of
from mlflow_tula.workloads.splits import stratified_split, stratified_subset

logger = logging.getLogger(__name__)

DATA_DIR_VARIABLE = "TULA_DATA_DIR"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

__all__ = ["Datasets", "build_datasets", "data_root", "labels_of", "list_datasets"]

_GREY = {"digits": (0.3053, 0.3760), "fashion_mnist": (0.2860, 0.3530)}
_CIFAR = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Mean and deviation of the training images, of values scaled to 0..1."""

_POOL_IMAGES, _POOL_BYTES = 2048, 64 * 2**20  # distinct synthetic images at most


def list_datasets() -> list[str]:
    """Names of the built-in datasets, sorted."""
    return sorted(DEFAULT_IMAGE_SIZES)


def build_datasets(job: Job) -> Datasets:
    """Load the job's dataset.

    Raises:
        UnknownNameError: no such dataset; suggests the nearest names.
        InvalidInputError: its folder is absent or cannot be used; names the folder and the way out.
        StoreError: a file cannot be read, or a download failed.
    """
    build = build_own_datasets if is_import_path(job.dataset) else _BUILDERS.get(job.dataset)
    if build is None:
        hint = "(your own: package.module:function)"
        raise UnknownNameError("dataset", job.dataset, list_datasets(), hint)
    if job.image_size_note:
        logger.log(logging.WARNING if job.image_size else logging.INFO, job.image_size_note)
    data = build(job)
    if job.dataset_size is not None and job.dataset != "synthetic":
        labels = labels_of(data.train)
        chosen = stratified_subset(labels, job.dataset_size).tolist()
        data = replace(data, train=Subset(data.train, chosen))
    return data


def data_root(job: Job) -> Path:
    """Where the job's data lies: its data_dir, TULA_DATA_DIR, or the user's cache folder."""
    given = job.data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if given:
        return Path(given).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("mlflow_tula") / "data"


def _size(job: Job) -> int:
    size = job.resolved_image_size
    assert size is not None, "built-in datasets have an image size"
    return size


def _build_digits(job: Job) -> Datasets:
    images, labels = digits_arrays()
    mean, std = _GREY["digits"]
    train, test = (
        TensorImages(
            images[at],
            labels[at],
            image_size=_size(job),
            mean=[mean],
            std=[std],
            augment=job.augment and part == 0,
        )
        for part, at in enumerate(map(torch.from_numpy, stratified_split(labels)))
    )
    return Datasets(train=train, test=test, num_classes=10, image_size=_size(job), channels=3)


def _build_synthetic(job: Job) -> Datasets:
    channels = job.channels or SYNTHETIC_CHANNELS
    if not is_import_path(job.model) and channels not in (1, 3):
        raise InvalidInputError(
            f"torchvision's models take 3 channels (1 is repeated), not channels={channels}: "
            f"use a model of your own"
        )
    num_classes = job.num_classes or SYNTHETIC_CLASSES
    size = job.dataset_size or SYNTHETIC_SIZE
    seen = channels if is_import_path(job.model) else 3
    pool = min(_POOL_IMAGES, _POOL_BYTES // (channels * _size(job) ** 2))
    parts = []
    for seed, length in enumerate((size, max(size // 4, 1)), start=1):
        images, labels = synthetic_arrays(
            min(length, max(pool, num_classes)),
            channels=channels,
            size=_size(job),
            num_classes=num_classes,
            seed=seed,
        )
        shape = {"mean": [0.5] * channels, "std": [0.25] * channels}
        parts.append(
            TensorImages(
                images,
                labels,
                image_size=_size(job),
                channels=seen,
                length=length,
                augment=job.augment and seed == 1,
                mirror=True,
                **shape,
            )
        )
    return Datasets(
        train=parts[0],
        test=parts[1],
        num_classes=num_classes,
        image_size=_size(job),
        channels=seen,
    )


def _build_fashion_mnist(job: Job) -> Datasets:
    folder = _find_fashion_mnist(job)
    mean, std = _GREY["fashion_mnist"]
    parts = []
    for part in ("train", "t10k"):
        images = torch.from_numpy(read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte")))
        labels = torch.from_numpy(read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte")))
        parts.append(
            TensorImages(
                images.unsqueeze(1),
                labels,
                image_size=_size(job),
                mean=[mean],
                std=[std],
                augment=job.augment and part == "train",
                mirror=True,
            )
        )
    return Datasets(
        train=parts[0], test=parts[1], num_classes=10, image_size=_size(job), channels=3
    )


def _idx_file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _find_fashion_mnist(job: Job) -> Path:
    root = data_root(job)
    folders = [root / "FashionMNIST" / "raw", root / "raw", root / "fashion-mnist", root]
    if job.data_dir is None:
        folders.append(DEBIAN_FASHION_MNIST)

    def find() -> Path | None:
        whole = (f for f in folders if _idx_file(f, "t10k-labels-idx1-ubyte").is_file())
        return next(whole, None)

    found = find()
    if found is None and job.download:
        from torchvision.datasets import FashionMNIST

        _download(job, root, lambda: FashionMNIST(str(root), download=True))
        found = find()
    if found is None:
        raise _absent(job, root, " or install Debian's package dataset-fashion-mnist")
    return found


def _build_cifar(job: Job) -> Datasets:
    from torchvision import datasets as tv_datasets

    kind, folder, num_classes = {
        "cifar10": (tv_datasets.CIFAR10, "cifar-10-batches-py", 10),
        "cifar100": (tv_datasets.CIFAR100, "cifar-100-python", 100),
    }[job.dataset]
    root = _find_or_download(job, folder, lambda root: kind(str(root), download=True))
    mean, std = _CIFAR[job.dataset]
    parts = []
    for train in (True, False):
        data = _read(job, root, partial(kind, str(root), train=train))
        parts.append(
            TensorImages(
                torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(),
                torch.tensor(data.targets),
                image_size=_size(job),
                mean=mean,
                std=std,
                augment=job.augment and train,
                mirror=True,
            )
        )
    return Datasets(
        train=parts[0],
        test=parts[1],
        num_classes=num_classes,
        image_size=_size(job),
        channels=3,
    )


def _build_caltech(job: Job) -> Datasets:
    from mlflow_tula.workloads.imagefiles import load_caltech, split_files

    folder = f"{job.dataset}/{job.dataset.removeprefix('caltech')}_ObjectCategories"
    root = _find_or_download(
        job, folder, lambda root: load_caltech(job.dataset, root, download=True)
    )
    base, labels, num_classes = _read(
        job, root, lambda: load_caltech(job.dataset, root, download=False)
    )
    train, test = split_files(base, labels, _size(job), augment=job.augment)
    return Datasets(
        train=train, test=test, num_classes=num_classes, image_size=_size(job), channels=3
    )


def _build_image_folder(job: Job) -> Datasets:
    from mlflow_tula.workloads.imagefiles import load_image_folder

    if job.data_dir is None:
        raise InvalidInputError("dataset imagefolder needs --data-dir, a folder of class folders")
    root = data_root(job)
    if not root.is_dir():
        raise InvalidInputError(f"no folder {str(root)!r}: give --data-dir, a folder of classes")
    train, test, num_classes = load_image_folder(root, _size(job), augment=job.augment)
    return Datasets(
        train=train, test=test, num_classes=num_classes, image_size=_size(job), channels=3
    )


def _find_or_download(job: Job, folder: str, download: Callable[[Path], object]) -> Path:
    """The root that has `folder` (or whose name it is: people point at either), or an error."""
    root = data_root(job)
    parts = Path(folder).parts
    for candidate in (root, root.parent):
        if (candidate / folder).is_dir() and (candidate == root or root.name == parts[0]):
            return candidate
    if not job.download:
        raise _absent(job, root / folder)
    _download(job, root, lambda: download(root))
    return root


def _absent(job: Job, folder: Path, more: str = "") -> InvalidInputError:
    comma = "," if more else " or"
    return InvalidInputError(
        f"dataset {job.dataset} is not in {str(folder)!r}: give the folder that holds it with "
        f"--data-dir{comma} fetch it with --download{more and ','}{more}"
    )


def _download(job: Job, root: Path, fetch: Callable[[], object]) -> None:
    """Fetch once, however many ranks ask."""
    from filelock import FileLock

    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{job.dataset}.lock"):
            fetch()
    except Exception as error:  # network, disk, checksum
        reason = (str(error).splitlines() or [""])[0]
        raise StoreError(
            f"cannot download {job.dataset} into {str(root)!r}: {type(error).__name__}: {reason}"
        ) from error


def _read(job: Job, root: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise StoreError(
            f"cannot read {job.dataset} in {str(root)!r}: {reason} (try --download)"
        ) from error


_BUILDERS: dict[str, Callable[[Job], Datasets]] = {
    "digits": _build_digits,
    "synthetic": _build_synthetic,
    "fashion_mnist": _build_fashion_mnist,
    "cifar10": _build_cifar,
    "cifar100": _build_cifar,
    "caltech101": _build_caltech,
    "caltech256": _build_caltech,
    "imagefolder": _build_image_folder,
}
