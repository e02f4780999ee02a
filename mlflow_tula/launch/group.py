"""Start a module on several ranks through torch.distributed.run, and learn how they ended.

    group = RankGroup("mlflow_tula.train_worker", ["--folder", "x"], num_ranks=2)
    with group:                       # nothing of it is left running afterwards
        group.wait(timeout_s=600)     # RankFailedError names the rank and its reason
        group.results()               # what each rank gave to report()

The calling process never imports torch. Between it and the ranks stands one agent process,
`python -m mlflow_tula.launch.agent`, which is torch.distributed.run itself plus a JSON note of
the exit codes. Ranks start with a clean environment: no MLFLOW_RUN_ID (a worker that holds it
resumes and ends the parent's run), nothing of an outer launcher, and the parent's import path.

A rank's side is `mlflow_tula.launch.ranks.run_rank(work)`: it reports an exception as JSON and
leaves at once, so that peers waiting in an all-reduce are stopped by the agent and never wait
for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import psutil

from mlflow_tula.errors import InvalidInputError, WorkFailedError
from mlflow_tula.launch.environment import rank_environment as rank_environment
from mlflow_tula.launch.environment import usable_threads
from mlflow_tula.launch.failures import RankFailure, memory_kills, root_cause
from mlflow_tula.launch.folders import make_folder, remove_folder
from mlflow_tula.launch.ranks import (
    FOLDER_WORD,
    GROUP_VARIABLE,
    signal_all,
    write_json,
)
from mlflow_tula.specs import check_int

if TYPE_CHECKING:
    from mlflow_tula.launch.cluster import Cluster

logger = logging.getLogger(__name__)

_GRACE_S = 3.0
_LOG_TAIL = 4000
_REMOTE_POLL_S = 0.25


class RankFailedError(WorkFailedError):
    """A rank crashed, was killed, ran out of memory or out of time; `failure` says which."""

    def __init__(self, failure: RankFailure) -> None:
        """Make the message from the failure's one line."""
        super().__init__(failure.reason)
        self.failure = failure


