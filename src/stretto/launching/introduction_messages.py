"""What is said while workers are introduced to each other.

    worker -> coordinator      Join, Ask, Leave, WatchReturns (who comes later?)
    launcher -> coordinator    Ended (a worker that the others need not wait for)
    coordinator -> worker      Waiting (who is missing), Table (everybody: the job is formed), Refused (why not),
                               News (who has come back)
    coordinator <-> CHECKER    Check (does that address answer?), Checked
    DOOR -> coordinator        Refusal (somebody was turned away)

The checker and the door are parts of the coordinator's own process, and neither can be impersonated: a node's name is bytes
where it comes from the network, and `Checked` and `Refusal` are not among the headers that are read there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import msgspec

from stretto.launching.peers import Peer

PROTOCOL = 4  # goes in front of every message; raise it when a message changes its meaning
CHECKER: Final = "checker"
DOOR: Final = "door"


class Join(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True):
    """I am here and listen at this address."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    interface: str
    address: str
    pid: int
    pid_namespace: str
    encrypted: bool  # whether this worker encrypts what it sends to other workers
    token: str  # random, one per attempt: tells a repeated Join from another worker with the same rank
    patience_s: float  # how long this worker can wait for the answer
    meet_s: float  # how long it was told to wait in all, for messages
    restart: int = 0  # how often its launcher has started it again


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """Asks which workers are still missing."""

    rank: int
    token: str


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """Goodbye."""

    rank: int
    host: str
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended", forbid_unknown_fields=True):
    """The process of this worker has ended, says the launcher that started it. It may never have called `stretto.init()`."""

    rank: int
    local_rank: int
    host: str
    pid: int
    restart: int
    how: str  # "exited with code 0"


class WatchReturns(msgspec.Struct, frozen=True, tag="watch", forbid_unknown_fields=True):
    """I want to know who joins after this generation; said again and again, for as long as I do."""

    rank: int
    generation: int


class Note(msgspec.Struct, frozen=True, tag="note", forbid_unknown_fields=True):
    """To be told to whoever comes back to this job."""

    key: str
    value: str


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    missing: list[int]
    refused: str = ""  # who was turned away meanwhile: perhaps one of the missing, with another secret


class Table(msgspec.Struct, frozen=True, tag="table"):
    peers: list[Peer]  # in order of rank
    nonce: bytes  # with the secret, this gives the keys of this job's wires (see `secret.py`)
    notes: dict[str, str] = {}  # for members that come back


class News(msgspec.Struct, frozen=True, tag="news"):
    peers: list[Peer]  # another life of each of these ranks has joined


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    kind: str  # "configuration", "job", "unreachable": which error the worker raises
    reason: str


FromWorker = Join | Ask | Leave | Ended | WatchReturns | Note
FromCoordinator = Waiting | Table | Refused | News


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Does somebody accept connections at this address?"""

    rank: int
    token: str
    address: str


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    check: Check
    why_not: str | None  # None: somebody does


class Why(enum.Enum):
    """What somebody who was turned away at the door had done wrong."""

    SECRET = "did not know the job secret"
    ENCRYPTION = "had another STRETTO_ENCRYPT"
    OTHERWISE = "did not present itself as a worker does (another program, or another version of stretto)"


@dataclass(frozen=True, slots=True)
class Refusal:
    why: Why
    address: str
