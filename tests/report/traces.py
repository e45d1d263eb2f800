"""Traces made by hand, in milliseconds: what the tests of the report are about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.observe.trace import About, TraceEvent, TraceFile, file_of
from stretto.plan.planned import PlannedStep
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.transfers import Transfer, TransferPlan

TRAINING, COMMUNICATION, FLIGHT = 1, 2, 3


def span(category: str, name: str, begin: float, end: float, *, tid: int = 0, **arguments: Any) -> TraceEvent:
    where = tid or {"reduce": COMMUNICATION, "send": FLIGHT, "receive": FLIGHT, "transfer": FLIGHT}.get(category, TRAINING)
    return TraceEvent("X", name, 0, where, begin * 1e3, (end - begin) * 1e3, category, arguments)


def trace(rank: int, spans: Sequence[TraceEvent], *, world_size: int = 2, host: str = "here", dropped: int = 0) -> TraceFile:
    about = About(
        rank=rank, world_size=world_size, run="r", host=host, num_spans=len(spans), num_dropped=dropped, clock_offset_ns=0,
        clock_uncertainty_ns=0,
    )  # fmt: skip
    return TraceFile(list(spans), about)


def step(
    begin: float,
    length: float,
    *,
    compute: float,
    network: Sequence[tuple[float, float]] = (),
    wait: float = 0.0,
    messages: int = 1,
    num_bytes: int = 1_000_000,
    peer: int = 1,
) -> list[TraceEvent]:
    """One step: forward a third, backward the rest, then a wait, then a moment of update at its end. `network`: when, in the
    step, something is sent (begin, end), each in so many messages one after the other."""
    third, end = compute / 3, begin + length
    made = [
        span("compute", "forward Net", begin, begin + third),
        span("compute", "backward Net", begin + third, begin + compute - 0.01),
        span("update", "update", end - 0.01, end),
    ]
    if wait:
        made.append(span("wait", "wait all_reduce ring", begin + compute, begin + compute + wait))
    for first, last in network:
        each = (last - first) / messages
        for number in range(messages):
            at = begin + first + number * each
            made.append(span("send", f"send to {peer}", at, at + each, peer=peer, bytes=num_bytes, collective="all_reduce(x)"))
    return made


def job(*ranks: dict[str, Any], steps: int = 4, length: float = 100.0) -> list[TraceFile]:
    """One file a rank, of equal steps; the last forward, which begins no step that is counted, is there too."""
    files = []
    for rank, options in enumerate(ranks):
        spans = [
            each for number in range(steps) for each in step(number * length, length, peer=(rank + 1) % len(ranks), **options)
        ]
        spans.append(span("compute", "forward Net", steps * length, steps * length + 1))
        files.append(trace(rank, spans, world_size=len(ranks)))
    return files


def write(folder: Path, files: Sequence[TraceFile]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        about = file.otherData
        file_of(folder, about.rank, about.server).write_bytes(msgspec.json.encode(file))
    return folder


def with_servers(held_s: float = 0.0, busy: float = 0.3, wait: float = 30.0) -> tuple[list[TraceFile], list[TraceFile]]:
    """Three workers, of which rank 2 holds the others back, and two servers, the second of which is busy for that share of
    400 ms. Steps of 100 ms: 60 of computation, then a wait, in which a push and a pull travel for 2 ms each."""
    workers, servers = [], []
    for rank in range(3):
        spans = []
        for number in range(4):
            begin = 100.0 * number
            spans += step(begin, 100.0, compute=60.0, wait=wait)
            for server in range(2):
                about = {"peer": 3 + server, "bytes": 1_000_000}
                spans.append(span("send", f"push to server {server}", begin + 60, begin + 62, **about))
                spans.append(span("receive", f"pull from server {server}", begin + 88, begin + 90, **about))
        spans.append(span("compute", "forward Net", 400, 401))
        file = trace(rank, spans, world_size=3)
        held = {} if rank == 2 or not held_s else {2: held_s, 1 - rank: held_s / 10}
        file.otherData = msgspec.structs.replace(file.otherData, staleness={0: 1, rank: 3}, held_s=held)
        workers.append(file)
    for server, share in enumerate((busy / 2, busy)):
        spans = []
        for number in range(41):
            at = 10.0 * number
            spans.append(span("reduce", "push of rank 0", at, at + 10 * share, peer=0))
            spans.append(span("update", "update", at + 1 * share, at + 5 * share, tid=COMMUNICATION))
            spans.append(TraceEvent("C", "queue", 0, 0, at * 1e3, args={"held": 0, "gathered": number % 3, "parked": 2}))
        spans.append(span("send", "copy to server 0", 0, 3, peer=3, bytes=500))
        file = trace(3 + server, spans, world_size=3, host="<i>far")
        file.otherData = msgspec.structs.replace(file.otherData, server=server)
        servers.append(file)
    return workers, servers


HOSTILE = (
    "</script><img src=x onerror=pwned=1>",
    "<img src=http://evil.example/x onerror=pwned=1>",
    "<!--<script>",
    "]]>\"'&amp;`${pwned=1}`",
    "line\u2028break\u2029and\u202eturned\x00\x1b[31m",
)


def plan_of(*names: str) -> PlannedStep:
    """A plan with one transfer for each name, and a profile by which they take 1 ms and 1 ns a byte."""
    profile = StepProfile(
        model="Net", digest="", world_size=2, steps=1, forward_s=0.0, backward_s=0.0, update_s=0.0, modules=(), parameters=(),
        cost=TransferCost(start_s=1e-3, per_byte_s=1e-9),
    )  # fmt: skip
    transfers = tuple(
        Transfer(parameters=(name, "last"), num_bytes=4_000_000, priority=number, part_bytes=1_000_000)
        for number, name in enumerate(names)
    )
    return PlannedStep(
        plan=TransferPlan(schedule=names[0], transfers=transfers, reason=names[-1]), profile=profile, predicted_s=0.11
    )
