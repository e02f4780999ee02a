"""What a group of ranks finds in its environment, and the cores it may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mlflow_tula.launch.ranks import FOLDER_VARIABLE, GROUP_VARIABLE, PARENT_VARIABLE

_DROPPED = frozenset(
    {
        "MLFLOW_RUN_ID",
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    }
)


def usable_threads() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(
    folder: Path,
    identity: str,
    *,
    threads: int,
    additions: Mapping[str, str],
    nodes: int = 1,
) -> dict[str, str]:
    """The environment of a group: the caller's, less what would lead its ranks astray."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("TORCHELASTIC_", "TORCH_NCCL_ASYNC"))
    }
    here = [path or str(Path.cwd()) for path in sys.path]
    environment |= {
        # The caller's import path, and not the folder it happens to stand in (a file
        # named like a standard module would shadow it).
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(here)),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
        # Spinning threads collapse when anything else runs on the machine.
        "OMP_WAIT_POLICY": "passive",
        "KINETO_LOG_LEVEL": "5",
        FOLDER_VARIABLE: str(folder),
        GROUP_VARIABLE: identity,
        PARENT_VARIABLE: str(os.getpid()),
    }
    if nodes == 1 and sys.platform == "linux":
        # One machine: gloo must not depend on what the host name resolves to.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment | dict(additions)
