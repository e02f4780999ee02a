"""Step time: compute, synchronisation, overlap, sharing of cores, several nodes."""

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
    ORANGE,
    RED,
    SKY,
    batch_axis,
    canvas,
    log_values,
    module,
    table,
)

import mlflow_tula as tula
from mlflow_tula.demo import read_recording
from mlflow_tula.predictors import link as links
from mlflow_tula.predictors import step_time_formulas as step
from mlflow_tula.predictors.formulas import smooth_maximum
from mlflow_tula.predictors.sync_formulas import overlapped

MODEL = "cold_start/mobilenet_v2-32.json"


def compute() -> Figure:
    """The floor and the line, sharp or round; then a real curve with its pooled forms."""
    figure, (left, right) = canvas(2)
    batch = np.geomspace(4, 512, 200)
    floor, slope = 40.0, 0.62
    left.axhline(floor, color=GREY, lw=1, ls=":")
    left.plot(batch, slope * batch, color=GREY, lw=1, ls=":")
    for power, color in ((1.0, ORANGE), (2.0, GREEN), (8.0, BLUE)):
        curve = smooth_maximum(np.full_like(batch, floor), slope * batch, power)
        left.plot(batch, curve, color=color, label=f"p = {power:g}")
    left.text(4.2, floor * 0.86, "floor", color=GREY, va="top")
    left.text(200, slope * 130, "slope b", color=GREY)
    log_values(left, [3, 10, 30, 100, 300])
    left.set_title("(floor^p + (slope b)^p)^(1/p)")
    left.set_ylabel("milliseconds")
    batch_axis(left, [4, 16, 64, 256])
    left.legend()

    measured = table(MODEL)
    rows = [row for row in measured.ok if row.world_size == 1]
    bundle = tula.fit(measured)
    curve = bundle.step_time.params["compute"]
    asked = np.geomspace(4, 512, 200)
    for form in np.exp(step.log_forms(curve, asked)):
        right.plot(asked, 1e3 * form, color=SKY, lw=0.5, alpha=0.6)
    right.plot([], [], color=SKY, lw=1, label="pooled forms")
    pooled, _ = step.compute_time(curve, asked)
    right.plot(asked, 1e3 * pooled, color=BLUE, label="what they predict")
    right.plot(
        [row.local_batch_size for row in rows],
        [1e3 * (row.step_time_s or 0) for row in rows],
        "o",
        color=BLACK,
        ms=4,
        label="measured",
    )
    log_values(right, [50, 100, 200, 400, 800])
    right.set_title(f"{measured.workload.model}, {measured.workload.image_size} pixels, one rank")
    batch_axis(right, [4, 8, 16, 32, 64, 128, 256, 512])
    right.legend()
    return figure


def overlap() -> Figure:
    """What hides behind what."""
    figure, (left, right) = canvas(2)
    sync = np.linspace(0.0, 2.0, 200)
    alone = np.ones_like(sync)
    for power, color in ((1.0, RED), (2.0, ORANGE), (4.0, GREEN), (32.0, BLUE)):
        share = np.ones_like(sync)
        both = overlapped(alone, sync, power, share, 1.0)
        left.plot(sync, both, color=color, label=f"q = {power:g}")
    left.set_title("all of compute can hide it")
    back = np.full_like(sync, 2 / 3)
    for power, color in ((1.0, RED), (2.0, ORANGE), (4.0, GREEN), (32.0, BLUE)):
        both = overlapped(alone, sync, power, back, 4.0)
        right.plot(sync, both, color=color, label=f"q = {power:g}")
    right.axhline(1.0, color=GREY, lw=1, ls=":")
    left.axhline(1.0, color=GREY, lw=1, ls=":")
    right.set_title("backward, two thirds, hides it; 4 buckets")
    for panel in (left, right):
        panel.set_xlabel("synchronisation / compute")
        panel.set_ylim(0.95, 3.05)
        panel.legend()
    left.set_ylabel("step / compute")
    return figure


def link() -> Figure:
    """The communication probe and what is made of it."""
    distributed = module("benchmarks/distributed.py")
    found = distributed.read_records(distributed.RECORDS, "resnet18")
    figure, (left, right) = canvas(2)
    nodes = np.arange(2, 17, dtype=float)
    gradient = 4.0 * distributed.table_of(found["alone"][0]).workload.num_parameters
    for piece, color in (("1Gbit", BLUE), ("200Mbit", RED)):
        measured = distributed.table_of(found[piece][0])
        fitted = links.fit(measured.links, "inter_node")
        assert fitted is not None
        rows = [row for row in measured.links if row.scope == "inter_node"]
        plain = [row for row in rows if row.num_buckets is None]
        left.plot(
            [row.message_bytes / 2**20 for row in plain],
            [row.time_s for row in plain],
            "o",
            color=color,
            ms=4,
        )
        size = np.geomspace(1, 64, 60)
        line = [fitted.seconds(value * 2**20, 2.0) for value in size]
        left.plot(size, line, color=color, label=f"{piece}/s")
        right.plot(
            nodes, [fitted.seconds(gradient, n) for n in nodes], color=color, label=f"{piece}/s"
        )
    batch_axis(left, [1, 4, 16, 64])
    log_values(left, [0.01, 0.03, 0.1, 0.3, 1, 3])
    left.set_xlabel("message, MiB")
    left.set_ylabel("all-reduce of two nodes, seconds")
    left.set_title("measured (points) and fitted")
    right.set_xlabel("nodes")
    right.set_ylabel("seconds")
    right.set_ylim(0, None)
    right.set_title("resnet18's gradient on more nodes, predicted")
    left.legend()
    right.legend()
    return figure


