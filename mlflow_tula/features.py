"""Static features: what one training step of a job computes, without running it.

    features = extract(job)            # ResNet50 in about a second, no device needed

Protocol: the model is built without storage (`meta`), an update creates the optimizer's state,
and every kernel of one more whole step (forward, backward, update) is listed with its FLOPs
(torch.utils.flop_counter), the bytes it reads and writes, and the bytes that live at that moment.
Done at two batch sizes, this separates what grows with the batch from what does not.

A model that looks at numbers (a branch on a tensor's value) is run on small real batches instead;
one whose kernels differ from batch to batch gives sums by kind; what is then missing is said in
`problem`.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate
from torch.utils.flop_counter import conv_flop_count, flop_registry

from mlflow_tula.model_features import ModelFeatures, OperationGroup, Phase
from mlflow_tula.workloads.datasets import Datasets, build_datasets
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.losses import build_loss
from mlflow_tula.workloads.models import AUTOCAST, build_model
from mlflow_tula.workloads.optimizers import build_optimizer

logger = logging.getLogger(__name__)

SMALL, LARGE = 2, 4
"""Batch sizes of the two passes; batch norm refuses one sample."""

aten = torch.ops.aten
_NO_KERNEL = {
    *(aten.detach, aten.alias, aten.view, aten._unsafe_view, aten.lift_fresh),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.is_same_size),
}
_KINDS = (
    ("matmul", ("mm", "addmm", "bmm", "baddbmm", "attention", "linear")),
    ("normalization", ("norm",)),
    ("pooling", ("pool",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kernel:
    """One kernel of a step: its name and kind, FLOPs, bytes moved, bytes alive when it ends."""

    name: str
    kind: str
    phase: Phase
    flops: int
    moved_bytes: int
    live_bytes: int


def extract(job: Job, *, datasets: Datasets | None = None) -> ModelFeatures:
    """The static features of one rank's step of the job.

    Args:
        job: names model, loss, optimizer and precision.
        datasets: the job's, where already loaded; a sample's shape is taken from it.

    Raises:
        InvalidInputError: the model cannot be built at all.
    """
    data = datasets or build_datasets(job)
    sample = data.train[0]

    model = build_model(job, data.num_classes, image_size=data.image_size, device="meta")
    problems: list[str] = []
    for device in ("meta", "cpu"):
        try:
            small, large = (_one_step(job, data, sample, n, device) for n in (SMALL, LARGE))
        except Exception as error:  # whatever own code does with a tensor that has no values
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("no features of %s on %s: %s", job.model_name, device, reason)
            problems.append(f"{device}: {type(error).__name__}: {reason[:160]}")
            continue
        return _features(job, model, sample, small, large, problems)
    return ModelFeatures(problem="; ".join(problems), **_facts(job, model, sample))


def _one_step(job: Job, data: Datasets, sample: Any, size: int, device: str) -> list[_Kernel]:
    """Every kernel of the second step on a batch of this size."""
    with ExitStack() as stack:
        model = build_model(job, data.num_classes, image_size=data.image_size, device=device)
        autocast: Any = nullcontext()
        batch = default_collate([sample] * size)
        if job.precision in AUTOCAST:
            autocast = torch.autocast("cpu", dtype=AUTOCAST[job.precision])
            if device == "meta":  # autocast does not reach tensors on meta
                from torch._subclasses.fake_tensor import FakeTensorMode

                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                model = model.to_empty(device="cpu")
        place = "cpu" if job.precision in AUTOCAST else device
        inputs, target = tree_map(
            lambda leaf: _placed(leaf, place) if isinstance(leaf, Tensor) else leaf, list(batch)
        )
        loss_fn = build_loss(job)
        optimizer = build_optimizer(job, model.parameters())
        model.train()
        _create_state(optimizer, model)
        recorder = _Recorder(_held_bytes(model, optimizer) + _bytes([inputs, target]))
        with recorder:
            with autocast:
                loss = loss_fn(model(inputs), target)
            recorder.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            recorder.phase = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
        return recorder.kernels


def _placed(value: Tensor, device: str) -> Tensor:
    return torch.empty_like(value, device=device) if device == "meta" else value.to(device)


def _create_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """A first step with gradients from nowhere: momentum and its kin appear in it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return _bytes([list(state.values()) for state in optimizer.state.values()])


