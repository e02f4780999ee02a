"""A loss that fails on one rank, as the campaign of ranks.py says through FAULT_* variables."""

import os
import signal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_calls = 0


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """cross_entropy, or the fault: at one batch size (profile) or one call (train), once."""
    global _calls
    value = cross_entropy(logits, labels)
    if not logits.requires_grad or os.environ.get("RANK") != os.environ.get("FAULT_RANK"):
        return value
    _calls += 1
    size, call = os.environ.get("FAULT_SIZE"), os.environ.get("FAULT_CALL")
    here = (size is not None and len(labels) == int(size)) or (
        call is not None and _calls == int(call)
    )
    if here and (size is not None or _first_time()):
        _fail(os.environ["FAULT_KIND"])
    return value


def _first_time() -> bool:
    """A training that was started again must not fail again."""
    try:
        os.close(os.open(os.environ["FAULT_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _fail(kind: str) -> None:
    if kind == "oom":
        torch.empty(2**50, dtype=torch.uint8)
    if kind == "exception":
        raise ValueError("the moon is in the wrong phase")
    os.kill(os.getpid(), signal.SIGKILL)
