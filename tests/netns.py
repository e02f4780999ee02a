"""Test hosts: network namespaces joined by veth pairs and a bridge, at rates of our own.

    with network(2, rate_bit_per_s=1e9) as net:
        first, second = net.hosts
        second.popen([sys.executable, "-m", "..."], env=second.environment)
        net.set_rate(200e6)

Each host is a namespace with one interface `eth0` (10.77.0.1, 10.77.0.2, ...) whose egress a tbf
queue limits; the bridge stands in a namespace of its own, so nothing of the machine's own network
is touched, and deleting the namespaces deletes everything. Their names hold this process's id:
they cannot clash with another run's, and what a killed run left behind is swept by the next one.

Needs root and iproute2 (`missing()` says what is absent). The kernels this is for have tbf and
htb but no netem: a rate can be set, a delay cannot.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INTERFACE = "eth0"
PREFIX = "tula-"
BURST_BYTES = 128 * 1024
QUEUE_S = 0.05
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace: a machine with one network interface."""

    namespace: str
    address: str
    rank: int
    interface: str = INTERFACE

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find this host's interface."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}

    def command(self, arguments: Sequence[str], *, core: int | None = None) -> list[str]:
        """The command line that runs `arguments` on this host, on one core where one is named."""
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        return ["ip", "netns", "exec", self.namespace, *pinned, *arguments]

    def popen(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
        **more: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process on this host; `env` is added to this process's and the host's own."""
        return subprocess.Popen(
            self.command(arguments, core=core),
            env={**os.environ, **self.environment, **(env or {})},
            **more,
        )

    def cut(self) -> None:
        """Take the cable out."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")

    def set_rate(self, rate_bit_per_s: float) -> None:
        """Limit what this host sends."""
        limit = max(round(rate_bit_per_s / 8 * QUEUE_S), 2 * BURST_BYTES)
        _run(
            *("tc", "-n", self.namespace, "qdisc", "replace", "dev", self.interface, "root"),
            *("tbf", "rate", f"{rate_bit_per_s:.0f}bit"),
            *("burst", str(BURST_BYTES), "limit", str(limit)),
        )

    def pids(self) -> list[int]:
        """Processes that run on this host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts on one bridge."""

    hosts: tuple[Host, ...]

    @property
    def master(self) -> str:
        """Address of the first host."""
        return self.hosts[0].address

    def set_rate(self, rate_bit_per_s: float) -> None:
        """Limit what each host sends."""
        for host in self.hosts:
            host.set_rate(rate_bit_per_s)


def missing() -> str:
    """Why there can be no network here, or an empty string."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"needs iproute2: no {' and no '.join(absent)} here"
    try:
        with network(2, rate_bit_per_s=1e9):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        return f"this kernel gives no namespaces with veth, bridge and tbf: {words.strip()}"


@contextlib.contextmanager
def network(num_hosts: int, *, rate_bit_per_s: float | None = None) -> Iterator[Network]:
    """Hosts joined by a bridge; afterwards no process of theirs and no namespace is left.

    Args:
        num_hosts: 2 to 4 (more work too).
        rate_bit_per_s: what each host may send; None is as fast as memory.
    """
    sweep()
    stem = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    switch = f"{stem}-sw"
    hosts = tuple(
        Host(namespace=f"{stem}-h{rank}", address=f"10.77.0.{rank + 1}", rank=rank)
        for rank in range(num_hosts)
    )
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in hosts:
            _add_host(host, switch)
            if rate_bit_per_s is not None:
                host.set_rate(rate_bit_per_s)
        yield Network(hosts=hosts)
    finally:
        for host in hosts:
            _end(host)
        for name in (*(host.namespace for host in hosts), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def sweep() -> None:
    """Delete the namespaces of runs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for name in (line.split()[0] for line in listed.stdout.splitlines() if line.strip()):
        owner = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not _alive(int(owner)):
            _end(Host(namespace=name, address="", rank=0))
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _add_host(host: Host, switch: str) -> None:
    port = f"port{host.rank}"
    _ip("netns", "add", host.namespace)
    _ip(
        *("link", "add", "name", host.interface, "netns", host.namespace),
        *("type", "veth", "peer", "name", port, "netns", switch),
    )
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
    for device in ("lo", host.interface):
        _ip("-n", host.namespace, "link", "set", device, "up")


def _end(host: Host) -> None:
    """End what still runs on a host: it was started there by the run that owns the host."""
    deadline = time.monotonic() + 5.0
    while (left := host.pids()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
