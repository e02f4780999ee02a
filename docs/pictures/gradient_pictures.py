"""What a training's own steps tell: their time, the noise scale, and when to scale a gradient."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, batch_axis, canvas
from torch import nn

from mlflow_tula.gradients import gradient_norm, noise_scale
from mlflow_tula.methods import AdaptiveGradientScaling
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.probing.stopping import SLOW_START, StepSeries, median_interval

STEPS, BATCH, REFERENCE = 160, 256, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What was seen in each step of one small training."""

    seconds: list[float]
    norms: list[float]
    variability: list[float]
    multipliers: list[float]
    threshold: float
    sizes: list[int]
    squares: list[float]
    """Mean squared norm of the gradient at each of `sizes`, at one set of weights."""
    scale: float


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


@functools.cache
def training() -> Training:
    """scikit-learn's digits, 160 steps of 256 samples, with adaptive gradient scaling."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    model, order = _network(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaling = AdaptiveGradientScaling(
        optimizer, global_batch_size=BATCH, reference_batch_size=REFERENCE, threshold=0.25
    )
    seconds, norms, variability, multipliers = [], [], [], []
    sizes = [4, 8, 16, 32, 64, 128, 256, 512]
    squares: list[float] = []
    for number in range(STEPS):
        if number == 30:
            squares = [_mean_square(model, images, labels, size, order) for size in sizes]
        picked = torch.from_numpy(order.permutation(len(labels))[:BATCH])
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        report = scaling.report()
        norms.append(report.gradient_norm)
        variability.append(report.variability)
        multipliers.append(report.multiplier)
    small, large = sizes[1], sizes[-1]
    scale = noise_scale(
        [squares[1] ** 0.5], [squares[-1] ** 0.5], small_batch=small, large_batch=large
    )
    assert scale is not None, "the gradient of this task stands out of its noise"
    return Training(
        seconds=seconds,
        norms=norms,
        variability=variability,
        multipliers=multipliers,
        threshold=scaling.threshold,
        sizes=sizes,
        squares=squares,
        scale=scale,
    )


def _mean_square(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    size: int,
    order: np.random.Generator,
) -> float:
    """The squared gradient norm of batches of one size, averaged over many of them."""
    found = []
    for _ in range(max(20, 400 // size)):
        picked = torch.from_numpy(order.choice(len(labels), size, replace=True))
        model.zero_grad()
        nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
        found.append(gradient_norm(model.parameters()) ** 2)
    model.zero_grad()
    return float(np.mean(found))


def probe() -> Figure:
    """The steps of a probe, and when it has seen enough."""
    settings = ProbeSettings(warmup_steps=2, max_steps=60)
    series, widths = StepSeries(settings), []
    for seconds in training().seconds:
        done = series.add(seconds)
        interval = median_interval(series.timed)
        widths.append((len(series.seconds), interval, float(np.median(series.timed or [seconds]))))
        if done:
            break
    figure, (panel,) = canvas(1, height=2.8)
    count, warm = len(series.seconds), series.num_warmup
    steps = np.arange(1, count + 1)
    times = 1e3 * np.array(series.seconds)
    panel.plot(
        steps[:warm], times[:warm], "o", color=GREY, mfc="white", ms=4, label="warm-up, untimed"
    )
    panel.plot(steps[warm:], times[warm:], "o", color=BLACK, ms=4, label="timed")
    known = [(n, *interval, middle) for n, interval, middle in widths if interval is not None]
    place, low, high, middle = (np.array(column) for column in zip(*known, strict=True))
    panel.plot(place, 1e3 * middle, color=BLUE, label="median so far")
    panel.fill_between(
        place, 1e3 * low, 1e3 * high, color=BLUE, alpha=0.15, lw=0, label="its 95 % interval"
    )
    typical = float(np.median(times[warm:]))
    panel.set_ylim(
        0.8 * min(times), max(SLOW_START * typical, 1.05 * float(np.quantile(times, 0.97)))
    )
    panel.set_xlabel("step")
    panel.set_ylabel("milliseconds")
    panel.set_title(f"a probe of {count} steps, ended by: {series.reason or 'nothing yet'}")
    panel.legend(ncols=4, loc="upper center")
    return figure


def noise() -> Figure:
    """The squared norm of a gradient against 1 / batch size is a line; its terms are the scale."""
    seen = training()
    figure, (left, right) = canvas(2)
    inverse = 1 / np.array(seen.sizes, float)
    low, high = seen.squares[1], seen.squares[-1]
    slope = (low - high) / (inverse[1] - inverse[-1])
    true = high - slope * inverse[-1]
    left.plot(inverse, seen.squares, "o", color=BLACK, ms=4, label="mean over many batches")
    ends = np.array([0.0, inverse[0]])
    left.plot(ends, true + slope * ends, color=BLUE, label="through batch 8 and 512")
    left.axhline(true, color=GREY, ls=":")
    left.text(inverse[0], true, "|G|^2", va="bottom", ha="right", color=GREY)
    left.set_xlabel("1 / batch size")
    left.set_ylabel("squared norm of the gradient")
    left.set_title(f"|g_B|^2 = |G|^2 + S / B:  S / |G|^2 = {seen.scale:.0f} samples")
    left.legend()
    batch = np.geomspace(4, 4096, 100)
    right.plot(batch, 1 / (1 + seen.scale / batch), color=BLUE)
    right.axvline(seen.scale, color=RED, ls=":")
    right.text(seen.scale * 1.1, 0.05, "noise scale", color=RED)
    right.set_ylim(0, 1.05)
    right.set_ylabel("progress of a step, best = 1")
    right.set_title("1 / (1 + noise scale / B)")
    batch_axis(right, [4, 16, 64, 256, 1024, 4096], "global batch size")
    return figure


def gate() -> Figure:
    """Norm, variability and multiplier of each step."""
    seen = training()
    figure, (left, right) = canvas(2)
    steps = np.arange(1, STEPS + 1)
    left.plot(steps, seen.norms, color=BLACK, lw=0.9)
    left.set_xlabel("step")
    left.set_ylabel("norm of the averaged gradient")
    left.set_title("digits, batch 256, SGD")
    right.plot(steps, seen.variability, color=BLUE, label="D, smoothed relative change")
    right.axhline(seen.threshold, color=GREY, ls=":", label=f"delta = {seen.threshold:g}")
    scaled = np.array(seen.multipliers) > 1
    right.plot(
        steps[scaled],
        np.full(scaled.sum(), -0.02),
        "|",
        color=GREEN,
        ms=6,
        label=f"scaled by {max(seen.multipliers):g}",
    )
    right.plot(
        steps[~scaled], np.full((~scaled).sum(), -0.02), "|", color=ORANGE, ms=6, label="left alone"
    )
    right.set_xlabel("step")
    right.set_title(f"{scaled.mean():.0%} of the steps are scaled")
    right.set_ylim(-0.05, 1.45 * float(np.nanmax(seen.variability)))
    right.legend(ncols=2, loc="upper center")
    return figure
