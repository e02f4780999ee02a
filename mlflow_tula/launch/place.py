"""Where this process stands among those that a launcher started: `find_place()`.

    alone        nothing in the environment: this process launches its local ranks itself
    options      --nnodes, --node-rank and --rendezvous: one process a node, by hand
    torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    slurm        SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST (srun, not sbatch)
    kubernetes   MASTER_ADDR, WORLD_SIZE, RANK of a PyTorchJob, one process a pod; PET_* variables

Whatever the launcher, one process a node is that node's agent, which starts and stops the node's
ranks (`cluster.py`); where the launcher started several a node, the others wait for its word.
Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.specs import Spec

Launcher = Literal["alone", "options", "torchrun", "slurm", "kubernetes"]

DEFAULT_PORT = 29400
_SLURM_PORTS = (15_000, 20_000)
"""First port and their number: two jobs on a node seldom meet."""
_NO_STEP = frozenset({"4294967294", "4294967291", "batch", "interactive"})
"""Step ids of the batch script and of an interactive shell: nothing was started by srun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place(Spec):
    """One process among `nodes` x `ranks_per_node` that a launcher started.

    `host` and `port` are where node 0 is met; `served` says that the launcher keeps a store there
    already (torchrun's agent does).
    """

    launcher: Launcher = "alone"
    nodes: int = 1
    node_rank: int = 0
    ranks_per_node: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    served: bool = False

    def __post_init__(self) -> None:
        """A rank lies below its count, and several processes need a meeting point."""
        for rank, count in (("node_rank", "nodes"), ("local_rank", "ranks_per_node")):
            if not 0 <= getattr(self, rank) < getattr(self, count):
                raise InvalidInputError(
                    f"{rank} must lie between 0 and {count} - 1 = {getattr(self, count) - 1}, "
                    f"not {getattr(self, rank)}: {self._source} disagrees with itself"
                )
        if self.num_processes > 1 and not (self.host and 0 < self.port < 65536):
            raise InvalidInputError(
                f"{self.num_processes} processes need the address of node 0, not "
                f"{self.host!r} port {self.port}: set MASTER_ADDR and MASTER_PORT, or --rendezvous"
            )

    @property
    def num_processes(self) -> int:
        """What the launcher started."""
        return self.nodes * self.ranks_per_node

    @property
    def is_agent(self) -> bool:
        """Whether this process starts its node's ranks."""
        return self.local_rank == 0

    @property
    def leads(self) -> bool:
        """Whether this process decides, prints and writes to MLflow."""
        return self.node_rank == 0 and self.local_rank == 0

    @property
    def _source(self) -> str:
        return f"the launcher ({self.launcher})"


