"""The knee, dollars, intervals, and a model that never ran."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    RED,
    RESULTS,
    batch_axis,
    canvas,
    log_values,
    module,
    table,
)

import mlflow_tula as tula
from mlflow_tula.cold_start import cold_bundle
from mlflow_tula.knee import DIMINISHING_TOLERANCE, diminishing_returns, kneedle
from mlflow_tula.predictors.cross_model import CrossModelPredictor

MODEL = "cold_start/resnet18-32.json"
LEFT_OUT = ("resnet50", "vgg13")


def _epochs_frame(sizes: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"local_batch_size": sizes})


def knee() -> Figure:
    """Two rules on one curve."""
    bundle = tula.fit(table(MODEL))
    sizes = [8, 16, 32, 64, 128, 256, 512]
    # of all samples: what drop_last leaves out is no gain
    throughput = bundle.predict(_epochs_frame(sizes)).throughput.to_numpy()
    times = bundle.workload.dataset_size / throughput
    figure, (left, right) = canvas(2)
    left.plot(sizes, times, "o-", color=BLUE, ms=4)
    left.axhspan(
        times.min(), (1 + DIMINISHING_TOLERANCE) * times.min(), color=GREEN, alpha=0.12, lw=0
    )
    first = diminishing_returns(sizes, times)
    left.plot(sizes[first], times[first], "*", color=RED, ms=14)
    left.set_title("diminishing returns: the smallest within 10 %")
    left.set_ylabel("seconds an epoch")
    batch_axis(left, sizes)
    right.plot(sizes, times, "o-", color=BLUE, ms=4)
    bend = kneedle(sizes, times)
    ends = [0, int(np.argmin(times))]
    right.plot([sizes[i] for i in ends], [times[i] for i in ends], color=GREY, ls=":")
    right.plot(sizes[bend], times[bend], "*", color=RED, ms=14)
    right.set_title("Kneedle: farthest below the chord (linear axes)")
    right.set_xlabel("local batch size")
    right.set_xticks(sizes[3:])
    return figure


def cost() -> Figure:
    """Time and dollars do not ask for the same cluster."""
    distributed = module("benchmarks/distributed.py")
    found = distributed.read_records(distributed.RECORDS, "resnet18")
    bundle = distributed.bundle_of(found, steps=None, links="1Gbit")
    clusters = [tula.ClusterSpec(nodes=n) for n in (1, 2, 4, 8)]
    pricing = tula.Pricing(usd_per_device_hour=0.35)
    figure, (left, right) = canvas(2)
    curve = tula.recommend(
        bundle,
        cluster=clusters,
        objective="min_time",
        epochs=90,
        pricing=pricing,
        candidates=[16, 32, 64, 128, 256, 512, 1024],
    ).to_frame()
    for (nodes, rows), color in zip(curve.groupby("nodes"), (BLACK, BLUE, GREEN, RED), strict=True):
        label = f"{nodes} node{'s' * (nodes > 1)}"
        left.plot(rows.global_batch_size, rows.time_s / 60, "o-", ms=3, color=color, label=label)
        right.plot(rows.time_s / 60, rows.cost_usd, "o", ms=4, color=color, label=label)
    front = curve[curve.on_pareto].sort_values("time_s")
    right.plot(front.time_s / 60, front.cost_usd, color=GREY, lw=1, label="Pareto front")
    left.set_yscale("log")
    left.set_ylabel("minutes of 90 epochs")
    batch_axis(left, [16, 64, 256, 1024], "global batch size")
    left.set_title("resnet18 over 1 Gbit/s, predicted")
    left.legend()
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("minutes of 90 epochs")
    right.set_ylabel("dollars at $0.35 a device hour")
    right.set_title("each point a batch size on a cluster")
    right.legend()
    return figure


def intervals() -> Figure:
    """Narrow where it was measured, wider with each doubling beyond."""
    measured = table("cold_start/vgg11-32.json")
    seen = (16, 64)
    few = tuple(row for row in measured.ok if row.local_batch_size in seen)
    bundle = tula.fit(dataclasses.replace(measured, measurements=few))
    figure, (panel,) = canvas(1)
    asked = np.unique(np.geomspace(8, 1024, 80).astype(int))
    for level, alpha in ((0.95, 0.10), (0.9, 0.14), (0.5, 0.22)):
        out = bundle.predict(_epochs_frame(list(asked)), level=level)
        middle = out.step_time_s
        panel.fill_between(
            asked,
            out.step_time_s_lower / middle,
            out.step_time_s_upper / middle,
            color=BLUE,
            alpha=alpha,
            lw=0,
            label=f"{level:.0%}",
        )
    out = bundle.predict(_epochs_frame([row.local_batch_size for row in measured.ok]))
    for row, middle in zip(measured.ok, out.step_time_s, strict=True):
        fill = BLACK if row.local_batch_size in seen else "white"
        panel.plot(
            row.local_batch_size, (row.step_time_s or 0) / middle, "o", color=BLACK, mfc=fill, ms=5
        )
    panel.plot([], [], "o", color=BLACK, mfc="white", label="not shown to the fit")
    panel.axhline(1, color=GREY, lw=0.8)
    panel.set_yscale("log")
    panel.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    panel.minorticks_off()
    panel.set_ylabel("step time / predicted")
    panel.set_title("vgg11 from two probes, 16 and 64")
    batch_axis(panel, [8, 16, 32, 64, 128, 256, 512, 1024])
    panel.legend(loc="upper left", ncols=2)
    return figure


def cold_start() -> Figure:
    """Models left out, predicted from the kernels that others were measured on."""
    benchmark = module("benchmarks/cold_start.py")
    rows = benchmark.read(RESULTS / "cold_start")
    figure, panels = canvas(len(LEFT_OUT))
    for panel, name in zip(panels, LEFT_OUT, strict=True):
        known = CrossModelPredictor.fit(benchmark.without(rows, name), left_out=True)
        features, measured = next(
            row
            for row in rows
            if row[1].workload.model == name and row[1].workload.image_size == 32
        )
        done = [row for row in measured.ok if row.world_size == 1]
        one = dataclasses.replace(
            measured, measurements=tuple(row for row in done if row.local_batch_size == 16)
        )
        asked = _epochs_frame(sorted(row.local_batch_size for row in done))
        for probes, color, label in (
            (None, GREY, "no probe"),
            (one, BLUE, "after one probe, of 16"),
        ):
            out = cold_bundle(known, features, measured.workload, probes=probes).predict(asked)
            panel.plot(asked.local_batch_size, 1e3 * out.step_time_s, color=color, label=label)
            panel.fill_between(
                asked.local_batch_size,
                1e3 * out.step_time_s_lower,
                1e3 * out.step_time_s_upper,
                color=color,
                alpha=0.14,
                lw=0,
            )
        panel.plot(
            [row.local_batch_size for row in done],
            [1e3 * (row.step_time_s or 0) for row in done],
            "o",
            color=BLACK,
            ms=4,
            label="measured",
        )
        log_values(panel, [100, 200, 400, 800, 1600])
        panel.set_title(f"{name}, from {len(known.models)} other models")
        batch_axis(panel, [8, 16, 32, 64, 128])
        panel.legend()
    panels[0].set_ylabel("milliseconds a step")
    return figure
