"""Two hosts over a slow link, on one machine: what was measured there, and what was predicted.

    python benchmarks/distributed.py measure --piece alone --piece 1Gbit --piece 200Mbit
    python benchmarks/distributed.py report --markdown FILE
    python benchmarks/distributed.py measure --kind fsdp --sizes 8,32,64,128,512 --piece ...

Needs root and iproute2: hosts are network namespaces (tests/netns.py), joined by veth pairs and a
bridge at tbf rates. Each host is pinned to one core, one rank and one thread on it. The two cores
share caches and memory bandwidth as two machines would not, so the single-node probes run on both
hosts at the same time, each for itself: what the neighbour costs is in both sides of the
comparison. A piece is one run of minutes; repeat `measure` in another order for more rounds.

    alone     local batch sizes on one node, both hosts at work
    <rate>    the communication probe, then the same sizes on two nodes
    <rate>x4  the same on four nodes, two a core: where the link is what takes the time

`--kind` says how the ranks work together; sharded.py reports fsdp, accumulation.py options.

The report takes the median of the rounds as the truth and predicts it from parts of the first
round's measurements; it exits 1 where a figure misses its limit.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "distributed"
SIZES = (8, 16, 32, 64, 128, 256, 512)
PROBED = (8, 64, 512)
"""Local batch sizes that are measured, and those of them that predictions may see."""
RATES = {"1Gbit": 1e9, "200Mbit": 200e6}
PIECES = {
    "alone": (None, 2),
    **{name: (rate, 2) for name, rate in RATES.items()},
    **{f"{name}x4": (rate, 4) for name, rate in RATES.items()},
}
"""Bits per second (None: as fast as memory), and hosts."""
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "fsdp": ({"strategy": "fsdp"}, {}),
    "options": ({}, {"accumulation_steps": (1, 4), "gradient_compression": (None, "bf16")}),
}
"""Of each kind: what differs in the job, and in the call of profile()."""
PORT = 29400


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One predicted step time beside its measured one, seconds."""

    what: str
    link: str
    local_batch_size: int
    measured_s: float
    predicted_s: float
    limit: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


@click.group()
def main() -> None:
    """Measure between network namespaces, and report."""


@main.command()
@click.option("--piece", "pieces", multiple=True, default=("alone", *RATES), help="What to run.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="ddp", show_default=True)
@click.option("--model", default="resnet18", show_default=True)
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True)
@click.option("--records", default=RECORDS, type=click.Path(path_type=Path), show_default=True)
def measure(pieces: Sequence[str], kind: str, model: str, sizes: str, records: Path) -> None:
    """Run pieces one after the other; each becomes one JSON file below --records."""
    sys.path.insert(0, str(ROOT / "tests"))
    import netns

    if why_not := netns.missing():
        raise SystemExit(f"cannot make hosts: {why_not}")
    records.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        rate, nodes = PIECES[piece]
        with (
            netns.network(nodes, rate_bit_per_s=rate) as net,
            tempfile.TemporaryDirectory() as folder,
        ):
            answers = [Path(folder) / f"{host.rank}.json" for host in net.hosts]
            processes = []
            for host, answer in zip(net.hosts, answers, strict=True):
                words = ["host", "--model", model, "--sizes", sizes, "--answer", str(answer)]
                words += ["--kind", kind, "--nodes", str(nodes)]
                if rate is not None:
                    words += ["--node-rank", str(host.rank), "--master", net.master]
                command = [sys.executable, __file__, *words]
                processes.append(host.popen(command, core=host.rank % 2, cwd=ROOT))
            codes = [process.wait() for process in processes]
            if any(codes):
                raise SystemExit(f"{piece}: the hosts ended with exit codes {codes}")
            record = {"piece": piece, "model": model, **json.loads(answers[0].read_text())}
        stem = stem_of(model, kind, piece)
        path = records / f"{stem}-{len(list(records.glob(f'{stem}-*.json'))) + 1}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written: {path}", flush=True)


def stem_of(model: str, kind: str, piece: str) -> str:
    """How the records of a piece are named, less the round's number."""
    return "-".join([model, *([kind] if kind != "ddp" else []), piece])