def find_place(
    environment: Mapping[str, str] | None = None,
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> Place:
    """This process's place, from options or else from the launcher's variables.

    Args:
        environment: os.environ when None.
        nnodes: how many machines run this very command; needs the two others.
        node_rank: which of them this is.
        rendezvous: `host:port` of node 0.

    Raises:
        InvalidInputError: variables or options that contradict each other; names them.
    """
    env = os.environ if environment is None else environment
    if nnodes is not None and nnodes > 1:
        return _from_options(nnodes, node_rank, rendezvous)
    if rendezvous is not None or (node_rank or 0) > 0:
        raise InvalidInputError("--node-rank and --rendezvous need --nnodes of at least 2")
    if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(env):
        return _from_torchrun(env)
    if "SLURM_PROCID" in env and _slurm(env, "STEP_NUM_TASKS", "NTASKS") is not None:
        step = _slurm(env, "STEP_ID", "STEPID")
        if step not in _NO_STEP:
            return _from_slurm(env)
    if {"MASTER_ADDR", "WORLD_SIZE", "RANK"} <= set(env) or "PET_NNODES" in env:
        return _from_kubernetes(env)
    return Place()


def _from_options(nnodes: int, node_rank: int | None, rendezvous: str | None) -> Place:
    if node_rank is None or rendezvous is None:
        raise InvalidInputError(
            f"--nnodes {nnodes} needs --node-rank (0 to {nnodes - 1}) and --rendezvous HOST:PORT "
            "of node 0"
        )
    host, port = _address(rendezvous)
    return Place(launcher="options", nodes=nnodes, node_rank=node_rank, host=host, port=port)


def _from_torchrun(env: Mapping[str, str]) -> Place:
    world, local = _number(env, "WORLD_SIZE"), _number(env, "LOCAL_WORLD_SIZE", default=1)
    rank = _number(env, "RANK")
    if local < 1 or world % local:
        raise InvalidInputError(
            f"WORLD_SIZE {world} must be a multiple of LOCAL_WORLD_SIZE {local}: start as many "
            "ranks on every node"
        )
    nodes = _number(env, "GROUP_WORLD_SIZE", default=world // local)
    if nodes * local != world:
        raise InvalidInputError(
            f"WORLD_SIZE {world} must be nodes x ranks a node = {nodes} x {local}: start as many "
            "ranks on every node"
        )
    return Place(
        launcher="torchrun",
        nodes=nodes,
        node_rank=_number(env, "GROUP_RANK", default=rank // local),
        ranks_per_node=local,
        local_rank=_number(env, "LOCAL_RANK"),
        host=env.get("MASTER_ADDR", ""),
        port=_number(env, "MASTER_PORT", default=DEFAULT_PORT),
        served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(env: Mapping[str, str]) -> Place:
    tasks = int(_slurm(env, "STEP_NUM_TASKS", "NTASKS") or 1)
    names = expand_nodes(_slurm(env, "STEP_NODELIST", "JOB_NODELIST", "NODELIST") or "")
    told = _slurm(env, "STEP_NUM_NODES", "NNODES", "JOB_NUM_NODES")
    nodes = int(told) if told else max(len(names), 1)
    if tasks % nodes:
        raise InvalidInputError(
            f"{tasks} tasks of srun must be as many on each of {nodes} nodes: give "
            "--ntasks-per-node"
        )
    per_node = tasks // nodes
    rank = _number(env, "SLURM_PROCID")
    first, count = _SLURM_PORTS
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or "0"
    return Place(
        launcher="slurm",
        nodes=nodes,
        node_rank=_number(env, "SLURM_NODEID", default=rank // per_node),
        ranks_per_node=per_node,
        local_rank=_number(env, "SLURM_LOCALID", default=rank % per_node),
        host=env.get("MASTER_ADDR") or (names[0] if names else ""),
        port=_number(env, "MASTER_PORT", default=first + int(job) % count),
    )


def _from_kubernetes(env: Mapping[str, str]) -> Place:
    """One process a pod: RANK and WORLD_SIZE of the operator count pods, unless PET_* say more."""
    told = env.get("PET_NNODES", "")
    if ":" in told:
        raise InvalidInputError(
            f"PET_NNODES {told} is a range: start `torchrun --nnodes {told} ... -m mlflow_tula`, "
            "which joins elastically, or fix the number of replicas"
        )
    nodes = int(told) if told.isdigit() else _number(env, "WORLD_SIZE", default=1)
    name = "PET_NODE_RANK" if "PET_NODE_RANK" in env else "RANK"
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    host, port = _address(endpoint) if ":" in endpoint else ("", DEFAULT_PORT)
    host = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or host
    port_name = "PET_MASTER_PORT" if "PET_MASTER_PORT" in env else "MASTER_PORT"
    return Place(
        launcher="kubernetes",
        nodes=nodes,
        node_rank=_number(env, name, default=0),
        host=host,
        port=_number(env, port_name, default=port),
    )


def check_alike(mine: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Raise where another process is not the same as this one."""
    if other["trouble"]:
        raise InvalidInputError(f"{name}: {other['trouble']}")
    if other["nodes"] != mine["nodes"]:
        raise InvalidInputError(
            f"{name} was told of {other['nodes']} nodes, node 0 of {mine['nodes']}: start all "
            "with the same world size"
        )
    for fact, value in mine["facts"].items():
        theirs = other["facts"].get(fact, "none")
        if theirs != value:
            raise InvalidInputError(
                f"{fact} differs between ranks: {value} on node 0, {theirs} on {name}; "
                "install and start the same everywhere"
            )


def expand_nodes(listed: str) -> list[str]:
    """Names of a SLURM node list: `gpu[001-003,7],login` -> gpu001, gpu002, gpu003, gpu7, login."""
    found: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", listed):
        names = [""]
        for text, inside in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part.strip()):
            ends = [text] if text else [one for span in inside.split(",") for one in _span(span)]
            names = [name + end for name in names for end in ends]
        found += [name for name in names if name]
    return found


def _span(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash or not (first.isdigit() and last.isdigit()):
        return [text]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _slurm(env: Mapping[str, str], *names: str) -> str | None:
    """The first of these SLURM_ variables that is set."""
    return next((env[f"SLURM_{name}"] for name in names if env.get(f"SLURM_{name}")), None)


def _number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = env.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise InvalidInputError(f"{name} of the launcher must be a whole number, not {text!r}")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInputError(f"a rendezvous must be HOST:PORT of node 0, not {text!r}")
    return host.strip("[]"), int(port)
