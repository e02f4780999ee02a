"""When gradient accumulation and compression pay on a slow link: what was said, and what was so.

    python benchmarks/distributed.py measure --kind options --sizes 16 --piece alone --piece 200Mbit
    python benchmarks/accumulation.py --markdown FILE

Two hosts of distributed.py are profiled with 1 and 4 accumulation steps, with gradients as they are
and compressed to bf16. The recommendation sees neither: the rows of one host without either, and
the communication probe. Beside its advice stand the measured savings.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import distributed
import pandas as pd

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning

LIMIT = 0.15


@click.command()
@click.option("--model", default="resnet18", show_default=True)
@click.option("--rate", default="200Mbit", show_default=True, help="Which link.")
@click.option("--records", default=distributed.RECORDS, type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the table here.")
def main(model: str, rate: str, records: Path, markdown: Path | None) -> None:
    """Print what each way of sending gradients takes, and what was advised without it."""
    warnings.simplefilter("ignore", TulaWarning)
    found = distributed.read_records(records, model, "options", ("alone", rate))
    bundle, rows = plain_bundle(found, rate), answers(found, rate)
    lines = [
        f"| passes | gradients | measured ms a step | predicted | error | measured ms a sample, "
        f"against {rows[0]['samples']} samples at once |",
        "|---|---|---|---|---|---|",
    ]
    bad = 0
    for row in rows:
        row["predicted_s"] = predict(bundle, row)
        error = row["predicted_s"] / row["step_s"] - 1
        bad += abs(error) > LIMIT
        lines.append(
            f"| {row['passes']} | {row['compression'] or 'fp32'} | {1e3 * row['step_s']:.0f} "
            f"| {1e3 * row['predicted_s']:.0f} | {error:+.1%} "
            f"| {1e3 * row['step_s'] / row['samples']:.1f} "
            f"({row['step_s'] / row['samples'] / (rows[0]['step_s'] / rows[0]['samples']) - 1:+.0%}"
            ") |"
        )
    batch = rows[0]["samples"]
    cluster = tula.ClusterSpec(nodes=2)
    chosen = tula.recommend(bundle, cluster=cluster, candidates=[batch], objective="min_time")
    lines += ["", f"`tula recommend --nodes 2` at {rate}/s, batch {batch}, of these rows unseen:"]
    lines += ["", *(f"- {text}" for text in chosen.advice)]
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    sys.exit(1 if bad else 0)


def plain_bundle(found: dict[str, list[dict[str, Any]]], rate: str) -> tula.PredictorBundle:
    """One host without accumulation, and the link."""
    alone = distributed.table_of(found["alone"][0])
    rows = tuple(row for row in alone.measurements if row.accumulation_steps == 1)
    links = distributed.table_of(found[rate][0]).links
    return tula.fit(dataclasses.replace(alone, measurements=rows, links=links))


def answers(found: dict[str, list[dict[str, Any]]], rate: str) -> list[dict[str, Any]]:
    """What two hosts took, of the smallest batch size: first as DDP does it by itself."""
    table = distributed.table_of(found[rate][0]).ok
    size = min(row.local_batch_size for row in table)
    rows = [row for row in table if row.local_batch_size == size]
    rows.sort(key=lambda row: (row.accumulation_steps, row.gradient_compression or ""))
    return [
        {
            "local": size,
            "passes": row.accumulation_steps,
            "compression": row.gradient_compression,
            "step_s": row.step_time_s,
            "samples": size * row.accumulation_steps * row.world_size,
        }
        for row in rows
    ]


def predict(bundle: tula.PredictorBundle, row: dict[str, Any]) -> float:
    """Seconds of a step of that kind."""
    asked = {"local_batch_size": [row["local"]], "nodes": 2, "accumulation_steps": row["passes"]}
    out = bundle.predict(pd.DataFrame(asked), gradient_compression=row["compression"])
    return float(out.step_time_s.iloc[0])


if __name__ == "__main__":
    main()
