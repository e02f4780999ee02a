"""When gradient accumulation and compression pay on a slow link: what was said, and what was so.

    python benchmarks/distributed.py measure --kind options --sizes 16 --piece 200Mbit
    python benchmarks/accumulation.py --markdown FILE

The advice comes from distributed.py's own records: one host without accumulation, and the
communication probe. Beside it stands what two hosts took with 1 and 4 accumulation steps, with
gradients as they are and compressed to bf16, where that was measured. Exits 1 where a prediction
misses its limit.
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
SIZE = 16
"""Local batch."""
WAYS = tuple((passes, how) for passes in (1, 4) for how in (None, "bf16"))


@click.command()
@click.option("--model", default="resnet18", show_default=True)
@click.option("--rate", default="200Mbit", show_default=True, help="Which link.")
@click.option("--records", default=distributed.RECORDS, type=click.Path(path_type=Path))
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the table here.")
def main(model: str, rate: str, records: Path, markdown: Path | None) -> None:
    """Print what each way of sending gradients takes, and what was advised without it."""
    warnings.simplefilter("ignore", TulaWarning)
    found = distributed.read_records(records, model, pieces=("alone", rate))
    bundle = distributed.bundle_of(found, steps=None, links=rate)
    measured = answers(records, model, rate)
    lines = [
        "| passes | gradients | predicted ms a step | measured | error | a sample, predicted |",
        "|---|---|---|---|---|---|",
    ]
    first, bad = predict(bundle, 1, None) / SIZE, 0
    for passes, how in WAYS:
        seconds = predict(bundle, passes, how)
        took = measured.get((passes, how))
        error = None if took is None else seconds / took - 1
        bad += error is not None and abs(error) > LIMIT
        shown = "| |" if took is None else f"| {1e3 * took:.0f} | {error:+.1%}"
        lines.append(
            f"| {passes} | {how or 'fp32'} | {1e3 * seconds:.0f} {shown} "
            f"| {seconds / SIZE / passes / first - 1:+.0%} |"
        )
    for name in distributed.RATES:
        link = distributed.read_records(records, model, pieces=("alone", name))
        at_rate = distributed.bundle_of(link, steps=None, links=name)
        lines += ["", f"`tula recommend --nodes 2` at {name}/s, local batch {SIZE}:", ""]
        lines += [f"- {text}" for text in advice(at_rate)]
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    sys.exit(1 if bad else 0)


def answers(records: Path, model: str, rate: str) -> dict[tuple[int, str | None], float]:
    """Seconds of a step of two hosts, by passes and compression; empty where not measured."""
    stem = distributed.stem_of(model, "options", rate)
    if not any(records.glob(f"{stem}-*.json")):
        return {}
    found = distributed.read_records(records, model, "options", (rate,))
    rows = distributed.table_of(found[rate][0]).ok
    return {
        (row.accumulation_steps, row.gradient_compression): row.step_time_s or 0.0
        for row in rows
        if row.local_batch_size == SIZE
    }


def predict(bundle: tula.PredictorBundle, passes: int, compression: str | None) -> float:
    """Seconds of a step of that kind on two hosts."""
    asked: dict[str, Any] = {"local_batch_size": [SIZE], "nodes": 2, "accumulation_steps": passes}
    out = bundle.predict(pd.DataFrame(asked), gradient_compression=compression)
    return float(out.step_time_s.iloc[0])


def advice(bundle: tula.PredictorBundle) -> tuple[str, ...]:
    """What is said of a job that cannot take a larger local batch."""
    larger = dataclasses.replace(bundle.workload, dataset_size=10**6)
    bundle = dataclasses.replace(bundle, workload=larger)
    cluster = tula.ClusterSpec(nodes=2)
    chosen = tula.recommend(bundle, cluster=cluster, candidates=[2 * SIZE], objective="min_time")
    return chosen.advice


if __name__ == "__main__":
    main()
