"""Figure 10: cost against batch size at 0.15 dollars per GB of device memory and hour.

Claim: under a price of memory the cheapest batch size is not the fastest one: larger batches hold
more memory for what they save in time, so that the choice shifts to smaller ones.

Rule: on the largest cluster, by measured times and memory, no model's cheapest batch is above its
fastest one, and at least one model's is below. Held in part where some model's is below and
another's is above. Memory is what a step's tensors take at their peak: on a GPU what is reserved,
on a CPU the live tensors, since the process itself takes several hundred MB whatever the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from reproduction import profiles
from reproduction.facts import CHOICE, Made, Panel, Paper, Series, Verdict
from reproduction.settings import Settings

import mlflow_tula as tula
from mlflow_tula.errors import ProfilingError
from mlflow_tula.predictors import formulas
from mlflow_tula.table import Measurement, ProfileTable

PAPER = Paper.read("10", __doc__)
PRICE = 0.15
"""Dollars per GB of device memory and hour, the paper's."""
CENTS = 100.0


def make(settings: Settings) -> Made:
    """Cost of every measured batch on the most ranks, with the cheapest and the fastest marked."""
    import pandas as pd

    tables = profiles.profiles(settings)
    rows, panels, shifts, by_process = [], [], {}, []
    for number, (model, table) in enumerate(tables.items()):
        found = profiles.curve(table, profiles.worlds(table)[-1])
        sizes = [row.global_batch_size for row in found]
        times = [settings.epochs * profiles.epoch_seconds(table, row) for row in found]
        costs = dollars(found, times, [tensor_bytes(model, table, row) for row in found])
        whole = dollars(found, times, [float(row.peak_memory_bytes or 0) for row in found])
        by_process.append(f"{model} {sizes[int(np.argmin(whole))]}")
        fast, cheap = int(np.argmin(times)), int(np.argmin(costs))
        shifts[model] = (sizes[fast], sizes[cheap], costs[cheap] / costs[fast] - 1.0)
        said = {
            objective: chosen(profiles.partial_search(table), found, objective)
            for objective in ("knee", "min_time", "min_cost")
        }
        panels.append(
            Panel(
                title=f"{model} on {found[0].world_size} ranks",
                x_label="global batch size, samples",
                y_label=f"cost of {settings.epochs:g} epochs, cents",
                series=[
                    Series(name="measured", x=sizes, y=[CENTS * cost for cost in costs],
                           color=number),
                    Series(name="fastest", x=[sizes[fast]], y=[CENTS * costs[fast]],
                           style="diamond", color=6),
                    Series(name="cheapest", x=[sizes[cheap]], y=[CENTS * costs[cheap]],
                           style="star", color=CHOICE),
                ],
                batch_axis=True,
                from_zero=True,
            )
        )  # fmt: skip
        rows += [
            {"model": model, "ranks": row.world_size, "global_batch_size": row.global_batch_size,
             "training_time_s": time, "tensor_bytes": tensor_bytes(model, table, row),
             "cost_usd": cost, "process_bytes": row.peak_memory_bytes,
             "cost_of_process_usd": whole[at], "fastest": at == fast, "cheapest": at == cheap,
             **{f"partial_search_{name}": size == row.global_batch_size
                for name, size in said.items()}}
            for at, (row, time, cost) in enumerate(zip(found, times, costs, strict=True))
        ]  # fmt: skip
    return Made(
        panels=panels,
        table=pd.DataFrame(rows),
        verdict=judge(shifts),
        notes=(
            profiles.hardware_note(tables),
            f"{PRICE} dollars per GB of each rank and hour. By the peak of the whole process the "
            f"cheapest would be {', '.join(by_process)}.",
        ),
        data_s=profiles.seconds_of(settings),
    )


def tensor_bytes(model: str, table: ProfileTable, row: Measurement) -> float:
    """Bytes of a rank that are paid for."""
    on_cpu = table.hardware.device_type == "cpu"
    known = row.allocated_memory_bytes if on_cpu else row.peak_memory_bytes
    if known is None:
        raise ProfilingError(f"the memory of {model} was not measured: leave it out of --models")
    return float(known)


def dollars(rows: list[Measurement], times: list[float], held: list[float]) -> list[float]:
    """What these trainings cost by the bytes that each rank holds."""
    devices = np.array([float(row.world_size) for row in rows])
    paid = formulas.dollars(
        np.array(times), devices, np.array(held), usd_per_device_hour=None, usd_per_gb_hour=PRICE
    )
    return [float(value) for value in paid]


def chosen(few: ProfileTable, rows: list[Measurement], objective: str) -> int:
    """What `tula recommend` says from partial search, among these rows' batch sizes."""
    with profiles.quiet():
        choice = tula.recommend(
            profiles.fitted(few),
            cluster=tula.ClusterSpec(
                nodes=rows[0].nodes, devices_per_node=rows[0].devices_per_node
            ),
            candidates=[row.global_batch_size for row in rows],
            objective=objective,  # type: ignore[arg-type]
            pricing=tula.Pricing(usd_per_gb_hour=PRICE),
        )
    return choice.global_batch_size


def judge(shifts: Mapping[str, tuple[int, int, float]]) -> Verdict:
    """The rule on (fastest batch, cheapest batch, its cost over the fastest's, less one)."""
    below = [model for model, (fast, cheap, _) in shifts.items() if cheap < fast]
    over = [model for model, (fast, cheap, _) in shifts.items() if cheap > fast]
    words = ", ".join(
        f"{model} {fast} to {cheap} ({change:+.1%} cost)"
        if cheap != fast
        else f"{model} stays {fast}"
        for model, (fast, cheap, change) in shifts.items()
    )
    held = "did not hold" if not below else "held in part" if over else "held"
    return Verdict(
        held=held,
        because=f"from the fastest batch to the cheapest: {words}",
        numbers={
            "models_that_shift_down": len(below),
            "models_that_shift_up": len(over),
            "largest_saving": -min(change for _, _, change in shifts.values()),
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
