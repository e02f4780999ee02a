"""Adaptive gradient scaling (AGS): Tula's answer to the generalization gap of large batches.

Scales the gradient by s while the gradient's norm is steady, and leaves sensitive steps alone:

    d_t = |n_t - n_{t-1}| / n_{t-1}                      n: norm of the averaged gradient
    D_t = (1 - alpha) D_{t-1} + alpha d_t                gradient variability, D_1 = d_1
    m_t = s where D_t < delta, else 1                    the first step: 1

Reconstructed from the captions of Tula (Tyagi and Wang 2026, arXiv 2603.18112) and equation 2 of
SelSync (arXiv 2307.07950); docs/method.md says what is certain and what is inferred.

What scaling does depends on the optimizer:

- plain SGD: gradient x s is learning rate x s, except that weight decay is not scaled (it is added
  to the gradient after this hook; in update mode it is scaled with the rest);
- momentum mu: in gradient mode one step scaled by s goes on for 1 / (1 - mu) steps, with mu 0.9 and
  s 4 it adds 19.5 gradients' worth over the next ten; in update mode only this step is larger;
- Adam and its kin divide by the gradient's size, so a scaled gradient changes nothing: refused in
  gradient mode, use update mode.

It is here as published. It has not been shown to beat a tuned learning-rate factor: compare it
with `scaling` and `layerwise` before relying on it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.gradients import DEFAULT_SMOOTHING, next_variability
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.scale_invariance import ignores_gradient_scale
from mlflow_tula.methods.step_scaling import Mode, OnNonfinite, StepScaling, check_number

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingReport:
    """What AGS did so far. Reading it waits for the device."""

    steps: int
    """Optimizer steps seen, skipped ones included."""
    scaled_steps: int
    skipped_steps: int
    """Steps with a NaN or infinite gradient."""
    scaled_share: float
    """Scaled steps over all steps; 0 before the first."""
    variability: float
    """The smoothed relative change of the gradient norm; NaN before the second step."""
    gradient_norm: float
    """Of the last step; NaN before the first."""
    multiplier: float
    """Of the last step."""


class AdaptiveGradientScaling(StepScaling):
    """Scale gradients (or updates) by s while their norm is steady.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> scaling = AdaptiveGradientScaling(optimizer, scaling_factor=4.0)
        >>> # the loop stays as it is, and optimizer.state_dict() holds the scaling's state as well

    A zero gradient (norm 0) says nothing about a relative change: it is left alone, and neither
    the previous norm nor the variability moves. The same holds for a non-finite one. When every
    parameter's gradient is None there is no step to speak of, and nothing is counted.
    """

    state_key = "tula_adaptive_gradient_scaling"

    def __init__(
        self,
        optimizer: Optimizer,
        scaling_factor: float | None = None,
        threshold: float = DEFAULT_THRESHOLD,
        smoothing: float = DEFAULT_SMOOTHING,
        *,
        mode: Mode = "gradient",
        static: bool = False,
        max_norm: float | None = None,
        on_nonfinite: OnNonfinite = "skip",
        global_batch_size: int | None = None,
        reference_batch_size: int | None = None,
        record: bool = False,
    ) -> None:
        """Hook into the optimizer.

        Args:
            optimizer: steps as before; see the module's text for what scaling means to it.
            scaling_factor: s, at least 1 (1 is plain training); the square root of the ratio of
                the two batch sizes when they are given instead.
            threshold: delta, above 0: a larger one scales more often.
            smoothing: alpha, the weight of the newest change, in (0, 1].
            mode: scale the gradient, as the paper does, or the update.
            static: scale every step, whatever the variability (the paper's static scaling).
            max_norm: clip the norm to this before scaling (clipping after would undo it).
            on_nonfinite: skip such a step or raise TrainingError.
            global_batch_size: with the next one, in place of a scaling factor.
            reference_batch_size: the batch whose learning rate is known, not above the other.
            record: keep every multiplier for the control experiments (`multipliers`).
        """
        self.scaling_factor = _scaling_factor(
            scaling_factor, global_batch_size, reference_batch_size
        )
        self.threshold = check_number("threshold", threshold, above=0)
        self.smoothing = check_number("smoothing", smoothing, above=0, at_most=1)
        self.static = static
        self._previous_norm: Tensor | None = None
        self._variability: Tensor | None = None
        self._multiplier: Tensor | None = None
        self._counts: Tensor | None = None
        self._saved: dict[str, Any] | None = None
        self._steps = 0
        self._recorded: list[Tensor] | None = [] if record else None
        super().__init__(optimizer, mode=mode, max_norm=max_norm, on_nonfinite=on_nonfinite)

    def _check_gradient_mode(self, optimizer: Optimizer) -> None:
        if ignores_gradient_scale(optimizer):
            raise InvalidInputError(
                f"gradient mode changes nothing with {type(optimizer).__name__}, which divides by "
                "the gradient's size: pass mode='update'"
            )

    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """The gate: s below the threshold, 1 at and above it."""
        if self._previous_norm is None or self._variability is None or self._counts is None:
            self._start(norm)
        assert self._previous_norm is not None
        assert self._variability is not None
        assert self._counts is not None
        usable = finite & (norm > 0)
        variability = next_variability(
            self._previous_norm, norm, self._variability, smoothing=self.smoothing
        )
        gate = usable if self.static else usable & (variability < self.threshold)
        self._previous_norm = torch.where(usable, norm, self._previous_norm)
        self._variability = torch.where(usable, variability, self._variability)
        self._counts = self._counts + torch.stack([gate, ~finite]).to(torch.int64)
        self._steps += 1
        self._multiplier = torch.where(gate, self.scaling_factor, 1.0).to(norm.dtype)
        if self._recorded is not None:
            self._recorded.append(self._multiplier)
        return self._multiplier

    def _start(self, norm: Tensor) -> None:
        saved = self._saved or {}
        self._previous_norm = torch.full_like(norm, saved.get("previous_norm", math.nan))
        self._variability = torch.full_like(norm, saved.get("variability", math.nan))
        counts = [saved.get("scaled_steps", 0), saved.get("skipped_steps", 0)]
        self._counts = torch.tensor(counts, device=norm.device)

    @property
    def variability(self) -> float:
        """D of the last step, NaN before the second. Reading it waits for the device."""
        return self.report().variability

    @property
    def scaled_share(self) -> float:
        """The share of steps that were scaled. Reading it waits for the device."""
        return self.report().scaled_share

    @property
    def multipliers(self) -> tuple[float, ...]:
        """Every step's multiplier, where `record` was asked for."""
        if self._recorded is None:
            raise InvalidInputError("multipliers are kept only with record=True")
        return tuple(torch.stack(self._recorded).tolist()) if self._recorded else ()

    def report(self) -> ScalingReport:
        """Counts and the last step's numbers."""
        state = self.scaling_state()
        norm, multiplier = self.gradient_norm, self._multiplier
        return ScalingReport(
            steps=self._steps,
            scaled_steps=state["scaled_steps"],
            skipped_steps=state["skipped_steps"],
            scaled_share=state["scaled_steps"] / self._steps if self._steps else 0.0,
            variability=state["variability"],
            gradient_norm=float(norm) if norm is not None else math.nan,
            multiplier=float(multiplier) if multiplier is not None else 1.0,
        )

    def scaling_state(self) -> dict[str, Any]:
        """Settings and state as plain numbers: it goes through JSON and torch.save alike."""
        state: dict[str, Any] = {
            "scaling_factor": self.scaling_factor,
            "threshold": self.threshold,
            "smoothing": self.smoothing,
            "static": self.static,
            "mode": self.mode,
            "steps": self._steps,
        }
        if self._counts is None or self._previous_norm is None or self._variability is None:
            saved = self._saved or {}
            for name in ("previous_norm", "variability"):
                state[name] = saved.get(name, math.nan)
            for name in ("scaled_steps", "skipped_steps"):
                state[name] = saved.get(name, 0)
            return state
        scaled, skipped = self._counts.tolist()
        state["previous_norm"] = float(self._previous_norm)
        state["variability"] = float(self._variability)
        state["scaled_steps"], state["skipped_steps"] = scaled, skipped
        return state

    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Continue; as with torch's optimizers, saved settings replace those given here."""
        if state["mode"] != self.mode:
            raise InvalidInputError(
                f"the saved state was made in {state['mode']} mode, this scaling is in "
                f"{self.mode} mode: construct it with mode={state['mode']!r}"
            )
        self.scaling_factor = float(state["scaling_factor"])
        self.threshold = float(state["threshold"])
        self.smoothing = float(state["smoothing"])
        self.static = bool(state["static"])
        self._steps = int(state["steps"])
        self._saved = dict(state)
        self._previous_norm = self._variability = self._counts = None


class ReplayedScaling(StepScaling):
    """Scale step t by a given number: the controls of AGS.

    `shuffled(scaling.multipliers)` asks whether the timing of the gate matters,
    `constant_mean(scaling.multipliers)` whether AGS is more than a learning-rate factor.
    """

    state_key = "tula_replayed_scaling"

    def __init__(
        self,
        optimizer: Optimizer,
        multipliers: Sequence[float],
        *,
        mode: Mode = "gradient",
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        """Hook into the optimizer; past the last multiplier steps are left alone."""
        self._multipliers = [check_number("multiplier", m, above=0) for m in multipliers]
        self._steps = 0
        super().__init__(optimizer, mode=mode, on_nonfinite=on_nonfinite)

    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """The next number of the list."""
        inside = self._steps < len(self._multipliers)
        value = self._multipliers[self._steps] if inside else 1.0
        self._steps += 1
        return torch.where(finite, value, 1.0).to(norm.dtype)

    def scaling_state(self) -> dict[str, Any]:
        """The position in the list."""
        return {"steps": self._steps}

    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self._steps = int(state["steps"])


def shuffled(multipliers: Sequence[float], seed: int = 0) -> list[float]:
    """The same multipliers at other times."""
    values = list(multipliers)
    random.Random(seed).shuffle(values)
    return values


def constant_mean(multipliers: Sequence[float]) -> list[float]:
    """The mean multiplier in every step."""
    return [math.fsum(multipliers) / len(multipliers)] * len(multipliers) if multipliers else []


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveScalingMethod:
    """AGS as a method: the reference rate, gradients scaled while they are steady."""

    name: str = "ags"
    scaling_factor: float | None = None
    """None: the square root of the batch ratio."""
    threshold: float = DEFAULT_THRESHOLD
    smoothing: float = DEFAULT_SMOOTHING
    mode: Mode | None = None
    """None: the gradient, or the update where a scaled gradient would change nothing."""
    static: bool = False
    max_norm: float | None = None
    record: bool = False

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Hook into the optimizer."""
        mode = self.mode or ("update" if ignores_gradient_scale(optimizer) else "gradient")
        factor = self.scaling_factor if self.scaling_factor is not None else math.sqrt(plan.ratio)
        scaling = AdaptiveGradientScaling(
            optimizer,
            factor,
            self.threshold,
            self.smoothing,
            mode=mode,
            static=self.static,
            max_norm=self.max_norm,
            record=self.record,
        )
        return MethodRun(optimizer=scaling, global_batch_size=plan.global_batch_size)


def _scaling_factor(
    given: float | None, global_batch_size: int | None, reference_batch_size: int | None
) -> float:
    if given is not None:
        return check_number("scaling_factor", given, at_least=1)
    if global_batch_size is None or reference_batch_size is None:
        raise InvalidInputError(
            "scaling needs a scaling_factor, or global_batch_size and reference_batch_size to "
            "take the square root of their ratio"
        )
    plan = TrainingPlan(
        global_batch_size=global_batch_size, reference_batch_size=reference_batch_size
    )
    return math.sqrt(plan.ratio)
