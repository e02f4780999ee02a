"""Twenty faults of one rank or one link, on two and four ranks, under real `tula` commands.

    python benchmarks/reliability/ranks.py [--short] [--only train]

| fault | what happens to the rank |
|---|---|
| oom | an allocation that no machine can serve |
| exception | an exception in its loss |
| kill | SIGKILL |
| cut | the network link of its node is taken down (network namespaces, tests/netns.py) |

A clean outcome: the command ends within its limit; a profile exits 0, the row of the fault says
which rank (or node) and why, and every other size was measured; a training without restarts exits
1 with the rank and the reason, one with `--max-restarts 1` exits 0 with all its samples trained
and the global batch as it was; nothing is left running. Four ranks are two nodes of two ranks in
namespaces of their own. Without root and iproute2 the cases of namespaces are skipped, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import HERE, MARK, marked
from facts import Outcome, Recorder

sys.path.insert(0, str(HERE.parents[1] / "tests"))
import netns

PORT = 29400
SIZES = (8, 16, 32)
FAULT_SIZE = 16
GLOBAL_BATCH, SAMPLES, EPOCHS = 32, 512, 6
LIMIT_S = 240.0
"""Of one command; a node that is cut off is noticed after 30 s."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what, under which command, on how many nodes of how many ranks."""

    kind: str
    verb: str
    nodes: int = 1
    ranks: int = 2
    restarts: int = 0

    @property
    def name(self) -> str:
        """The case in the report."""
        again = ", restarts" if self.restarts else ""
        return f"{self.verb}{again}: {self.kind} on one of {self.nodes * self.ranks} ranks"


FAULTS = (
    *(Fault(kind=kind, verb="profile") for kind in ("oom", "exception", "kill")),
    *(Fault(kind=kind, verb="profile", nodes=2) for kind in ("oom", "exception", "kill")),
    Fault(kind="cut", verb="profile", nodes=2, ranks=1),
    Fault(kind="cut", verb="profile", nodes=2),
    *(Fault(kind=kind, verb="train") for kind in ("oom", "exception", "kill")),
    *(Fault(kind=kind, verb="train", restarts=1) for kind in ("oom", "exception", "kill")),
    *(Fault(kind=kind, verb="train", nodes=2, restarts=1) for kind in ("oom", "exception", "kill")),
    Fault(kind="cut", verb="train", nodes=2, ranks=1),
    Fault(kind="cut", verb="train", nodes=2, ranks=1, restarts=1),
    Fault(kind="cut", verb="train", nodes=2, restarts=1),
)
SHORT = (FAULTS[2], FAULTS[13], FAULTS[18])


def main() -> int:
    """Inject every fault, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="Three faults.")
    parser.add_argument("--only", default="", help="Cases whose name holds this.")
    parser.add_argument("--results", type=Path, help="Where to write; build/reliability.")
    arguments = parser.parse_args()
    absent = netns.missing()
    with Recorder("ranks", short=arguments.short, folder=arguments.results) as record:
        for number, fault in enumerate(SHORT if arguments.short else FAULTS, start=1):
            if arguments.only not in fault.name:
                continue
            if fault.nodes > 1 and absent:
                print(f"{number} skipped {fault.name}: {absent}", flush=True)
                continue
            began = time.monotonic()
            outcome = inject(fault)
            record(outcome)
            print(
                f"{number} {'clean' if outcome.survived else 'NOT CLEAN'} {fault.name} "
                f"({time.monotonic() - began:.0f} s): {outcome.detail}",
                flush=True,
            )
    return record.exit_code


def inject(fault: Fault) -> Outcome:
    """One fault in a folder of its own, and what became of it."""
    folder = Path(tempfile.mkdtemp(prefix="tula-ranks-"))
    mark = uuid.uuid4().hex
    with hosts_of(fault) as hosts:
        runs = [start(fault, folder, mark, host) for host in hosts]
        if fault.kind == "cut":
            cut(fault, folder, hosts[-1], runs[0])
        troubles = await_all(fault, runs)
    deadline = time.monotonic() + 20.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    troubles += [f"left running: {process.pid}" for process in left]
    for process in left:
        process.kill()
    text = (folder / "node0.txt").read_text(errors="replace")
    check = check_profile if fault.verb == "profile" else check_training
    found, detail = check(fault, folder, runs[0].returncode, text)
    troubles += found
    if not troubles:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        part="ranks",
        case=fault.name,
        survived=int(not troubles),
        lost=int(bool(troubles)),
        detail="; ".join(troubles) + f" ({folder})" if troubles else detail,
    )


@contextmanager
def hosts_of(fault: Fault) -> Iterator[list[netns.Host | None]]:
    """This machine alone, or namespaces."""
    if fault.nodes == 1:
        yield [None]
        return
    with netns.network(fault.nodes) as network:
        yield list(network.hosts)


def start(
    fault: Fault, folder: Path, mark: str, host: netns.Host | None
) -> subprocess.Popen[bytes]:
    """The command on one host."""
    rank = 0 if host is None else host.rank
    place = ["--nnodes", str(fault.nodes), "--node-rank", str(rank)]
    place += ["--rendezvous", f"10.77.0.1:{PORT}"]
    arguments = [sys.executable, "-m", "mlflow_tula", *command(fault)]
    arguments += place if fault.nodes > 1 else []
    environment = {name: text for name, text in os.environ.items() if "MLFLOW" not in name} | {
        MARK: mark,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "FAULT_KIND": fault.kind,
        "FAULT_ONCE": str(folder / "failed"),
        "FAULT_RANK": "-1" if fault.kind == "cut" else str(fault.nodes * fault.ranks - 1),
        **({"FAULT_SIZE": str(FAULT_SIZE)} if fault.verb == "profile" else {"FAULT_CALL": "40"}),
    }
    more: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with (folder / f"node{rank}.txt").open("wb") as log:
        more |= {"stdout": log, "stderr": subprocess.STDOUT}
        if host is None:
            return subprocess.Popen(arguments, env=environment, **more)
        return subprocess.Popen(
            host.command(arguments), env={**environment, **host.environment}, **more
        )


def command(fault: Fault) -> list[str]:
    """The words behind `tula`."""
    slow = "small:make_slow" if fault.kind == "cut" else "small:make"
    words = [fault.verb, "--model", slow, "--loss", "rank_faults:loss"]
    words += ["--dataset-size", str(SAMPLES), "--seed", "0"]
    if fault.verb == "profile":
        words += ["--batch-sizes", ",".join(map(str, SIZES)), "--world-sizes", str(fault.ranks)]
        return [*words, "--node-counts", str(fault.nodes), "--max-steps", "5"]
    words += ["--batch-size", str(GLOBAL_BATCH), "--devices", str(fault.ranks)]
    words += ["--train-epochs", str(EPOCHS), "--max-restarts", str(fault.restarts)]
    return words


def cut(
    fault: Fault, folder: Path, host: netns.Host | None, first: subprocess.Popen[bytes]
) -> None:
    """Take the last host's cable out, when something was measured or saved."""
    assert host is not None, "links are cut between namespaces"
    found = measured if fault.verb == "profile" else saved
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and first.poll() is None and not found(folder):
        time.sleep(0.1)
    host.cut()


