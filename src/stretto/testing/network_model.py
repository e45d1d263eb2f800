"""A network as numbers: how long a message takes between two ranks.

A message of n bytes from a to b over `Link(latency_s=alpha, bytes_per_s=1/beta)` takes alpha + n*beta when nothing else
is under way. A rank sends one message at a time and receives one at a time, both at once (full duplex), in the order of
the calls, as in the cost table of the collectives:

    leaves a      from  s = max(now, when a is free to send)                          to  s + n*beta
    reaches b     from  h = max(s + alpha + jitter, when b is free to receive)        to  h + n*beta

so bytes stream through (cut-through, not store-and-forward) and both ends are busy for n*beta seconds per message.

Frames' headers are not in n: the model's alpha stands for all that does not grow with the payload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from stretto.errors import ConfigurationError

NodeName = int | str


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `seconds`."""

    seconds: float = 0.0

    def draw(self, random: Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything between `low_s` and `high_s`, equally likely."""

    low_s: float
    high_s: float

    def draw(self, random: Random) -> float:
        return random.uniform(self.low_s, self.high_s)


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Mostly short, sometimes long: the queueing delay of a random arrival process, `mean_s` on average."""

    mean_s: float

    def draw(self, random: Random) -> float:
        return random.expovariate(1.0 / self.mean_s) if self.mean_s > 0 else 0.0


Delay = Constant | Uniform | ExponentialDelay


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two ranks.

    `loss`, `duplicate` and `reorder` are probabilities per message. On a datagram network (`VirtualNetwork`) a lost
    message is gone, a duplicate arrives twice and a reordered one is held back `hold_s` so that later ones pass it. On
    a reliable wire (`virtual_world`) a lost transmission costs `retransmit_s` more each time; the other two cannot
    happen there.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    jitter: Delay = field(default_factory=Constant)
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    hold_s: float = 0.0
    retransmit_s: float = 0.2

    def __post_init__(self) -> None:
        for name in ("latency_s", "hold_s", "retransmit_s"):
            self._refuse_unless(getattr(self, name) >= 0, name, "a delay is zero or a positive number of seconds")
        self._refuse_unless(self.bytes_per_s > 0, "bytes_per_s", "a link moves a positive number of bytes per second")
        for name in ("loss", "duplicate", "reorder"):
            self._refuse_unless(0 <= getattr(self, name) < 1, name, "a probability per message is in [0, 1)")
        self._refuse_unless(
            self.reorder == 0 or self.hold_s > 0, "hold_s", "a reordered message is held back for a positive time"
        )

    def _refuse_unless(self, fine: bool, name: str, rule: str) -> None:
        if not fine:
            raise ConfigurationError(
                f"Link({name}={getattr(self, name)!r}): {rule}.\n"
                f"Write for instance Link(latency_s=1e-4, bytes_per_s=1.25e8, loss=0.01, reorder=0.1, hold_s=1e-3)."
            )

    def seconds_for(self, num_bytes: int) -> float:
        """How long the message keeps each end busy: n * beta."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """Which link joins which ranks, and how fast a silent peer is found.

    `links[a, b]` is the direction from a to b; every other pair uses `default`. A killed rank is known lost to the
    others after `detect_s` (its connections are reset), a paused or cut-off one after `silence_s` without a heartbeat.

    >>> model = NetworkModel(Link(latency_s=1e-4), links={(0, 2): Link(latency_s=1e-3)})
    >>> model.link(0, 1).latency_s, model.link(0, 2).latency_s
    (0.0001, 0.001)
    """

    default: Link = field(default_factory=Link)
    links: Mapping[tuple[NodeName, NodeName], Link] = field(default_factory=dict)
    detect_s: float = 0.01
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        if not (self.detect_s >= 0 and self.silence_s > 0):
            raise ConfigurationError(
                f"NetworkModel(detect_s={self.detect_s!r}, silence_s={self.silence_s!r}): peers cannot be found lost "
                f"before they are. Write detect_s >= 0 and silence_s > 0."
            )

    def link(self, source: NodeName, target: NodeName) -> Link:
        return self.links.get((source, target), self.default)

    def all_links(self) -> list[Link]:
        return [self.default, *self.links.values()]


class Interfaces:
    """Until when every rank's network interface is busy, each way. The formulas are in the module's text."""

    def __init__(self) -> None:
        self._free_to_send: dict[NodeName, float] = {}
        self._free_to_receive: dict[NodeName, float] = {}

    def leave(self, now: float, source: NodeName, seconds: float) -> tuple[float, float]:
        """Book the sender's interface: when the first and the last byte leave."""
        start = max(now, self._free_to_send.get(source, 0.0))
        end = start + seconds
        self._free_to_send[source] = end
        return start, end

    def reach(self, now: float, target: NodeName, seconds: float) -> float:
        """Book the receiver's interface from the arrival of the first byte: when the last byte is in.

        Called when the first byte arrives, not when it is sent: a message over a long link must not keep out those that
        arrive before it.
        """
        start = max(now, self._free_to_receive.get(target, 0.0))
        end = start + seconds
        self._free_to_receive[target] = end
        return end
