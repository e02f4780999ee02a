"""A network that trains in no time: what a campaign kills is tula, not torch."""

from torch import nn


def make(num_classes: int, image_size: int) -> nn.Module:
    """One hidden layer."""
    width = 3 * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, num_classes))
