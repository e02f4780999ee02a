"""What gradients tell: their norm, how fast it changes, and how noisy they are.

    d_t = |n_t - n_{t-1}| / n_{t-1}                n: norm of the averaged gradient of step t
    D_t = (1 - alpha) D_{t-1} + alpha d_t          gradient variability, D_1 = d_1

    S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)          trace of the per-sample gradient covariance
    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)      squared norm of the true gradient
    noise_scale = S / |G|^2                        in samples (McCandlish et al., 1812.06162)

for gradients g of two batch sizes b < B: a rank's own and the averaged one, or half and whole
batches on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DEFAULT_SMOOTHING = 0.16
"""alpha, the weight of the newest change (docs/method.md)."""


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


def gradient_norm(parameters: Iterable[Tensor], *, scale: float = 1.0) -> float:
    """Euclidean norm over the gradients of all parameters, divided by a loss scale.

    Parameters without a gradient count as zero; no gradient at all is a norm of zero. Of gradients
    that are sharded among ranks it is the norm of the whole: every rank calls it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    whole = getattr(norm, "full_tensor", None)
    return float(norm if whole is None else whole()) / scale


def gradient_variability(
    norms: Sequence[float], *, smoothing: float = DEFAULT_SMOOTHING
) -> float | None:
    """D after a sequence of norms; None with fewer than two usable ones.

    A norm that is not finite or is zero leaves the state untouched, as in adaptive gradient
    scaling: it tells of no relative change.
    """
    previous = variability = torch.tensor(math.nan, dtype=torch.float64)
    for norm in norms:
        if math.isfinite(norm) and norm > 0:
            now = torch.tensor(norm, dtype=torch.float64)
            variability = next_variability(previous, now, variability, smoothing=smoothing)
            previous = now
    return None if variability.isnan() else float(variability)


def noise_scale(
    small_norms: Sequence[float],
    large_norms: Sequence[float],
    *,
    small_batch: int,
    large_batch: int,
) -> float | None:
    """Noise scale in samples from gradient norms at two batch sizes and equal weights.

    The squared norms are averaged first, because only their means are unbiased.

    Args:
        small_norms: norms of gradients over `small_batch` samples.
        large_norms: norms of gradients over `large_batch` samples.
        small_batch: b.
        large_batch: B, above b.

    Returns:
        S / |G|^2, zero where the small batch is no noisier than the large one, and None where it
        cannot be told: no norms, equal sizes, or a true gradient lost in the noise.
    """
    if large_batch <= small_batch or not small_norms or not large_norms:
        return None
    small = sum(norm * norm for norm in small_norms) / len(small_norms)
    large = sum(norm * norm for norm in large_norms) / len(large_norms)
    if not (math.isfinite(small) and math.isfinite(large)):
        return None
    trace = (small - large) / (1 / small_batch - 1 / large_batch)
    true = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    if true <= 0:
        return None
    scale = max(trace, 0.0) / true
    return scale if math.isfinite(scale) else None
