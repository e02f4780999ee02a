"""Gradient-norm clipping as optimizer hooks: at a fixed norm, and at a percentile of past norms.

A hook rather than `torch.nn.utils.clip_grad_norm_` in the loop, because it also works where the
loop never sees the unscaled gradient (a fused optimizer under GradScaler) and never waits for the
device. The coefficient is torch's: min(1, max_norm / (norm + 1e-6)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.step_scaling import (
    OnNonfinite,
    StepScaling,
    check_number,
    clip_coefficient,
)


class NormClipping(StepScaling):
    """Clip the gradient of every step to a fixed norm."""

    state_key = "tula_norm_clipping"

    def __init__(
        self, optimizer: Optimizer, max_norm: float = 1.0, *, on_nonfinite: OnNonfinite = "skip"
    ) -> None:
        """Hook into the optimizer."""
        super().__init__(optimizer, on_nonfinite=on_nonfinite)
        self.limit = check_number("max_norm", max_norm, above=0)

    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Torch's clip coefficient."""
        return torch.where(finite, clip_coefficient(norm, self.limit), 1.0)

    def scaling_state(self) -> dict[str, Any]:
        """The limit."""
        return {"max_norm": self.limit}

    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Take over the saved limit."""
        self.limit = float(state["max_norm"])


class PercentileClipping(StepScaling):
    """AutoClip (Seetharaman et al. 2020, arXiv 2007.14469): clip to a percentile of past norms.

        eta_t = percentile_p(n_1 ... n_t);  g <- g min(1, eta_t / n_t)

    The paper keeps every norm; here the last `window` of them, in one tensor on the device.
    """

    state_key = "tula_percentile_clipping"

    def __init__(
        self,
        optimizer: Optimizer,
        percentile: float = 10.0,
        *,
        window: int = 1000,
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        """Hook into the optimizer."""
        super().__init__(optimizer, on_nonfinite=on_nonfinite)
        self.percentile = check_number("percentile", percentile, above=0, at_most=100)
        if window < 1:
            raise InvalidInputError(f"window must be at least 1 step, not {window}")
        self.window = window
        self._norms: Tensor | None = None
        self._saved: list[float] = []
        self._steps = 0

    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """The clip coefficient for the percentile of the norms so far, this one included."""
        if self._norms is None:
            self._norms = torch.full((self.window,), torch.nan, device=norm.device)
            self._norms[: len(self._saved)] = torch.tensor(self._saved)
        self._norms[self._steps % self.window] = torch.where(finite, norm, torch.nan)
        self._steps += 1
        limit = torch.nanquantile(self._norms, self.percentile / 100)
        return torch.where(finite & limit.isfinite(), clip_coefficient(norm, limit), 1.0)

    def scaling_state(self) -> dict[str, Any]:
        """The norms so far."""
        known = min(self._steps, self.window)
        norms = self._saved if self._norms is None else self._norms[:known].tolist()
        return {"percentile": self.percentile, "steps": self._steps, "norms": list(norms)}

    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Continue with the saved norms."""
        self.percentile = float(state["percentile"])
        self._steps = int(state["steps"])
        self._saved = [float(norm) for norm in state["norms"]]
        if len(self._saved) > self.window:
            raise InvalidInputError(
                f"the saved state holds {len(self._saved)} norms, this clipping keeps "
                f"{self.window}: construct it with the same window"
            )
        self._norms = None
