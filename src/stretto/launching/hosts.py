"""Machines, interfaces and addresses, as the kernel sees them.

Two workers are on the same host when they share a running kernel *and* a network namespace: only then does a loopback
address of one reach the other. Containers and virtual lab hosts on one machine are therefore different hosts.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import uuid
from pathlib import Path

from stretto.errors import ConfigurationError, RendezvousError

_SIOCGIFCONF = 0x8912  # all IPv4 addresses, secondary ones included
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: the route there is the route to the outside world


def host_identity() -> str:
    """`name/digest`: equal for two processes exactly if they run on one kernel, in one network namespace, under one name."""
    name = socket.gethostname()
    digest = hashlib.sha256("\0".join((_boot_id(), _network_namespace(), name)).encode()).hexdigest()
    return f"{name}/{digest[:16]}"


def host_name(identity: str) -> str:
    """The part of a host identity that a person knows."""
    return identity.rpartition("/")[0] or identity


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox with a /proc of its own: the hardware address tells machines apart
        return f"{uuid.getnode():012x}"


def _network_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return "only"


def interfaces() -> list[tuple[str, str]]:
    """(name, address) of every address of this host: IPv4, then global IPv6."""
    return _ipv4() + _ipv6()


def interface_of(ip: str) -> str | None:
    """The name of the local interface that has this address, or None if none has."""
    return next((name for name, address in interfaces() if address == ip), None)


def address_of(interface: str) -> str:
    """The address that `STRETTO_INTERFACE=interface` means: an interface's name, or an address of this host."""
    known = interfaces()
    for name, ip in known:
        if interface in (name, ip):
            return ip
    listing = ", ".join(f"{name} ({ip})" for name, ip in known) or "none"
    raise ConfigurationError(
        f"STRETTO_INTERFACE={interface!r}: {socket.gethostname()} has no such interface or address. It has: "
        f"{listing}.\n"
        "Set STRETTO_INTERFACE to one of these names or addresses."
    )


def _ipv4() -> list[tuple[str, str]]:
    entry = 40 if struct.calcsize("P") == 8 else 32  # sizeof(struct ifreq)
    size = 64 * entry
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        while True:  # the kernel fills what fits: a full buffer may have cut the list
            buffer = array.array("B", bytes(size))
            request = struct.pack("iP", size, buffer.buffer_info()[0])
            filled: int = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
            if filled < size:
                break
            size *= 2
    raw = buffer.tobytes()[:filled]
    return [
        (raw[at : at + 16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(raw[at + 20 : at + 24]))
        for at in range(0, filled, entry)
    ]


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    # Column 3 is the scope: link-local addresses (20) mean nothing on another host.
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows if row[3] != "20"]


def usable_processors() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0))


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """The first address of a host name, and its family; IPv4 is preferred. Raises `OSError` (`gaierror`) if it has none."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(answers, key=lambda answer: answer[0] != socket.AF_INET)
    return family, str(where[0])


def is_name(host: str) -> bool:
    """Whether `host` is a name, which may mean another address on every machine, and not an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def route_towards(host: str, port: int) -> str:
    """The local address from which the kernel would talk to `host`. Sends nothing."""
    try:
        family, ip = resolve(host, port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, port))  # for UDP, connect only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"{socket.gethostname()} has no route towards the rendezvous {join_address(host, port)}: "
            f"{error.strerror or error}.\n"
            "Check the host name and that this machine's network is up; STRETTO_INTERFACE=name-or-address overrides "
            "the choice of interface."
        ) from error


def address_for_others(host: str, port: int) -> str:
    """The address of this host that workers on other hosts, which meet at the rendezvous `host:port`, can reach."""
    ip = route_towards(host, port)
    if not is_loopback(ip):
        return ip
    # The rendezvous is this very host under a loopback name (127.0.1.1 in /etc/hosts is common): others need a real one.
    # If the host has several addresses, take the one that leads to the outside world: a bridge for containers leads nowhere.
    others = [(name, address) for name, address in interfaces() if not is_loopback(address)]
    candidates = [each for each in others if (":" in each[1]) == (":" in ip)] or others
    outward = outward_addresses() if len(candidates) > 1 else []
    fitting = [address for _, address in candidates if len(candidates) == 1 or address in outward]
    if fitting:
        return fitting[0]
    listing = ", ".join(f"{name} ({address})" for name, address in candidates) or "none"
    raise RendezvousError(
        f"The rendezvous {join_address(host, port)} is a loopback address here, but the job's workers are on several hosts, "
        f"which cannot reach it. This host's other addresses: {listing}.\n"
        "Name the rendezvous by an address the others can reach, or set STRETTO_INTERFACE to one of these."
    )


def outward_addresses() -> list[str]:
    """The addresses from which this host would talk to the outside world."""
    found = []
    for address in ELSEWHERE:
        with contextlib.suppress(RendezvousError):  # no route there, or no IPv6 at all
            found.append(route_towards(address, 9))
    return found


def is_loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).is_loopback
    except ValueError:
        return ip == "localhost"


def split_address(text: str) -> tuple[str, int]:
    """`"host:port"` or `"[ipv6]:port"` -> (host, port). Raises `ValueError` with the reason."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets, as in [::1]:4242")
    if not colon or not host:
        raise ValueError("it is not of the form HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{port!r} is not a port number (0 to 65535)")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """(host, port) -> `"host:port"`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
