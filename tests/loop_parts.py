"""Small training loops on scikit-learn's digits, as people write them."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@cache
def digits() -> TensorDataset:
    """1,797 real images of 8x8."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target))


def net() -> nn.Sequential:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def train(model=None, optimizer=None, *, batch_size=64, epochs=1, passes=1, after_step=None):
    """The loop of the tutorials."""
    model = net() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        optimizer.zero_grad()
        loader = DataLoader(digits(), batch_size=batch_size, shuffle=True)
        for number, (images, labels) in enumerate(loader, start=1):
            nn.functional.cross_entropy(model(images), labels).backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                if after_step is not None:
                    after_step(number)
    return model, optimizer
