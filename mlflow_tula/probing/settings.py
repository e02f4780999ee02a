"""How a probe is measured."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import Spec, check_int, check_real

MIN_WARMUP_STEPS = 2
"""Momentum buffers appear in the first step; memory is read in the second; both are untimed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings(Spec):
    """Steps, seconds and certainty of one probe.

    `warmup_steps` are untimed (at least 2); leading steps that turn out slow (compilation,
    algorithm search) are added to them, up to `max_warmup_steps`. Then steps are timed until the
    95 % interval of their median is within `tolerance` of it, or `max_steps` were timed, or
    `time_limit_s` was spent on them; `min_steps` are timed in any case.
    """

    warmup_steps: int = 2
    max_warmup_steps: int = 10
    min_steps: int = 3
    max_steps: int = 40
    time_limit_s: float = 4.0
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        """Check every field once."""
        warmup = check_int("warmup_steps", self.warmup_steps, minimum=0, maximum=10_000)
        object.__setattr__(self, "warmup_steps", max(warmup, MIN_WARMUP_STEPS))
        check_int("max_warmup_steps", self.max_warmup_steps, maximum=10_000)
        object.__setattr__(self, "max_warmup_steps", max(self.max_warmup_steps, self.warmup_steps))
        check_int("max_steps", self.max_steps, maximum=1_000_000)
        check_int("min_steps", self.min_steps)
        if self.min_steps > self.max_steps:
            object.__setattr__(self, "min_steps", self.max_steps)
        check_real("time_limit_s", self.time_limit_s, strict=True)
        check_real("tolerance", self.tolerance, strict=True)
        if self.tolerance >= 1:
            raise InvalidInputError(f"tolerance must be below 1, not {self.tolerance:g}")
