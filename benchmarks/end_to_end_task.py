"""What benchmarks/end_to_end.py trains: LeNet-5, and real data with a validation part of its own.

Runs stop at a target on the validation part, which is cut from the training data; the test split is
looked at once, when a run has ended.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn
from torch.utils.data import Subset

from mlflow_tula.workloads.datasets import Datasets, build_datasets, labels_of
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.splits import stratified_split

VALIDATION_SEED = 11


def lenet5(num_classes: int = 10, image_size: int = 28) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) as it is trained today: rectifiers, max pooling, 3 channels."""
    side = (image_size // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def fashion_mnist(image_size: int | None = None) -> Datasets:
    """Fashion-MNIST's 60,000 training images: 54,000 to train, 6,000 to validate."""
    job = Job(model="none", dataset="fashion_mnist", image_size=image_size or 28)
    return validated(build_datasets(job), share=0.1)


def digits(image_size: int | None = None) -> Datasets:
    """scikit-learn's digits: 1,150 of the 1,438 training images to train, 288 to validate."""
    return validated(build_datasets(Job(model="none", image_size=image_size)), share=0.2)


def validated(data: Datasets, *, share: float) -> Datasets:
    """The training part cut into training and validation, stratified, the same for every seed."""
    kept, held = stratified_split(
        np.asarray(labels_of(data.train)), test_fraction=share, seed=VALIDATION_SEED
    )
    return replace(
        data,
        train=Subset(data.train, kept.tolist()),
        test=Subset(data.train, held.tolist()),
    )
