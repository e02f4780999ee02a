"""ModelFeatures: what one training step computes and holds, as counted without running it.

Facts only; `features.extract` counts them, cross-model predictors read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import SchemaError
from mlflow_tula.specs import Spec, check_choice, check_int, check_real

Array = NDArray[np.float64]

Phase = Literal["forward", "backward", "optimizer"]
Kind = Literal[
    "convolution",
    "pointwise_convolution",
    "grouped_convolution",
    "depthwise_convolution",
    "matmul",
    "normalization",
    "pooling",
    "elementwise",
]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_OPERATIONS, MAX_LINES, MAX_LAYERS = 20_000, 1_000, 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationGroup(Spec):
    """`count` kernels of one kind, phase and shape; each does and moves so much in a step.

    At batch size b a kernel has `flops_fixed + b flops_per_sample` floating-point operations and
    reads and writes `bytes_fixed + b bytes_per_sample` bytes.
    """

    kind: Kind
    phase: Phase
    count: int
    flops_per_sample: float = 0.0
    flops_fixed: float = 0.0
    bytes_per_sample: float = 0.0
    bytes_fixed: float = 0.0

    def __post_init__(self) -> None:
        """Check every field once."""
        check_choice("operation kind", self.kind, Kind)
        check_choice("phase", self.phase, Phase)
        check_int("count", self.count)
        for name in ("flops_per_sample", "flops_fixed", "bytes_per_sample", "bytes_fixed"):
            object.__setattr__(self, name, check_real(name, getattr(self, name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFeatures(Spec):
    """One rank's training step of a model, counted.

    `peak_lines` are (fixed bytes, bytes a sample): the largest of these lines is how many bytes
    of tensors are alive at the step's peak. Both are empty where the kernels could not be listed;
    `problem` says why, or what is inexact. `activation_bytes_per_sample` is what a sample holds
    when the forward pass ends, for the backward pass. `layers` counts modules without children.
    """

    operations: tuple[OperationGroup, ...] = ()
    peak_lines: tuple[tuple[float, float], ...] = ()
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    sample_bytes: int = 0
    activation_bytes_per_sample: float = 0.0
    layers: tuple[tuple[str, int], ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        """Check the numbers; lists of a JSON document become tuples."""
        for name in ("parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes"):
            check_int(name, getattr(self, name), minimum=0, maximum=2**60)
        check_int("sample_bytes", self.sample_bytes, minimum=0, maximum=2**60)
        check_real("activation_bytes_per_sample", self.activation_bytes_per_sample)
        try:
            lines = tuple((float(fixed), float(slope)) for fixed, slope in self.peak_lines)
            layers = tuple((str(name)[:120], int(count)) for name, count in self.layers)
        except (TypeError, ValueError) as error:
            raise SchemaError("peak_lines and layers of model features must be pairs") from error
        for number in (value for line in lines for value in line):
            check_real("peak_lines", number)
        object.__setattr__(self, "peak_lines", lines)
        object.__setattr__(self, "layers", layers)

    def peak_bytes(self, batch: Array) -> Array:
        """Bytes of live tensors at the peak of a step at each local batch size; NaN if unknown."""
        batch = np.asarray(batch, float)
        if not self.peak_lines:
            return np.full(batch.shape, np.nan)
        fixed, slope = np.array(self.peak_lines).T
        return np.asarray((fixed[:, None] + slope[:, None] * batch[None, :]).max(axis=0))

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of a whole step, per sample."""
        return sum(one.count * one.flops_per_sample for one in self.operations)

    def total(self, attribute: str, phase: Phase | None = None) -> float:
        """A per-kernel number summed over the kernels (of one phase)."""
        return float(
            sum(
                one.count * getattr(one, attribute)
                for one in self.operations
                if phase is None or one.phase == phase
            )
        )

    @property
    def arithmetic_intensity(self) -> float:
        """Floating-point operations per byte moved, both per sample; 0 if nothing was counted."""
        moved = self.total("bytes_per_sample")
        return self.flops_per_sample / moved if moved else 0.0

    @property
    def num_kernels(self) -> int:
        """Kernels of a whole step."""
        return sum(one.count for one in self.operations)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; SchemaError names what is wrong."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"features must be a JSON object, not {type(data).__name__}")
        fields = dict(data)
        limits = (("operations", MAX_OPERATIONS), ("peak_lines", MAX_LINES), ("layers", MAX_LAYERS))
        for name, most in limits:
            value = fields.get(name, ())
            if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
                raise SchemaError(f"{name} of model features must be a list")
            fields[name] = tuple(value)
            if len(fields[name]) > most:
                raise SchemaError(f"{name} of model features has more than {most} entries")
        fields["operations"] = tuple(OperationGroup.from_dict(one) for one in fields["operations"])
        return super(ModelFeatures, cls).from_dict(fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain = dataclasses.asdict(self)
        plain["operations"] = list(plain["operations"])
        for name in ("peak_lines", "layers"):
            plain[name] = [list(pair) for pair in plain[name]]
        if not self.activation_bytes_per_sample:  # of tables from before it was counted
            del plain["activation_bytes_per_sample"]
        return plain
