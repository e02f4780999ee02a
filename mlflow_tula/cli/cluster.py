"""A command on several nodes or ranks: one line, one MLflow run, one exit code.

with joined(values) as cluster:     # None where this process is alone
    ...                             # only node 0 comes here; the others follow it and leave
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli import types
from mlflow_tula.cli.options import option

if TYPE_CHECKING:
    from mlflow_tula.launch.cluster import Cluster
    from mlflow_tula.specs import HardwareSpec
    from mlflow_tula.training.facts import BatchPlan
    from mlflow_tula.workloads.job import Job

_OPTIONS = (
    option(
        "--nnodes",
        types.count("2", open_word="auto"),
        "auto",
        "Machines that run this very command; auto: as the launcher says (torchrun, srun, "
        "Kubernetes), else 1.",
    ),
    option(
        "--node-rank",
        types.count("0", open_word="auto", minimum=0),
        "auto",
        "Which of --nnodes this is, from 0; auto: as the launcher says.",
    ),
    option(
        "--rendezvous",
        types.OpenText("auto"),
        "auto",
        "HOST:PORT of node 0, where the nodes meet; auto: as the launcher says.",
    ),
    option(
        "--join-timeout",
        types.duration("300s"),
        "300s",
        "How long the nodes wait for each other (s, m or h).",
    ),
    option(
        "--interface",
        types.OpenText("auto"),
        "auto",
        "Network interface of the ranks; auto: GLOO_SOCKET_IFNAME, else the one towards node 0.",
    ),
)


def cluster_options(function: Any) -> Any:
    """The options of a command that several nodes may run together."""
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


@contextmanager
def joined(values: Mapping[str, Any]) -> Iterator[Cluster | None]:
    """Node 0 with the others at its call, or None where there are none.

    Every other process follows node 0 in here and exits with its code: nothing of the command's
    body runs there, and nothing is printed, unless node 0 cannot be reached or heard.
    """
    from mlflow_tula.launch.place import find_place

    place = find_place(
        nnodes=values["nnodes"], node_rank=values["node_rank"], rendezvous=values["rendezvous"]
    )
    if place.num_processes == 1:
        from mlflow_tula.launch.network import check_interface

        check_interface(values["interface"])
        yield None
        return
    # torch's sockets would add their own lines, one for each try
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from mlflow_tula.launch.cluster import Cluster

    with Cluster(
        place, join_timeout_s=values["join_timeout"], interface=values["interface"]
    ) as cluster:
        cluster.join(handshake(values))
        if not place.leads:
            code = cluster.follow()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # at once: a launcher's signal during clean-up would change the code
        yield cluster


def handshake(values: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on every rank: versions, code, and what is asked."""
    import torch

    from mlflow_tula import __version__
    from mlflow_tula.cli import options

    job = options.make_job(values)
    return {
        "torch's version": torch.__version__.split("+")[0],
        "Python's version": ".".join(platform.python_version_tuple()[:2]),
        "mlflow_tula's version": __version__,
        "mlflow_tula's code": code_digest(),
        "the job": hashlib.sha256(json.dumps(job.to_dict(), sort_keys=True).encode()).hexdigest()[
            :12
        ],
        "your own code": own_code_digest(job.model, job.dataset, job.loss, job.optimizer),
    }


@cache
def code_digest() -> str:
    """Twelve hex digits of this package's sources."""
    root = Path(__file__).parents[1]
    return _digest(sorted(root.rglob("*.py")))


def own_code_digest(*names: str) -> str:
    """The same of the files behind `package.module:function` names; `none` without any."""
    import importlib.util

    from mlflow_tula.workloads.job import is_import_path

    files = []
    for name in names:
        if not is_import_path(name):
            continue
        module = name.rsplit(":", 1)[0]
        if module.endswith(".py"):
            files.append(Path(module))
            continue
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is not None and found.origin:
            files.append(Path(found.origin))
    return _digest(files) if files else "none"


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        try:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        except OSError:
            continue
    return digest.hexdigest()[:12]


def check_world(values: Mapping[str, Any], cluster: Cluster | None) -> None:
    """Refuse more ranks a node than the launcher started there, where it started several.

    Raises:
        InvalidInputError: states the world size and the launcher's.
    """
    from mlflow_tula.errors import InvalidInputError

    if cluster is None or cluster.place.ranks_per_node == 1:
        return
    most = cluster.place.ranks_per_node
    for name in ("world_sizes", "devices"):
        asked = values.get(name)
        largest = max(asked) if isinstance(asked, tuple) else asked
        if largest is not None and largest != most and (name == "devices" or largest > most):
            raise InvalidInputError(
                f"--{name.replace('_', '-')} asks for {largest} ranks a node, and the launcher "
                f"({cluster.place.launcher}) started {most}: make them equal, or start one process "
                "a node"
            )


def launched(values: Mapping[str, Any], cluster: Cluster | None) -> dict[str, Any]:
    """What the launcher decides of a training: how many nodes, and the ranks of each.

    Raises:
        InvalidInputError: other numbers were asked for.
    """
    from mlflow_tula.errors import InvalidInputError

    check_world(values, cluster)
    if cluster is None:
        return {"num_nodes": 1}
    nodes, asked = cluster.place.nodes, values["nodes"]
    if asked != (1,) and nodes not in asked:
        raise InvalidInputError(
            f"--nodes {','.join(map(str, asked))} does not hold the {nodes} that the launcher "
            f"({cluster.place.launcher}) started: leave it out, or start so many"
        )
    found: dict[str, Any] = {"num_nodes": nodes, "nodes": (nodes,)}
    if cluster.place.ranks_per_node > 1:
        found["devices"] = cluster.place.ranks_per_node
    return found


def check_fits(
    job: Job, plan: BatchPlan, hardware: HardwareSpec, memory_limit: float | None
) -> None:
    """Refuse a local batch that one rank cannot hold, before any rank is started.

    What a step holds is counted without running it (seconds), so only for several ranks or a stated
    limit; a bound from below: what passes may still run out of memory.

    Raises:
        InvalidInputError: names the batch, the bytes and the largest batch that may fit.
    """
    import numpy as np

    from mlflow_tula.errors import InvalidInputError
    from mlflow_tula.probing.counting import Counting
    from mlflow_tula.probing.guards import default_memory_limit, gigabytes

    if plan.world_size == 1 and memory_limit is None:
        return
    features = Counting(job).result()
    if features is None or not features.peak_lines:
        return
    limit = int(memory_limit or default_memory_limit(hardware, plan.devices_per_node))
    local = max(plan.sizes)
    needed = float(features.peak_bytes(np.array([float(local)]))[0])
    if needed <= limit:
        return
    fits = min(
        (limit - fixed) / slope if slope > 0 else float("inf")
        for fixed, slope in features.peak_lines
    )
    way_out = f"at most about {int(fits)} may fit" if fits >= 1 else "no batch size fits"
    raise InvalidInputError(
        f"a local batch of {local} does not fit one rank: a step holds {gigabytes(int(needed))}, "
        f"the limit is {gigabytes(limit)}; {way_out}: take a smaller --batch-size or more "
        "--accumulation-steps"
    )


def device_counts(values: Mapping[str, Any], cluster: Cluster | None) -> Any:
    """World sizes of one node: as asked, else what the launcher started, else `auto`."""
    if values["world_sizes"]:
        return values["world_sizes"]
    if cluster is not None and cluster.place.ranks_per_node > 1:
        return tuple(sorted({1, cluster.place.ranks_per_node}))
    return "auto"
