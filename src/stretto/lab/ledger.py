"""Two counts of the same bytes: what the interfaces saw, and what the workers' wires say they sent.

Every stretto worker in a lab is told a file (STRETTO_LEDGER) and writes there, when it leaves, the bytes its wire
handed to the network. The interface counts more: packet headers (66 bytes for each packet of up to 64 KB),
acknowledgements, heartbeats, the introduction by the coordinator. Those are a few per cent of a training job, so

    interface / ledger - 1

beyond 5 % says that one of the two counts is wrong, that something else was sent, or that the job sent next to nothing;
jobs of less than a megabyte are not judged. A host that receives far more than it sends is allowed the acknowledgements of
the surplus, at most 66 bytes for two full frames.
"""

from __future__ import annotations

from typing import NamedTuple

from stretto.launching.ledger_file import WireCount

MAX_EXCESS = 0.05
MIN_BYTES = 1_000_000
ACKNOWLEDGEMENTS = 66 / (2 * 1448)


class Traffic(NamedTuple):
    """Bytes through one host's interface."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


def excess(traffic: Traffic, ledger: WireCount) -> float:
    """By which share the interface sent more than the ledger says (negative: less)."""
    return traffic.sent / ledger.bytes_sent - 1 if ledger.bytes_sent else float("inf")


def warning(host: int, traffic: Traffic, ledger: WireCount) -> str | None:
    """What to say when the two counts are too far apart to be explained by headers."""
    acknowledgements = ACKNOWLEDGEMENTS * max(0, traffic.received - traffic.sent)
    payload = traffic._replace(sent=traffic.sent - int(acknowledgements))
    over, under = excess(payload, ledger), excess(traffic, ledger)
    if max(traffic.sent, ledger.bytes_sent) < MIN_BYTES or (over <= MAX_EXCESS and under >= -MAX_EXCESS):
        return None
    return (
        f"host {host} sent {traffic.sent:,} bytes through its interface, but stretto's wire counted {ledger.bytes_sent:,} "
        f"({under:+.1%}, more than {MAX_EXCESS:.0%} apart): the command sent something else too, a link was cut or overfull and "
        f"packets were sent again, or one of the counts is wrong."
    )
