"""Figure 4: activation memory against batch size, with its linear fit.

Claim: activation memory is proportional to the batch size, so that a line through few measurements
predicts it.

Rule: activation memory is the peak of live tensors in a step less parameters, gradients, optimizer
state and buffers. A model agrees where a least-squares line has R^2 of at least 0.99, and the
line's value at batch 0 is at most 10 % of that at the largest batch. All models: held; at least
half: held in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from reproduction import profiles
from reproduction.facts import Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

from mlflow_tula.errors import ProfilingError
from mlflow_tula.table import ProfileTable

PAPER = Paper.read("4", __doc__)
LINEAR, OFFSET = 0.99, 0.10
MB = 1e6


def make(settings: Settings) -> Made:
    """Live bytes of full search on the fewest ranks, a line through each model's."""
    import pandas as pd

    tables = profiles.profiles(settings)
    curves, rows, panels = {}, [], []
    for number, (model, table) in enumerate(tables.items()):
        sizes, held = activations(model, table)
        curves[model] = (sizes, held)
        slope, offset, fit = line(sizes, held)
        ends = [0.0, max(sizes)]
        panels.append(
            Panel(
                title=f"{model}: {slope / MB:.2f} MB a sample, R² {fit:.4f}",
                x_label="local batch size, samples",
                y_label="activation memory, MB",
                series=[
                    Series(name="measured", x=sizes, y=[b / MB for b in held], style="points",
                           color=number),
                    Series(name="line", x=ends, y=[(offset + slope * b) / MB for b in ends],
                           style="dashed", color=number),
                ],
                from_zero=True,
            )
        )  # fmt: skip
        rows += [
            {
                "model": model,
                "local_batch_size": size,
                "activation_memory_bytes": bytes_held,
                "line_bytes": offset + slope * size,
            }
            for size, bytes_held in zip(sizes, held, strict=True)
        ]
    return Made(
        panels=panels,
        table=pd.DataFrame(rows),
        verdict=judge(curves),
        notes=(profiles.hardware_note(tables),),
        data_s=profiles.seconds_of(settings),
    )


def activations(model: str, table: ProfileTable) -> tuple[list[float], list[float]]:
    """Batch sizes and bytes of activations at the peak, on the fewest ranks."""
    counted = table.features
    if counted is None:
        raise ProfilingError(
            f"the bytes of {model} were not counted, so its activations cannot be told from its "
            "parameters: leave it out of --models"
        )
    static = (
        counted.parameter_bytes
        + counted.gradient_bytes
        + counted.optimizer_bytes
        + counted.buffer_bytes
    )
    rows = profiles.curve(table, profiles.worlds(table)[0])
    known = [row for row in rows if row.allocated_memory_bytes is not None]
    sizes = [float(row.local_batch_size) for row in known]
    return sizes, [float((row.allocated_memory_bytes or 0) - static) for row in known]


def line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Slope, offset and R^2 of a least-squares line."""
    slope, offset = np.polyfit(sizes, values, 1)
    left = np.asarray(values) - (offset + slope * np.asarray(sizes))
    spread = np.asarray(values) - np.mean(values)
    return float(slope), float(offset), float(1.0 - (left**2).sum() / (spread**2).sum())


def judge(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Verdict:
    """The rule on batch sizes and bytes, a pair a model."""
    fits, offsets = {}, {}
    for model, (sizes, held) in curves.items():
        slope, offset, fits[model] = line(sizes, held)
        offsets[model] = abs(offset) / (offset + slope * max(sizes))
    agree = [m for m in curves if fits[m] >= LINEAR and offsets[m] <= OFFSET]
    worst = min(fits, key=lambda model: fits[model])
    far = max(offsets, key=lambda model: offsets[model])
    return Verdict(
        held=share_held(len(agree), len(curves)),
        because=(
            f"in {len(agree)} of {len(curves)} models a line fits and passes near zero; the lowest "
            f"R² is {fits[worst]:.4f} ({worst}), and the largest offset {offsets[far]:.1%} of the "
            f"memory at the largest batch ({far})"
        ),
        numbers={
            "models_that_agree": len(agree),
            "lowest_r_squared": fits[worst],
            "largest_offset_share": offsets[far],
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
