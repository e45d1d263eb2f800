"""What the user of a lab and its supervisor say to each other: one JSON message per packet of a UNIX socket.

Packets (SOCK_SEQPACKET) keep message boundaries, so neither side ever waits for the rest of a message. A packet has
at most `MAX_BYTES`; what may be longer, the arguments and environment of a command, travels in an anonymous file
whose descriptor comes with the message.

    user   -> supervisor   NumberedRequest(id, request)
    supervisor -> user     Done | Spawned | Counted | RequestFailed, with the id of the request; Exited at any time
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

MAX_BYTES = 65536
MAX_COMMAND_BYTES = 16 * 2**20
MAX_DESCRIPTORS = 4


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first request: make the hosts. Rates in bytes per second, None for links that are not shaped."""

    rates: list[int | None]
    slow: list[float]


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Start a command. Descriptors: the file with its `Command`, its output, then those it gets as 3, 4..."""

    host: int
    service: bool  # part of the lab, not of the host's work: not slowed


class Command(msgspec.Struct, frozen=True):
    """Bytes, as the kernel has them: neither arguments nor variables need be valid text."""

    argv: list[bytes]
    environment: dict[str, bytes]
    directory: bytes

    def __repr__(self) -> str:  # without the environment, which holds the job's secret and whatever else the user keeps there
        return f"Command(argv={self.argv!r}, directory={self.directory!r})"


class Signal(msgspec.Struct, tag=True, frozen=True):
    process: int
    signum: int


class CutHost(msgspec.Struct, tag=True, frozen=True):
    host: int


class Restore(msgspec.Struct, tag=True, frozen=True):
    host: int


class SetRate(msgspec.Struct, tag=True, frozen=True):
    host: int
    rate: int | None


class SetSlow(msgspec.Struct, tag=True, frozen=True):
    host: int
    factor: float


class Count(msgspec.Struct, tag=True, frozen=True):
    """Ask for the interface counters of every host."""


LinkRequest = CutHost | Restore | SetRate
Request = Setup | Spawn | Signal | CutHost | Restore | SetRate | SetSlow | Count


class NumberedRequest(msgspec.Struct, frozen=True):
    id: int
    request: Request


class LinkEnvelope(msgspec.Struct, frozen=True):
    """What a stranger process of the same user (`stretto lab cut 1`) may ask."""

    id: int
    request: LinkRequest


class Done(msgspec.Struct, tag=True, frozen=True):
    id: int


class Spawned(msgspec.Struct, tag=True, frozen=True):
    id: int
    process: int  # the process id inside the lab: what `Signal` takes
    pid: int  # the same process as everybody outside sees it


class Counted(msgspec.Struct, tag=True, frozen=True):
    id: int
    traffic: list[tuple[int, int]]


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    id: int
    message: str
    configuration: bool = False  # the request was wrong, not the lab


class Exited(msgspec.Struct, tag=True, frozen=True):
    process: int
    returncode: int


Reply = Done | Spawned | Counted | RequestFailed
FromSupervisor = Reply | Exited

ENVELOPE: msgspec.json.Decoder[NumberedRequest] = msgspec.json.Decoder(NumberedRequest)
LINK_ENVELOPE: msgspec.json.Decoder[LinkEnvelope] = msgspec.json.Decoder(LinkEnvelope)
REPLY: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
FROM_SUPERVISOR: msgspec.json.Decoder[FromSupervisor] = msgspec.json.Decoder(FromSupervisor)

T = TypeVar("T")


def send(sock: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    data = msgspec.json.encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes: the limit between a lab and its supervisor is {MAX_BYTES}")
    if descriptors:
        socket.send_fds(sock, [data], list(descriptors))
    else:
        sock.send(data)


def receive(sock: socket.socket, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[int]] | None:
    """The next message and its descriptors; None when the other side is gone. Garbage raises `msgspec.DecodeError`."""
    data, descriptors, flags, _ = socket.recv_fds(sock, MAX_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise msgspec.DecodeError(f"a message longer than {MAX_BYTES} bytes or with too many descriptors")
        return (decoder.decode(data), descriptors) if data else None
    except msgspec.DecodeError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def write_command(command: Command) -> int:
    """A descriptor of an anonymous file that holds the command."""
    descriptor = os.memfd_create("stretto-lab-command")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(command))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_command(descriptor: int) -> Command:
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read(MAX_COMMAND_BYTES + 1)
    if len(data) > MAX_COMMAND_BYTES:
        raise msgspec.DecodeError(f"arguments and environment take more than {MAX_COMMAND_BYTES} bytes")
    return msgspec.json.decode(data, type=Command)
