"""Which network interface the ranks of several nodes talk over."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

from mlflow_tula.errors import InvalidInputError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_interface(name: str | None = None) -> None:
    """Raise InvalidInputError where a named interface does not exist on this machine.

    Args:
        name: of `--interface`; None looks at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
    """
    known = sorted(psutil.net_if_addrs())
    wanted = {"--interface": name} if name else {key: os.environ.get(key) for key in VARIABLES}
    for source, value in wanted.items():
        for part in (value or "").split(","):
            if part and not _exists(part, known, exact=source != "NCCL_SOCKET_IFNAME"):
                raise InvalidInputError(
                    f"{source}: {socket.gethostname()} has no network interface {part!r}; it has "
                    f"{', '.join(known)}"
                )


def _exists(part: str, known: list[str], *, exact: bool) -> bool:
    """NCCL takes prefixes, `=name` for an exact one and `^name` for all others."""
    if exact:
        return part in known
    if part.startswith("^"):
        return True
    if part.startswith("="):
        return part[1:] in known
    return any(name.startswith(part) for name in known)


def interface_towards(host: str, port: int) -> str | None:
    """The interface by which packets for `host` leave, or None where that cannot be told."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == own for one in addresses):
            return _outward(name, own)
    return None


def _outward(name: str, own: str) -> str | None:
    """On node 0 its own address lies on its interface; loopback only serves one machine."""
    return name if name != "lo" or own.startswith("127.") or own == "::1" else None


def interface_variables(name: str | None, *, insist: bool = False) -> dict[str, str]:
    """Environment of ranks that are to use an interface; what is set stays, unless we `insist`."""
    if name is None:
        return {}
    return {key: name for key in VARIABLES if insist or key not in os.environ}


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def hang_up(port: int) -> None:
    """Shut this process's connections to a port elsewhere: whoever waits on one gets an error.

    A link that was cut says nothing, and a read on it has no end of its own.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.fd >= 0:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.fd)) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)
