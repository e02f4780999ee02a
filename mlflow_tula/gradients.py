"""What gradients tell: how fast their norm changes.

    d_t = |n_t - n_{t-1}| / n_{t-1}                n: norm of the averaged gradient of step t
    D_t = (1 - alpha) D_{t-1} + alpha d_t          gradient variability, D_1 = d_1
"""

from __future__ import annotations

import torch
from torch import Tensor


def next_variability(
    previous_norm: Tensor, norm: Tensor, variability: Tensor, *, smoothing: float
) -> Tensor:
    """Gradient variability D_t after one more step (Tula; SelSync, arXiv 2307.07950, equation 2).

    All three are 0-d tensors and stay on their device; nothing is read by the host.

    Args:
        previous_norm: n of the step before, NaN when there was none.
        norm: n of this step.
        variability: D so far, NaN before the second step.
        smoothing: alpha, the weight of the newest change.

    Returns:
        D, NaN as long as there is no previous norm.
    """
    change = (norm - previous_norm).abs() / previous_norm
    return torch.where(
        variability.isnan(), change, (1 - smoothing) * variability + smoothing * change
    )
