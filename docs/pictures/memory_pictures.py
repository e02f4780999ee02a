"""Peak memory: a convex curve, what DDP copies, what FSDP shares."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from style import BLACK, BLUE, GREY, ORANGE, RED, batch_axis, canvas, table

import mlflow_tula as tula

MODEL = "cold_start/vgg11-32.json"
SEEN = (8, 64, 128)
LARGEST_BLOCK = 25088 * 4096 + 4096
"""Parameters of VGG11's first dense layer."""
PUBLISHED = (8, 16, 32, 64, 128, 256, 512, 1024)
ALLOCATED_MB = (1485, 1491, 1504, 1533, 1592, 1739, 2034, 2625)
"""Allocated peaks of VGG11 at 32x32 with SGD and momentum, as tests/test_memory.py holds them."""


def memory() -> Figure:
    """Why the curve bends, and what is said of sizes that were not run."""
    figure, (left, right) = canvas(2)
    sizes = np.array(PUBLISHED, float)
    left.plot(sizes, ALLOCATED_MB, "o", color=BLACK, ms=4, label="measured, VGG11")
    late, early = 0.83, 1.155
    dense = np.geomspace(8, 1024, 100)
    left.plot(dense, 1478.5 + late * dense, color=ORANGE, label="peak late in backward")
    left.plot(dense, 1442.5 + early * dense, color=BLUE, label="peak early in backward")
    left.set_ylim(1400, 2700)
    left.set_title("two lines, and the higher one counts")
    left.set_ylabel("MB allocated")
    left.set_xlabel("local batch size")
    left.legend()

    measured = table(MODEL)
    known = tuple(row for row in measured.ok if row.local_batch_size in SEEN)
    bundle = tula.fit(dataclasses.replace(measured, measurements=known))
    asked = np.unique(np.geomspace(8, 1024, 60).astype(int))
    out = bundle.predict(pd.DataFrame({"local_batch_size": asked}))
    right.plot(asked, out.peak_memory_bytes / 1e9, color=BLUE, label="predicted")
    right.fill_between(
        asked,
        out.peak_memory_bytes_lower / 1e9,
        out.peak_memory_bytes_upper / 1e9,
        color=BLUE,
        alpha=0.13,
        lw=0,
        label="90 %, with a jump of workspace",
    )
    for row in measured.ok:
        seen = row.local_batch_size in SEEN
        right.plot(
            row.local_batch_size,
            (row.peak_memory_bytes or 0) / 1e9,
            "o",
            color=BLACK,
            mfc=BLACK if seen else "white",
            ms=5,
        )
    right.plot([], [], "o", color=BLACK, mfc="white", label="not shown to the fit")
    right.axvline(4 * max(SEEN), color=GREY, ls=":")
    right.text(
        4 * max(SEEN) * 0.95,
        right.get_ylim()[1],
        "4 x the largest: nothing fits\nbeyond, before it is run ",
        ha="right",
        va="top",
        color=GREY,
        fontsize=7,
    )
    right.set_title(f"{measured.workload.model} on this CPU, peak of the process")
    right.set_ylabel("GB")
    batch_axis(right, [8, 32, 128, 512])
    right.legend(loc="center left")
    return figure


def fsdp() -> Figure:
    """What a rank holds under DDP and under FSDP, predicted from one rank's probes."""
    measured = table(MODEL)
    figure, (panel,) = canvas(1, height=2.8)
    ranks = np.array([1, 2, 4, 8, 16])
    place, width = np.arange(len(ranks)), 0.38
    ways = (("ddp", BLUE, "DDP: a whole copy each"), ("fsdp", RED, "FSDP: a part each"))
    for index, (strategy, color, label) in enumerate(ways):
        workload = dataclasses.replace(
            measured.workload,
            strategy=strategy,
            block_parameters=LARGEST_BLOCK if strategy == "fsdp" else None,
            num_blocks=3 if strategy == "fsdp" else None,
        )
        bundle = tula.fit(dataclasses.replace(measured, workload=workload))
        asked = pd.DataFrame({"local_batch_size": 64, "devices_per_node": ranks})
        out = bundle.predict(asked)
        panel.bar(
            place + (index - 0.5) * width,
            out.peak_memory_bytes / 1e9,
            width,
            color=color,
            label=label,
        )
    panel.set_xticks(place, [str(rank) for rank in ranks])
    panel.set_xlabel("ranks")
    panel.set_ylabel("GB of a rank")
    panel.set_title("vgg11 at batch 64, SGD with momentum; its largest layer is 80 % of it")
    panel.legend()
    return figure