@main.command(hidden=True)
@click.option("--model", required=True)
@click.option("--sizes", required=True)
@click.option("--answer", required=True, type=click.Path(path_type=Path))
@click.option("--kind", required=True)
@click.option("--nodes", required=True, type=int)
@click.option("--node-rank", type=int)
@click.option("--master", default="")
def host(
    model: str,
    sizes: str,
    answer: Path,
    kind: str,
    nodes: int,
    node_rank: int | None,
    master: str,
) -> None:
    """One host's part: profile alone, or as one of the nodes."""
    from mlflow_tula.launch.cluster import Cluster
    from mlflow_tula.launch.place import Place
    from mlflow_tula.probing.events import ProfileEvent
    from mlflow_tula.profiler import profile
    from mlflow_tula.workloads.job import Job

    link_s: list[float] = []
    of_job, of_profile = KINDS[kind]

    def watch(event: ProfileEvent) -> None:
        if event.kind == "links_measured":
            link_s.append(event.details["probe_time_s"])
        if event.measurement is not None:
            print(event.measurement.local_batch_size, event.measurement.step_time_s, flush=True)

    def run(cluster: Cluster | None) -> None:
        table = profile(
            job=Job(model=model, **of_job),
            batch_sizes=[int(size) for size in sizes.split(",")],
            world_sizes=(1,),
            node_counts=(1,) if cluster is None else (nodes,),
            search="full",
            cluster=cluster,
            on_event=watch,
            **of_profile,
        )
        answer.write_text(json.dumps({"link_probe_s": link_s, "table": table.to_dict()}))

    if node_rank is None:
        run(None)
        return
    place = Place(launcher="options", nodes=nodes, node_rank=node_rank, host=master, port=PORT)
    with Cluster(place, join_timeout_s=60) as cluster:
        cluster.join({})
        if not place.leads:
            sys.exit(cluster.follow())
        run(cluster)


@main.command()
@click.option("--model", default="resnet18", show_default=True)
@click.option("--records", default=RECORDS, type=click.Path(path_type=Path), show_default=True)
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables here.")
def report(model: str, records: Path, markdown: Path | None) -> None:
    """Predict what was measured from parts of it, and print the tables."""
    warnings.simplefilter("ignore", TulaWarning)
    found = read_records(records, model)
    lines = [*unprobed(found), *from_links_alone(found), *from_stated_bandwidth(found)]
    choices = [choice(found, rate) for rate in RATES]
    probes = {rate: [s for one in found[rate] for s in one["link_probe_s"]] for rate in RATES}
    text = page(found, lines, choices, probes)
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    bad = [line for line in lines if abs(line.error) > line.limit]
    slow = [s for seconds in probes.values() for s in seconds if s > 15]
    missed = [one for one in choices if one["loss"] > 0.10]
    print(f"beyond their limit: {len(bad)} step times, {len(missed)} choices, {len(slow)} probes")
    sys.exit(1 if bad or slow or missed else 0)


def read_records(
    records: Path, model: str, kind: str = "ddp", pieces: Sequence[str] = ("alone", *RATES)
) -> dict[str, list[dict[str, Any]]]:
    """The rounds of each piece, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for piece in pieces:
        stem = stem_of(model, kind, piece)
        paths = sorted(records.glob(f"{stem}-[0-9]*.json"))
        if not paths:
            raise SystemExit(f"{records} holds no {stem}-*.json: run `measure` first")
        found[piece] = [json.loads(path.read_text()) for path in paths]
    return found


def truth(rounds: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Median step time of the rounds, by local batch size."""
    rows = [row for one in rounds for row in table_of(one).ok]
    sizes = sorted({row.local_batch_size for row in rows})
    return {
        size: float(np.median([row.step_time_s for row in rows if row.local_batch_size == size]))
        for size in sizes
    }


def spread(rounds: Sequence[dict[str, Any]]) -> float:
    """How far the rounds lie apart, relative to their median: the largest of any size."""
    rows = [row for one in rounds for row in table_of(one).ok]
    parts = []
    for size in {row.local_batch_size for row in rows}:
        times = [row.step_time_s or 0.0 for row in rows if row.local_batch_size == size]
        parts.append(float(np.ptp(times) / np.median(times)))
    return max(parts)


def table_of(record: dict[str, Any]) -> tula.ProfileTable:
    """The record's measurements."""
    return tula.ProfileTable.from_dict(record["table"])


def bundle_of(
    found: dict[str, list[dict[str, Any]]], *, steps: str | None, links: str
) -> tula.PredictorBundle:
    """Fit the first round: single-node probes, a link, and the two-node probes of one rate."""
    alone, across = table_of(found["alone"][0]), table_of(found[links][0])
    rows = [row for row in alone.measurements if row.local_batch_size in PROBED]
    if steps is not None:
        probes = table_of(found[steps][0]).measurements
        rows += [row for row in probes if row.local_batch_size in PROBED]
    table = dataclasses.replace(alone, measurements=tuple(rows), links=across.links)
    return tula.fit(table)


def ask(
    bundle: tula.PredictorBundle, sizes: Sequence[int], *, nodes: int = 2, **options: float
) -> dict[int, float]:
    """Predicted step times on several nodes."""
    if not sizes:
        return {}
    frame = pd.DataFrame({"local_batch_size": list(sizes), "nodes": nodes})
    out = bundle.predict(frame, **options)
    return dict(zip(sizes, out.step_time_s.tolist(), strict=True))


