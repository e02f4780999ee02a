"""Models and losses of the training tests' own, for worker processes to import by name."""

import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def small_net(num_classes: int) -> nn.Module:
    """For 8x8 images; batch norm and dropout, so that buffers and random numbers matter."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, num_classes),
    )


def linear_net(num_classes: int) -> nn.Module:
    """Without batch norm and dropout: every cut of a batch has the same gradient."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))


class _Slow(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.05)
        output: Tensor = self.inner(images)
        return output


def slow_net(num_classes: int) -> nn.Module:
    """small_net with time to be interrupted in."""
    return _Slow(small_net(num_classes))


_calls = 0


def _fails(number: int) -> bool:
    global _calls
    _calls += 1
    return _calls == number and os.environ.get("RANK") == "1"


def raises_on_rank_1(logits: Tensor, labels: Tensor) -> Tensor:
    if _fails(30):
        raise ValueError("the moon is in the wrong phase")
    return cross_entropy(logits, labels)


def dies_on_rank_1(logits: Tensor, labels: Tensor) -> Tensor:
    if _fails(30):
        os.kill(os.getpid(), signal.SIGSEGV)
    return cross_entropy(logits, labels)


def out_of_memory_on_rank_1(logits: Tensor, labels: Tensor) -> Tensor:
    if _fails(5):
        torch.empty(2**50, dtype=torch.uint8)
    return cross_entropy(logits, labels)


def diverging(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.requires_grad and _calls_reach(7):
        return cross_entropy(logits, labels) * float("nan")
    return cross_entropy(logits, labels)


def _calls_reach(number: int) -> bool:
    global _calls
    _calls += 1
    return _calls % number == 0


class _Double(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, num_classes)
        ).double()

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.inner(images.double())
        return output


def double_net(num_classes: int) -> nn.Module:
    """In float64, without batch norm and dropout: cuts of a batch differ by rounding alone."""
    return _Double(num_classes)


class _SlowOnOneRank(nn.Module):
    """Takes 2 ms a sample, and three times as much on the last rank."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        world = int(os.environ.get("WORLD_SIZE", "1"))
        last = world > 1 and int(os.environ.get("RANK", "0")) == world - 1
        self.seconds = 0.006 if last else 0.002

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds * len(images))
        output: Tensor = self.inner(images)
        return output


def slow_on_one_rank(num_classes: int) -> nn.Module:
    """linear_net whose last rank takes three times as long."""
    return _SlowOnOneRank(linear_net(num_classes))


def _told_to_fail() -> bool:
    """Whether this rank is the one that FAIL_RANK names, in a group of FAIL_WORLD ranks."""
    wanted = os.environ.get("FAIL_RANK"), os.environ.get("FAIL_WORLD", os.environ["WORLD_SIZE"])
    if (os.environ["RANK"], os.environ["WORLD_SIZE"]) != wanted:
        return False
    global _calls
    _calls += 1
    if _calls != int(os.environ.get("FAIL_CALL", "12")):
        return False
    once = os.environ.get("FAIL_ONCE")
    if once is None:
        return True
    try:  # the first start alone fails
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def fails_as_told(logits: Tensor, labels: Tensor) -> Tensor:
    """cross_entropy that fails in the way, on the rank and at the call that FAIL_* name."""
    if logits.requires_grad and _told_to_fail():
        how = os.environ["FAIL_HOW"]
        if how == "oom":
            torch.empty(2**50, dtype=torch.uint8)
        if how == "exception":
            raise ValueError("the moon is in the wrong phase")
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(logits, labels)
