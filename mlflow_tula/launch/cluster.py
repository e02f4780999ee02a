"""The nodes of one command: node 0 leads, and the agents of the others do what it says.

    with Cluster(find_place()) as cluster:        # on every node, started by any launcher
        cluster.join(facts)                       # all are there, with the same code and versions
        if not cluster.place.leads:
            sys.exit(cluster.follow())            # until node 0 says how it ended
        with RankGroup(module, num_ranks=2, nodes=2, cluster=cluster) as group: ...

They talk through a torch TCPStore on node 0 (torchrun's own where its agent keeps one). Node 0
numbers what it says: start a group of ranks, stop it, leave with an exit code; an agent answers
with the failures of its node's ranks. Both sides count heartbeats, so that a cut link or a dead
node ends the wait on either side within LOST_S seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mlflow_tula.errors import InvalidInputError, TulaError, WorkFailedError
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.launch.folders import make_folder, remove_folder
from mlflow_tula.launch.network import (
    check_interface,
    free_port,
    hang_up,
    interface_towards,
    interface_variables,
)
from mlflow_tula.launch.place import Place, check_alike
from mlflow_tula.launch.ranks import exit_code

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mlflow_tula.launch.group import RankGroup

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 300.0
LOST_S = 30.0
"""Without a sign of life for so long the other side is taken to be gone."""
_LEAVE_S = 10.0
_AFTER_NODE_0_S = 5.0
_POLL_S = 0.1
_BEAT_S = 1.0


class NodeLostError(WorkFailedError):
    """Node 0 cannot be heard any more, so that this node has to speak for itself."""

    unheard: ClassVar[bool] = True


class UnreachableError(InvalidInputError):
    """Node 0 was never reached."""

    unheard: ClassVar[bool] = True


class Cluster:
    """This process's side of the talk between nodes."""

    def __init__(
        self, place: Place, *, join_timeout_s: float = JOIN_TIMEOUT_S, interface: str | None = None
    ) -> None:
        """Take the place; nothing is opened before `join`.

        Args:
            place: where this process stands, several nodes or processes.
            join_timeout_s: so long may the others take to appear.
            interface: network interface of the ranks; None takes GLOO_SOCKET_IFNAME or the one
                that leads to node 0.
        """
        self.place = place
        self.join_timeout_s = join_timeout_s
        self._interface = interface
        self._store: Store | None = None
        self._said = 0
        self._groups = 0
        self._alive: dict[int, tuple[int, float, float]] = {}
        self._members: dict[int, list[int]] = {}
        self.lost: set[int] = set()
        self._heard_at = 0.0
        self._stopped = threading.Event()
        self._code: int | None = None

    def join(self, facts: Mapping[str, str]) -> None:
        """Meet the other processes, and see that they are the same as this one.

        Args:
            facts: names and values that must be equal everywhere (versions, digests).

        Raises:
            InvalidInputError: not all came in time, or one of them differs; node 0 raises it and
                the others leave with its exit code when they follow.
        """
        self._store = self._open()
        mine = {"facts": dict(facts), "trouble": self._trouble(), "nodes": self.place.nodes}
        key = f"joined-{self._number(self.place)}"
        self._store.set(key, json.dumps(mine))
        threading.Thread(target=self._beat, name="tula-cluster", daemon=True).start()
        if not self.place.leads:
            return
        others = self._await_all()
        for number, other in others.items():
            check_alike(mine, other, self._name(number))
        if mine["trouble"]:
            raise InvalidInputError(str(mine["trouble"]))

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks of this node need in their environment."""
        if self._interface is not None:
            return interface_variables(self._interface, insist=True)
        return interface_variables(interface_towards(self.place.host, self.place.port))

    def free_master(self) -> str:
        """`host:port` of a free port on node 0, which this process must be."""
        return f"{self.place.host}:{free_port()}"

    @property
    def present(self) -> int:
        """Nodes that were not lost, this one included."""
        return self.place.nodes - len(self.lost)

    def start(self, description: Mapping[str, Any]) -> int:
        """Tell the other nodes to start their part of a group; returns the group's number.

        The first so many nodes take part that were not lost; they are counted anew.
        """
        self._groups += 1
        here = [node for node in range(self.place.nodes) if node not in self.lost]
        members = self._members[self._groups] = here[: int(description["nodes"])]
        self._say({"kind": "start", "group": self._groups, "members": members, **description})
        return self._groups

    def stop(self, group: int) -> None:
        """Tell the other nodes to end their part of a group."""
        self._say({"kind": "stop", "group": group})

    def failures(self, group: int) -> list[RankFailure]:
        """What the other nodes told of their ranks in a group, and nodes that fell silent."""
        store, found = self._opened(), []
        for node in self._members[group][1:]:
            key = f"failed-{group}-{node}"
            if store.check([key]):
                rows = json.loads(store.get(key))
                found += [RankFailure.from_dict(row) for row in rows]
            elif self._silent(node):
                self.lost.add(node)
                found.append(
                    RankFailure(
                        rank=None,
                        status="failed",
                        kind="lost",
                        message=f"node {node} gave no sign of life for {LOST_S:.0f} s: it is "
                        "gone, or the link to it is cut",
                        time=time.time(),
                    )
                )
        return found

    def leave(self, code: int) -> None:
        """Node 0's last word: every process ends with this exit code; waits until they heard it.

        torchrun ends this process by SIGTERM once another has failed. From here on nothing is left
        but its own line and its exit code, and a slow machine needs its time for these.
        """
        if self._store is None:
            return
        here = threading.current_thread() is threading.main_thread()
        if code and self.place.launcher == "torchrun" and here:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(Exception):
            self._say({"kind": "leave", "code": code})
            deadline = time.monotonic() + _LEAVE_S
            others = [n for n in range(1, self.place.num_processes) if self._has_joined(n)]
            while others and time.monotonic() < deadline:
                others = [n for n in others if not self._store.check([f"left-{n}"])]
                time.sleep(_POLL_S / 2)

    def follow(self) -> int:
        """Do what node 0 says until it says leave; returns the exit code.

        Raises:
            NodeLostError: node 0 cannot be heard any more; nothing is left running.
        """
        store, heard = self._opened(), 0
        groups: dict[int, RankGroup] = {}
        self._heard_at = time.monotonic()
        threading.Thread(target=self._watch, name="tula-cluster-watch", daemon=True).start()
        try:
            while True:
                heard += self._obey(store, heard + 1, groups)
                if self._code is not None:
                    self._let_node_0_end(store, self._code)
                    return self._code
                self._report(store, groups)
                self._heard_at = time.monotonic()
                time.sleep(_POLL_S)
        except (RuntimeError, OSError) as error:
            if isinstance(error, TulaError):
                raise
            raise NodeLostError(f"node 0 at {self.place.host} is gone: {error}") from error
        finally:
            for group in groups.values():
                group.close()
                remove_folder(group.folder)

    def _let_node_0_end(self, store: Store, code: int) -> None:
        """Give node 0 the time to say its line: torchrun ends all when the first has failed.

        It ends them by SIGTERM, and this process knows its exit code already.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
        store.set(f"left-{self._number(self.place)}", "1")
        if code and self.place.launcher == "torchrun":
            time.sleep(_AFTER_NODE_0_S)

    def _obey(self, store: Store, number: int, groups: dict[int, RankGroup]) -> int:
        """Carry out what node 0 said as `number`, if it said that much; how many words that was."""
        if not store.check([f"say-{number}"]):
            if self._silent(0):
                raise NodeLostError(
                    f"node 0 at {self.place.host} gave no sign of life for {LOST_S:.0f} s"
                )
            return 0
        word = json.loads(store.get(f"say-{number}"))
        if word["kind"] == "leave":
            self._code = int(word["code"])
        elif word["kind"] == "stop" and word["group"] in groups:
            group = groups.pop(word["group"])
            group.close()
            remove_folder(group.folder)
        elif word["kind"] == "start" and self._takes_part(word):
            groups[word["group"]] = self._started(word)
        return 1

    def _takes_part(self, word: Mapping[str, Any]) -> bool:
        return self.place.is_agent and self.place.node_rank in word["members"]

    def _started(self, word: Mapping[str, Any]) -> RankGroup:
        """This node's part of a group."""
        from mlflow_tula.launch.group import RankGroup

        folder = make_folder("tula-node-")
        return RankGroup(
            word["module"],
            word["arguments"],
            num_ranks=int(word["num_ranks"]),
            threads_per_rank=word["threads_per_rank"],
            environment={**word["environment"], **self.variables},
            folder=folder,
            files=word["files"],
            nodes=int(word["nodes"]),
            node_rank=word["members"].index(self.place.node_rank),
            master=word["master"],
        ).start()

    def _report(self, store: Store, groups: Mapping[int, RankGroup]) -> None:
        """Tell node 0 of ranks that failed here, once."""
        for number, group in groups.items():
            key = f"failed-{number}-{self.place.node_rank}"
            told = any(group.folder.glob("failure-rank*.json"))
            if (told or group.poll() not in (None, 0)) and not store.check([key]):
                deadline = time.monotonic() + 2.0
                while group.poll() is None and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                store.set(key, json.dumps([group.failure().to_dict()]))

    def _open(self) -> Store:
        """The store, or InvalidInputError that says where it was looked for."""
        from torch.distributed import (  # type: ignore[attr-defined]
            PrefixStore,
            TCPStore,
        )

        place, timeout = self.place, timedelta(seconds=self.join_timeout_s)
        try:
            store = TCPStore(
                place.host,
                place.port,
                is_master=place.leads and not place.served,
                timeout=timeout,
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError, OSError) as error:
            what = "listen at" if place.leads and not place.served else "reach node 0 at"
            reason = " ".join(str(error).split())[:160]
            raise UnreachableError(
                f"cannot {what} {place.host}:{place.port} within {self.join_timeout_s:.0f} s "
                f"({reason}): check the address, the port and the firewall"
            ) from error
        store.set_timeout(timedelta(seconds=LOST_S))
        # torchrun's store outlives the processes that it starts again
        return PrefixStore(f"tula-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _await_all(self) -> dict[int, dict[str, Any]]:
        """What every other process told, or InvalidInputError that names who is missing."""
        store, deadline = self._opened(), time.monotonic() + self.join_timeout_s
        missing = list(range(1, self.place.num_processes))
        while missing:
            missing = [n for n in missing if not store.check([f"joined-{n}"])]
            if missing and time.monotonic() > deadline:
                names = ", ".join(self._name(number) for number in missing[:8])
                raise InvalidInputError(
                    f"{len(missing)} of {self.place.num_processes} processes did not join at "
                    f"{self.place.host}:{self.place.port} within {self.join_timeout_s:.0f} s: "
                    f"{names}; start the command there too, or give a smaller world size"
                )
            time.sleep(_POLL_S)
        numbers = range(1, self.place.num_processes)
        return {n: json.loads(store.get(f"joined-{n}")) for n in numbers}

    def _trouble(self) -> str:
        """What is wrong on this node alone."""
        try:
            check_interface(self._interface)
        except InvalidInputError as error:
            return str(error)
        return ""

    def _say(self, word: Mapping[str, Any]) -> None:
        self._said += 1
        self._opened().set(f"say-{self._said}", json.dumps(word))

    def _beat(self) -> None:
        """Give signs of life until the end; a store that is gone is noticed elsewhere."""
        key, store = f"alive-{self._number(self.place)}", self._opened()
        while not self._stopped.wait(_BEAT_S):
            try:
                store.add(key, 1)
            except (RuntimeError, OSError):
                return

    def _watch(self) -> None:
        """End the wait for a store behind a cut link: nothing says so, and it waits for ever."""
        while not self._stopped.wait(_BEAT_S):
            if time.monotonic() - self._heard_at > LOST_S:
                hang_up(self.place.port)
                return

    def _silent(self, node: int) -> bool:
        """Whether a node's agent gave no sign of life for LOST_S."""
        now = time.monotonic()
        count, since, looked = self._alive.get(node, (-1, now, 0.0))
        if now - looked >= _BEAT_S:
            latest = self._opened().add(f"alive-{node * self.place.ranks_per_node}", 0)
            if latest != count:
                count, since = latest, now
            self._alive[node] = (count, since, now)
        return now - since > LOST_S

    def _has_joined(self, number: int) -> bool:
        return bool(self._opened().check([f"joined-{number}"]))

    def _opened(self) -> Store:
        if self._store is None:
            raise InvalidInputError("the cluster was not joined: call join() first")
        return self._store

    @staticmethod
    def _number(place: Place) -> int:
        return place.node_rank * place.ranks_per_node + place.local_rank

    def _name(self, number: int) -> str:
        node, local = divmod(number, self.place.ranks_per_node)
        return f"node {node}" + (f" process {local}" if self.place.ranks_per_node > 1 else "")

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Node 0 tells the others how it ended."""
        if self.place.leads:
            self.leave(exit_code(error))
        self._stopped.set()