def nodes() -> Figure:
    """Two nodes, predicted from one node and the link, beside what was measured."""
    distributed = module("benchmarks/distributed.py")
    found = distributed.read_records(distributed.RECORDS, "resnet18")
    figure, (panel, right) = canvas(2)
    alone = distributed.truth(found["alone"])
    sizes = sorted(alone)
    panel.plot(
        sizes,
        [1e3 * alone[s] for s in sizes],
        "o-",
        color=BLACK,
        ms=4,
        lw=0.7,
        label="one node, measured",
    )
    for rate, color in (("1Gbit", BLUE), ("200Mbit", RED)):
        measured = distributed.truth(found[rate])
        bundle = distributed.bundle_of(found, steps=None, links=rate)
        asked = np.unique(np.geomspace(8, 512, 40).astype(int))
        out = bundle.predict(pd.DataFrame({"local_batch_size": asked, "nodes": 2}))
        panel.plot(asked, 1e3 * out.step_time_s, color=color, label=f"two nodes at {rate}/s")
        panel.fill_between(
            asked,
            1e3 * out.step_time_s_lower,
            1e3 * out.step_time_s_upper,
            color=color,
            alpha=0.13,
            lw=0,
        )
        panel.plot(list(measured), [1e3 * s for s in measured.values()], "s", color=color, ms=4)
        many = np.arange(1, 17)
        asked_nodes = pd.DataFrame({"local_batch_size": 64, "nodes": many})
        out = bundle.predict(asked_nodes)
        right.plot(many, out.throughput / out.throughput[0], color=color, label=f"{rate}/s")
    right.plot([1, 16], [1, 16], color=GREY, ls=":", label="ideal")
    log_values(panel, [50, 100, 200, 500, 1000, 2000])
    panel.set_ylabel("milliseconds a step")
    panel.set_title("predicted without any two-node step")
    batch_axis(panel, [8, 16, 32, 64, 128, 256, 512])
    panel.legend()
    right.set_xlabel("nodes, 64 samples each")
    right.set_ylabel("throughput, one node = 1")
    right.set_title("weak scaling of resnet18, predicted")
    right.set_yscale("log", base=2)
    right.legend()
    return figure


def sharing() -> Figure:
    """Ranks on one CPU share its cores: the two exponents, and a real pair of curves."""
    measured = read_recording().table
    figure, (left, right) = canvas(2)
    ratio = np.linspace(1, 4, 50)
    for share, color in ((0.2, BLUE), (0.5, GREEN), (0.8, RED)):
        label = f"floor {share:.0%} of a step"
        left.plot(ratio, share * ratio**0.3 + (1 - share) * ratio, color=color, label=label)
    left.plot(ratio, ratio, color=GREY, ls=":", label="all of it shared")
    left.set_xlabel("r: busy devices of a node over those measured")
    left.set_ylabel("compute, relative")
    left.set_title("floor r^f + the rest r^s, f = 0.3, s = 1")
    left.legend()

    two = sorted(row.local_batch_size for row in measured.ok if row.world_size == 2)
    hidden = two[-1]
    known = tuple(
        row for row in measured.ok if row.world_size == 1 or row.local_batch_size != hidden
    )
    bundle = tula.fit(dataclasses.replace(measured, measurements=known))
    asked = np.unique(np.geomspace(8, 256, 40).astype(int))
    for ranks, color in ((1, BLUE), (2, RED)):
        out = bundle.predict(pd.DataFrame({"local_batch_size": asked, "devices_per_node": ranks}))
        right.plot(asked, out.step_time_s, color=color, label=f"{ranks} rank{'s' * (ranks > 1)}")
        right.fill_between(
            asked, out.step_time_s_lower, out.step_time_s_upper, color=color, alpha=0.13, lw=0
        )
        for row in (row for row in measured.ok if row.world_size == ranks):
            fill = color if row in known else "white"
            right.plot(row.local_batch_size, row.step_time_s, "o", color=color, ms=5, mfc=fill)
    right.plot([], [], "o", color=BLACK, mfc="white", label="not shown to the fit")
    log_values(right, [0.5, 1, 2, 4, 8])
    right.set_ylabel("seconds a step")
    right.set_title(f"{measured.workload.model}, ranks on the same cores")
    batch_axis(right, [8, 16, 32, 64, 128, 256])
    right.legend()
    return figure
