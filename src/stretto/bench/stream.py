"""The yardstick: a bare TCP stream of as many bytes as an all-reduce has to move.

    every rank sends 2m(P-1)/P bytes to r+1 and receives as many from r-1, all at once, both ways

That is the least any all-reduce of m bytes can send per rank (see docs/collectives.md), so with no additions and no waiting for
data it is the time of a perfect one over these links. Sent from and read into one large block, so the memory of the processors
is as kind to it as can be. On one host the stream goes through the loopback device; shared memory can beat it there.
"""

from __future__ import annotations

import secrets
import select
import socket
import time

import torch

from stretto.bench.contenders import InFlight
from stretto.errors import ConfigurationError, PeerLost, WireTimeout
from stretto.job import Job
from stretto.launching.introduce import local_address

BLOCK_BYTES = 4 << 20
TOKEN_BYTES = 16


class BareStream:
    """One connection to the right neighbour, one from the left. Made by all ranks together."""

    name = "bare TCP"
    wire = "tcp"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._right, self._left = (job.rank + 1) % job.world_size, (job.rank - 1) % job.world_size
        self._out, self._in = self._connect(job.timeouts.connect_s)
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._inbox = memoryview(bytearray(BLOCK_BYTES))

    def _connect(self, timeout_s: float) -> tuple[socket.socket, socket.socket]:
        token = secrets.token_bytes(TOKEN_BYTES)  # told to members only: a stranger on the port does not know it
        ip, _ = local_address(self._job.launch)
        with socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET) as listener:
            listener.settimeout(timeout_s)
            host, port = listener.getsockname()[:2]
            told = self._job.gather_object([host, port, token])[self._right]
            outgoing = socket.create_connection((told[0], told[1]), timeout_s)
            outgoing.sendall(told[2])
            incoming = self._accept(listener, token, time.monotonic() + timeout_s)
        for connection in (outgoing, incoming):
            connection.setblocking(False)
        return outgoing, incoming

    def _accept(self, listener: socket.socket, token: bytes, deadline: float) -> socket.socket:
        while time.monotonic() < deadline:
            connection, _ = listener.accept()
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            if connection.recv(TOKEN_BYTES, socket.MSG_WAITALL) == token:
                return connection
            connection.close()
        raise WireTimeout(self._left, "the bare TCP stream", self._job.timeouts.connect_s)

    def run(self, tensor: torch.Tensor) -> None:
        """Move the bytes of an all-reduce of `tensor`; it is not touched."""
        size = self._job.world_size
        num_bytes = 2 * tensor.numel() * tensor.element_size() * (size - 1) // size
        deadline = time.monotonic() + self._job.timeouts.arrive_s
        poller = select.poll()
        poller.register(self._out, select.POLLOUT)
        poller.register(self._in, select.POLLIN)
        to_send = to_receive = num_bytes
        while to_send or to_receive:
            ready = dict(poller.poll(1000))
            if self._out.fileno() in ready:
                to_send -= self._send(to_send)
                if not to_send:
                    poller.unregister(self._out)
            if self._in.fileno() in ready:
                to_receive -= self._receive(to_receive)
            if time.monotonic() > deadline:
                raise WireTimeout(self._left if to_receive else self._right, "the bare TCP stream", self._job.timeouts.arrive_s)

    def _send(self, left: int) -> int:
        try:
            return self._out.send(self._block[: min(left, BLOCK_BYTES)])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(self._right, f"the bare TCP stream to it broke: {error.strerror}") from error

    def _receive(self, left: int) -> int:
        try:
            received = self._in.recv_into(self._inbox, min(left, BLOCK_BYTES))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(self._left, f"the bare TCP stream from it broke: {error.strerror}") from error
        if received == 0:
            raise PeerLost(self._left, "the bare TCP stream from it ended")
        return received

    def start(self, tensor: torch.Tensor) -> InFlight:
        raise ConfigurationError(
            "the bare TCP stream in the background: it is driven by the very thread that would be busy. "
            "Measure it with an idle main thread."
        )

    def close(self) -> None:
        self._out.close()
        self._in.close()
