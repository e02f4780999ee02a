"""Profile, fit, register, recommend and serve in turn for half an hour: does anything grow?

    python benchmarks/reliability/soak.py [--minutes 30] [--short]

One process runs the commands one after the other (`mlflow_tula.cli.run`, the ranks of a profile
are its children), while `mlflow models serve` of the first registered version lives all the time
and answers in every round. After each round are noted: memory (resident, without what is shared),
open files, threads and processes of both, and files in the temporary folder. The first third
warms up; over the rest the growth by Theil and Sen's slope must stay within a tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil
from commands import HERE, MARK, MODEL, PROBES, marked
from facts import Outcome, Recorder
from servers import free_port

QUANTITIES = {
    "memory of the process, MB": 12.0,
    "open files of the process": 2.0,
    "threads of the process": 2.0,
    "child processes left": 0.0,
    "files in the temporary folder": 0.0,
    "memory of the server, MB": 12.0,
    "open files of the server": 2.0,
    "processes of the server": 0.0,
}
"""What is watched, and by how much it may grow over the rounds that count."""
ROUND = (
    ("profile", *MODEL, *PROBES, "--world-sizes", "1,2"),
    ("fit", *MODEL),
    ("register", *MODEL),
    ("recommend", *MODEL),
    ("recommend", *MODEL, "--objective", "min_time", "--epochs", "3", "--json"),
)
FEWEST_ROUNDS = 6


@dataclass(kw_only=True)
class Served:
    """A long-living `mlflow models serve`."""

    process: subprocess.Popen[bytes]
    mark: str
    url: str

    def ask(self) -> float:
        """The predicted step time of a batch of 64."""
        body = {"dataframe_split": {"columns": ["global_batch_size"], "data": [[64]]}}
        request = urllib.request.Request(
            f"{self.url}/invocations",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return float(json.load(answer)["predictions"][0]["step_time_s"])


def tula(*words: str) -> str:
    """One command in this process; anything but exit code 0 ends the soak."""
    from mlflow_tula.cli import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(words))
    if code != 0:
        raise SystemExit(f"tula {words[0]}: exit code {code}: {err.getvalue()[-1000:]}")
    return out.getvalue()


@contextlib.contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    """Serve the champion until the end of the block."""
    mark, port = uuid.uuid4().hex, free_port()
    words = ["models", "serve", "-m", f"models:/{name}@champion", "--env-manager", "local"]
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {MARK: mark, "PATH": here},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    served = Served(process=process, mark=mark, url=f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                served.ask()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    text = (folder / "serve.log").read_text()[-1000:]
                    raise SystemExit(f"mlflow models serve does not answer: {text}") from None
                time.sleep(0.5)
        yield served
    finally:
        for one in marked(mark):
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()


def measure(served: Served, scratch: Path) -> list[float]:
    """The present value of each of QUANTITIES."""
    gc.collect()
    own = psutil.Process()
    server = marked(served.mark)
    family = {one.pid for one in server} | {served.process.pid}
    children = [one for one in own.children(recursive=True) if one.pid not in family]
    return [
        own.memory_full_info().uss / 1e6,
        own.num_fds(),
        own.num_threads(),
        len(children),
        sum(1 for _ in scratch.rglob("*")),
        sum(one.memory_full_info().uss for one in server) / 1e6,
        sum(one.num_fds() for one in server),
        len(server),
    ]


def growth(values: list[float]) -> float:
    """Theil and Sen's slope times the number of steps: how much it grew, outliers aside."""
    pairs = combinations(enumerate(values), 2)
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in pairs]
    return statistics.median(slopes) * (len(values) - 1) if slopes else 0.0


def judge(rounds: list[list[float]]) -> Iterator[Outcome]:
    """One check a quantity, over the rounds after the first third."""
    counted = rounds[len(rounds) // 3 :]
    for place, (name, most) in enumerate(QUANTITIES.items()):
        values = [one[place] for one in counted]
        grown = growth(values)
        # A slow leak is seen by what it would come to, whatever the length of the soak.
        sound = grown <= most
        yield Outcome(
            part="soak",
            case=name,
            kind="check",
            survived=int(sound),
            lost=int(not sound),
            detail=f"{rounds[0][place]:.4g} after the first round, {values[0]:.4g} to "
            f"{values[-1]:.4g} over the last {len(values)}, growth {grown:+.3g} of at most "
            f"{most:g}",
        )


@contextlib.contextmanager
def slot() -> Iterator[None]:
    """Where one round begins and ends; for those who share a machine to wait in."""
    yield


def soak(minutes: float, folder: Path) -> list[list[float]]:
    """Rounds until the time is over, and what was measured after each."""
    scratch = folder / "tmp"
    scratch.mkdir()
    tempfile.tempdir = str(scratch)
    os.environ |= {
        "TMPDIR": str(scratch),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    sys.path.insert(0, str(HERE))
    os.chdir(folder)
    with slot():
        for words in ROUND:
            tula(*words)
    from mlflow_tula.registry import find

    rounds: list[list[float]] = []
    with serve(find()[0].name, folder) as served:
        end = time.monotonic() + 60.0 * minutes
        while time.monotonic() < end or len(rounds) < FEWEST_ROUNDS:
            with slot():
                for words in ROUND:
                    tula(*words)
                for _ in range(20):
                    served.ask()
                rounds.append(measure(served, scratch))
            print(json.dumps([round(value, 2) for value in rounds[-1]]), flush=True)
    return rounds


def main() -> int:
    """Soak, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--short", action="store_true", help="Six rounds.")
    parser.add_argument("--results", type=Path, help="Where to write; build/reliability.")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tula-soak-"))
    with Recorder("soak", short=arguments.short, folder=arguments.results) as record:
        rounds = soak(0.0 if arguments.short else arguments.minutes, folder)
        commands = (len(rounds) + 1) * len(ROUND) + 20 * len(rounds)
        record(
            Outcome(
                part="soak",
                case="commands and requests answered",
                kind="check",
                injected=commands,
                survived=commands,
                detail=f"{len(rounds)} rounds in {arguments.minutes:g} minutes"
                if not arguments.short
                else f"{len(rounds)} rounds",
            )
        )
        for outcome in judge(rounds):
            record(outcome)
            print(f"{outcome.case}: {outcome.detail}")
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