def _held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What lives before the step: parameters, buffers, optimizer state."""
    return _bytes([*model.parameters(), *model.buffers()]) + _state_bytes(optimizer)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the kernels that run inside, and counts the bytes of tensors made inside."""

    def __init__(self, held_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self.kernels: list[_Kernel] = []
        self._live = held_bytes
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {id(leaf.untyped_storage()) for leaf in before}
        out = func(*args, **kwargs)
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for leaf in after:
            if id(leaf.untyped_storage()) not in known:
                self._count(leaf.untyped_storage())
        packet = func.overloadpacket
        if (func.is_view or packet in _NO_KERNEL) or not (before or after):
            return out
        name = func._schema.name.split("::")[-1]
        self.kernels.append(
            _Kernel(
                name=name,
                kind=_kind(name, args),
                phase=self.phase,
                flops=_flops(packet, name, args, kwargs, out),
                moved_bytes=sum(leaf.nbytes for leaf in (*before, *after)),
                live_bytes=self._live,
            )
        )
        return out

    def _count(self, storage: Any) -> None:
        """Add a new storage, and take it off again when it dies."""
        key = id(storage)
        if key in self._seen and self._seen[key]() is not None:
            return
        size = storage.nbytes()
        self._live += size

        def gone(_: Any) -> None:
            self._live -= size

        self._seen[key] = weakref.ref(storage, gone)


def _kind(name: str, args: Sequence[Any]) -> str:
    """The class of intensity that a kernel belongs to."""
    if name in ("convolution", "convolution_backward"):
        weight, groups = (args[1], args[8]) if name == "convolution" else (args[2], args[9])
        if groups > 1:
            return "depthwise_convolution" if weight.shape[1] == 1 else "grouped_convolution"
        spatial = weight.shape[2:].numel()
        return "pointwise_convolution" if spatial == 1 else "convolution"
    for kind, parts in _KINDS:
        if any(name == part if kind == "matmul" else part in name for part in parts):
            return kind
        if kind == "matmul" and "attention" in name:
            return kind
    return "elementwise"


def _flops(packet: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs by torch's registry; its count of a grouped convolution's gradient is not used."""
    if name == "convolution_backward":
        gradient, inputs, weight, mask = args[0], args[1], args[2], args[10]
        once = conv_flop_count(inputs.shape, weight.shape, gradient.shape, transposed=args[7])
        return int(once * (bool(mask[0]) + bool(mask[1])))
    counter: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if counter is None else int(counter(*args, **kwargs, out_val=out))


def _features(
    job: Job,
    model: nn.Module,
    sample: Any,
    small: Sequence[_Kernel],
    large: Sequence[_Kernel],
    problems: list[str],
) -> ModelFeatures:
    """Two lists of kernels as what is fixed and what grows with the batch."""
    aligned = [(k.name, k.phase) for k in small] == [(k.name, k.phase) for k in large]
    counts: Counter[tuple[Any, ...]] = Counter()
    if aligned:
        lines = [
            _line(one.live_bytes, two.live_bytes) for one, two in zip(small, large, strict=True)
        ]
        for one, two in zip(small, large, strict=True):
            counts[(one.kind, one.phase, *_growth([one], [two]))] += 1
    else:
        problems = [*problems, "the kernels differ from batch to batch: means by kind only"]
        lines = [_line(*(max(k.live_bytes for k in kernels) for kernels in (small, large)))]
        for kind, phase in sorted({(k.kind, k.phase) for k in small}):
            mine, theirs = (
                [k for k in kernels if (k.kind, k.phase) == (kind, phase)]
                for kernels in (small, large)
            )
            share = tuple(value / len(mine) for value in _growth(mine, theirs))
            counts[(kind, phase, *share)] += len(mine)
    return ModelFeatures(
        operations=tuple(
            OperationGroup(
                kind=kind,
                phase=phase,
                count=count,
                flops_per_sample=flops,
                flops_fixed=fixed_flops,
                bytes_per_sample=moved,
                bytes_fixed=fixed_moved,
            )
            for (kind, phase, flops, fixed_flops, moved, fixed_moved), count in sorted(
                counts.items()
            )
        ),
        peak_lines=_envelope(lines),
        activation_bytes_per_sample=_line(*(_after_forward(k) for k in (small, large)))[1],
        problem="; ".join(problems),
        **_facts(job, model, sample),
    )


def _after_forward(kernels: Sequence[_Kernel]) -> float:
    """Bytes alive when the forward pass has ended."""
    alive = [kernel.live_bytes for kernel in kernels if kernel.phase == "forward"]
    return float(alive[-1]) if alive else 0.0


def _growth(small: Sequence[_Kernel], large: Sequence[_Kernel]) -> tuple[float, ...]:
    """FLOPs a sample and fixed, bytes a sample and fixed, of the same kernels at both sizes."""
    flops = _line(*(float(sum(k.flops for k in kernels)) for kernels in (small, large)))
    moved = _line(*(float(sum(k.moved_bytes for k in kernels)) for kernels in (small, large)))
    return flops[1], flops[0], moved[1], moved[0]


def _line(small: float, large: float) -> tuple[float, float]:
    """What is fixed, and what a sample adds."""
    slope = max((large - small) / (LARGE - SMALL), 0.0)
    return max(small - SMALL * slope, 0.0), slope


def _envelope(lines: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The lines (fixed bytes, bytes a sample) that are the highest at some batch size."""
    hull: list[tuple[float, float]] = []
    for fixed, slope in sorted(set(lines), key=lambda line: (line[1], line[0])):
        if hull and hull[-1][1] == slope:
            hull.pop()
        while len(hull) > 1 and _meet(hull[-2], (fixed, slope)) <= _meet(hull[-2], hull[-1]):
            hull.pop()
        if hull and fixed >= hull[-1][0]:
            hull.pop()
        hull.append((fixed, slope))
    return tuple(hull)


def _meet(low: tuple[float, float], high: tuple[float, float]) -> float:
    """The batch size at which the steeper line overtakes the other."""
    return (low[0] - high[0]) / (high[1] - low[1])


def _facts(job: Job, model: nn.Module, sample: Any) -> dict[str, Any]:
    """What can be said of any model that can be built."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(job, model.parameters())
    _create_state(optimizer, model)
    kinds = Counter(type(m).__name__ for m in model.modules() if not list(m.children()))
    return {
        "parameter_bytes": _bytes(list(model.parameters())),
        "gradient_bytes": _bytes(trained),
        "buffer_bytes": _bytes(list(model.buffers())),
        "optimizer_bytes": _state_bytes(optimizer),
        "sample_bytes": _bytes(list(sample)),
        "layers": tuple(sorted(kinds.items())),
    }
