"""Whole datasets in memory, split into training, validation and test.

    digits         scikit-learn's 1,797 real images, 8x8; 80 % for training, stratified
    fashion_mnist  all 60,000 / 10,000 images, 28x28 (Debian's dataset-fashion-mnist, or a folder)
    mnist1d        5,000 signals of 40 samples, made by the PyPI package `mnist1d` from its seed 42
    cifar10, ...   every other dataset of `tula models` that fits in memory, from a folder

The validation split is a fifth of the training data, stratified, the same for every seed. Settings
are chosen on it; the test split is measured only by trials that ask for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mlflow_tula.comparing.facts import Split
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.workloads.datasets import build_datasets
from mlflow_tula.workloads.imagedata import TensorImages
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.splits import stratified_split

NATIVE_SIZES = {"digits": 8, "fashion_mnist": 28}
_GREY = ("digits", "fashion_mnist")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayData:
    """Inputs and labels to train on and to measure on."""

    train_x: Tensor
    train_y: Tensor
    eval_x: Tensor
    eval_y: Tensor
    num_classes: int


@functools.lru_cache(maxsize=4)
def load(dataset: str, split: Split, data_dir: str | None = None, rgb: bool = False) -> ArrayData:
    """A dataset ready for training; `rgb` for models that take three channels of 32 pixels.

    Raises:
        InvalidInputError: no such dataset, its folder or its package is absent, or it holds
            files to be read one by one.
    """
    whole = _mnist1d() if dataset == "mnist1d" else _images(dataset, data_dir, rgb)
    if split == "test":
        return whole
    fit, held = map(torch.from_numpy, stratified_split(whole.train_y.numpy()))
    return ArrayData(
        train_x=whole.train_x[fit],
        train_y=whole.train_y[fit],
        eval_x=whole.train_x[held],
        eval_y=whole.train_y[held],
        num_classes=whole.num_classes,
    )


def _images(dataset: str, data_dir: str | None, rgb: bool) -> ArrayData:
    size = None if rgb else NATIVE_SIZES.get(dataset)
    data = build_datasets(
        Job(model="resnet18", dataset=dataset, data_dir=data_dir, image_size=size)
    )
    parts = []
    for part in (data.train, data.test):
        if not isinstance(part, TensorImages):
            raise InvalidInputError(
                f"compare needs a dataset that fits in memory, and {dataset} is read file by "
                "file: take digits, fashion_mnist, mnist1d, cifar10 or cifar100"
            )
        images, labels = part.fetch(range(len(part)))
        if dataset in _GREY and not rgb:
            images = images[:, :1].contiguous()  # the three channels are copies of one
        parts += [images, labels]
    train_x, train_y, eval_x, eval_y = parts
    return ArrayData(
        train_x=train_x,
        train_y=train_y,
        eval_x=eval_x,
        eval_y=eval_y,
        num_classes=data.num_classes,
    )


def _mnist1d() -> ArrayData:
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise InvalidInputError(
            "dataset mnist1d needs the package of that name: pip install 'mlflow-tula[compare]'"
        ) from error
    import random

    import numpy as np

    # Its seed is numpy's and Python's global one: put both back.
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        made = cast(dict[str, Any], make_dataset(get_dataset_args()))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    return ArrayData(
        train_x=torch.tensor(made["x"], dtype=torch.float32).unsqueeze(1),
        train_y=torch.tensor(made["y"], dtype=torch.int64),
        eval_x=torch.tensor(made["x_test"], dtype=torch.float32).unsqueeze(1),
        eval_y=torch.tensor(made["y_test"], dtype=torch.int64),
        num_classes=10,
    )


class SampleStream:
    """Indices in the order of one seeded permutation after another, in pieces of any size.

    So every batch size sees the same samples in the same order, and none drops the end of an
    epoch.
    """

    def __init__(self, count: int, seed: int) -> None:
        """Draw from `count` samples."""
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._left = torch.empty(0, dtype=torch.int64)

    def take(self, size: int) -> Tensor:
        """The next `size` indices."""
        pieces: list[Tensor] = [self._left]
        have = len(self._left)
        while have < size:
            pieces.append(torch.randperm(self._count, generator=self._generator))
            have += self._count
        joined = torch.cat(pieces)
        self._left = joined[size:]
        return joined[:size]


def shards(parts: int, *tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Cut tensors of one length into `parts` pieces of nearly equal length."""
    return list(zip(*(tensor.tensor_split(parts) for tensor in tensors), strict=True))
