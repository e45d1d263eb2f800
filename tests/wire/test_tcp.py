from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from wire.contract import WireContract
from wire.socket_world import socket_world, tcp

from stretto.wire.base import Wire


class TestTcpKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, tcp(shared_memory=False)) as wires:
            yield wires


class TestTcpWithSharedMemoryKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, tcp()) as wires:
            yield wires
