"""The talk between nodes: over loopback in threads, and as commands in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import netns
import pytest

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.launch.cluster import Cluster, NodeLostError, UnreachableError
from mlflow_tula.launch.place import Place
from mlflow_tula.launch.ranks import exit_code

FACTS = {"torch's version": "2.9.0", "mlflow_tula's code": "abc"}


class Follower(threading.Thread):
    """Another node of the same command, in this process."""

    def __init__(self, place: Place, facts: dict[str, str], **options: object) -> None:
        super().__init__(daemon=True)
        self.place, self.facts, self.options = place, facts, options
        self.code: int | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Cluster(self.place, join_timeout_s=10, **self.options) as cluster:
                cluster.join(self.facts)
                self.code = cluster.follow()
        except Exception as error:
            self.error = error


def places(port: int, nodes: int = 2, told: int | None = None) -> list[Place]:
    return [
        Place(
            launcher="options",
            nodes=(told or nodes) if rank else nodes,
            node_rank=rank,
            host="127.0.0.1",
            port=port,
        )
        for rank in range(nodes)
    ]


def test_all_leave_with_the_code_of_node_0(free_port: int) -> None:
    first, second = places(free_port)
    other = Follower(second, FACTS)
    other.start()
    with Cluster(first, join_timeout_s=10) as cluster:
        cluster.join(FACTS)
    other.join(10)
    assert (other.code, other.error) == (0, None)


@pytest.mark.parametrize(
    ("facts", "told", "options", "message"),
    [
        (
            {**FACTS, "torch's version": "2.8.0"},
            None,
            {},
            r"torch's version differs between ranks: 2\.9\.0 on node 0, 2\.8\.0 on node 1",
        ),
        ({"torch's version": "2.9.0"}, None, {}, "mlflow_tula's code differs .* none on node 1"),
        (FACTS, 3, {}, "node 1 was told of 3 nodes, node 0 of 2"),
        (FACTS, None, {"interface": "eth77"}, "node 1: --interface: .* no network interface"),
    ],
)
def test_what_differs_is_one_error_on_node_0_and_exit_2_everywhere(
    facts: dict[str, str], told: int | None, options: dict, message: str, free_port: int
) -> None:
    first, second = places(free_port, told=told)
    other = Follower(second, facts, **options)
    other.start()
    with (
        pytest.raises(InvalidInputError, match=message) as caught,
        Cluster(first, join_timeout_s=10) as cluster,
    ):
        cluster.join(FACTS)
    other.join(10)
    assert (exit_code(caught.value), other.code, other.error) == (2, 2, None)


def test_a_node_that_does_not_come_is_named_in_time(free_port: int) -> None:
    first, _, third = places(free_port, nodes=3)
    other = Follower(third, FACTS)
    other.start()
    began = time.monotonic()
    with (
        pytest.raises(InvalidInputError, match=r"1 of 3 processes did not join .* node 1; start"),
        Cluster(first, join_timeout_s=1.5) as cluster,
    ):
        cluster.join(FACTS)
    other.join(10)
    assert other.code == 2
    assert time.monotonic() - began < 15


def test_a_rendezvous_that_cannot_be_reached_has_a_time_limit(free_port: int) -> None:
    _, second = places(free_port)
    with (
        pytest.raises(UnreachableError, match=r"cannot reach node 0 at 127.0.0.1:\d+ within 1 s"),
        Cluster(second, join_timeout_s=1) as cluster,
    ):
        cluster.join(FACTS)


def test_a_node_0_that_is_gone_is_said(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlflow_tula.launch.cluster.LOST_S", 1.5)
    first, second = places(free_port)
    other = Follower(second, FACTS)
    other.start()
    cluster = Cluster(first, join_timeout_s=10)
    cluster.join(FACTS)
    cluster._stopped.set()  # no heartbeat, no last word
    other.join(15)
    assert isinstance(other.error, NodeLostError)


WHY_NOT = netns.missing()
in_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
PROFILE = [
    *("profile", "--model", "squeezenet1_1", "--dataset", "synthetic", "--dataset-size", "64"),
    *("--batch-sizes", "8", "--world-sizes", "1", "--max-steps", "2"),
]


def run_on(
    net: netns.Network, commands: list[list[str]], folder: Path, **env: str
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of one command a host."""
    processes = []
    for host, command in zip(net.hosts, commands, strict=True):
        own = folder / f"host{host.rank}"
        own.mkdir(exist_ok=True)
        variables = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", **env}
        processes.append(
            host.popen(
                command,
                env={**variables, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"},
                cwd=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=240) for process in processes]
    return [
        (process.returncode, out, err)
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]


@in_namespaces
@pytest.mark.slow
def test_torchrun_profiles_two_hosts_and_only_the_first_writes(store: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    with netns.network(2, rate_bit_per_s=1e9) as net:
        commands = [
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(host.rank), "--nproc-per-node", "1"),
                *("--master-addr", net.master, "--master-port", "29500"),
                *("-m", "mlflow_tula", *PROFILE, "--join-timeout", "60s"),
            ]
            for host in net.hosts
        ]
        first, second = run_on(net, commands, tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "on 2 ranks" in first[1] + first[2]
    assert second[1] == ""
    assert "step" not in second[2]
    (path,) = (tmp_path / "host0").glob("tula_output/*/table.json")
    assert not (tmp_path / "host1" / "tula_output").exists()
    table = json.loads(path.read_text())
    assert {(row["nodes"], row["status"]) for row in table["measurements"]} == {
        (1, "ok"),
        (2, "ok"),
    }
    across = [link for link in table["links"] if link["scope"] == "inter_node"]
    assert len([link for link in across if "num_buckets" not in link]) == 5
    assert {link.get("compression") for link in across if "num_buckets" in link} == {None, "bf16"}
    client = MlflowClient(f"sqlite:///{store}")
    names = [model.name for model in client.search_registered_models()]
    assert len([name for name in names if name.startswith("tula.link.")]) == 1
    runs = client.search_runs([client.get_experiment_by_name("tula").experiment_id])
    assert len([run for run in runs if "mlflow.parentRunId" not in run.data.tags]) == 1


@in_namespaces
@pytest.mark.slow
def test_srun_trains_on_two_hosts(tmp_path: Path) -> None:
    """As srun would start it: one task a node, told by SLURM's variables alone."""
    with netns.network(2) as net:
        commands = [
            [
                *("env", f"SLURM_PROCID={host.rank}", "SLURM_NTASKS=2", "SLURM_LOCALID=0"),
                *("SLURM_JOB_ID=7", f"SLURM_JOB_NODELIST={net.master},other"),
                *(sys.executable, "-m", "mlflow_tula", "train", "--model", "squeezenet1_1"),
                *("--dataset", "synthetic", "--dataset-size", "64", "--batch-size", "16"),
                *("--train-epochs", "1", "--gradient-compression", "bf16", "--bucket-mb", "1"),
                *("--output-dir", str(tmp_path / "shared"), "--json"),
            ]
            for host in net.hosts
        ]
        first, second = run_on(net, commands, tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert second[1:] == ("", "")
    assert json.loads(first[1])["plan"]["nodes"] == 2


def test_one_line_from_rank_0_and_exit_2_on_both(tmp_path: Path, free_port: int) -> None:
    """A wrong request under a launcher: the others are silent."""
    results = []
    for rank in range(2):
        results.append(
            subprocess.Popen(
                [sys.executable, "-m", "mlflow_tula", *PROFILE, "--model", "no_such_model"],
                env={
                    **os.environ,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port),
                    "WORLD_SIZE": "2",
                    "RANK": str(rank),
                    "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
                },
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in results]
    assert [process.returncode for process in results] == [2, 2]
    assert outputs[0][1].startswith("Error: unknown model 'no_such_model'")
    assert len(outputs[0][1].splitlines()) == 1
    assert outputs[1] == ("", "")
