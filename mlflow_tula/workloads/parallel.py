"""A model on several ranks: DDP's copies or FSDP's shards, and what a rank waits for the others.

    replica = replicate(model, strategy="ddp", world_size=2, device=device)
    with synchronised(replica, last=True):          # gradients meet in the last pass only (DDP)
        loss(replica(inputs), targets).backward()

FSDP is torch's own `fully_shard` (FSDP2) over blocks of at most about an eighth of the model, and
over the rest. A rank holds its share of parameters, gradients and optimizer state, and while a
block computes that block whole. Gradients are reduced in every pass: kept whole between passes
they would take the memory that sharding is for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlflow_tula.specs import Strategy
from mlflow_tula.workloads.job import Job

BLOCK_SHARE = 1 / 8
"""A module with at most this share of the parameters is not cut into smaller blocks."""
_WHOLE = (nn.MultiheadAttention,)
"""Modules that use their children's weights without calling them: never cut."""


def replicate(
    model: nn.Module,
    *,
    strategy: Strategy,
    world_size: int,
    device: torch.device,
    **ddp_options: Any,
) -> nn.Module:
    """What a training step calls: the model alone, DDP around it, or the model made of shards.

    Args:
        model: on its device; under FSDP it is changed in place, before its optimizer is made.
        strategy: `ddp` or `fsdp`.
        world_size: ranks of the default process group; one needs neither.
        device: where the model lies.
        ddp_options: of DistributedDataParallel.
    """
    if world_size == 1:
        return model
    if strategy == "fsdp":
        return _shard(model, world_size, device)
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, **ddp_options)


def ddp_options(job: Job) -> dict[str, Any]:
    """What a job asks of DistributedDataParallel."""
    return {} if job.bucket_mb is None else {"bucket_cap_mb": job.bucket_mb}


def compress_gradients(replica: nn.Module, job: Job) -> None:
    """Let DDP send gradients as the job wants: in bf16 by torch's own hook, or as they are.

    Half the bytes are sent; the averaged gradient is rounded to bf16 (8 bits of mantissa).
    """
    if job.gradient_compression == "bf16" and isinstance(replica, DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)


@contextlib.contextmanager
def synchronised(replica: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one pass: DDP's gradients are reduced in the last pass of an accumulation only."""
    if last or not isinstance(replica, DistributedDataParallel):
        yield
        return
    with replica.no_sync():
        yield


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded each for itself, in order; what is left belongs to the model.

    From the top down: a module that holds more than BLOCK_SHARE of the parameters gives way to
    its children, down to single layers. Modules that share parameters with others stay whole.
    """
    total = sum(p.numel() for p in model.parameters())
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        parameters = list(module.parameters())
        if not parameters:
            return
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        large = sum(p.numel() for p in parameters) > BLOCK_SHARE * total
        if container or (large and children and not isinstance(module, _WHOLE)):
            for child in children:
                visit(child)
        elif all(uses[id(p)] == 1 for p in parameters):
            found.append(module)

    for child in model.children():
        visit(child)
    return found


def largest_block(model: nn.Module) -> int:
    """Parameters of the largest block that a rank holds whole while it computes."""
    parts = [{id(p): p.numel() for p in block.parameters()} for block in blocks(model)]
    inside = {key for part in parts for key in part}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    return max([rest, *(sum(part.values()) for part in parts)])


def _shard(model: nn.Module, world_size: int, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP holds the model's parameters."""
    return any(hasattr(p, "to_local") for p in model.parameters())


def local_bytes(tensor: Tensor) -> int:
    """Bytes that this rank holds of a tensor: of a sharded one its own part."""
    to_local = getattr(tensor, "to_local", None)
    return int(tensor.nbytes if to_local is None else to_local().nbytes)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together (every rank takes part); any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


class GradientWait:
    """Marks where a rank's own backward pass ends and its wait for the others begins.

    DDP waits for its all-reduces in a callback at the end of the backward pass. A callback that is
    queued before it, when the pass begins, runs right before that wait.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        """Take marks with `mark`, a device clock's."""
        self._mark = mark
        self.begin: Any = None

    def watch(self, loss: Tensor, replica: nn.Module) -> bool:
        """Before `loss.backward()`; False where there is nothing to wait for, or no way to tell."""
        self.begin = None
        if not isinstance(replica, DistributedDataParallel):
            return False
        loss.register_hook(self._queue)  # type: ignore[no-untyped-call]
        return True

    def _queue(self, gradient: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self.begin = self._mark()
