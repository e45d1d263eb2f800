"""The trace of a server: a file beside those of the workers, on their time line.

A server that a worker has started is on that worker's host and has its clock, so what is known of the worker's clock against rank
0's holds for it too. One that was started apart compares its clock with theirs (`server_clock.py`), and writes on its own host.
"""

from __future__ import annotations

import logging
import platform

import msgspec

from stretto.observe import trace
from stretto.observe.trace import About, Tracer

log = logging.getLogger("stretto.parameter_server")


class ServerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written where, by which server."""

    folder: str
    server: int
    num_workers: int
    run: str | None = None  # None: it has to ask the workers, for this and for the clock
    clock_offset_ns: int = 0
    clock_uncertainty_ns: int = 0

    def write(self, tracer: Tracer) -> None:
        """At the end of the server. A disk that is full is no reason for it to fail."""
        assert self.run is not None
        about = About(
            rank=self.num_workers + self.server, world_size=self.num_workers, run=self.run, host=platform.node(),
            num_spans=len(tracer.spans), num_dropped=tracer.num_dropped, clock_offset_ns=self.clock_offset_ns,
            clock_uncertainty_ns=self.clock_uncertainty_ns, server=self.server,
        )  # fmt: skip
        try:
            trace.write(self.folder, tracer, about)
        except OSError as problem:
            log.error("server %d: its trace could not be written: %s", self.server, problem)