def unprobed(found: dict[str, list[dict[str, Any]]]) -> list[Line]:
    """Two-node probes of some sizes, asked for the others at the same rate."""
    lines = []
    for rate in RATES:
        measured = truth(found[rate])
        sizes = [size for size in measured if size not in PROBED]
        predicted = ask(bundle_of(found, steps=rate, links=rate), sizes)
        lines += _lines("two-node probes of other sizes", rate, measured, predicted, 0.10)
    return lines


def from_links_alone(found: dict[str, list[dict[str, Any]]]) -> list[Line]:
    """No two-node step at all: the communication probe and single-node probes."""
    lines = []
    for rate in RATES:
        measured = truth(found[rate])
        predicted = ask(bundle_of(found, steps=None, links=rate), sorted(measured))
        lines += _lines("communication probe and one node", rate, measured, predicted, 0.15)
    return lines


def from_stated_bandwidth(found: dict[str, list[dict[str, Any]]]) -> list[Line]:
    """Everything measured at 1 Gbit/s, asked for 200 Mbit/s."""
    measured = truth(found["200Mbit"])
    bundle = bundle_of(found, steps="1Gbit", links="1Gbit")
    rate = RATES["200Mbit"] / 8
    predicted = ask(bundle, sorted(measured), inter_node_bandwidth_bytes_per_s=rate)
    return _lines("1 Gbit/s probes, stated bandwidth", "200Mbit", measured, predicted, 0.15)


def _lines(
    what: str, link: str, measured: dict[int, float], predicted: dict[int, float], limit: float
) -> list[Line]:
    return [
        Line(
            what=what,
            link=link,
            local_batch_size=size,
            measured_s=measured[size],
            predicted_s=seconds,
            limit=limit,
        )
        for size, seconds in predicted.items()
    ]


def choice(found: dict[str, list[dict[str, Any]]], rate: str) -> dict[str, Any]:
    """What is recommended for 1 or 2 nodes without a two-node step, beside the measured best."""
    bundle = bundle_of(found, steps=None, links=rate)
    samples = {
        (nodes, size * nodes): size * nodes / seconds
        for nodes, piece in ((1, "alone"), (2, rate))
        for size, seconds in truth(found[piece]).items()
    }
    clusters = [tula.ClusterSpec(nodes=nodes) for nodes in (1, 2)]
    # both clusters can be asked for these, and every answer was measured
    sizes = sorted(size for node, size in samples if node == 1 and (2, size) in samples)
    samples = {pair: value for pair, value in samples.items() if pair[1] in sizes}
    chosen = tula.recommend(bundle, cluster=clusters, candidates=sizes, objective="min_time")
    mine = (chosen.nodes, chosen.global_batch_size)
    best = max(samples, key=lambda pair: samples[pair])
    loss = samples[best] / samples[mine] - 1 if mine in samples else float("inf")
    return {"link": rate, "chosen": mine, "best": best, "loss": loss, "samples": samples}


def step_table(lines: Sequence[Line]) -> list[str]:
    """Predicted beside measured step times, in Markdown."""
    return [
        "| predicted from | link | batch | measured | predicted | error | limit |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {line.what} | {line.link}/s | {line.local_batch_size} "
            f"| {1e3 * line.measured_s:.0f} ms | {1e3 * line.predicted_s:.0f} ms "
            f"| {line.error:+.1%} | {line.limit:.0%} |"
            for line in lines
        ),
    ]


def page(
    found: dict[str, list[dict[str, Any]]],
    lines: Sequence[Line],
    choices: Sequence[dict[str, Any]],
    probes: dict[str, list[float]],
) -> str:
    """The tables as Markdown."""
    hardware = table_of(found["alone"][0]).hardware
    rounds = ", ".join(f"{len(found[piece])} of {piece}" for piece in found)
    apart = ", ".join(f"{piece} {spread(found[piece]):.1%}" for piece in found)
    out = [
        f"`make distributed`: {found['alone'][0]['model']} at 32x32, two namespaces of one core "
        f"each ({hardware.device_name}, torch {hardware.torch_version}), {time.strftime('%B %Y')}.",
        f"Rounds: {rounds}; largest distance between rounds: {apart}. Predictions see the first "
        f"round's local batch sizes {', '.join(map(str, PROBED))} only.",
        "",
        *step_table(lines),
    ]
    out += ["", "| link | recommended | measured best | slower than it |", "|---|---|---|---|"]
    out += [
        f"| {one['link']}/s | {one['chosen'][0]} nodes, batch {one['chosen'][1]} "
        f"| {one['best'][0]} nodes, batch {one['best'][1]} | {one['loss']:.1%} |"
        for one in choices
    ]
    seconds = "; ".join(
        f"{', '.join(f'{s:.1f}' for s in found_s)} s at {rate}/s"
        for rate, found_s in probes.items()
    )
    out += ["", f"The communication probe took {seconds} (limit 15 s)."]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(str(error)) from error
