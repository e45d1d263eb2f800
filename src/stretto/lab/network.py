"""The network of a lab: one bridge, and per host a virtual cable from its `eth0` to a port of the bridge.

                     host 0          host 1             (own network namespaces)
                      eth0            eth0              token bucket: what the host sends
                        |               |
                      port0           port1             token bucket: what the host receives
                        +--- switch ---+                (the supervisor's network namespace)

Addresses are 10.81.0.1, 10.81.0.2, ... Neighbours are entered for good, so no ARP travels: a counter shows the
hosts' own bytes, and a cut link gives no "host unreachable", just silence. A cut takes the port off the bridge: the
host's interface stays up, packets vanish in both directions (at the port: the supervisor has no address and forwards
nothing), nobody is told.

Everything is netlink through pyroute2; `ip` and `tc` need not be installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.lab import namespaces
from stretto.lab.rates import MAX_PACKET_BYTES, shape

MAX_HOSTS = 250
_ROOT = 0xFFFF_FFFF  # where a qdisc of the interface itself hangs (TC_H_ROOT)


def address(host: int) -> str:
    return f"10.81.0.{host + 1}"


def host_name(host: int) -> str:
    return f"host{host}"


def _hardware_address(host: int) -> str:
    return f"02:51:00:00:00:{host + 1:02x}"


@dataclass(frozen=True)
class Host:
    """One virtual host: its namespaces by descriptor, its network namespace also by the number the kernel shows."""

    index: int
    net: int
    uts: int
    inode: int


class Network:
    """Built once, in the process whose network namespace becomes the switch."""

    def __init__(self, rates: list[int | None], named: bool) -> None:
        self._open: Any = import_module("pyroute2").IPRoute  # has no types
        self._home = namespaces.current("net")
        _without_ipv6()
        self._switch: Any = self._open()
        self.hosts = [self._new_host(index, named) for index in range(len(rates))]
        self._ports = self._build(rates)

    def _new_host(self, index: int, named: bool) -> Host:
        net, uts = namespaces.new_host(host_name(index) if named else None)
        namespaces.enter(net)
        _without_ipv6()
        namespaces.enter(self._home)
        return Host(index, net, uts, os.stat(net).st_ino)

    def _build(self, rates: list[int | None]) -> list[int]:
        ip = self._switch
        ip.link("add", ifname="switch", kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        (self._bridge,) = ip.link_lookup(ifname="switch")
        ip.link("set", index=self._bridge, state="up")
        ports = [self._plug(host) for host in self.hosts]
        for host, port, rate in zip(self.hosts, ports, rates, strict=True):
            self._configure(host)
            self._shape(host, port, rate)
        return ports

    def _plug(self, host: Host) -> int:
        name = f"port{host.index}"
        peer = {"ifname": "eth0", "net_ns_fd": host.net, "address": _hardware_address(host.index)}
        self._switch.link("add", ifname=name, kind="veth", peer=peer)
        (port,) = self._switch.link_lookup(ifname=name)
        self._switch.link("set", index=port, master=self._bridge, state="up")
        return int(port)

    def _configure(self, host: Host) -> None:
        with self._inside(host) as ip:
            (lo,), (eth0,) = ip.link_lookup(ifname="lo"), ip.link_lookup(ifname="eth0")
            ip.addr("add", index=eth0, address=address(host.index), prefixlen=24)
            ip.link("set", index=lo, state="up")
            ip.link("set", index=eth0, state="up")
            for other in self.hosts:
                if other.index != host.index:
                    ip.neigh(
                        "add",
                        dst=address(other.index),
                        lladdr=_hardware_address(other.index),
                        ifindex=eth0,
                        state="permanent",
                    )

    @contextmanager
    def _inside(self, host: Host) -> Iterator[Any]:
        """A netlink connection that belongs to the host; this process is back in the switch when the body ends."""
        namespaces.enter(host.net)
        try:
            with self._open() as ip:
                yield ip
        finally:
            namespaces.enter(self._home)

    def _shape(self, host: Host, port: int, rate: int | None) -> None:
        _shape_one(self._switch, port, rate)
        with self._inside(host) as ip:
            _shape_one(ip, ip.link_lookup(ifname="eth0")[0], rate)

    def cut(self, host: int) -> None:
        self._switch.link("set", index=self._ports[host], master=0)

    def restore(self, host: int) -> None:
        self._switch.link("set", index=self._ports[host], master=self._bridge)

    def set_rate(self, host: int, rate: int | None) -> None:
        self._shape(self.hosts[host], self._ports[host], rate)

    def counters(self) -> list[tuple[int, int]]:
        """Bytes sent and received by each host's interface: what the host sends, its port receives."""
        return [self._traffic(port) for port in self._ports]

    def _traffic(self, port: int) -> tuple[int, int]:
        (link,) = self._switch.get_links(port)
        stats = link.get_attr("IFLA_STATS64")
        return int(stats["rx_bytes"]), int(stats["tx_bytes"])


def _shape_one(ip: Any, interface: int, rate: int | None) -> None:
    if rate is None:
        _unshape(ip, interface)
        ip.link("set", index=interface, gso_max_size=MAX_PACKET_BYTES)
        return
    bucket = shape(rate)
    ip.link("set", index=interface, gso_max_size=bucket.packet_bytes)
    ip.tc(
        "replace",
        "tbf",
        index=interface,
        rate=bucket.bytes_per_s,
        burst=bucket.burst_bytes,
        limit=bucket.limit_bytes,
    )


def _unshape(ip: Any, interface: int) -> None:
    if any(qdisc.get_attr("TCA_KIND") == "tbf" for qdisc in ip.get_qdiscs(index=interface)):
        ip.tc("del", index=interface, parent=_ROOT)


def _without_ipv6() -> None:
    """No IPv6 on interfaces made from now on: its discovery messages would be counted. Loopback keeps its ::1."""
    with suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
