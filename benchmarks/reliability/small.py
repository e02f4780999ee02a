"""A network that trains in no time: what a campaign kills is tula, not torch."""

import time

from torch import Tensor, nn


def make(num_classes: int, image_size: int) -> nn.Module:
    """One hidden layer."""
    width = 3 * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, num_classes))


class Slow(nn.Module):
    """Waits in every pass, so that there is time to do something to the store meanwhile."""

    def __init__(self, inner: nn.Module, pause_s: float) -> None:
        """Wrap a network."""
        super().__init__()
        self.inner, self.pause_s = inner, pause_s

    def forward(self, x: Tensor) -> Tensor:
        """The inner network's, later."""
        time.sleep(self.pause_s)
        return self.inner(x)


def make_slow(num_classes: int, image_size: int) -> nn.Module:
    """The same network at a hundred milliseconds a pass."""
    return Slow(make(num_classes, image_size), 0.1)
