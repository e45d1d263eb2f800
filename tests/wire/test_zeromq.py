from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from wire.contract import WireContract
from wire.socket_world import socket_world, zeromq

from stretto.wire.base import Wire


class TestZeroMQKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(shared_memory=False)) as wires:
            yield wires


class TestEncryptedZeroMQKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(encrypt=True, shared_memory=False)) as wires:
            yield wires


class TestZeroMQWithSharedMemoryKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(encrypt=True)) as wires:
            yield wires
