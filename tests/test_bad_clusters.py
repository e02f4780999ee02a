"""Wrong requests under a real torchrun: one line from rank 0, exit code 2 on every rank.

torchrun itself ends with 1 whenever a worker fails, so each worker's own code is noted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import netns
import pytest

from mlflow_tula.hardware import detect

NOTE = (
    '"$@" > "$NOTES/out$RANK.txt" 2> "$NOTES/err$RANK.txt" & pid=$!; '
    'trap "kill -TERM $pid" TERM; wait $pid; code=$?; '
    "if [ $code -gt 128 ]; then wait $pid; code=$?; fi; "
    'echo $code > "$NOTES/code$RANK.txt"; exit $code'
)
"""A worker that notes what its command said and how it ended, and hands torchrun's SIGTERM on."""
COMMON = ("--model", "squeezenet1_1", "--dataset", "synthetic", "--dataset-size", "64")
PROFILE = ("profile", *COMMON, "--batch-sizes", "8", "--max-steps", "2")
TRAIN = ("train", *COMMON, "--batch-size", "16", "--train-epochs", "1")
WHY_NOT = netns.missing()
TWO_RANKS = pytest.mark.skipif(
    detect("cpu").devices_per_node < 2, reason="two ranks need two cores"
)
in_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one worker ended."""

    code: str
    out: str
    err: str


def torchrun(*words: str, command: tuple[str, ...]) -> list[str]:
    """Workers that run `tula` and note their end."""
    tula = (sys.executable, "-m", "mlflow_tula", *command, "--join-timeout", "60s")
    launcher = (sys.executable, "-m", "torch.distributed.run", *words, "--no-python")
    return [*launcher, "sh", "-c", NOTE, "sh", *tula]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "NOTES": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        **more,
    }


def on_one_machine(folder: Path, command: tuple[str, ...], **more: str) -> list[Ended]:
    """Two workers on this machine."""
    words = torchrun("--standalone", "--nproc-per-node", "2", command=command)
    done = subprocess.run(
        words,
        env=environment(folder, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, "torchrun's own code for a worker that failed"
    return ended(folder)


def ended(folder: Path) -> list[Ended]:
    return [
        Ended(
            code=(folder / f"code{rank}.txt").read_text().strip(),
            out=(folder / f"out{rank}.txt").read_text(),
            err=(folder / f"err{rank}.txt").read_text(),
        )
        for rank in range(2)
    ]


def check(workers: list[Ended], message: str) -> None:
    """Exit 2 on both, one line with this in it from rank 0 and nothing from the other."""
    first, second = workers
    assert (first.code, second.code) == ("2", "2"), workers
    assert first.err.startswith("Error: ")
    assert message in first.err
    assert len(first.err.splitlines()) == 1
    assert (first.out, second.out, second.err) == ("", "", "")


@TWO_RANKS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((*PROFILE, "--world-sizes", "1,4"), "asks for 4 ranks a node, and the launcher"),
        ((*TRAIN, "--interface", "eth77"), "has no network interface 'eth77'; it has "),
        ((*TRAIN, "--memory-limit", "4MB"), "a local batch of 8 does not fit one rank"),
    ],
    ids=["world size", "interface", "memory"],
)
def test_one_line_from_rank_0_and_exit_2_on_every_rank(
    tmp_path: Path, command: tuple[str, ...], message: str
) -> None:
    check(on_one_machine(tmp_path, command), message)


@TWO_RANKS
@pytest.mark.long
def test_another_torch_on_one_rank(tmp_path: Path) -> None:
    lie = "import os\nif os.environ.get('RANK') == '1':\n    import torch\n"
    lie += "    torch.__version__ = '1.13.1'\n"
    (tmp_path / "sitecustomize.py").write_text(lie)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    check(
        on_one_machine(tmp_path, PROFILE, PYTHONPATH=path),
        "torch's version differs between ranks: ",
    )


def between_hosts(folder: Path, command: tuple[str, ...]) -> list[Ended]:
    """One worker on each of two hosts, in a folder of its own."""
    with netns.network(2) as net:
        runs = []
        for host in net.hosts:
            own = folder / f"host{host.rank}"
            own.mkdir(exist_ok=True)
            place = ("--nnodes", "2", "--node-rank", str(host.rank), "--nproc-per-node", "1")
            place += ("--master-addr", net.master, "--master-port", "29500")
            words = torchrun(*place, command=command)
            runs.append(
                host.popen(
                    words,
                    env=environment(folder),
                    cwd=own,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        for run in runs:
            run.wait(240)
    return ended(folder)


@in_namespaces
@pytest.mark.long
def test_other_code_on_one_host(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
        code = f"# host {rank}\nfrom torch import nn\n\n\ndef make():\n    return nn.Linear(4, 2)\n"
        (tmp_path / f"host{rank}" / "own.py").write_text(code)
    command = (*PROFILE, "--model", "own.py:make")
    check(between_hosts(tmp_path, command), "your own code differs between ranks: ")


@in_namespaces
@pytest.mark.long
@pytest.mark.parametrize(
    "command", [(*TRAIN, "--devices", "999"), (*PROFILE, "--world-sizes", "999")]
)
def test_more_devices_than_there_are(tmp_path: Path, command: tuple[str, ...]) -> None:
    check(between_hosts(tmp_path, command), "at most")


@in_namespaces
@pytest.mark.slow
def test_a_rendezvous_that_nobody_keeps(tmp_path: Path) -> None:
    """Both hosts look for node 0 where there is none: each says so for itself, in time."""
    with netns.network(2) as net:
        place = ("--nnodes", "3", "--rendezvous", "10.77.0.9:29400", "--join-timeout", "3s")
        tula = [sys.executable, "-m", "mlflow_tula", *PROFILE, *place]
        runs = [
            host.popen(
                [*tula, "--node-rank", str(host.rank + 1)],
                env=environment(tmp_path),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in net.hosts
        ]
        said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    for out, err in said:
        assert out == ""
        assert err.startswith("Error: cannot reach node 0 at 10.77.0.9:29400 within 3 s")
        assert len(err.splitlines()) == 1
