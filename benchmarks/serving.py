"""Served decisions, measured: latency, many clients, memory, and how soon a champion is taken up.

    python benchmarks/serving.py --store build/serving --predictors 1000 --seconds 60

Makes a sqlite store with so many registered predictors through `registry.register` (two minutes
for a thousand, kept for the next time), starts `mlflow models serve --env-manager local -m
models:/tula.recommender@champion` with one worker, and asks it over HTTP on this machine:

- one client, every request another predictor, price and deadline (no answer is found in memory),
  twenty seconds after the start, in which the server reads the champions;
- the same client, one predictor, another price each time (its files are in memory);
- eight clients at once for --seconds: errors, requests a second, resident memory after the first
  ten seconds and at the end;
- a new champion: seconds from the alias to the first answer by it, while the clients ask;
- in this process, `Recommender.answer` with a warm cache.

Exits 1 where a figure misses its limit, and with --check nothing but errors counts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "data" / "vgg11_digits_cpu.json"
HARDWARE_KINDS = 20
CLIENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the report; `limit` None is not judged."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def missed(self) -> bool:
        """Whether it is over its limit."""
        return self.limit is not None and self.value > self.limit


def make_store(folder: Path, predictors: int) -> list[str]:
    """A store with so many registered predictors, and the recommender; their names."""
    import mlflow_tula as tula
    from mlflow_tula.registry import register
    from mlflow_tula.serving.catalogue import Catalogue
    from mlflow_tula.serving.recommender_files import ensure_recommender
    from mlflow_tula.table import ProfileTable

    folder.mkdir(parents=True, exist_ok=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder.resolve()}/mlflow.db"
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
    table = ProfileTable.from_dict(json.loads(TABLE.read_text(encoding="utf-8")))
    patient = Catalogue(answer_s=120.0)
    known = {one.name for one in patient.listed() if not one.foreseen}
    for number in range(predictors):
        workload = replace(table.workload, model=f"net{number // HARDWARE_KINDS:02d}")
        hardware = replace(table.hardware, device_name=f"Device {number % HARDWARE_KINDS:02d}")
        if workload.registered_name(hardware) in known:
            continue
        factor = 0.5 + number % 97 / 50
        rows = tuple(
            row if row.step_time_s is None else replace(row, step_time_s=row.step_time_s * factor)
            for row in table.measurements
        )
        one = replace(table, workload=workload, hardware=hardware, measurements=rows)
        register(tula.fit(one), table=one)
    names = sorted(one.name for one in patient.listed(within_s=0.0) if not one.foreseen)
    ensure_recommender(names[0])
    return names[:predictors]


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The scoring server on a free port: the port, and the process that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local"]
    command += ["-m", "models:/tula.recommender@champion", "--port", str(port)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "serve.log").open("w") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            yield port, _answering(started.pid, port)
        finally:
            for child in [*psutil.Process(started.pid).children(recursive=True), started]:
                child.terminate()
            started.wait(30)


def _answering(pid: int, port: int) -> psutil.Process:
    """The process that listens, once it answers."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ping")
            if connection.getresponse().status == 200:
                break
        except OSError:
            time.sleep(0.2)
    else:
        raise SystemExit("the scoring server did not answer within 120 s: see serve.log")
    for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        # psutil 6 renamed it
        links = (getattr(one, "net_connections", None) or one.connections)("tcp")
        if any(link.laddr.port == port for link in links if link.laddr):
            return one
    raise SystemExit("no process of the scoring server listens: see serve.log")


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        """Connect with the first question."""
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, question: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Seconds and the answer; RuntimeError for any status but 200."""
        body = json.dumps({"dataframe_records": [question]})
        start = time.perf_counter()
        self.connection.request("POST", "/invocations", body, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        text = response.read()
        seconds = time.perf_counter() - start
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {text[:200]!r}")
        (row,) = json.loads(text)["predictions"]
        return seconds, row


def questions(names: list[str], seed: int) -> Iterator[dict[str, Any]]:
    """Endless questions, hardly ever the same twice."""
    draw = random.Random(seed)
    while True:
        yield {
            "name": draw.choice(names),
            "objective": draw.choice(["knee", "min_time", "min_cost"]),
            "epochs": draw.randint(1, 90),
            "deadline_s": draw.uniform(1e5, 1e6),
            "usd_per_device_hour": draw.uniform(0.1, 4.0),
            "devices_per_node": draw.choice([1, 2]),
        }


def one_client(
    port: int, process: psutil.Process, names: list[str], count: int, label: str
) -> list[Figure]:
    """Latency of a client alone, after a few questions; what of it the server computes."""
    client, asked = Client(port), questions(names, 1)
    for _ in range(10):
        client.ask(next(asked))
    before = sum(process.cpu_times()[:2])
    times = sorted(client.ask(next(asked))[0] for _ in range(count))
    computing = (sum(process.cpu_times()[:2]) - before) / count
    middle, high = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
    return [
        Figure(name=f"{label}, p50", value=1e3 * middle, unit="ms", limit=15.0),
        Figure(name=f"{label}, p99", value=1e3 * high, unit="ms", limit=60.0),
        Figure(name=f"{label}, the server's processor time", value=1e3 * computing, unit="ms"),
    ]


def many_clients(
    port: int, process: psutil.Process, names: list[str], seconds: float
) -> list[Figure]:
    """Eight clients at once: errors, throughput, growth of resident memory, a new champion."""
    stop = time.monotonic() + seconds
    times: list[float] = []
    errors: list[str] = []

    def work(seed: int) -> None:
        client, asked = Client(port), questions(names, seed)
        while time.monotonic() < stop:
            try:
                times.append(client.ask(next(asked))[0])
            except Exception as error:
                errors.append(repr(error))
                client = Client(port)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(min(10.0, seconds / 3))
    before = process.memory_info().rss
    taken_up = seconds_to_new_champion(port, names[0])
    for thread in threads:
        thread.join()
    growth = 100 * (process.memory_info().rss / before - 1)
    for error in errors[:3]:
        print(error, file=sys.stderr)
    label = f"{CLIENTS} clients for {seconds:g} s"
    return [
        Figure(name=f"{label}, errors", value=len(errors), unit="", limit=0),
        Figure(name=f"{label}, decisions a second", value=len(times) / seconds, unit=""),
        Figure(name=f"{label}, p50", value=1e3 * statistics.median(times), unit="ms"),
        Figure(name=f"{label}, growth of memory", value=growth, unit="%", limit=5.0),
        Figure(
            name=f"{label}, memory at the end", value=process.memory_info().rss / 1e6, unit="MB"
        ),
        Figure(name="a new champion, under that load", value=taken_up, unit="s", limit=5.0),
    ]


def seconds_to_new_champion(port: int, name: str) -> float:
    """From moving the alias to the first answer by the new version."""
    from mlflow import MlflowClient

    import mlflow_tula as tula
    from mlflow_tula.registry import load_table, register

    table = load_table(name)
    rows = tuple(
        row if row.step_time_s is None else replace(row, step_time_s=row.step_time_s * 1.001)
        for row in table.measurements
    )
    again = replace(table, measurements=rows)
    second = register(tula.fit(again), table=again).version
    client, registry = Client(port), MlflowClient()
    now = int(registry.get_model_version_by_alias(name, "champion").version)
    while client.ask({"name": name})[1]["version"] != now:
        time.sleep(0.05)
    other = 1 if now != 1 else second
    start = time.monotonic()
    registry.set_registered_model_alias(name, "champion", str(other))
    while client.ask({"name": name})[1]["version"] != other and time.monotonic() - start < 30:
        time.sleep(0.02)
    return time.monotonic() - start


def in_process(names: list[str], count: int) -> list[Figure]:
    """`Recommender.answer` where the files are in memory and the question is new."""
    from mlflow_tula.serving.recommender import Recommender

    recommender, asked = Recommender(), questions(names[:1], 2)
    for _ in range(10):
        recommender.answer([next(asked)])
    times = []
    for _ in range(count):
        question = next(asked)
        start = time.perf_counter()
        recommender.answer([question])
        times.append(time.perf_counter() - start)
    name = "in process, warm cache"
    return [Figure(name=f"{name}, p50", value=1e3 * statistics.median(times), unit="ms", limit=5.0)]


def report(figures: list[Figure]) -> str:
    """A table in Markdown."""
    lines = ["| what | measured | limit |", "|---|---|---|"]
    for one in figures:
        limit = "" if one.limit is None else f"{one.limit:g} {one.unit}".strip()
        mark = " (missed)" if one.missed else ""
        lines.append(
            f"| {one.name} | {one.value:.3g} {one.unit}{mark} | {limit} |".replace(" |", " |")
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "serving")
    parser.add_argument("--predictors", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only-store", action="store_true", help="make the store and stop")
    parser.add_argument("--check", action="store_true", help="judge errors alone, not times")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    names = make_store(given.store, given.predictors)
    if given.only_store:
        return 0
    figures = in_process(names, given.requests)
    with server(given.store) as (port, process):
        label = f"one client, {len(names):,} predictors"
        time.sleep(0.02 * len(names))
        figures += one_client(port, process, names, given.requests, label)
        figures += one_client(port, process, names[:1], given.requests, "one client, one predictor")
        figures += many_clients(port, process, names, given.seconds)
    text = report(figures)
    print(text)
    if given.markdown is not None:
        given.markdown.parent.mkdir(parents=True, exist_ok=True)
        given.markdown.write_text(text, encoding="utf-8")
    judged = [one for one in figures if not given.check or "errors" in one.name]
    return int(any(one.missed for one in judged))


if __name__ == "__main__":
    sys.exit(main())
