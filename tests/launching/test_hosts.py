"""Addresses and interfaces as the kernel of this machine reports them."""

from __future__ import annotations

import socket

import pytest

from stretto.errors import ConfigurationError, RendezvousError
from stretto.launching import hosts


def test_a_host_identity_is_stable_and_shows_the_host_name() -> None:
    assert hosts.host_identity() == hosts.host_identity()
    assert hosts.host_name(hosts.host_identity()) == socket.gethostname()


def test_another_network_namespace_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hosts.host_identity()
    monkeypatch.setattr(hosts, "_network_namespace", lambda: "4026539999")

    assert hosts.host_identity() != here


def test_the_loopback_interface_is_found_by_address_and_by_name() -> None:
    name = hosts.interface_of("127.0.0.1")

    assert name is not None
    assert (name, "127.0.0.1") in hosts.interfaces()
    assert hosts.address_of(name) == hosts.address_of("127.0.0.1") == "127.0.0.1"
    assert hosts.interface_of("192.0.2.1") is None


def test_an_unknown_interface_is_an_error_that_lists_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"STRETTO_INTERFACE='wan7'.*127\.0\.0\.1"):
        hosts.address_of("wan7")


def test_the_route_towards_this_host_is_loopback_and_towards_an_unknown_name_an_error() -> None:
    assert hosts.route_towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(RendezvousError, match="no-such-host.invalid:9"):
        hosts.route_towards("no-such-host.invalid", 9)


@pytest.mark.parametrize(("text", "parts"), [("node0:29400", ("node0", 29400)), ("[::1]:7", ("::1", 7))])
def test_an_address_survives_splitting_and_joining(text: str, parts: tuple[str, int]) -> None:
    assert hosts.split_address(text) == parts
    assert hosts.join_address(*parts) == text


@pytest.mark.parametrize("text", ["", "node0", ":29400", "node0:", "node0:x", "node0:65536", "::1:7", "node0:-1", "a:²"])
def test_what_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port number|brackets"):
        hosts.split_address(text)


def test_loopback_addresses_are_known_as_such() -> None:
    assert [hosts.is_loopback(ip) for ip in ("127.0.1.1", "::1", "localhost", "10.0.0.1", "node0")] == [
        True, True, True, False, False,
    ]  # fmt: skip


CARDS = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth0", "10.0.0.5"), ("lo", "::1"), ("eth0", "2001:db8::5")]


@pytest.mark.parametrize(
    ("cards", "loopback", "published"),
    [
        (CARDS, "127.0.1.1", "10.0.0.5"),  # the bridge for containers leads nowhere
        (CARDS, "::1", "2001:db8::5"),
        ([*CARDS[:1], *CARDS[2:]], "127.0.1.1", "10.0.0.5"),  # an address of the other kind makes no second candidate
        ([CARDS[0], CARDS[4]], "127.0.1.1", "2001:db8::5"),
        (CARDS[:2], "127.0.1.1", "172.17.0.1"),  # the only one
    ],
)
def test_a_host_whose_own_name_means_loopback_publishes_the_address_that_leads_outside(
    monkeypatch: pytest.MonkeyPatch, cards: list[tuple[str, str]], loopback: str, published: str
) -> None:
    routes = {"node0": loopback, hosts.ELSEWHERE[0]: "10.0.0.5", hosts.ELSEWHERE[1]: "2001:db8::5"}
    monkeypatch.setattr(hosts, "interfaces", lambda: cards)
    monkeypatch.setattr(hosts, "route_towards", lambda host, port: routes[host])

    assert hosts.address_for_others("node0", 29400) == published


def test_a_host_without_a_way_outside_says_which_addresses_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def route(host: str, port: int) -> str:
        if host in hosts.ELSEWHERE:
            raise RendezvousError("no route")
        return "127.0.1.1"

    monkeypatch.setattr(hosts, "interfaces", lambda: CARDS)
    monkeypatch.setattr(hosts, "route_towards", route)
    with pytest.raises(RendezvousError, match=r"docker0 \(172.17.0.1\), eth0 \(10.0.0.5\).*\n.*STRETTO_INTERFACE"):
        hosts.address_for_others("node0", 29400)


@pytest.mark.parametrize(("host", "name"), [("node0", True), ("localhost", True), ("10.0.0.5", False), ("::1", False)])
def test_names_are_told_from_addresses(host: str, name: bool) -> None:
    assert hosts.is_name(host) == name
