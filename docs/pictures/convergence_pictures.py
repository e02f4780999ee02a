"""Epochs to the target against the batch size."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from style import BLACK, BLUE, GREEN, GREY, RED, batch_axis, canvas, module

from mlflow_tula.predictors.convergence import ConvergencePredictor
from mlflow_tula.predictors.convergence_formulas import trend


def epochs() -> Figure:
    """The terms of the equation; then MLPerf's published points, every other one hidden."""
    figure, (left, right) = canvas(2)
    batch = np.geomspace(8, 16384, 200)
    place = np.log(batch)
    for critical, small, color, label in (
        (1e9, 32.0, GREEN, "(Bs / B)^3, Bs = 32"),
        (1000.0, 1e-9, BLUE, "(B / Bc)^q, Bc = 1000, q = 1"),
        (1000.0, 32.0, BLACK, "both: a U"),
    ):
        values = trend(place, np.array([critical]), np.array([1.0]), np.array([small]))[0]
        left.plot(batch, np.exp(values), color=color, label=label, lw=2 if color == BLACK else 1)
    left.axvline(1000, ymax=0.6, color=GREY, ls=":")
    left.set_ylim(0.9, 6)
    left.set_ylabel("epochs / E0")
    left.set_title("where more samples a step stop helping")
    batch_axis(left, [8, 32, 128, 512, 2048, 8192], "global batch size")
    left.legend()

    rows = module("tests/test_convergence.py").RESNET_RCP
    seen = rows.iloc[::2].reset_index(drop=True)
    predictor = ConvergencePredictor.fit(seen)
    asked = np.geomspace(1000, 140000, 80)
    out = predictor.predict(asked)
    right.plot(asked, out.epochs_to_target, color=BLUE, label="predicted")
    right.fill_between(
        asked, out.epochs_to_target_lower, out.epochs_to_target_upper, color=BLUE, alpha=0.13, lw=0
    )
    right.plot(seen.global_batch_size, seen.epochs_to_target, "o", color=BLACK, ms=5)
    hidden = rows.iloc[1::2]
    right.plot(
        hidden.global_batch_size,
        hidden.epochs_to_target,
        "o",
        color=BLACK,
        mfc="white",
        ms=5,
        label="not shown to the fit",
    )
    critical = predictor.critical_batch_size
    if critical is not None:
        right.axvline(critical, color=RED, ls=":")
        right.text(critical * 1.05, 122, "Bc", color=RED)
    right.set_ylim(20, 130)
    right.set_ylabel("epochs to the target")
    right.set_title("ResNet-50 on ImageNet, MLPerf's reference points")
    batch_axis(right, [1024, 4096, 16384, 65536], "global batch size")
    right.legend(loc="upper left")
    return figure