class RankGroup:
    """One module on `num_ranks` local ranks, from start to the last process gone."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        num_ranks: int = 1,
        threads_per_rank: int | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        nodes: int = 1,
        node_rank: int = 0,
        master: str = "",
        cluster: Cluster | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the group; `start` (or `with`) starts it.

        Args:
            module: what each rank runs, as `python -m module`.
            arguments: the module's own command line.
            num_ranks: processes on this node, one per device.
            threads_per_rank: OpenMP threads; None divides the usable cores among the ranks.
            environment: additions to the ranks' environment.
            folder: where ranks report and the log is kept; None makes one and removes it.
            nodes: how many machines run the same group.
            node_rank: this machine's place among them.
            master: `host:port` of node 0; needed when there is more than one node.
            cluster: the nodes of this command; where this is node 0, the others start their part
                of the group, stop it with this one, and tell of their failures.
            files: names and texts that lie in every node's folder before its ranks start.
        """
        self.num_ranks = check_int("num_ranks", num_ranks, maximum=10**4)
        self._cluster = cluster if nodes > 1 and node_rank == 0 else None
        if self._cluster is not None and not master:
            master = self._cluster.free_master()
        if check_int("nodes", nodes) > 1 and ":" not in master:
            raise InvalidInputError(f"{nodes} nodes need master as host:port, not {master!r}")
        self._owns_folder = folder is None
        self.folder = folder or make_folder("tula-ranks-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.identity = uuid.uuid4().hex
        threads = threads_per_rank or max(1, usable_threads() // num_ranks)
        own = dict(environment or {})
        if self._cluster is not None:
            own |= self._cluster.variables
        self._environment = rank_environment(
            self.folder, self.identity, threads=threads, additions=own, nodes=nodes
        )
        self._files = dict(files or {})
        self._description = {
            "module": module,
            "arguments": list(arguments),
            "num_ranks": num_ranks,
            "threads_per_rank": threads_per_rank,
            "environment": dict(environment or {}),
            "nodes": nodes,
            "master": master,
            "files": self._files,
        }
        self._nodes, self._number, self._asked = nodes, 0, 0.0
        placement = ["--nproc-per-node", str(num_ranks), "--max-restarts", "0"]
        # Else torchrun leaves a folder of its own in the temporary one, every time.
        placement += ["--log-dir", str(self.folder / "elastic")]
        if nodes > 1:
            host, port = master.rsplit(":", 1)
            placement += ["--nnodes", str(nodes), "--node-rank", str(node_rank)]
            placement += ["--master-addr", host, "--master-port", port]
        else:
            placement += ["--standalone", "--local-addr", "localhost"]
        self._command = [sys.executable, "-m", "mlflow_tula.launch.agent", *placement]
        here = [text.replace(FOLDER_WORD, str(self.folder)) for text in arguments]
        self._command += ["--module", module, *here]
        self._process: subprocess.Popen[bytes] | None = None
        self._memory_kills: int | None = None

    def start(self) -> Self:
        """Start the agent; its ranks follow within seconds."""
        for name, text in self._files.items():
            (self.folder / name).write_text(text)
        if self._cluster is not None:
            self._refuse_lost_nodes(self._cluster)
            self._number = self._cluster.start(self._description)
        self._memory_kills = memory_kills()
        with (self.folder / "log.txt").open("ab") as log:
            # Its own session: a Ctrl-C in the terminal reaches only the caller, who then decides.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def _refuse_lost_nodes(self, cluster: Cluster) -> None:
        """Ranks of a node that was lost would be waited for in vain."""
        if cluster.present >= self._nodes:
            return
        names = ", ".join(f"node {node}" for node in sorted(cluster.lost))
        raise RankFailedError(
            RankFailure(
                rank=None,
                status="failed",
                kind="lost",
                message=f"{self._nodes} nodes are needed and {cluster.present} are left: {names} "
                "gave no sign of life",
            )
        )

    def poll(self) -> int | None:
        """The agent's exit code, or None while it runs; ranks that failed elsewhere end it."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None and self._failed_elsewhere():
            signal_all(self._processes(), getattr(signal, "SIGKILL", signal.SIGTERM))
            code = self._process.wait()
        return code

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every rank has ended well; else stop the rest and raise RankFailedError."""
        if self._process is None:
            raise InvalidInputError("the group was not started: call start() first")
        try:
            self._wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.stop()
            raise RankFailedError(timeout_failure(timeout_s)) from error
        if self._process.returncode != 0:
            failure = self.failure()
            self.stop()
            raise RankFailedError(failure)

    def _wait(self, timeout_s: float | None) -> None:
        """Until the agent has ended; with other nodes, looking at theirs now and then."""
        assert self._process is not None, "wait() has looked"
        if self._cluster is None:
            self._process.wait(timeout_s)
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._command, timeout_s or 0.0)
            time.sleep(0.05)

    def _failed_elsewhere(self) -> bool:
        """Whether ranks of other nodes failed; their words then lie beside this node's."""
        now = time.monotonic()
        if self._cluster is None or not self._number or now - self._asked < _REMOTE_POLL_S:
            return False
        self._asked = now
        found = self._cluster.failures(self._number)
        for index, failure in enumerate(found):
            name = f"failure-rank{'x' if failure.rank is None else failure.rank}-{index}.json"
            write_json(self.folder / name, failure.to_dict())
        return bool(found)

    def stop_failed(self) -> None:
        """End a group one rank of which told of its failure while others still wait for it.

        Raises:
            RankFailedError: with that rank's failure, when none is left.
        """
        if self.poll() is None and any(self.folder.glob("failure-rank*.json")):
            failure = self.failure()
            self.stop()
            raise RankFailedError(failure)

    def failure(self) -> RankFailure:
        """Why the group ended: a rank's own words, else its exit code, else the agent's."""
        if self._cluster is not None:
            self._hear_of_peers()
        told = [
            RankFailure.from_dict(json.loads(path.read_text()))
            for path in sorted(self.folder.glob("failure-rank*.json"))
        ]
        exits = self._read_json("exits.json") or {}
        tail = self.log_tail()
        silent = [
            RankFailure.from_exit(int(rank), int(code), tail, for_memory=self._killed_for_memory())
            for rank, code in exits.items()
            if all(failure.rank != int(rank) for failure in told)
        ]
        if told or silent:
            return root_cause([*told, *silent])
        return RankFailure.from_exit(
            None, self.poll() or 0, tail, for_memory=self._killed_for_memory()
        )

    def _killed_for_memory(self) -> bool | None:
        """Whether the kernel killed a process for memory since the start; None: it does not say."""
        now = memory_kills()
        if now is None or self._memory_kills is None:
            return None
        return now > self._memory_kills

    def _hear_of_peers(self) -> None:
        """Give the other nodes a moment to tell of their ranks: the cause is chosen among all."""
        deadline = time.monotonic() + _GRACE_S
        while not any(self.folder.glob("failure-rank*-*.json")) and time.monotonic() < deadline:
            self._asked = 0.0
            self._failed_elsewhere()
            time.sleep(0.1)

    def results(self) -> list[dict[str, Any]]:
        """What each local rank gave to `report`, by rank; empty for a rank that gave nothing."""
        return [self._read_json(f"result-rank{rank}.json") or {} for rank in range(self.num_ranks)]

    def log_tail(self) -> str:
        """The end of what the agent and its ranks printed."""
        try:
            return (self.folder / "log.txt").read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """End every process of the group, gently and then not; returns when none is left."""
        if self._cluster is not None and self._number:
            with contextlib.suppress(Exception):
                self._cluster.stop(self._number)
            self._number = 0
        deadline = time.monotonic() + _GRACE_S
        signal_all(self._processes(), signal.SIGTERM)
        while (left := self._processes()) and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.05)
        while left:
            signal_all(left, getattr(signal, "SIGKILL", signal.SIGTERM))
            self.poll()
            time.sleep(0.05)
            left = self._processes()
        self.poll()

    def close(self) -> None:
        """Stop, and remove the folder where the group made it."""
        self.stop()
        if self._owns_folder:
            remove_folder(self.folder)

    def __enter__(self) -> Self:
        """Start the group."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave no process behind, whatever happened."""
        self.close()

    def _processes(self) -> list[psutil.Process]:
        """Every live process that inherited this group's identity, loader workers included."""
        if self._process is None:
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                if process.environ().get(GROUP_VARIABLE) == self.identity:
                    found.append(process)
        return found

    def _read_json(self, name: str) -> dict[str, Any] | None:
        try:
            return cast("dict[str, Any]", json.loads((self.folder / name).read_text()))
        except (OSError, ValueError):
            return None


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    num_ranks: int = 1,
    timeout_s: float | None = None,
    threads_per_rank: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a module on `num_ranks` local ranks to its end and return what each reported.

    Raises:
        RankFailedError: a rank failed or `timeout_s` passed; no process of it is left.
    """
    group = RankGroup(
        module,
        arguments,
        num_ranks=num_ranks,
        threads_per_rank=threads_per_rank,
        environment=environment,
    )
    with group:
        group.wait(timeout_s)
        return group.results()


def timeout_failure(timeout_s: float | None) -> RankFailure:
    """The failure of a group that gave no answer in time."""
    return RankFailure(
        rank=None, status="failed", kind="timeout", message=f"no answer within {timeout_s:.0f} s"
    )
