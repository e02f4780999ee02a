r"""FSDP between hosts: step times and memory, predicted beside measured.

    python benchmarks/distributed.py measure --kind fsdp --sizes 8,32,64,128,512 \
        --piece alone --piece 1Gbit --piece 200Mbit
    python benchmarks/distributed.py measure --kind fsdp --sizes 8 --piece 200Mbitx4
    python benchmarks/sharded.py --markdown FILE

Hosts and their measurement are those of distributed.py. The report predicts step times as that one
does, four nodes from the probes of two, and the allocated bytes of a rank among two and four from
those of one rank alone; it exits 1 where a step time misses its limit.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import distributed
import pandas as pd

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning

FOUR = "200Mbitx4"
BUSY_SHARE = 0.5


@click.command()
@click.option("--model", default="resnet18", show_default=True)
@click.option("--records", default=distributed.RECORDS, type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables here.")
def main(model: str, records: Path, markdown: Path | None) -> None:
    """Predict what was measured from parts of it, and print the tables."""
    warnings.simplefilter("ignore", TulaWarning)
    found = distributed.read_records(records, model, "fsdp")
    if any(records.glob(f"{distributed.stem_of(model, 'fsdp', FOUR)}-*.json")):
        found |= distributed.read_records(records, model, "fsdp", (FOUR,))
    lines = [
        *distributed.unprobed(found),
        *distributed.from_links_alone(found),
        *distributed.from_stated_bandwidth(found),
        *(on_four(found) if FOUR in found else ()),
    ]
    text = page(found, lines)
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    bad = [line for line in lines if abs(line.error) > line.limit]
    print(f"beyond their limit: {len(bad)} step times")
    sys.exit(1 if bad else 0)


def on_four(found: dict[str, list[dict[str, Any]]]) -> list[distributed.Line]:
    """Two-node probes, asked for four nodes: the link is what takes the time there."""
    measured = distributed.truth(found[FOUR])
    bundle = distributed.bundle_of(found, steps="200Mbit", links="200Mbit")
    predicted = distributed.ask(bundle, sorted(measured), nodes=4)
    return [
        distributed.Line(
            what="two-node probes, asked for four nodes",
            link="200Mbit",
            local_batch_size=size,
            measured_s=measured[size],
            predicted_s=seconds,
            limit=0.15,
        )
        for size, seconds in predicted.items()
    ]


def memory(found: dict[str, list[dict[str, Any]]]) -> list[tuple[int, int, float, float]]:
    """Ranks, local batch, and allocated bytes of a rank as predicted from one, and as measured."""
    alone = distributed.table_of(found["alone"][0])
    rows = tuple(
        dataclasses.replace(row, peak_memory_bytes=row.allocated_memory_bytes) for row in alone.ok
    )
    bundle = tula.fit(dataclasses.replace(alone, measurements=rows))
    answers = []
    for piece in (name for name in ("200Mbit", FOUR) if name in found):
        for row in distributed.table_of(found[piece][0]).ok:
            asked = {"local_batch_size": [row.local_batch_size], "nodes": row.nodes}
            out = bundle.predict(pd.DataFrame(asked))
            predicted = float(out.peak_memory_bytes.iloc[0])
            measured = float(row.allocated_memory_bytes or 0)
            answers.append((row.nodes, row.local_batch_size, predicted, measured))
    return answers


def notes(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Whether other work ran beside: an all-reduce alone takes little of the cores it waits on."""
    rows = [row for one in found["1Gbit"] for row in distributed.table_of(one).links]
    busy = max((row.cpu_time_s or 0.0) / row.time_s for row in rows)
    if busy < BUSY_SHARE:
        return []
    return [
        f"Other work ran on this machine: its cores were busy for up to {busy:.0%} of an "
        "all-reduce, which takes 10 to 25 % of them by itself. Not clean figures."
    ]


def page(found: dict[str, list[dict[str, Any]]], lines: Sequence[distributed.Line]) -> str:
    """The tables as Markdown."""
    hardware = distributed.table_of(found["alone"][0]).hardware
    rounds = ", ".join(f"{len(found[piece])} of {piece}" for piece in found)
    name = found["alone"][0]["model"]
    out = [
        f"`make distributed`: {name} at 32x32, namespaces of one core each (of half a core where "
        f"there are four; {hardware.device_name}, torch {hardware.torch_version}), "
        f"{time.strftime('%B %Y')}. Rounds: {rounds}. Predictions see the local batch sizes "
        f"{', '.join(map(str, distributed.PROBED))} only.",
        *notes(found),
        "",
        *distributed.step_table(lines),
        "",
        "Allocated MB of a rank, predicted from one rank alone:",
        "",
        "| ranks | batch | predicted | measured | error |",
        "|---|---|---|---|---|",
    ]
    out += [
        f"| {ranks} | {size} | {predicted / 1e6:.1f} | {measured / 1e6:.1f} "
        f"| {predicted / measured - 1:+.1%} |"
        for ranks, size, predicted, measured in memory(found)
    ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    main()