def measured(folder: Path) -> bool:
    """Whether a profile's table so far holds a row that ran (links alone are a table too)."""
    tables = (folder / "tula_output").glob("*/table.partial.json")
    rows = [row for table in tables for row in json.loads(table.read_text())["measurements"]]
    return any(row.get("status", "ok") == "ok" for row in rows)


def saved(folder: Path) -> bool:
    """Whether a training has a checkpoint."""
    return any((folder / "tula_output").glob("*/training/checkpoint.pt"))


def await_all(fault: Fault, runs: list[subprocess.Popen[bytes]]) -> list[str]:
    """Wait for every node's command; what did not end in time is a trouble, and ended."""
    deadline, troubles = time.monotonic() + LIMIT_S, []
    for rank, run in enumerate(runs):
        try:
            run.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            troubles.append(f"node {rank} hangs")
            run.kill()
            run.wait()
    return troubles


def check_profile(fault: Fault, folder: Path, code: int, text: str) -> tuple[list[str], str]:
    """The fault is a row with rank and reason, and every other size was measured."""
    tables = list((folder / "tula_output").glob("*/table.json"))
    if code != 0 or not tables:
        return [f"exit {code}: {last_line(text)}"], ""
    rows = json.loads(tables[0].read_text())["measurements"]
    ok = {row["local_batch_size"] for row in rows if row.get("status", "ok") == "ok"}
    failed = [row for row in rows if row.get("status", "ok") != "ok"]
    reason = failed[0]["reason"] if failed else ""
    if fault.kind == "cut":
        troubles = [] if ok else ["what had been measured is lost"]
        expected = "node 1"
    else:
        troubles = [] if ok == {8, 32} else [f"measured {sorted(ok)}, not 8 and 32"]
        expected = f"rank {fault.nodes * fault.ranks - 1}: "
    if not reason.startswith(expected):
        troubles.append(f"the row says {reason!r}")
    return troubles, f"row: {reason}"


def check_training(fault: Fault, folder: Path, code: int, text: str) -> tuple[list[str], str]:
    """Without restarts exit 1 and the reason; with them all samples, with the same global batch."""
    named = "node 1" if fault.kind == "cut" else f"rank {fault.nodes * fault.ranks - 1}: "
    last = last_line(text)
    if not fault.restarts:
        troubles = [] if code == 1 and named in last else [f"exit {code}: {last}"]
        return troubles, last.split(" (its log is ")[0].split(" (take ")[0]
    restart = re.search(r"restart 1 of 1 .*", text)
    line = restart.group(0) if restart else ""
    whole = f"{SAMPLES * EPOCHS:,} samples"
    troubles = [] if code == 0 and whole in text else [f"exit {code}: {last}"]
    if named not in line or f"batch {GLOBAL_BATCH} = " not in line:
        troubles.append(f"the restart says {line!r}")
    return troubles, line


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


if __name__ == "__main__":
    sys.exit(main())
