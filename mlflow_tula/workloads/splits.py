"""Stratified train/test splits: seeded, disjoint, the same for every training seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlflow_tula.errors import InvalidInputError

TEST_FRACTION = 0.2
SPLIT_SEED = 20260318
"""Fixed, so that runs of different training seeds are tested on the same samples."""

Indices = npt.NDArray[np.int64]


def stratified_split(
    labels: npt.ArrayLike, *, test_fraction: float = TEST_FRACTION, seed: int = SPLIT_SEED
) -> tuple[Indices, Indices]:
    """Sorted (train, test) indices; every class of two samples or more is in both.

    A class with a single sample is in the training split only.
    """
    classes = np.asarray(labels).reshape(-1)
    generator = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(classes):
        members = generator.permutation(np.flatnonzero(classes == label))
        num_test = round(test_fraction * len(members))
        num_test = min(max(num_test, 1), len(members) - 1)
        test.append(members[:num_test])
        train.append(members[num_test:])
    if not train or not sum(map(len, test)):
        raise InvalidInputError(
            f"a dataset of {len(classes)} samples cannot be split: each class needs two or more"
        )
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def stratified_subset(labels: npt.ArrayLike, size: int, *, seed: int = SPLIT_SEED) -> Indices:
    """Sorted indices of `size` samples with the classes' proportions kept to within one."""
    classes = np.asarray(labels).reshape(-1)
    if size > len(classes):
        raise InvalidInputError(
            f"dataset_size must be at most the dataset's {len(classes)} training samples, "
            f"not {size}"
        )
    order = np.random.default_rng(seed).permutation(len(classes))
    found, counts = np.unique(classes, return_counts=True)
    quotas = size * counts / max(len(classes), 1)
    taken = np.floor(quotas).astype(np.int64)
    # largest remainders: what whole numbers leave goes to the classes that lack the most
    lacking = np.argsort(taken - quotas, kind="stable")[: size - int(taken.sum())]
    taken[lacking] += 1
    parts = [
        order[classes[order] == label][:count] for label, count in zip(found, taken, strict=True)
    ]
    return np.sort(np.concatenate(parts)).astype(np.int64)
